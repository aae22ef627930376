"""A resident on the simulated Ascend device whose stream is captured behind its executions."""

from __future__ import annotations

import ctypes
import gc
import struct

import pytest
from ascend_client import INTERNAL_ERROR
from ascend_offline import INPUT, OUTPUT, WORK, Operand, Task, Tensor, pack_model
from ascend_residents import COUNT, NUMBERS, SIZE_BYTES, Chain, live, plus, read

from offload import _native
from offload.errors import ExecutionError

RELAXED = 2


@pytest.fixture
def stream(ascend):
    return ascend.make("aclrtCreateStream")


def execute_and_capture(ascend, chain, stream):
    """Execute on the stream, and begin to capture it before anything has run; gives the output."""
    _, y = chain.bind_first()
    chain.resident.set_stream(stream)
    chain.resident.execute()
    ascend.call("aclmdlRICaptureBegin", stream, RELAXED)
    assert read(y) == [0] * len(plus(3))
    return y


def end_capture(ascend, stream):
    model = ctypes.c_uint64()
    ascend.call("aclmdlRICaptureEnd", stream, ctypes.byref(model))
    ascend.call("aclmdlRIDestroy", model.value)


@pytest.mark.parametrize("form", ["build", "capture"])
def test_closing_puts_nothing_into_the_capture_and_frees_nothing_in_use(ascend, stream, form):
    before = live(ascend)
    chain = Chain(ascend, form=form)
    y = execute_and_capture(ascend, chain, stream)
    held = live(ascend)
    ascend.forget_calls()
    chain.resident.close()
    assert ascend.calls("aclrtRecordEvent") == 0
    assert live(ascend) == held
    with pytest.raises(ExecutionError, match="the program was closed"):
        chain.resident.execute()
    end_capture(ascend, stream)
    chain.resident.close()
    assert read(y) == plus(3)
    after = live(ascend)
    assert {**after, "bytes": 0} == {**before, "bytes": 0}


def test_what_is_destroyed_meanwhile_frees_no_memory_in_use(ascend, stream):
    chain = Chain(ascend)
    y = execute_and_capture(ascend, chain, stream)
    ascend.forget_calls()
    del chain
    gc.collect()
    assert ascend.calls("aclrtFree") == 0
    end_capture(ascend, stream)
    ascend.call("aclrtSynchronizeStream", stream)
    assert read(y) == plus(3)
    assert ascend.live("model") == 0


def test_waiting_is_refused(ascend, stream):
    chain = Chain(ascend)
    y = execute_and_capture(ascend, chain, stream)
    ascend.forget_calls()
    with pytest.raises(ExecutionError, match="is being captured into another model"):
        chain.resident.finish()
    assert ascend.calls("aclrtRecordEvent") == 0
    end_capture(ascend, stream)
    chain.resident.finish()
    assert read(y) == plus(3)


@pytest.mark.parametrize("function", ["aclrtSynchronizeEvent", "aclrtRecordEvent"])
def test_a_wait_that_failed_ends_no_execution(ascend, stream, function):
    """The next execution, on another stream, still goes behind it."""
    chain = Chain(ascend)
    _, y = chain.bind_first()
    chain.resident.set_stream(stream)
    chain.resident.execute()
    ascend.fail(function, INTERNAL_ERROR)
    if function == "aclrtRecordEvent":  # else waiting for the stream would be as good
        ascend.fail("aclrtSynchronizeStream", INTERNAL_ERROR)
    with pytest.raises(ExecutionError, match="507000"):
        chain.resident.finish()
    assert read(y) == [0] * len(plus(3))
    chain.bind(input=y)
    chain.resident.set_stream(ascend.make("aclrtCreateStream"))
    chain.resident.execute()
    chain.resident.finish()
    assert read(y) == plus(6)


def test_an_offline_model_stays_while_nobody_can_wait_for_it(ascend, stream, tmp_path):
    path = tmp_path / "model.om"
    tensors = [[Tensor(name, (COUNT,), SIZE_BYTES)] for name in ("x", "y")]
    task = Task(0, (Operand(OUTPUT), Operand(WORK), Operand(INPUT)))
    path.write_bytes(
        pack_model(
            ascend,
            inputs=tensors[0],
            outputs=tensors[1],
            kernels=[through_the_feature_map],
            tasks=[task],
            work_bytes=SIZE_BYTES,
            weights=b"",
        )
    )
    before = live(ascend)
    model = _native.AscendOfflineModel(device=0, path=str(path))
    memory = Chain(ascend)
    x, y = memory.allocate(NUMBERS), memory.allocate()
    memory.resident.close()
    model.patch([(0, x), (1, y)])
    model.set_stream(stream)
    model.execute()
    ascend.call("aclmdlRICaptureBegin", stream, RELAXED)
    ascend.forget_calls()
    model.close()
    assert ascend.calls("aclmdlUnload") == ascend.calls("aclrtFree") == 0
    end_capture(ascend, stream)
    model.close()
    assert ascend.calls("aclmdlUnload") == 1
    assert read(y) == plus(1)
    after = live(ascend)
    assert {**after, "bytes": 0} == {**before, "bytes": 0}


def through_the_feature_map(block: bytes, _n_blocks: int) -> None:
    destination, work, source = struct.unpack("<3Q", block)
    for target, origin in ((work, source), (destination, work)):
        added = 1 if target == destination else 0
        (ctypes.c_int64 * COUNT).from_address(target)[:] = [n + added for n in read(origin)]
