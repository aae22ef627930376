"""The number of copies in a relocated model's refresh: one, or one for each changed block."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from ascend_simulator import AscendSimulator
from on_npu import check_same
from torch import nn

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend

N_LAYERS, N_HEADS, N_CACHED, WIDTH = 4, 4, 32, 64


class Layer(nn.Module):
    """Attention of one token over given keys and values, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        query = self.query(self.norm_1(x)).view(1, 1, N_HEADS, -1).transpose(1, 2)
        mixed = F.softmax(query @ keys.transpose(-2, -1) / 4, -1) @ values
        x = x + self.project(mixed.transpose(1, 2).reshape(1, 1, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class DecodingStep(nn.Module):
    """Layers, each with a cache of keys and a cache of values among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(N_LAYERS))

    def forward(self, x: torch.Tensor, *caches: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, *caches[2 * index : 2 * index + 2])
        return x


def inputs() -> list[torch.Tensor]:
    shape = (1, N_HEADS, N_CACHED, WIDTH // N_HEADS)
    return [torch.randn(1, 1, WIDTH), *(torch.randn(shape) for _ in range(2 * N_LAYERS))]


class Counted:
    """The loaded step, and the costs of an execution after one at the first addresses."""

    def __init__(self) -> None:
        model, given = DecodingStep().eval(), inputs()
        with torch.no_grad():
            self.expected = model(*given)
            self.tensors = [one.npu() for one in given]
            self.run = offload.capture(model.npu(), *self.tensors).load()
        self.clones = [one.clone() for one in self.tensors]
        self.out, self.other = self.expected.npu(), self.expected.npu()
        self.memory = torch.empty(self.run.feature_map_bytes, dtype=torch.uint8).npu()

    def taken(
        self, moved: list[torch.Tensor], to: torch.Tensor, **more: torch.Tensor
    ) -> tuple[int, int, int]:
        """(words patched, copies, bytes copied) of the second."""
        self.run(*self.tensors, out=self.out)
        before = self.run._loaded.resident.refresh_counts
        check_same(self.run(*moved, out=to, **more), self.expected)
        after = self.run._loaded.resident.refresh_counts
        return (
            self.run.last_execution.words_patched,
            after["copies"] - before["copies"],
            after["bytes_copied"] - before["bytes_copied"],
        )


@pytest.mark.usefixtures("simulated_npu")  # on hardware a launch may be several kernels
def test_whatever_moved_one_copy_brings_it(simulated_npu: AscendSimulator) -> None:
    one = Counted()
    tensors, clones = one.tensors, one.clones
    n_launches = len(one.run.program.launches)
    assert f"({n_launches} tasks set, 1 update)" in "\n".join(one.run.notes())
    simulated_npu.forget_calls()
    assert one.taken(tensors, one.out) == (0, 0, 0)
    assert one.taken([tensors[0], clones[1], *tensors[2:]], one.out) == (1, 1, 8)
    assert one.taken(tensors, one.other) == (1, 1, 8)
    words, copies, all_bytes = one.taken(clones, one.other)
    assert (words, copies) == (2 * N_LAYERS + 3, 1)
    words, copies, n_bytes = one.taken(tensors, one.out, feature_map=one.memory)
    assert copies == 1
    assert words > n_launches  # all have a word of it
    assert n_bytes > all_bytes  # which come first in the table
    assert simulated_npu.calls("aclmdlRITaskSetParams") == 0
    assert simulated_npu.calls("aclmdlRIUpdate") == 0
    one.run.close()


@pytest.mark.usefixtures("simulated_npu")
def test_without_a_table_a_moved_input_takes_a_copy_for_each_kernel_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = functools.partial(TorchAscendBackend, argument_table=False)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    one = Counted()
    tensors, clones = one.tensors, one.clones
    n_launches = len(one.run.program.launches)
    assert one.taken(tensors, one.out) == (0, 0, 0)
    assert one.taken([clones[0], *tensors[1:]], one.out) == (2, 2, 16)  # a norm and a sum read it
    assert one.taken(tensors, one.other) == (1, 1, 8)
    # One kernel reads each cache.
    assert one.taken([tensors[0], *clones[1:]], one.out)[1] == 2 * N_LAYERS
    assert one.taken(clones, one.other)[1] == 2 * N_LAYERS + 3
    # All have a word of it.
    assert one.taken(tensors, one.out, feature_map=one.memory)[1] == n_launches
    one.run.close()
