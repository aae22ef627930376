"""Models of torch_npu whose kernels get their arguments from one table, on the simulated NPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_loading import in_process_of_its_own, live, load
from on_npu import check_same
from relocated_models import COPIED, RELOCATED, counts, notes

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend, captured_table, torch_relocation

SET, UPDATE = "aclmdlRITaskSetParams", "aclmdlRIUpdate"
IN_TABLE, NO_TABLE = "blocks of one table of", "since they are not in one table"


@pytest.fixture
def runtime(simulated_npu: AscendSimulator) -> Iterator[AscendSimulator]:
    """It may lose the addresses of arguments until the test ends."""
    yield simulated_npu
    simulated_npu.set_keeps_addresses(True)


def chain(x: torch.Tensor) -> torch.Tensor:
    return ((x + 1) * 2).relu()


def check_chain(run: offload.Executable) -> None:
    """Right at the caller's addresses of the input, the output and the feature map."""
    for number, moves in ((2.0, False), (-3.0, True), (3.0, False)):
        x, out = torch.full((64,), number).npu(), torch.full((64,), float("nan")).npu()
        memory = torch.full((run.feature_map_bytes,), 255, dtype=torch.uint8).npu()
        run(x, out=out, feature_map=memory if moves else None)
        check_same(out, chain(x.cpu()))
        assert bool((memory == 255).all()) is not moves


def test_tasks_are_set_at_load_alone(simulated_npu: AscendSimulator) -> None:
    x = torch.ones(64).npu()
    captured = offload.capture(chain, x)
    simulated_npu.forget_calls()
    with captured.load() as run:
        assert (simulated_npu.calls(SET), simulated_npu.calls(UPDATE)) == (3, 1)
        assert f"6 words in 3 {IN_TABLE}" in notes(run)
        assert "(3 tasks set, 1 update)" in notes(run)
        check_chain(run)
        assert (simulated_npu.calls(SET), simulated_npu.calls(UPDATE)) == (3, 1)


def test_an_execution_takes_one_copy_of_what_changed(simulated_npu: AscendSimulator) -> None:
    """Three launches: x in the first and the last, y in the second, the output in the last."""
    x, y, out = (torch.full((4,), float(number)).npu() for number in (2, 3, 0))
    run = load(lambda x, y: ((x + 1) * y) + x, torch.ones(4).npu(), torch.ones(4).npu())
    run(x, y, out=out)
    torch.npu.synchronize()
    moved = [one.clone() for one in (x, y, out)]
    for index, n_words in enumerate((2, 1, 1)):
        tensors = [x, y, out]
        tensors[index] = moved[index]
        before = counts(run)
        simulated_npu.forget_calls()
        run(*tensors[:2], out=tensors[2])
        assert simulated_npu.calls("aclrtMemcpyAsync") == 1
        copies, n_bytes = (now - then for now, then in zip(counts(run), before, strict=True))
        assert (copies, n_bytes == 8) == (1, n_words == 1)
        assert run.last_execution.words_patched == n_words
        check_same(tensors[2], torch.full((4,), 11.0))
        run(x, y, out=out)
    before = counts(run)
    run(x, y, out=out)
    assert counts(run) == before
    run.close()


def test_a_copy_that_fails_is_done_again(simulated_npu: AscendSimulator) -> None:
    x, y = torch.ones(64).npu(), torch.full((64,), 3.0).npu()
    with load(chain, x) as run:
        out, other = torch.zeros(64).npu(), torch.zeros(64).npu()
        run(x, out=out)
        torch.npu.synchronize()
        simulated_npu.forget_calls()
        simulated_npu.fail("aclrtMemcpyAsync", 507000, 1)
        with pytest.raises(offload.ExecutionError, match="copying kernel arguments"):
            run(y, out=other)
        simulated_npu.forget_calls()
        check_same(run(y, out=other), torch.full((64,), 8.0))
        check_same(run(x, out=out), torch.full((64,), 4.0))


def test_integers_that_look_like_an_own_block_stay(simulated_npu: AscendSimulator) -> None:
    """Each block's tiling data holds one, and kernels refuse tiling data that was changed."""
    x = torch.ones(64).npu()
    captured = offload.capture(chain, x)
    seen: list[int] = []
    read = torch_relocation.Relocator._read

    def note(self: Any, model: Any) -> Any:
        found = read(self, model)
        seen.append(found.tasks[0].address)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch_relocation.Relocator, "_read", note)
        captured.load().close()
    look_alike = npu_device.operators().sim_operators_set_look_alike
    look_alike.argtypes = [npu_device.ctypes.c_uint64]
    try:
        for address in sorted(set(seen)):
            look_alike(address + 8)
            with captured.load() as run:
                assert RELOCATED in notes(run)
                check_chain(run)
    finally:
        look_alike(0)


def test_what_is_loaded_is_given_back(simulated_npu: AscendSimulator) -> None:
    captured = offload.capture(chain, torch.ones(64).npu())
    captured.load().close()
    before = live(simulated_npu)
    for _ in range(3):
        run = captured.load()
        check_chain(run)
        run.close()
        assert live(simulated_npu) == before


# ---- models without a table ----------------------------------------------------------------------


def test_what_was_not_asked_for_is_not_done(
    monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    make = functools.partial(TorchAscendBackend, argument_table=False)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    captured = offload.capture(chain, torch.ones(64).npu())
    simulated_npu.forget_calls()
    with captured.load() as run:
        check_chain(run)
        assert (simulated_npu.calls(SET), simulated_npu.calls(UPDATE)) == (0, 0)
        assert f"{NO_TABLE} (not requested)" in notes(run)


WITHOUT_UPDATES = """
print(run(torch.full((4,), 2.0).npu()).cpu().tolist(), *run.notes())
"""


@pytest.mark.parametrize("function", [SET, UPDATE, "aclmdlRIKernelTaskGetAttribute"])
def test_a_runtime_without_the_functions_keeps_its_blocks(function: str, tmp_path: Any) -> None:
    done = in_process_of_its_own(tmp_path, f"simulator.hide({function!r})", WITHOUT_UPDATES)
    assert done.returncode == 0, done.stderr
    assert "[4.0, 4.0, 4.0, 4.0]" in done.stdout
    assert RELOCATED in done.stdout
    assert NO_TABLE in done.stdout
    assert function in done.stdout


def test_a_kernel_that_may_not_move_keeps_all_blocks(
    monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    def refuse(*_: object) -> None:
        raise captured_table.NoTable("task 0 has an address in those of task 1")

    monkeypatch.setattr(captured_table, "_refuse_foreign", refuse)
    captured = offload.capture(chain, torch.ones(64).npu())
    simulated_npu.forget_calls()
    with captured.load() as run:
        assert simulated_npu.calls(SET) == 0
        assert simulated_npu.calls("aclmdlRICaptureBegin") == 3
        check_chain(run)
        assert f"{NO_TABLE} (task 0 has an address in those of task 1)" in notes(run)


@pytest.mark.parametrize(("function", "nth"), [(SET, 1), (SET, 3), (UPDATE, 1)])
def test_an_update_that_is_refused_has_the_model_captured_again(
    function: str, nth: int, simulated_npu: AscendSimulator
) -> None:
    """It may no longer work; the next one's kernels keep the runtime's blocks."""
    captured = offload.capture(chain, torch.ones(64).npu())
    captured.load().close()
    before = live(simulated_npu)
    simulated_npu.forget_calls()
    simulated_npu.fail(function, 507000, nth)
    with captured.load() as run:
        assert simulated_npu.calls("aclmdlRICaptureBegin") == 4
        simulated_npu.forget_calls()
        assert simulated_npu.live("model") == before[0] + 1
        check_chain(run)
        assert RELOCATED in notes(run)
        assert NO_TABLE in notes(run)
        assert "507000" in notes(run)
    assert live(simulated_npu) == before


def test_a_runtime_that_loses_the_address_has_the_model_captured_again(
    runtime: AscendSimulator,
) -> None:
    captured = offload.capture(chain, torch.ones(64).npu())
    runtime.set_keeps_addresses(False)
    with captured.load() as run:
        check_chain(run)
        assert "did not keep the address of the argument table" in notes(run)


def test_a_proof_that_fails_with_a_table_is_made_without_one(
    monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    """Two words of a kernel are swapped."""
    captured = offload.capture(chain, torch.ones(64).npu())
    captured.load().close()
    before = live(simulated_npu)
    table_parts = captured_table.table_parts

    def miss(*given: Any) -> captured_table.TableParts:
        parts = table_parts(*given)
        first, second, *rest = parts.words
        return captured_table.TableParts(parts.kernels, [second, first, *rest], parts.own)

    monkeypatch.setattr(torch_relocation, "table_parts", miss)
    with captured.load() as run:
        check_chain(run)
        assert f"{NO_TABLE} (the proof at load failed with an argument table: " in notes(run)
        assert RELOCATED in notes(run)
    assert live(simulated_npu) == before


@pytest.mark.parametrize("relocation", [None, True])
def test_required_or_not_relocation_has_a_table(
    relocation: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = functools.partial(TorchAscendBackend, relocation=relocation)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    with load(chain, torch.ones(64).npu()) as run:
        assert IN_TABLE in notes(run)
        assert COPIED not in notes(run)
        check_chain(run)
