"""Streamed bytes of files, once in pinned memory for all executables on a device.

On each simulated device.
"""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from budgets import Headed, weight_bytes
from device_streaming import (
    GIVEN,
    check,
    expected_of,
    poison_after_last_use,
)
from shared_stores import load
from stored import without_memory
from streamed_ranges import PAGE, changed, settled, union_bytes

import offload
from offload.backends.captured.device_streaming import store_bytes
from offload.console.amounts import show_bytes
from offload.observe.report import report_on, report_table

pytestmark = pytest.mark.slow


@pytest.fixture
def single(headed, tmp_path):
    """Another program of the same files, for one row."""
    return offload.capture(without_memory(Headed), torch.randn(1, 128), weights=tmp_path)


def test_two_executables_of_one_program_pin_once(device, headed, headed_budget, pinned):
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(headed, inputs)
    with load(headed, device, headed_budget) as one:
        plan = one.streaming.plan
        needed = pinned()
        assert needed == store_bytes(plan)
        assert one.streaming.store_bytes == plan.transfer_bytes
        assert one.streaming.shared_store_bytes == 0
        other = load(headed, device, headed_budget)
        assert pinned() == needed
        for run in (one, other):
            assert run.streaming.store_bytes == plan.transfer_bytes
            assert run.streaming.shared_store_bytes == plan.transfer_bytes
            poison_after_last_use(device.backend, run)
            check(run, inputs, expected, device.settle)
        other.close()
        assert other.streaming.store_bytes == 0
        assert pinned() == needed
        assert one.streaming.shared_store_bytes == 0
        check(one, inputs, expected, device.settle)
    assert pinned() == 0


@pytest.mark.parametrize("first_closes", [True, False])
def test_two_programs_of_the_same_files_pin_once(
    first_closes, device, headed, single, headed_budget, pinned
):
    """Under separate budgets: bytes that only one of them streams are pinned in addition."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    single_inputs = [torch.randn(1, 128) for _ in range(3)]
    expected, single_expected = expected_of(headed, inputs), expected_of(single, single_inputs)
    budgets = headed_budget, (headed_budget + weight_bytes(headed.program)) // 2
    for small, large in (budgets, budgets[::-1]):
        one, other = load(headed, device, small), load(single, device, large)
        both = union_bytes(one, other)
        assert both <= pinned() <= both + PAGE * (len(one.streaming.plan.transfers) + 12)
        assert both < one.streaming.store_bytes + other.streaming.store_bytes
        shared = one.streaming.shared_store_bytes
        assert shared == one.streaming.store_bytes + other.streaming.store_bytes - both
        assert shared == other.streaming.shared_store_bytes
        check(one, inputs, expected, device.settle)
        check(other, single_inputs, single_expected, device.settle)
        rest, its_inputs = (other, single_inputs) if first_closes else (one, inputs)
        (one if first_closes else other).close()
        its_program = single if first_closes else headed
        again = expected_of(its_program, its_inputs * 2)[3:]
        check(rest, its_inputs, again, device.settle)
        assert rest.streaming.shared_store_bytes == 0
        rest.close()
        assert pinned() == 0


def test_copies_in_flight_of_another_executable_read_on(device, headed, headed_budget, pinned):
    """The device does nothing until a wait: only then does the other one copy."""
    inputs = [torch.randn(*GIVEN) for _ in range(2)]
    expected = [tensor for (tensor,) in expected_of(headed, inputs)]
    one = load(headed, device, headed_budget)
    with load(headed, device, headed_budget) as other:
        check(other, inputs, [[tensor] for tensor in expected], device.settle)
        device.controls.set_eager(False)
        outputs = [torch.zeros_like(tensor) for tensor in expected]
        for given, out in zip(inputs, outputs, strict=True):
            other(given, out=out)
        assert not outputs[1].any()
        one.close()
        device.synchronize()
        for out, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(out, wanted)
        device.controls.set_eager(True)
    assert pinned() == 0


def test_files_in_parts_are_shared_by_part(device, tmp_path, headed_budget, pinned):
    (tmp_path / "parts").mkdir()
    content = safetensors.torch.load_file(tmp_path / "model.safetensors")
    names = sorted(content)
    for number in range(3):
        part = {name: content[name] for name in names[number::3]}
        safetensors.torch.save_file(part, tmp_path / "parts" / f"model-{number}.safetensors")
    captured = offload.capture(
        without_memory(Headed), torch.randn(*GIVEN), weights=tmp_path / "parts"
    )
    given = torch.randn(*GIVEN)
    expected = expected_of(captured, [given])
    with (
        load(captured, device, headed_budget) as one,
        load(captured, device, headed_budget) as other,
    ):
        assert pinned() == store_bytes(one.streaming.plan)
        check(one, [given], expected, device.settle)
        check(other, [given], expected, device.settle)
        # A copy of the file is another file.
        with load(
            offload.capture(without_memory(Headed), given, weights=tmp_path / "model.safetensors"),
            device,
            headed_budget,
        ) as alone:
            assert alone.streaming.shared_store_bytes == 0
            assert pinned() == 2 * store_bytes(one.streaming.plan)


def test_a_file_that_was_written_between_two_loads_is_not_shared(
    device, headed, headed_budget, pinned, tmp_path
):
    given = torch.randn(*GIVEN)
    first = expected_of(headed, [given])
    with load(headed, device, headed_budget) as one:
        check(one, [given], first, device.settle)
        changed(tmp_path / "model.safetensors")
        with load(headed, device, headed_budget) as other:
            assert other.streaming.shared_store_bytes == 0
            assert pinned() == 2 * store_bytes(one.streaming.plan)
            check(other, [given], expected_of(headed, [given]), device.settle)
            settled(one, given, device)  # its streamed bytes are in memory


def test_an_executable_may_have_a_store_of_its_own(device, headed, headed_budget, pinned):
    with load(headed, device, headed_budget) as one:
        needed = pinned()
        with load(headed, device, headed_budget, share_store=False) as other:
            assert pinned() == 2 * needed
            assert other.streaming.shared_store_bytes == one.streaming.shared_store_bytes == 0
            new = {name: torch.zeros_like(t) for name, t in Headed().state_dict().items()}
            other.streaming.replace(new)
            given = torch.randn(*GIVEN)
            assert not settled(other, given, device).any()
            assert pinned() == 2 * needed
            check(one, [given], expected_of(headed, [given]), device.settle)


def test_explain_and_report_say_what_is_shared(device, headed, headed_budget):
    with load(headed, device, headed_budget) as one, load(headed, device, headed_budget) as other:
        size = one.streaming.plan.transfer_bytes
        shown = show_bytes(size)
        text = other.streaming.explain()
        assert f"store: {shown} of the host's memory, of which {shown} are shared with" in text
        one(torch.randn(*GIVEN))
        table = report_table(report_on(one, [one.last_execution]))
        rows = dict(zip(*(column.cells for column in table.columns), strict=True))
        assert rows["  in the host's memory"] == f"{size:,} bytes"
        assert rows["    shared with others"] == f"{size:,} bytes"
