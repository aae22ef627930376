"""The simulated operators of FRACTAL_NZ through their C ABI: the layout, and refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from operator_client import (
    BOOL,
    FLOAT,
    FRACTAL_NZ,
    HALF,
    INT32,
    ND,
    PARAM_INVALID,
    PARAM_NULLPTR,
    RUNTIME_ERROR,
    Operators,
    Tensor,
)

NC1HWC0 = 3
SOURCE = -1  # a fractal's row has as many elements as 32 bytes of the source's type


@pytest.fixture
def stream(npu):
    return npu.stream()


def storage_of(
    operators: Operators, source: Tensor, to: int, dtype: int = SOURCE
) -> tuple[int, list[int]]:
    """The code of the query, and the shape of a cast's storage."""
    shape, rank, found = ctypes.POINTER(ctypes.c_int64)(), ctypes.c_uint64(), ctypes.c_int()
    code = operators.library.aclnnNpuFormatCastCalculateSizeAndFormat(
        source, to, dtype, ctypes.byref(shape), ctypes.byref(rank), ctypes.byref(found)
    )
    if code:
        return code, []
    assert found.value == to
    return code, shape[: rank.value]


def place(row: int, column: int, n_rows: int, width: int) -> int:
    """The position of an element in fractals of 16 rows and `width` columns, as documented."""
    n_down = -(-n_rows // 16)
    fractal = column // width * n_down + row // 16
    return (fractal * 16 + row % 16) * width + column % width


@pytest.mark.parametrize(
    ("dtype", "of_rows", "width"),
    [(HALF, SOURCE, 16), (FLOAT, SOURCE, 8), (FLOAT, HALF, 16), (INT32, FLOAT, 8)],
)
def test_a_cast_lays_a_matrix_out_in_fractals_padded_with_zeros(
    operators, npu, stream, dtype, of_rows, width
):
    n_rows, n_columns = 18, 35
    values = list(range(1, n_rows * n_columns + 1))
    plain = operators.tensor(operators.upload(values, dtype), n_rows, n_columns, dtype=dtype)
    n_across = -(-n_columns // width)
    storage = [n_across, 2, 16, width]
    assert storage_of(operators, plain, FRACTAL_NZ, of_rows) == (0, storage)
    n_stored = n_across * 2 * 16 * width
    memory = operators.upload([7] * n_stored, dtype)
    own = operators.tensor(memory, n_rows, n_columns, dtype=dtype, storage=storage)
    operators.call("NpuFormatCast", stream, plain, own)
    npu.synchronize(stream)
    expected = [0] * n_stored
    for index, value in enumerate(values):
        expected[place(*divmod(index, n_columns), n_rows, width)] = value
    assert operators.read(memory, n_stored, dtype) == expected

    assert storage_of(operators, own, ND) == (0, [n_rows, n_columns])
    back = operators.upload([0] * len(values), dtype)
    operators.call(
        "NpuFormatCast", stream, own, operators.tensor(back, n_rows, n_columns, dtype=dtype)
    )
    npu.synchronize(stream)
    assert operators.read(back, len(values), dtype) == values


def test_matrices_of_a_batch_lie_one_behind_the_other(operators, npu, stream):
    values = [float(value) for value in range(2 * 3 * 4)]
    plain = operators.tensor(operators.upload(values, HALF), 2, 3, 4, dtype=HALF)
    assert storage_of(operators, plain, FRACTAL_NZ) == (0, [2, 1, 1, 16, 16])
    memory = operators.upload([7.0] * 512, HALF)
    own = operators.tensor(memory, 2, 3, 4, dtype=HALF, storage=[2, 1, 1, 16, 16])
    operators.call("NpuFormatCast", stream, plain, own)
    npu.synchronize(stream)
    found = operators.read(memory, 512, HALF)
    rows = [found[at : at + 16] for at in range(0, 512, 16)]
    assert rows[0] == [0, 1, 2, 3, *[0] * 12]
    assert rows[18] == [20, 21, 22, 23, *[0] * 12]
    assert sum(found) == sum(values)


def weight(operators: Operators, stream: int, rows: Sequence[Sequence[float]]) -> int:
    """Memory that holds a matrix of less than 17 rows and columns in one fractal."""
    shape = (len(rows), len(rows[0]))
    values = [value for row in rows for value in row]
    plain = operators.tensor(operators.upload(values, HALF), *shape, dtype=HALF)
    memory = operators.upload([7.0] * 256, HALF)
    own = operators.tensor(memory, *shape, dtype=HALF, storage=[1, 1, 16, 16])
    operators.call("NpuFormatCast", stream, plain, own)
    return memory


@pytest.mark.parametrize("is_turned", [False, True])
def test_products_read_a_weight_in_fractals(operators, npu, stream, is_turned):
    rows = [[1, 2], [3, 4], [5, 6]]
    memory = weight(operators, stream, list(zip(*rows, strict=True)) if is_turned else rows)
    strides = (1, 3) if is_turned else None
    right = operators.tensor(memory, 3, 2, dtype=HALF, strides=strides, storage=[1, 1, 16, 16])
    left = operators.tensor(operators.upload([1, 10, 100], HALF), 1, 3, dtype=HALF)
    out = operators.upload([0, 0], HALF)
    result = operators.tensor(out, 1, 2, dtype=HALF)
    operators.call("MatmulWeightNz", stream, left, right, result, 0)
    npu.synchronize(stream)
    assert operators.read(out, 2, HALF) == [531, 642]
    addend = operators.tensor(operators.upload([1000, 0], HALF), 2, dtype=HALF)
    one = operators.scalar(1)
    operators.call("AddmmWeightNz", stream, addend, left, right, one, one, result, 0)
    npu.synchronize(stream)
    assert operators.read(out, 2, HALF) == [1531, 642]


def test_operators_that_take_plain_memory_refuse_fractals(operators, stream):
    memory = weight(operators, stream, [[1, 2], [3, 4]])
    own = operators.tensor(memory, 2, 2, dtype=HALF, storage=[1, 1, 16, 16])
    plain = operators.tensor(operators.upload([0] * 4, HALF), 2, 2, dtype=HALF)
    for name, parameters in {
        "InplaceCopy": (own, plain),
        "Mm": (plain, own, plain, 0),
        "Add": (own, plain, operators.scalar(1), plain),
        "MatmulWeightNz": (plain, plain, plain, 0),
        "NpuFormatCast": (own, own),
    }.items():
        assert operators.plan(name, *parameters)[0] == PARAM_INVALID, name
    assert operators.plan("MatmulWeightNz", own, own, plain, 0)[0] == PARAM_INVALID
    assert operators.plan("MatmulWeightNz", plain, own, plain, 0)[0] == 0


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "storage"),
    [
        ((2, 2), None, 0, [2, 1, 16, 16]),
        ((2, 2), None, 0, [1, 1, 8, 16]),
        ((2, 2), None, 0, [1, 1, 1, 16, 16]),
        ((2, 2), None, 1, [1, 1, 16, 16]),
        ((2, 2), (4, 1), 0, [1, 1, 16, 16]),
        ((2,), None, 0, [1, 16, 16]),
    ],
)
def test_a_view_that_is_no_whole_matrix_is_refused(operators, shape, strides, offset, storage):
    memory = operators.upload([0] * 512, HALF)
    own = operators.tensor(
        memory, *shape, dtype=HALF, strides=strides, offset=offset, storage=storage
    )
    plain = operators.tensor(operators.upload([0] * 4, HALF), 2, 2, dtype=HALF)
    assert operators.plan("MatmulWeightNz", plain, own, plain, 0)[0] == PARAM_INVALID


def test_what_cannot_be_cast_is_refused_with_the_documented_codes(operators):
    memory = operators.upload([0] * 64)
    plain = operators.tensor(memory, 4, 4)
    own = operators.tensor(memory, 4, 4, storage=[1, 1, 16, 8])
    assert storage_of(operators, Tensor(), FRACTAL_NZ)[0] == PARAM_NULLPTR
    assert storage_of(operators, plain, NC1HWC0)[0] == PARAM_INVALID
    assert storage_of(operators, plain, FRACTAL_NZ, BOOL)[0] == PARAM_INVALID
    assert storage_of(operators, operators.tensor(memory, 4), FRACTAL_NZ)[0] == PARAM_INVALID
    assert storage_of(operators, operators.tensor(memory, 0, 4), FRACTAL_NZ)[0] == PARAM_INVALID
    assert storage_of(operators, operators.tensor(memory, 4, 4, dtype=BOOL), ND)[0] == (
        PARAM_INVALID
    )
    assert storage_of(operators, plain, ND)[0] == RUNTIME_ERROR
    assert storage_of(operators, own, FRACTAL_NZ)[0] == RUNTIME_ERROR
    turned = operators.tensor(memory, 4, 4, strides=(1, 4))
    assert operators.plan("NpuFormatCast", turned, own)[0] == PARAM_INVALID
    wide = operators.tensor(memory, 2, 8)
    assert operators.plan("NpuFormatCast", wide, own)[0] == PARAM_INVALID
    assert operators.plan("NpuFormatCast", plain, own)[0] == 0


@pytest.mark.parametrize(
    ("personality", "release"),
    [("8.1", "8.1.RC1"), ("8.5", "8.5.0"), ("9.0", "9.0.0"), ("9.1", "9.1.0"), ("", "9.2.0")],
)
def test_the_library_says_of_which_release_it_is(npu, personality, release):
    npu.ascend.set_personality(personality)
    version = ctypes.create_string_buffer(512)
    assert npu.ascend.library.aclsysGetCANNVersion(0, version) == 0
    assert version.value.decode() == release
    assert npu.ascend.library.aclsysGetCANNVersion(8, version) == 107000
    assert npu.ascend.library.aclsysGetCANNVersion(0, None) == 107000
