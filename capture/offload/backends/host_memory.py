"""Host memory that this process may still allocate."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from offload.errors import PlanError

PAGE_BYTES = resource.getpagesize()


def is_address_space_limited() -> bool:
    """Whether the address space of this process is limited (`ulimit -v`)."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def free_bytes() -> int:
    """Return what this process may still allocate, by machine, control groups and limits.

    Control groups are of version 2, at their usual path.
    """
    return max(0, min(_free_bytes()))


def _control_groups() -> Iterator[Path]:
    """Yield the control group of this process, and those around it."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = root / line.removeprefix("0::/")
                yield from (own, *(one for one in own.parents if one.is_relative_to(root)))


def _free_bytes() -> Iterator[int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    yield int(fields["MemAvailable"].split()[0]) * 1024
    for group in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # without a limit
            limit = int((group / "memory.max").read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(counts["inactive_file"])
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
