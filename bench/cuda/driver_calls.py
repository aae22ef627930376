"""Error codes of the CUDA driver, for probes: each is a failure of the probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from probing import ProbeFailed


def driver_call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of NVIDIA's bindings; return its results without the code.

    Raises:
        ProbeFailed: the code is an error.
    """
    code, *rest = function(*arguments)
    if int(code) != 0:
        raise ProbeFailed(f"{function.__name__}: {code!s} ({int(code)})")
    return rest[0] if len(rest) == 1 else tuple(rest)


def check_code(code: int, what: str) -> None:
    """Refuse a code other than 0 from the compiled part of the probes.

    Raises:
        ProbeFailed: the code is not 0.
    """
    if code == -1:
        raise ProbeFailed(f"{what}: the device's result is wrong")
    if code:
        raise ProbeFailed(f"{what}: CUDA error {code}")
