"""A program resident on the simulated Ascend device: its refresh, copies and executions."""

from __future__ import annotations

import gc
import itertools

import pytest
from ascend_residents import (
    COUNT,
    NUMBERS,
    REFRESHES,
    SIZE_BYTES,
    Chain,
    live,
    plus,
    read,
)

from offload.errors import ExecutionError
from offload.native import _native

COPY = "aclrtMemcpyAsync"
LAUNCH = "aclrtLaunchKernel"
SELECT, ADD = "aclnnIndexSelect", "aclnnAdd"
OPERATOR_CALLS = (f"{SELECT}GetWorkspaceSize", SELECT, f"{ADD}GetWorkspaceSize", ADD)


@pytest.fixture(params=["build", "capture"])
def form(request, ascend):
    if request.param == "build" and not _native.ascend_capabilities()["explicit_build"]:
        pytest.skip("the simulated runtime has no explicit build")
    return request.param


@pytest.fixture(params=REFRESHES)
def refresh(request):
    return request.param


def test_executions_read_the_addresses_of_their_own_time(ascend, form, refresh):
    chain = Chain(ascend, form=form, refresh=refresh)
    _, y = chain.bind_first()
    chain.run()
    assert read(y) == plus(3)
    other, moved = chain.allocate(plus(10)), chain.allocate()
    chain.bind(input=other, output=moved)
    chain.run()
    assert read(moved) == plus(13)
    assert read(y) == plus(3)
    assert chain.resident.form == form


def test_the_feature_map_may_move(ascend, form, refresh):
    chain = Chain(ascend, form=form, refresh=refresh)
    _, y = chain.bind_first()
    chain.run()
    moved = chain.allocate([0] * 2 * COUNT)
    chain.bind(feature_map=moved)
    chain.run()
    assert read(moved, 2 * COUNT) == [*plus(1), *plus(2)]
    assert read(y) == plus(3)


def test_refresh_and_execution_are_ordered_by_their_stream(ascend, refresh):
    """Nothing runs before the wait; each execution still has its own addresses."""
    chain = Chain(ascend, refresh=refresh)
    _, first = chain.bind_first()
    chain.resident.execute()
    second = chain.allocate()
    chain.bind(output=second)
    chain.resident.execute()
    assert read(first) == read(second) == [0] * COUNT
    chain.resident.finish()
    assert read(first) == read(second) == plus(3)


def test_executions_on_another_stream_wait_for_the_last_one(ascend):
    chain = Chain(ascend)
    _, y = chain.bind_first()
    streams = [ascend.make("aclrtCreateStream") for _ in range(2)]
    chain.resident.set_stream(streams[0])
    chain.resident.execute()
    chain.bind(input=y)
    ascend.forget_calls()
    chain.resident.set_stream(streams[1])
    assert ascend.calls("aclrtStreamWaitEvent") == 1
    chain.resident.execute()
    chain.resident.finish()
    assert read(y) == plus(6)
    chain.resident.close()


def test_the_first_refresh_copies_the_whole_table_once(ascend):
    chain = Chain(ascend)
    chain.bind_first()
    ascend.forget_calls()
    chain.run()
    assert ascend.calls(COPY) == 1
    assert chain.resident.refresh_counts["copies"] == 1
    assert chain.resident.refresh_counts["bytes_copied"] == 3 * 64  # three blocks of 64 bytes


def test_nothing_moved_makes_no_copy_and_no_launch(ascend, refresh):
    chain = Chain(ascend, refresh=refresh)
    chain.bind_first()
    chain.run()
    before = chain.resident.refresh_counts
    ascend.forget_calls()
    for _ in range(3):
        chain.run()
    assert chain.resident.refresh_counts == before
    assert ascend.calls(COPY) == ascend.calls(LAUNCH) == 0
    assert ascend.calls("aclrtLaunchKernelWithHostArgs") == 0
    assert sum(ascend.calls(one) for one in OPERATOR_CALLS) == 0
    assert ascend.calls("aclmdlRIExecuteAsync") == 3


def test_one_moved_address_is_one_copy_of_its_words(ascend):
    chain = Chain(ascend)
    chain.bind_first()
    chain.run()
    before = chain.resident.refresh_counts["bytes_copied"]
    ascend.forget_calls()
    chain.bind(input=chain.allocate(NUMBERS))
    chain.run()
    assert ascend.calls(COPY) == 1
    assert chain.resident.refresh_counts["bytes_copied"] == before + 8
    chain.bind(feature_map=chain.allocate([0] * 2 * COUNT))
    chain.run()
    assert ascend.calls(COPY) == 2


def test_a_refresh_is_staged_at_the_call(ascend):
    chain = Chain(ascend)
    chain.bind_first()
    ascend.start_trace()
    chain.run()
    copies = [entry for entry in ascend.trace if entry.startswith(COPY)]
    assert len(copies) == 1
    assert "kind=5" in copies[0]  # HOST_TO_BUF_TO_DEVICE


def test_a_gather_takes_its_bases_in_its_launch(ascend):
    chain = Chain(ascend, refresh="kernel")
    chain.bind_first()
    ascend.forget_calls()
    chain.run()
    assert ascend.calls("aclrtLaunchKernelWithHostArgs") == 1
    assert ascend.calls(COPY) == 0
    assert chain.resident.refresh_counts == {
        "copies": 0,
        "bytes_copied": 0,
        "gathers": 1,
        "bytes_launched": 40 + 8 * 4,  # three slots, and the base of words that are no addresses
        "plans": 0,
    }


def test_execution_launch_by_launch_gives_the_same(ascend, refresh):
    chain = Chain(ascend, refresh=refresh)
    _, y = chain.bind_first()
    ascend.forget_calls()
    for launch in range(chain.resident.n_launches):
        chain.resident.issue(launch)
    chain.resident.finish()
    assert read(y) == plus(3)
    assert ascend.calls("aclmdlRIExecuteAsync") == 0


def test_words_that_were_never_patched_are_refused(ascend, refresh):
    chain = Chain(ascend, refresh=refresh)
    chain.bind(input=chain.allocate(NUMBERS))
    words = "5 of 6" if refresh == "host" else "2 of 3"
    with pytest.raises(ExecutionError, match=f"{words} address words were never patched"):
        chain.resident.execute()
    _, y = chain.bind_first()
    chain.run()
    assert read(y) == plus(3)


def test_copies_around_an_execution_are_ordered_with_it(ascend):
    chain = Chain(ascend)
    x, y = chain.bind_first()
    source, result = chain.allocate(plus(7)), chain.allocate()
    assert chain.resident.copy(x, source, SIZE_BYTES)
    chain.resident.execute()
    assert chain.resident.copy(result, y, SIZE_BYTES)
    assert read(result) == [0] * COUNT  # nothing has run
    chain.resident.finish()
    assert read(result) == plus(10)


def test_copies_of_tensors_on_the_host_are_left_to_torch(ascend):
    chain = Chain(ascend, copies_on_device=False)
    x, _ = chain.bind_first()
    ascend.forget_calls()
    assert not chain.resident.copy(x, chain.allocate(plus(7)), SIZE_BYTES)
    assert ascend.calls(COPY) == 0


def test_closing_gives_everything_back(ascend, form, refresh):
    ascend.set_software_sq(False)  # models use up streams
    before = live(ascend)
    chain = Chain(ascend, form=form, refresh=refresh)
    assert live(ascend)["streams in use"] > before["streams in use"]
    chain.resident.close()
    chain.resident.close()
    assert live(ascend) == before
    with pytest.raises(ExecutionError, match="the program was closed"):
        chain.resident.execute()


def test_closing_waits_for_what_is_under_way(ascend, form):
    chain = Chain(ascend, form=form)
    _, y = chain.bind_first()
    chain.resident.execute()
    assert read(y) == [0] * COUNT
    chain.resident.close()
    assert read(y) == plus(3)


def test_a_stream_that_is_being_captured_is_refused(ascend):
    chain = Chain(ascend)
    chain.bind_first()
    stream = ascend.make("aclrtCreateStream")
    ascend.call("aclmdlRICaptureBegin", stream, 2)
    with pytest.raises(ExecutionError, match="is being captured into another model"):
        chain.resident.set_stream(stream)


def test_words_that_lie_nowhere_are_refused(ascend):
    def resident(words, relocations):
        return _native.AscendResident(
            device=0,
            arena_bytes=0,
            kernels=[(0, 1, 0, bytes(16))],
            words=words,
            relocations=relocations,
            triggers=[_native.Trigger.IO],
            n_launches=1,
        )

    before = live(ascend)
    for words, relocations, says in (
        ([(0, 12)], [(0, 0, 0)], "not at a multiple of 8 bytes"),
        ([(0, 16)], [(0, 0, 0)], "lies in no block"),
        ([(0, 2**64 - 8)], [(0, 0, 0)], "lies in no block"),
        ([(0, 8), (0, 8)], [(0, 0, 0), (1, 0, 8)], "two words lie at byte 8"),
        ([(1, 0)], [(0, 0, 0)], "lies in no block"),
        ([(0, 0)], [(0, 5, 0)], "slot that does not exist"),
        ([(0, 0)], [], "has no relocation"),
    ):
        with pytest.raises(ValueError, match=says):
            resident(words, relocations)
    assert live(ascend) == before


def test_bytes_of_the_feature_map(ascend):
    before = ascend.live_bytes
    resident = _native.AscendResident(
        device=0,
        arena_bytes=10 * SIZE_BYTES,
        kernels=[],
        words=[],
        relocations=[],
        triggers=[],
        n_launches=0,
    )
    assert ascend.live_bytes >= before + 10 * SIZE_BYTES
    assert ascend.is_accessible(resident.arena_address, 10 * SIZE_BYTES)
    resident.close()
    assert ascend.live_bytes == before


def test_every_refresh_writes_the_same_table(ascend):
    """Of 400 kernels, each of which passes on its input."""
    seen: list[bytes] = []
    tables = []
    for refresh in REFRESHES:
        chain = Chain(ascend, 400, refresh=refresh, function=lambda block, _: seen.append(block))
        for name, base in (("input", 1 << 20), ("output", 1 << 30), ("feature_map", 1 << 40)):
            chain.bind(**{name: base})
        chain.run()
        for name, moved in itertools.product(("input", "feature_map"), (3 << 20, 5 << 32)):
            chain.bind(**{name: moved})
            chain.run()
        tables.append(list(seen))
        seen.clear()
    assert len(tables[0]) == 400 * 5
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.parametrize("depth", [3, 2])
def test_a_program_that_no_built_model_has_room_for_is_captured(depth, ascend):
    """A program of three kernels; its end is also a task of the stream."""
    ascend.set_bound_depth(depth)
    before = live(ascend)
    with pytest.raises(ExecutionError, match=r'(?s)507002.*2,013 tasks.*form="capture"'):
        Chain(ascend, form="build")
    gc.collect()
    assert live(ascend) == before
    chain = Chain(ascend)
    assert chain.resident.form == "capture"
    _, y = chain.bind_first()
    chain.run()
    assert read(y) == plus(3)
    chain.resident.close()


def test_a_program_that_just_fits_is_built(ascend):
    ascend.set_bound_depth(4)
    assert Chain(ascend).resident.form == "build"
