"""Steps with the loss of connectionist temporal classification, whose lengths are numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from training import captured_step, check, simple_step

import offload

LENGTHS = (10, 8), (3, 2)
AS = {"numbers": lambda one: one, "lists": list, "tensors": torch.tensor}


def loss_of(lengths, options):
    def loss(y, target):
        first, second = map(AS[lengths], LENGTHS)
        return functional.ctc_loss(y.log_softmax(-1), target, first, second, **options)

    return loss


def batches():
    return [(torch.randn(10, 2, 8), torch.randint(1, 5, (2, 3))) for _ in range(3)]


@pytest.mark.parametrize("lengths", AS)
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"reduction": "mean", "zero_infinity": True}]
)
def test_steps_with_lengths(lengths, options):
    def make_step(model, optimizer):
        return simple_step(model, optimizer, loss_of(lengths, options))

    check(nn.Linear(8, 5), torch.optim.AdamW, make_step, batches(), n_steps=6)


def named(y, target, first, second):
    given = {"log_probs": y, "targets": target, "input_lengths": first, "target_lengths": second}
    return functional.ctc_loss(**given)


@pytest.mark.parametrize("make", [nn.CTCLoss, lambda: torch.ctc_loss, lambda: named])
def test_the_module_and_other_functions(make):
    loss = make()

    def call(y, target):
        return loss(y.log_softmax(-1), target, *LENGTHS)

    with torch.no_grad():
        y = torch.randn(10, 2, 5)
        target = torch.randint(1, 5, (2, 3))
        run = offload.capture(call, y, target).load()
        for _ in range(3):
            y = torch.randn(10, 2, 5)
            assert torch.equal(run(y, target), call(y, target))


def test_one_sequence_alone():
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(y, target):
        return functional.ctc_loss(y.log_softmax(-1), target, (10,), (3,))

    x, target = torch.randn(10, 8), torch.tensor([1, 3, 2])
    captured = captured_step(simple_step(model, optimizer, loss), x, target)
    expected = loss(model(x), target).detach()
    assert torch.equal(captured.load()(x, target), expected)
