"""A captured model whose kernels have their arguments in one table, on the simulated runtime."""

from __future__ import annotations

import ctypes

import pytest
from ascend_captured import ADDED, PIECE_BYTES, Captured
from ascend_client import (
    AICORE_EXCEPTION,
    INTERNAL_ERROR,
    Client,
    peek,
    u64,
)
from ascend_simulator import AscendSimulator

from model_tasks import tasks_of
from offload.errors import ExecutionError
from offload.native import _native

SET, UPDATE = "aclmdlRITaskSetParams", "aclmdlRIUpdate"
BLOCK_BYTES = 64  # a block of three words, at a multiple of this
TABLE_BYTES = 3 * BLOCK_BYTES
FIRST, MIDDLE, LAST = 0, 2 * BLOCK_BYTES, BLOCK_BYTES  # inputs and outputs come first


@pytest.fixture
def stream(npu: Client) -> int:
    return npu.stream()


@pytest.fixture
def one(npu: Client, stream: int) -> Captured:
    return Captured(npu, stream, has_table=True)


def updates(ascend: AscendSimulator) -> tuple[int, int]:
    return ascend.calls(SET), ascend.calls(UPDATE)


def table_of(one: Captured) -> _native.AscendCapturedTable:
    assert one.table is not None
    return one.table


def test_kernels_are_set_once_and_the_model_is_updated_once(
    npu: Client, stream: int, ascend: AscendSimulator
) -> None:
    before = updates(ascend)
    one = Captured(npu, stream, has_table=True)
    table = table_of(one)
    assert (table.n_set, table.n_updates, table.size_bytes) == (3, 1, TABLE_BYTES)
    assert updates(ascend) == (before[0] + 3, before[1] + 1)
    assert [address - table.addresses[0] for address in table.addresses] == [FIRST, MIDDLE, LAST]
    told = _native.ascend_captured_tasks(0, one.model)
    assert [task[4] for task in told] == table.addresses
    assert [task[5] for task in told] == [task[5] for task in one.tasks]  # as captured
    one.bind_home()
    for number in range(3):
        one.bind(input=npu.words(number), output=npu.words(0))
        one.run()
    assert updates(ascend) == (before[0] + 3, before[1] + 1)
    assert ascend.argument_bytes == 0  # the runtime keeps no block


def test_whatever_moves_one_copy_brings_it(one: Captured, npu: Client) -> None:
    """From the first to the last changed word; the feature map's words are in all blocks."""
    one.bind_home()
    one.run()
    x, y, memory = npu.words(5), npu.words(0), npu.malloc(2 * PIECE_BYTES)
    one.bind(input=x)
    assert one.run() == (1, 8)
    assert peek(one.y) == (305,)
    one.bind(output=y)
    assert one.run() == (1, 8)
    assert peek(y) == (305,)
    assert one.run() == (0, 0)
    one.bind(input=one.x, output=one.y)
    # The input is the first word of the first block, the output the second of the second.
    assert one.run() == (1, BLOCK_BYTES + 16)
    one.bind(feature_map=memory)
    assert one.run() == (1, MIDDLE + 16 - 8)
    assert (peek(memory), peek(memory + PIECE_BYTES)) == ((101,), (201,))
    one.bind(input=x, output=y, feature_map=one.near)
    assert one.run() == (1, MIDDLE + 16)
    assert peek(y) == (305,)
    assert one.blocks() == [
        (x, one.near, ADDED),
        (one.near, one.far, ADDED),
        (one.far, y, ADDED),
    ]


def test_a_copy_that_fails_is_made_by_the_next_execution(one: Captured, npu: Client) -> None:
    one.bind_home()
    one.run()
    x, y = npu.words(7), npu.words(0)
    one.bind(input=x)
    npu.ascend.forget_calls()
    npu.ascend.fail("aclrtMemcpyAsync", INTERNAL_ERROR, 1)
    with pytest.raises(ExecutionError, match="copying kernel arguments"):
        one.run()
    assert npu.ascend.calls("aclmdlRIExecuteAsync") == 0
    one.bind(output=y)
    assert one.run() == (1, BLOCK_BYTES + 16)
    assert peek(y) == (307,)


def test_the_table_goes_after_the_model(npu: Client, stream: int, ascend: AscendSimulator) -> None:
    with npu.capture(stream):  # kept by the device from the first capture on
        npu.note(stream, 1)
    one = Captured(npu, stream, has_table=True)
    one.bind_home()
    one.bind(input=npu.words(2))
    assert one.run() == (1, 8)
    held = ascend.live_bytes
    ascend.start_trace()
    one.resident.close()
    one.resident.close()
    calls = [entry.split()[0] for entry in ascend.trace]
    assert calls.index("aclmdlRIDestroy") < calls.index("aclrtFree")
    assert calls.count("aclrtFree") == 1
    assert ascend.live_bytes < held
    assert one.resident.refresh_counts == {"copies": 1, "bytes_copied": 8}
    with pytest.raises(ExecutionError, match="closed"):
        one.resident.execute()


def test_a_table_that_goes_before_the_model_is_a_fault(npu: Client, stream: int) -> None:
    """The simulator reports it: kernels read freed memory."""
    one = Captured(npu, stream)
    table = one.make_table()
    table.install(0)
    npu.run(one.model, stream)
    assert peek(one.y) == (301,)
    del table
    npu.execute(one.model, stream)
    assert npu.ascend.code("aclrtSynchronizeStream", stream) == AICORE_EXCEPTION


def test_words_into_their_own_block_follow_it(npu: Client, stream: int) -> None:
    """The runtime fills in such a word at the launch, but not in a table."""
    place = (ctypes.c_uint32 * 2)(24, 40)  # the word at byte 24 points to byte 40
    x, y = npu.words(1), npu.words(0)
    content = u64(x, y, ADDED, 0, 7, 8)
    with npu.capture(stream) as models:
        npu.ascend.call(
            "aclrtLaunchKernelWithHostArgs",
            *(npu.add_function, 1, stream, 0, content, len(content), place, 1),
        )
    (*_, address, arguments), *_ = _native.ascend_captured_tasks(0, models[0])
    assert peek(address, 6) == (x, y, ADDED, address + 40, 7, 8)
    table = _native.AscendCapturedTable(
        device=0,
        model=models[0],
        kernels=[(0, address, arguments)],
        words=[(0, 0, True), (0, 8, True)],
        own=[(0, 24, 40)],
    )
    table.install(0)
    (moved,) = table.addresses
    assert peek(moved, 6) == (x, y, ADDED, moved + 40, 7, 8)
    npu.run(models[0], stream)
    assert peek(y) == (101,)
    npu.ascend.call("aclmdlRIDestroy", models[0])


def test_attributes_and_numbers_of_blocks_stay(npu: Client, stream: int) -> None:
    values = {1: 1, 2: 4096, 6: 1, 8: 2_500_000}  # mode, local memory, dump, microseconds
    words = [word for number, value in values.items() for word in (number, value, 0, 0, 0)]
    content = (ctypes.c_uint32 * len(words))(*words)
    configuration = (ctypes.c_uint64 * 2)(ctypes.addressof(content), len(values))
    block = npu.words(9)
    with npu.capture(stream) as models:
        npu.ascend.call(
            "aclrtLaunchKernelV2", npu.note_function, 2, block, 8, configuration, stream
        )
    ((task,),) = tasks_of(npu.ascend, models[0])
    table = _native.AscendCapturedTable(
        device=0, model=models[0], kernels=[(0, block, u64(9))], words=[(0, 0, True)]
    )
    table.install(0)
    found = {}
    for number in values:
        value = (ctypes.c_uint32 * 4)()
        npu.ascend.call("aclmdlRIKernelTaskGetAttribute", task, number, value)
        found[number] = value[0]
    assert found == values
    npu.run(models[0], stream)
    assert npu.order == ["note 9 of 2"]
    npu.ascend.call("aclmdlRIDestroy", models[0])
