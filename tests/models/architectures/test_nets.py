"""Convolutional and recurrent nets: captured once, the model dropped, replayed on other values."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from families import N_REPLAYS, assert_close, replay_without_model, tokens
from nets import GoogLeNet, ResNet18, UNet, images, images_channels_last
from torch import nn

import offload


@pytest.mark.parametrize("make", [images, images_channels_last])
@pytest.mark.parametrize("net", [ResNet18, GoogLeNet, UNet])
def test_convolutional_nets(net, make):
    replay_without_model(net, make)


@pytest.mark.parametrize("net", [ResNet18, GoogLeNet, UNet])
def test_convolutional_nets_in_training(net):
    """Batch statistics, running statistics and dropout, from the same seed as eager."""
    model = net().train()
    twin = copy.deepcopy(model)
    with torch.no_grad(), offload.capture(model) as captured:
        torch.manual_seed(0)
        model(**images(0))
        torch.manual_seed(0)
        twin(**images(0))
    for turn in range(1, N_REPLAYS):
        torch.manual_seed(turn)
        got = captured(**images(turn))
        torch.manual_seed(turn)
        with torch.no_grad():
            expected = twin(**images(turn))
        assert_close(got, expected)
        assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.cell = cell(16, 12, num_layers=2, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 5)

    def forward(self, input_ids, attention_mask):
        embedded = self.embed(input_ids) * attention_mask[..., None]
        outputs, state = self.cell(embedded)
        return self.head(outputs), state


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets(cell, bidirectional):
    model = partial(Recurrent, cell, batch_first=True, bidirectional=bidirectional)
    replay_without_model(model, tokens)


def test_unrolled_cells():
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTMCell(8, 12), nn.LSTMCell(12, 12)

        def forward(self, x):
            states = [(x.new_zeros(2, 12), x.new_zeros(2, 12)) for _ in range(2)]
            outputs = []
            for step in x.unbind(1):
                states[0] = self.first(step, states[0])
                states[1] = self.second(states[0][0], states[1])
                outputs.append(states[1][0])
            return torch.stack(outputs, 1), states

    def make(turn):
        return {"x": torch.empty(2, 6, 8).normal_(generator=torch.Generator().manual_seed(turn))}

    replay_without_model(Unrolled, make)
