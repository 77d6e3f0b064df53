"""Logs of services."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_service_works_on_while_its_log_cannot_be_written() -> None:
    code = "import structlog; from common import log; log.configure('x'); structlog.get_logger().warning('full'); print('works')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=full, check=False)
    assert done.stdout == b"works\n"
