"""The inside of the sandbox: `sandbox.py` starts it as `python -I -S child.py`, in an empty environment.

Reads one job as JSON from stdin, shuts itself in, runs the tenant's source, and writes one line of JSON to what was
stdout. Before the tenant's code runs, descriptors 1 and 2 both lead to the output pipe, so a print cannot look like a
result. Only the standard library, and as little of it as possible: this file is imported anew for every call.

    stage            what it needs                             without it
    namespaces       root, or unprivileged user namespaces     seccomp keeps the network away; the others do not exist
    other uid        root                                      the worker's own uid
    landlock         Linux 5.13                                files are as open as their modes say
    seccomp          Linux on x86-64 or arm64                  an audit hook, which code that tries can get around
    limits           any Unix                                  nothing runs
"""

import contextlib
import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any

Libc = ctypes.CDLL
Reporter = Callable[..., None]

SIGKILL = 9
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 1, 2, 4, 8, 32, 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME, ST_RELATIME = 4096, 16384, 1 << 18, 1 << 21, 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22

FIRST_UID = 1_000_000_000
"""Each call runs under this uid plus its process id. No other call has it, so calls cannot signal each other."""
NOBODY = 65534
WORK_BYTES = 16 * 1024 * 1024
"""Size of the temporary file system, where there is one."""


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    result_fd = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    layers = shut_in(job["limits"], set(job["layers"]))
    write = make_reporter(result_fd, job["nonce"], layers)
    run(job["source"], job["call"], job["arguments"], write)


# ------------------------------------------------------------------------------------------------- tenant's code


def make_reporter(result_fd: int, nonce: str, layers: set[str]) -> Reporter:
    """A function that writes the result. The nonce lives only in its closure: bytes that the tenant's code happens to
    write to the descriptor are no result without it."""

    def write(**fields: object) -> None:
        text = json.dumps({"nonce": nonce, "layers": sorted(layers), **fields})
        data = text.encode() + b"\n"
        while data:
            data = data[os.write(result_fd, data) :]

    return write


def run(source: str, call: str | None, arguments: list[object], write: Reporter) -> None:
    """Executes the source, calls the function named by `call` if there is one, reports, and ends the process."""
    namespace: dict[str, Any] = {"__name__": "__main__" if call is None else "tenant", "__builtins__": __builtins__}
    try:
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


def check_json(value: object, call: str | None) -> object:
    """Returns a value that JSON can carry: nan, inf and huge numbers become text, so that the parent can say what it got."""
    if type(value) is int and value.bit_length() > 63:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float, str):
        return value if type(value) is not float or value - value == 0 else repr(value)
    raise TypeError(f"{call}() returned {type(value).__name__}, not a number")


def describe(error: BaseException) -> str:
    """Says in one line what was raised, and in which line."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<source>":
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line, error = error.lineno, SyntaxError(error.msg)
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # the error is the tenant's own: its text may raise anything
        text = type(error).__name__
    return (text if line is None else f"line {line}: {text}").replace("\n", " ")[:500]


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the tenant's code may have put anything there
            stream.flush()


# ------------------------------------------------------------------------------------------------------ shut in


def shut_in(limits: dict[str, int], wanted: set[str]) -> set[str]:
    """Gives up all rights, layer by layer; returns the layers that hold. Ends with an error if it would stay root."""
    linux, root, directory = sys.platform == "linux", os.geteuid() == 0, os.getcwd()
    uid = FIRST_UID + os.getpid()
    os.umask(0o022)
    libc = ctypes.CDLL(None, use_errno=True)
    layers: set[str] = set()
    if linux:
        libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if linux and "namespaces" in wanted:
        layers |= enter_namespaces(libc, directory, uid)
    set_limits(limits)
    if root:
        become(uid)
        layers.add("uid")
    if linux:
        layers |= give_up_rights(libc, wanted)
    if not layers & {"network", "seccomp"}:
        sys.addaudithook(refuse_sockets)
        layers.add("audit")
    return layers


def give_up_rights(libc: Libc, wanted: set[str]) -> set[str]:
    """Gives up the rights that a process on Linux can give up without any privilege. Returns the layers that hold."""
    layers: set[str] = set()
    drop_capabilities(libc)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if "landlock" in wanted and confine_files(libc, os.getcwd()):
        layers.add("landlock")
    if "seccomp" in wanted and filter_calls(libc):
        layers.add("seccomp")
    return layers


def set_limits(limits: dict[str, int]) -> None:
    cpu, memory = limits["cpu_s"], limits["memory_bytes"]
    pairs = (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 8),
        (resource.RLIMIT_CORE, 0),
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


def drop_capabilities(libc: Libc) -> None:
    """Drops all capabilities: entering an unprivileged user namespace gives them."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    libc.capset(header, ctypes.create_string_buffer(24))


# --------------------------------------------------------------------------------------------------- namespaces


def enter_namespaces(libc: Libc, directory: str, uid: int) -> set[str]:
    """Enters a network without interfaces, process ids of its own (the kernel kills what is left), and a file system that
    holds Python's library and an empty folder. Returns the layers that the kernel allows."""
    layers: set[str] = set()
    if os.geteuid() != 0:
        own_uid, own_gid = os.getuid(), os.getgid()
        if libc.unshare(CLONE_NEWUSER) != 0:
            return layers
        map_self(own_uid, own_gid)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS) == 0:
        layers.add("network")
    if libc.unshare(CLONE_NEWPID) == 0:
        wait_for_child()
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


def wait_for_child() -> None:
    """Goes on in a child, the first process of the new process ids; the parent ends as the child ends."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def change_root(libc: Libc, directory: str, uid: int) -> None:
    """Raises OSError if the kernel refuses; the old root is then still in place."""
    call(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    new = directory.encode()
    size = f"size={WORK_BYTES},mode=755".encode()
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
ALL = (1 << 13) - 1  # every right of the first version of landlock


def confine_files(libc: Libc, work: str) -> bool:
    """Lets only the library be read and only the working folder be written. False if the kernel has no landlock."""
    attributes = ctypes.create_string_buffer(struct.pack("Q", ALL))
    rules = libc.syscall(LANDLOCK_CREATE, attributes, 8, 0)
    if rules < 0:
        return False
    for path, rights in [(path, READ) for path in library_paths()] + [(work, ALL & ~1)]:
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

# numbers of the calls that are refused: sockets, new processes, signals to others, namespaces and mounts, reading
# other processes, and the large rare interfaces of the kernel
REFUSED = {
    "x86_64": (
        0xC000003E,
        (41, 53, 57, 58, 59, 62, 101, 129, 155, 161, 165, 166, 175, 200, 234, 246, 248, 249, 250, 272, 297, 298)
        + (304, 308, 310, 311, 313, 321, 322, 323, 424, 425, 428, 429, 430, 431, 432, 433, 434, 438),
        56,
    ),
    "aarch64": (
        0xC00000B7,
        (198, 199, 221, 117, 129, 138, 41, 51, 40, 39, 105, 130, 131, 104, 217, 218, 219, 97, 240, 241)
        + (265, 268, 270, 271, 273, 280, 281, 282, 424, 425, 428, 429, 430, 431, 432, 433, 434, 438),
        220,
    ),
}
CLONE3, CLONE_THREAD = 435, 0x10000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38


def filter_calls(libc: Libc) -> bool:
    """Installs the filter; False where it is unknown or not allowed."""
    if os.uname().machine not in REFUSED or struct.calcsize("P") != 8:
        return False
    program = filter_program(*REFUSED[os.uname().machine])
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    return libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0) == 0


def filter_program(arch: int, refused: tuple[int, ...], clone: int) -> list[tuple[int, int, int, int]]:
    lines = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    lines += [(JUMP_AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    lines += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | ENOSYS)]
    for number in refused:
        lines += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | EPERM)]
    lines += [(JUMP_EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (JUMP_BITS, 1, 0, CLONE_THREAD)]
    lines += [(RETURN, 0, 0, ERRNO | EPERM), (RETURN, 0, 0, ALLOW)]
    return lines


def refuse_sockets(event: str, _arguments: object) -> None:
    if event.startswith(("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "os.kill")):
        raise PermissionError(f"{event} is not allowed here")


if __name__ == "__main__":
    main()
