"""The location of captured models' kernel arguments, on the simulated Ascend runtime.

The rules are those of hicann/runtime (9.1.0 and master): kernel_utils.cc (UpdateKernelParams,
GetKernelAttribute), para_convertor.cc (ConvertLaunchCfgToTaskCfg), api_impl.cc (TaskSetParams,
ModelUpdate). They state no alignment of arguments, so the simulator requires none.
"""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest
from device_controls import KEEP, REUSE, UNMAP

from model_tasks import parameters_of, tasks_of

SCHEDULING_MODE, LOCAL_MEMORY, ENGINE, BLOCK_OFFSET, PREFETCH = 1, 2, 3, 4, 5
DATA_DUMP, TIMEOUT, TIMEOUT_US, PROFILING = 6, 7, 8, 9


@pytest.fixture
def stream(npu):
    return npu.stream()


def captured(npu, stream, *numbers):
    """A model of kernels that note numbers, and its tasks."""
    with npu.capture(stream) as models:
        for number in numbers:
            npu.note(stream, number)
    (tasks,) = tasks_of(npu.ascend, models[0])
    return models[0], tasks


def give(ascend, task, address, *, of_the_host=False, configuration=0):
    """Give a kernel other arguments; return the code."""
    parameters = parameters_of(ascend, task)
    kernel = parameters.content.kernel
    kernel.arguments, kernel.is_host_arguments = address, int(of_the_host)
    kernel.configuration = configuration
    return ascend.code("aclmdlRITaskSetParams", task, ctypes.byref(parameters))


def configured(*attributes):
    """aclrtLaunchKernelCfg of (attribute, value) pairs, and the memory that holds it."""
    words = [word for number, value in attributes for word in (number, value, 0, 0, 0)]
    content = (ctypes.c_uint32 * max(1, len(words)))(*words)
    return (ctypes.c_uint64 * 2)(ctypes.addressof(content), len(attributes)), content


def attribute(ascend, task, number):
    value = (ctypes.c_uint32 * 4)()
    ascend.call("aclmdlRIKernelTaskGetAttribute", task, number, value)
    return list(value)


def test_arguments_on_the_device_stay_where_they_are_and_are_read_at_each_execution(
    ascend, npu, stream
):
    """So one table of the caller serves all kernels, and no task is updated again."""
    model, tasks = captured(npu, stream, 1, 2, 3)
    table = npu.words(10, 20, 30)
    for index, task in enumerate(tasks):
        assert give(ascend, task, table + 8 * index) == 0
        assert parameters_of(ascend, task).content.kernel.arguments == table + 8 * index
    ascend.call("aclmdlRIUpdate", model)
    assert ascend.argument_bytes == 0  # the runtime's own blocks are gone
    npu.run(model, stream)
    ascend.forget_calls()
    kind = acl.HOST_TO_BUFFER_TO_DEVICE
    ascend.call("aclrtMemcpyAsync", table, 24, acl.u64(11, 21, 31), 24, kind, stream)
    npu.run(model, stream)
    names = [f"note {number} of 1" for number in (10, 20, 30, 11, 21, 31)]
    assert npu.order == names
    assert ascend.calls("aclmdlRITaskSetParams") == ascend.calls("aclmdlRIUpdate") == 0


def test_one_update_makes_all_that_was_set_count(ascend, npu, stream):
    model, tasks = captured(npu, stream, 1, 2, 3)
    table = npu.words(10, 20)
    assert give(ascend, tasks[0], table) == 0
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.MODEL_EXECUTE
    assert give(ascend, tasks[2], table + 8) == 0  # while the first waits for it
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.MODEL_EXECUTE
    ascend.start_trace()
    ascend.call("aclmdlRIUpdate", model)
    assert [one for one in ascend.trace if one.startswith("aclmdlRIUpdate")] == [
        "aclmdlRIUpdate tasks=2"
    ]
    npu.run(model, stream)
    assert npu.order == ["note 10 of 1", "note 2 of 1", "note 20 of 1"]


def test_nothing_is_set_or_updated_while_the_model_runs(ascend, npu, stream):
    model, (task,) = captured(npu, stream, 1)
    table = npu.words(10)
    npu.execute(model, stream)
    assert give(ascend, task, table) == acl.MODEL_UPDATE_FAILED
    npu.synchronize(stream)
    assert give(ascend, task, table) == 0
    ascend.call("aclmdlRIUpdate", model)
    npu.run(model, stream)
    assert npu.order == ["note 1 of 1", "note 10 of 1"]


@pytest.mark.parametrize("policy", [KEEP, UNMAP, REUSE])
@pytest.mark.parametrize("how", ["given", "launched"])
def test_arguments_that_were_freed_are_a_fault(how, policy, ascend, npu, stream):
    """Also where other memory now has the address, or the freed bytes can still be read."""
    ascend.set_free_policy(policy)
    table = npu.words(10)
    if how == "given":
        model, (task,) = captured(npu, stream, 1)
        assert give(ascend, task, table) == 0
        ascend.call("aclmdlRIUpdate", model)
    else:
        with npu.capture(stream) as models:
            npu.launch(stream, npu.note_function, table, 8)
        (model,) = models
    npu.run(model, stream)
    ascend.call("aclrtFree", table)
    if policy == REUSE:
        assert npu.words(11) == table
    npu.execute(model, stream)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION
    assert npu.order == ["note 10 of 1"]


@pytest.mark.parametrize("where", ["pageable", "pinned", "behind its memory"])
def test_arguments_that_are_not_on_the_device_are_a_fault(where, ascend, npu, stream):
    """isHostArgs states the kind of address; only the kernel checks it."""
    model, (task,) = captured(npu, stream, 1)
    content = ctypes.create_string_buffer(acl.u64(10), 8)
    addresses = {
        "pageable": ctypes.addressof(content),
        "pinned": npu.pinned(acl.u64(10)),
        "behind its memory": npu.words(10) + 4092,
    }
    assert give(ascend, task, addresses[where]) == 0
    ascend.call("aclmdlRIUpdate", model)
    npu.execute(model, stream)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION
    assert npu.order == []


@pytest.mark.parametrize("of_the_host", [True, False])
def test_words_into_the_old_block_are_not_filled_in_anew(of_the_host, ascend, npu, stream):
    """A launch fills them in where placeholders ask for it; a task's parameters have none."""
    place = (ctypes.c_uint32 * 2)(8, 16)  # the word at byte 8 points to byte 16
    content = acl.u64(1, 0, 7)
    launch = "aclrtLaunchKernelWithHostArgs"
    with npu.capture(stream) as models:
        ascend.call(launch, npu.note_function, 1, stream, 0, content, 24, place, 1)
    ((task,),) = tasks_of(ascend, models[0])
    old = parameters_of(ascend, task).content.kernel.arguments
    assert acl.peek(old, 3) == (1, old + 16, 7)
    moved = acl.u64(*acl.peek(old, 3))
    device = npu.malloc(24)
    npu.upload(device, moved)
    given = ctypes.create_string_buffer(moved, 24)
    address = ctypes.addressof(given) if of_the_host else device
    assert give(ascend, task, address, of_the_host=of_the_host) == 0
    ascend.call("aclmdlRIUpdate", models[0])
    new = parameters_of(ascend, task).content.kernel.arguments
    assert (new == device) is not of_the_host
    assert acl.peek(new, 3) == (1, old + 16, 7)
    assert acl.peek(old + 16) != (7,)  # which is no longer kept


def test_without_a_configuration_attributes_are_lost(ascend, npu, stream):
    configuration, _content = configured((SCHEDULING_MODE, 1), (LOCAL_MEMORY, 4096))
    block, table = npu.words(1), npu.words(10)
    launch = ("aclrtLaunchKernelV2", npu.note_function, 2, block, 8, configuration, stream)
    with npu.capture(stream) as models:
        ascend.call(*launch)
    ((task,),) = tasks_of(ascend, models[0])
    assert parameters_of(ascend, task).content.kernel.configuration == 0  # not reported there
    told = [attribute(ascend, task, number) for number in (SCHEDULING_MODE, LOCAL_MEMORY)]
    assert told == [[1, 0, 0, 0], [4096, 0, 0, 0]]
    assert give(ascend, task, table, configuration=ctypes.addressof(configuration)) == 0
    assert [attribute(ascend, task, number) for number in (1, 2)] == told
    assert give(ascend, task, table) == 0
    assert [attribute(ascend, task, number) for number in (1, 2)] == [[0] * 4] * 2
    ascend.call("aclmdlRIUpdate", models[0])
    npu.run(models[0], stream)
    assert npu.order == ["note 10 of 2"]


@pytest.mark.parametrize("number", [ENGINE, BLOCK_OFFSET, PREFETCH, PROFILING, 0, 10])
def test_some_attributes_are_not_told(number, ascend, npu, stream):
    _, (task,) = captured(npu, stream, 1)
    ask = ("aclmdlRIKernelTaskGetAttribute", task, number, (ctypes.c_uint32 * 4)())
    assert ascend.code(*ask) == acl.PARAM_INVALID


def test_a_timeout_is_told_in_both_units(ascend, npu, stream):
    _, (task,) = captured(npu, stream, 1)
    for given, seconds, microseconds in (
        ((TIMEOUT, 3), 3, 3_000_000),
        ((TIMEOUT_US, 2_500_000), 2, 2_500_000),
    ):
        configuration, _content = configured(given)
        address = ctypes.addressof(configuration)
        assert give(ascend, task, npu.words(10), configuration=address) == 0
        assert attribute(ascend, task, TIMEOUT) == [seconds, 0, 0, 0]
        assert attribute(ascend, task, TIMEOUT_US) == [microseconds, 0, 0, 0]


def null_attributes():
    return (ctypes.c_uint64 * 2)(0, 1)


def unknown_attribute():
    return configured((10, 1))


@pytest.mark.parametrize("make", [null_attributes, unknown_attribute])
def test_a_configuration_that_is_refused_leaves_a_model_that_does_nothing(
    make, ascend, npu, stream
):
    model, (task,) = captured(npu, stream, 1)
    made = make()
    configuration = made[0] if isinstance(made, tuple) else made
    address = ctypes.addressof(configuration)
    assert give(ascend, task, npu.words(10), configuration=address) == acl.PARAM_INVALID
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.MODEL_EXECUTE
    assert ascend.code("aclmdlRIUpdate", model) == acl.MODEL_UPDATE_FAILED


@pytest.mark.parametrize("spoiled", ["address", "bytes"])
def test_arguments_of_nothing_are_refused(spoiled, ascend, npu, stream):
    model, (task,) = captured(npu, stream, 1)
    parameters = parameters_of(ascend, task)
    kernel = parameters.content.kernel
    if spoiled == "address":
        kernel.arguments = 0
    else:
        kernel.arguments_bytes = 0
    code = ascend.code("aclmdlRITaskSetParams", task, ctypes.byref(parameters))
    assert code == acl.PARAM_INVALID
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.MODEL_EXECUTE
