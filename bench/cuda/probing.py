"""What the probes of CUDA share: a probe's description, and how one tells what it finds.

A probe runs in a process of its own, since a device fault lasts as long as its process. It tells
each figure at once, so that what was found before a fault is kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

PREFIX = "probe: "


class ProbeFailed(RuntimeError):
    """A probe cannot be carried out, or a call that it needs returned an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """One question to the device.

    Attributes:
        name: `P0` to `P10`.
        question: what is asked.
        expected: the answer that the design counts on.
        otherwise: what is done if the answer is another one.
        function: `module:function` that answers it.
        parts: what the function is called with, each in a process of its own.
    """

    name: str
    question: str
    expected: str
    otherwise: str
    function: str
    parts: tuple[str, ...] = ("",)


def tell(name: str, value: Any) -> None:
    """Tell a figure: anything that JSON holds."""
    print(PREFIX + json.dumps({"figure": name, "value": value}), flush=True)


def conclude(as_expected: bool, because: str = "") -> None:
    """Tell the outcome of the probe, or of this part of it."""
    outcome = "as expected" if as_expected else "otherwise"
    print(PREFIX + json.dumps({"outcome": outcome, "because": because}), flush=True)


def read_told(output: str) -> tuple[dict[str, Any], str | None, str]:
    """The figures, the outcome (None if there is none) and its reason, from what was printed."""
    figures: dict[str, Any] = {}
    outcome, because = None, ""
    for line in output.splitlines():
        if not line.startswith(PREFIX):
            continue
        told = json.loads(line.removeprefix(PREFIX))
        if "figure" in told:
            figures[told["figure"]] = told["value"]
        else:
            outcome, because = told["outcome"], told["because"]
    return figures, outcome, because


def driver_call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of NVIDIA's bindings; what it returns beside the code.

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
        ProbeFailed: it is another.
    """
    if code == -1:
        raise ProbeFailed(f"{what}: the device's result is wrong")
    if code:
        raise ProbeFailed(f"{what}: CUDA error {code}")
