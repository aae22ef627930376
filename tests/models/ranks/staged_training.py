"""Models and steps that ranks train in stages, compared with one process bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from training import same_bits

import offload
from offload.plan.rank_orders import RankOrder
from offload.program import Role

ROWS, SIZE = 6, 16
N_STEPS = 5
SCHEDULES = ("1F1B", "GPipe")
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def told(call: Callable[[], object]) -> tuple[str, str]:
    """Return how a call failed."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


class Block(nn.Module):
    """A block of a GPT: attention and a feedforward, each beside its input."""

    def __init__(self, size: int, n_heads: int, p: float) -> None:
        super().__init__()
        self.n_heads, self.p, self.dropout = n_heads, p, nn.Dropout(p)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, size = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        heads = [one.view(rows, tokens, self.n_heads, -1).transpose(1, 2) for one in parts]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=self.p)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(rows, tokens, size)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class SmallGpt(nn.Module):
    """Blocks of a GPT between an embedding and a head, which may share their weight.

    `p`: of the dropout behind the embedding, of attention, and behind attention and feedforward.
    """

    def __init__(self, n_blocks: int, *, tied: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)
        self.tokens, self.places = nn.Embedding(11, SIZE), nn.Embedding(8, SIZE)
        self.blocks = nn.ModuleList(Block(SIZE, 2, p) for _ in range(n_blocks))
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(SIZE, SIZE), nn.Tanh())]
    return nn.Sequential(*layers)


class Noisy(nn.Module):
    """Noise on activations, and a draw that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rand(SIZE)
        torch.randperm(7)
        for layer in self.layers:
            x = layer(x) + scale * torch.randn_like(x)
        return x


def noisy() -> nn.Module:
    return Noisy()


class Sampling(nn.Module):
    """Probabilities that only one rank has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(torch.sigmoid(x.detach()))


def normalized() -> nn.Module:
    """Each micro-batch changes the running statistics."""
    torch.manual_seed(0)
    kinds = (nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.ReLU(inplace=True))
    return nn.Sequential(*(copy.deepcopy(one) for _ in range(4) for one in kinds))


def gpt(*, tied: bool = False, p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return SmallGpt(3, tied=tied, p=p)


class Twin:
    """A model with its optimizer, and a step over micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        *,
        norm: float = 0.0,
        drops: bool = False,
        scales: bool = False,
    ) -> None:
        self.model, self.norm, self.drops = model, norm, drops
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2, enabled=scales)
        self.optimizer = optimizer(model.parameters())

    def step(self, xs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: Any = 0
        for x, target in zip(xs.unbind(0), targets.unbind(0), strict=True):
            one = self.loss(self.model(x), target) / len(xs)
            self.scaler.scale(one).backward()
            loss += one.detach()
        if self.norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.drops)
        return loss

    @staticmethod
    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.is_floating_point():
            return functional.mse_loss(y, target)
        return functional.cross_entropy(y, target.flatten())

    def captured(self, n_micro_batches: int) -> offload.Captured:
        torch.manual_seed(1)
        captured = offload.capture(self.step, *self.batch(n_micro_batches, 0), training=True)
        assert isinstance(captured, offload.Captured)
        return captured

    def batch(self, n_micro_batches: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(seed)
        if isinstance(self.model, SmallGpt):
            shape = (n_micro_batches, ROWS, 8)
            ids, targets = (torch.randint(11, shape, generator=draws) for _ in range(2))
            return ids, targets
        shape = (n_micro_batches, ROWS, SIZE)
        x, target = (torch.randn(shape, generator=draws) for _ in range(2))
        return x, target

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, buffers, gradients, and the state of the optimizer and of the scaler."""
        if self.scaler.is_enabled():
            yield "scale", self.scaler._scale
            yield "growth", self.scaler._growth_tracker
        yield from self.model.state_dict().items()
        for name, one in self.model.named_parameters():
            if one.grad is not None:
                yield f"{name}.grad", one.grad
            for key, item in self.optimizer.state.get(one, {}).items():
                if isinstance(item, torch.Tensor):
                    yield f"{name}: {key}", item


def stepped(run: Any, *batch: torch.Tensor) -> Any:
    return run(*batch) if run.number == 0 else run()


def compared(
    make: Callable[[], nn.Module], optimizer: MakeOptimizer, n_micro_batches: int, **options: Any
) -> dict[str, Any]:
    """Compare a step in stages with the captured step on one process, bit by bit."""
    alone, ours = (Twin(make(), optimizer, **options) for _ in range(2))
    expected = alone.captured(n_micro_batches).load()
    captured = ours.captured(n_micro_batches)
    found = {}
    for schedule in SCHEDULES:
        before = torch.get_rng_state()
        run = captured.load(pipeline=offload.Pipeline(n_micro_batches, schedule=schedule))
        wrong: list[str] = []
        wrong += ["the load has drawn"] * (not torch.equal(before, torch.get_rng_state()))
        own = {
            captured.bound.bindings.weights[value][0].untyped_storage()._cdata
            for value, stage in run.stages.keepers.items()
            if stage == run.number
        }
        is_random = captured.program.is_random
        for number in range(N_STEPS):
            batch = ours.batch(n_micro_batches, 1 + number)
            torch.manual_seed(number)
            loss, after = expected(*batch), torch.get_rng_state()
            torch.manual_seed(number if run.number == 0 else 100 + run.number)
            result = stepped(run, *batch)
            if is_random and not torch.equal(after, torch.get_rng_state()):
                wrong.append(f"step {number}: the generator")
            if run.is_last != (result is not None) or (run.is_last and not same_bits(loss, result)):
                wrong.append(f"step {number}: the loss {result}, expected {loss}")
            theirs = dict(alone.state())
            for name, one in ours.state():
                if one.untyped_storage()._cdata in own and not same_bits(one, theirs[name]):
                    wrong.append(f"step {number}: {name}")
        run.gather_state()
        theirs, mine = dict(alone.state()), dict(ours.state())
        wrong += [f"gathered: {name}" for name in mine if not same_bits(mine[name], theirs[name])]
        wrong += ["names"] * (mine.keys() != theirs.keys())
        whole = captured.bound.program
        found[schedule] = {
            "wrong": wrong,
            "n_own": len(own),
            "n_written": len(run.stages.keepers),
            "weight_bytes": run.weight_bytes,
            "whole_bytes": sum(one.size_bytes for one in whole.of_role(Role.WEIGHT)),
            "shared_bytes": sum(
                one.size_bytes
                for one in whole.of_role(Role.WEIGHT)
                if one.index not in run.stages.keepers or one.size_bytes <= 8
            ),
            "memory": [one.micro_batches for one in run.stages.memory],
            "explained": f"stage {run.number} of {dist.get_world_size()}, {schedule}"
            in run.explain(),
            "n_draws": [n_draws(one) for one in run.stages.orders],
            "explained_draws": "random numbers: " in run.explain(),
            "launches": [len(one.works) for one in run.stages.orders],
        }
        run.close()
    return found


def n_draws(order: RankOrder) -> int:
    return sum(work.launch.random for work in order.works)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, foreach=False),
    "sgd, foreach": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda of: torch.optim.AdamW(of, lr=1e-2, foreach=False),
    "adamw, foreach": lambda of: torch.optim.AdamW(of, lr=1e-2, foreach=True),
    "adamw, fused": lambda of: torch.optim.AdamW(of, lr=1e-2, fused=True),
}
