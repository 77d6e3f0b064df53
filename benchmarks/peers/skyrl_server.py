"""Starts SkyRL's Tinker server on its JAX backend. Imports only the standard library, since SkyRL's own Python imports it too."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 180.0


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int


@contextmanager
def serving(
    python: Path,
    folder: Path,
    model: Path,
    *,
    jobs: int,
    rows: int,
    rank: int,
    environment: Mapping[str, str] = os.environ,
) -> Generator[Server]:
    """Starts the server with the interpreter of SkyRL's virtual environment; `folder` takes what it writes.

    `rows`: sequences of one job's step. As SkyRL's documentation has it, that many are sampled and trained at a time, so that shapes do
    not change with who else is there: XLA compiles each of them again, for seconds. It starts its engine by `uv run`; both use the
    same environment here.
    """
    uv, port = python.parent / "uv", free_port()
    backend = {
        "max_lora_adapters": jobs + 1,  # slot 0 is the base model
        "max_lora_rank": rank,
        "sample_max_num_sequences": rows,
        "train_micro_batch_size": rows,
    }
    command = [
        *(str(uv), "run", "--no-project", "--offline", "--python", str(python), "-m", "skyrl.tinker.api"),
        *("--base-model", str(model), "--backend", "jax", "--backend-config", json.dumps(backend)),
        *("--host", "127.0.0.1", "--port", str(port), "--checkpoints-base", str(folder / "skyrl")),
        *("--database-url", f"sqlite:///{folder / 'skyrl.db'}"),
    ]
    found = {**environment, "PATH": f"{uv.parent}:{environment['PATH']}"}
    log = folder / "skyrl.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=found, stdout=output, stderr=output, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, server, log)
        yield Server(url, server.pid)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Raises RuntimeError, with the end of its log, if the server ends or does not answer."""
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    end = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"SkyRL's server did not come up (exit status {server.poll()}): {end}")
