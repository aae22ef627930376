"""Recurrent layers of packed sequences, whose lengths are read on the host."""

from __future__ import annotations

import pytest
import torch
from checks import assert_same, check, normal, normals, refusal
from torch import nn

import offload


class PackedLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.lstm(packed)[0].data


def test_packed_sequences():
    """The kernels read the lengths themselves: lengths of equal shapes must be distinguished."""
    model = PackedLSTM().eval()
    x = normal(3, 4, 3)
    assert "host" in refusal(model, x, torch.tensor([4, 2, 2]))
    with torch.no_grad(), offload.capture(model, host_reads="guard") as captured:
        model(x, torch.tensor([4, 2, 2]))
    y = normal(3, 4, 3)
    with torch.no_grad():
        expected = model(y, torch.tensor([4, 2, 2]))
    assert_same(captured(y, torch.tensor([4, 2, 2])), expected, tolerance=1e-6)
    with pytest.raises(offload.BindingError):
        captured(y, torch.tensor([4, 3, 1]))


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_packed_kernels(kind):
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    weights = [normal(4 * gates, 3), normal(4 * gates, 4), normal(4 * gates), normal(4 * gates)]

    def function(data, sizes):
        state = torch.zeros(1, 2, 4)
        hidden = [state, state] if kind == "lstm" else state
        call = getattr(torch._VF, kind)
        return call(data, sizes, hidden, weights, True, 1, 0.0, False, False)[0]

    assert "host" in refusal(function, normal(4, 3), torch.tensor([2, 1, 1]))


BY_KEYWORD = {
    "params": torch.gru,
    "hx": lambda data, sizes, state, **rest: torch.gru(data, sizes, hx=state, **rest),
    "all": lambda data, sizes, state, **rest: torch.gru(
        data=data, batch_sizes=sizes, hx=state, **rest
    ),
}


@pytest.mark.parametrize("kind", BY_KEYWORD)
def test_packed_kernels_by_keyword(kind):
    options = {
        "params": [normal(12, 3), normal(12, 4), normal(12), normal(12)],
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": False,
        "bidirectional": False,
    }

    def function(data, sizes):
        return BY_KEYWORD[kind](data, sizes, torch.zeros(1, 2, 4), **options)[0]

    assert "host" in refusal(function, normal(4, 3), torch.tensor([2, 1, 1]))


def test_layers_of_plain_sequences_by_keyword_read_nothing():
    """Arguments by keyword, so that a state or the parameters may come third, or nothing."""
    weights = [normal(12, 3), normal(12, 4), normal(12), normal(12)]
    options = {
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": False,
        "bidirectional": False,
        "batch_first": True,
    }

    def third(x):
        return torch.gru(x, torch.zeros(1, 2, 4), weights, **options)[0]

    def none_third(x):
        return torch.gru(x, hx=torch.zeros(1, 2, 4), params=weights, **options)[0]

    for function in (third, none_third):
        check(function, *normals(2, 2, 5, 3), tolerance=1e-6)
