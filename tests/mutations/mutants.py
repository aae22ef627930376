"""Mutants of a file, as plain data, and which of them are drawn."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutations import cpp_mutants, python_mutants
from mutations.areas import ROOT, Group, Language
from mutations.python_mutants import Change


@dataclass(frozen=True)
class Mutant:
    """One changed place of one file.

    Attributes:
        group: the files and tests that it belongs to.
        path: of the file, relative to the repository.
        line: where the change begins, from 1.
        kind: the rule that made it.
        before: the changed lines.
        after: what they become.
        content: the whole mutated file.
    """

    group: Group
    path: str
    line: int
    kind: str
    before: str
    after: str
    content: str

    @property
    def key(self) -> str:
        """Name the mutant by what it changes, so that the name survives changes elsewhere."""
        words = "\0".join((self.path, self.kind, self.before.strip(), self.after.strip()))
        return f"{Path(self.path).stem}-{hashlib.sha256(words.encode()).hexdigest()[:10]}"


def shares(groups: Sequence[Group], count: int, cpp_count: int) -> dict[tuple[str, Language], int]:
    """Divide `count` mutants over languages and areas.

    Each language's mutants are divided evenly over its areas, the first areas taking the rest.
    """
    found: dict[tuple[str, Language], int] = {}
    counts: tuple[tuple[Language, int], ...] = (("python", count - cpp_count), ("cpp", cpp_count))
    for language, n_mutants in counts:
        areas = list(dict.fromkeys(one.area for one in groups if one.language == language))
        for index, area in enumerate(areas):
            found[area, language] = n_mutants // len(areas) + (index < n_mutants % len(areas))
    return found


def drawn(groups: Sequence[Group], area: str, language: Language, seed: int) -> Iterator[Mutant]:
    """Yield the mutants of an area in the order drawn with `seed`: each place at most once."""
    places = []
    for group in groups:
        if (group.area, group.language) != (area, language):
            continue
        for path in group.files:
            source = (ROOT / path).read_text(encoding="utf-8")
            places += [
                (group, path, source, changes) for changes in _places(group.language, source)
            ]
    numbers = random.Random(f"{seed} {area} {language}")
    numbers.shuffle(places)
    for group, path, source, changes in places:
        kind, content = numbers.choice(changes)()
        if content is not None and content != source:
            yield _mutant(group, path, source, kind, content)


def mutants_of(group: Group, path: str) -> Iterator[Mutant]:
    """Yield each mutant of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    for changes in _places(group.language, source):
        for change in changes:
            kind, content = change()
            if content is not None and content != source:
                yield _mutant(group, path, source, kind, content)


def _places(language: Language, source: str) -> list[list[Change]]:
    return (python_mutants if language == "python" else cpp_mutants).places(source)


def _mutant(group: Group, path: str, source: str, kind: str, content: str) -> Mutant:
    old, new = source.splitlines(), content.splitlines()
    first = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    n_same = 0
    while n_same < min(len(old), len(new)) - first - 1 and old[-1 - n_same] == new[-1 - n_same]:
        n_same += 1
    before = "\n".join(old[first : len(old) - n_same])
    after = "\n".join(new[first : len(new) - n_same])
    return Mutant(group, path, first + 1, kind, before, after, content)
