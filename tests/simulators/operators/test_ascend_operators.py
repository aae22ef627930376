"""The simulated operator library through its C ABI: phases, argument blocks, refusals."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import npu_device
import pytest
from operator_client import (
    BOOL,
    FAILURE,
    FLOAT,
    INNER_NULLPTR,
    INT32,
    INT64,
    PARAM_INVALID,
    PARAM_NULLPTR,
    STRING,
    Operators,
)

from model_tasks import parameters_of, tasks_of


@pytest.fixture
def stream(npu):
    return npu.stream()


class Addition:
    """A captured addition of two vectors of two, and its argument block."""

    def __init__(self, operators: Operators, stream: int) -> None:
        self.operators, self.npu, self.stream = operators, operators.npu, stream
        self.left, self.right = operators.upload([1, 2]), operators.upload([10, 20])
        self.out = operators.upload([0, 0])
        tensors = [operators.tensor(data, 2) for data in (self.left, self.right, self.out)]
        with self.npu.capture(stream) as models:
            operators.call("Add", stream, *tensors[:2], operators.scalar(1), tensors[2])
        self.model = models[0]
        ((task,),) = tasks_of(self.npu.ascend, self.model)
        self.kernel = parameters_of(self.npu.ascend, task).content.kernel

    @property
    def block(self) -> list[int]:
        """The words of the argument block."""
        return list(acl.peek(self.kernel.arguments, self.kernel.arguments_bytes // 8))

    def result(self) -> list[float]:
        """The result of an execution."""
        self.npu.run(self.model, self.stream)
        return self.operators.read(self.out, 2)


def test_operands_are_read_when_the_kernel_runs(operators, npu, stream):
    source, out = operators.upload([1, 2, 3]), operators.upload([0, 0, 0])
    operators.call("Exp", stream, operators.tensor(source, 3), operators.tensor(out, 3))
    assert operators.read(out, 3) == [0, 0, 0]
    ctypes.memset(source, 0, 12)
    npu.synchronize(stream)
    assert operators.read(out, 3) == [1, 1, 1]


def test_strides_offset_and_broadcast(operators, npu, stream):
    table = operators.upload(range(12))  # 3 rows of 4
    row, out = operators.upload([100, 200]), operators.upload([0] * 8)
    columns = operators.tensor(table, 3, 2, strides=(4, -2), offset=3)  # the last, then the second
    transposed = operators.tensor(out, 3, 2, strides=(1, 3), offset=1)
    one = operators.scalar(1)
    operators.call("Add", stream, columns, operators.tensor(row, 2), one, transposed)
    npu.synchronize(stream)
    assert operators.read(out, 8) == [0, 103, 107, 111, 201, 205, 209, 0]


def test_the_block_is_addresses_then_tiling_data_in_itself(operators, stream):
    addition = Addition(operators, stream)
    words, start = addition.block, addition.kernel.arguments
    assert words[1:5] == [addition.left, addition.right, addition.out, 0]
    assert words[0] == start + 5 * 8  # points to the following bytes
    assert addition.left in words[5:]  # resembles an address, but is none
    assert addition.kernel.arguments_bytes == len(words) * 8


def test_an_address_in_the_block_can_be_patched(operators, npu, stream):
    addition = Addition(operators, stream)
    assert addition.result() == [11, 22]
    npu.upload(addition.kernel.arguments + 8, acl.u64(operators.upload([5, 6])))
    assert addition.result() == [15, 26]


@pytest.mark.parametrize("number", [0, 1])
def test_tiling_data_that_is_changed_fails_the_kernel(ascend, operators, npu, stream, number):
    operators.library.sim_operators_set_look_alike(ctypes.c_uint64(0x7000_1234_5678))
    addition = Addition(operators, stream)
    assert addition.result() == [11, 22]
    place = [addition.block.index(0x7000_1234_5678), len(addition.block) - 1][number]
    npu.upload(addition.kernel.arguments + 8 * place, acl.u64(addition.block[place] + 64))
    npu.execute(addition.model, stream)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION


def test_a_block_that_is_copied_still_points_into_the_old_one(ascend, operators, npu, stream):
    addition = Addition(operators, stream)
    words, function = addition.block, addition.kernel.function
    copy = npu.words(*words)
    npu.launch(stream, function, copy, len(words) * 8)
    npu.synchronize(stream)  # the old block still exists
    npu.upload(copy, acl.u64(copy + 5 * 8))
    ascend.call("aclmdlRIDestroy", addition.model)
    npu.upload(addition.out, b"\0" * 8)
    npu.launch(stream, function, copy, len(words) * 8)
    npu.synchronize(stream)
    assert operators.read(addition.out, 2) == [11, 22]
    npu.upload(copy, acl.u64(words[0]))
    npu.launch(stream, function, copy, len(words) * 8)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.AICORE_EXCEPTION


def test_a_group_takes_other_operands(operators, ascend, npu, stream):
    out, updating = operators.upload([0, 0]), npu.stream()
    inputs = [operators.tensor(operators.upload(values), 2) for values in ([1, 2], [-3, 4])]
    result, group = operators.tensor(out, 2), ctypes.c_uint64()
    with npu.capture(stream) as models:
        ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
        operators.call("Abs", stream, inputs[0], result)
        ascend.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
    ascend.call("aclmdlRICaptureTaskUpdateBegin", updating, group.value)
    operators.call("Abs", updating, inputs[1], result)
    ascend.call("aclmdlRICaptureTaskUpdateEnd", updating)
    npu.synchronize(updating)
    assert operators.read(out, 2) == [0, 0]
    npu.run(models[0], stream)
    assert operators.read(out, 2) == [3, 4]


def test_products_need_their_workspace(operators, npu, stream):
    left, right = operators.upload([1, 2]), operators.upload([3, 4])
    out = operators.upload([0])
    described = [
        operators.tensor(left, 1, 2), operators.tensor(right, 2, 1), operators.tensor(out, 1, 1)
    ]  # fmt: skip
    code, n_bytes, executor = operators.plan("Mm", *described, 0)
    assert (code, n_bytes) == (0, 8)
    assert operators.launch("Mm", stream, 0, 0, executor) == PARAM_NULLPTR
    _, _, executor = operators.plan("Mm", *described, 0)
    assert operators.launch("Mm", stream, npu.malloc(), 4, executor) == PARAM_NULLPTR
    _, _, executor = operators.plan("Mm", *described, 0)
    workspace = npu.words(0)
    assert operators.launch("Mm", stream, workspace, 8, executor) == 0
    npu.synchronize(stream)
    assert operators.read(out, 1) == [11]
    assert operators.read(workspace, 2) == [3, 4]


def test_what_the_first_phase_refuses(operators):
    data = operators.upload([0] * 8)
    two, three = operators.tensor(data, 2), operators.tensor(data, 3)
    text, deep = operators.tensor(data, 2, dtype=STRING), operators.tensor(data, *[1] * 9)
    one = operators.scalar(1)
    assert operators.plan("Add", two, three, one, three)[0] == PARAM_INVALID
    assert operators.plan("Add", text, two, one, two)[0] == PARAM_INVALID
    assert operators.plan("Exp", deep, deep)[0] == PARAM_INVALID
    assert operators.plan("Exp", None, two)[0] == PARAM_NULLPTR
    assert operators.plan("Exp", two, None)[0] == PARAM_NULLPTR
    assert operators.library.aclnnExpGetWorkspaceSize(two, two, None, None) == PARAM_NULLPTR
    assert operators.launch("Exp", 0, 0, 0, 0) == PARAM_NULLPTR


def test_an_index_out_of_range_fails_the_device(ascend, operators, npu, stream):
    table, out = operators.upload(range(6)), operators.upload([0, 0])
    for index, code in ((2, 0), (3, acl.AICORE_EXCEPTION)):
        indices = operators.tensor(operators.upload([index], INT64), 1, dtype=INT64)
        weight, result = operators.tensor(table, 3, 2), operators.tensor(out, 1, 2)
        operators.call("Embedding", stream, weight, indices, result)
        assert ascend.code("aclrtSynchronizeStream", stream) == code
        assert operators.read(out, 2) == [4, 5]


def test_a_repeatable_executor_takes_other_addresses(operators, npu, stream):
    library = operators.library
    source, out, other = (operators.upload(values) for values in ([-1, 2], [0, 0], [-3, -4]))
    described = operators.tensor(source, 1, offset=1)
    result = operators.tensor(out, 1)
    _, _, executor = operators.plan("Abs", described, result)
    handle = ctypes.c_void_p(executor)
    assert library.aclSetAclOpExecutorRepeatable(handle) == 0
    assert operators.launch("Abs", stream, 0, 0, executor) == 0
    first = ctypes.c_size_t(0)
    assert library.aclSetInputTensorAddr(handle, first, described, ctypes.c_void_p(other)) == 0
    elsewhere = operators.upload([0, 0])
    assert library.aclSetOutputTensorAddr(handle, first, result, ctypes.c_void_p(elsewhere)) == 0
    assert operators.launch("Abs", stream, 0, 0, executor) == 0
    npu.synchronize(stream)
    assert (operators.read(out, 1), operators.read(elsewhere, 1)) == ([2], [4])
    setter, address = library.aclSetTensorAddr, ctypes.c_void_p(other)
    assert setter(None, first, described, address) == INNER_NULLPTR
    assert setter(handle, first, None, address) == INNER_NULLPTR
    assert setter(handle, ctypes.c_size_t(2), described, address) == PARAM_INVALID
    assert library.aclDestroyAclOpExecutor(handle) == 0


def test_a_failed_launch_is_told(ascend, operators, stream):
    data = operators.tensor(operators.upload([1]), 1)
    ascend.fail("aclrtLaunchKernelWithHostArgs", 507899)
    _, _, executor = operators.plan("Abs", data, data)
    assert operators.launch("Abs", stream, 0, 0, executor) == 507899


def test_nothing_is_left_of_an_operator(ascend, operators, npu, stream):
    descriptions, executors = operators.live
    data, one = operators.tensor(operators.upload([1]), 1), operators.scalar(1)
    assert operators.live == (descriptions + 2, executors)
    code, _, executor = operators.plan("Abs", data, data)
    assert (code, operators.live) == (0, (descriptions + 2, executors + 1))
    assert operators.launch("Abs", stream, 0, 0, executor) == 0
    assert operators.live == (descriptions + 2, executors)
    operators.call("Add", stream, data, data, one, data)
    assert operators.plan("Abs", data, None)[0] == PARAM_NULLPTR
    ascend.fail("aclrtLaunchKernelWithHostArgs", 507899)
    operators.launch("Abs", stream, 0, 0, operators.plan("Abs", data, data)[2])
    operators.launch("Mm", stream, 0, 0, operators.plan("Mm", data, data, data, 0)[2])
    assert operators.live == (descriptions + 2, executors)
    operators.close()
    assert operators.live == (descriptions, executors)


@pytest.mark.parametrize("dtype", [INT32, INT64], ids=["int32", "int64"])
def test_integers_keep_every_bit(operators, npu, stream, dtype):
    largest = 2 ** (31 if dtype == INT32 else 63) - 2
    data = operators.upload([largest, -7], dtype)
    vector = operators.tensor(data, 2, dtype=dtype)
    one = operators.scalar(1, INT64)
    operators.call("InplaceAdds", stream, vector, one, one)
    npu.synchronize(stream)
    assert operators.read(data, 2, dtype) == [largest + 1, -6]


def test_comparisons_give_booleans(operators, npu, stream):
    source, out = operators.upload([1, 2, 3]), operators.upload([0] * 3, BOOL)
    operators.call(
        "GtScalar", stream, operators.tensor(source, 3), operators.scalar(1.5, FLOAT),
        operators.tensor(out, 3, dtype=BOOL),
    )  # fmt: skip
    npu.synchronize(stream)
    assert operators.read(out, 3, BOOL) == [False, True, True]


def test_sizes_that_are_data_are_written_into_the_description(operators, npu, stream):
    source, out = operators.upload([1, -2, 3]), operators.upload([0] * 3)
    mask = operators.tensor(operators.upload([1, 0, 1], BOOL), 3, dtype=BOOL)
    result = operators.tensor(out, 3)
    operators.call("MaskedSelect", stream, operators.tensor(source, 3), mask, result)
    shape, rank = ctypes.POINTER(ctypes.c_int64)(), ctypes.c_uint64()
    operators.library.aclGetViewShape(result, ctypes.byref(shape), ctypes.byref(rank))
    assert shape[: rank.value] == [2]
    assert operators.read(out, 2) == [1, 3]
    npu.begin(stream)
    code, n_bytes, executor = operators.plan(
        "MaskedSelect", operators.tensor(source, 3), mask, result
    )
    assert code == 0
    code = operators.launch("MaskedSelect", stream, npu.malloc(), n_bytes, executor)
    assert code == acl.STREAM_CAPTURED
    npu.end(stream)


def test_nothing_is_compiled(ascend):
    compiler = npu_device.operators("libacl_op_compiler.so")
    for library in (compiler, ascend.library):
        assert library.aclopCompileAndExecute() == FAILURE
        assert library.aclopCompileAndExecuteV2() == FAILURE
    size = compiler.aclGetCompileoptSize(0)
    text = ctypes.create_string_buffer(size)
    assert compiler.aclGetCompileopt(0, text, ctypes.c_size_t(size)) == 0
    assert text.value == b"enable"
    assert compiler.aclrtGetSysParamOpt(0, ctypes.byref(ctypes.c_int64())) == 0  # of the runtime


def test_what_a_first_phase_gave_is_found_by_the_clients_key_on_its_thread(operators, npu, stream):
    """As in opbase: with the addresses that the client adds, until another thread asks."""
    library = operators.library
    find = library.PTAGetExecCache
    find.restype = ctypes.c_void_p
    library.CanUsePTACache.restype = ctypes.c_bool
    sources = [operators.upload([1, 2, 3]), operators.upload([4, 5, 6])]
    outs = [operators.upload([0] * 3) for _ in sources]

    def found(key: int, *addresses: int) -> int:
        library.InitPTACacheThreadLocal()
        for address in addresses:
            library.AddTensorAddrToCachedList(ctypes.c_void_p(address))
        library.SetPTAHashKey(ctypes.c_uint64(key))
        return find(ctypes.c_uint64(key), ctypes.byref(ctypes.c_uint64())) or 0

    def plan() -> int:
        tensors = [operators.tensor(one, 3) for one in (sources[0], outs[0])]
        return operators.plan("Neg", *tensors)[2]

    assert not library.CanUsePTACache(b"aclnnNeg")
    assert found(7, sources[0], outs[0]) == 0
    operators.launch("Neg", stream, 0, 0, plan())  # nothing is kept yet
    npu_device.set_executor_cache(True)
    assert library.CanUsePTACache(b"aclnnNeg")
    assert not library.CanUsePTACache(b"aclnnNonzero")
    assert found(7, sources[0], outs[0]) == 0
    operators.launch("Neg", stream, 0, 0, plan())
    library.UnInitPTACacheThreadLocal()
    executor = found(7, sources[1], outs[1])
    assert executor
    assert operators.launch("Neg", stream, 0, 0, executor) == 0
    npu.synchronize(stream)
    assert [operators.read(out, 3) for out in outs] == [[-1, -2, -3], [-4, -5, -6]]
    assert found(8, sources[1], outs[1]) == 0
    assert npu.ascend.in_thread(lambda: found(7, sources[1], outs[1])) == 0
    npu_device.set_executor_cache(False)
    assert found(7, sources[1], outs[1]) == 0
