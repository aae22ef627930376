"""How many copies the refresh of a relocated model takes: one for each block that changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_npu import check_same
from torch import nn

import offload

N_LAYERS, N_HEADS, N_CACHED, WIDTH = 4, 4, 32, 64


class Layer(nn.Module):
    """Attention of one token over keys and values that are given, and a feed-forward part."""

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
    """Layers, each with a cache of keys and one of values among the inputs."""

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


@pytest.mark.usefixtures("simulated_npu")  # on hardware a launch may be of several kernels
def test_a_moved_input_takes_a_copy_for_each_kernel_that_reads_it() -> None:
    model, given = DecodingStep().eval(), inputs()
    with torch.no_grad():
        expected = model(*given)
        tensors = [one.npu() for one in given]
        run = offload.capture(model.npu(), *tensors).load()
    out, other = expected.npu(), expected.npu()
    run(*tensors, out=out)
    n_launches = len(run.program.launches)

    def copies(moved: list[torch.Tensor], to: torch.Tensor, **more: torch.Tensor) -> int:
        """Of an execution after one at the first addresses."""
        run(*tensors, out=out)
        before = run._loaded.resident.refresh_counts["copies"]
        check_same(run(*moved, out=to, **more), expected)
        after: int = run._loaded.resident.refresh_counts["copies"]
        return after - before

    clones = [one.clone() for one in tensors]
    memory = torch.empty(run.feature_map_bytes, dtype=torch.uint8).npu()
    assert copies(tensors, out) == 0
    assert copies([clones[0], *tensors[1:]], out) == 2  # a norm and a sum read it
    assert copies(tensors, other) == 1
    assert copies([tensors[0], *clones[1:]], out) == 2 * N_LAYERS  # one kernel reads each cache
    assert copies(clones, other) == 2 * N_LAYERS + 3
    assert copies(tensors, out, feature_map=memory) == n_launches  # all have a word of it
    run.close()
