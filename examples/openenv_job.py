"""`python -m examples.openenv_job`: `tiny` learns to answer an OpenEnv server in three turns, of which it knows little but the first.

The server is `examples/largest_env`, in the shape of `openenv init`; it runs in a Python environment of its own, for `openenv` has many
dependencies:

    python -m venv .openenv && .openenv/bin/pip install openenv
    .venv/bin/python -m examples.openenv_job --python .openenv/bin/python
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import httpx

from common.errors import MarlaasError
from examples.three_turns import HYPER, JobFailed, client_of, learn
from manager_service.launcher.supervisor import LocalCluster, choose_port
from marlaas_client.cli.output import say

DATA_DIR = Path(".marlaas/openenv")
START_S = 60.0


@contextlib.asynccontextmanager
async def serving(
    python: str,
    environment: Mapping[str, str] | None = None,
    *,
    module: str = "examples.largest_env.server.app",
    cwd: Path | None = None,
) -> AsyncGenerator[str]:
    """The URL of a server, while the block runs. Raises JobFailed if it does not start."""
    port = choose_port("127.0.0.1", 0)
    argv = [python, "-m", module, "--port", str(port)]
    server = await asyncio.create_subprocess_exec(*argv, env={**os.environ, **(environment or {})}, cwd=cwd)
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_it_answers(url, server)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.terminate()
        await server.wait()


async def _until_it_answers(url: str, server: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as http:
        while server.returncode is None:
            with contextlib.suppress(httpx.TransportError):
                (await http.get(f"{url}/schema")).raise_for_status()
                return
            await asyncio.sleep(0.1)
    raise JobFailed("the OpenEnv server did not start: give a --python with `pip install openenv`")


async def train(url: str, data_dir: Path = DATA_DIR, hyper: Mapping[str, Any] = HYPER) -> list[float]:
    """The mean reward of each step."""
    options: dict[str, Any] = {"data_dir": data_dir, "port": 0, "notify": say}
    settings = {"MARLAAS_OPENENV_SERVERS": f"largest={url}", "MARLAAS_ENV_SESSIONS": "256"}
    async with LocalCluster(**options, environment=settings) as cluster, client_of(cluster) as client:
        return await learn(client, environment={"name": "openenv", "args": {"server": "largest"}}, hyper=hyper)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable, help="one that has the package openenv")
    parser.add_argument("--url", help="of a server that runs")
    args = parser.parse_args()
    async with contextlib.AsyncExitStack() as stack:
        url = args.url or await stack.enter_async_context(serving(args.python))
        rewards = await train(url)
    say("mean reward of the steps: " + " ".join(f"{reward:.2f}" for reward in rewards))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except MarlaasError as error:
        sys.exit(f"error: {error}")
