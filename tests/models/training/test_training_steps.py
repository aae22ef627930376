"""Training steps, recorded once: 20 steps with eager's bits in all that a step leaves."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from nets import ResNet18
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Batch, Side, adamw, batches, check, mlp, mse_step, simple_step

import offload
from models import Block


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def foreach_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def classify_step(model, optimizer):
    return simple_step(model, optimizer, F.cross_entropy)


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, adamw, fused_adamw, foreach_adamw])
@pytest.mark.parametrize("layers", [(), (nn.BatchNorm1d(16),), (nn.Dropout(0.3),)])
def test_small_nets(optimizer, layers):
    check(mlp(*layers), optimizer, mse_step, batches())


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Mish])
def test_kernels_that_could_be_decomposed_are_those_of_eager(activation):
    """Their gradients have kernels and decompositions with different rounding."""
    check(mlp(activation()), sgd, mse_step, batches())


def test_a_residual_net():
    given = [(torch.randn(2, 3, 32, 32), torch.randint(10, (2,))) for _ in range(3)]
    check(ResNet18(), sgd, classify_step, given)


@pytest.mark.parametrize("optimizer", [adamw, foreach_adamw])
def test_gpt_blocks(optimizer):
    given = [(torch.randn(2, 8, 32), torch.randn(2, 8, 32)) for _ in range(3)]
    check(nn.Sequential(Block(32, 4), Block(32, 4)), optimizer, mse_step, given)


@pytest.mark.slow
def test_a_bert_classifier():
    """Its masks are read on the host, except where it is told that it is being compiled."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=100,
        max_position_embeddings=32,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config).train()

    def make_step(model, optimizer):
        def step(ids, mask, labels):
            optimizer.zero_grad()
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    mask = torch.ones(2, 9, dtype=torch.long)
    given = [(torch.randint(100, (2, 9)), mask, torch.randint(3, (2,))) for _ in range(3)]
    captured = check(model, adamw, make_step, given)
    assert "it gives the same bits as otherwise" in captured.explain()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.LSTM(16, 24, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.layer(self.embed(x))[0][:, -1])


def sequences() -> list[Batch]:
    return [(torch.randint(50, (3, 7)), torch.randint(5, (3,))) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's own, about the flags
def test_a_recurrent_net():
    with torch.backends.mkldnn.flags(enabled=False):
        check(Recurrent(), adamw, classify_step, sequences())


def test_a_recurrent_kernel_that_asks_for_the_grad_mode_is_refused():
    model = Recurrent()
    step = classify_step(model, sgd(model.parameters()))
    with pytest.raises(offload.CaptureError, match=r"mkldnn_rnn_layer.*flags\(enabled=False\)"):
        offload.capture(step, *sequences()[0], training=True)


class Tied(nn.Module):
    """A weight that is used twice, a learned number, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.head(torch.tanh(self.embed(x))) * self.scale).flatten(0, 1)


@pytest.mark.parametrize("optimizer", [adamw, foreach_adamw, sgd])
def test_tied_weights_and_parameters_without_gradients(optimizer):
    given = [(torch.randint(20, (2, 5)), torch.randint(20, (10,))) for _ in range(3)]
    check(Tied(), optimizer, classify_step, given)


# ---- steps ---------------------------------------------------------------------------------------


def clipped(model, optimizer):
    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach(), norm

    return step


def clipped_by_value(model, optimizer):
    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        return loss  # with its history, which executions and the capture leave out

    return step


def accumulated(model, optimizer):
    def step(x, target):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
            loss = F.mse_loss(model(part), wanted) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step


def zeros_kept(model, optimizer):
    def step(x, target):
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def dropped_at_the_end(model, optimizer):
    def step(x, target):
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def in_bfloat16(model, optimizer):
    def step(x, target):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def step(x, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), scaler._scale

    return step


def of_two_losses(model, optimizer):
    def step(x, target):
        optimizer.zero_grad()
        y = model(x)
        F.mse_loss(y, target).backward(retain_graph=True)
        F.l1_loss(y, target).backward()
        optimizer.step()
        return y.detach()

    return step


STEPS = [
    clipped,
    clipped_by_value,
    accumulated,
    zeros_kept,
    dropped_at_the_end,
    in_bfloat16,
    scaled,
    of_two_losses,
]


@pytest.mark.parametrize("make_step", STEPS)
@pytest.mark.parametrize("n_before", [0, 2])
def test_steps(make_step, n_before):
    """The first step makes gradients and state: it is executed, and the next one recorded."""
    check(mlp(), fused_adamw, make_step, batches(), n_before=n_before)


def test_gradients_that_are_dropped_between_steps():
    def make_step(model, optimizer):
        def step(x, target):
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def drop(side: Side, number: int) -> None:
        side.optimizer.zero_grad()

    check(mlp(), adamw, make_step, batches(), between=drop)
    check(mlp(), adamw, make_step, batches())  # they accumulate


@pytest.mark.parametrize("preserve_rng_state", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(preserve_rng_state, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            self.last = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4))

        def forward(self, x):
            y = checkpoint(
                self.inner,
                self.first(x),
                use_reentrant=use_reentrant,
                preserve_rng_state=preserve_rng_state,
            )
            return self.last(y)

    check(Checkpointed(), adamw, mse_step, batches())


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_scheduler_between_steps_writes_a_learning_rate_that_is_a_tensor(make):
    schedulers = {}

    def make_step(model, optimizer):
        schedulers[id(optimizer)] = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return mse_step(model, optimizer)

    def step(side: Side, number: int) -> None:
        schedulers[id(side.optimizer)].step()

    check(
        mlp(),
        lambda parameters: make(parameters, lr=torch.tensor(0.1), fused=True),
        make_step,
        batches(),
        between=step,
    )


def test_two_optimizers():
    def make_step(model, optimizer):
        other = torch.optim.SGD(model[2].parameters(), lr=0.01)

        def step(x, target):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            other.step()
            return loss.detach()

        return step

    check(mlp(), adamw, make_step, batches())


def test_a_step_that_is_a_method():
    class Trainer:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def step(self, x, target):
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), target)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    check(mlp(), adamw, lambda *given: Trainer(*given).step, batches())


def test_a_step_that_is_made_for_the_user():
    model = mlp()
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    given = batches()
    captured = offload.capture_training(model, F.mse_loss, optimizer, given[0])
    step = zeros_kept(twin, other)
    assert torch.equal(captured.recorded_result, step(*given[0]))
    run = captured.load()
    loss = torch.empty(())
    for batch in given[1:]:
        assert run(*batch, out=loss) is loss
        assert torch.equal(loss, step(*batch))
    for one, same in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, same)
        assert torch.equal(optimizer.state[one]["exp_avg_sq"], other.state[same]["exp_avg_sq"])
    for example in (given[0][0], given[0][:1]):
        with pytest.raises(offload.CaptureError, match="then the target"):
            offload.capture_training(model, F.mse_loss, optimizer, example)


def test_tickets_train_in_their_order():
    model = mlp()
    twin = copy.deepcopy(model)
    ours = mse_step(model, fused_adamw(model.parameters()))
    eager = mse_step(twin, fused_adamw(twin.parameters()))
    given = batches()
    run = offload.capture(ours, *given[0], training=True).load()
    expected = [eager(*batch) for batch in (given[0], *given)]
    tickets = [run.submit(*batch) for batch in given]
    assert [float(one.result()) for one in tickets] == [float(one) for one in expected[1:]]
