"""Feature maps of real programs against the lower bound: the most bytes alive at once."""

from __future__ import annotations

import pytest
import torch
from nets import GoogLeNet, ResNet18, UNet, UnrolledLstm, images
from torch import nn

import offload
from offload.backends.null import NullBackend
from offload.plan import place_values


def encoder() -> nn.Module:
    # With an odd number of heads torch does not use one operator for a whole layer.
    layer = nn.TransformerEncoderLayer(60, 3, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def captured(model: nn.Module, x: torch.Tensor) -> offload.Captured:
    model.eval()
    with torch.no_grad(), offload.capture(model) as captured:
        model(x)
    return captured


@pytest.mark.slow
@pytest.mark.parametrize("net", [ResNet18, GoogLeNet, UNet, encoder])
def test_feature_map_is_at_the_lower_bound(net):
    x = torch.randn(1, 16, 60) if net is encoder else images(0)["x"]
    program = captured(net(), x).program
    # On the null backend every activation lies in the feature map, also results of convolutions.
    everything = place_values(program, NullBackend().machine())
    on_the_cpu = captured(net(), x).load().plan
    for plan in (everything, on_the_cpu):
        assert 0 < plan.feature_map_bytes == plan.lower_bound_bytes
    assert everything.feature_map_bytes < everything.unshared_bytes / 2
    assert on_the_cpu.unshared_bytes <= everything.unshared_bytes


def test_feature_map_of_an_unrolled_lstm():
    plan = captured(UnrolledLstm(), torch.randn(1, 16, 128)).load().plan
    assert plan.lower_bound_bytes <= plan.feature_map_bytes <= 1.02 * plan.lower_bound_bytes
    assert plan.feature_map_bytes < plan.unshared_bytes / 10
