"""New content for one of the executables that share a store.

Copies in a CUDA graph can be given another source, those in an Ascend model cannot.
"""

from __future__ import annotations

import os

import pytest
import torch
from budgets import weight_bytes
from device_streaming import (
    GIVEN,
    check,
    expected_of,
    floor_on,
)
from shared_stores import file_weights, load, other_weights
from streamed_ranges import PAGE, changed, settled, streamed_ranges, union_bytes

import offload
from offload.backends.captured.device_streaming import store_bytes

pytestmark = pytest.mark.slow


cuda_only = pytest.mark.parametrize("device", ["cuda"], indirect=True)

npu_only = pytest.mark.parametrize("device", ["npu"], indirect=True)


@cuda_only
@pytest.mark.parametrize("scheduling", ["offload", "host"])
def test_a_replacement_is_seen_by_one_executable_alone(
    scheduling, device, headed, headed_budget, pinned, tmp_path
):
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    new, again = other_weights(tmp_path, inputs[0])
    first, second = expected_of(headed, inputs), expected_of(again, inputs)
    with (
        load(headed, device, headed_budget, scheduling=scheduling) as one,
        load(headed, device, headed_budget) as other,
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
    device, headed, headed_budget, pinned, tmp_path
):
    given = torch.randn(*GIVEN)
    with load(headed, device, headed_budget) as one, load(headed, device, headed_budget) as other:
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
    same_times, device, headed, headed_budget, pinned, tmp_path
):
    """Also where the file's times are as before: the bytes of others are compared."""
    given = torch.randn(*GIVEN)
    path = tmp_path / "model.safetensors"
    first = expected_of(headed, [given])
    with load(headed, device, headed_budget) as one, load(headed, device, headed_budget) as other:
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
        with load(headed, device, headed_budget) as third:
            assert third.streaming.shared_store_bytes == third.streaming.plan.transfer_bytes
            assert pinned() == needed
    assert pinned() == 0


@npu_only
def test_a_model_that_shares_refuses_new_content(device, headed, headed_budget, pinned, tmp_path):
    given = torch.randn(*GIVEN)
    new, again = other_weights(tmp_path, given)
    first = expected_of(headed, [given])
    with load(headed, device, headed_budget) as one:
        with load(headed, device, headed_budget) as other:
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
def test_what_is_to_be_replaced_is_shared_no_more(device, headed, headed_budget, pinned, tmp_path):
    """A load between the replacement and the execution that reads it has the file's content."""
    given = torch.randn(*GIVEN)
    new, again = other_weights(tmp_path, given)
    with load(headed, device, headed_budget) as one:
        one.streaming.replace(new)
        with load(headed, device, headed_budget) as other:
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
    function, nth, device, headed, headed_budget, pinned, tmp_path
):
    given = torch.randn(*GIVEN)
    new, again = other_weights(tmp_path, given)
    with load(headed, device, headed_budget) as one, load(headed, device, headed_budget) as other:
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
