"""Who writes addresses into the table of kernel arguments, and what is said of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Literal

from offload.backends.ascend.kernels import Capturer, GatherKernel
from offload.errors import BackendUnavailable
from offload.native import _native


class Refresh(enum.StrEnum):
    """Who writes the addresses into the table of kernel arguments."""

    HOST = "host"
    GATHER = "gather"


Gather = GatherKernel | Literal["operators"]
"""What the device gathers addresses with."""


def choose_gather(refresh: Refresh, capturer: Capturer, device: int) -> Gather | None:
    """What gathers addresses: the capturer's kernel, else operators; None: the host writes them.

    Raises:
        BackendUnavailable: the device is to gather, and there are neither a kernel nor operators.
    """
    if refresh is Refresh.HOST:
        return None
    kernel = capturer.gather_kernel(device)
    if kernel is not None:
        return kernel
    missing = _native.ascend_missing_operators()
    if missing:
        raise BackendUnavailable(
            "refresh='gather': what gathers addresses on the device is not built: the capturer "
            f"has no kernel for it, and the operator libraries have no {missing}; install "
            "CANN's operators, or use refresh='host'"
        )
    return "operators"


def refresh_note(counts: dict[str, int], gather: Gather | None) -> str:
    """How a table is refreshed, and what that took so far.

    Args:
        counts: of the resident.
        gather: None: the host writes what changed.
    """
    copied = f"{counts['copies']} copies of {counts['bytes_copied']} bytes so far"
    if gather is None:
        return f"the host writes what changed, and copies it at once ({copied})"
    if gather == "operators":
        return (
            "aclnnIndexSelect and aclnnAdd gather them on the device "
            f"({counts['gathers']} gathers so far, for which operators were planned "
            f"{counts['plans']} times; {copied})"
        )
    return (
        f"a kernel gathers them on the device ({counts['gathers']} launches so far, with "
        f"{counts['bytes_launched']} bytes of arguments; {copied})"
    )


def stages_note(*, gathers: bool = False, drains: bool = False, copies_inputs: bool = False) -> str:
    """Which of m_l_t's stages, and of submit's substages, is which of the graph engine's.

    Its names are those of its own log of the header (GE_DAVINCI_MODEL_PROFILING).

    Args:
        gathers: the device refreshes arguments, by what is launched.
        drains: torch's queue is delivered before.
        copies_inputs: the host copies inputs to where the model reads them.
    """
    refresh = (
        ["base copy = active-membase memcpy", "refresh launch = kernel launch"]
        if gathers
        else ["table copy = host-args H2D"]
    )
    stages = [
        "convert = convert",
        *(["drain: it has none"] if drains else []),
        "policy = policy",
        "patch = update host args",
    ]
    if copies_inputs:
        refresh.append("input copies = its stage 3")
    substages = [*refresh, "execute enqueue = model execute"]
    return (
        f"m_l_t in the graph engine's stages: {', '.join(stages)}; of submit: "
        f"{', '.join(substages)}"
    )


def notes_of_refresh(
    resident: _native.AscendResident,
    gather: Gather | None,
    held: Callable[[], str],
    more: tuple[str, ...],
) -> tuple[str, ...]:
    """How the model was made, and how its arguments are refreshed; what that took so far.

    Args:
        resident: whose they are.
        gather: None: the host writes what changed.
        held: says which streams it holds.
        more: to be said behind.
    """
    made = {"build": "an explicit build", "capture": "the capture of a stream"}[resident.form]
    return (
        f"one model, made by {made}",
        f"addresses of kernel arguments: {refresh_note(resident.refresh_counts, gather)}",
        stages_note(gathers=gather is not None),
        held(),
        *more,
    )
