"""Models of torch_npu that are not relocated: copied instead or refused, on the simulated NPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ascend_client import NO_STREAM_RESOURCE, RESOURCE_ALLOC_FAIL
from ascend_simulator import AscendSimulator
from npu_loading import TELLING, in_process_of_its_own, live, load
from on_npu import check_same
from relocated_models import COPIED, RELOCATED, notes, require_relocation

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
