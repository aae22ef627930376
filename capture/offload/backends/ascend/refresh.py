"""What refreshes the table of kernel arguments, and the notes about it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Literal

from offload.backends.ascend.kernels import Capturer, GatherKernel
from offload.errors import BackendUnavailable
from offload.native import _native


class Refresh(enum.StrEnum):
    """What writes the addresses into the table of kernel arguments."""

    HOST = "host"
    GATHER = "gather"


Gather = GatherKernel | Literal["operators"]
"""How the device gathers addresses."""


def choose_gather(refresh: Refresh, capturer: Capturer, device: int) -> Gather | None:
    """Choose the gathering: the capturer's kernel, else operators; None: the host writes.

    Raises:
        BackendUnavailable: the device must gather, and has neither a kernel nor operators.
    """
    if refresh is Refresh.HOST:
        return None
    kernel = capturer.gather_kernel(device)
    if kernel is not None:
        return kernel
    missing = _native.ascend_missing_operators()
    if missing:
        raise BackendUnavailable(
            "refresh='gather': addresses cannot be gathered on the device: the capturer has no "
            f"kernel for it, and the operator libraries have no {missing}; install CANN's "
            "operators, or use refresh='host'"
        )
    return "operators"


def refresh_note(counts: dict[str, int], gather: Gather | None) -> str:
    """Describe how a table is refreshed, and its cost so far.

    Args:
        counts: of the resident.
        gather: None: the host writes changed words.
    """
    copied = f"{counts['copies']} copies of {counts['bytes_copied']} bytes so far"
    if gather is None:
        return f"the host writes the changed addresses, and copies them at once ({copied})"
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
    """Map m_l_t's stages and submit's substages to those of the graph engine.

    The engine's names are those of its own log of the header (GE_DAVINCI_MODEL_PROFILING).

    Args:
        gathers: a launch on the device refreshes arguments.
        drains: torch's queue is drained first.
        copies_inputs: the host copies inputs to the model's addresses.
    """
    refresh = (
        ["base copy = active-membase memcpy", "refresh launch = kernel launch"]
        if gathers
        else ["table copy = host-args H2D"]
    )
    stages = [
        "convert = convert",
        *(["drain: no stage there"] if drains else []),
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
    """Describe how the model was made, how its arguments are refreshed, and the cost so far.

    Args:
        resident: the model's.
        gather: None: the host writes changed words.
        held: describes the streams that it holds.
        more: further notes.
    """
    made = {"build": "an explicit build", "capture": "the capture of a stream"}[resident.form]
    return (
        f"one model, made by {made}",
        f"addresses of kernel arguments: {refresh_note(resident.refresh_counts, gather)}",
        stages_note(gathers=gather is not None),
        held(),
        *more,
    )
