"""`make tinker`: starts the service, and lets `tinker_loop.py` train on it through the Tinker protocol, as any user's own loop would."""

import asyncio
import os
import sys
from pathlib import Path

from common.errors import MarlaasError
from manager_service.cli.output import console
from manager_service.local.supervisor import LocalCluster

DATA_DIR = Path(".marlaas/tinker")
PYTHON = Path(".tinker/bin/python")
LOOP = Path(__file__).with_name("tinker_loop.py")


async def run(arguments: list[str]) -> int:
    """The loop's exit status."""
    say(f"starting Redis, the manager and the workers in {DATA_DIR} …")
    async with LocalCluster(data_dir=DATA_DIR, notify=say) as cluster:
        say(f"ready at {cluster.base_url}; the SDK trains an adapter of `tiny`:\n")
        own = {"TINKER_BASE_URL": cluster.base_url, "TINKER_API_KEY": f"tml-{cluster.api_key}", "TINKER_TELEMETRY": "0"}
        process = await asyncio.create_subprocess_exec(PYTHON, LOOP, *arguments, env={**os.environ, **own})
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()


def say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def main() -> None:
    """Exit status: the loop's; 130 after Ctrl-C."""
    try:
        sys.exit(asyncio.run(run(sys.argv[1:])))
    except KeyboardInterrupt:
        sys.exit(130)
    except MarlaasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
