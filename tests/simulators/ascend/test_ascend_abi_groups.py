"""Task groups of captured models on the simulated Ascend runtime, and their updates."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest


@pytest.fixture
def stream(npu):
    return npu.stream()


def grouped(ascend, npu, stream, *words):
    """A model of kernels, the middle ones in a group: the model and the group."""
    with npu.capture(stream) as models:
        npu.note(stream, 0)
        ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
        for word in words:
            npu.note(stream, word)
        group = end_group(ascend, stream)
        npu.note(stream, 9)
    return models[0], group


def end_group(ascend, stream):
    group = ctypes.c_uint64()
    ascend.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
    return group.value


def end_group_code(ascend, stream):
    group = ctypes.c_uint64()
    return ascend.code("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))


def begin_update(ascend, stream, group):
    ascend.call("aclmdlRICaptureTaskUpdateBegin", stream, group)


def test_an_update_issues_tasks_anew(ascend, npu, stream):
    model, group = grouped(ascend, npu, stream, 1, 2)
    begin_update(ascend, stream, group)
    npu.note(stream, 3)
    npu.note(stream, 4)
    ascend.call("aclmdlRICaptureTaskUpdateEnd", stream)
    npu.run(model, stream)
    assert npu.order == [f"note {word} of 1" for word in (0, 3, 4, 9)]
    ascend.call("aclmdlRIDestroy", model)
    assert ascend.argument_bytes == 0
    update = ("aclmdlRICaptureTaskUpdateBegin", stream, group)
    assert ascend.code(*update) == acl.PARAM_INVALID


def test_an_update_runs_on_its_stream_and_orders_nothing_else(ascend, npu, stream):
    model, group = grouped(ascend, npu, stream, 1)
    updating, event = npu.stream(), npu.event()
    begin_update(ascend, updating, group)
    npu.note(updating, 2)
    ascend.call("aclmdlRICaptureTaskUpdateEnd", updating)
    npu.run(model, stream)  # it is not ordered after the update
    assert npu.order == [f"note {word} of 1" for word in (0, 1, 9)]
    npu.record(event, updating)
    npu.wait(stream, event)
    npu.run(model, stream)
    assert npu.order[3:] == [f"note {word} of 1" for word in (0, 2, 9)]


def test_an_external_event_orders_a_replay_after_an_update(ascend, npu, stream):
    event = npu.external_event()
    with npu.capture(stream) as models:
        npu.wait(stream, event)
        ascend.call("aclrtResetEvent", event, stream)
        ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
        npu.note(stream, 1)
        group = end_group(ascend, stream)
    updating = npu.stream()
    for word in (2, 3):
        npu.execute(models[0], stream)
        begin_update(ascend, updating, group)
        npu.note(updating, word)
        ascend.call("aclmdlRICaptureTaskUpdateEnd", updating)
        npu.record(event, updating)
        npu.synchronize(stream)
    assert npu.order == ["note 2 of 1", "note 3 of 1"]


def test_groups_are_refused_outside_of_captures(ascend, stream):
    begin = ("aclmdlRICaptureTaskGrpBegin", stream)
    assert ascend.code(*begin) == acl.STREAM_NOT_CAPTURED
    assert end_group_code(ascend, stream) == acl.STREAM_NOT_CAPTURED


def test_groups_do_not_nest(ascend, npu, stream):
    begin = ("aclmdlRICaptureTaskGrpBegin", stream)
    with npu.capture(stream):
        assert end_group_code(ascend, stream) == acl.STREAM_TASK_GROUP_STATUS
        ascend.call(*begin)
        assert ascend.code(*begin) == acl.STREAM_TASK_GROUP_STATUS
        assert npu.end_code(stream) == acl.STREAM_TASK_GROUP_STATUS
        end_group(ascend, stream)


def test_a_group_keeps_other_streams_and_other_tasks_out(ascend, npu, stream):
    side, event, device = npu.stream(), npu.event(), npu.malloc()
    with npu.capture(stream):
        npu.record(event, stream)
        npu.wait(side, event)
        ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
        code = npu.launch_host(side, npu.note_function, 1)
        assert code == acl.STREAM_TASK_GROUP_INTR
        fill = ("aclrtMemsetAsync", device, 8, 0, 8)
        assert ascend.code(*fill, stream) == acl.TASK_TYPE_NOT_SUPPORT
        end_group(ascend, stream)
        npu.record(event, side)
        npu.wait(stream, event)


@pytest.mark.parametrize("words", [(), (1,), (1, 2, 3)])
def test_an_update_with_another_number_of_tasks_is_refused(ascend, npu, stream, words):
    model, group = grouped(ascend, npu, stream, 5, 6)
    begin_update(ascend, stream, group)
    codes = [npu.launch_host(stream, npu.note_function, word) for word in words]
    codes.append(ascend.code("aclmdlRICaptureTaskUpdateEnd", stream))
    assert codes.index(acl.INTERNAL_ERROR) == min(len(words), 2)  # at the first excess task
    assert codes.count(0) == len(codes) - 1
    end = ("aclmdlRICaptureTaskUpdateEnd", stream)
    assert ascend.code(*end) == acl.STREAM_TASK_GROUP_STATUS  # the refused update has ended
    if len(words) < 2:
        npu.run(model, stream)  # nothing was changed
        assert npu.order == [f"note {word} of 1" for word in (0, 5, 6, 9)]


def test_an_update_takes_kernels_only(ascend, npu, stream):
    _, group = grouped(ascend, npu, stream, 1)
    device = npu.malloc()
    begin_update(ascend, stream, group)
    fill = ("aclrtMemsetAsync", device, 8, 0, 8, stream)
    assert ascend.code(*fill) == acl.TASK_TYPE_NOT_SUPPORT


def test_updates_are_refused_where_they_cannot_be(ascend, npu, stream):
    _, group = grouped(ascend, npu, stream, 1)
    begin, end = "aclmdlRICaptureTaskUpdateBegin", "aclmdlRICaptureTaskUpdateEnd"
    assert ascend.code(end, stream) == acl.STREAM_TASK_GROUP_STATUS
    begin_update(ascend, stream, group)
    assert ascend.code(begin, stream, group) == acl.STREAM_TASK_GROUP_STATUS
    other, bound = npu.stream(), npu.stream(acl.PERSISTENT)
    with npu.capture(other):
        assert ascend.code(begin, other, group) == acl.STREAM_CAPTURED
        assert ascend.code(end, other) == acl.STREAM_CAPTURED
    model = ascend.make("aclmdlRIBuildBegin", 0)
    ascend.call("aclmdlRIBindStream", model, bound, 0)
    assert ascend.code(begin, bound, group) == acl.STREAM_MODEL
    assert ascend.code(end, bound) == acl.STREAM_MODEL
    assert ascend.code("aclmdlRICaptureBegin", bound, acl.GLOBAL) == acl.STREAM_MODEL
