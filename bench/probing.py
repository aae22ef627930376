"""What all probes share: a probe's description, and how one tells what it finds.

A probe runs in a process of its own, since a device fault lasts as long as its process. It tells
each figure at once, so that what was found before a fault is kept.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

PREFIX = "probe: "


class ProbeFailed(RuntimeError):
    """A probe cannot be carried out, or a call that it needs returned an error."""


class NotAnswered(ProbeFailed):
    """The device's software lacks what the question is about."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """One question to the device.

    Attributes:
        name: a letter and a number.
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


def leave_unanswered(because: str) -> None:
    """Tell that the question cannot be asked here."""
    print(PREFIX + json.dumps({"outcome": "not answered", "because": because}), flush=True)


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
