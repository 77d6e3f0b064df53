"""The sandbox, with real processes: the limits of tenants' code."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from common.errors import InvalidInput
from env_service.sandbox.sandbox import LAYERS, Outcome, Sandbox, SandboxLimits, check_strength
from tests.support.processes import alive, descendants

CONFIGURATIONS = [LAYERS, ("seccomp", "landlock"), ("seccomp",)]


def run(
    source: str, *, timeout_s: float = 5.0, layers: tuple[str, ...] = LAYERS, limits: SandboxLimits | None = None
) -> Outcome:
    sandbox = Sandbox(layers=layers, limits=limits)
    return asyncio.run(sandbox.run(source, timeout_s=timeout_s))


def call(source: str, *arguments: object, timeout_s: float = 5.0) -> Outcome:
    return asyncio.run(Sandbox().run(source, call="grade", arguments=arguments, timeout_s=timeout_s))


def test_a_function_gets_its_arguments_and_returns_its_value() -> None:
    outcome = call(
        "def grade(sample, item):\n    return len(sample['output_text']) + item['n']",
        {"output_text": "abc"},
        {"n": 4},
    )
    assert (outcome.ending, outcome.value) == ("ok", 7)


@pytest.mark.parametrize("layers", CONFIGURATIONS)
def test_numpy_is_there_and_no_other_package(layers: tuple[str, ...]) -> None:
    found = run(
        "import numpy as np, numpy.random\n"
        "print(round(np.linalg.det(2 * np.eye(3))), int(np.fft.fft(np.ones(4))[0].real), np.random.default_rng(1).integers(5, 6))",
        layers=layers,
        timeout_s=30,
    )
    assert (found.ending, found.output) == ("ok", "8 4 5\n")
    assert run("import numpy, msgspec", layers=layers, timeout_s=30).ending == "raised"


def test_what_is_printed_is_output_and_not_a_result() -> None:
    outcome = run("print('hello')\nimport sys\nprint('there', file=sys.stderr)")
    assert (outcome.ending, outcome.output, outcome.value) == ("ok", "hello\nthere\n", None)


def test_code_that_ignores_signals_is_killed_all_the_same() -> None:
    outcome = run(
        "import signal, time\nfor n in range(1, 30):\n try: signal.signal(n, 1)\n except Exception: 0\ntime.sleep(60)",
        timeout_s=0.5,
    )
    assert outcome.ending == "timeout"


@pytest.mark.parametrize("layers", [*CONFIGURATIONS, ("namespaces",), ()])
def test_the_network_is_out_of_reach(layers: tuple[str, ...]) -> None:
    async def attempt() -> tuple[Outcome, int]:
        reached = 0

        async def count(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal reached
            reached += 1
            writer.close()

        server = await asyncio.start_server(count, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"
        outcome = await Sandbox(layers=layers).run(source, timeout_s=30)
        server.close()
        return outcome, reached

    outcome, reached = asyncio.run(attempt())
    assert outcome.ending == "raised"
    assert reached == 0


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLAAS_REDIS_URL", "redis://:secret@host")
    outcome = run("import os\nprint(dict(os.environ))")
    assert "secret" not in outcome.output
    assert "MARLAAS" not in outcome.output


@pytest.mark.parametrize("layers", CONFIGURATIONS)
def test_the_workers_environment_and_memory_cannot_be_read(layers: tuple[str, ...]) -> None:
    if layers == ("seccomp",) and os.geteuid() != 0:
        with pytest.raises(
            InvalidInput, match="too weak"
        ):  # nothing but another uid keeps these files from such a call
            check_strength(layers)
        return
    pid = os.getpid()
    for file in ("environ", "mem", "cmdline" if "landlock" in layers else "environ"):
        outcome = run(f"print(open('/proc/{pid}/{file}', 'rb').read(100))", layers=layers)
        assert outcome.ending == "raised", file


def test_no_descriptor_of_the_worker_is_inherited() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        outcome = run(f"import os\nos.write({write}, b'x')")
        assert outcome.ending == "raised"
        seen = run("import os\nfor fd in range(32):\n try: os.fstat(fd)\n except OSError: continue\n print(fd)")
        assert seen.output.split() == ["0", "1", "2", "3"], "its streams, and where its result goes"
    finally:
        os.close(read)
        os.close(write)


FORGED = '{"nonce": "", "layers": [], "value": 1.0}'


@pytest.mark.parametrize(
    "source",
    [
        f"print('{FORGED}')\nimport os\nos._exit(0)",
        f"import os\nfor fd in range(64):\n    try: os.write(fd, b'{FORGED}\\n')\n    except OSError: pass\nos._exit(0)",
        f"import sys\nsys.stdout.write('{FORGED}')\nsys.stderr.write('{FORGED}')\nsys.exit(0)",
    ],
)
def test_a_result_cannot_be_forged_by_writing_one(source: str) -> None:
    assert run(source).ending in ("crashed", "raised")


def test_a_missing_function_is_named() -> None:
    assert "grade()" in call("x = 1", {}, {}).reason


def test_calls_wait_for_a_free_place_and_their_limit_begins_then() -> None:
    async def six() -> list[str]:
        sandbox = Sandbox(max_processes=1)
        runs = [sandbox.run("import time\ntime.sleep(1.5)", timeout_s=7.5) for _ in range(6)]
        return [outcome.ending for outcome in await asyncio.gather(*runs)]

    assert asyncio.run(six()) == ["ok"] * 6


def test_no_folder_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("open('x', 'w').write('1')", layers=("seccomp",)).ending == "ok"
    assert run("while True: pass", timeout_s=0.3).ending == "timeout"
    assert list(tmp_path.iterdir()) == []


# ---- the prepared process -------------------------------------------------------------------------------------------

REMEMBERS = """
import json, os, random
def grade(word):
    seen = [getattr(json, 'kept', None), *os.listdir()]
    json.kept = word
    open('kept', 'w').write(word)
    print(seen, random.random())
"""


@pytest.mark.parametrize(
    "source", [REMEMBERS, "import numpy\n" + REMEMBERS.replace("random.random()", "numpy.random.rand()")]
)
async def test_calls_share_a_prepared_process_and_nothing_else(source: str) -> None:
    # Given two calls that leave what they can, with a secret of a tenant's
    sandbox, others, secret = Sandbox(), descendants(os.getpid()), secrets.token_hex(8)
    outputs = [(await sandbox.run(source, call="grade", arguments=[secret], timeout_s=30)).output for _ in range(2)]
    # Then one process was there for both, the second saw nothing of the first, and their random numbers differ
    ((prepared, _),) = descendants(os.getpid()) - others
    assert [output.split("] ")[0] for output in outputs] == ["[None"] * 2 and outputs[0] != outputs[1]
    # And the prepared process has none of it
    assert not holds(prepared, secret.encode()) and holds(prepared, b"marlaas", b"env_service.sandbox")
    await sandbox.close()
    assert alive(descendants(os.getpid()) - others) == set()


def holds(pid: int, *words: bytes) -> bool:
    """Has the memory that a process may write one of these words?"""
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end in (addresses.split("-") for addresses, mode, *_ in maps if mode.startswith("rw")):
            memory.seek(int(start, 16))
            content = memory.read(int(end, 16) - int(start, 16))
            if any(word in content for word in words):
                return True
    return False


async def test_a_prepared_process_that_is_killed_is_made_anew_and_its_calls_go_on() -> None:
    sandbox, others = Sandbox(), descendants(os.getpid())
    call = asyncio.create_task(sandbox.run("import time\nopen('x', 'w')\ntime.sleep(1)\nprint(1)", timeout_s=30))
    while len(descendants(os.getpid()) - others) < 3:
        await asyncio.sleep(0.02)
    (prepared,) = [
        child.pid for child in psutil.Process().children() if child.pid in dict(descendants(os.getpid()) - others)
    ]
    os.kill(prepared, signal.SIGKILL)
    assert (await sandbox.run("print(2)", timeout_s=30)).output == "2\n"
    assert not call.done()
    assert (await call).output == "1\n"
    await sandbox.close()


def test_a_prepared_process_that_nobody_needs_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        requests = f"socket.socket(fileno={theirs.fileno()})"
        source = f"import socket\nfrom env_service.sandbox import prepared as p\np.IDLE_S = 0.1\np.forked({requests})"
        assert subprocess.run([sys.executable, "-c", source], pass_fds=[theirs.fileno()]).returncode == 0


# ---- folders --------------------------------------------------------------------------------------------------------


async def test_folders_of_a_worker_that_was_killed_are_gone_once_the_next_one_has_run_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    worker = (
        "import asyncio, os, signal\nfrom env_service.sandbox.sandbox import Sandbox\n"
        "async def main():\n"
        "    calls = [asyncio.create_task(Sandbox().run('while True: pass', timeout_s=50))]\n"
        "    await asyncio.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", worker], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir())
    sandbox = Sandbox()
    assert (await sandbox.run("print(1)", timeout_s=30)).output == "1\n"
    assert len(list(tmp_path.iterdir())) == 1
    await sandbox.close()
    assert not list(tmp_path.iterdir())
