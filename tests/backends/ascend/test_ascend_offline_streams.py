"""An offline model on the simulated Ascend device whose stream is captured after an execution."""

from __future__ import annotations

import ctypes
import struct

import pytest
from ascend_offline import INPUT, OUTPUT, WORK, Operand, Task, Tensor, pack_model
from ascend_residents import COUNT, NUMBERS, SIZE_BYTES, Chain, live, plus, read

from offload.native import _native

RELAXED = 2


@pytest.fixture
def stream(ascend):
    return ascend.make("aclrtCreateStream")


def end_capture(ascend, stream):
    model = ctypes.c_uint64()
    ascend.call("aclmdlRICaptureEnd", stream, ctypes.byref(model))
    ascend.call("aclmdlRIDestroy", model.value)


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
