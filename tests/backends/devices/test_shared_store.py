"""Streamed bytes of files, once in pinned memory for all executables on a device that need them.

On each simulated device. New content in a separate part is handled differently: copies in a CUDA
graph can be given another source, those in an Ascend model cannot.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading

import pytest
import safetensors.torch
import torch
from budgets import Headed, weight_bytes
from device_streaming import (
    GIVEN,
    LOADS,
    check,
    expected_of,
    failing_load,
    floor_on,
    on_devices,
    poison_after_last_use,
)
from shared_stores import file_weights, load, other_weights
from stored import save_weights, without_memory

import offload
from offload.backends import host_memory
from offload.backends.captured.device_streaming import store_bytes
from offload.console.amounts import show_bytes
from offload.observe.report import report_on, report_table

pytestmark = pytest.mark.slow

PAGE = 4096


@pytest.fixture
def headed(tmp_path):
    save_weights(Headed().eval(), tmp_path)
    return offload.capture(without_memory(Headed), torch.randn(*GIVEN), weights=tmp_path)


@pytest.fixture
def least_budget(headed, device) -> int:
    return floor_on(headed, device.backend)


@pytest.fixture
def single(headed, tmp_path):
    """Another program of the same files, for one row."""
    return offload.capture(without_memory(Headed), torch.randn(1, 128), weights=tmp_path)


@pytest.fixture
def pinned(device, headed):
    """Bytes pinned since the test began."""
    gc.collect()
    before = device.controls.host_bytes

    def count() -> int:
        return device.controls.host_bytes - before

    return count


def streamed_ranges(run) -> dict[str, tuple[int, int]]:
    """For each streamed weight the range of bytes that its transfer copies."""
    pieces = [run.streaming.plan.pieces[one.piece] for one in run.streaming.plan.transfers]
    return {
        run.bound.bindings.stored[one.value].name: (
            one.offset_bytes,
            one.offset_bytes + one.size_bytes,
        )
        for one in pieces
    }


def union_bytes(*runs) -> int:
    """The union of all streamed bytes; a weight is streamed from some offset to its end."""
    ranges = [streamed_ranges(run) for run in runs]
    names = {name for one in ranges for name in one}
    found = [[one[name] for one in ranges if name in one] for name in names]
    return sum(max(end for _, end in one) - min(begin for begin, _ in one) for one in found)


def changed(path, factor: float = 2.0) -> None:
    """Rewrite a file in place."""
    content = {name: one * factor for name, one in safetensors.torch.load_file(path).items()}
    with path.open("r+b") as file:
        file.write(safetensors.torch.save(content))


def test_two_executables_of_one_program_pin_once(device, headed, least_budget, pinned):
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(headed, inputs)
    with load(headed, device, least_budget) as one:
        plan = one.streaming.plan
        needed = pinned()
        assert needed == store_bytes(plan)
        assert one.streaming.store_bytes == plan.transfer_bytes
        assert one.streaming.shared_store_bytes == 0
        other = load(headed, device, least_budget)
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
    first_closes, device, headed, single, least_budget, pinned
):
    """Under separate budgets: bytes that only one of them streams are pinned in addition."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    single_inputs = [torch.randn(1, 128) for _ in range(3)]
    expected, single_expected = expected_of(headed, inputs), expected_of(single, single_inputs)
    budgets = least_budget, (least_budget + weight_bytes(headed.program)) // 2
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


def test_copies_in_flight_of_another_executable_read_on(device, headed, least_budget, pinned):
    """The device does nothing until a wait: only then does the other one copy."""
    inputs = [torch.randn(*GIVEN) for _ in range(2)]
    expected = [tensor for (tensor,) in expected_of(headed, inputs)]
    one = load(headed, device, least_budget)
    with load(headed, device, least_budget) as other:
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


def test_files_in_parts_are_shared_by_part(device, tmp_path, least_budget, pinned):
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
    with load(captured, device, least_budget) as one, load(captured, device, least_budget) as other:
        assert pinned() == store_bytes(one.streaming.plan)
        check(one, [given], expected, device.settle)
        check(other, [given], expected, device.settle)
        # A copy of the file is another file.
        with load(
            offload.capture(without_memory(Headed), given, weights=tmp_path / "model.safetensors"),
            device,
            least_budget,
        ) as alone:
            assert alone.streaming.shared_store_bytes == 0
            assert pinned() == 2 * store_bytes(one.streaming.plan)


def test_a_file_that_was_written_between_two_loads_is_not_shared(
    device, headed, least_budget, pinned, tmp_path
):
    given = torch.randn(*GIVEN)
    first = expected_of(headed, [given])
    with load(headed, device, least_budget) as one:
        check(one, [given], first, device.settle)
        changed(tmp_path / "model.safetensors")
        with load(headed, device, least_budget) as other:
            assert other.streaming.shared_store_bytes == 0
            assert pinned() == 2 * store_bytes(one.streaming.plan)
            check(other, [given], expected_of(headed, [given]), device.settle)
            settled(one, given, device)  # its streamed bytes are in memory


def test_an_executable_may_have_a_store_of_its_own(device, headed, least_budget, pinned):
    with load(headed, device, least_budget) as one:
        needed = pinned()
        with load(headed, device, least_budget, share_store=False) as other:
            assert pinned() == 2 * needed
            assert other.streaming.shared_store_bytes == one.streaming.shared_store_bytes == 0
            new = {name: torch.zeros_like(t) for name, t in Headed().state_dict().items()}
            other.streaming.replace(new)
            given = torch.randn(*GIVEN)
            assert not settled(other, given, device).any()
            assert pinned() == 2 * needed
            check(one, [given], expected_of(headed, [given]), device.settle)


def settled(run, given, device) -> torch.Tensor:
    found = run(given)
    device.settle(run)
    return found


def test_explain_and_report_say_what_is_shared(device, headed, least_budget):
    with load(headed, device, least_budget) as one, load(headed, device, least_budget) as other:
        size = one.streaming.plan.transfer_bytes
        shown = show_bytes(size)
        text = other.streaming.explain()
        assert f"store: {shown} of the host's memory, of which {shown} are shared with" in text
        one(torch.randn(*GIVEN))
        table = report_table(report_on(one, [one.last_execution]))
        rows = dict(zip(*(column.cells for column in table.columns), strict=True))
        assert rows["  in the host's memory"] == f"{size:,} bytes"
        assert rows["    shared with others"] == f"{size:,} bytes"


def test_room_on_the_host_is_asked_for_what_is_not_there_yet(
    device, headed, least_budget, monkeypatch
):
    with load(headed, device, least_budget) as one:
        needed = store_bytes(one.streaming.plan)
        monkeypatch.setattr(host_memory, "free_bytes", lambda: needed // 10)
        load(headed, device, least_budget).close()
        with pytest.raises(offload.PlanError, match=f"needs {needed} bytes of host memory"):
            load(headed, device, least_budget, share_store=False)


def test_loads_at_once_share(device, headed, least_budget, pinned):
    """The second begins when the first has its memory and has read some of it."""
    inputs = [torch.randn(*GIVEN) for _ in range(2)]
    expected = expected_of(headed, inputs)
    others: list[offload.Executable] = []

    def load_another(done_bytes: int, _total: int, _what: str) -> None:
        if done_bytes and not others:
            others.append(load(headed, device, least_budget))

    with load(headed, device, least_budget, progress=load_another) as one:
        (other,) = others
        with other:
            assert pinned() == store_bytes(one.streaming.plan)
            check(other, inputs, expected, device.settle)
            check(one, inputs, expected, device.settle)


def test_threads_load_at_once(device, headed, least_budget, pinned):
    given = torch.randn(*GIVEN)
    expected = expected_of(headed, [given])
    loaded: list[offload.Executable] = []
    begin = threading.Barrier(3)

    def make() -> None:
        begin.wait()
        loaded.append(load(headed, device, least_budget))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(loaded) == 3
    assert pinned() == store_bytes(loaded[0].streaming.plan)
    for run in loaded:
        check(run, [given], expected, device.settle)
        run.close()
    assert pinned() == 0


def test_who_comes_first_may_fail(device, headed, least_budget, pinned):
    """The other one reads what the first has not read."""
    given = torch.randn(*GIVEN)
    others: list[offload.Executable] = []

    def stop(done_bytes: int, _total: int, _what: str) -> None:
        if not others:
            others.append(load(headed, device, least_budget))
        elif done_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(headed, device, least_budget, progress=stop)
    gc.collect()
    (other,) = others
    with other:
        assert pinned() == store_bytes(other.streaming.plan)
        assert other.streaming.shared_store_bytes == 0
        check(other, [given], expected_of(headed, [given]), device.settle)
    assert pinned() == 0


@pytest.mark.parametrize(("device", "function", "nth"), on_devices(LOADS), indirect=["device"])
def test_a_load_that_fails_beside_one_that_shares_leaves_that_as_it_was(
    function, nth, device, headed, least_budget
):
    """It uses the existing bytes, and more."""
    given = torch.randn(*GIVEN)
    expected = expected_of(headed, [given])
    load(headed, device, least_budget).close()
    more = least_budget + 2 * 64 * 1024
    with load(headed, device, more) as one:
        check(one, [given], expected, device.settle)
        gc.collect()
        held = device.held()
        with (
            failing_load(device, function, nth),
            contextlib.suppress(offload.ExecutionError),  # some calls are no longer made
        ):
            load(headed, device, least_budget).close()
        gc.collect()
        assert device.held() == held
        assert one.streaming.shared_store_bytes == 0
        check(one, [given], expected, device.settle)
        with load(headed, device, least_budget) as other:
            assert other.streaming.shared_store_bytes == one.streaming.store_bytes
            check(other, [given], expected, device.settle)
            check(one, [given], expected, device.settle)


# ---- new content --------------------------------------------------------------------------------


cuda_only = pytest.mark.parametrize("device", ["cuda"], indirect=True)
npu_only = pytest.mark.parametrize("device", ["npu"], indirect=True)


@cuda_only
@pytest.mark.parametrize("scheduling", ["offload", "host"])
def test_a_replacement_is_seen_by_one_executable_alone(
    scheduling, device, headed, least_budget, pinned, tmp_path
):
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    new, again = other_weights(tmp_path, inputs[0])
    first, second = expected_of(headed, inputs), expected_of(again, inputs)
    with (
        load(headed, device, least_budget, scheduling=scheduling) as one,
        load(headed, device, least_budget) as other,
    ):
        needed = pinned()
        for run in (one, other):
            check(run, inputs, first, device.settle)
        one.streaming.replace(new)
        for order in device.orders:
            device.set_order(order)
            for _ in range(2):
                check(one, inputs, second, device.settle)
                check(other, inputs, first, device.settle)
        assert pinned() == 2 * needed
        assert one.streaming.shared_store_bytes == other.streaming.shared_store_bytes == 0
        # A part without sharers is written in place.
        n_registered = device.controls.calls(device.register)
        one.streaming.replace(file_weights(headed))
        check(one, inputs, first, device.settle)
        assert device.controls.calls(device.register) - n_registered <= 1  # for resident weights
        assert pinned() == 2 * needed
    assert pinned() == 0


@cuda_only
def test_tails_that_begin_elsewhere_are_shared_as_far_as_both_stream_them(
    device, headed, pinned, tmp_path
):
    """Bytes of a weight that only one streams lie beside it, and take another node."""
    device.controls.set_granularity(16 * 1024)
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    new, again = other_weights(tmp_path, inputs[0])
    first, second = expected_of(headed, inputs), expected_of(again, inputs)
    floor, whole = floor_on(headed, device.backend), weight_bytes(headed.program)
    budgets = floor, whole - (whole - floor) // 12
    n_split = 0
    for one_budget, other_budget in (budgets, budgets[::-1]):
        one = load(headed, device, one_budget)
        n_nodes = device.controls.calls("cuGraphAddMemcpyNode")
        other = load(headed, device, other_budget)
        n_nodes = device.controls.calls("cuGraphAddMemcpyNode") - n_nodes
        n_split += n_nodes - len(other.streaming.plan.transfers)
        one_ranges, other_ranges = streamed_ranges(one), streamed_ranges(other)
        assert any(
            one_ranges[name] != other_ranges[name] for name in one_ranges.keys() & other_ranges
        )
        assert pinned() == union_bytes(one, other)  # all are of whole pages
        for _ in range(2):
            check(one, inputs, first, device.settle)
            check(other, inputs, first, device.settle)
        other.streaming.replace(new)
        for order in device.orders:
            device.set_order(order)
            check(one, inputs, first, device.settle)
            check(other, inputs, second, device.settle)
        one.close()
        assert other.streaming.shared_store_bytes == 0
        check(other, inputs, second, device.settle)
        other.close()
        assert pinned() == 0
    assert n_split > 0


@cuda_only
def test_one_weight_that_is_replaced_costs_its_own_bytes(
    device, headed, least_budget, pinned, tmp_path
):
    given = torch.randn(*GIVEN)
    with load(headed, device, least_budget) as one, load(headed, device, least_budget) as other:
        needed = pinned()
        (name, (begin, end)), *_ = sorted(streamed_ranges(one).items())
        one.streaming.replace({name: file_weights(headed)[name] * 2})
        settled(one, given, device)
        assert pinned() - needed == -(-(end - begin) // PAGE) * PAGE
        size = one.streaming.plan.transfer_bytes
        assert one.streaming.shared_store_bytes == size - (end - begin)
        assert other.streaming.shared_store_bytes == size - (end - begin)
        check(other, [given], expected_of(headed, [given]), device.settle)


@cuda_only
@pytest.mark.parametrize("same_times", [False, True])
def test_refreshed_weights_are_shared_again(
    same_times, device, headed, least_budget, pinned, tmp_path
):
    """Also where the file's times are as before: the bytes of others are compared."""
    given = torch.randn(*GIVEN)
    path = tmp_path / "model.safetensors"
    first = expected_of(headed, [given])
    with load(headed, device, least_budget) as one, load(headed, device, least_budget) as other:
        needed = pinned()
        for run in (one, other):
            check(run, [given], first, device.settle)
        one.streaming.refresh()  # nothing has changed
        check(one, [given], first, device.settle)
        assert pinned() == needed
        status = path.stat()
        changed(path)
        if same_times:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        one.streaming.refresh()
        second = expected_of(headed, [given])
        check(one, [given] * 2, second * 2, device.settle)
        assert pinned() == 2 * needed
        check(other, [given], first, device.settle)
        other.streaming.refresh()
        check(other, [given] * 2, second * 2, device.settle)
        assert pinned() == needed
        assert one.streaming.shared_store_bytes == one.streaming.plan.transfer_bytes
        with load(headed, device, least_budget) as third:
            assert third.streaming.shared_store_bytes == third.streaming.plan.transfer_bytes
            assert pinned() == needed
    assert pinned() == 0


@npu_only
def test_a_model_that_shares_refuses_new_content(device, headed, least_budget, pinned, tmp_path):
    given = torch.randn(*GIVEN)
    new, again = other_weights(tmp_path, given)
    first = expected_of(headed, [given])
    with load(headed, device, least_budget) as one:
        with load(headed, device, least_budget) as other:
            with pytest.raises(offload.ExecutionError, match=r"weight or executable.*share_store"):
                one.streaming.replace(new)
            check(one, [given], first, device.settle)
            changed(tmp_path / "model.safetensors")
            one.streaming.refresh()
            with pytest.raises(offload.ExecutionError, match=r"weight or executable.*share_store"):
                settled(one, given, device)
            check(other, [given], first, device.settle)
        second = expected_of(headed, [given])
        check(one, [given], second, device.settle)  # it has no sharer now
        one.streaming.replace(new)
        check(one, [given], expected_of(again, [given]), device.settle)
        assert pinned() == store_bytes(one.streaming.plan)


@npu_only
def test_what_is_to_be_replaced_is_shared_no_more(device, headed, least_budget, pinned, tmp_path):
    """A load between the replacement and the execution that reads it has the file's content."""
    given = torch.randn(*GIVEN)
    new, again = other_weights(tmp_path, given)
    with load(headed, device, least_budget) as one:
        one.streaming.replace(new)
        with load(headed, device, least_budget) as other:
            assert other.streaming.shared_store_bytes == 0
            check(one, [given], expected_of(again, [given]), device.settle)
            check(other, [given], expected_of(headed, [given]), device.settle)


@cuda_only
@pytest.mark.parametrize(
    ("function", "nth"),
    [("cuGraphExecMemcpyNodeSetParams", 1), ("cuGraphExecMemcpyNodeSetParams", 3),
     ("cuMemHostRegister", 1), ("cuMemHostRegister", 3)],
)  # fmt: skip
def test_a_replacement_that_failed_is_made_by_the_next_execution(
    function, nth, device, headed, least_budget, pinned, tmp_path
):
    given = torch.randn(*GIVEN)
    new, again = other_weights(tmp_path, given)
    with load(headed, device, least_budget) as one, load(headed, device, least_budget) as other:
        needed = pinned()
        settled(one, given, device)
        one.streaming.replace(new)
        device.controls.fail(function, device.failure[0], nth)
        with pytest.raises(offload.ExecutionError, match=device.failure[1]):
            one(given)
        check(other, [given], expected_of(headed, [given]), device.settle)
        check(one, [given], expected_of(again, [given]), device.settle)
        assert pinned() == 2 * needed
    assert pinned() == 0
