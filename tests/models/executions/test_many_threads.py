"""Threads that draw, train, run eager, compile and capture at once, against each of them alone.

Each job gives the same bits at every repetition; threads repeat their jobs concurrently.
`OFFLOAD_STRESS_SECONDS` sets the duration.
"""

from __future__ import annotations

import collections
import copy
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import offload

pytestmark = [pytest.mark.usefixtures("compiler_reset", "quick_switches"), pytest.mark.slow]

SECONDS = float(os.environ.get("OFFLOAD_STRESS_SECONDS", "3"))

Job = Callable[[], list[torch.Tensor]]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads switch ten times as often as by default."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 10)
    yield
    sys.setswitchinterval(interval)


class Texts:
    """Inputs of growing lengths, from a separate generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, length: int) -> torch.Tensor:
        return torch.randint(32, (2, length), generator=self._generator)


# ---- jobs of threads -----------------------------------------------------------------------------


def draws_of_its_own() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(50, generator=generator) for _ in range(200)]


def default_draws() -> list[torch.Tensor]:
    """For one thread at a time: other draws from this generator would change its numbers."""
    torch.manual_seed(11)
    drawn = [torch.rand(50) for _ in range(200)]
    dropped = [nn.functional.dropout(torch.ones(50)) for _ in range(50)]
    return [*drawn, *dropped, torch.get_rng_state()]


def training(initial: nn.Module) -> Job:
    def train() -> list[torch.Tensor]:
        model, texts = copy.deepcopy(initial).train(), Texts(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(20):
            loss = model(texts.of(5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(one.detach() for one in model.parameters())]

    return train


def inference(model: Callable[..., torch.Tensor], seed: int, n_lengths: int) -> Job:
    """Calls of a model, eager or compiled, with changing lengths."""

    def infer() -> list[torch.Tensor]:
        texts = Texts(seed)
        with torch.no_grad():
            return [model(texts.of(3 + turn % n_lengths)) for turn in range(4 * n_lengths)]

    return infer


def captures(model: nn.Module, seed: int) -> Job:
    """Recordings, loads and executions; results of executions are also eager's."""

    def capture() -> list[torch.Tensor]:
        texts, results = Texts(seed), []
        for length in (3, 5):
            captured = offload.capture(model, texts.of(length))
            with captured.load() as run:
                for _ in range(3):
                    text = texts.of(length)
                    results += [run(text), run.submit(text).result()]
        return results

    return capture


# ---- at once, and alone -------------------------------------------------------------------------


def differing(got: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    pairs = zip(got, expected, strict=True)
    wrong = [number for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    return f"{len(wrong)} of {len(expected)} results differ" if wrong else ""


def at_once(jobs: dict[str, Job]) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Run the jobs alone, then at once until the time is over, each at least twice.

    Returns:
        How often each ran at once, and the failures with their job numbers.
    """
    alone = {name: job() for name, job in jobs.items()}
    done: collections.Counter[str] = collections.Counter()
    failures: collections.Counter[str] = collections.Counter()
    begin, until = threading.Barrier(len(jobs)), time.monotonic() + SECONDS

    def repeat(name: str) -> None:
        begin.wait()
        while done[name] < 2 or time.monotonic() < until:
            try:
                wrong = differing(jobs[name](), alone[name])
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                failures[f"{name}: {wrong}"] += 1
            done[name] += 1

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(repeat, jobs))
    return done, failures


def assert_as_alone(jobs: dict[str, Job]) -> None:
    done, failures = at_once(jobs)
    assert not failures
    assert min(done[name] for name in jobs) >= 2
    assert not torch.compiler.is_compiling()


@pytest.fixture
def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()


@pytest.fixture
def encoder() -> nn.Module:
    """Takes another path, with other bits, where told that it is watched or compiled."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(32, 8), layers).eval()


def compiled(model: nn.Module, backend: str) -> Callable[..., torch.Tensor]:
    """Compiled for any length, before other threads come: torch compiles once for each of those."""
    run = torch.compile(copy.deepcopy(model), backend=backend, dynamic=True)
    inference(run, 0, 2)()
    return run


def test_train_draw_and_run_eager_while_one_thread_captures(words):
    """Of models that no other thread calls."""
    assert_as_alone(
        {
            "draws of its own": draws_of_its_own,
            "training": training(words),
            "eager": inference(words, 5, 3),
            "captures": captures(copy.deepcopy(words), 6),
        }
    )


@pytest.mark.filterwarnings("ignore:this compiled graph was captured:RuntimeWarning")
def test_train_draw_and_run_eager_while_others_compile(words):
    assert_as_alone(
        {
            "draws of its own": draws_of_its_own,
            "training": training(words),
            "eager": inference(words, 5, 3),
            "compiled by torch": inference(compiled(words, "eager"), 8, 12),
            "compiled by offload": inference(compiled(words, "offload"), 9, 12),
            "beside it": inference(compiled(words, "offload"), 10, 20),
        }
    )


def test_two_threads_train_and_draw_while_a_program_is_executed_by_others(encoder, words):
    run = offload.capture(encoder, Texts(0).of(4)).load()

    def executions(seed: int) -> Job:
        def execute() -> list[torch.Tensor]:
            texts = Texts(seed)
            given = [texts.of(4) for _ in range(40)]
            tickets = [run.submit(text) for text in given[::2]]
            return [*map(run, given), *(ticket.result() for ticket in tickets)]

        return execute

    assert_as_alone(
        {
            "training": training(words),
            "default draws": default_draws,
            "eager": inference(encoder, 4, 3),
            **{f"executions {seed}": executions(seed) for seed in range(4)},
        }
    )


def test_everything_at_once(words, encoder):
    """Other threads call the captured models meanwhile."""
    assert_as_alone(
        {
            "draws of its own": draws_of_its_own,
            "default draws": default_draws,
            "training": training(words),
            "eager words": inference(words, 5, 3),
            "eager encoder": inference(encoder, 4, 3),
            "captures of words": captures(words, 6),
            "captures of the encoder": captures(encoder, 7),
            "compiled by torch": inference(compiled(words, "eager"), 8, 12),
            "compiled by offload": inference(compiled(words, "offload"), 9, 12),
        }
    )


@pytest.mark.parametrize("beside", ["words", "encoder"])
def test_captures_in_two_threads_beside_eager_calls_of_the_same_model(request, beside):
    model = request.getfixturevalue(beside)
    assert_as_alone(
        {
            "eager": inference(model, 5, 3),
            "captures": captures(model, 6),
            "others": captures(model, 7),
        }
    )


def test_captures_beside_draws_from_the_default_generator(words):
    assert_as_alone({"draws": default_draws, "captures": captures(words, 6)})


def test_the_first_execution_on_a_thread_has_eagers_bits():
    """Torch sets a thread's library threads late; their sums differ."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.Softmax(-1), torch.nn.Linear(32, 16)
    model = torch.nn.Sequential(*layers).eval()
    differing = []

    def work(size):
        x = torch.randn(2, size, 16)
        with torch.no_grad(), captures[size].load() as run:
            first = run(x)
            differing.extend([size] * (not torch.equal(first, model(x))))

    try:
        with torch.no_grad():
            captures = {
                size: offload.capture(model, torch.randn(2, size, 16)) for size in (3, 5, 8)
            }
        threads = [threading.Thread(target=work, args=(size,)) for size in (3, 5, 8) * 6]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(n_threads)
    assert not differing
