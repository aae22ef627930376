"""Failed captures by torch_npu: their causes, their remains, and their end."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Sequence
from typing import Any

from offload.errors import OutOfStreams
from offload.interpreter.device_failures import first_line
from offload.native import _native
from offload.program import Launch

# torch_npu raises RuntimeErrors that contain the runtime's code only in their text.
_CODE_OF_TORCH = re.compile(r"error code is (\d+)")
# ACL's code of a capture whose side streams did not join.
_UNJOINED = 107025
# ACL's codes: no stream left on the device, no driver resource for a stream.
_NO_STREAMS = frozenset({207008, 207005})


def _code_of(error: RuntimeError) -> int | None:
    found = _CODE_OF_TORCH.search(str(error))
    return None if found is None else int(found[1])


def check_streams(error: RuntimeError, what: str) -> None:
    """Raise OutOfStreams if torch_npu failed for lack of streams.

    Args:
        error: of torch_npu, while it captured.
        what: what failed, in words.

    Raises:
        OutOfStreams: the runtime's code says that the device had no stream left.
    """
    if _code_of(error) in _NO_STREAMS:
        raise OutOfStreams(
            f"{what}: {first_line(error)}; the device has no stream left: close other models"
        ) from error


def refused_advice(error: RuntimeError) -> str:
    """Return advice where the runtime has no captures; empty where another call failed.

    torch_npu only warns of that refusal (207000), and then finds no running capture.

    Args:
        error: of torch_npu, at the begin of the capture.
    """
    if "CAPTURE_STATUS_ACTIVE" not in str(error):
        return ""
    return (
        "; the runtime refuses captures here (207000): chips of the series 910 and 310B do not "
        "support them, and others need a driver and firmware that match CANN"
    )


def unjoined_advice(
    error: RuntimeError,
    launches: Sequence[Launch],
    n_tasks: Sequence[Sequence[int]],
    begins: Sequence[int | None],
) -> str:
    """Return advice on a side stream that the capture's stream never waited for; else empty.

    Args:
        error: of torch_npu, at the end of the capture.
        launches: the captured launches.
        n_tasks: as `CaptureLog.n_tasks`; empty where the runtime does not report them.
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

    Torch's own cleanup is incomplete where the runtime fails: its allocator may still use the pool,
    and the stream may still be capturing.

    Args:
        graph: torch_npu's graph.
        pool: the capture's pool.
        stream: the runtime's handle of the capture's stream.
        device: its index.
    """
    torch_npu: Any = importlib.import_module("torch_npu")
    _native.ascend_abandon_capture(stream)
    with contextlib.suppress(RuntimeError):  # already ended
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch_npu._C._npu_endAllocateToPool(device, pool.id)
    with contextlib.suppress(RuntimeError):
        graph.reset()
    if pool.use_count() > 1:  # a graph that was not captured leaves its reference behind
        torch_npu._C._npu_releasePool(device, pool.id)
