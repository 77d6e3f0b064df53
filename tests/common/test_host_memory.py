"""A process may still take the memory that its machine and its control groups leave, in kernels of both versions."""

import mmap
from pathlib import Path

import pytest

from common.models.host_memory import host_bytes, host_limit, own_bytes

GB = 1_000_000_000


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 8 GB that are not used, and 2 GB more in pages of files that may be dropped."""
    write(tmp_path / "proc", meminfo="MemTotal: 16000000 kB\nMemFree: 7812500 kB\nMemAvailable:\t9765625 kB\n")
    return tmp_path / "proc"


def groups(tmp_path: Path, proc: Path, told: str) -> Path:
    write(proc / "self", cgroup=told)
    return tmp_path / "cgroup"


def test_without_limits_it_is_what_the_machine_has_with_pages_that_may_be_dropped(tmp_path: Path, proc: Path) -> None:
    assert host_bytes(proc, tmp_path / "none") == 10 * GB, "a kernel without control groups"
    root = groups(tmp_path, proc, "0::/a\n")
    write(root / "a", memory__max="max\n", memory__current=f"{5 * GB}\n")
    assert host_bytes(proc, root) == 10 * GB


def test_the_limits_of_a_group_and_of_those_around_it_count_without_pages_that_may_be_dropped(
    tmp_path: Path, proc: Path
) -> None:
    root = groups(tmp_path, proc, "0::/pod/worker\n")
    stat = f"anon {GB}\ninactive_file {2 * GB}\n"
    write(root / "pod" / "worker", memory__max=f"{6 * GB}\n", memory__current=f"{3 * GB}\n", memory__stat=stat)
    assert host_bytes(proc, root) == 5 * GB
    write(root / "pod", memory__max=f"{4 * GB}", memory__current=f"{3 * GB}", memory__stat="inactive_file 0\n")
    assert host_bytes(proc, root) == GB
    write(root / "pod", memory__current=f"{5 * GB}")
    assert host_bytes(proc, root) == 0, "a group that was given less than it has"


def test_what_others_have_taken_does_not_change_the_limit(tmp_path: Path, proc: Path) -> None:
    assert host_limit(proc, tmp_path / "none") == 16_000_000 * 1024, "of the machine"
    root = groups(tmp_path, proc, "0::/pod/worker\n")
    write(root / "pod" / "worker", memory__max="max\n")
    write(root / "pod", memory__max=f"{6 * GB}\n", memory__current=f"{5 * GB}\n", memory__stat="inactive_file 0\n")
    assert (host_limit(proc, root), host_bytes(proc, root)) == (6 * GB, GB)


def test_version_1_and_both_beside_each_other(tmp_path: Path, proc: Path) -> None:
    root = groups(tmp_path, proc, "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/job\n0::/job\n")
    files = {"memory__usage_in_bytes": f"{GB}", "memory__stat": f"inactive_file 1\ntotal_inactive_file {GB // 2}\n"}
    write(root / "memory", memory__limit_in_bytes="9223372036854771712\n", **files)
    write(root / "memory" / "job", memory__limit_in_bytes=f"{3 * GB}\n", **files)
    assert host_bytes(proc, root) == 2.5 * GB
    write(root / "unified" / "job", memory__max=f"{GB}", memory__current="0", memory__stat="")
    assert host_bytes(proc, root) == GB


@pytest.mark.parametrize("path", ["/", "/../../docker/abc", "/docker/abc"])
def test_a_container_that_sees_its_group_as_the_root_finds_its_limit(tmp_path: Path, proc: Path, path: str) -> None:
    root = groups(tmp_path, proc, f"0::{path}\n")
    write(root, memory__max=f"{2 * GB}", memory__current=f"{GB}", memory__stat="inactive_file 0\n")
    assert host_bytes(proc, root) == GB


def test_this_machine_has_some_left() -> None:
    assert 0 < host_bytes() < 1 << 50


def test_own_bytes_follow_what_the_process_takes_and_gives_back() -> None:
    before = own_bytes()
    block = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # memory that nothing here had before
    block.write(bytes([1]) * len(block))
    assert own_bytes() - before >= len(block) - (1 << 20)
    block.close()
    assert own_bytes() - before < 16 << 20
