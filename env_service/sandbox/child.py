"""The inside of the sandbox, in a process of its own for each call, which `prepared.py` has forked.

    child (the supervisor) ─ forks ─► child (shuts itself in, runs the tenant's source) ─ result ─► sandbox

Reads one job as JSON, and writes one line of JSON to where it came from. Descriptors 1 and 2 lead elsewhere before the
tenant's code runs, so a print cannot look like a result. The supervisor runs no tenant's code: it waits for the other's
end, of which it tells the worker, and kills it when the worker, or the kernel once that is dead, closes their connection.

    stage            what it needs                             without it
    namespaces       root, or unprivileged user namespaces     seccomp keeps the network and other processes away
    other uid        root                                      the worker's own uid
    landlock         Linux 5.13                                files are as open as their modes say
    seccomp          Linux on x86-64 or arm64                  calls are as open as to any process
    limits           any Unix                                  nothing runs
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

Libc = ctypes.CDLL
Telling = Callable[..., None]

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 1, 2, 4, 8, 32, 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME, ST_RELATIME = 4096, 16384, 1 << 18, 1 << 21, 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22

FIRST_UID = 1_000_000_000
"""Each call runs under this uid plus its process id, which no other call has: they cannot signal each other."""
NOBODY = 65534
WORK_BYTES, WORK_FILES = 16 * 1024 * 1024, 4096
"""The most that the working folder holds."""
LOOK_EVERY_S = 0.02
"""Seconds between two looks into a working folder that is no file system of its own."""


def main(data: int, output: int, control: int, folder: int) -> None:
    """`data`: has the job and takes the result. `control`: takes the status, and ends when the call shall end. `folder`: to work in."""
    os.setsid()
    os.fchdir(folder)
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    os.close(folder)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    with os.fdopen(data, "rb", closefd=False) as file:
        job = json.loads(file.read())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as Python's own generator does after a fork
    try:
        layers = shut_in(job, set(job["layers"]), control)
    except BaseException:
        with contextlib.suppress(OSError):  # the supervisor tells of the code's process
            os.write(control, b"1")
        raise
    run(job, make_reporter(data, job["nonce"], layers))


# ------------------------------------------------------------------------------------------------- tenant's code


def make_reporter(result_fd: int, nonce: str, layers: set[str]) -> Telling:
    """A function that writes the result. Only its closure has the nonce: bytes that the tenant's code writes to the
    descriptor are no result without it."""

    def write(**fields: object) -> None:
        text = json.dumps({"nonce": nonce, "layers": sorted(layers), **fields})
        data = text.encode() + b"\n"
        while data:
            data = data[os.write(result_fd, data) :]

    return write


def run(job: dict[str, Any], write: Telling) -> None:
    """Executes the source, calls the function `call` if named, reports, and ends the process."""
    source, call, arguments = job["source"], job["call"], job["arguments"]
    namespace: dict[str, Any] = {"__name__": "__main__" if call is None else "tenant", "__builtins__": __builtins__}
    try:
        if job["parsed"] is not None:
            name, text = job["parsed"]
            arguments[0][name] = parsed(arguments[0][text])
        exec(compile(source, "<source>", "exec"), namespace)
        value = None
        if call is not None:
            if not callable(namespace.get(call)):
                raise NameError(f"the source does not define {call}()")
            value = namespace[call](*arguments)
        flush()
        write(value=check_json(value, call))
    except SystemExit as stop:
        flush()
        write(error=f"SystemExit: {stop.code}", raised="SystemExit")
    except BaseException as error:
        flush()
        write(error=describe(error), raised=type(error).__name__)
    os._exit(0)


def parsed(text: str) -> object:
    """Returns what a JSON text says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def check_json(value: object, call: str | None) -> object:
    """A value for JSON: nan, inf and huge numbers become text, so that the parent can say what it got."""
    if type(value) is int and value.bit_length() > 63:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float, str):
        return value if type(value) is not float or value - value == 0 else repr(value)
    raise TypeError(f"{call}() returned {type(value).__name__}, not a number")


def describe(error: BaseException) -> str:
    """One line that says what was raised, and in which line."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<source>":
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line, error = error.lineno, SyntaxError(error.msg)
    text = type(error).__name__
    with contextlib.suppress(Exception):  # the error is the tenant's own: its text may raise anything
        text = f"{text}: {error}"
    return (text if line is None else f"line {line}: {text}").replace("\n", " ")[:500]


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the tenant's code may have put anything there
            stream.flush()


# ------------------------------------------------------------------------------------------------------ shut in


def shut_in(job: dict[str, Any], wanted: set[str], control: int) -> set[str]:
    """Gives up all rights, layer by layer; returns the layers that hold. Ends with an error if it would stay root."""
    root, uid = os.geteuid() == 0, FIRST_UID + os.getpid()
    os.umask(0o022)
    libc = ctypes.CDLL(None, use_errno=True)
    layers: set[str] = set()
    # The order matters. Namespaces and mounts need root, or a user namespace entered first. The fork comes after them, since the first
    # child in a process namespace is its init, with which the kernel ends the others; and before the limits, which must not bind the
    # supervisor. Root is left when nothing needs it. Landlock and seccomp, which refuse most calls here, are last.
    if sys.platform == "linux":
        kill_first()
        if "namespaces" in wanted:
            layers |= enter_namespaces(libc, os.getcwd(), uid)
    fork_supervised(libc, control, job["limits"], own_files="files" in layers)
    set_limits(job["limits"])
    if root:
        become(uid)
        layers.add("uid")
    if sys.platform == "linux":
        program = job["own_files_filter" if "files" in layers else "filter"]
        layers |= give_up_rights(libc, wanted, bytes.fromhex(program), own_files="files" in layers)
    return layers


def kill_first() -> None:
    """Has the kernel kill this process, and not the worker, where memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def give_up_rights(libc: Libc, wanted: set[str], program: bytes, *, own_files: bool) -> set[str]:
    """Gives up the rights that need no privilege to give up. Returns the layers that hold.

    Without files of its own its supervisor sees what it has open; other calls, which may have its uid, cannot read /proc.
    """
    layers: set[str] = set()
    # An unprivileged user namespace gave all capabilities: code could change its mounts and its network.
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    libc.capset(header, ctypes.create_string_buffer(24))
    # The kernel demands this of a process that is not root, for landlock's rules and a seccomp filter.
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # After `become`: a change of uid clears it. Before the filter, which refuses most of these calls.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if "landlock" in wanted and confine_files(libc, os.getcwd()):
        layers.add("landlock")
        libc.prctl(PR_SET_DUMPABLE, int(not own_files), 0, 0, 0)
    if "seccomp" in wanted and program and filter_calls(libc, program):
        layers.add("seccomp")
    return layers


def set_limits(limits: dict[str, int]) -> None:
    cpu, memory = limits["cpu_s"], limits["memory_bytes"]
    pairs = (
        (resource.RLIMIT_CPU, cpu),  # holds even if the supervisor is stopped
        (resource.RLIMIT_AS, memory),  # the address space: a limit of memory that needs no cgroup
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),  # bounds a file between two looks of the supervisor
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 8),  # threads count too
        (resource.RLIMIT_CORE, 0),  # no copy of a crashed call on the disk
    )
    for name, value in pairs:
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(name, (value, value))
        except (OSError, ValueError):
            if sys.platform == "linux":
                raise


def become(uid: int) -> None:
    """Leaves root for a uid that nobody has, or for nobody. Raises OSError if root cannot be left."""
    os.setgroups([])
    for candidate in (uid, NOBODY):
        try:
            if os.getcwd() != "/work":
                os.chown(".", candidate, candidate)
            os.setresgid(candidate, candidate, candidate)
            os.setresuid(candidate, candidate, candidate)
            return
        except OSError:
            continue
    raise OSError("cannot leave root")


# --------------------------------------------------------------------------------------------------- supervisor


def fork_supervised(libc: Libc, control: int, limits: dict[str, int], *, own_files: bool) -> None:
    """Goes on in a child; the parent stays as its supervisor, and never returns."""
    child = os.fork()
    if child:
        if sys.platform == "linux":
            libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        supervise(child, control, limits, own_files=own_files)
    os.close(control)


def supervise(child: int, control: int, limits: dict[str, int], *, own_files: bool) -> NoReturn:
    """Tells of the child's end, or, beyond its processor seconds, of one killed for memory. Kills it when `control` ends, or
    when its working folder holds too much. Statuses above 127 tell of signals, which no child can feign."""
    status = 0
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    while True:
        ended, code, used = os.wait4(child, 0 if status else os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(code)
            if code == -signal.SIGKILL and used.ru_utime + used.ru_stime >= limits["cpu_s"] - 1:
                code = -signal.SIGXCPU
            status = status or (min(code, 127) if code >= 0 else 128 - code)
            with contextlib.suppress(OSError):  # the worker is dead
                os.write(control, str(status).encode())
            os._exit(0)
        ready, _, _ = select.select([control, wake], [], [], None if own_files else LOOK_EVERY_S)
        if wake in ready:
            os.read(wake, 64)
        full = not own_files and is_too_full(child, limits["file_bytes"])
        if full or control in ready:
            os.kill(child, signal.SIGKILL)
            status = 128 + (signal.SIGXFSZ if full else signal.SIGKILL)


def is_too_full(child: int, file_bytes: int) -> bool:
    """Are the files of the flat working folder, and those deleted but in use, too many or too large?"""
    sizes = deleted_files(child, file_bytes)
    for num, name in enumerate(os.listdir()):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(name)
            sizes[status.st_ino] = status.st_blocks * 512
        if num > WORK_FILES:
            return True
    return len(sizes) > WORK_FILES or sum(sizes.values()) > WORK_BYTES


def deleted_files(child: int, file_bytes: int) -> dict[int, int]:
    """Inode -> bytes of each deleted file of the working folder that the child still has open or mapped.

    One mapped but not open counts as the largest possible file where only root could measure it. Seeing them takes the
    child's uid, or root's rights.
    """
    sizes: dict[int, int] = {}
    threads, here = inside(f"/proc/{child}/task"), os.getcwd() + "/"
    for link in [link for thread in threads for link in inside(f"{thread}/fd")]:  # a thread may have a table of its own
        with contextlib.suppress(OSError):
            status = os.stat(link)
            if status.st_nlink == 0 and os.readlink(link).startswith(here):
                sizes[status.st_ino] = status.st_blocks * 512
    for line in next(filter(None, map(mappings, threads)), []):  # the first thread may have ended
        if f" {here}" in line and line.endswith(" (deleted)"):
            addresses, _, _, _, inode, _ = line.split(maxsplit=5)
            if int(inode) not in sizes:
                sizes[int(inode)] = file_bytes
                with contextlib.suppress(OSError):
                    sizes[int(inode)] = os.stat(f"/proc/{child}/map_files/{addresses}").st_blocks * 512
    return sizes


def inside(folder: str) -> list[str]:
    """Paths of a folder's entries; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    return []


def mappings(thread: str) -> list[str]:
    with contextlib.suppress(OSError), open(f"{thread}/maps", errors="replace") as file:
        return file.read().splitlines()
    return []


# --------------------------------------------------------------------------------------------------- namespaces


def enter_namespaces(libc: Libc, directory: str, uid: int) -> set[str]:
    """Enters a network without interfaces, process ids of its own, and a file system with Python's library and an empty
    folder. Returns the layers that the kernel allows."""
    layers: set[str] = set()
    if os.geteuid() != 0:
        own_uid, own_gid = os.getuid(), os.getgid()
        if libc.unshare(CLONE_NEWUSER) != 0:
            return layers
        map_self(own_uid, own_gid)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS) == 0:
        layers.add("network")
    if libc.unshare(CLONE_NEWPID) == 0:  # the next child is its first process: the kernel ends the others with it
        layers.add("processes")
    if libc.unshare(CLONE_NEWNS) == 0:
        try:
            change_root(libc, directory, uid)
            layers.add("files")
        except OSError:
            os.chdir(directory)
    return layers


def map_self(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def change_root(libc: Libc, directory: str, uid: int) -> None:
    """Raises OSError if the kernel refuses; the old root is then still in place."""
    call(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    new = directory.encode()
    size = f"size={WORK_BYTES},nr_inodes={WORK_FILES},mode=755".encode()
    call(libc.mount(b"tmpfs", new, b"tmpfs", MS_NOSUID | MS_NODEV, size))
    for path in library_paths():
        if os.path.islink(path):
            os.symlink(os.readlink(path), directory + path)
        else:
            bind(libc, path, directory + path)
    os.mkdir(directory + "/work", 0o700)
    if os.geteuid() == 0:
        os.chown(directory + "/work", uid, uid)
    os.chroot(directory)
    os.chdir("/work")


def library_paths() -> list[str]:
    """Folders that an extension module or a lazy import may need, outermost first."""
    own = os.path.dirname(os.path.realpath(os.__file__))
    system = [p for p in ("/usr/lib", "/usr/lib64", "/lib", "/lib64") if os.path.exists(p)]
    return system if any(own.startswith(p + "/") for p in system) else [*system, own]


def bind(libc: Libc, source: str, target: str) -> None:
    os.makedirs(target, mode=0o755, exist_ok=True)
    call(libc.mount(source.encode(), target.encode(), None, MS_BIND | MS_REC, None))
    flags = os.statvfs(target).f_flag  # an unprivileged remount must keep them
    kept = flags & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    kept |= MS_RELATIME if flags & ST_RELATIME else 0
    call(libc.mount(None, target.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, None))


def call(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# ------------------------------------------------------------------------------------------------------ landlock

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ = 4 | 8  # read files, list folders
EXECUTE = 1
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""landlock's version -> number of rights on files that it knows; the third added truncation, the fifth devices."""
TCP, SCOPES = 3, 3  # bind and connect, from the fourth on; abstract sockets and signals of others, from the sixth on


def confine_files(libc: Libc, work: str) -> bool:
    """Lets only the library be read and only the working folder be written, and keeps signals inside where the kernel can.
    False without landlock."""
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    every = (1 << max(num for since, num in FILE_RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack("QQQ", every, TCP if version >= 4 else 0, SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.create_string_buffer(attributes), size, 0)
    if rules < 0:
        return False
    for path, rights in [(path, READ) for path in library_paths()] + [(work, every & ~EXECUTE)]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, fd))
        libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(fd)
    done = libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done


# ------------------------------------------------------------------------------------------------------- seccomp


def filter_calls(libc: Libc, program: bytes) -> bool:
    """Installs the filter that `calls.py` makes; False if the kernel refuses."""
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    return libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0) == 0
