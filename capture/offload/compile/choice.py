"""Which regions become kernels, chosen by measured times."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from offload.compile.extraction import program_key
from offload.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Which regions become kernels, chosen by executions on made-up inputs.

    Attributes:
        kept: by key of a region, why its launches stay as recorded, for messages.
        fused_ns: the median duration of a call with the other regions as kernels.
        recorded_ns: the same without kernels.
        n_threads: the number of torch's threads during the timing.
        refusal: why nothing could be timed, so that all stays as recorded; else empty.
    """

    kept: Mapping[str, str]
    fused_ns: float = 0.0
    recorded_ns: float = 0.0
    n_threads: int = 0
    refusal: str = ""

    def explain(self) -> str:
        """The result in one line, for messages."""
        if self.refusal:
            return f"fuse='auto' leaves all as recorded: {self.refusal}"
        return (
            f"fuse='auto', by calls on made-up inputs, torch's threads {self.n_threads}: "
            f"{self.fused_ns / 1e3:,.1f} us with kernels, {self.recorded_ns / 1e3:,.1f} us without"
        )

    def to_document(self) -> dict[str, Any]:
        """The choice as JSON data."""
        return dataclasses.asdict(self)

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> Choice:
        """Read what `to_document` returned.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is not such a document.
        """
        return Choice(
            {str(key): str(why) for key, why in document["kept"].items()},
            float(document["fused_ns"]),
            float(document["recorded_ns"]),
            int(document["n_threads"]),
            str(document["refusal"]),
        )


def choice_key(program: Program, regions: Iterable[str], n_threads: int) -> str:
    """The key of a choice, equal for loads with the same timed work; hexadecimal.

    Args:
        program: as recorded.
        regions: the keys of those that may become kernels.
        n_threads: the number of torch's threads.
    """
    content = json.dumps([sorted(regions), n_threads])
    return f"{choices_of(program)}{hashlib.sha256(content.encode()).hexdigest()}"


def choices_of(program: Program) -> str:
    """The common prefix of the keys of all choices for a program."""
    return f"choice-{program_key(program)}-"
