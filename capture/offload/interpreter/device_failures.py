"""What torch raises where a device fails or has no memory, as errors of offload."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from offload.errors import ExecutionError, OutOfMemory

AFTER_A_FAULT = "a device that has faulted can be used again in a new process"


@contextlib.contextmanager
def torch_failures(doing: str) -> Iterator[None]:
    """Convert what torch raises where a device fails in offload's own work, or has no memory.

    Args:
        doing: that work, in words.

    Raises:
        OutOfMemory: the device has no memory left.
        ExecutionError: the device failed there, or in earlier work.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise failure_of_torch(error, doing) from error
    except torch.AcceleratorError as error:
        failed = failure_of_torch(error, f"{doing}: the device failed, there or before")
        raise ExecutionError(f"{failed}; {AFTER_A_FAULT}") from error


def failure_of_torch(error: RuntimeError, what: str) -> ExecutionError:
    """A torch error as an error of offload: an OutOfMemory if the device's memory ran out.

    Args:
        error: of a call that takes memory of a device.
        what: what failed, in words.
    """
    kind = OutOfMemory if isinstance(error, torch.OutOfMemoryError) else ExecutionError
    return kind(f"{what}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The first line of a torch error; the rest is advice and C++ frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
