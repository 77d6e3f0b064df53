"""The list of allowed calls as the program that the kernel runs, on both machines."""

import struct

import pytest

from env_service.sandbox.calls import filter_program

ALLOWED, KILLED, REFUSED, MISSING = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
THREAD = 0x3D0F00


def verdict(machine: str, number: int, *arguments: int, architecture: int = 0, own_files: bool = True) -> int:
    """Runs the program as the kernel does: the four kinds of step that it consists of."""
    given = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("iIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *given)
    steps = list(struct.iter_unpack("HBBI", filter_program(machine, own_files=own_files)))
    at, loaded = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        match code:
            case 0x20:
                [loaded] = struct.unpack_from("I", data, value)
            case 0x15:
                at += yes if loaded == value else no
            case 0x35:
                at += yes if loaded >= value else no
            case 0x45:
                at += yes if loaded & value else no
            case _:
                return value


@pytest.mark.parametrize(
    ("machine", "read", "openat", "getrandom", "mkdirat", "utimensat"),
    [("x86_64", 0, 257, 318, 258, 280), ("aarch64", 63, 56, 278, 34, 88)],
)
def test_reading_and_writing_files_is_allowed_and_folders_and_times_where_files_are_its_own(
    machine: str, read: int, openat: int, getrandom: int, mkdirat: int, utimensat: int
) -> None:
    for number in (read, openat, getrandom):
        assert verdict(machine, number) == verdict(machine, number, own_files=False) == ALLOWED
    for number in (mkdirat, utimensat):
        assert verdict(machine, number) == ALLOWED
        assert verdict(machine, number, own_files=False) == REFUSED


@pytest.mark.parametrize(
    ("machine", "numbers"),
    [
        ("x86_64", (41, 57, 58, 59, 62, 101, 109, 112, 234, 319, 29)),
        ("aarch64", (198, 221, 129, 117, 154, 157, 131, 279, 194)),
    ],
)
def test_sockets_processes_signals_sessions_and_shared_memory_are_refused(
    machine: str, numbers: tuple[int, ...]
) -> None:
    assert {verdict(machine, number) for number in numbers} == {REFUSED}


@pytest.mark.parametrize(("machine", "clone"), [("x86_64", 56), ("aarch64", 220)])
def test_a_thread_may_be_made_and_a_process_may_not(machine: str, clone: int) -> None:
    assert verdict(machine, clone, THREAD) == ALLOWED
    assert verdict(machine, clone, 17) == REFUSED
    assert verdict(machine, 435) == MISSING  # clone3: the C library then uses clone


@pytest.mark.parametrize(
    ("machine", "prctl", "fcntl", "ioctl", "prlimit"), [("x86_64", 157, 72, 16, 302), ("aarch64", 167, 25, 29, 261)]
)
def test_some_calls_are_allowed_by_an_argument(machine: str, prctl: int, fcntl: int, ioctl: int, prlimit: int) -> None:
    for number, arguments in ((prctl, (15,)), (fcntl, (0, 4)), (ioctl, (0, 0x5401)), (prlimit, (0, 7))):
        assert verdict(machine, number, *arguments) == ALLOWED
    for number, arguments in ((prctl, (1,)), (fcntl, (0, 10)), (ioctl, (0, 0x5412)), (prlimit, (1, 7))):
        assert verdict(machine, number, *arguments) == REFUSED
    for address in (0x1000, 1 << 32):  # of new limits
        assert verdict(machine, prlimit, 0, 7, address) == REFUSED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    assert verdict(machine, 0, architecture=0x40000003) == KILLED
    assert verdict(machine, 0x40000000) == KILLED


def test_calls_newer_than_the_list_look_missing_and_an_unknown_machine_has_no_filter() -> None:
    assert verdict("x86_64", 500) == MISSING
    assert verdict("x86_64", 400) == REFUSED
    assert filter_program("riscv64", own_files=True) == b""
