"""Common parts of all probes: a probe's description, and the report of its findings.

A probe runs in a separate process, since a device fault lasts as long as its process. It reports
each figure at once, so that findings before a fault are kept.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

PREFIX = "probe: "


class ProbeFailed(RuntimeError):
    """A probe cannot be carried out, or a call that it needs returned an error."""


class NotAnswered(ProbeFailed):
    """The device's software lacks the subject of the question."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """One question to the device.

    Attributes:
        name: a letter and a number.
        question: the question.
        expected: the answer that the design relies on.
        otherwise: the consequence of another answer.
        function: `module:function` that answers it.
        parts: arguments of the function, each in a separate process.
    """

    name: str
    question: str
    expected: str
    otherwise: str
    function: str
    parts: tuple[str, ...] = ("",)


def tell(name: str, value: Any) -> None:
    """Report a figure: any value that JSON holds."""
    print(PREFIX + json.dumps({"figure": name, "value": value}), flush=True)


def conclude(as_expected: bool, because: str = "") -> None:
    """Report the outcome of the probe, or of this part of it."""
    outcome = "as expected" if as_expected else "otherwise"
    print(PREFIX + json.dumps({"outcome": outcome, "because": because}), flush=True)


def leave_unanswered(because: str) -> None:
    """Report that the question cannot be asked here."""
    print(PREFIX + json.dumps({"outcome": "not answered", "because": because}), flush=True)


def read_told(output: str) -> tuple[dict[str, Any], str | None, str]:
    """Return the figures, the outcome (None if missing) and its reason, from the printed text."""
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
