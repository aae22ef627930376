"""A captured model whose kernels' arguments are patched: in their blocks, or in one table."""

from __future__ import annotations

import pytest
from ascend_captured import ADDED, INPUT, KERNEL, PIECE_BYTES, WORDS, Captured
from ascend_client import (
    CAPTURE_MODE_NOT_SUPPORT,
    DEVICE_TO_DEVICE,
    FEATURE_NOT_SUPPORT,
    GLOBAL,
    INTERNAL_ERROR,
    Client,
    peek,
)
from ascend_residents import Chain, live
from ascend_simulator import AscendSimulator

from offload.errors import BackendUnavailable, ExecutionError
from offload.native import _native


@pytest.fixture
def stream(npu: Client) -> int:
    return npu.stream()


@pytest.fixture(params=[False, True], ids=["blocks", "table"])
def one(request: pytest.FixtureRequest, npu: Client, stream: int) -> Captured:
    return Captured(npu, stream, has_table=request.param)


def test_the_runtime_tells_kernels_and_their_blocks(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    assert [(task[0], task[1]) for task in one.tasks] == [(0, KERNEL)] * 3
    assert {(task[2], task[3]) for task in one.tasks} == {(npu.add_function, 1)}
    for *_, address, content in one.tasks:
        assert len(content) == 24
        assert _native.ascend_read_memory(0, address, 24) == content
    assert one.blocks()[0] == (one.x, one.near, ADDED)


def test_tasks_are_counted_while_they_are_captured(npu: Client, stream: int) -> None:
    counts = []
    with npu.capture(stream) as models:
        _, model = npu.info(stream)
        for _ in range(3):
            counts.append(_native.ascend_count_tasks(0, model))
            npu.note(stream, 7)
    assert counts == [[0], [1], [2]]
    assert _native.ascend_count_tasks(0, models[0]) == [3]


def test_other_tasks_tell_nothing_but_their_type(npu: Client, stream: int) -> None:
    cell = npu.words(0)
    with npu.capture(stream) as models:
        npu.ascend.call("aclrtMemsetAsync", cell, 8, 0, 8, stream)
        npu.ascend.call("aclrtValueWrite", cell, 7, 0, stream)
        npu.note(stream, 7)
    told = _native.ascend_captured_tasks(0, models[0])
    assert [task[1] for task in told] == [0, 5, KERNEL]
    assert all(task[2:] == (0, 0, 0, b"") for task in told[:2])


def test_without_software_sq_parameters_cannot_be_read(npu: Client, stream: int) -> None:
    npu.ascend.set_software_sq(False)
    with npu.capture(stream) as models:
        npu.note(stream, 7)
    assert _native.ascend_count_tasks(0, models[0]) == [1]
    with pytest.raises(BackendUnavailable, match=rf"software SQ.*{FEATURE_NOT_SUPPORT}"):
        _native.ascend_captured_tasks(0, models[0])


def test_where_it_was_captured_nothing_is_copied(one: Captured) -> None:
    before = one.blocks()
    one.bind_home()
    assert one.run() == (0, 0)
    assert peek(one.y) == (301,)
    assert one.blocks() == before


def test_a_moved_slot_touches_only_blocks_that_hold_it(one: Captured, npu: Client) -> None:
    one.bind_home()
    one.run()
    before = one.blocks()
    x, y = npu.words(5), npu.words(0)
    one.bind(input=x)
    assert one.run() == (1, 8)
    assert peek(one.y) == (305,)
    assert one.blocks() == [(x, *before[0][1:]), *before[1:]]
    one.bind(output=y)
    assert one.run() == (1, 8)
    assert (peek(y), peek(one.y)) == ((305,), (305,))
    assert one.run() == (0, 0)


def test_a_moved_feature_map_lies_in_a_row_and_home_in_its_pieces(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    one.bind_home()
    one.run()
    before = one.blocks()
    memory = npu.malloc(2 * PIECE_BYTES)
    npu.upload(one.near, bytes(8))
    npu.upload(one.far, bytes(8))
    one.bind(feature_map=memory)
    assert one.run() == (3, 8 + 16 + 8)  # the second kernel's words are adjacent
    assert (peek(memory), peek(memory + PIECE_BYTES)) == ((101,), (201,))
    assert (peek(one.near), peek(one.far), peek(one.y)) == ((0,), (0,), (301,))
    one.bind(feature_map=one.near)
    assert one.run() == (3, 32)
    assert one.blocks() == before
    assert (peek(one.near), peek(one.far)) == ((101,), (201,))


def test_executions_in_flight_have_their_own_addresses(
    one: Captured, npu: Client, stream: int
) -> None:
    """The host's image of the words may change before the copy of it is made."""
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


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_copy_that_fails_is_made_by_the_next_execution(
    nth: int, npu: Client, stream: int
) -> None:
    one = Captured(npu, stream)
    one.bind_home()
    memory = npu.malloc(2 * PIECE_BYTES)
    one.bind(feature_map=memory)
    npu.ascend.forget_calls()
    npu.ascend.fail("aclrtMemcpyAsync", INTERNAL_ERROR, nth)
    with pytest.raises(ExecutionError, match="into the arguments of a captured kernel"):
        one.run()
    assert npu.ascend.calls("aclmdlRIExecuteAsync") == 0
    copies, _ = one.run()
    assert copies == 3 - (nth - 1)
    assert (peek(memory + PIECE_BYTES), peek(one.y)) == ((201,), (301,))


def test_after_a_wait_that_failed_every_word_is_written_again(
    one: Captured, npu: Client, stream: int
) -> None:
    one.bind_home()
    one.run()
    npu.ascend.forget_calls()
    npu.ascend.fail("aclrtSynchronizeEvent", INTERNAL_ERROR, 1)
    with pytest.raises(ExecutionError):
        one.run()
    npu.synchronize(stream)
    addresses = [address for *_, address, _ in one.tasks]
    table = one.table
    for address in addresses if table is None else table.addresses:
        npu.upload(address, bytes(16))  # as if the copies had been lost
    assert one.run() == ((3, 3 * 16) if table is None else (1, table.size_bytes))
    assert peek(one.y) == (301,)
    assert one.run() == (0, 0)


@pytest.mark.parametrize(
    "word", [(3, 0, INPUT, 0), (0, 20, INPUT, 0), (0, 24, INPUT, 0), (0, 4, INPUT, 0)]
)
def test_words_outside_of_blocks_are_refused(
    word: tuple[int, ...], npu: Client, stream: int
) -> None:
    before = live(npu.ascend)["event"]
    with pytest.raises(ValueError, match="word 6 lies in no captured block"):
        Captured(npu, stream, [*WORDS, word])
    assert live(npu.ascend)["event"] == before


def test_closing_gives_the_model_back_and_keeps_counts(ascend: AscendSimulator) -> None:
    npu = Client(ascend)
    stream = npu.stream()
    one = Captured(npu, stream)
    one.bind_home()
    one.bind(input=npu.words(2))
    assert one.run() == (1, 8)
    one.resident.close()
    one.resident.close()
    assert one.n_released == 1
    assert ascend.live("model") == 0
    assert one.resident.refresh_counts == {"copies": 1, "bytes_copied": 8}
    one.bind(input=one.x)  # no change any more
    with pytest.raises(ExecutionError, match="closed"):
        one.resident.execute()


def without_copies_by_offset(ascend, how):
    if how == "firmware":
        ascend.set_copies_by_offset(False)
    else:
        ascend.set_soc_name(how)


@pytest.mark.parametrize("how", ["Ascend310P3", "Ascend310B1", "firmware"])
def test_where_no_copy_reads_its_addresses_the_host_copies(how, ascend):
    without_copies_by_offset(ascend, how)
    held = live(ascend)
    tensors = [(64, True, True)]
    assert _native.AscendMovingCopies(device=0, tensors=tensors).form == "enqueued"
    with pytest.raises(BackendUnavailable, match=r"207000.*copies='enqueued'"):
        _native.AscendMovingCopies(device=0, tensors=tensors, form="captured")
    assert live(ascend) == held


def test_a_trial_that_fails_is_an_error_and_leaves_nothing(ascend):
    held = live(ascend)
    for function in ("aclrtMemcpyAsyncWithOffset", "aclrtSynchronizeStream", "aclrtMalloc"):
        ascend.fail(function, 507000)
        with pytest.raises(ExecutionError, match="507000"):
            _native.AscendMovingCopies(device=0, tensors=[(64, True, True)])
        assert live(ascend) == held


def test_a_tensor_of_more_than_4_gib_is_captured_in_parts(ascend, npu, stream):
    """The runtime refuses larger sizes at once (107000); nothing is copied here."""
    n_bytes = (4 << 30) + 64
    copies = _native.AscendMovingCopies(device=0, tensors=[(n_bytes, True, True)])
    ascend.start_trace()
    with npu.capture(stream):
        copies.capture_in(stream)
        copies.capture_out(stream)
    parts = [one.split()[1] for one in ascend.trace if "WithOffset" in one]
    assert parts == [f"bytes={4 << 30}", "bytes=64"] * 2


def test_captures_of_other_threads_do_not_keep_a_program_from_being_loaded(ascend, npu, stream):
    """In GLOBAL mode they refuse copies of every thread that has not exchanged its mode."""
    ascend.in_thread(lambda: npu.begin(stream, GLOBAL))
    word = npu.malloc()
    copy = ("aclrtMemcpy", word, 8, word + 8, 8, DEVICE_TO_DEVICE)
    assert ascend.code(*copy) == CAPTURE_MODE_NOT_SUPPORT
    assert _native.AscendMovingCopies(device=0, tensors=[(64, True, True)]).form == "captured"
    chain = Chain(ascend, refresh="operators")  # which copies its table
    assert ascend.code(*copy) == CAPTURE_MODE_NOT_SUPPORT
    chain.resident.close()
