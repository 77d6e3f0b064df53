"""A logger that keeps a line of JSON for each row; the writer around it is the real one. `python -m tests.support.standin_logger x`.

It forgets what it is sent, once, where a file `forgets` is in its folder, and says so, as W&B's writer does.
With the key `hangs` it hangs.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from manager_service.export import writer


def open_runs(order: dict[str, Any]) -> writer.Write:
    if order["key"] == "hangs":
        time.sleep(600)
    return lambda job: write(Path(order["folder"]) / f"{job['job']}.jsonl", job)


def write(file: Path, job: dict[str, Any]) -> None:
    forgets = file.with_name("forgets")
    if job["final"] and forgets.exists():
        forgets.unlink()
        raise OSError("it forgot all")
    with file.open("a+b") as lines:
        lines.seek(0)
        whole = lines.read().rpartition(b"\n")
        lines.truncate(len(whole[0]) + len(whole[1]))  # the process may have died within a line
        held = json.loads(whole[0].splitlines()[-1])["sequence"] if whole[0] else 0
        for row in job["rows"]:
            if row["sequence"] > held:
                lines.write(json.dumps(row).encode() + b"\n")
                lines.flush()
        os.fsync(lines.fileno())


if __name__ == "__main__":
    writer.opened = lambda logger, order: open_runs(order)
    sys.exit(writer.main())
