"""Models recorded on the CPU through the whole CUDA path, on the simulated driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import replay_without_model
from nets import GoogLeNet, ResNet18, UNet, UnrolledLstm, images
from torch import nn

import offload

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from simulated_backend import SimulatedBackend, install


@pytest.fixture
def backend(simulator, monkeypatch) -> SimulatedBackend:
    return install(simulator, monkeypatch)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x)


def normal(*shape: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def make(turn):
        return {"x": torch.empty(*shape).normal_(generator=torch.Generator().manual_seed(turn))}

    return make


class FusedAttention(nn.Module):
    """torch tags its operator as random, which it is only with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(16, 48)

    def forward(self, x):
        query, key, value = self.heads(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


MODELS = {
    "fused attention": (FusedAttention, normal(2, 5, 16)),
    "mlp": (Mlp, normal(3, 16)),
    "encoder": (Encoder, normal(2, 5, 16)),
    "lstm": (lambda: UnrolledLstm(2, 16), normal(2, 4, 16)),
    "resnet": (ResNet18, images),
    "googlenet": (GoogLeNet, images),
    "unet": (UNet, images),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(backend, name):
    """New inputs, buffers and feature maps at every turn, against eager."""
    run = replay_without_model(*MODELS[name], device=backend.name)
    assert {one.mode for one in run.launch_reports()} == {"graph"}
    assert run.last_execution.bytes_copied == 0


def test_batch_sizes_share_one_arena(backend, simulator):
    """Eight sizes take the memory of the largest."""
    model, runs = Mlp().eval(), []
    free_bytes = simulator.physical_bytes
    for size in (1, 2, 4, 8, 16, 32, 64, 4096):
        with torch.no_grad():
            captured = offload.capture(model, torch.randn(size, 16))
        runs.append((size, captured.load(backend.name, verify=False)))
    largest = runs[-1][1].feature_map_bytes
    granularity = 2 * 1024 * 1024  # of the driver's memory
    taken = simulator.physical_bytes - free_bytes
    assert taken <= -(-largest // granularity) * granularity + granularity
    for size, run in reversed(runs):
        x = torch.randn(size, 16)
        assert torch.allclose(run(x), model(x), atol=1e-6)
