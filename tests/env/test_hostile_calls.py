"""A tenant's code tries to hold a place, to outlive its limit and to reach what is not its own; with real processes.

Each test runs with namespaces, where the machine allows them, and without.
"""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.helpers import calls
from common.bus.bus import Bus
from common.errors import InvalidInput, Unavailable
from env_service import work
from env_service.__main__ import build
from env_service.sandbox import sandbox
from env_service.sandbox.calls import filter_program
from env_service.sandbox.sandbox import LAYERS, Outcome, Sandbox, SandboxLimits, check_strength
from env_service.settings import EnvSettings
from tests.support.processes import Process, alive, descendants, left_behind

WITHOUT_NAMESPACES = ("landlock", "seccomp")
LIBRARY_IS_OPEN = all(parent.stat().st_mode & 1 for parent in Path(os.__file__).resolve().parents)
EITHER = pytest.mark.parametrize("layers", [LAYERS, WITHOUT_NAMESPACES], ids=["namespaces", "no namespaces"])

ESCAPE = """
import ctypes, os, time
libc = ctypes.CDLL(None)
for attempt in (lambda: libc.prctl(1, 0, 0, 0, 0), os.setsid, lambda: os.setpgid(0, 0)):
    try: attempt()
    except OSError: pass
while True: time.sleep(1)
"""


def run(source: str, *, layers: tuple[str, ...], timeout_s: float = 10.0) -> Outcome:
    return asyncio.run(Sandbox(layers=layers).run(source, timeout_s=timeout_s))


# --------------------------------------------------------------------------------------------------- its own end


@pytest.mark.parametrize("layers", [LAYERS, WITHOUT_NAMESPACES, ("namespaces",)], ids=str)
def test_a_call_that_leaves_its_session_frees_its_place_in_time_and_leaves_nothing(layers: tuple[str, ...]) -> None:
    async def attempt() -> tuple[Outcome, set[Process], Outcome]:
        sandbox = Sandbox(max_processes=1, layers=layers)
        async with asyncio.timeout(60):
            others = descendants(os.getpid())
            call = asyncio.create_task(sandbox.run(ESCAPE, timeout_s=1.0))
            seen = set[Process]()
            while not call.done():
                seen |= descendants(os.getpid()) - others
                await asyncio.sleep(0.05)
            return await call, seen, await sandbox.run("print(1)", timeout_s=30)

    held = asyncio.run(Sandbox(layers=layers).probe())
    if not {"processes", "seccomp"} & set(held):  # a machine without namespaces: nothing would end it, so it is refused
        with pytest.raises(InvalidInput, match="too weak"):
            check_strength(held)
        return
    outcome, seen, following = asyncio.run(attempt())
    assert (outcome.ending, following.output) == ("timeout", "1\n")
    assert len(seen) >= 2
    assert alive(seen) == set()


@EITHER
def test_nothing_of_a_call_lives_on_after_its_worker_was_killed(layers: tuple[str, ...]) -> None:
    worker = (
        "import asyncio\nfrom env_service.sandbox.sandbox import Sandbox\n"
        f"asyncio.run(Sandbox(layers={layers!r}).run({ESCAPE!r}, timeout_s=50))"
    )
    assert left_behind(worker, num=2) == set()


SEEN = """
import _thread, os, time
_thread.start_new_thread(time.sleep, (60,))
print(os.listdir(), flush=True)
open('mine', 'w').close()
time.sleep({seconds})
"""


@EITHER
@pytest.mark.parametrize("generation", [0, 1], ids=["its supervisor", "the code"])
async def test_a_call_that_is_killed_is_made_once_more_from_the_beginning(
    generation: int, layers: tuple[str, ...]
) -> None:
    others, sandbox = descendants(os.getpid()), Sandbox(layers=layers)

    async def outcome(*, seconds: float, kills: int) -> Outcome:
        call = asyncio.create_task(sandbox.run(SEEN.format(seconds=seconds), timeout_s=40))
        for _ in range(kills):
            await kill_when_it_runs(generation)
        return await call

    repeated = await outcome(seconds=0.3, kills=1)
    assert (repeated.ending, repeated.output) == ("ok", "[]\n")
    with pytest.raises(Unavailable, match="killed from outside"):
        await outcome(seconds=30, kills=2)
    await sandbox.close()
    assert alive(descendants(os.getpid()) - others) == set()


async def kill_when_it_runs(generation: int) -> None:
    """Kills a call's supervisor, or the call, once its code has made a thread, and waits for the call's end."""
    while not (found := [one for one in calls([os.getpid()]) if one.num_threads() > 1]):
        await asyncio.sleep(0.02)
    (call,) = found
    [call.parents()[0], call][generation].kill()
    while call.is_running():
        await asyncio.sleep(0.02)


@EITHER
def test_a_call_cannot_pretend_that_it_was_killed(layers: tuple[str, ...]) -> None:
    outcome = run("import os\nos._exit(128 + 9)", layers=layers, timeout_s=20)
    assert (outcome.ending, outcome.killed) == ("crashed", False) and "status 127" in outcome.reason


@pytest.mark.parametrize(("num", "layers"), [(70_000, LAYERS), (1_000_000, WITHOUT_NAMESPACES)], ids=str)
async def test_a_result_that_is_too_long_is_the_calls_own_failure(num: int, layers: tuple[str, ...]) -> None:
    outcome = await Sandbox(layers=layers).run(f"def grade(): return 'x' * {num}", call="grade", timeout_s=30)
    assert (outcome.ending, outcome.killed) == ("result", False)
    assert outcome.reason == "returned more than 65536 bytes"


@EITHER
async def test_a_result_that_is_as_long_as_it_may_be_arrives(layers: tuple[str, ...]) -> None:
    outcome = await Sandbox(layers=layers).run("def grade(): return 'x' * 65_000", call="grade", timeout_s=30)
    assert (outcome.ending, outcome.value) == ("ok", "x" * 65_000)


SELF_INFLICTED = {
    "printed": ("import os\nwhile True: os.write(1, bytes(2 ** 16))", "printed more than 65536 bytes"),
    "written beside the result": (
        "import os\nwhile True: os.write(3, bytes(2 ** 16))",
        "returned more than 65536 bytes",
    ),
    "time": ("import time\nwhile True: time.sleep(1)", "took longer than 1 seconds"),
    "memory": ("x = 'x'\nwhile True: x += x", "line 2: MemoryError: "),
    "a deep recursion in C": ("x = 0\nfor _ in range(10 ** 5): x = [x]\nrepr(x)", "line 3: RecursionError"),
}


@EITHER
@pytest.mark.parametrize("what", SELF_INFLICTED)
def test_what_the_sandbox_ends_was_not_killed_from_outside(what: str, layers: tuple[str, ...]) -> None:
    source, reason = SELF_INFLICTED[what]
    outcome = run(source, layers=layers, timeout_s=1.0 if what == "time" else 20.0)
    assert not outcome.killed and outcome.reason.startswith(reason)


@EITHER
async def test_a_call_that_is_given_up_leaves_nothing_and_is_not_made_again(layers: tuple[str, ...]) -> None:
    others, sandbox = descendants(os.getpid()), Sandbox(max_processes=1, layers=layers)
    call = asyncio.create_task(sandbox.run(SEEN.format(seconds=30), timeout_s=40))
    while not [one for one in calls([os.getpid()]) if one.num_threads() > 1]:
        await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await sandbox.run("print(1)", timeout_s=20)).output == "1\n"
    await sandbox.close()
    assert alive(descendants(os.getpid()) - others) == set()


@EITHER
def test_a_call_that_closes_its_streams_and_goes_on_is_ended(layers: tuple[str, ...]) -> None:
    outcome = run("import os, time\nos.closerange(0, 32)\nwhile True: time.sleep(1)", layers=layers, timeout_s=1)
    assert outcome.ending == "timeout"


@EITHER
def test_a_call_beyond_its_processor_seconds_has_that_reason_and_is_not_made_again(
    layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_seconds: float) -> int:
        return 0

    monkeypatch.setattr(sandbox, "math", SimpleNamespace(ceil=none))  # 1 processor second
    outcome = run(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", layers=layers, timeout_s=30
    )
    assert (outcome.ending, outcome.killed) == ("crashed", False)
    assert outcome.reason == "used more CPU time than allowed"


# ------------------------------------------------------------------------------------------- calls to the kernel

PRELUDE = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
other = os.getppid() or 1
def check(status):
    if status < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""

REFUSED = {
    "a session": "os.setsid()",
    "a group": "os.setpgid(0, 0)",
    "its parent's death": "check(libc.prctl(1, 0, 0, 0, 0))",
    "being read": "check(libc.prctl(4, 1, 0, 0, 0))",
    "shared memory": "check(libc.shmget(0, 2 ** 20, 0o1600))",
    "semaphores": "check(libc.semget(0, 1, 0o1600))",
    "messages": "check(libc.msgget(0, 0o1600))",
    "a file in memory": "os.memfd_create('x')",
    "a file in secret memory": "check(libc.syscall(447, 0))",
    "large pipes": "check(libc.fcntl(os.pipe()[0], 1031, 2 ** 20))",
    "the signal of a file": "check(libc.fcntl(0, 10, 9))",
    "the owner of a file": "check(libc.fcntl(0, 8, other))",
    "the owner of a file, by ioctl": "check(libc.ioctl(0, 0x8901, other.to_bytes(4, 'little')))",
    "limits of others": "resource.prlimit(other, resource.RLIMIT_NOFILE)",
    "limits of its own": "check(libc.setrlimit(0, ctypes.create_string_buffer(16)))",
    "priorities": "os.setpriority(os.PRIO_PROCESS, other, 19)",
    "processors": "os.sched_setaffinity(other, {0})",
    "a signal": "os.kill(other, 0)",
    "a signal by descriptor": "os.pidfd_open(other)",
    "tracing": "check(libc.ptrace(16, other, 0, 0))",
    "memory of others": "check(libc.process_vm_readv(other, 0, 0, 0, 0, 0))",
    "a process": "os.fork()",
    "another program": "os.execv('/bin/true', ['true'])",
    "namespaces": "check(libc.unshare(0x10000000))",
    "a socket": "check(libc.socket(2, 1, 0))",
    "a pair of sockets": "check(libc.socketpair(1, 1, 0, ctypes.create_string_buffer(8)))",
    "keys": "check(libc.syscall(250 if os.uname().machine == 'x86_64' else 219, 0, 0, 0))",
    "watching files": "check(libc.inotify_init1(0))",
    "faults of pages": "check(libc.syscall(323 if os.uname().machine == 'x86_64' else 282, 0))",
}


TRIED_ONE_BY_ONE = """
for what, source in {refused!r}.items():
    try: exec(source)
    except (OSError, ValueError, AttributeError) as error: print(what, '|', type(error).__name__, error, flush=True)
    else: print(what, '| done', flush=True)
"""


@EITHER
def test_what_no_grader_needs_is_refused(layers: tuple[str, ...]) -> None:
    outcome = run(PRELUDE + TRIED_ONE_BY_ONE.format(refused=REFUSED), layers=layers)
    assert outcome.ending == "ok", outcome.reason
    lines = outcome.output.splitlines()
    assert [line.partition(" | ")[0] for line in lines] == [*REFUSED]
    assert [line for line in lines if not ("PermissionError" in line or "not implemented" in line)] == []


ORDINARY = """
import ast, base64, bisect, collections, contextlib, copy, csv, dataclasses, datetime, decimal, difflib, enum, fractions
import functools, hashlib, heapq, html, io, itertools, json, logging, math, operator, os, pathlib, queue, random, re
import shutil, signal, sqlite3, statistics, string, sys, tempfile, textwrap, time, traceback, typing, unicodedata, zlib
from concurrent.futures import ThreadPoolExecutor

assert json.loads(json.dumps({"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}
assert re.fullmatch(r"(\\d+)-(\\d+)", "12-34").groups() == ("12", "34")
assert decimal.Decimal("0.1") + decimal.Decimal("0.2") == decimal.Decimal("0.3")
assert fractions.Fraction(1, 3) * 3 == 1 and math.isclose(statistics.stdev([1, 2, 3]), 1.0)
assert random.Random(1).random() == random.Random(1).random() and len(os.urandom(8)) == 8
assert datetime.datetime.now(datetime.timezone.utc).year > 2000 and time.monotonic() > 0
assert hashlib.sha256(zlib.decompress(zlib.compress(b"x"))).hexdigest().startswith("2d71")
assert sqlite3.connect(":memory:").execute("select 1 + 1").fetchone() == (2,)
with tempfile.TemporaryFile() as file:
    file.write(b"x" * 100_000)
    file.seek(0)
    assert len(file.read()) == 100_000
pathlib.Path("a").write_text("b")
os.rename("a", "c")
assert os.listdir() == ["c"] and os.stat("c").st_size == 1 and os.path.realpath("c").endswith("c")
os.remove("c")
with contextlib.suppress(TimeoutError):
    def late(*_): raise TimeoutError
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    while True: pass
"""
THREADS = """
from concurrent.futures import ThreadPoolExecutor
import queue, threading
with ThreadPoolExecutor(3) as pool:
    assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]
"""


@EITHER
def test_ordinary_code_runs(layers: tuple[str, ...]) -> None:
    if os.geteuid() == 0 and layers == WITHOUT_NAMESPACES and not LIBRARY_IS_OPEN:
        # calls have a uid of their own here, which may not read this Python's library
        assert "No module named" in run(ORDINARY, layers=layers).reason
        return
    assert run(ORDINARY + "print('done')", layers=layers).output == "done\n", run(ORDINARY, layers=layers).reason


def test_threads_run() -> None:
    outcome = run(THREADS, layers=LAYERS)
    assert outcome.ending == "ok", outcome.reason


# ------------------------------------------------------------------------------------------------- files, memory


@EITHER
@pytest.mark.parametrize("make", ["open(str(n), 'w').close()", "os.mkdir(str(n))"])
def test_a_working_folder_holds_a_bounded_number_of_files_and_folders(make: str, layers: tuple[str, ...]) -> None:
    outcome = run(f"import os\nfor n in range(10 ** 6): {make}", layers=layers)
    refusals = ("No space left", "wrote more into its folder", "PermissionError")
    assert any(refusal in outcome.reason for refusal in refusals)


@EITHER
def test_a_working_folder_holds_a_bounded_number_of_bytes(layers: tuple[str, ...]) -> None:
    source = "for n in range(10 ** 4):\n    with open(str(n), 'wb') as file: file.write(b'x' * 2 ** 22)"
    outcome = run(source, layers=layers)
    assert "No space left" in outcome.reason or "wrote more into its folder" in outcome.reason


DELETED = """
fd = os.open('a', os.O_CREAT | os.O_RDWR)
os.unlink('a')
for _ in range(4): os.write(fd, bytes(2 ** 20))
"""
MAPPED = "libc.mmap(None, 4096, 3, 1, fd, 0)\nos.close(fd)"
USES = {
    "open": f"for _ in range(20): exec({DELETED!r})\ntime.sleep(60)",
    "mapped": f"for _ in range(20): exec({DELETED + MAPPED!r})\ntime.sleep(60)",
}
USES["mapped while the first thread has ended"] = (
    f"import _thread\n_thread.start_new_thread(exec, ({USES['mapped']!r}, globals()))\nlibc.pthread_exit(0)"
)


@pytest.mark.parametrize("how", USES)
def test_what_a_call_deletes_and_still_uses_counts(how: str) -> None:
    outcome = run(f"{PRELUDE}import time\n{USES[how]}", layers=WITHOUT_NAMESPACES, timeout_s=5)
    assert "wrote more into its folder" in outcome.reason


@EITHER
def test_temporary_files_are_no_more_than_they_hold(layers: tuple[str, ...]) -> None:
    source = PRELUDE + "for _ in range(100):\n" + DELETED.replace("\n", "\n    ") + "os.close(fd)\nprint(1)"
    assert run(source, layers=layers).output == "1\n"


async def test_a_full_disk_is_no_failure_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a disk without the room that a call may take
    calls = Sandbox(layers=WITHOUT_NAMESPACES)
    monkeypatch.setattr(sandbox, "WORK_BYTES", 1 << 60)
    # Then a call that fails is made again later
    with pytest.raises(Unavailable, match="disk for temporary files is full"):
        await calls.run("open('t', 'w').write(1)", timeout_s=30)
    # And one that does not fail stands, as does one that took too long
    assert (await calls.run("open('t', 'w')", timeout_s=30)).ending == "ok"
    assert (await calls.run("while True: pass", timeout_s=0.5)).ending == "timeout"


async def test_a_call_that_gets_no_folder_is_made_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(Unavailable, match="disk for temporary files: No such file"):
        await Sandbox().run("", timeout_s=30)


@EITHER
def test_a_file_of_the_worker_can_be_neither_cut_nor_changed(layers: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("before")
    target.chmod(0o666)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    before = target.stat()
    for change in (
        "open({0!r}, os.O_WRONLY)",
        "truncate({0!r}, 0)",
        "chmod({0!r}, 0)",
        "utime({0!r})",
        "rename({0!r}, 'x')",
        "link({0!r}, 'x')",
    ):
        assert run("import os\nos." + change.format(str(target)), layers=layers).ending == "raised", change
    after = target.stat()
    assert (target.read_text(), after.st_mode, after.st_mtime) == ("before", before.st_mode, before.st_mtime)


@EITHER
def test_memory_that_is_shared_counts(layers: tuple[str, ...]) -> None:
    source = PRELUDE + "while True:\n    if libc.mmap(0, 2 ** 24, 3, 0x21, -1, 0) == -1: check(-1)"
    limits = SandboxLimits(memory_bytes=256 * 2**20)
    outcome = asyncio.run(Sandbox(layers=layers, limits=limits).run(source, timeout_s=10))
    assert "Cannot allocate memory" in outcome.reason


# ------------------------------------------------------------------------------------------------------ strength


def test_a_machine_without_the_layers_that_operators_are_told_of_is_refused() -> None:
    for layers in ((), ("network", "processes", "files"), ("seccomp",), ("landlock",), ("seccomp", "network", "uid")):
        with pytest.raises(InvalidInput, match="MARLAAS_WEAK_SANDBOX=1"):
            check_strength(layers)
    for layers in (("landlock", "seccomp"), ("files", "seccomp"), ("files", "landlock", "seccomp")):
        check_strength(layers)


async def test_an_env_worker_starts_with_a_weak_sandbox_only_if_the_operator_says_so(
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(machine: str, *, own_files: bool) -> bytes:
        return filter_program("riscv64", own_files=own_files)

    monkeypatch.setattr("env_service.sandbox.sandbox.filter_program", unknown)
    parts: Any = SimpleNamespace(cell=bus.cell, bus=bus, worker="env-1")
    with pytest.raises(InvalidInput, match="MARLAAS_WEAK_SANDBOX=1"):
        await build(EnvSettings(), parts)
    monkeypatch.setenv("MARLAAS_WEAK_SANDBOX", "1")
    service = await build(EnvSettings(), parts)
    for close in service.close:
        await close()


@EITHER
def test_this_machine_is_strong_enough(layers: tuple[str, ...]) -> None:
    check_strength(asyncio.run(Sandbox(layers=layers).probe()))


# ------------------------------------------------------------------------------------------------------- tenants


def test_a_tenants_long_calls_do_not_hold_up_another_tenants_short_one() -> None:
    async def attempt() -> list[str]:
        sandbox, ended = Sandbox(max_processes=2), list[str]()

        async def call(tenant: str, source: str) -> None:
            work.begin(lambda: None, tenant)
            await sandbox.run(source, timeout_s=30)
            ended.append(tenant)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(call("hog", "import time\ntime.sleep(1)"))
            await asyncio.sleep(0.2)
            tasks.create_task(call("victim", ""))
        return ended

    ended = asyncio.run(attempt())
    assert ended.index("victim") <= 2
