"""Cases of ranks that each load a stage of one training step; any number of ranks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import end_here, main
from torch import nn
from torch.nn import functional
from training import same_bits

import offload
from offload.plan.rank_orders import RankOrder
from offload.program import Role

TIMEOUT_S = 120  # ranks record and load at different speeds
SHORT_TIMEOUT_S = 8
N_STEPS = 5
ROWS, SIZE = 6, 16
CASES: dict[str, Callable[[], Any]] = {}
ENDING: dict[str, Callable[[], Any]] = {}
SCHEDULES = ("1F1B", "GPipe")

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it, in the order of this file."""
    CASES[function.__name__] = function
    return function


def ending(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have the ranks run it alone, as it breaks the groups."""
    ENDING[function.__name__] = function
    return function


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


@case
def bits() -> Any:
    """Optimizers and numbers of micro-batches, under both schedules."""
    sizes = {"sgd": (1, 5), "adamw": (2,), "adamw, fused": (5,)}
    return {
        f"{name}, {n_micro_batches}": compared(mlp, optimizer, n_micro_batches)
        for name, optimizer in OPTIMIZERS.items()
        for n_micro_batches in sizes.get(name, (4,))
    }


@case
def clipped() -> Any:
    """Clipping by the norm of all gradients; gradients that each step makes anew."""
    return {
        f"{name}, {drops}": compared(mlp, OPTIMIZERS[name], 4, norm=0.1, drops=drops)
        for name, drops in (("sgd", True), ("adamw, foreach", False), ("adamw, fused", True))
    }


@case
def running_statistics() -> Any:
    """Batch normalization, whose statistics each micro-batch writes in place."""
    return {"sgd": compared(normalized, OPTIMIZERS["sgd"], 3)}


@case
def of_gpt() -> Any:
    """Blocks of a GPT, also where the embedding and the head share their weight."""
    return {
        f"tied={tied}": compared(lambda tied=tied: gpt(tied=tied), OPTIMIZERS["adamw, foreach"], 4)
        for tied in (False, True)
    }


@case
def with_dropout() -> Any:
    """A GPT with dropout, one whose embedding is its head, and other draws."""
    adamw = OPTIMIZERS["adamw, foreach"]
    return {
        "gpt, 1": compared(lambda: gpt(p=0.3), adamw, 1),
        "gpt, 4": compared(lambda: gpt(p=0.3), adamw, 4, norm=0.1),
        "gpt, tied, 3": compared(lambda: gpt(tied=True, p=0.1), OPTIMIZERS["sgd, foreach"], 3),
        "noisy, 2": compared(noisy, OPTIMIZERS["adamw, fused"], 2),
    }


@case
def with_scaler() -> Any:
    """A GradScaler, whose scale grows, and whose check passes from rank to rank."""
    return {"adamw, fused": compared(mlp, OPTIMIZERS["adamw, fused"], 3, scales=True)}


@case
def refused() -> Any:
    """Refusals say what to do, on all ranks, before anything is loaded."""
    n_ranks = dist.get_world_size()
    captured = Twin(mlp(), OPTIMIZERS["sgd"]).captured(2)
    sampling = Twin(nn.Sequential(mlp(), Sampling()), OPTIMIZERS["sgd"]).captured(2)
    small = Twin(nn.Sequential(nn.Linear(SIZE, SIZE)), OPTIMIZERS["sgd"]).captured(2)
    run = captured.load(pipeline=offload.Pipeline())
    n_executions = run.run.last_execution.n_executions
    given: Any = (torch.ones(2, ROWS, SIZE), torch.ones(3, ROWS, SIZE))
    found = {
        "random": told(lambda: sampling.load(pipeline=offload.Pipeline())),
        "small": told(lambda: small.load(pipeline=offload.Pipeline())),
        "number": told(lambda: captured.load(pipeline=offload.Pipeline(3))),
        "schedule": told(lambda: captured.load(pipeline=offload.Pipeline(schedule="2F2B"))),
        "begins": told(lambda: captured.load(pipeline=offload.Pipeline(begins=["0"]))),
        "no list": told(lambda: captured.load(pipeline=offload.Pipeline(begins=nn.Linear(2, 2)))),
        "foreign": told(
            lambda: captured.load(pipeline=offload.Pipeline(begins=[nn.Linear(2, 2)] * n_ranks))
        ),
        "lanes": told(lambda: captured.load(pipeline=offload.Pipeline(), lanes=2)),
        "arguments": told(lambda: run(*given)),
    }
    assert run.run.last_execution.n_executions == n_executions
    batch = Twin(mlp(), OPTIMIZERS["sgd"]).batch(2, 7)
    return [found, run.is_last, stepped(run, *batch) is not None]


@case
def other_steps() -> Any:
    """Ranks with other numbers of micro-batches."""
    captured = Twin(mlp(), OPTIMIZERS["sgd"]).captured(2 + dist.get_rank())
    return told(lambda: captured.load(pipeline=offload.Pipeline()))


@case
def given_cut() -> Any:
    """A stage that begins with a given module; parameters keep their place in each rank."""
    model = mlp()
    twin = Twin(model, OPTIMIZERS["adamw, foreach"])
    captured = twin.captured(2)
    begins = [model[2 * number] for number in range(1, dist.get_world_size())]
    run = captured.load(pipeline=offload.Pipeline(begins=begins))
    before = {name: one.clone() for name, one in model.named_parameters()}
    stepped(run, *twin.batch(2, 3))
    changed = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    return sorted({name.split(".")[0] for name in changed})


@ending
def killed() -> Any:
    """The last rank ends between two steps."""
    twin = Twin(mlp(), OPTIMIZERS["sgd"])
    run = twin.captured(4).load(pipeline=offload.Pipeline())
    stepped(run, *twin.batch(4, 1))
    if run.is_last:
        end_here()
    return told(lambda: [stepped(run, *twin.batch(4, 1)) for _ in range(100)])


@ending
def failing_in_the_middle() -> Any:
    """The second micro-batch of the second step fails on the first rank; it calls again."""
    twin = Twin(gpt(), OPTIMIZERS["sgd"])
    run = twin.captured(2).load(pipeline=offload.Pipeline())
    xs, targets = twin.batch(2, 1)
    beyond = torch.stack([xs[0], xs[1] + 11])
    return [told(lambda given=given: stepped(run, given, targets)) for given in (xs, beyond, xs)]


@ending
def hung() -> Any:
    """The last rank does not call."""
    twin = Twin(mlp(), OPTIMIZERS["sgd"])
    run = twin.captured(4).load(pipeline=offload.Pipeline())
    stepped(run, *twin.batch(4, 1))
    store = dist.distributed_c10d._get_default_store()
    if run.is_last:
        store.wait(["told"], timedelta(seconds=120))
        return None
    found = told(lambda: stepped(run, *twin.batch(4, 1)))
    store.set("told", "")
    return found


def begin() -> None:
    """Meet the other ranks."""
    is_ending = not ENDING.keys().isdisjoint(sys.argv)
    timeout_s = SHORT_TIMEOUT_S if is_ending else TIMEOUT_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


if __name__ == "__main__":
    main(CASES | ENDING if len(sys.argv) > 2 else CASES, begin, lambda: None)
