"""Execution, names, descriptions and destruction of models on the simulated Ascend runtime."""

from __future__ import annotations

import concurrent.futures
import ctypes
import json

import ascend_client as acl
import ascend_simulator
import pytest


@pytest.fixture
def stream(npu):
    return npu.stream()


def noting(npu, stream, *words):
    """A model of kernels that note these words."""
    with npu.capture(stream) as models:
        for word in words:
            npu.note(stream, word)
    return models[0]


def test_executions_are_ordered_with_their_stream(npu, stream):
    model, other = noting(npu, stream, 1), npu.stream()
    npu.note(other, 2)
    npu.execute(model, other)
    npu.note(other, 3)
    npu.synchronize(other)
    assert npu.order == ["note 2 of 1", "note 1 of 1", "note 3 of 1"]


def test_a_model_does_not_run_before_its_turn(ascend, npu, stream):
    model, event = noting(npu, stream, 1), npu.external_event()
    npu.wait(stream, event)
    npu.execute(model, stream)
    timed = ("aclrtSynchronizeDeviceWithTimeout", 0)
    assert ascend.code(*timed) == acl.STREAM_SYNC_TIMEOUT
    assert npu.order == []
    npu.record(event, npu.stream())
    ascend.call("aclrtSynchronizeDevice")
    assert npu.order == ["note 1 of 1"]


def test_executions_that_nothing_orders_are_a_fault(ascend, npu, stream):
    model, other = noting(npu, stream, 1), npu.stream()
    npu.execute(model, stream)
    npu.execute(model, other)
    assert ascend.code("aclrtSynchronizeStream", other) == acl.MODEL_EXECUTE


def test_executions_that_an_event_orders_are_none(npu, stream):
    model, other, event = noting(npu, stream, 1), npu.stream(), npu.event()
    npu.execute(model, stream)
    npu.record(event, stream)
    npu.wait(other, event)
    npu.execute(model, other)
    npu.execute(model, other)
    npu.synchronize(other)
    assert npu.order == ["note 1 of 1"] * 3


def test_a_model_goes_with_its_tasks_streams_and_arguments(ascend, npu, stream):
    model = noting(npu, stream, 1, 2)
    kinds = ("model", "task", "model stream", "argument block")
    assert [ascend.live(kind) for kind in kinds] == [1, 2, 1, 2]
    npu.execute(model, stream)
    ascend.call("aclmdlRIDestroy", model)  # it waits for the model
    assert npu.order == ["note 1 of 1", "note 2 of 1"]
    assert [ascend.live(kind) for kind in kinds] == [0] * 4
    ascend.call("aclmdlRIDestroy", model)  # unknown: no error
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.PARAM_INVALID


def test_a_model_that_is_captured_is_neither_destroyed_nor_run(ascend, npu, stream):
    other = npu.stream()
    with npu.capture(stream):
        _, model = npu.info(stream)
        assert ascend.code("aclmdlRIDestroy", model) == acl.MODEL_CAPTURED
        assert ascend.code("aclmdlRIExecuteAsync", model, other) == acl.MODEL_CAPTURED


def test_destroying_a_model_that_does_not_end_is_refused(ascend, npu, stream):
    ascend.set_destroy_polls(3)
    event, outside = npu.external_event(), npu.stream()
    with npu.capture(stream) as models:
        npu.wait(stream, event)
        npu.note(stream, 1)
    npu.execute(models[0], stream)
    assert ascend.code("aclmdlRIDestroy", models[0]) == acl.MODEL_RUNNING
    assert ascend.live("model") == 1
    npu.record(event, outside)
    ascend.call("aclmdlRIDestroy", models[0])
    assert npu.order == ["note 1 of 1"]
    assert ascend.live("model") == 0


def test_destroying_a_model_polls_for_ten_seconds(ascend, npu, stream):
    ascend.set_waits_take_time(False)
    event = npu.external_event()
    with npu.capture(stream) as models:
        npu.wait(stream, event)
    npu.execute(models[0], stream)
    assert ascend.code("aclmdlRIDestroy", models[0]) == acl.MODEL_RUNNING
    assert ascend.waited_ms == 10_000
    npu.record(event, npu.stream())
    ascend.call("aclmdlRIDestroy", models[0])
    assert ascend.waited_ms == 10_000


def test_another_thread_can_end_what_a_destruction_polls_for(ascend, npu, stream):
    event, outside = npu.external_event(), npu.stream()
    with npu.capture(stream) as models:
        npu.wait(stream, event)
    npu.execute(models[0], stream)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        context = ascend.make("aclrtGetCurrentContext")
        thread.submit(ascend.call, "aclrtSetCurrentContext", context).result()
        destroyed = thread.submit(ascend.code, "aclmdlRIDestroy", models[0])
        while not ascend.waited_ms and not destroyed.done():
            pass
        npu.record(event, outside)
        assert destroyed.result() == 0
    assert ascend.live("model") == 0


def test_execute_gives_up_after_its_time(ascend, npu, stream):
    event = npu.external_event()
    with npu.capture(stream) as models:
        npu.wait(stream, event)
    ascend.set_waits_take_time(False)
    assert ascend.code("aclmdlRIExecute", models[0], 5) == acl.STREAM_SYNC_TIMEOUT
    assert ascend.waited_ms == 5
    n_streams = ascend.streams_in_use()  # one is the model's own
    npu.record(event, npu.stream())
    ascend.call("aclmdlRIDestroy", models[0])
    assert ascend.live("model") == 0
    assert ascend.streams_in_use() == n_streams


def test_callbacks_are_called_when_a_model_goes(ascend, npu, stream):
    model, called, address = noting(npu, stream, 1), [], npu.malloc()

    def free():
        called.append(ascend.code("aclrtFree", address))

    function, other = ascend.host_function(free), ascend.host_function(called.clear)
    ascend.call("aclmdlRIDestroyRegisterCallback", model, function, 0)
    ascend.call("aclmdlRIDestroyRegisterCallback", model, other, 0)
    ascend.call("aclmdlRIDestroyUnregisterCallback", model, other)
    unregister = ("aclmdlRIDestroyUnregisterCallback", model, other)
    assert ascend.code(*unregister) == acl.PARAM_INVALID
    npu.run(model, stream)
    assert called == []
    ascend.call("aclmdlRIDestroy", model)
    assert called == [0]


def test_names_and_numbers(ascend, npu, stream):
    model, second = noting(npu, stream, 1), noting(npu, stream, 1)
    name, number = ctypes.create_string_buffer(600), ctypes.c_uint32()
    ascend.call("aclmdlRISetName", model, b"m" * 512)
    ascend.call("aclmdlRIGetName", model, 600, name)
    assert name.value == b"m" * 512
    assert ascend.code("aclmdlRIGetName", model, 512, name) == acl.PARAM_INVALID
    assert ascend.code("aclmdlRISetName", model, b"m" * 513) == acl.PARAM_INVALID
    ascend.call("aclmdlRIGetId", model, ctypes.byref(number))
    first = number.value
    ascend.call("aclmdlRIGetId", second, ctypes.byref(number))
    assert number.value != first


def test_models_that_were_captured_are_not_aborted(ascend, npu, stream):
    code = ascend.code("aclmdlRIAbort", noting(npu, stream, 1))
    assert code == acl.FEATURE_NOT_SUPPORT


@pytest.mark.parametrize("verbose", [False, True])
def test_descriptions_hold_argument_words_where_asked(ascend, npu, stream, tmp_path, verbose):
    path, block, device = tmp_path / "model.json", npu.words(7, 8), npu.malloc()
    with npu.capture(stream) as models:
        npu.launch(stream, npu.note_function, block, 16)
        ascend.call("aclrtMemsetAsync", device, 8, 0, 8, stream)
    npu.upload(block, acl.u64(0x123456789ABCDEF0))
    ascend.call("aclmdlRIDebugJsonPrint", models[0], str(path).encode(), int(verbose))
    kernel, fill = (event["args"] for event in json.loads(path.read_text()))
    assert (kernel["Task Type"], kernel["Numblocks"], fill["Task Type"]) == ("KERNEL", 1, "MEMSET")
    assert kernel["Model Id"] == fill["Model Id"]
    assert [kernel["Task Id"], fill["Task Id"]] == [0, 1]
    if verbose:
        assert kernel["Kernel Args"] == "0x123456789abcdef0,0x0000000000000008"
        assert kernel["Kernel Args Size"] == 16
    else:
        assert "Kernel Args" not in kernel


def test_descriptions_are_printed(ascend, npu, stream, capfd):
    ascend.call("aclmdlRIDebugPrint", noting(npu, stream, 1))
    assert json.loads(capfd.readouterr().err)[0]["name"] == "note"
    missing = ("aclmdlRIDebugJsonPrint", noting(npu, stream, 1), b"/no/such/folder/file", 0)
    assert ascend.code(*missing) == 107009
    full = ("aclmdlRIDebugJsonPrint", noting(npu, stream, 1), b"/dev/full", 0)
    assert ascend.code(*full) == 107010


def test_a_failure_leaves_the_next_execution_working(ascend, npu, stream):
    model = noting(npu, stream, 1)
    ascend.fail("aclmdlRIExecuteAsync", acl.INTERNAL_ERROR)
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.INTERNAL_ERROR
    npu.run(model, stream)
    assert npu.order == ["note 1 of 1"]


def test_after_a_fault_nothing_is_executed(ascend, npu, stream):
    model = noting(npu, stream, 1)
    ascend.fault()
    assert ascend.code("aclmdlRIExecuteAsync", model, stream) == acl.AICORE_EXCEPTION
    assert npu.order == []


def test_callbacks_get_their_data(ascend, npu, stream):
    model, seen = noting(npu, stream, 1), []
    function = ascend_simulator.HOST_FUNCTION(seen.append)
    address = ctypes.cast(function, ctypes.c_void_p).value
    ascend.call("aclmdlRIDestroyRegisterCallback", model, address, 77)
    ascend.call("aclmdlRIDestroy", model)
    assert seen == [77]


def test_an_aborted_model_does_nothing_more(ascend, npu):
    model, bound = ascend.make("aclmdlRIBuildBegin", 0), npu.stream(acl.PERSISTENT)
    ascend.call("aclmdlRIBindStream", model, bound, 0)
    npu.note(bound, 1)
    ascend.call("aclmdlRIEndTask", model, bound)
    ascend.call("aclmdlRIBuildEnd", model, 0)
    npu.execute(model, 0)
    ascend.call("aclmdlRIAbort", model)
    npu.synchronize(0)
    assert npu.order == []
    npu.run(model, 0)
    assert npu.order == ["note 1 of 1"]


def test_descriptions_name_streams_and_host_functions(ascend, npu, stream, tmp_path):
    path, number, count = tmp_path / "model.json", ctypes.c_int32(), ctypes.c_uint32(1)
    with npu.capture(stream) as models:
        ascend.call("aclrtLaunchHostFunc", stream, ascend.host_function(lambda: None), 0)
    ascend.call("aclmdlRIDebugJsonPrint", models[0], str(path).encode(), 0)
    found = (ctypes.c_uint64 * 1)()
    ascend.call("aclmdlRIGetStreams", models[0], found, ctypes.byref(count))
    ascend.call("aclrtStreamGetId", found[0], ctypes.byref(number))
    (event,) = json.loads(path.read_text())
    assert (event["args"]["Task Type"], event["args"]["Stream Id"]) == ("HOST_FUNC", number.value)
