"""Cells of generators are made where a capture looks for them, in each version of torch."""

from __future__ import annotations

import warnings

import pytest
from torch_captures import one_capture
from torch_generators import (
    CAPTURED_STREAM,
    GPU,
    FakeGenerator,
    FakeGraph,
    FakeTorch,
    Torch212,
    Torch214,
    TorchWithoutRegistering,
    take_for_cuda,
)

import offload
from offload.backends.captured.relocation.captures import RANDOM_OWNER
from offload.backends.cuda import generator_cells, torch_capture

VERSIONS = [FakeTorch, Torch212, Torch214, TorchWithoutRegistering]
LAZY = VERSIONS[2:]


@pytest.fixture(params=VERSIONS)
def cuda(request, monkeypatch) -> FakeTorch:
    generator_cells.registered_by_drawing.cache_clear()
    return take_for_cuda(monkeypatch, request.param())


def capture_of(
    cuda: FakeTorch, monkeypatch: pytest.MonkeyPatch, *named: FakeGenerator
) -> torch_capture._OneCapture:
    """A capture not yet begun, of a program that names generators."""
    monkeypatch.setattr(torch_capture, "generators_of", lambda *_: [cuda.default, *named])
    return one_capture(monkeypatch, graph=FakeGraph(cuda), takes_devices=False)


@pytest.mark.parametrize("n_named", [0, 1, 2])
def test_what_random_kernels_read_is_found(cuda, monkeypatch, n_named):
    """And nothing else: launches allocate from the graph's own pool, before and after a draw."""
    named = [FakeGenerator(cuda) for _ in range(n_named)]
    one = capture_of(cuda, monkeypatch, *named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one._begin()
    drawn, scratch = [], []
    for generator in [cuda.default, *named]:
        scratch.append(cuda.allocate(64))
        drawn.append(generator.draw())
        scratch.append(cuda.allocate(64))
    one._graph.capture_end()
    found = one._random_cells()
    assert sorted(one.address for one in found) == sorted(sum(drawn, ()))
    assert {(one.size_bytes, one.owner) for one in found} == {(8, RANDOM_OWNER)}
    assert len({address for pair in drawn for address in pair}) == 2 * (n_named + 1)
    assert list(cuda.graph_pool.blocks) == scratch
    assert cuda.registered == ([] if type(cuda) in LAZY else named)
    one._graph.reset()
    assert one._random_cells() == []


def test_only_old_versions_fill_cells_before_a_capture(cuda, monkeypatch):
    """Their addresses may remain in arguments of kernels that are captured then."""
    one = capture_of(cuda, monkeypatch)
    one._begin()
    expected = list(cuda.default.draw()) if type(cuda) is FakeTorch else []
    assert cuda.filled == expected


def test_torch_is_tried_once_and_where_a_generator_is_named(cuda, monkeypatch):
    for n_captures, named in [(1, []), (3, [FakeGenerator(cuda)]), (4, [FakeGenerator(cuda)])]:
        one = capture_of(cuda, monkeypatch, *named)
        one._begin()
        one._graph.capture_end()
        one._graph.reset()
        assert cuda.n_captures == n_captures
    assert generator_cells.registered_by_drawing(GPU) is (type(cuda) in LAZY)
    assert cuda.n_captures == 4


def test_the_trial_leaves_nothing(cuda):
    """Not even where the default generator had no cells before."""
    assert generator_cells.registered_by_drawing(GPU) is (type(cuda) in LAZY)
    assert cuda.capture is None
    assert cuda.default.state.cells is None
    assert not cuda.default.state.graphs
    assert not cuda.default.state.of_captures
    assert cuda.allocate(8, CAPTURED_STREAM) in cuda._elsewhere.blocks
    assert len(cuda._elsewhere.blocks) == 1


def test_a_generator_that_cannot_be_captured_is_an_execution_error(monkeypatch):
    """The capture is then in progress, and its owner ends it."""

    class Failing(FakeGenerator):
        def get_state(self) -> str:
            raise RuntimeError("the device has failed\nadvice of torch")

    generator_cells.registered_by_drawing.cache_clear()
    cuda = take_for_cuda(monkeypatch, Torch214())
    one = capture_of(cuda, monkeypatch, Failing(cuda))
    with pytest.raises(
        offload.ExecutionError, match=r"^a capture cannot begin: the device has failed$"
    ):
        one._begin()
    assert cuda.capture is one._graph
