"""Models of torch_npu whose kernels' own arguments are patched, on the simulated NPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import npu_device
import pytest
import torch
from ascend_client import NO_STREAM_RESOURCE, RESOURCE_ALLOC_FAIL
from ascend_simulator import AscendSimulator
from npu_loading import TELLING, in_process_of_its_own, live, load
from npu_models import MODELS
from on_npu import check_same
from relocated_models import COPIED, RELOCATED, counts, notes, require_relocation, without

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend, torch_backend

DEVICE_TO_DEVICE = 3  # aclrtMemcpyKind


@pytest.fixture
def firmware(simulated_npu: AscendSimulator) -> Iterator[AscendSimulator]:
    """It may have another chip, no software SQ and unreported tasks, until the test ends."""
    yield simulated_npu
    simulated_npu.set_software_sq(True)
    simulated_npu.set_tells_all_tasks(True)
    simulated_npu.set_soc_name("Ascend910B1")


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


@pytest.mark.parametrize("code", [NO_STREAM_RESOURCE, RESOURCE_ALLOC_FAIL])
@pytest.mark.parametrize("nth", [2, 3])
@pytest.mark.parametrize("function", ["aclmdlRICaptureBegin", "aclmdlRICaptureEnd"])
def test_without_streams_for_more_captures_the_first_one_is_loaded(
    function: str, nth: int, code: int, simulated_npu: AscendSimulator
) -> None:
    x = torch.ones(64).npu()
    captured = offload.capture(lambda x: (x * 2).relu(), x)
    captured.load().close()
    before = live(simulated_npu)
    simulated_npu.forget_calls()
    simulated_npu.fail(function, code, nth)
    with captured.load() as run:
        simulated_npu.forget_calls()
        assert "no memory for the captures that relocation needs" in notes(run)
        assert COPIED in notes(run)
        check_same(run(x), torch.full((64,), 2.0))
    assert live(simulated_npu) == before


def test_without_memory_for_more_captures_the_first_one_is_loaded(
    firmware: AscendSimulator,
) -> None:
    x = torch.ones(4, 1 << 18).npu()
    captured = offload.capture(lambda x: ((x + 1) * 2).sum(-1), x)
    captured.load().close()
    before, seen = live(firmware), []
    try:
        for n_mib in range(0, 200, 20):
            firmware.set_memory_limit(before[3] + (n_mib << 20))
            try:
                with captured.load(verify=False) as run:
                    check_same(run(x), torch.full((4,), 4.0 * (1 << 18)))
                    is_relocated = RELOCATED in notes(run)
                    assert is_relocated or "no memory for the captures" in notes(run)
                    seen.append(RELOCATED if is_relocated else COPIED)
            except offload.OutOfMemory:
                seen.append("refused")
            torch.npu.empty_cache()
    finally:
        firmware.set_memory_limit(64 << 30)
    assert seen == sorted(seen, key=["refused", COPIED, RELOCATED].index)
    assert {COPIED, RELOCATED} <= set(seen)
    assert live(firmware) == before


def test_without_memory_for_the_proof_its_advice_is_to_leave_it_out(
    firmware: AscendSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4, 1 << 18).npu()
    captured = offload.capture(lambda x: ((x + 1) * 2).sum(-1), x)
    captured.load().close()
    before = live(firmware)
    prove = torch_backend.prove_relocation

    def prove_without_memory(*args: Any) -> None:
        torch.npu.empty_cache()
        firmware.set_memory_limit(live(firmware)[3])
        prove(*args)

    monkeypatch.setattr(torch_backend, "prove_relocation", prove_without_memory)
    try:
        with pytest.raises(offload.OutOfMemory, match=r"load\(verify=False\) leaves it out"):
            captured.load()
    finally:
        firmware.set_memory_limit(64 << 30)
    torch.npu.empty_cache()
    assert live(firmware) == before


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


def test_without_software_sq_tensors_are_copied(firmware: AscendSimulator) -> None:
    firmware.set_software_sq(False)
    x = torch.ones(4).npu()
    captured = offload.capture(lambda x: x + 1, x)
    with captured.load() as run:
        check_same(run(x), torch.full((4,), 2.0))
        assert COPIED in notes(run)
        assert "207000" in notes(run)
        with pytest.raises(offload.BindingError, match="stays where it was loaded"):
            run(x, feature_map=torch.empty(64, dtype=torch.uint8).npu())
    with pytest.raises(offload.BackendUnavailable, match="software SQ"):
        TorchAscendBackend(relocation=True).prepare(captured.bound)


@pytest.mark.parametrize("function", TELLING)
def test_a_runtime_that_refuses_to_tell_leaves_copies(
    function: str, simulated_npu: AscendSimulator
) -> None:
    x = torch.ones(4).npu()
    captured = offload.capture(lambda x: x + 1, x)
    simulated_npu.forget_calls()
    simulated_npu.fail(function, 507000, 1)
    with captured.load() as run:
        simulated_npu.forget_calls()
        check_same(run(x), torch.full((4,), 2.0))
        assert COPIED in notes(run)
        assert "507000" in notes(run)


OLD_RUNTIME = """
print(" ".join(run.notes()))
"""


@pytest.mark.parametrize("version", ["8.1", "8.5"])
def test_older_runtimes_copy(version: str, tmp_path: Any) -> None:
    done = in_process_of_its_own(tmp_path, f'simulator.set_personality("{version}")', OLD_RUNTIME)
    assert done.returncode == 0, done.stderr
    assert COPIED in done.stdout
    assert "aclmdlRIGetTasksByStream" in done.stdout


def test_on_310p_tensors_are_copied(firmware: AscendSimulator) -> None:
    """It captures models, and reports nothing about their tasks."""
    firmware.set_soc_name("Ascend310P3")
    with load(lambda x: x + 1, torch.ones(4).npu()) as run:
        check_same(run(torch.ones(4).npu()), torch.full((4,), 2.0))
        assert f"{COPIED}: the parameters of a model's tasks cannot be read here" in notes(run)
        assert "Ascend310P3 has 1024 for all its users" in notes(run)


@pytest.mark.parametrize("soc_name", ["Ascend910A", "Ascend310B1"])
def test_chips_that_capture_nothing_are_refused(soc_name: str, firmware: AscendSimulator) -> None:
    x = torch.ones(4).npu()
    captured = offload.capture(lambda x: x + 1, x)
    captured.load().close()
    before = live(firmware)
    firmware.set_soc_name(soc_name)
    with pytest.raises(offload.ExecutionError, match=r"cannot begin.*207000.* 910 and"):
        captured.load()
    firmware.set_soc_name("Ascend910B1")
    assert live(firmware) == before
    captured.load().close()


def test_what_was_not_asked_for_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(TorchAscendBackend, relocation=False)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    with load(lambda x: x + 1, torch.ones(4).npu()) as run:
        assert "are not relocated: not requested" in notes(run)


@pytest.fixture
def runtime_copy(simulated_npu: AscendSimulator) -> Iterator[Callable[..., torch.Tensor]]:
    """An operator that copies by a task of the runtime, whose addresses are not reported."""
    library = torch.library.Library("offload_tests", "FRAGMENT")
    library.define("runtime_copy(Tensor x) -> Tensor")

    def copy_by_runtime(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        stream = torch.npu.current_stream().npu_stream
        addresses = (made.data_ptr(), x.nbytes, x.data_ptr(), x.nbytes)
        simulated_npu.call("aclrtMemcpyAsync", *addresses, DEVICE_TO_DEVICE, stream)
        return made

    library.impl("runtime_copy", copy_by_runtime, "PrivateUse1")
    yield torch.ops.offload_tests.runtime_copy
    library._destroy()


def test_what_an_unreadable_task_touches_is_copied(
    runtime_copy: Callable[..., torch.Tensor],
) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, runtime_copy(y)

    with load(model, torch.ones(8).npu(), torch.ones(8).npu()) as run:
        for number in (2.0, 3.0):
            x, y = torch.full((8,), number), torch.full((8,), -number)
            one, other = run(x.npu(), y.npu())
            check_same(one, x + 1)
            check_same(other, y)
        assert "cannot be read" in notes(run)
        assert "copied: tasks of the model copy them" in notes(run)
        assert "the feature map stays there" in notes(run)
        assert run._loaded.resident.refresh_counts["copies"]
        with pytest.raises(offload.BindingError, match="stays where it was loaded"):
            run(x.npu(), y.npu(), feature_map=torch.empty(1 << 22, dtype=torch.uint8).npu())


HIDDEN: dict[str, Callable[..., Callable[[torch.Tensor], torch.Tensor]]] = {
    "first": lambda hidden: lambda x: (hidden(x) * 2).relu(),
    "middle": lambda hidden: lambda x: hidden(x * 2).relu(),
    "last": lambda hidden: lambda x: hidden((x * 2).relu()),
    "all": lambda hidden: hidden,
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("place", HIDDEN)
def test_what_a_launch_without_tasks_touches_is_copied(
    place: str,
    verify: bool,
    runtime_copy: Callable[..., torch.Tensor],
    firmware: AscendSimulator,
) -> None:
    """The runtime does not return tasks of the AI CPU."""
    firmware.set_tells_all_tasks(False)
    model = HIDDEN[place](runtime_copy)
    captured = offload.capture(model, torch.ones(8).npu())
    kept = []
    with captured.load(verify=verify) as run:
        told = notes(run)
        for number in (2.0, -3.0):
            x = torch.full((8,), number).npu()
            out = torch.full((8,), float("nan")).npu()
            check_same(run(x, out=out), HIDDEN[place](lambda x: x)(x.cpu()))
            kept += [x, out]
        assert "reports no task of offload_tests::runtime_copy" in told
        assert ("the feature map stays there" in told) is (place != "all")
        assert (COPIED in told) is (place == "all")
    if place == "all":
        return
    with pytest.MonkeyPatch.context() as patched:  # available where requested
        require_relocation(patched)
        captured.load(verify=verify).close()


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
