"""A captured model whose kernels have their arguments in one table, on the simulated runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from ascend_client import (
    AICORE_EXCEPTION,
    FEATURE_NOT_SUPPORT,
    GLOBAL,
    INTERNAL_ERROR,
    MODEL_EXECUTE,
    Client,
    peek,
    u64,
)
from ascend_residents import live
from ascend_simulator import AscendSimulator
from test_ascend_binding import output_of
from test_ascend_captured import ADDED, PIECE_BYTES, Captured

from model_tasks import parameters_of, tasks_of
from offload.errors import BackendUnavailable, ExecutionError, OutOfMemory
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
    assert [task[5] for task in told] == [task[5] for task in one.tasks]  # as it was captured
    one.bind_home()
    for number in range(3):
        one.bind(input=npu.words(number), output=npu.words(0))
        one.run()
    assert updates(ascend) == (before[0] + 3, before[1] + 1)
    assert ascend.argument_bytes == 0  # the runtime keeps no block


def test_where_it_was_captured_nothing_is_copied(one: Captured) -> None:
    before = one.blocks()
    one.bind_home()
    assert one.run() == (0, 0)
    assert peek(one.y) == (301,)
    assert one.blocks() == before


def test_whatever_moves_one_copy_brings_it(one: Captured, npu: Client) -> None:
    """From the first to the last word that changed; the feature map's words lie in all blocks."""
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


def test_executions_that_are_under_way_have_their_own_addresses(
    one: Captured, npu: Client, stream: int
) -> None:
    one.bind_home()
    ys = [npu.words(0) for _ in range(4)]
    one.resident.set_stream(stream)
    for number, y in enumerate(ys):
        one.bind(input=npu.words(number), output=y)
        one.resident.execute()
    assert [peek(y) for y in ys] == [(0,)] * 4
    one.resident.finish()
    assert [peek(y) for y in ys] == [(300 + number,) for number in range(4)]


def test_a_slot_that_was_never_bound_is_refused(one: Captured) -> None:
    one.bind(input=one.x, feature_map=one.near)
    with pytest.raises(ExecutionError, match="1 of 6 address words were never patched"):
        one.resident.execute()


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


def test_after_a_wait_that_failed_the_table_is_written_anew(
    one: Captured, npu: Client, stream: int
) -> None:
    one.bind_home()
    one.run()
    npu.ascend.forget_calls()
    npu.ascend.fail("aclrtSynchronizeEvent", INTERNAL_ERROR, 1)
    with pytest.raises(ExecutionError):
        one.run()
    npu.synchronize(stream)
    npu.upload(table_of(one).addresses[0], bytes(TABLE_BYTES))  # as if copies had been lost
    assert one.run() == (1, TABLE_BYTES)
    assert peek(one.y) == (301,)
    assert one.run() == (0, 0)


def test_the_table_goes_after_the_model(npu: Client, stream: int, ascend: AscendSimulator) -> None:
    with npu.capture(stream):  # what the device keeps from the first capture on
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
    """Which the simulator reports: kernels read where nothing is any more."""
    one = Captured(npu, stream)
    table = one.make_table()
    table.install(0)
    npu.run(one.model, stream)
    assert peek(one.y) == (301,)
    del table
    npu.execute(one.model, stream)
    assert npu.ascend.code("aclrtSynchronizeStream", stream) == AICORE_EXCEPTION


def test_words_into_their_own_block_follow_it(npu: Client, stream: int) -> None:
    """The runtime fills in such a word at the launch, and for no table."""
    place = (ctypes.c_uint32 * 2)(24, 40)  # the word at byte 24 is where byte 40 lies
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


# ---- refused before anything of the model is changed ---------------------------------------------


def assert_intact(one: Captured, npu: Client, stream: int) -> None:
    npu.run(one.model, stream)
    assert peek(one.y) == (301,)
    one.bind_home()
    one.bind(input=npu.words(4))
    assert one.run() == (1, 8)
    assert peek(one.y) == (304,)


def in_a_group(npu: Client, stream: int) -> tuple[int, Callable[[], object]]:
    group = ctypes.c_uint64()
    with npu.capture(stream) as models:
        npu.ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
        npu.note(stream, 1)
        npu.ascend.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
    return models[0], lambda: npu.run(models[0], stream)


def test_a_task_of_a_group_is_refused(npu: Client, stream: int) -> None:
    model, run = in_a_group(npu, stream)
    (*_, address, arguments), *_ = _native.ascend_captured_tasks(0, model)
    with pytest.raises(BackendUnavailable, match=r"task 0 .*is in a task group"):
        _native.AscendCapturedTable(
            device=0, model=model, kernels=[(0, address, arguments)], words=[(0, 0, True)]
        )
    run()
    assert npu.order == ["note 1 of 1"]


@pytest.mark.parametrize(
    ("number", "shift", "why"),
    [(3, 0, "no task 3 any more"), (1, 8, "not the kernel that was read"), (1, 0, "")],
)
def test_another_task_than_was_read_is_refused(
    number: int, shift: int, why: str, npu: Client, stream: int
) -> None:
    one = Captured(npu, stream)
    *_, address, arguments = one.tasks[1]

    def make() -> None:
        _native.AscendCapturedTable(
            device=0,
            model=one.model,
            kernels=[(number, address + shift, arguments)],
            words=[(0, 0, True)],
        )

    if why:
        with pytest.raises(BackendUnavailable, match=why):
            make()
    else:
        make()
    assert_intact(one, npu, stream)


def test_without_software_sq_there_is_none(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    npu.ascend.set_software_sq(False)
    with pytest.raises(ExecutionError, match=str(FEATURE_NOT_SUPPORT)):
        one.make_table()
    npu.ascend.set_software_sq(True)
    assert_intact(one, npu, stream)


@pytest.mark.parametrize(
    "function", ["aclmdlRITaskGetParams", "aclmdlRIKernelTaskGetAttribute", "aclmdlRIGetStreams"]
)
def test_a_question_that_is_refused_changes_nothing(
    function: str, npu: Client, stream: int
) -> None:
    one = Captured(npu, stream)
    held = live(npu.ascend)
    npu.ascend.fail(function, INTERNAL_ERROR, 1)
    with pytest.raises(ExecutionError, match=str(INTERNAL_ERROR)):
        one.make_table()
    assert live(npu.ascend) == held
    assert_intact(one, npu, stream)


def test_an_attribute_that_the_chip_has_not_is_left_out(
    npu: Client, stream: int, ascend: AscendSimulator
) -> None:
    ascend.fail("aclmdlRIKernelTaskGetAttribute", FEATURE_NOT_SUPPORT, 1)
    one = Captured(npu, stream, has_table=True)
    one.bind_home()
    one.run()
    assert peek(one.y) == (301,)


def test_without_memory_nothing_is_changed(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    npu.ascend.set_memory_limit(npu.ascend.live_bytes)
    with pytest.raises(OutOfMemory, match="table of kernel arguments"):
        one.make_table()
    npu.ascend.set_memory_limit(1 << 30)
    assert_intact(one, npu, stream)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ((0, 4, 0), "lies in no block"),
        ((3, 0, 0), "lies in no block"),
        ((0, 0, 25), "points behind"),
    ],
)
def test_own_addresses_outside_of_blocks_are_refused(
    own: tuple[int, int, int], why: str, npu: Client, stream: int
) -> None:
    one = Captured(npu, stream)
    with pytest.raises(ValueError, match=why):
        _native.AscendCapturedTable(
            device=0,
            model=one.model,
            kernels=[(number, *task[4:]) for number, task in enumerate(one.tasks)],
            words=[(0, 0, True)],
            own=[own],
        )


def test_a_table_of_other_words_is_refused(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    *_, address, arguments = one.tasks[0]
    table = _native.AscendCapturedTable(
        device=0, model=one.model, kernels=[(0, address, arguments)], words=[(0, 0, True)]
    )
    with pytest.raises(ValueError, match="has other words"):
        _native.AscendCapturedResident(
            device=0,
            model=one.model,
            copies=_native.AscendMovingCopies(device=0, tensors=[]),
            slots=[],
            n_launches=3,
            release=lambda: None,
            table=table,
        )


OF_9_1 = """
from ascend_client import Client
from offload.native import _native
npu = Client(ascend)
stream, word = npu.stream(), npu.words(1)
with npu.capture(stream) as models:
    npu.note(stream, 1)
((*_, address, arguments),) = _native.ascend_captured_tasks(0, models[0])
try:
    _native.AscendCapturedTable(
        device=0, model=models[0], kernels=[(0, address, arguments)], words=[(0, 0, True)]
    )
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.usefixtures("ascend")  # which is built
@pytest.mark.parametrize("function", [SET, UPDATE, "aclmdlRIKernelTaskGetAttribute"])
def test_a_runtime_without_one_of_the_functions_has_no_table(function: str) -> None:
    says = output_of(f"ascend.begin()\nascend.hide({function!r})\n{OF_9_1}")
    assert says.startswith("BackendUnavailable")
    assert function in says


# ---- refused when the model is changed -----------------------------------------------------------


@pytest.mark.parametrize(("function", "nth"), [(SET, 1), (SET, 2), (SET, 3), (UPDATE, 1)])
def test_a_change_that_is_refused_says_so(
    function: str, nth: int, npu: Client, stream: int
) -> None:
    """The model may do nothing any more: whoever has it captures another."""
    one = Captured(npu, stream)
    table = one.make_table()
    npu.ascend.forget_calls()
    npu.ascend.fail(function, INTERNAL_ERROR, nth)
    with pytest.raises(ExecutionError, match=str(INTERNAL_ERROR)):
        table.install(0)
    assert npu.ascend.code("aclmdlRIExecuteAsync", one.model, stream) in (0, MODEL_EXECUTE)
    npu.synchronize(stream)
    one.resident.close()


def test_a_model_that_runs_is_not_changed(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    table = one.make_table()
    npu.execute(one.model, stream)
    with pytest.raises(ExecutionError, match="107040"):
        table.install(0)
    npu.synchronize(stream)
    assert_intact(one, npu, stream)


def test_an_address_that_the_runtime_does_not_keep_is_found(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    table = one.make_table()
    npu.ascend.set_keeps_addresses(False)
    with pytest.raises(ExecutionError, match="did not keep the address of the argument table"):
        table.install(0)
    assert npu.ascend.code("aclmdlRIExecuteAsync", one.model, stream) == MODEL_EXECUTE


def test_captures_of_other_threads_do_not_keep_a_table_from_being_made(
    npu: Client, stream: int, ascend: AscendSimulator
) -> None:
    """In GLOBAL mode they refuse copies of every thread that has not asked to be let through."""
    one = Captured(npu, stream)
    ascend.in_thread(lambda: npu.begin(npu.stream(), GLOBAL))
    one.make_table().install(0)
    assert parameters_of(ascend, tasks_of(ascend, one.model)[0][0]).content.kernel.arguments
