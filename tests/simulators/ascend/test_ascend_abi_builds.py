"""Models that are built explicitly on the simulated Ascend runtime."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest

from model_tasks import tasks_of

HEAD, WHEN_STARTED = 0, 0x7FFFFFFF
HUGE = 0x8  # a stream flag


@pytest.fixture
def model(ascend):
    return ascend.make("aclmdlRIBuildBegin", 0)


def bind(npu, model, flag=HEAD):
    stream = npu.stream(acl.PERSISTENT)
    npu.ascend.call("aclmdlRIBindStream", model, stream, flag)
    return stream


def end(npu, model, stream):
    npu.ascend.call("aclmdlRIEndTask", model, stream)
    npu.ascend.call("aclmdlRIBuildEnd", model, 0)


def test_bound_streams_keep_what_they_are_told(ascend, npu, model):
    stream, block, executing = bind(npu, model), npu.words(1), npu.stream()
    npu.launch(stream, npu.note_function, block, 8)
    npu.note(stream, 9)
    end(npu, model, stream)
    assert npu.order == []
    for word in (2, 3):
        npu.upload(block, acl.u64(word))
        npu.run(model, executing)
    assert npu.order == ["note 2 of 1", "note 9 of 1", "note 3 of 1", "note 9 of 1"]
    ascend.call("aclmdlRIUnbindStream", model, stream)
    ascend.call("aclmdlRIDestroy", model)
    ascend.call("aclrtDestroyStream", stream)
    assert (ascend.live("model"), ascend.live("task"), ascend.argument_bytes) == (0, 0, 0)


def test_streams_of_a_model_are_ordered_by_events_and_starts(ascend, npu, model):
    head, second = bind(npu, model), bind(npu, model)
    started, idle = bind(npu, model, WHEN_STARTED), bind(npu, model, WHEN_STARTED)
    event = ascend.make("aclrtCreateEventWithFlag", acl.EVENT_SYNC)
    npu.note(head, 1)
    npu.record(event, head)
    npu.wait(second, event)
    npu.note(second, 2)
    ascend.call("aclrtActiveStream", started, second)
    npu.note(started, 3)
    npu.note(idle, 4)
    end(npu, model, started)
    npu.run(model, 0)
    npu.run(model, 0)
    assert npu.order == ["note 1 of 1", "note 2 of 1", "note 3 of 1"] * 2


def test_an_execution_ends_with_its_end_task(npu, model):
    first, second = bind(npu, model), bind(npu, model)
    npu.note(first, 1)
    npu.note(second, 2)
    end(npu, model, first)  # it does not wait for the second stream
    npu.run(model, npu.stream())
    assert npu.order == ["note 1 of 1"]
    npu.ascend.call("aclrtSynchronizeDevice")
    assert npu.order == ["note 1 of 1", "note 2 of 1"]


def test_streams_that_cannot_be_bound(ascend, npu, model):
    def code(stream, flag=HEAD):
        return ascend.code("aclmdlRIBindStream", model, stream, flag)

    bound, capturing = bind(npu, model), npu.stream(acl.PERSISTENT)
    assert code(npu.stream()) == acl.STREAM_MODEL  # not persistent
    assert code(bound) == acl.STREAM_MODEL
    assert code(0) == acl.PARAM_INVALID
    assert code(npu.stream(acl.PERSISTENT), 1) == acl.PARAM_INVALID
    with npu.capture(capturing) as models:
        calls = [
            ("aclmdlRIBindStream", model, capturing, HEAD),
            ("aclmdlRIUnbindStream", model, capturing),
            ("aclmdlRIEndTask", model, capturing),
        ]
        assert [ascend.code(*call) for call in calls] == [acl.STREAM_CAPTURED] * 3
    refused = ascend.code("aclmdlRIBindStream", models[0], capturing, HEAD)
    assert refused == acl.FEATURE_NOT_SUPPORT
    assert ascend.code("aclrtDestroyStream", bound) == acl.STREAM_MODEL


def test_a_model_is_built_before_it_runs_and_not_after(ascend, npu, model):
    stream, executing = bind(npu, model), npu.stream()
    npu.note(stream, 1)
    execute = ("aclmdlRIExecuteAsync", model, executing)
    assert ascend.code(*execute) == acl.MODEL_EXECUTE
    assert ascend.code("aclmdlRIBuildEnd", model, 0) == acl.INTERNAL_ERROR  # no end task
    end(npu, model, stream)
    assert npu.launch_host(stream, npu.note_function, 2) == acl.STREAM_MODEL
    assert ascend.code("aclmdlRIEndTask", model, stream) == acl.PARAM_INVALID
    ascend.call(*execute)
    unbind = ("aclmdlRIUnbindStream", model, stream)
    assert ascend.code(*unbind) == acl.MODEL_RUNNING
    npu.synchronize(executing)
    ascend.call(*unbind)
    assert ascend.code(*unbind) == acl.STREAM_MODEL
    npu.run(model, executing)  # which has no stream any more
    npu.note(stream, 3)  # an ordinary stream again
    npu.synchronize(stream)
    assert npu.order == ["note 1 of 1", "note 3 of 1"]


def test_a_bound_stream_joins_no_capture(ascend, npu, model):
    stream, bound, event = npu.stream(), bind(npu, model), npu.event()
    with npu.capture(stream):
        npu.record(event, stream)
        wait = ("aclrtStreamWaitEvent", bound, event)
        assert ascend.code(*wait) == acl.FEATURE_NOT_SUPPORT
    assert ascend.code("aclmdlRIBuildEnd", model, 1) == acl.PARAM_INVALID
    assert (
        ascend.code("aclmdlRIBuildBegin", ctypes.byref(ctypes.c_uint64()), 1) == acl.PARAM_INVALID
    )


def test_destroying_a_model_gives_its_streams_back(ascend, npu, model):
    stream = bind(npu, model)
    npu.note(stream, 1)
    ascend.call("aclmdlRIDestroy", model)  # not even complete
    assert ascend.argument_bytes == 0
    npu.note(stream, 2)
    npu.synchronize(stream)
    assert npu.order == ["note 2 of 1"]


def test_events_and_starts_order_streams_of_one_model_only(ascend, npu, model):
    stream, event = bind(npu, model), ascend.make("aclrtCreateEventWithFlag", acl.EVENT_SYNC)
    other = bind(npu, ascend.make("aclmdlRIBuildBegin", 0))
    wait = ("aclrtStreamWaitEvent", stream, event)
    assert ascend.code(*wait) == acl.STREAM_MODEL  # it was not recorded
    npu.record(event, other)
    assert ascend.code(*wait) == acl.STREAM_MODEL
    assert ascend.code("aclrtActiveStream", other, stream) == acl.STREAM_MODEL
    assert ascend.code("aclrtActiveStream", stream, npu.stream()) == acl.STREAM_MODEL


def test_only_events_made_with_a_flag_order_streams_of_a_built_model(ascend, npu, model):
    stream, default = bind(npu, model), ascend.make("aclrtCreateEvent")
    for event in (npu.event(), npu.event(acl.EVENT_SYNC | acl.EVENT_TIME_LINE), default):
        npu.record(event, npu.stream())
        calls = [("aclrtRecordEvent", event, stream), ("aclrtStreamWaitEvent", stream, event)]
        assert [ascend.code(*call) for call in calls] == [acl.FEATURE_NOT_SUPPORT] * 2
    assert ascend.live("task") == 0


def test_only_its_own_streams_end_a_model(ascend, npu, model):
    stream, other = bind(npu, model), ascend.make("aclmdlRIBuildBegin", 0)
    assert ascend.code("aclmdlRIEndTask", other, stream) == acl.STREAM_MODEL
    assert ascend.code("aclmdlRIEndTask", model, npu.stream(acl.PERSISTENT)) == acl.STREAM_MODEL
    assert ascend.live("task") == 0
    end(npu, model, stream)


def test_tasks_have_numbers_of_their_model(ascend, npu, model):
    stream = bind(npu, model)
    npu.note(stream, 1)
    npu.note(stream, 2)
    numbers = []
    for task in tasks_of(ascend, model)[0]:
        number = ctypes.c_uint32()
        ascend.call("aclmdlRITaskGetSeqId", task, ctypes.byref(number))
        numbers.append(number.value)
    assert numbers == [0, 1]


def test_a_bound_stream_is_full_at_2013_tasks(ascend, npu, model):
    stream = bind(npu, model)
    for word in range(2013):
        npu.note(stream, word)
    assert npu.launch_host(stream, npu.note_function, 2013) == acl.STREAM_TASK_FULL
    assert ascend.code("aclmdlRIEndTask", model, stream) == acl.STREAM_TASK_FULL
    assert ascend.live("task") == 2013


def test_no_flag_makes_a_bound_stream_longer(ascend, npu, model):
    ascend.set_bound_depth(2)
    stream = npu.stream(acl.PERSISTENT | HUGE)
    ascend.call("aclmdlRIBindStream", model, stream, HEAD)
    npu.note(stream, 1)
    npu.note(stream, 2)
    assert npu.launch_host(stream, npu.note_function, 3) == acl.STREAM_TASK_FULL


def test_captured_streams_are_continued(ascend, npu):
    ascend.set_bound_depth(2)
    stream = npu.stream()
    with npu.capture(stream) as models:
        for word in range(5):
            npu.note(stream, word)
    npu.run(models[0], stream)
    assert npu.order == [f"note {word} of 1" for word in range(5)]
