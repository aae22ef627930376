"""Tests mutants, one after the other, in the copied tree."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from mutations import copied_tree
from mutations.areas import Group
from mutations.forked_pytest import Forks, Outcome
from mutations.mutants import Mutant
from mutations.native_build import NativeBuild

_LIMIT_S = 240.0  # of a test; on a loaded machine the slowest takes a tenth

Judgement = tuple[Literal["noticed", "survived", "discarded"], str, str]


class BaselineError(Exception):
    """A test fails without a mutant, with what it printed."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        outcome: "discarded" where it is not C++, or its object file is the original's.
        noticed_by: the test that failed first.
        how: that test "failed", reached "the time limit", or ended its process; or why the mutant
            was discarded.
        seconds: of wall time, with the compilation.
    """

    outcome: Literal["noticed", "survived", "discarded"]
    noticed_by: str
    how: str
    seconds: float


class Tester:
    """Tests mutants. Owner: the thread that makes it.

    A test that notices a mutant is run once without it.
    """

    def __init__(self) -> None:
        """Bring the copied tree up to date."""
        copied_tree.make()
        self._forks = Forks(_LIMIT_S)
        self._native: NativeBuild | None = None
        self._right: set[str] = set()
        self._collected: set[Group] = set()

    def test(self, mutant: Mutant) -> Verdict:
        """Run the tests of a mutant's group against it.

        Raises:
            BaselineError: the test that failed also fails without it.
            BuildError: the unchanged tree does not build.
        """
        self._collect(mutant.group)
        begin = time.monotonic()
        if mutant.group.language == "cpp":
            outcome, noticed_by, how = self._test_native(mutant)
        else:
            with copied_tree.mutated(mutant.path, mutant.content):
                found = self._pytest(mutant.group)
            outcome, noticed_by, how = self._judged(found, None)
        return Verdict(outcome, noticed_by, how, round(time.monotonic() - begin, 1))

    def _test_native(self, mutant: Mutant) -> Judgement:
        group, native = mutant.group, self._tried(mutant.group)
        with copied_tree.mutated(mutant.path, mutant.content):
            changed, printed = native.compile(mutant.path)
            asserting = native.compile(mutant.path, asserts=True)[0] if group.programs else changed
        if printed:
            return "discarded", "", "it does not compile"
        # Trivial compiler equivalence: M. Papadakis et al., ICSE 2015.
        if native.is_original(mutant.path, changed):
            return "discarded", "", "it compiles to the same object file"
        found = native.run_programs(group.programs, asserting)
        if not found.noticed_by and group.module:
            with native.installed(group.module, changed):
                found = self._pytest(group)
        return self._judged(found, native)

    def _judged(self, found: Outcome, native: NativeBuild | None) -> Judgement:
        test = found.noticed_by
        if not test:
            return "survived", "", ""
        if test not in self._right and not (native and native.is_program(test)):
            collected = () if "::" in test else ("--collect-only",)
            again = self._forks.run(copied_tree.TREE, (test, *collected), mutated=False)
            if again.noticed_by:
                raise BaselineError(f"{test} fails without a mutant:\n{again.log}")
            self._right.add(test)
        return "noticed", test, found.how

    def _pytest(self, group: Group) -> Outcome:
        if not group.tests:
            return Outcome("")
        return self._forks.run(copied_tree.TREE, group.tests, mutated=True)

    def _collect(self, group: Group) -> None:
        # Compiles the Python of an unmutated tree, which the run of a mutant does not keep.
        if group.tests and group not in self._collected:
            self._collected.add(group)
            self._forks.run(copied_tree.TREE, (*group.tests, "--collect-only"), mutated=False)

    def _tried(self, group: Group) -> NativeBuild:
        # Each program has passed once without a mutant.
        native = self._native = self._native or NativeBuild()
        unknown = tuple(one for one in group.programs if one not in self._right)
        if (found := native.run_programs(unknown, None)).noticed_by:
            raise BaselineError(f"{found.noticed_by} fails without a mutant:\n{found.log}")
        self._right |= set(unknown)
        return native
