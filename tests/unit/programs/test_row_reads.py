"""Weights of a Program that are tables from which launches read only rows."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.plan import RowReads, row_reads, weight_demand


def program_of(function, *inputs):
    with torch.no_grad():
        return offload.capture(function, *inputs).program


def reads_of(function, *inputs):
    """The reads of each table, by its name."""
    program = program_of(function, *inputs)
    return {program.values[value].name: one for value, one in row_reads(program).items()}


class Words(nn.Module):
    """A table of rows, and a weight that is no table."""

    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(100, 8, **options)
        self.head = nn.Linear(8, 8)

    def forward(self, ids):
        return self.head(self.words(ids))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 4), (0,)])
def test_a_table_of_an_embedding(dtype, shape):
    found = reads_of(Words(padding_idx=3), torch.zeros(shape, dtype=dtype))
    assert list(found) == ["words.weight"]
    n_rows = torch.zeros(shape).numel()
    assert found["words.weight"] == RowReads(8 * 4, (n_rows,))
    assert found["words.weight"].most_bytes == n_rows * 32


def test_the_demand_says_so():
    program = program_of(Words(), torch.zeros(2, 3, dtype=torch.int64))
    demand = weight_demand(program, [1.0] * len(program.launches))
    rows = {one.name: (one.row_bytes, one.n_rows, one.rows_bytes) for one in demand.weights}
    assert rows["words.weight"] == (32, (6,), 192)
    assert rows["head.weight"] == (0, (), 0)


def test_a_table_that_two_launches_read():
    words = Words()
    found = reads_of(
        lambda one, other: words.words(one).sum() + words.words(other).sum(),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(3, 3, dtype=torch.int32),
    )
    (reads,) = found.values()
    assert (reads.n_rows, reads.most_bytes) == ((2, 9), 9 * 32)


def test_parts_of_a_table():
    table = nn.Parameter(torch.randn(100, 8))
    ids = torch.zeros(4, dtype=torch.int64)
    found = reads_of(
        lambda ids: functional.embedding(ids, table[10:30]) + functional.embedding(ids, table),
        ids,
    )
    assert [(one.row_bytes, one.n_rows) for one in found.values()] == [(32, (4, 4))]
    found = reads_of(
        lambda ids: (
            functional.embedding(ids, table.view(50, 16))[:, :8] + functional.embedding(ids, table)
        ),
        ids,
    )
    assert not found  # rows of two sizes


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda table, ids: functional.embedding(ids, table) @ table.t(), id="tied"),
        pytest.param(
            lambda table, ids: functional.embedding(ids, table) + table[:4], id="another view"
        ),
        pytest.param(lambda table, ids: functional.embedding(ids, table.t()), id="transposed"),
        pytest.param(lambda table, ids: functional.embedding(ids, table[:, :4]), id="columns"),
        pytest.param(lambda table, ids: functional.embedding(ids, table[::2]), id="other rows"),
        pytest.param(lambda table, ids: table.index_select(0, ids), id="another operator"),
        pytest.param(lambda table, ids: table[ids], id="indexed"),
        pytest.param(
            lambda table, ids: functional.embedding(ids, table.add_(1.0)), id="written before"
        ),
        pytest.param(
            lambda table, ids: functional.embedding(ids, table, max_norm=1.0), id="renormalised"
        ),
    ],
)
def test_weights_that_are_read_otherwise(function):
    table = torch.randn(100, 8)
    assert not reads_of(lambda ids: function(table, ids), torch.zeros(4, dtype=torch.int64))


def test_indices_that_are_weights_are_none():
    table, places = nn.Parameter(torch.randn(100, 8)), torch.arange(50)[None]
    found = reads_of(lambda x: x + functional.embedding(places[:, :4], table), torch.randn(1, 4, 8))
    assert [one.n_rows for one in found.values()] == [(4,)]


def test_launches_that_are_not_as_recorded_are_none():
    program = program_of(Words(), torch.zeros(4, dtype=torch.int64))
    (index,) = [one.index for one in program.launches if one.name == "aten::embedding"]
    launch = program.launches[index]
    (result,) = launch.results
    for changes in (
        {"results": (None,)},
        {"results": (dataclasses.replace(result, strides=(16, 2)),)},
        {"results": (dataclasses.replace(result, dtype="int32"),)},
        {"guards_shape": True},
        {"writes": (*launch.writes, launch.reads[0])},
    ):
        launches = list(program.launches)
        launches[index] = dataclasses.replace(launch, **changes)
        assert not row_reads(dataclasses.replace(program, launches=tuple(launches)))
    assert row_reads(program)
