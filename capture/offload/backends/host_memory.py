"""Host memory that this process may use at most, and that it may still allocate."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from offload.errors import PlanError

PAGE_BYTES = resource.getpagesize()


@dataclasses.dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A version of control groups: where they are mounted, and the names of their files.

    Attributes:
        root: the usual path, within which a process finds its own group.
        limit: the file with the limit, in bytes.
        used: the file with what is used of it, in bytes.
        reclaimed: the field of `memory.stat` with file content that was not read recently.
    """

    root: str
    limit: str
    used: str
    reclaimed: str


_VERSION_2 = _Hierarchy("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_VERSION_1 = _Hierarchy(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def is_address_space_limited() -> bool:
    """Whether the address space of this process is limited (`ulimit -v`)."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def free_bytes() -> int:
    """Return what this process may still allocate, by machine, control groups and limits.

    Control groups are at their usual paths.
    """
    return max(0, min(_free_bytes()))


def total_bytes(root: Path = Path("/")) -> int:
    """Return what this process may use at most: of the machine, or of its control groups if less.

    Args:
        root: the folder under which `proc` and `sys` are mounted.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [machine_bytes]
    for group, kind in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # without a limit
            limits.append(int((group / kind.limit).read_text()))
    return min(limits)


def _control_groups(root: Path) -> Iterator[tuple[Path, _Hierarchy]]:
    """Yield the control groups for memory of this process, and those around them.

    A container may see its own group as the uppermost one, at a path without the names of outer
    groups.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                kind = _VERSION_2
            elif "memory" in controllers.split(","):
                kind = _VERSION_1
            else:
                continue
            top = root / kind.root
            own = top if ".." in path.split("/") else top / path.removeprefix("/")
            for group in (own, *own.parents):
                if group.is_relative_to(top):
                    yield group, kind


def _free_bytes() -> Iterator[int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    yield int(fields["MemAvailable"].split()[0]) * 1024
    for group, kind in _control_groups(Path("/")):
        with contextlib.suppress(OSError, ValueError):  # without a limit
            limit = int((group / kind.limit).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / kind.used).read_text()) - int(counts[kind.reclaimed])
            yield limit - used  # file content not recently read is reclaimed on demand
    if is_address_space_limited():
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        yield limit - pages * PAGE_BYTES


def require_free(needed_bytes: int, what: str, advice: str) -> None:
    """Refuse an allocation for which the host has no room, before it begins.

    Args:
        needed_bytes: its size.
        what: what needs the bytes, and for what, in words.
        advice: what to do.

    Raises:
        PlanError: less is free.
    """
    if not needed_bytes:
        return
    now_bytes = free_bytes()
    if needed_bytes > now_bytes:
        raise PlanError(
            f"{what} {needed_bytes} bytes of host memory, and {now_bytes} are free (of the "
            f"machine, the control groups and the limits of this process): {advice}"
        )
