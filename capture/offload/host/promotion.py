"""When a choice of sizes gets its own executable: ski rental, as data and pure functions.

The executable of all sizes is rented; a separate one is bought once it would have saved, over the
executions so far, what its preparation costs. For every sequence of calls this costs at most twice
the optimum in hindsight (Karlin, Manasse, Rudolph, Sleator: "Competitive snoopy caching", 1988).
This holds for each choice of sizes by itself, where cost and saving are known and memory suffices;
otherwise no trace costs more than twice its cost without promotion, since executions of the same
sizes have earned each preparation.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from offload.console.amounts import show_bytes, show_count

Choice = tuple[int, ...]
"""A choice of sizes, by Dim."""

LEAST_SHARE = 0.01
"""A smaller saved share of an execution cannot be distinguished from noise."""

REVIEWED_AFTER = 8
"""After this many executions the promoted executable's least duration is known."""

NEVER_NS = 2**64 - 1

_N_LIKE = 3

_NAMED = 4  # sizes named per reason of refusal


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The assumed cost and saving of a kind of promotion, before any was made.

    Attributes:
        what: what sizes get, in the plural, for people.
        preparation_ns: the assumed duration.
        saved_share: the assumed saved share of an execution.
    """

    what: str
    preparation_ns: int
    saved_share: float


KERNELS = Expected("kernels", 10_000_000_000, 0.4)
"""Kernels for Transformers of two layers took 10 s on two idle cores, and up to five times that on
busy ones; they saved 31 to 62 % of executions of these."""

TASKS = Expected("tasks", 2_000_000_000, 0.5)
"""An assumption: no device has been measured. The first promotion, or `scheduling="auto"`, replaces
it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """The measurements of a promotion.

    Attributes:
        preparation_ns: the duration of the preparation.
        saved_share: the saved share of an execution; None before enough executions.
    """

    preparation_ns: int
    saved_share: float | None = None


def predicted_preparation_ns(
    sizes: Choice, known: Mapping[Choice, Prepared], expected: Expected
) -> float:
    """Predict the preparation of some sizes: as measured, or from the most similar sizes."""
    if sizes in known:
        return known[sizes].preparation_ns
    like = _most_alike(sizes, list(known))
    if not like:
        return expected.preparation_ns
    return statistics.mean(known[one].preparation_ns for one in like)


def predicted_share(sizes: Choice, known: Mapping[Choice, Prepared], expected: Expected) -> float:
    """Predict the saved share of each execution."""
    shares = {one: what.saved_share for one, what in known.items() if what.saved_share is not None}
    if sizes in shares:
        return shares[sizes]
    like = _most_alike(sizes, list(shares))
    return statistics.mean(shares[one] for one in like) if like else expected.saved_share


def due_ns(sizes: Choice, known: Mapping[Choice, Prepared], expected: Expected) -> int:
    """Return the total duration of executions of some sizes after which a promotion pays."""
    share = predicted_share(sizes, known, expected)
    if share < LEAST_SHARE:
        return NEVER_NS
    return math.ceil(predicted_preparation_ns(sizes, known, expected) / share)


def least_due_ns(known: Mapping[Choice, Prepared], expected: Expected) -> int:
    """Return the least duration after which any sizes may be due; then `due_ns` decides."""
    return min((due_ns(one, known, expected) for one in known), default=due_ns((), {}, expected))


def _most_alike(sizes: Choice, known: Sequence[Choice]) -> list[Choice]:
    """Sort by the ratios of their sizes; of equals the smaller first."""

    def distance(other: Choice) -> float:
        return sum(
            abs(math.log((one + 1) / (two + 1))) for one, two in zip(sizes, other, strict=True)
        )

    return sorted(known, key=lambda one: (distance(one), one))[:_N_LIKE]


def to_demote(
    used: Mapping[Choice, int], size_bytes: Mapping[Choice, int], budget_bytes: int, kept: Choice
) -> list[Choice]:
    """Return what to evict so that the rest fits: the least recently used, but not `kept`.

    Args:
        used: when each promoted choice was last used; larger is later.
        size_bytes: the bytes of each.
        budget_bytes: the limit for all.
        kept: the choice that stays, and fits by itself.
    """
    n_bytes, gone = sum(size_bytes.values()), []
    for one in sorted(used, key=lambda one: used[one]):
        if n_bytes <= budget_bytes:
            break
        if one != kept:
            gone.append(one)
            n_bytes -= size_bytes[one]
    return gone


@dataclasses.dataclass(frozen=True, slots=True)
class PromotedSizes:
    """A choice of sizes that has its own executable.

    Attributes:
        sizes: by Dim.
        size_bytes: its bytes beside the shared arena and the model's weights.
        rented_executions, rented_ns: executions by the executable of all sizes until it was
            prepared.
        preparation_ns: the duration of its preparation.
        resident_ns, promoted_ns: the least duration of an execution by either; 0 before the first.
        executions: of the promoted executable.
    """

    sizes: tuple[tuple[str, int], ...]
    size_bytes: int
    rented_executions: int
    rented_ns: int
    preparation_ns: int
    resident_ns: int
    promoted_ns: int
    executions: int

    @property
    def saved_ns(self) -> int:
        """The time that its executions have saved so far, its preparation not subtracted."""
        return (self.resident_ns - self.promoted_ns) * self.executions

    def __str__(self) -> str:
        text = (
            f"{sizes_text(self.sizes)}: promoted after "
            f"{show_count(self.rented_executions, 'execution')} of {self.rented_ns / 1e9:.3g} s, "
            f"prepared in {self.preparation_ns / 1e9:.3g} s, {show_bytes(self.size_bytes)}"
        )
        if not self.executions:
            return f"{text}; not executed since"
        return (
            f"{text}; {self.resident_ns / 1e3:,.1f} us before, {self.promoted_ns / 1e3:,.1f} us "
            f"since, {self.saved_ns / 1e9:.3g} s saved in "
            f"{show_count(self.executions, 'execution')}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PromotionReport:
    """A report on the promotion of repeated sizes.

    Attributes:
        promoted: the sizes with their own executable.
        size_bytes, budget_bytes: their bytes, and the limit.
        preparing: the sizes whose executable is being made; else empty.
        n_demoted: how many were evicted to make room for others.
        refused: sizes that get no executable, and why.
        expected_due_ns: the total duration after which unknown sizes are promoted.
        what: what sizes get, in the plural.
        waited_ns: the time that calls have waited for preparations; 0 where calls do not wait.
    """

    promoted: tuple[PromotedSizes, ...]
    size_bytes: int
    budget_bytes: int
    preparing: tuple[tuple[str, int], ...]
    n_demoted: int
    refused: tuple[tuple[tuple[tuple[str, int], ...], str], ...]
    expected_due_ns: int
    what: str = KERNELS.what
    waited_ns: int = 0

    def __str__(self) -> str:
        going_on = f", preparing {sizes_text(self.preparing)}" if self.preparing else ""
        return (
            f"{len(self.promoted):,} promoted, {show_bytes(self.size_bytes)} of "
            f"{show_bytes(self.budget_bytes)}, {self.n_demoted:,} demoted, "
            f"{len(self.refused):,} refused{going_on}"
            + (f", calls waited {self.waited_ns / 1e9:.3g} s" if self.waited_ns else "")
        )

    def explain(self) -> list[str]:
        """Describe what was promoted, why, and what it gained, in lines for people."""
        due = (
            f"no more sizes get {self.what} of their own, since these save nothing"
            if self.expected_due_ns >= NEVER_NS
            else (
                f"sizes get {self.what} of their own after executions of about "
                f"{self.expected_due_ns / 1e9:.3g} s, when the time that they would have "
                "saved equals the time to make them"
            )
        )
        lines = [f"sizes that repeat: {self}", f"  {due}"]
        lines += [f"  {one}" for one in self.promoted]
        by_reason: dict[str, list[str]] = {}
        for sizes, why in self.refused:
            by_reason.setdefault(why, []).append(sizes_text(sizes))
        for why, refused in by_reason.items():
            more = f" and {len(refused) - _NAMED:,} more" if len(refused) > _NAMED else ""
            lines.append(f"  {'; '.join(refused[:_NAMED])}{more}: not promoted: {why}")
        return lines


def sizes_text(sizes: Sequence[tuple[str, int]]) -> str:
    """Format sizes by name, for people."""
    return ", ".join(f"{name} = {size}" for name, size in sizes)
