"""Models of torch_npu that draw random numbers, with their kernels' own arguments patched."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_draws import (
    OPERATORS,
    N,
    check_draws,
    copies_of,
    default_generator,
    draw_from_both,
    states,
)
from npu_loading import TELLING, live, load
from on_npu import fail_each_call
from relocated_models import RELOCATED, counts, notes, require_relocation, without

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend


@pytest.fixture(autouse=True)
def required(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed relocation is refused."""
    make = functools.partial(TorchAscendBackend, relocation=True)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})


def chain(x: torch.Tensor) -> torch.Tensor:
    """Only drawn numbers go through the feature map; the last launch reads the input."""
    return (torch.rand(N, device=x.device) * 2).relu() + x


@pytest.mark.parametrize("name", OPERATORS)
def test_every_slot_moves(name: str) -> None:
    model = OPERATORS[name]
    generator = default_generator()
    captured = offload.capture(model, torch.ones(N).npu())
    state = states([generator])
    with captured.load() as run:
        assert states([generator]) == state  # although the proof used it
        assert RELOCATED in notes(run)
        assert "is copied" not in notes(run)
        kept = []
        for moves in (False, True, True, False):
            x, out = torch.randn(N).npu(), torch.full((N,), float("nan")).npu()
            memory = torch.full((run.feature_map_bytes,), 255, dtype=torch.uint8).npu()
            before = generator.get_state()
            expected = model(x)
            after = states([generator])
            generator.set_state(before)
            run(x, out=out, feature_map=memory if moves else None)
            assert torch.equal(out, expected)
            assert states([generator]) == after
            assert bool((memory == 255).all()) is not moves or not run.feature_map_bytes
            kept += [x, out, memory]
        assert run.last_execution.bytes_copied == 0
        copied = run._loaded.resident.copy_counts
        assert (copied["enqueued"], copied["refreshes"]) == (0, 0)


def test_what_moved_is_patched_and_the_offset_is_written(simulated_npu: AscendSimulator) -> None:
    x, out = torch.ones(N).npu(), torch.ones(N).npu()
    with load(chain, x) as run:
        assert "8 words" in notes(run)
        run(x, out=out)
        copy, model = "aclrtMemcpyAsync", "aclmdlRIExecuteAsync"
        for tensors, n_blocks in (((x, out), 0), ((x.clone(), out), 1)):
            before = counts(run)
            made = [one.split()[0] for one in copies_of(simulated_npu, run, *tensors)]
            assert made == [copy] * (1 + n_blocks) + [model]
            assert counts(run) == (before[0] + n_blocks, before[1] + 8 * n_blocks)
            assert run.last_execution.words_patched == n_blocks
        memory = torch.empty(run.feature_map_bytes, dtype=torch.uint8).npu()
        run(x.clone(), out=out.clone(), feature_map=memory)
        assert run.last_execution.words_patched == 8
        check_draws(run, chain, x)


def test_generators_each_with_cells_of_their_own() -> None:
    one, other = (torch.Generator(device="npu").manual_seed(seed) for seed in (3, 4))

    x = torch.ones(N).npu()
    captured = offload.capture(draw_from_both, x, one, other)
    generators = [default_generator(), one, other]
    before = states(generators)
    with captured.load() as run:
        assert states(generators) == before
        for seed in (5, 6):
            one.manual_seed(seed)
            check_draws(run, draw_from_both, torch.randn(N).npu(), one, other)
        assert RELOCATED in notes(run)


@pytest.mark.parametrize("index", range(8))
def test_the_proof_finds_each_word_that_was_missed(
    index: int, monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    """Also where both executions would draw the same without different states."""
    captured = offload.capture(chain, torch.ones(N).npu())
    captured.load().close()
    before, state = live(simulated_npu), states([default_generator()])
    with monkeypatch.context() as patched:
        without(patched, index)
        require_relocation(patched)
        with pytest.raises(offload.CaptureError, match=r"gives a different result|still writes"):
            captured.load()
    assert live(simulated_npu) == before
    assert states([default_generator()]) == state


@pytest.mark.parametrize("function", TELLING)
def test_failures_of_a_load_leave_nothing(function: str, simulated_npu: AscendSimulator) -> None:
    """Other calls are failed in test_npu_random."""
    x = torch.ones(N).npu()
    captured = offload.capture(OPERATORS["rand"], x)
    captured.load().close()
    before, state = live(simulated_npu), states([default_generator()])

    def check(call: str) -> None:
        assert live(simulated_npu) == before, call
        assert states([default_generator()]) == state

    fail_each_call(simulated_npu, function, lambda: captured.load().close(), check)
    with captured.load() as run:
        check_draws(run, OPERATORS["rand"], x)


def test_memory_of_the_captures_that_were_compared_is_given_back(
    simulated_npu: AscendSimulator,
) -> None:
    x = torch.ones(N).npu()
    captured = offload.capture(chain, x)
    captured.load().close()
    before = live(simulated_npu)
    runs: list[Callable[..., torch.Tensor]] = []
    for _ in range(2):
        run = captured.load()
        check_draws(run, chain, x)
        assert simulated_npu.live("model") == before[0] + 1
        run.close()
        runs.append(run)
        assert live(simulated_npu) == before
