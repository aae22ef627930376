"""Claim: once it is recorded, one capture for all lengths serves many sooner than one for each.

40 requests of 31 lengths to a model of two layers: their total time, from the model until the last
result. Each contender begins anew in each round, without caches. The time of the recording itself
is reported as well: over symbolic sizes it takes many captures' time.

Also the time of one executable of all lengths for a known length, repeatedly or in turns with
another length, compared with an executable of that length alone.

Also the gain of a repeated length from its own kernels, and the cost to calls while these are made.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from measurements import Case, counted_figure, figure_of, ratio_of
from offload.host.promoted_sizes import FusedSizes
from turns import take_single_turns, take_turns

N_REQUESTS, N_LENGTHS, RECORDED = 40, 31, 24
OURS, FOR_EACH = "offload", "a capture for each length"
RECORDED_BEFORE, EAGER = "offload, recorded before", "eager"

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1_000,
    "max_position_embeddings": 256,
}
MODELS = {
    "bert": ("BertModel", TINY),
    "llama": ("LlamaModel", {**TINY, "num_key_value_heads": 2, "use_cache": False}),
}
DIM = Dim("n", min=2, max=128)
SHAPES = {"input_ids": {1: DIM}, "attention_mask": {1: DIM}}


def model_of(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind, options = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model: nn.Module = cls(cls.config_class(**options)).eval()
    return model


def request(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 900, (1, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def requests() -> list[dict[str, torch.Tensor]]:
    draw = random.Random(0)
    lengths = draw.sample(range(8, 129), N_LENGTHS)
    lengths += draw.choices(lengths, k=N_REQUESTS - N_LENGTHS)
    return [request(one) for one in draw.sample(lengths, len(lengths))]


def for_each_length(model: nn.Module, given: list[dict[str, torch.Tensor]]) -> list[Any]:
    runs: dict[int, Any] = {}
    results = []
    for one in given:
        length = one["input_ids"].shape[1]
        if length not in runs:
            runs[length] = offload.capture(model, **one).load()
        results.append(runs[length](**one))
    return results


@pytest.mark.parametrize("name", MODELS)
def test_many_lengths(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    model, given = model_of(name), requests()
    with torch.no_grad():
        kept = offload.capture(model, **request(RECORDED), dynamic_shapes=SHAPES)

        def all_of(captured: offload.Captured) -> list[Any]:
            run = captured.load(sizes=offload.Sizes(instances="256MiB"))
            return [run(**one) for one in given]

        def recorded_anew() -> list[Any]:
            return all_of(offload.capture(model, **request(RECORDED), dynamic_shapes=SHAPES))

        for got, one in zip(recorded_anew(), given, strict=True):
            assert torch.equal(got[0], model(**one)[0])
        contenders: dict[str, Callable[[], Any]] = {
            OURS: recorded_anew,
            FOR_EACH: lambda: for_each_length(model, given),
            RECORDED_BEFORE: lambda: all_of(kept),
            EAGER: lambda: [model(**one) for one in given],
        }
        times = take_single_turns(contenders, rounds=3)
        benchmark.pedantic(recorded_anew, rounds=1)
    record(
        Case(
            f"{N_REQUESTS} requests of {N_LENGTHS} lengths: {name}",
            ratios={
                FOR_EACH: ratio_of(times[FOR_EACH], times[RECORDED_BEFORE], at_least=1),
                OURS: ratio_of(times[OURS], times[RECORDED_BEFORE]),
                EAGER: ratio_of(times[EAGER], times[RECORDED_BEFORE]),
            },
            figures={one: figure_of([ns / 1e6 for ns in times[one]], "ms") for one in times},
        )
    )


ONE_LENGTH, IN_TURNS = "an executable of one length", "lengths in turns"


@pytest.mark.parametrize("name", MODELS)
def test_a_length_again(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    model = model_of(name)
    with torch.no_grad():
        captured = offload.capture(model, **request(RECORDED), dynamic_shapes=SHAPES)
        run = captured.load(sizes=offload.Sizes(instances="256MiB"))
        given, other = request(48), request(47)
        alone, other_alone = (captured.load(sizes=offload.Sizes()).at({"n": n}) for n in (48, 47))
        assert torch.equal(run(**given)[0], alone(**given)[0])
        assert torch.equal(run(**other)[0], other_alone(**other)[0])

        def in_turns() -> None:
            run(**given)
            run(**other)

        def both_alone() -> None:
            alone(**given)
            other_alone(**other)

        times = take_turns(
            {
                OURS: lambda: run(**given),
                ONE_LENGTH: lambda: alone(**given),
                IN_TURNS: in_turns,
                "both": both_alone,
            }
        )
        benchmark.pedantic(lambda: run(**given), rounds=1)
    record(
        Case(
            f"a length met before: {name}",
            ratios={
                ONE_LENGTH: ratio_of(times[ONE_LENGTH], times[OURS], at_least=1 / 1.05),
                IN_TURNS: ratio_of(times["both"], times[IN_TURNS], at_least=1 / 1.05),
            },
            figures={one: figure_of([ns / 1e3 for ns in times[one]], "us") for one in times},
        )
    )


PROMOTED, RESIDENT, OWN = "promoted", "one executable of all lengths", "its kernels, called alone"


def until_promoted(run: Any, given: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
    """Call until the length is promoted; return call times before its preparation and during it."""
    before: list[int] = []
    meanwhile: list[int] = []
    while not run.last_execution.was_promoted:
        begin_ns = time.perf_counter_ns()
        run(**given)
        took_ns = time.perf_counter_ns() - begin_ns
        report = run.instances.promotion
        assert not report.refused, run.explain()
        (meanwhile if report.preparing else before).append(took_ns)
    return before, meanwhile


@pytest.mark.parametrize("name", MODELS)
def test_a_length_that_repeats(
    benchmark: Any,
    record: Callable[[Case], None],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its own kernels, made beside calls: call times before, during and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is known beforehand
    soon = dataclasses.replace(FusedSizes.expected, preparation_ns=10**8)
    monkeypatch.setattr(FusedSizes, "expected", soon)
    model = model_of(name)
    with torch.no_grad():
        captured = offload.capture(model, **request(RECORDED), dynamic_shapes=SHAPES)
        run = captured.load(sizes=offload.Sizes(promoted="64MiB"), fuse=True)
        resident = captured.load(sizes=offload.Sizes())
        given = request(48)
        before, meanwhile = until_promoted(run, given)
        torch.testing.assert_close(run(**given)[0], model(**given)[0])
        assert torch.equal(resident(**given)[0], model(**given)[0])
        ((_, kernels),) = run._promoter.executables()
        times = take_turns(
            {
                PROMOTED: lambda: run(**given),
                OWN: lambda: kernels(**given),
                RESIDENT: lambda: resident(**given),
            }
        )
        benchmark.pedantic(lambda: run(**given), rounds=1)
    assert run.last_execution.was_promoted
    (one,) = run.instances.promotion.promoted
    figures = {which: figure_of([ns / 1e3 for ns in times[which]], "us") for which in times}
    figures["calls before"] = figure_of([ns / 1e3 for ns in before], "us")
    figures["calls meanwhile"] = figure_of([ns / 1e3 for ns in meanwhile], "us")
    figures["slowest call meanwhile"] = counted_figure(max(meanwhile) / 1e3, "us")
    figures["preparing it"] = counted_figure(one.preparation_ns / 1e9, "s")
    record(
        Case(
            f"a length that repeats: {name}",
            ratios={
                RESIDENT: ratio_of(times[RESIDENT], times[PROMOTED], at_least=1),
                OWN: ratio_of(times[OWN], times[PROMOTED], at_least=1 / 1.05),
            },
            figures=figures,
        )
    )


CALLED, SUBMITTED = "called one by one", "submitted one behind the other"


@pytest.mark.parametrize("name", MODELS)
def test_new_lengths_behind_one_another(
    benchmark: Any, record: Callable[[Case], None], name: str
) -> None:
    """Work hidden by a lane: numbers of the next length are computed while this one executes."""
    model = model_of(name)
    given = [request(length) for length in range(8, 129)]
    with torch.no_grad():
        captured = offload.capture(model, **request(RECORDED), dynamic_shapes=SHAPES)

        def new_run() -> Any:
            run = captured.load(sizes=offload.Sizes(instances="256MiB"))
            for length in (12, 16, 24, 32, 48, 64, 96, 128):  # each bucket's proofs
                run(**request(length))
            return run

        def called(run: Any) -> list[Any]:
            return [run(**one)[0] for one in given]

        def submitted(run: Any) -> list[Any]:
            tickets = [run.submit(**one) for one in given]
            return [ticket.result()[0] for ticket in tickets]

        times: dict[str, list[float]] = {CALLED: [], SUBMITTED: []}
        for one, other in zip(called(new_run()), submitted(new_run()), strict=True):
            assert torch.equal(one, other)
        for _ in range(25):
            for which, work in ((CALLED, called), (SUBMITTED, submitted)):
                run = new_run()
                begin_ns = time.perf_counter_ns()
                work(run)
                times[which].append((time.perf_counter_ns() - begin_ns) / len(given))
        benchmark.pedantic(lambda: called(new_run()), rounds=1)
    record(
        Case(
            f"new lengths, one behind the other: {name}",
            ratios={CALLED: ratio_of(times[CALLED], times[SUBMITTED])},
            figures={one: figure_of([ns / 1e3 for ns in times[one]], "us") for one in times},
        )
    )
