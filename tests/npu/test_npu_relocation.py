"""Models of torch_npu whose kernels' own arguments are patched, on the simulated NPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_loading import live, load
from npu_models import MODELS
from on_npu import check_same
from relocated_models import COPIED, RELOCATED, counts, notes, require_relocation, without

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend


def copies_between(simulator: AscendSimulator, call: Callable[[], object]) -> int:
    """The number of asynchronous copies that a call makes."""
    simulator.forget_calls()
    call()
    return simulator.calls("aclrtMemcpyAsync")


@pytest.mark.parametrize("name", ["mlp", "attention by parts"])
def test_every_slot_moves(name: str) -> None:
    model = MODELS[name]().eval()
    kept = []
    with load(copy.deepcopy(model).npu(), torch.zeros(2, 5, 16).npu()) as run:
        assert RELOCATED in notes(run)
        assert "the feature map can move" in notes(run)
        for moves in (False, True, True, False):
            x = torch.randn(2, 5, 16)
            moved, out = x.npu(), torch.full((2, 5, 16), float("nan")).npu()
            memory = torch.full((run.feature_map_bytes,), 255, dtype=torch.uint8).npu()
            run(moved, out=out, feature_map=memory if moves else None)
            check_same(out, model(x))
            assert bool((memory == 255).all()) is not moves
            kept += [moved, out, memory]
        assert run.last_execution.bytes_copied == 0


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels keep the runtime's argument blocks."""
    make = functools.partial(TorchAscendBackend, argument_table=False)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})


@pytest.mark.usefixtures("blocks")
def test_a_moved_slot_touches_only_blocks_that_hold_it(simulated_npu: AscendSimulator) -> None:
    """Three launches: x in the first and the last, y in the second, the output in the last."""
    run = load(lambda x, y: ((x + 1) * y) + x, torch.ones(4).npu(), torch.ones(4).npu())
    assert "since they are not in one table (not requested)" in notes(run)
    x, y, out = (torch.full((4,), float(number)).npu() for number in (2, 3, 0))
    run(x, y, out=out)
    torch.npu.synchronize()
    before = counts(run)
    assert copies_between(simulated_npu, lambda: run(x, y, out=out)) == 0
    assert counts(run) == before
    moved = [one.clone() for one in (x, y, out)]
    for index, n_blocks in enumerate((2, 1, 1)):
        tensors = [x, y, out]
        tensors[index] = moved[index]
        before = counts(run)
        assert copies_between(simulated_npu, lambda: run(*tensors[:2], out=tensors[2])) == n_blocks  # noqa: B023
        after = counts(run)
        assert (after[0] - before[0], after[1] - before[1]) == (n_blocks, 8 * n_blocks)
        assert run.last_execution.words_patched == n_blocks
        check_same(tensors[2], torch.full((4,), 11.0))
        run(x, y, out=out)
    run.close()


def test_an_output_where_an_earlier_launch_had_its_own(simulated_npu: AscendSimulator) -> None:
    """Torch gives the third launch's result the memory of the first one's: only one word moves."""
    with load(lambda x: ((x + 1) * 2).relu(), torch.ones(64).npu()) as run:
        x, out, other = torch.ones(64).npu(), torch.zeros(64).npu(), torch.zeros(64).npu()
        run(x, out=out)
        run(x, out=other)
        assert run.last_execution.words_patched == 1
        check_same(other, torch.full((64,), 4.0))
        run(x, out=other, feature_map=torch.empty(run.feature_map_bytes, dtype=torch.uint8).npu())
        assert run.last_execution.words_patched == 4


def test_a_pool_of_several_pieces_becomes_one_feature_map() -> None:
    """Large and small activations lie in separate pieces."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return (((x + 1) * 2).sum(-1) + 1).relu()

    with load(model, torch.ones(4, 1 << 18).npu()) as run:
        assert "the feature map can move" in notes(run)
        large = [one for one in run.program.values if one.name.startswith("scratch")]
        assert len(large) > 1
        assert run.feature_map_bytes == sum(one.size_bytes for one in large)
        expected = torch.full((4,), 1.0 + 4 * (1 << 18))
        memory = torch.full((run.feature_map_bytes,), 255, dtype=torch.uint8).npu()
        for given in (None, memory, None):
            check_same(run(torch.ones(4, 1 << 18).npu(), feature_map=given), expected)
        assert not bool((memory == 255).all())


def test_integers_that_look_like_an_input(simulated_npu: AscendSimulator) -> None:
    """Each block's tiling data holds one, and kernels refuse tiling data that was changed."""
    x = torch.ones(4).npu()
    look_alike = npu_device.operators().sim_operators_set_look_alike
    look_alike.argtypes = [npu_device.ctypes.c_uint64]
    try:
        look_alike(x.data_ptr())
        with load(lambda x: (x + 1) * 2, x) as run:
            check_same(run(x), torch.full((4,), 4.0))
            check_same(run(x.clone()), torch.full((4,), 4.0))
            assert RELOCATED in notes(run)
    finally:
        look_alike(0)


@pytest.mark.parametrize("index", range(6))
def test_the_proof_finds_each_word_that_was_missed(
    index: int, monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    """Of an input, of the output, and of the feature map."""
    captured = offload.capture(lambda x: ((x + 1) * 2).relu(), torch.ones(64).npu())
    with captured.load() as run:
        assert "6 words" in notes(run)
    before = live(simulated_npu)
    with monkeypatch.context() as patched:
        without(patched, index)
        require_relocation(patched)
        why = (
            r"(gives a different result|still writes).*relocation=False\) copies inputs and outputs"
        )
        with pytest.raises(offload.CaptureError, match=why):
            captured.load()
        assert live(simulated_npu) == before
        captured.load(verify=False).close()
    assert live(simulated_npu) == before


def test_a_proof_that_fails_has_inputs_and_outputs_copied(
    monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    """Relocation is an optional improvement; nothing of it is left when copies are used."""
    captured = offload.capture(lambda x: ((x + 1) * 2).relu(), torch.ones(64).npu())
    with captured.load() as run:
        assert RELOCATED in notes(run)
    before = live(simulated_npu)
    without(monkeypatch, 0)
    capture, live_at_captures = TorchAscendBackend._capture, []

    def noted(self: TorchAscendBackend, *args: Any) -> object:
        live_at_captures.append(live(simulated_npu))
        return capture(self, *args)

    monkeypatch.setattr(TorchAscendBackend, "_capture", noted)
    with captured.load() as run:
        for number in (2.0, -3.0):
            x, out = torch.full((64,), number).npu(), torch.full((64,), float("nan")).npu()
            check_same(run(x, out=out), torch.full((64,), max(0.0, (number + 1) * 2)))
        assert f"{COPIED}: the proof at load failed: the captured graph" in notes(run)
        # With a table, with the runtime's blocks, and with copies.
        assert live_at_captures == [before, before, before]
        assert simulated_npu.live("model") == before[0] + 1
    assert live(simulated_npu) == before


def test_shapes_of_inputs_and_memory_that_is_only_written() -> None:
    """Kernels get no address of operands used only for their shape, nor of `empty_like`."""
    with load(
        lambda x: torch.empty_like(x).copy_(torch.full_like(x, 3) + x), torch.ones(8).npu()
    ) as run:
        check_same(run(torch.ones(8).npu()), torch.full((8,), 4.0))
        assert "is copied" not in notes(run)
        assert "the feature map can move" in notes(run)


def test_the_proof_leaves_weights_that_are_written() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.arange(4.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x
            return self.total * 2

    model = Counter().npu()
    captured = offload.capture(model, torch.ones(4).npu())
    before = model.total.cpu()
    with captured.load() as run:
        assert RELOCATED in notes(run)
        check_same(model.total, before)
        check_same(run(torch.ones(4).npu()), (before + 1) * 2)


def test_discovery_captures_are_given_back(simulated_npu: AscendSimulator) -> None:
    x = torch.ones(64).npu()
    captured = offload.capture(lambda x: (x * 2).relu(), x)
    captured.load().close()
    before = live(simulated_npu)
    run = captured.load()
    assert simulated_npu.calls("aclmdlRICaptureBegin") % 3 == 0
    assert simulated_npu.live("model") == before[0] + 1
    run.close()
    assert live(simulated_npu) == before


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("nth", range(1, 6))
def test_a_copy_of_arguments_that_fails_is_done_again(
    nth: int, simulated_npu: AscendSimulator
) -> None:
    x, y = torch.ones(64).npu(), torch.full((64,), 3.0).npu()
    with load(lambda x: ((x * 2) + x).relu(), x) as run:
        out = torch.zeros(64).npu()
        run(x, out=out)
        torch.npu.synchronize()
        simulated_npu.forget_calls()
        simulated_npu.fail("aclrtMemcpyAsync", 507000, nth)
        fails = nth <= 3  # x in two blocks, the output in one
        other = torch.zeros(64).npu()
        try:
            run(y, out=other)
        except offload.ExecutionError:
            assert fails
        else:
            assert not fails
        simulated_npu.forget_calls()
        check_same(run(y, out=other), torch.full((64,), 9.0))
        check_same(run(x, out=out), torch.full((64,), 3.0))
