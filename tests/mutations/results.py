"""Verdicts on mutants, kept as lines of JSON, so that an interrupted run continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutations.areas import ROOT, Group, Language
from mutations.copied_tree import WORK
from mutations.mutants import Mutant, drawn, shares
from mutations.testing import Verdict


@dataclass(frozen=True)
class Draw:
    """Which mutants are drawn: the same of the same tree.

    Attributes:
        count: of all languages, without those that are discarded.
        cpp_count: of them in C++.
        seed: of the random numbers.
    """

    count: int
    cpp_count: int
    seed: int

    def path(self) -> Path:
        """Return the file that keeps the verdicts."""
        return WORK / f"verdicts-{self.seed}.jsonl"


@dataclass(frozen=True)
class Result:
    """A mutant and its verdict.

    Attributes:
        noticed_since: the test that was added because no test noticed it, where that test fails
            with the mutant and passes without it; otherwise "".
    """

    key: str
    area: str
    language: Language
    path: str
    line: int
    kind: str
    before: str
    after: str
    outcome: str
    noticed_by: str
    how: str
    seconds: float
    noticed_since: str = ""


def result_of(mutant: Mutant, verdict: Verdict) -> Result:
    """Join the two, as plain data."""
    return Result(
        key=mutant.key,
        area=mutant.group.area,
        language=mutant.group.language,
        path=mutant.path,
        line=mutant.line,
        kind=mutant.kind,
        before=mutant.before.strip(),
        after=mutant.after.strip(),
        outcome=verdict.outcome,
        noticed_by=verdict.noticed_by,
        how=verdict.how,
        seconds=verdict.seconds,
    )


def read_results(path: Path) -> dict[str, Result]:
    """Read the verdicts so far, by key: the last of each mutant whose code still stands there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [Result(**json.loads(line)) for line in lines]
    return {one.key: one for one in found if _stands(one)}


def _stands(result: Result) -> bool:
    path = ROOT / result.path
    return path.exists() and result.before in path.read_text(encoding="utf-8")


def append(path: Path, result: Result) -> None:
    """Keep a verdict."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


def in_turns(groups: Sequence[Group], draw: Draw, known: dict[str, Result]) -> Iterator[Mutant]:
    """Yield the drawn mutants that are not `known`, an area after the other in turns.

    The caller adds the result of each to `known` before it asks for the next: a discarded one is
    replaced.
    """
    wanted = shares(groups, draw.count, draw.cpp_count)
    left = [
        _of_area(groups, area, language, draw.seed, n_mutants, known)
        for (area, language), n_mutants in wanted.items()
    ]
    while left:
        for queue in tuple(left):
            mutant = next(queue, None)
            if mutant is None:
                left.remove(queue)
            else:
                yield mutant


def _of_area(
    groups: Sequence[Group],
    area: str,
    language: Language,
    seed: int,
    n_left: int,
    known: dict[str, Result],
) -> Iterator[Mutant]:
    seen: set[str] = set()
    for mutant in drawn(groups, area, language, seed):
        if not n_left:
            return
        if mutant.key in seen:  # the same change of the same line, elsewhere
            continue
        seen.add(mutant.key)
        if mutant.key not in known:
            yield mutant
        n_left -= known[mutant.key].outcome != "discarded"
