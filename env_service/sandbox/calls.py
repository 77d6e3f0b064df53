"""The calls to the kernel that tenants' code may make, as the filter that the kernel applies (seccomp).

A list of what is allowed: what Python needs to run, to read its library, to write files and to make threads. All else is
refused: new processes, sockets, signals to others, sessions, shared memory that no limit counts, and whatever a later
kernel adds. An old call and its modern variants are both listed, for C libraries differ.
"""

import struct

_TABLE = """
brk 12 214, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, msync 26 227
futex 202 98, set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96, rseq 334 293
sched_yield 24 124, sched_getaffinity 204 123, getcpu 309 168, exit 60 93, exit_group 231 94, restart_syscall 219 128
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169, time 201 -
times 100 153, getitimer 36 102, setitimer 38 103, alarm 37 -, pause 34 -
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133
rt_sigtimedwait 128 137, sigaltstack 131 132
getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174
geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150
getrlimit 97 163, getrusage 98 165, uname 63 160, sysinfo 99 179, getrandom 318 278
read 0 63, readv 19 65, pread64 17 67, preadv 295 69, preadv2 327 286
write 1 64, writev 20 66, pwrite64 18 68, pwritev 296 70, pwritev2 328 287
lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59
sendfile 40 71, copy_file_range 326 285, flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, fadvise64 221 223
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, eventfd 284 -, eventfd2 290 19
epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22
open 2 -, openat 257 56, creat 85 -, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291
statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78
getcwd 79 17, chdir 80 49, fchdir 81 50, getdents 78 -, getdents64 217 61, umask 95 166
getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13
rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36
unlink 87 -, unlinkat 263 35, rmdir 84 -
"""
"""Name, number on x86-64, number on arm64."""

_OWN_FILES_TABLE = """
mkdir 83 -, mkdirat 258 34, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, truncate 76 45
utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88
"""
"""Allowed where a call sees only its own files: landlock does not keep these from the worker's files, and a folder without
folders can be watched."""

_BY_ARGUMENT_TABLE = {
    "prctl 157 167": (0, (15, 16)),  # the thread's name
    "fcntl 72 25": (1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),  # copies, flags and locks: no owner, signal or lease
    "ioctl 16 29": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # is it a terminal? how much is there? flags
}
"""Allowed if an argument, by its place, has one of these values."""

_LIMITS = "prlimit64 302 261"
"""Allowed only to read the calling process's limits: a call that lowered one could die as if the machine had killed it."""

_ARCHITECTURES = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}
"""The kernel's name of a machine, and its number of `clone`, which may make threads."""
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
_NEW = 435
"""`clone3`, which programs try before an older call: it looks missing."""

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38

Line = tuple[int, int, int, int]


def filter_program(machine: str, *, own_files: bool) -> bytes:
    """Returns the filter as the kernel takes it; nothing for a machine whose calls are unknown.

    `own_files`: the code sees no files but its own and Python's library.
    """
    if machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
        return b""
    lines = _lines(list(_ARCHITECTURES).index(machine), *_ARCHITECTURES[machine], own_files=own_files)
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _lines(column: int, architecture: int, clone: int, *, own_files: bool) -> list[Line]:
    refuse = (_RETURN, 0, 0, _ERROR | _EPERM)
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number in _numbers(_TABLE + _OWN_FILES_TABLE if own_files else _TABLE, column):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for call, (place, values) in _BY_ARGUMENT_TABLE.items():
        lines += _by_argument(_numbers(call, column)[0], place, values)
    lines += _without(_numbers(_LIMITS, column)[0], [0, 16, 20])
    lines += [
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, 16),
        (_HAS_BITS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        refuse,
    ]
    return [*lines, (_AT_LEAST, 0, 1, _NEW), (_RETURN, 0, 0, _ERROR | _ENOSYS), refuse]


def _by_argument(number: int, place: int, values: tuple[int, ...]) -> list[Line]:
    """Looks at the lower half of the argument: those of the table are ints."""
    lines = [(_EQUAL, 0, 2 + 2 * len(values), number), (_LOAD, 0, 0, 16 + 8 * place)]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*lines, (_RETURN, 0, 0, _ERROR | _EPERM)]


def _without(number: int, offsets: list[int]) -> list[Line]:
    """Allows a call if the halves of its arguments at these offsets, in bytes, are 0."""
    lines = [(_EQUAL, 0, 2 + 2 * len(offsets), number)]
    for left, offset in reversed([*enumerate(reversed(offsets))]):
        lines += [(_LOAD, 0, 0, 16 + offset), (_EQUAL, 0, 1 + 2 * left, 0)]
    return [*lines, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | _EPERM)]


def _numbers(table: str, column: int) -> list[int]:
    numbers = [entry.split()[1 + column] for entry in table.replace("\n", ",").split(",") if entry.strip()]
    return [int(number) for number in numbers if number != "-"]
