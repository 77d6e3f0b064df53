"""Does what the README tells a new user to do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.live import running

ROOT = Path(__file__).resolve().parents[2]


def code() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return block


def test_the_code_is_ten_lines() -> None:
    assert len(code().strip().splitlines()) <= 11


@pytest.mark.slow
async def test_the_code_trains_an_adapter_and_chats_with_it(tmp_path: Path) -> None:
    async with running(tmp_path / ".marlaas") as (cluster, _):
        script = code().replace("http://127.0.0.1:8000", cluster.base_url)
        run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert any(line.startswith("Step 15/15: reward") for line in lines)
    assert lines[-2] == "The job has successfully completed"
    assert lines[-1].isdigit(), "an answer to a sum; which one is the model's business"
