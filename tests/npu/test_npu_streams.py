"""Streams in models of torch_npu: their side streams, and devices without free streams."""

from __future__ import annotations

import pytest
import torch
from ascend_client import NO_STREAM_RESOURCE, RESOURCE_ALLOC_FAIL
from ascend_simulator import AscendSimulator
from npu_loading import live, load
from on_npu import check_same

import offload


class OnTwoStreams(torch.nn.Module):
    """Half of the work is on a side stream, which the stream or the host waits for."""

    def __init__(self, *, joins: bool) -> None:
        super().__init__()
        self.side = torch.npu.Stream()
        self.joins = joins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.npu.current_stream()
        self.side.wait_stream(main)
        with torch.npu.stream(self.side):
            beside = x * 2
        other = x + 3
        if self.joins:
            main.wait_stream(self.side)
        else:
            self.side.synchronize()
        return beside * other


@torch.library.custom_op("npu_streams::double_beside", mutates_args=())
def double_beside(x: torch.Tensor, joins: bool) -> torch.Tensor:
    """One launch, which itself uses a side stream; its result is from there only if that joins.

    What lies in memory that a side stream has not written yet is different at each call.
    """
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    side.wait_stream(main)
    with torch.npu.stream(side):
        doubled = x * 2
    if not joins:
        return x * 2
    main.wait_stream(side)
    return doubled


@double_beside.register_fake
def _(x: torch.Tensor, joins: bool) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_launch_that_joins_its_side_stream_is_captured() -> None:
    with load(lambda x: double_beside(x + 1, True) + 3, torch.ones(64).npu()) as run:
        for _ in range(3):
            x = torch.randn(64)
            check_same(run(x.npu()), (x + 1) * 2 + 3)


def test_a_launch_that_joins_no_side_stream_is_refused_by_name(
    simulated_npu: AscendSimulator,
) -> None:
    x = torch.ones(64).npu()
    joined = offload.capture(lambda x: double_beside(x + 1, True) + 3, x)
    captured = offload.capture(lambda x: double_beside(x + 1, False) + 3, x)
    joined.load().close()
    before = live(simulated_npu)
    with pytest.raises(offload.CaptureError, match=r"107025.*is not joined") as raised:
        captured.load()
    assert "double_beside" in str(raised.value)
    del raised  # whose frames keep the captures
    assert live(simulated_npu) == before
    with joined.load() as run:
        check_same(run(x), torch.full((64,), 7.0))


@pytest.mark.parametrize("joins", [True, False])
def test_work_on_a_side_stream_of_the_model_runs_in_the_order_of_the_call(joins: bool) -> None:
    """Launches are captured on one stream, in which nothing has to be joined."""
    with load(OnTwoStreams(joins=joins), torch.ones(64).npu()) as run:
        for _ in range(3):
            x = torch.randn(64)
            check_same(run(x.npu()), (x * 2) * (x + 3))


@pytest.mark.parametrize("code", [NO_STREAM_RESOURCE, RESOURCE_ALLOC_FAIL])
@pytest.mark.parametrize("function", ["aclmdlRICaptureBegin", "aclmdlRICaptureEnd"])
def test_a_first_capture_without_streams_is_an_error_of_its_own(
    function: str, code: int, simulated_npu: AscendSimulator
) -> None:
    captured = offload.capture(lambda x: (x * 2).relu(), torch.ones(64).npu())
    captured.load().close()
    before = live(simulated_npu)
    simulated_npu.forget_calls()
    simulated_npu.fail(function, code)
    with pytest.raises(offload.OutOfStreams, match=f"{code}.*close other models"):
        captured.load()
    simulated_npu.forget_calls()
    assert live(simulated_npu) == before
    with captured.load() as run:
        check_same(run(torch.ones(64).npu()), torch.full((64,), 2.0))


def test_the_streams_of_a_model_are_said() -> None:
    with load(lambda x: x + 1, torch.ones(4).npu()) as run:
        (note,) = (one for one in run.notes() if one.startswith("streams: "))
    assert note.startswith("streams: 1")
