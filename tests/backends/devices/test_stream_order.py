"""Streams of residents on either simulated device: captures, failed waits, closing."""

from __future__ import annotations

import gc

import pytest
from stream_devices import AscendDevice, CudaDevice, plus, read

from offload.errors import ExecutionError

Device = CudaDevice | AscendDevice


@pytest.fixture(params=["cuda", "ascend"])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "ascend":
        return AscendDevice(request.getfixturevalue("ascend"))
    return CudaDevice(request.getfixturevalue("cuda"), request.getfixturevalue("arena"))


@pytest.fixture
def stream(device):
    return device.stream()


class Kept:
    """An object that a resident keeps; notes its end."""

    def __init__(self) -> None:
        self.gone: list[bool] = []

    def __del__(self) -> None:
        self.gone.append(True)


def execute(device, chain, stream):
    """Execute on the stream, before anything has run; return the output."""
    y = device.bind_first(chain)
    chain.resident.set_stream(stream)
    chain.resident.execute()
    assert read(y) == [0] * len(plus(3))
    return y


def execute_and_capture(device, chain, stream):
    """The same, and begin a capture of the stream after it."""
    y = execute(device, chain, stream)
    device.begin_capture(stream)
    return y


def n_frees(device):
    return sum(device.simulator.calls(function) for function in device.frees)


def test_closing_puts_nothing_into_a_capture_and_frees_nothing_in_use(device, stream):
    before = device.live()
    chain = device.chain()
    y = execute_and_capture(device, chain, stream)
    held = device.live()
    device.simulator.forget_calls()
    chain.resident.close()
    assert device.simulator.calls(device.record) == 0
    assert n_frees(device) == 0
    assert device.live() == held
    with pytest.raises(ExecutionError, match="the program was closed"):
        chain.resident.execute()
    with pytest.raises(ExecutionError, match="the program was closed"):
        chain.resident.set_stream(stream)
    device.end_capture(stream)
    assert read(y) == [0] * len(plus(3))
    chain.resident.close()
    assert read(y) == plus(3)
    assert device.live() == before


def test_what_is_destroyed_after_the_capture_leaves_nothing(device, stream):
    before = device.live()
    chain = device.chain()
    y = execute_and_capture(device, chain, stream)
    chain.resident.close()
    device.end_capture(stream)
    del chain
    gc.collect()
    assert read(y) == plus(3)
    assert device.live() == before


def test_what_is_destroyed_meanwhile_frees_no_memory_in_use(device, stream):
    kept = Kept()
    gone = kept.gone
    chain = device.chain(keep=kept)
    del kept
    y = execute_and_capture(device, chain, stream)
    device.simulator.forget_calls()
    del chain
    gc.collect()
    assert n_frees(device) == 0
    assert gone == []  # the target of its kernels' addresses
    device.end_capture(stream)
    device.synchronize(stream)
    assert read(y) == plus(3)


def test_waiting_for_a_captured_stream_is_refused(device, stream):
    chain = device.chain()
    y = execute_and_capture(device, chain, stream)
    device.simulator.forget_calls()
    with pytest.raises(ExecutionError, match="the stream of the execution before is being capt"):
        chain.resident.finish()
    assert device.simulator.calls(device.record) == 0
    device.end_capture(stream)
    chain.resident.finish()
    assert read(y) == plus(3)


@pytest.mark.parametrize("function", ["wait", "record"])
def test_a_wait_that_failed_ends_no_execution(device, stream, function):
    """The next execution, on another stream, is still ordered after it."""
    chain = device.chain()
    y = execute(device, chain, stream)
    device.simulator.fail(getattr(device, function), device.refused)
    if function == "record":  # otherwise a wait for the stream would suffice
        device.simulator.fail(device.wait_stream, device.refused)
    with pytest.raises(ExecutionError, match=device.refused_text):
        chain.resident.finish()
    assert read(y) == [0] * len(plus(3))
    device.move(chain, y)
    chain.resident.set_stream(device.stream())
    chain.resident.execute()
    chain.resident.finish()
    assert read(y) == plus(6)


@pytest.mark.parametrize("function", ["ask", "wait", "record"])
def test_a_refused_wait_is_no_end_when_it_is_closed(device, stream, function):
    before = device.live()
    chain = device.chain()
    y = execute(device, chain, stream)
    device.simulator.forget_calls()
    device.simulator.fail(getattr(device, function), device.refused)
    device.simulator.fail(device.wait_stream, device.refused)
    chain.resident.close()
    assert n_frees(device) == 0
    assert read(y) == [0] * len(plus(3))
    chain.resident.close()
    assert read(y) == plus(3)
    del chain
    assert device.live() == before


def test_closing_waits_for_the_stream_where_no_event_can_be_recorded(device, stream):
    before = device.live()
    chain = device.chain()
    y = execute(device, chain, stream)
    device.simulator.fail(device.record, device.refused)
    chain.resident.close()
    assert read(y) == plus(3)
    del chain
    assert device.live() == before


def test_after_a_fault_everything_goes(device, stream):
    before = device.live()
    chain = device.chain()
    y = execute(device, chain, stream)
    device.simulator.fail(device.wait, device.fault)
    with pytest.raises(ExecutionError, match=device.fault_text):
        chain.resident.finish()
    device.simulator.fail(device.wait, device.fault)
    chain.resident.close()
    assert read(y) == plus(3)  # work that continues after a fault was waited for
    assert device.live() == before


# Codes of cuda.h of CUDA 13.0 after which the process must end, or the context is gone.
CUDA_FAULTS = [4, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 810, 911]


@pytest.mark.parametrize("code", CUDA_FAULTS)
def test_nothing_is_waited_for_after_a_fault_of_any_kind(cuda, arena, code):
    """Nothing can be: a resident that waited forever would keep its memory forever."""
    device = CudaDevice(cuda, arena)
    before = device.live()
    chain, stream = device.chain(), device.stream()
    execute(device, chain, stream)
    device.simulator.fail(device.wait, code)
    device.simulator.fail(device.wait_stream, code)
    chain.resident.close()
    assert device.live() == before


def test_other_codes_end_no_wait(cuda, arena):
    """Neither the refusal of a call, nor an unknown error."""
    device = CudaDevice(cuda, arena)
    chain, stream = device.chain(), device.stream()
    execute(device, chain, stream)
    held = device.live()
    for code in sorted({1, 400, 600, 701, 720, 800, 807, 900, 910, 912, 999}):
        device.simulator.fail(device.wait, code)
        device.simulator.fail(device.wait_stream, code)
        chain.resident.close()
        assert device.live() == held, code
