"""What a capture by torch_npu that failed at some call says and leaves, and how it goes."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Sequence
from typing import Any

from offload.backends.captured.torch_warm_up import first_line
from offload.errors import OutOfStreams
from offload.native import _native
from offload.program import Launch

# torch_npu raises RuntimeErrors that have the runtime's code in their text alone.
_CODE_OF_TORCH = re.compile(r"error code is (\d+)")
# ACL's number of a capture whose side streams did not come back to it.
_UNJOINED = 107025
# By ACL's numbers: no stream left on the device, no resource of its driver for one.
_NO_STREAMS = frozenset({207008, 207005})


def _code_of(error: RuntimeError) -> int | None:
    found = _CODE_OF_TORCH.search(str(error))
    return None if found is None else int(found[1])


def check_streams(error: RuntimeError, what: str) -> None:
    """Nothing, unless streams are what torch_npu lacked.

    Args:
        error: of torch_npu, while it captured.
        what: failed, in words.

    Raises:
        OutOfStreams: the runtime's code says that the device had no stream left.
    """
    if _code_of(error) in _NO_STREAMS:
        raise OutOfStreams(
            f"{what}: {first_line(error)}; the device has no stream left: close other models"
        ) from error


def refused_advice(error: RuntimeError) -> str:
    """What to do where the runtime has no captures; nothing where another call failed.

    torch_npu only warns of that refusal (207000), and then finds that nothing is being captured.

    Args:
        error: of torch_npu, when the capture was to begin.
    """
    if "CAPTURE_STATUS_ACTIVE" not in str(error):
        return ""
    return (
        "; the runtime refuses captures here (207000): chips of the series 910 and 310B have none, "
        "and others need a driver and firmware that fit CANN"
    )


def unjoined_advice(
    error: RuntimeError,
    launches: Sequence[Launch],
    n_tasks: Sequence[Sequence[int]],
    begins: Sequence[int | None],
) -> str:
    """What to do about a side stream that the capture's stream never waited for; else nothing.

    Args:
        error: of torch_npu, when the capture ended.
        launches: those that were captured.
        n_tasks: as `CaptureLog.n_tasks`; empty where the runtime does not tell.
        begins: as `CaptureLog.begins`.
    """
    if _code_of(error) != _UNJOINED:
        return ""
    counts = [len(one) for one in n_tasks]
    forks = [
        f"{launches[launch].source}: {launches[launch].name}"
        for launch, before, after in zip(begins, counts, counts[1:], strict=False)
        if launch is not None and after > before
    ]
    return (
        "; work on a side stream is not joined: let the stream that was current before wait for it "
        f"(wait_stream). Side streams begin in {', '.join(forks) or 'some of the launches'}"
    )


def abandon(graph: Any, pool: Any, stream: int, device: int) -> None:
    """End a capture that failed at any call, for torch and for the runtime.

    Torch gives up half-way where the runtime fails: its allocator may still take memory from the
    pool, and the stream may still be capturing.

    Args:
        graph: torch_npu's graph.
        pool: the pool that it captures in.
        stream: the runtime's handle of the stream that it captures on.
        device: where.
    """
    torch_npu: Any = importlib.import_module("torch_npu")
    _native.ascend_abandon_capture(stream)
    with contextlib.suppress(RuntimeError):  # since that has been ended already
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch_npu._C._npu_endAllocateToPool(device, pool.id)
    with contextlib.suppress(RuntimeError):
        graph.reset()
    if pool.use_count() > 1:  # a graph that was not captured leaves its use behind
        torch_npu._C._npu_releasePool(device, pool.id)
