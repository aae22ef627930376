"""Tasks of models on the simulated Ascend runtime: enumerated, read, changed and disabled."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest

from model_tasks import (
    KERNEL,
    RECORD,
    RESET,
    VALUE_WAIT,
    WAIT,
    WRITE,
    Parameters,
    parameters_of,
    tasks_of,
    type_of,
)


@pytest.fixture
def stream(npu):
    return npu.stream()


def set_code(ascend, task, parameters):
    return ascend.code("aclmdlRITaskSetParams", task, ctypes.byref(parameters))


def one_kernel(npu, stream, *words):
    with npu.capture(stream) as models:
        npu.note(stream, words[0])
    ((task,),) = tasks_of(npu.ascend, models[0])
    return models[0], task


def test_tasks_are_enumerated_by_stream_and_in_order(ascend, npu, stream):
    ascend.set_software_sq(False)  # not needed for this
    side, event, cell = npu.stream(), npu.event(), npu.words(0)
    external = npu.external_event()
    with npu.capture(stream) as models:
        npu.note(stream, 1)
        npu.record(event, stream)
        npu.wait(side, event)
        ascend.call("aclrtValueWrite", cell, 7, 0, side)
        ascend.call("aclrtValueWait", cell, 7, 1, side)
        ascend.call("aclrtMemsetAsync", cell, 8, 0, 8, side)
        npu.record(event, side)
        npu.wait(stream, event)
        ascend.call("aclrtResetEvent", external, stream)
    origin, other = tasks_of(ascend, models[0])
    assert [type_of(ascend, task) for task in origin] == [KERNEL, RECORD, WAIT, RESET]
    assert [type_of(ascend, task) for task in other] == [WAIT, WRITE, VALUE_WAIT, 0, RECORD]
    ids = []
    for task in origin + other:
        number = ctypes.c_uint32()
        ascend.call("aclmdlRITaskGetSeqId", task, ctypes.byref(number))
        ids.append(number.value)
    assert ids == [0, 1, 7, 8, 2, 3, 4, 5, 6]
    room, result = ctypes.c_uint32(1), (ctypes.c_uint64 * 2)()
    code = ascend.code("aclmdlRIGetStreams", models[0], result, ctypes.byref(room))
    assert (code, room.value) == (acl.INSUFFICIENT_INPUT_ARRAY, 2)
    code = ascend.code("aclmdlRIGetTasksByStream", stream, 0, ctypes.byref(room))
    assert code == acl.STREAM_MODEL


def test_a_kernels_arguments_can_be_found_and_patched(ascend, npu, stream):
    source, destination, moved = npu.words(1), npu.words(0), npu.words(0)
    with npu.capture(stream) as models:
        npu.add(stream, source, destination, 5)
    ((task,),) = tasks_of(ascend, models[0])
    found = parameters_of(ascend, task)
    kernel = found.content.kernel
    assert (found.type, kernel.is_host_arguments, kernel.arguments_bytes) == (KERNEL, 0, 24)
    assert (kernel.function, kernel.n_blocks) == (npu.add_function, 1)
    assert acl.peek(kernel.arguments, 3) == (source, destination, 5)
    patch = acl.u64(moved)
    to = kernel.arguments + 8
    kind = acl.HOST_TO_BUFFER_TO_DEVICE
    ascend.call("aclrtMemcpyAsync", to, 8, patch, 8, kind, stream)
    npu.run(models[0], stream)
    assert (acl.peek(destination), acl.peek(moved)) == ((0,), (6,))


def test_launch_attributes_are_read_back(ascend, npu, stream):
    attribute = (ctypes.c_uint32 * 5)(1, 1, 0, 0, 0)  # scheduling mode 1
    configuration = (ctypes.c_uint64 * 2)(ctypes.addressof(attribute), 1)
    block, value = npu.words(1), (ctypes.c_uint32 * 4)()
    launch = ("aclrtLaunchKernelV2", npu.note_function, 2, block, 8, configuration, stream)
    with npu.capture(stream) as models:
        ascend.call(*launch)
    ((task,),) = tasks_of(ascend, models[0])
    ascend.call("aclmdlRIKernelTaskGetAttribute", task, 1, value)
    assert list(value) == [1, 0, 0, 0]
    ascend.call("aclmdlRIKernelTaskGetAttribute", task, 2, value)
    assert list(value) == [0, 0, 0, 0]
    npu.run(models[0], stream)
    assert npu.order == ["note 1 of 2"]


@pytest.mark.parametrize("of_the_host", [True, False])
def test_changed_parameters_count_from_the_update_on(ascend, npu, stream, of_the_host):
    model, task = one_kernel(npu, stream, 1)
    changed = parameters_of(ascend, task)
    kernel, content = changed.content.kernel, ctypes.create_string_buffer(acl.u64(2), 8)
    kernel.n_blocks = 3
    kernel.is_host_arguments = int(of_the_host)
    kernel.arguments = ctypes.addressof(content) if of_the_host else npu.words(2)
    assert set_code(ascend, task, changed) == 0
    content.raw = acl.u64(4)  # the runtime has its own copy
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.MODEL_EXECUTE
    ascend.call("aclmdlRIUpdate", model)
    npu.run(model, stream)
    ascend.call("aclmdlRIUpdate", model)  # no update was requested
    npu.run(model, stream)
    assert npu.order == ["note 2 of 3", "note 2 of 3"]
    assert ascend.argument_bytes == (8 if of_the_host else 0)
    ascend.call("aclmdlRIDestroy", model)
    assert ascend.argument_bytes == 0


def test_parameters_that_are_set_as_they_were_keep_their_block(ascend, npu, stream):
    model, task = one_kernel(npu, stream, 1)
    assert set_code(ascend, task, parameters_of(ascend, task)) == 0
    ascend.call("aclmdlRIUpdate", model)
    npu.run(model, stream)
    assert npu.order == ["note 1 of 1"]
    assert ascend.argument_bytes == 8


def test_values_are_changed(ascend, npu, stream):
    cell, other = npu.words(0), npu.words(0)
    with npu.capture(stream) as models:
        ascend.call("aclrtValueWrite", cell, 7, 0, stream)
        ascend.call("aclrtValueWait", cell, 7, 1, stream)
    npu.run(models[0], stream)
    assert (acl.peek(cell), acl.peek(other)) == ((7,), (0,))
    ((write, wait),) = tasks_of(ascend, models[0])
    for task, flag in ((write, 0), (wait, 1)):
        changed = parameters_of(ascend, task)
        value = changed.content.value
        assert (value.address, value.value, value.flag) == (cell, 7, flag)
        value.address, value.value = other, 8
        assert set_code(ascend, task, changed) == 0
    ascend.call("aclmdlRIUpdate", models[0])
    npu.upload(cell, acl.u64(0))
    npu.run(models[0], stream)
    assert (acl.peek(cell), acl.peek(other)) == ((0,), (8,))
    attribute = ("aclmdlRIKernelTaskGetAttribute", write, 1, (ctypes.c_uint32 * 4)())
    assert ascend.code(*attribute) == acl.PARAM_INVALID


def test_disabled_tasks_do_not_run(ascend, npu, stream):
    with npu.capture(stream) as models:
        npu.note(stream, 1)
        npu.note(stream, 2)
    ((first, _),) = tasks_of(ascend, models[0])
    npu.run(models[0], stream)
    assert npu.order == ["note 1 of 1", "note 2 of 1"]
    ascend.call("aclmdlRITaskDisable", first)
    assert ascend.code("aclmdlRIExecuteAsync", models[0], stream) == acl.MODEL_EXECUTE
    ascend.start_trace()
    for _ in range(2):
        ascend.call("aclmdlRIUpdate", models[0])
        npu.run(models[0], stream)
    assert npu.order[2:] == ["note 2 of 1"] * 2
    updates = [entry for entry in ascend.trace if entry.startswith("aclmdlRIUpdate")]
    assert updates == ["aclmdlRIUpdate tasks=1", "aclmdlRIUpdate tasks=0"]
    assert set_code(ascend, first, parameters_of(ascend, first)) == 0
    ascend.call("aclmdlRIUpdate", models[0])
    npu.run(models[0], stream)
    assert npu.order[4:] == ["note 2 of 1"]  # nothing enables it


def test_waits_that_are_disabled_let_pass(ascend, npu, stream):
    event = npu.external_event()
    cell = npu.words(0)
    with npu.capture(stream) as models:
        ascend.call("aclrtValueWait", cell, 1, 0, stream)
        npu.wait(stream, event)
        npu.note(stream, 1)
    ((value, external, _),) = tasks_of(ascend, models[0])
    for task in (value, external):
        ascend.call("aclmdlRITaskDisable", task)
    ascend.call("aclmdlRIUpdate", models[0])
    npu.run(models[0], stream)
    assert npu.order == ["note 1 of 1"]


def test_without_software_sq_tasks_are_not_read_or_changed(ascend, npu, stream):
    model, task = one_kernel(npu, stream, 1)
    known = parameters_of(ascend, task)
    ascend.set_software_sq(False)
    calls = [
        ("aclmdlRITaskGetParams", task, ctypes.byref(known)),
        ("aclmdlRITaskSetParams", task, ctypes.byref(known)),
        ("aclmdlRITaskDisable", task),
        ("aclmdlRIKernelTaskGetAttribute", task, 1, (ctypes.c_uint32 * 4)()),
        ("aclmdlRIUpdate", model),
    ]
    assert [ascend.code(*call) for call in calls] == [acl.FEATURE_NOT_SUPPORT] * len(calls)
    assert type_of(ascend, task) == KERNEL


def test_tasks_of_built_models_are_not_read_or_changed(ascend, npu):
    model, stream = ascend.make("aclmdlRIBuildBegin", 0), npu.stream(acl.PERSISTENT)
    ascend.call("aclmdlRIBindStream", model, stream, 0)
    npu.note(stream, 1)
    ((task,),) = tasks_of(ascend, model)
    assert type_of(ascend, task) == KERNEL
    known = Parameters()
    read = ("aclmdlRITaskGetParams", task, ctypes.byref(known))
    assert ascend.code(*read) == acl.FEATURE_NOT_SUPPORT
    assert set_code(ascend, task, known) == acl.FEATURE_NOT_SUPPORT
    assert ascend.code("aclmdlRIUpdate", model) == acl.FEATURE_NOT_SUPPORT


def test_running_or_capturing_models_are_not_changed(ascend, npu, stream):
    model, task = one_kernel(npu, stream, 1)
    known = parameters_of(ascend, task)
    npu.execute(model, stream)
    assert set_code(ascend, task, known) == acl.MODEL_UPDATE_FAILED
    assert ascend.code("aclmdlRITaskDisable", task) == acl.MODEL_UPDATE_FAILED
    assert ascend.code("aclmdlRIUpdate", model) == acl.MODEL_RUNNING
    npu.synchronize(stream)
    assert set_code(ascend, task, known) == 0
    with npu.capture(stream):
        npu.note(stream, 2)
        ((task,),) = tasks_of(ascend, npu.info(stream)[1])
        assert set_code(ascend, task, known) == acl.MODEL_UPDATE_FAILED
        assert ascend.code("aclmdlRIUpdate", npu.info(stream)[1]) == acl.MODEL_CAPTURED


def mixed_tasks(ascend, npu, stream):
    """A model, and its tasks by kind: a fill, a kernel, one of a group, and others."""
    device, cell, group = npu.malloc(), npu.words(0), ctypes.c_uint64()
    event = npu.external_event()
    with npu.capture(stream) as models:
        ascend.call("aclrtMemsetAsync", device, 8, 0, 8, stream)
        npu.note(stream, 1)
        ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
        npu.note(stream, 2)
        ascend.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
        ascend.call("aclrtValueWrite", cell, 7, 0, stream)
        npu.record(event, stream)
    names = ("fill", "kernel", "grouped", "write", "record")
    return models[0], dict(zip(names, tasks_of(ascend, models[0])[0], strict=True)), group.value


def spoil_function(known):
    known.content.kernel.function += 1


def spoil_bytes(known):
    known.content.kernel.arguments_bytes = 4


def spoil_address(known):
    known.content.value.address += 4


# The task, the task whose parameters it is given, how these are corrupted, and the code.
UNFIT = [
    ("fill", "kernel", None, acl.PARAM_INVALID),  # of another type of task
    ("write", "kernel", None, acl.PARAM_INVALID),
    ("kernel", "write", None, acl.PARAM_INVALID),
    ("record", "kernel", None, acl.PARAM_INVALID),
    ("record", "record", None, acl.PARAM_INVALID),  # none that can be changed
    ("grouped", "kernel", None, acl.PARAM_INVALID),
    ("kernel", "kernel", spoil_function, acl.PARAM_INVALID),
    ("kernel", "kernel", spoil_bytes, acl.PARAM_INVALID),
    ("write", "write", spoil_address, 107008),
]


def assert_faulty(ascend, model, task, known, stream):
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.MODEL_EXECUTE
    assert set_code(ascend, task, known) == acl.MODEL_UPDATE_FAILED
    assert ascend.code("aclmdlRITaskDisable", task) == acl.MODEL_UPDATE_FAILED
    assert ascend.code("aclmdlRIUpdate", model) == acl.MODEL_UPDATE_FAILED
    ascend.call("aclmdlRIDestroy", model)


@pytest.mark.parametrize(("name", "of", "spoil", "code"), UNFIT)
def test_a_change_that_is_refused_leaves_a_model_that_does_nothing(
    name, of, spoil, code, ascend, npu, stream
):
    model, tasks, group = mixed_tasks(ascend, npu, stream)
    right = parameters_of(ascend, tasks["kernel"])
    assert parameters_of(ascend, tasks["grouped"]).task_group == group
    known = parameters_of(ascend, tasks[of])
    if spoil is not None:
        spoil(known)
    assert set_code(ascend, tasks[name], known) == code
    assert_faulty(ascend, model, tasks["kernel"], right, stream)


def test_tasks_that_tell_nothing_are_neither_read_nor_disabled(ascend, npu, stream):
    model, tasks, _ = mixed_tasks(ascend, npu, stream)
    right, space = parameters_of(ascend, tasks["kernel"]), ctypes.byref(Parameters())
    assert ascend.code("aclmdlRITaskGetParams", tasks["fill"], space) == acl.PARAM_INVALID
    npu.run(model, stream)
    assert ascend.code("aclmdlRITaskDisable", tasks["fill"]) == acl.PARAM_INVALID
    assert_faulty(ascend, model, tasks["kernel"], right, stream)


def test_an_unknown_task_is_refused(ascend, npu, stream):
    model, task = one_kernel(npu, stream, 1)
    assert set_code(ascend, 12345, parameters_of(ascend, task)) == acl.PARAM_INVALID
    npu.run(model, stream)


def test_parameters_that_are_read_are_those_that_were_set_last(ascend, npu, stream):
    """Except attributes: the configuration is reported as absent, whatever it is."""
    model, task = one_kernel(npu, stream, 1)
    attribute = (ctypes.c_uint32 * 5)(1, 1, 0, 0, 0)  # scheduling mode 1
    configuration = (ctypes.c_uint64 * 2)(ctypes.addressof(attribute), 1)
    changed = parameters_of(ascend, task)
    assert changed.content.kernel.configuration == 0
    changed.content.kernel.n_blocks = 3
    changed.content.kernel.configuration = ctypes.addressof(configuration)
    assert set_code(ascend, task, changed) == 0
    found = parameters_of(ascend, task).content.kernel
    assert (found.n_blocks, found.configuration) == (3, 0)
    ascend.call("aclmdlRIUpdate", model)
    value = (ctypes.c_uint32 * 4)()
    ascend.call("aclmdlRIKernelTaskGetAttribute", task, 1, value)
    assert list(value) == [1, 0, 0, 0]


def test_parameters_of_records_name_their_event(ascend, npu, stream):
    event = npu.event()
    with npu.capture(stream) as models:
        npu.record(event, stream)
    ((task,),) = tasks_of(ascend, models[0])
    found = parameters_of(ascend, task)
    assert (found.type, acl.peek(ctypes.addressof(found.content))) == (RECORD, (event,))


def test_argument_blocks_are_used_again(ascend, npu, stream):
    """A later model's arguments may reuse a model's memory: stale pointers read them."""
    addresses = []
    for word in (1, 2):
        model, task = one_kernel(npu, stream, word)
        addresses.append(parameters_of(ascend, task).content.kernel.arguments)
        assert acl.peek(addresses[0]) == (word,)
        ascend.call("aclmdlRIDestroy", model)
    assert addresses[0] == addresses[1]


def test_a_copy_onto_itself_is_no_task(ascend, npu, stream):
    address = npu.words(1)
    with npu.capture(stream) as models:
        copy = ("aclrtMemcpyAsync", address, 8, address, 8, acl.DEVICE_TO_DEVICE, stream)
        ascend.call(*copy)
    assert tasks_of(ascend, models[0]) == [[]]
