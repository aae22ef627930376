"""Offline models on the simulated Ascend runtime: loaded from files, executed with datasets."""

from __future__ import annotations

import ctypes
import struct

import ascend_client as acl
import ascend_offline as om
import pytest

INVALID_PARAM, INVALID_FILE, INVALID_MODEL_ID = 100000, 100003, 100011
PARSE_MODEL, SIZE_INVALID, INPUT_NOT_MATCH, OUTPUT_NOT_MATCH = 100013, 100015, 100017, 100018
PRIORITY, LOAD_TYPE, PATH, WEIGHT_ADDRESS, WEIGHT_BYTES, WORK_ADDRESS, WORK_BYTES = (
    0, 1, 2, 5, 6, 7, 8,
)  # fmt: skip


SPACE = (ctypes.c_uint64 * 256)()


def add(block, _n_blocks):
    """destination = first + second"""
    first, second, destination = struct.unpack("<3Q", block)
    total = acl.peek(first)[0] + acl.peek(second)[0]
    ctypes.c_uint64.from_address(destination).value = total % 2**64


def scale(block, _n_blocks):
    """destination = source * factor"""
    source, factor, destination = struct.unpack("<3Q", block)
    ctypes.c_uint64.from_address(destination).value = acl.peek(source)[0] * factor


@pytest.fixture
def content(ascend):
    """y = (x + weight) * 3, through the second word of the feature map."""
    middle = om.Operand(om.WORK, offset_bytes=8)
    return om.pack_model(
        ascend,
        inputs=[om.Tensor("x", (1,), 8, data_type=10)],
        outputs=[om.Tensor("y", (1, 1), 8, data_type=10)],
        kernels=[add, scale],
        tasks=[
            om.Task(0, (om.Operand(om.INPUT), om.Operand(om.WEIGHT), middle)),
            om.Task(1, (middle, om.Operand(om.NONE, offset_bytes=3), om.Operand(om.OUTPUT))),
        ],
        work_bytes=16,
        weights=acl.u64(5),
    )


@pytest.fixture
def path(content, tmp_path):
    file = tmp_path / "model.om"
    file.write_bytes(content)
    return str(file).encode()


class Dataset:
    """A dataset of buffers at these addresses, eight bytes each."""

    def __init__(self, ascend, *addresses, n_bytes=8):
        self.ascend = ascend
        self.buffers = [made(ascend, "aclCreateDataBuffer", at, n_bytes) for at in addresses]
        self.handle = made(ascend, "aclmdlCreateDataset")
        for buffer in self.buffers:
            ascend.call("aclmdlAddDatasetBuffer", self.handle, buffer)

    def move(self, address):
        self.ascend.call("aclUpdateDataBuffer", self.buffers[0], address, 8)


def made(ascend, function, *arguments):
    """The handle or number that a function returns in place of an error code."""
    called = getattr(ascend.library, function)
    called.restype = ctypes.c_size_t
    return called(*(ctypes.c_uint64(value) for value in arguments))


def load(ascend, path):
    result = ctypes.c_uint32()
    ascend.call("aclmdlLoadFromFile", path, ctypes.byref(result))
    return result.value


def test_a_model_says_what_memory_it_needs(ascend, content, path):
    sizes = ctypes.c_size_t(), ctypes.c_size_t()
    for function, given in (
        ("aclmdlQuerySize", (path,)),
        ("aclmdlQuerySizeFromMem", (content, len(content))),
    ):
        ascend.call(function, *given, ctypes.byref(sizes[0]), ctypes.byref(sizes[1]))
        assert (sizes[0].value, sizes[1].value) == (16, 8)
    for given in ((0, SPACE), (SPACE, 0)):
        assert ascend.code("aclmdlQuerySize", path, *given) == acl.PARAM_INVALID
    assert ascend.code("aclmdlLoadFromFile", path, 0) == acl.PARAM_INVALID
    assert ascend.code("aclmdlQuerySize", 0, *sizes) == acl.PARAM_INVALID
    assert ascend.code("aclmdlQuerySizeFromMem", 0, 64, *sizes) == acl.PARAM_INVALID
    assert ascend.live("offline model") == 0
    query = ("aclmdlQuerySize", b"/no/such/file.om", sizes[0], sizes[1])
    assert ascend.code(*query) == INVALID_FILE


def test_files_that_are_no_models_are_refused(ascend, content):
    result = ctypes.c_uint32()

    def code(given):
        return ascend.code("aclmdlLoadFromMem", given, len(given), ctypes.byref(result))

    wrong_kernel = bytearray(content)
    wrong_kernel[56 + 2 * 152 + 2 * 64] = 2
    endless = content[:16] + acl.u64(2**62) + content[24:]  # bytes of weights
    before = ascend.live_bytes
    for given in (
        content[:40],
        content[:-1],
        content + b"x",
        b"x" + content[1:],
        bytes(wrong_kernel),
        endless,
    ):
        assert code(given) == PARSE_MODEL
    assert ascend.live_bytes == before
    assert ascend.live("offline model") == 0


def test_executions_take_the_addresses_of_their_datasets(ascend, npu, path):
    model, stream = load(ascend, path), npu.stream()
    first, second, result, other = npu.words(1), npu.words(2), npu.words(0), npu.words(0)
    inputs, outputs = Dataset(ascend, first), Dataset(ascend, result)
    execute = ("aclmdlExecuteAsync", model, inputs.handle, outputs.handle, stream)
    ascend.call(*execute)
    inputs.move(second)  # for the next one
    outputs.move(other)
    ascend.call(*execute)
    assert (acl.peek(result), acl.peek(other)) == ((0,), (0,))
    npu.synchronize(stream)
    assert (acl.peek(result), acl.peek(other)) == ((18,), (21,))
    npu.upload(second, acl.u64(3))
    ascend.call("aclmdlExecute", model, inputs.handle, outputs.handle)
    assert acl.peek(other) == (24,)


def test_memory_that_is_given_is_used_and_stays_the_callers(ascend, npu, path):
    result, model = npu.words(0), ctypes.c_uint32()
    work, weight, source = npu.words(0, 0), npu.words(0), npu.words(1)
    before = ascend.live_bytes
    given = ("aclmdlLoadFromFileWithMem", path, ctypes.byref(model))
    assert ascend.code(*given, work, 15, weight, 8) == SIZE_INVALID
    assert ascend.code(*given, work, 16, weight, 7) == SIZE_INVALID
    assert ascend.code(*given, work, 4096, 4096, 8) == acl.PARAM_INVALID
    assert (ascend.live("offline model"), ascend.argument_bytes) == (0, 0)
    ascend.call(*given, work, 16, weight, 8)
    assert acl.peek(weight) == (5,)
    npu.upload(weight, acl.u64(6))
    inputs, outputs = Dataset(ascend, source), Dataset(ascend, result)
    ascend.call("aclmdlExecute", model.value, inputs.handle, outputs.handle)
    assert acl.peek(result) == (21,)
    assert acl.peek(work, 2) == (0, 7)
    assert ascend.live_bytes == before
    ascend.call("aclmdlUnload", model.value)
    assert acl.peek(work, 2) == (0, 7)
    assert (ascend.live("offline model"), ascend.argument_bytes) == (0, 0)


def test_memory_of_the_models_own_goes_with_it(ascend, npu, path):
    before = ascend.live_bytes
    model = load(ascend, path)
    assert ascend.live_bytes == before + 24
    ascend.call("aclmdlUnload", model)
    assert ascend.live_bytes == before
    assert ascend.code("aclmdlUnload", model) == INVALID_MODEL_ID


@pytest.mark.parametrize("weights", [b"", acl.u64(5)])
def test_weights_are_not_loaded_while_a_capture_forbids_copies_that_wait(ascend, npu, weights):
    parts = dict.fromkeys(("inputs", "outputs", "kernels", "tasks"), ())
    model = om.pack_model(ascend, **parts, work_bytes=16, weights=weights)
    result = ctypes.c_uint32()
    load_model = ("aclmdlLoadFromMem", model, len(model), ctypes.byref(result))
    with npu.capture(npu.stream(), acl.GLOBAL):
        expected = acl.CAPTURE_MODE_NOT_SUPPORT if weights else 0
        assert ascend.code(*load_model) == expected
        assert ascend.live("offline model") == (0 if weights else 1)
    ascend.call(*load_model)


def test_a_model_is_loaded_by_a_configuration(ascend, npu, content, path):
    def configuration(**values):
        handle = made(ascend, "aclmdlCreateConfigHandle")
        for attribute, value in values.items():
            number = ctypes.c_uint64(value)
            set_value = ("aclmdlSetConfigOpt", handle, int(attribute[1:]), ctypes.byref(number), 8)
            ascend.call(*set_value)
        return handle

    name, model = ctypes.create_string_buffer(path), ctypes.c_uint32()
    work, weight = npu.words(0, 0), npu.words(0)
    given = {f"_{PATH}": ctypes.addressof(name), f"_{LOAD_TYPE}": 2}
    memory = {f"_{WORK_ADDRESS}": work, f"_{WORK_BYTES}": 16}
    memory |= {f"_{WEIGHT_ADDRESS}": weight, f"_{WEIGHT_BYTES}": 8}
    handle = configuration(**given, **memory)
    before = ascend.live_bytes
    ascend.call("aclmdlLoadWithConfig", handle, ctypes.byref(model))
    assert (acl.peek(weight), ascend.live_bytes) == ((5,), before)
    ascend.call("aclmdlDestroyConfigHandle", handle)
    load_with = ("aclmdlLoadWithConfig", configuration(), ctypes.byref(model))
    assert ascend.code(*load_with) == INVALID_PARAM  # no load type
    number = ctypes.c_uint64(1)
    wrong = ("aclmdlSetConfigOpt", configuration(), PRIORITY, ctypes.byref(number), 8)
    assert ascend.code(*wrong) == INVALID_PARAM
    nothing = ("aclmdlSetConfigOpt", configuration(), PRIORITY, 0, 4)
    assert ascend.code(*nothing) == acl.PARAM_INVALID


def test_descriptions_without_a_model_or_a_result_are_refused(ascend, path):
    model = load(ascend, path)
    empty, full = (made(ascend, "aclmdlCreateDesc") for _ in range(2))
    ascend.call("aclmdlGetDesc", full, model)
    assert ascend.code("aclmdlGetInputDims", empty, 0, SPACE) == INVALID_PARAM
    assert ascend.code("aclmdlGetInputDims", full, 1, SPACE) == INVALID_PARAM
    assert ascend.code("aclmdlGetInputDims", full, 0, 0) == acl.PARAM_INVALID
    by_name = "aclmdlGetInputIndexByName"
    assert ascend.code(by_name, empty, b"x", SPACE) == INVALID_PARAM
    assert ascend.code(by_name, full, b"unknown", SPACE) == INVALID_PARAM
    for given in ((0, SPACE), (b"x", 0)):
        assert ascend.code(by_name, full, *given) == acl.PARAM_INVALID


def test_a_model_describes_its_tensors(ascend, path):
    def ask(function, index):
        return made(ascend, function, description, index)

    description = made(ascend, "aclmdlCreateDesc")
    ascend.call("aclmdlGetDesc", description, load(ascend, path))
    assert made(ascend, "aclmdlGetNumInputs", description) == 1
    assert made(ascend, "aclmdlGetNumOutputs", description) == 1
    assert ask("aclmdlGetInputSizeByIndex", 0) == 8
    assert ask("aclmdlGetOutputSizeByIndex", 1) == 0  # no such output
    names = [ask(f"aclmdlGet{kind}NameByIndex", 0) for kind in ("Input", "Output")]
    assert [ctypes.string_at(name) for name in names] == [b"x", b"y"]
    assert ask("aclmdlGetInputDataType", 0) == 10
    assert ask("aclmdlGetOutputFormat", 0) == om.FORMAT_ND
    dimensions = (ctypes.c_int64 * (16 + 1 + 128))()
    ascend.call("aclmdlGetOutputDims", description, 0, dimensions)
    assert list(dimensions[16:20]) == [2, 1, 1, 0]
    index = ctypes.c_size_t(9)
    ascend.call("aclmdlGetOutputIndexByName", description, b"y", ctypes.byref(index))
    assert index.value == 0
    find = ("aclmdlGetInputIndexByName", description, b"y", ctypes.byref(index))
    assert ascend.code(*find) == INVALID_PARAM
    ascend.call("aclmdlDestroyDesc", description)
    assert made(ascend, "aclmdlGetNumInputs", description) == 0


@pytest.mark.parametrize(
    ("n_inputs", "n_bytes", "code"),
    [(0, 8, INPUT_NOT_MATCH), (2, 8, INPUT_NOT_MATCH), (1, 7, INPUT_NOT_MATCH)],
)
def test_datasets_that_do_not_fit_are_refused(ascend, npu, path, n_inputs, n_bytes, code):
    model, source, result = load(ascend, path), npu.words(1), npu.words(0)
    inputs = Dataset(ascend, *[source] * n_inputs, n_bytes=n_bytes)
    outputs = Dataset(ascend, result)
    execute = ("aclmdlExecute", model)
    assert ascend.code(*execute, inputs.handle, outputs.handle) == code
    assert acl.peek(result) == (0,)


def test_calls_that_do_not_fit_are_refused(ascend, npu, path):
    model, stream, source, result = load(ascend, path), npu.stream(), npu.words(1), npu.words(0)
    inputs, outputs = Dataset(ascend, source), Dataset(ascend, result)
    empty, hosts = Dataset(ascend), Dataset(ascend, npu.pinned(bytes(8)))

    def code(model_id=model, given=inputs, taken=outputs):
        call = ("aclmdlExecuteAsync", model_id, given.handle, taken.handle, stream)
        return ascend.code(*call)

    assert code(model_id=99) == INVALID_MODEL_ID
    assert code(taken=empty) == OUTPUT_NOT_MATCH
    assert code(given=hosts) == acl.PARAM_INVALID
    with npu.capture(stream):
        assert code() == acl.STREAM_CAPTURED
    bound, model_stream = ascend.make("aclmdlRIBuildBegin", 0), npu.stream(acl.PERSISTENT)
    ascend.call("aclmdlRIBindStream", bound, model_stream, 0)
    execute = ("aclmdlExecuteAsync", model, inputs.handle, outputs.handle, model_stream)
    assert ascend.code(*execute) == acl.STREAM_MODEL
    ascend.call("aclDestroyDataBuffer", inputs.buffers[0])
    assert code() == INVALID_PARAM
    assert ascend.code("aclmdlDestroyDataset", 12345) == INVALID_PARAM
    assert ascend.code("aclUpdateDataBuffer", 12345, source, 8) == INVALID_PARAM
    executed = (model, inputs.handle, outputs.handle, stream, 12345)
    for function in ("aclmdlExecuteV2", "aclmdlExecuteAsyncV2"):
        assert ascend.code(function, *executed) == INVALID_PARAM
    npu.synchronize(stream)
    assert acl.peek(result) == (0,)


def test_datasets_and_buffers_are_read_back(ascend, npu):
    address = npu.words(1)
    dataset = Dataset(ascend, address, address)
    assert made(ascend, "aclmdlGetDatasetNumBuffers", dataset.handle) == 2
    assert made(ascend, "aclmdlGetDatasetBuffer", dataset.handle, 1) == dataset.buffers[1]
    assert made(ascend, "aclmdlGetDatasetBuffer", dataset.handle, 2) == 0
    assert made(ascend, "aclGetDataBufferAddr", dataset.buffers[0]) == address
    assert made(ascend, "aclGetDataBufferSizeV2", dataset.buffers[0]) == 8
    ascend.call("aclmdlDestroyDataset", dataset.handle)
    assert (ascend.live("dataset"), ascend.live("data buffer")) == (0, 2)
    for buffer in dataset.buffers:
        ascend.call("aclDestroyDataBuffer", buffer)
    assert ascend.live("data buffer") == 0


@pytest.mark.parametrize("ordered", [False, True])
def test_executions_that_nothing_orders_are_a_fault(ascend, npu, path, ordered):
    model, first, second = load(ascend, path), npu.stream(), npu.stream()
    source, result, event = npu.words(1), npu.words(0), npu.event()
    inputs, outputs = Dataset(ascend, source), Dataset(ascend, result)
    execute = ("aclmdlExecuteAsync", model, inputs.handle, outputs.handle)
    ascend.call(*execute, first)
    if ordered:
        npu.record(event, first)
        npu.wait(second, event)
    ascend.call(*execute, second)
    expected = 0 if ordered else acl.MODEL_EXECUTE
    assert ascend.code("aclrtSynchronizeStream", second) == expected
    assert acl.peek(result) == ((18,) if ordered else (0,))


def test_a_model_that_runs_is_not_unloaded(ascend, npu, path):
    model, stream, source, result = load(ascend, path), npu.stream(), npu.words(1), npu.words(0)
    inputs, outputs = Dataset(ascend, source), Dataset(ascend, result)
    ascend.call("aclmdlExecuteAsync", model, inputs.handle, outputs.handle, stream)
    assert ascend.code("aclmdlUnload", model) == acl.MODEL_RUNNING
    npu.synchronize(stream)
    ascend.call("aclmdlUnload", model)


def test_of_an_execute_configuration_only_times_count(ascend, npu, path):
    model, stream, source, result = load(ascend, path), npu.stream(), npu.words(1), npu.words(0)
    inputs, outputs = Dataset(ascend, source), Dataset(ascend, result)
    ignored, handle = npu.words(0, 0), made(ascend, "aclmdlCreateExecConfigHandle")
    work, time_ms = ctypes.c_uint64(ignored), ctypes.c_int32(1)
    ascend.call("aclmdlSetExecConfigOpt", handle, 2, ctypes.byref(work), 8)
    ascend.call("aclmdlSetExecConfigOpt", handle, 0, ctypes.byref(time_ms), 4)
    for attribute, n_bytes in ((0, 8), (1, 8), (2, 4)):
        given = ("aclmdlSetExecConfigOpt", handle, attribute, ctypes.byref(work), n_bytes)
        assert ascend.code(*given) == INVALID_PARAM
    assert ascend.code("aclmdlSetExecConfigOpt", handle, 0, 0, 4) == acl.PARAM_INVALID
    given = (model, inputs.handle, outputs.handle, stream, handle)
    ascend.call("aclmdlExecuteAsyncV2", *given)
    npu.synchronize(stream)
    assert (acl.peek(result), acl.peek(ignored, 2)) == ((18,), (0, 0))
    never = npu.external_event()
    npu.wait(stream, never)
    assert ascend.code("aclmdlExecuteV2", *given) == acl.STREAM_SYNC_TIMEOUT
    npu.record(never, npu.stream())
    npu.synchronize(stream)
    ascend.call("aclmdlDestroyExecConfigHandle", handle)
    assert ascend.live("configuration") == 0


def test_after_a_fault_no_model_is_executed(ascend, npu, path):
    model, result = load(ascend, path), npu.words(0)
    inputs, outputs = Dataset(ascend, npu.words(1)), Dataset(ascend, result)
    ascend.fault()
    execute = ("aclmdlExecuteAsync", model, inputs.handle, outputs.handle, npu.stream())
    assert ascend.code(*execute) == acl.AICORE_EXCEPTION
