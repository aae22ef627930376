"""Conditional tasks and their sub graphs on the simulated Ascend runtime."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest

from model_tasks import Parameters, tasks_of

IF, WHILE, SWITCH = 0, 1, 2
ASSIGN_DEFAULT = 1


class ConditionParameters(ctypes.Structure):
    """aclmdlRICondTaskParams, passed by value."""

    _fields_ = (
        ("handle", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("n_models", ctypes.c_uint32),
        ("models", ctypes.c_void_p),
    )


@pytest.fixture
def stream(npu):
    return npu.stream()


@pytest.fixture
def side(npu):
    """The stream on which sub graphs are captured."""
    return npu.stream()


def condition_on(ascend, model, default=0, flag=ASSIGN_DEFAULT):
    handle = ctypes.c_uint64()
    ascend.call("aclmdlRICondHandleCreate", model, default, flag, ctypes.byref(handle))
    return handle.value


def value_of(ascend, condition):
    return last_result(ascend, "aclmdlRICondHandleGetCondPtr", condition)


def last_result(ascend, function, *arguments):
    """The output of a function in its last argument."""
    result = ctypes.c_uint64()
    ascend.call(function, *arguments, ctypes.byref(result))
    return result.value


def task_code(ascend, stream, condition, kind, models, flags=0):
    address = ctypes.addressof(models) if models else 0
    parameters = ConditionParameters(condition, kind, len(models or ()), address)
    return ascend.code("aclmdlRIAddCondTask", parameters, stream, flags)


def add_task(ascend, stream, condition, kind, n_models):
    models = (ctypes.c_uint64 * n_models)()
    assert task_code(ascend, stream, condition, kind, models) == 0
    return list(models)


def sub_code(ascend, stream, model, mode=acl.THREAD_LOCAL):
    return ascend.code("aclmdlRICaptureToModelRIBegin", stream, model, mode)


def capture_into(npu, side, model, *words):
    assert sub_code(npu.ascend, side, model) == 0
    assert npu.info(side) == (1, model)
    for word in words:
        npu.note(side, word)
    assert npu.end(side) == model


def branching(npu, stream, side, kind, n_models, default=0, flag=ASSIGN_DEFAULT):
    """A model of a note 100, sub graphs that note their number, and a note 200; its condition."""
    with npu.capture(stream) as models:
        condition = condition_on(npu.ascend, npu.info(stream)[1], default, flag)
        npu.note(stream, 100)
        for number, model in enumerate(add_task(npu.ascend, stream, condition, kind, n_models)):
            capture_into(npu, side, model, number)
        npu.note(stream, 200)
    return models[0], condition


def noted(npu):
    words = [int(entry.split()[1]) for entry in npu.order]
    npu.order.clear()
    return words


@pytest.mark.parametrize(
    ("kind", "n_models", "value", "expected"),
    [
        (IF, 1, 0, []),
        (IF, 1, 1, [0]),
        (IF, 2, 7, [0]),
        (IF, 2, 0, [1]),
        (WHILE, 1, 0, []),
        (SWITCH, 1, 0, [0]),
        (SWITCH, 3, 2, [2]),
    ],
)
def test_the_value_chooses_the_sub_graph(npu, stream, side, kind, n_models, value, expected):
    model, _ = branching(npu, stream, side, kind, n_models, default=value)
    assert noted(npu) == []
    for _ in range(2):
        npu.run(model, stream)
        assert noted(npu) == [100, *expected, 200]


def test_a_value_without_a_sub_graph_is_a_fault(ascend, npu, stream, side):
    model, _ = branching(npu, stream, side, SWITCH, 2, default=2)
    npu.execute(model, stream)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION
    assert noted(npu) == [100]


def test_a_kernel_of_the_model_sets_the_value(ascend, npu, stream, side):
    source = npu.words(0)
    with npu.capture(stream) as models:
        condition = condition_on(ascend, npu.info(stream)[1], default=5)
        npu.add(stream, source, value_of(ascend, condition), 0)
        (sub,) = add_task(ascend, stream, condition, IF, 1)
        capture_into(npu, side, sub, 1)
    for value, expected in ((0, ["add 0"]), (3, ["add 0", "note 1 of 1"])):
        npu.upload(source, acl.u64(value))
        npu.order.clear()
        npu.run(models[0], stream)
        assert npu.order == expected


def counting_down(ascend, npu, stream, side):
    """A model of a loop of three rounds, and the value that it counts down."""
    with npu.capture(stream) as models:
        condition = condition_on(ascend, npu.info(stream)[1], default=3)
        cell = value_of(ascend, condition)
        (sub,) = add_task(ascend, stream, condition, WHILE, 1)
        assert sub_code(ascend, side, sub) == 0
        npu.add(side, cell, cell, 2**64 - 1)
        npu.end(side)
    return models[0], cell


def test_a_loop_goes_on_until_its_value_is_null(ascend, npu, stream, side):
    model, cell = counting_down(ascend, npu, stream, side)
    for _ in range(2):
        npu.order.clear()
        npu.run(model, stream)
        assert len(npu.order) == 3
    assert acl.peek(cell) == (0,)


def test_a_failing_loop_ends(ascend, npu, stream, side):
    def fail(_block, _n_blocks):
        raise RuntimeError("planned")

    function = ascend.functions({"fail": (8, fail)})["fail"]
    with npu.capture(stream) as models:
        condition = condition_on(ascend, npu.info(stream)[1], default=1)
        (sub,) = add_task(ascend, stream, condition, WHILE, 1)
        assert sub_code(ascend, side, sub) == 0
        assert npu.launch_host(side, function, 1) == 0
        npu.note(side, 1)
        npu.end(side)
    npu.execute(models[0], stream)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION
    assert npu.order == []
    assert [str(error) for error in ascend.errors] == ["planned"]
    ascend.errors.clear()


def test_a_loop_that_does_not_end_is_a_fault(ascend, npu, stream, side):
    ascend.set_loop_limit(3)
    model, _ = branching(npu, stream, side, WHILE, 1, default=1)
    npu.execute(model, stream)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION
    assert noted(npu) == [100, 0, 0, 0]


def test_as_many_rounds_as_a_loop_may_go_are_no_fault(ascend, npu, stream, side):
    ascend.set_loop_limit(3)
    model, _ = counting_down(ascend, npu, stream, side)
    npu.run(model, stream)
    assert len(npu.order) == 3


def test_without_the_flag_the_value_stays_the_callers(ascend, npu, stream, side):
    model, condition = branching(npu, stream, side, IF, 1, default=1, flag=0)
    npu.run(model, stream)
    assert noted(npu) == [100, 200]  # it began as null
    npu.upload(value_of(ascend, condition), acl.u64(4))
    for _ in range(2):
        npu.run(model, stream)
        assert noted(npu) == [100, 0, 200]


def test_sub_graphs_nest_and_take_other_streams_along(ascend, npu, stream, side):
    inner, third, event = npu.stream(), npu.stream(), npu.event()
    with npu.capture(stream) as models:
        outer = condition_on(ascend, npu.info(stream)[1], default=1)
        (sub,) = add_task(ascend, stream, outer, IF, 1)
        assert sub_code(ascend, side, sub) == 0
        npu.note(side, 1)
        npu.record(event, side)
        npu.wait(third, event)
        npu.note(third, 2)
        npu.record(event, third)
        npu.wait(side, event)
        nested = condition_on(ascend, sub, default=1)
        (innermost,) = add_task(ascend, side, nested, IF, 1)
        capture_into(npu, inner, innermost, 3)
        npu.note(side, 4)
        npu.end(side)
    npu.run(models[0], stream)
    assert noted(npu) == [1, 2, 3, 4]
    ascend.call("aclmdlRIDestroy", models[0])
    kinds = ("model", "task", "condition", "capture", "model stream")
    assert [ascend.live(kind) for kind in kinds] == [0] * len(kinds)
    assert ascend.argument_bytes == 0


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_model_does_not_end_before_its_sub_graphs(ascend, npu, stream, side, is_begun):
    npu.begin(stream)
    condition = condition_on(ascend, npu.info(stream)[1])
    (sub,) = add_task(ascend, stream, condition, IF, 1)
    if is_begun:
        assert sub_code(ascend, side, sub) == 0
        npu.note(side, 1)
    assert npu.end_code(stream) == acl.SUB_ACLGRAPH_IS_CAPTURING
    assert (npu.info(stream), npu.info(side)) == ((0, 0), (0, 0))  # the capture was discarded
    kinds = ("model", "task", "condition", "capture", "model stream")
    assert [ascend.live(kind) for kind in kinds] == [0] * len(kinds)
    assert ascend.argument_bytes == 0
    with npu.capture(stream) as models:
        npu.note(stream, 5)
    npu.run(models[0], stream)
    assert noted(npu) == [5]


def test_of_a_dropped_sub_graph_nothing_can_be_made(ascend, npu, stream, side):
    other, event = npu.stream(), npu.event()
    npu.begin(stream)
    condition = condition_on(ascend, npu.info(stream)[1])
    (sub,) = add_task(ascend, stream, condition, IF, 1)
    assert sub_code(ascend, side, sub) == 0
    npu.record(event, side)
    npu.wait(other, event)
    npu.note(other, 1)
    assert npu.end_code(side) == acl.STREAM_UNJOINED
    assert npu.info(stream)[0] == 1  # the model's own capture continues
    assert sub_code(ascend, side, sub) == acl.PARAM_INVALID
    assert npu.end_code(stream) == acl.SUB_ACLGRAPH_IS_CAPTURING
    assert ascend.live("model") == 0


def test_sub_graphs_wait_for_nothing_outside(ascend, npu, stream, side):
    external, cell = npu.external_event(), npu.words(0)
    with npu.capture(stream):
        condition = condition_on(ascend, npu.info(stream)[1])
        (sub,) = add_task(ascend, stream, condition, IF, 1)
        assert sub_code(ascend, side, sub) == 0
        waits = [("aclrtStreamWaitEvent", side, external), ("aclrtValueWait", cell, 1, 1, side)]
        assert [ascend.code(*call) for call in waits] == [acl.FEATURE_NOT_SUPPORT] * 2
        npu.end(side)


def test_sub_graphs_are_not_read_changed_executed_or_destroyed(ascend, npu, stream, side):
    with npu.capture(stream) as models:
        condition = condition_on(ascend, npu.info(stream)[1], default=1)
        (sub,) = add_task(ascend, stream, condition, IF, 1)
        capture_into(npu, side, sub, 1)
    ((task,),) = tasks_of(ascend, sub)
    parameters = Parameters()
    calls = [
        ("aclmdlRITaskGetParams", task, ctypes.byref(parameters)),
        ("aclmdlRITaskSetParams", task, ctypes.byref(parameters)),
        ("aclmdlRITaskDisable", task),
        ("aclmdlRIUpdate", sub),
        ("aclmdlRIExecuteAsync", sub, stream),
        ("aclmdlRIExecute", sub, 0),
        ("aclmdlRIDestroy", sub),
    ]
    assert [ascend.code(*call) for call in calls] == [acl.FEATURE_NOT_SUPPORT] * len(calls)
    npu.run(models[0], stream)
    assert noted(npu) == [1]


def test_without_software_sq_there_are_no_conditions(ascend, npu, stream, side):
    with npu.capture(stream):
        model = npu.info(stream)[1]
        condition = condition_on(ascend, model)
        ascend.set_software_sq(False)
        result, models = ctypes.c_uint64(), (ctypes.c_uint64 * 1)()
        create = ("aclmdlRICondHandleCreate", model, 0, 0, ctypes.byref(result))
        pointer = ("aclmdlRICondHandleGetCondPtr", condition, ctypes.byref(result))
        codes = [
            ascend.code(*create),
            ascend.code(*pointer),
            task_code(ascend, stream, condition, IF, models),
            sub_code(ascend, side, model),
        ]
        assert codes == [acl.FEATURE_NOT_SUPPORT] * 4
        assert (result.value, models[0]) == (0, 0)
        ascend.set_software_sq(True)


def test_conditions_that_are_refused(ascend, npu, stream, side):
    result = ctypes.c_uint64()

    def create(model, flag=0):
        to = ctypes.byref(result)
        return ascend.code("aclmdlRICondHandleCreate", model, 0, flag, to)

    with npu.capture(side) as models:
        npu.note(side, 1)
    built = ascend.make("aclmdlRIBuildBegin", 0)
    with npu.capture(stream):
        model = npu.info(stream)[1]
        nowhere = ("aclmdlRICondHandleCreate", model, 0, 0, 0)
        assert ascend.code(*nowhere) == acl.PARAM_INVALID
        assert create(12345) == acl.PARAM_INVALID
        assert create(model, flag=2) == acl.PARAM_INVALID
        assert create(models[0]) == acl.PARAM_INVALID  # it is complete
        assert create(built) == acl.FEATURE_NOT_SUPPORT
        condition = condition_on(ascend, model)
        pointer = "aclmdlRICondHandleGetCondPtr"
        assert ascend.code(pointer, condition, 0) == acl.PARAM_INVALID
        for unknown in (0, 12345):
            assert ascend.code(pointer, unknown, ctypes.byref(result)) == acl.PARAM_INVALID
    assert ascend.live("condition") == 1


@pytest.mark.parametrize(
    ("kind", "n_models"), [(IF, 0), (IF, 3), (WHILE, 0), (WHILE, 2), (SWITCH, 0), (3, 1)]
)
def test_each_type_of_condition_has_its_numbers_of_sub_graphs(ascend, npu, stream, kind, n_models):
    room = (ctypes.c_uint64 * 4)()
    with npu.capture(stream):
        condition = condition_on(ascend, npu.info(stream)[1])
        parameters = ConditionParameters(condition, kind, n_models, ctypes.addressof(room))
        assert ascend.code("aclmdlRIAddCondTask", parameters, stream, 0) == acl.PARAM_INVALID
        assert list(room) == [0] * 4


def test_conditional_tasks_that_are_refused(ascend, npu, stream, side):
    models = (ctypes.c_uint64 * 1)()
    with npu.capture(side), npu.capture(stream):
        condition = condition_on(ascend, npu.info(stream)[1])
        elsewhere = condition_on(ascend, npu.info(side)[1])
        refused = [
            (acl.PARAM_INVALID, 0, condition, models, 0),
            (acl.PARAM_INVALID, stream, 12345, models, 0),
            (acl.PARAM_INVALID, stream, 0, models, 0),
            (acl.PARAM_INVALID, stream, condition, models, 1),
            (acl.PARAM_INVALID, stream, elsewhere, models, 0),
            (acl.STREAM_NOT_CAPTURED, npu.stream(), condition, models, 0),
        ]
        for code, to, handle, given, flags in refused:
            assert task_code(ascend, to, handle, IF, given, flags) == code
        nowhere = ConditionParameters(condition, IF, 1, 0)
        assert ascend.code("aclmdlRIAddCondTask", nowhere, stream, 0) == acl.PARAM_INVALID
        ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
        code = task_code(ascend, stream, condition, IF, models)
        assert code == acl.TASK_TYPE_NOT_SUPPORT
        last_result(ascend, "aclmdlRICaptureTaskGrpEnd", stream)
        assert ascend.live("model") == 2
        (sub,) = add_task(ascend, stream, condition, IF, 1)
        assert task_code(ascend, stream, condition, IF, models) == acl.PARAM_INVALID  # used twice
        capture_into(npu, npu.stream(), sub)


def test_captures_into_models_that_are_refused(ascend, npu, stream, side):
    with npu.capture(stream):
        model = npu.info(stream)[1]
        condition = condition_on(ascend, model)
        (sub,) = add_task(ascend, stream, condition, IF, 1)
        default = ascend.make("aclrtCtxGetCurrentDefaultStream")
        refused = [
            (acl.PARAM_INVALID, 0, sub, acl.GLOBAL),
            (acl.PARAM_INVALID, side, 0, acl.GLOBAL),
            (acl.PARAM_INVALID, side, 12345, acl.GLOBAL),
            (acl.PARAM_INVALID, side, model, acl.GLOBAL),  # no sub graph
            (acl.PARAM_INVALID, side, sub, 3),
            (acl.STREAM_CAPTURED, stream, sub, acl.GLOBAL),
            (acl.FEATURE_NOT_SUPPORT, default, sub, acl.GLOBAL),
        ]
        for code, on, into, mode in refused:
            assert sub_code(ascend, on, into, mode) == code
        capture_into(npu, side, sub)
        assert sub_code(ascend, side, sub) == acl.PARAM_INVALID  # it is complete
