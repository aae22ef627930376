"""Claim: a gather's host work grows with the slots that moved, not with the words that hold them.

Every input moves, and is read by this many launches, each with a word for its address. A refresh by
the host writes each word; a gather on the device gets only the bases. Sixteen times the words may
take it twice as long, since the executions between leave colder caches. Passing the written range
to the runtime is shown as well, without a promise: the runtime is simulated, and its own work grows
with the launches that it holds. Checking arguments is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ascend_simulator
import pytest
import torch

import offload
from header_runs import REFRESHES, executable
from measurements import Case, Curve, figure_of, ratio_of

SLOTS = (50, 100, 200, 400)
WORDS = (1, 4, 16)
N_SLOTS, N_WORDS = 200, 4
"""Values of the curve along the other axis."""

ROUNDS = 20
WRITTEN, GIVEN = "decided and written", "given to the runtime"
Size = tuple[int, int]
"""Inputs, and words that hold the address of each."""
Times = dict[str, list[int]]
"""All rounds of `WRITTEN` and of `GIVEN`, in nanoseconds."""

AXES: list[tuple[str, str, dict[int, Size]]] = [
    (f"{N_SLOTS} slots, each of so many words", "words", {n: (N_SLOTS, n) for n in WORDS}),
    (f"so many slots, each of {N_WORDS} words", "slots", {n: (n, N_WORDS) for n in SLOTS}),
]


@pytest.fixture
def ascend() -> Iterator[ascend_simulator.AscendSimulator]:
    """The simulated runtime."""
    yield from ascend_simulator.for_a_test()


def read_often(n_words: int) -> Callable[..., list[torch.Tensor]]:
    """A result for each input, which is read by `n_words` launches."""

    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = [one.neg() for one in inputs]
        for _ in range(n_words - 1):
            results = [one.add(given) for one, given in zip(results, inputs, strict=True)]
        return results

    return function


def header_ns(
    run: offload.Executable,
    ascend: ascend_simulator.AscendSimulator,
    n_slots: int,
    n_written: int,
) -> Times:
    """Times of executions in which every input moves and this many words are written."""
    sets = [[torch.ones(4) for _ in range(n_slots)] for _ in range(2)]
    out = [torch.empty(4) for _ in range(n_slots)]
    times: Times = {WRITTEN: [], GIVEN: []}
    for index in range(ROUNDS + 2):
        run(*sets[index % 2], out=out)
        ascend.call("aclrtSynchronizeDevice")
        if index > 1:
            last = run.last_execution
            assert (last.slots_changed, last.words_patched) == (n_slots, n_written)
            times[WRITTEN].append(last.policy_ns + last.patch_ns)
            times[GIVEN].append(last.submit_ns)
    return times


def measure(
    ascend: ascend_simulator.AscendSimulator,
    monkeypatch: pytest.MonkeyPatch,
    refresh: str,
    size: Size,
) -> Times:
    inputs = [torch.ones(4) for _ in range(size[0])]
    with executable(ascend, monkeypatch, refresh, read_often(size[1]), inputs) as run:
        ascend.set_eager(False)  # enqueued work runs after the stages
        try:
            n_written = size[0] * size[1] if refresh == "host" else size[0]
            return header_ns(run, ascend, size[0], n_written)
        finally:
            ascend.set_eager(True)


def case_of(title: str, x_name: str, found: Mapping[str, Mapping[int, Times]]) -> Case:
    """Curves of each refresh along `x_name`, and the ratio of the last point to the first."""
    least, most = (at(next(iter(found.values()))) for at in (min, max))
    return Case(
        title,
        ratios={
            f"{refresh}: {least} beside {most} {x_name}": ratio_of(
                times[least][WRITTEN],
                times[most][WRITTEN],
                at_least=0.5 if x_name == "words" and refresh != "host" else None,
            )
            for refresh, times in found.items()
        },
        curves={
            f"{refresh}: {part}": Curve(
                x_name, tuple(times), tuple(figure_of(one[part], "ns") for one in times.values())
            )
            for refresh, times in found.items()
            for part in (WRITTEN, GIVEN)
        },
    )


@pytest.mark.parametrize("axis", AXES, ids=[axis[1] for axis in AXES])
def test_gather(
    benchmark: Any,
    record: Callable[[Case], None],
    ascend: ascend_simulator.AscendSimulator,
    monkeypatch: pytest.MonkeyPatch,
    axis: tuple[str, str, dict[int, Size]],
) -> None:
    title, x_name, sizes = axis

    def found() -> dict[str, dict[int, Times]]:
        return {
            refresh: {x: measure(ascend, monkeypatch, refresh, size) for x, size in sizes.items()}
            for refresh in REFRESHES
        }

    record(case_of(title, x_name, benchmark.pedantic(found, rounds=1)))
