"""Finds the memory that this process may have of the machine and its control groups, in all and still.

A container sees the machine's memory, but its control group's limit ends it. Droppable pages of files are free in both,
though neither counts them so.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """Names of a control group's files, and the line of `memory.stat` with droppable pages of files, in bytes."""

    limit: str
    used: str
    droppable: str


V1 = GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = GroupFiles("memory.max", "memory.current", "inactive_file")


def host_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that the machine has without swapping, and the control groups allow."""
    return min([_of_machine(proc, "MemAvailable:"), *(left for _, left in _of_groups(proc, groups))])


def host_limit(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes that there would be if nobody else took any."""
    return min([_of_machine(proc, "MemTotal:"), *(limit for limit, _ in _of_groups(proc, groups))])


def own_bytes() -> int:
    """Bytes that this process shares with no other. The kernel looks at each page for them, for 0.1 s a GB: only the first time. Later what
    the process has grown by is added."""
    first, then = _measured(os.getpid())
    return max(first + _anonymous() - then, 0)


@cache
def _measured(pid: int) -> tuple[int, int]:
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    own = 1024 * sum(int(row[1]) for row in rows if row[0] in ("Private_Clean:", "Private_Dirty:"))
    return own, _anonymous()


def _anonymous() -> int:
    """Bytes in memory that no file holds."""
    _, resident, of_files, *_ = map(int, (PROC / "self" / "statm").read_text().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def _of_machine(proc: Path, line: str) -> int:
    return 1024 * _counts(proc / "meminfo")[line]


def _of_groups(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Each limit, and what it leaves. A group's lines are `hierarchy:controllers:path`, in version 2 `0::path`."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if "memory" in controllers.split(","):
            yield from _left(groups / "memory", path, V1)
        elif not controllers:
            root = groups / "unified"  # next to version 1
            yield from _left(root if root.is_dir() else groups, path, V2)


def _left(root: Path, path: str, names: GroupFiles) -> Iterator[tuple[int, int]]:
    """Limits of a group and its ancestors, and what they leave. A container may see its own group as the root."""
    inside = Path(*(part for part in path.split("/") if part not in ("", "..")))
    for folder in (root / inside, *(root / parent for parent in inside.parents)):
        try:
            limit = (folder / names.limit).read_text().strip()
            if limit != "max":
                used = int((folder / names.used).read_text())
                droppable = _counts(folder / "memory.stat").get(names.droppable, 0)
                yield int(limit), max(0, int(limit) - max(0, used - droppable))
        except OSError:  # it is not mounted here, or the root, which has no limit
            continue


def _counts(file: Path) -> dict[str, int]:
    """The numbers of a file of lines such as `MemFree: 123 kB`, by their first words."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
