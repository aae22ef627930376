"""What tests of weights on the simulated device share."""

from __future__ import annotations

import ctypes

import torch
from simulator import NEWEST_FIRST, OLDEST_FIRST, RANDOM
from test_streaming import floor_of, results

GIVEN = (4, 128)
ORDERS = [(NEWEST_FIRST, 0), (OLDEST_FIRST, 0), (RANDOM, 1), (RANDOM, 2)]


def floor_on(captured, backend) -> int:
    class OnDevice:
        def load(self, **options):
            return captured.load(backend.name, **options)

    return floor_of(OnDevice())


def expected_of(captured, inputs):
    """By the CPU backend with all weights resident; the simulated kernels are its operators."""
    with captured.load() as run:
        return [[one.clone() for one in results(run(given))] for given in inputs]


def check(run, inputs, expected) -> None:
    for given, wanted in zip(inputs, expected, strict=True):
        for got, tensor in zip(results(run(given)), wanted, strict=True):
            assert torch.equal(got, tensor)


# The decoder was recorded with an attention of the CPU that draws from a generator.


def poison_after_last_use(backend, run) -> None:
    """Overwrite each streamed weight when the last launch that reads it has ended."""
    plan = run.streaming.plan
    last = {}
    for one in plan.transfers:
        last.setdefault(one.last_launch, []).append(plan.pieces[one.piece])

    def poison(launch) -> None:
        if run.closed:
            return
        for piece in last.get(launch.index, ()):
            address = run._loaded.weights[piece.value].untyped_storage().data_ptr()
            ctypes.memset(address, 0xFF, piece.size_bytes)

    backend.capturer.on_end = poison
