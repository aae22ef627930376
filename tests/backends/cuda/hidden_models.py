"""Helpers of the tests of opaque launches: raw kernels, and models that launch them.

A raw kernel acts like a custom extension on a GPU: eager runs it at once, and under a capture it is
launched into the captured stream. torch sees neither.
"""

from __future__ import annotations

import array
import copy
import ctypes
import struct

import torch
from aten_capturer import launch_kernel
from opaque_capturing import current_capture
from torch import nn

N_REPLAYS = 4


class Raw:
    """A kernel `target[i] += factor` on float32 that torch does not see.

    Attributes:
        counts: how often it ran at once, and was launched into a capture; kept where the
            recorder, which refuses state that changes, does not look.
    """

    def __init__(self, simulator, factor=1.0):
        self.factor = factor
        self.counts = array.array("q", [0, 0])
        self.function = simulator.kernel("raw_add", [8, 8, 4], self._execute)

    def __deepcopy__(self, memo):
        return self

    def __call__(self, target):
        with torch._C.DisableTorchFunction():
            address = target.data_ptr()
        block = struct.pack("<QQf", address, target.numel(), self.factor)
        capture = current_capture()
        if capture is None:
            self.counts[0] += 1
            self._execute(block)
        else:
            self.counts[1] += 1
            launch_kernel(capture.stream, self.function, [8, 8, 4], block + bytes(4))

    @staticmethod
    def _execute(block):
        address, count, factor = struct.unpack("<QQf", block[:20])
        content = (ctypes.c_float * count).from_address(address)
        for index in range(count):
            content[index] += factor


class Hidden(nn.Module):
    """A raw kernel in place between operators, on an activation and on a buffer."""

    def __init__(self, raw, *, buffer=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(8))
        self.raw, self.writes_buffer = raw, buffer

    def forward(self, x):
        hidden = self.linear(x).relu()
        self.raw(hidden)
        if self.writes_buffer:
            self.raw(self.steps)
        return hidden * 2 + self.steps


def assert_replays(model, captured, make, device=None):
    """Replay with new inputs, outputs and feature map at every turn; bits equal eager's."""
    twin = copy.deepcopy(model)
    run = captured.load(device)
    assert_same_state(model, twin)
    kept = []
    for turn in range(N_REPLAYS):
        x = make()
        own = x.clone()
        out = torch.empty_like(twin(x.clone())) if turn % 2 else None
        twin_state(twin, model)
        with torch.no_grad():
            expected = twin(x)
        feature_map = torch.empty(run.feature_map_bytes, dtype=torch.uint8).fill_(255)
        got = run(own, out=out, feature_map=feature_map)
        assert torch.equal(got, expected)
        assert torch.equal(own, x)
        assert_same_state(model, twin)
        assert out is None or got is out
        kept.append((own, got, feature_map))
    return run


def twin_state(twin, model):
    """Copy the model's state to the twin."""
    if isinstance(twin, nn.Module):
        twin.load_state_dict(model.state_dict())


def assert_same_state(model, twin):
    if isinstance(model, nn.Module):
        for name, one in twin.state_dict().items():
            assert torch.equal(model.state_dict()[name], one), name


def rows():
    return torch.randn(3, 8)


def is_opaque(captured):
    return [one.name for one in captured.program.launches] == ["offload::opaque"]
