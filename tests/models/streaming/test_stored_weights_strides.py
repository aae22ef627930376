"""Strides that are never used: fake kernels set them differently from real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import floor_of
from stored import save_weights, without_memory
from torch import nn
from torch.nn import functional

import offload
from offload.interpreter.eager_run import EagerRun
from offload.program import same_strides


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, 192)
        self.output = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        heads = [
            one.unflatten(-1, (4, 16)).transpose(1, 2) for one in self.query(x).chunk(3, dim=-1)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2)), attended


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        normed = self.norm(self.first(x))
        return self.last(functional.silu(normed)), normed


def image(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8).to(memory_format=torch.channels_last)


CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "one token": (Attention, lambda: torch.randn(1, 1, 64)),
    "one token for each of two": (Attention, lambda: torch.randn(2, 1, 64)),
    "two tokens": (Attention, lambda: torch.randn(1, 2, 64)),
    "one image": (Convolving, lambda: image(1)),
    "two images": (Convolving, lambda: image(2)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any, torch.Tensor]:
    """A model in memory, a capture of it with weights in files, and an input."""
    build, make = CASES[request.param]
    model, given = build().eval(), make()
    save_weights(model, tmp_path)
    return model, offload.capture(without_memory(build), make(), weights=tmp_path), given


def test_one_token_and_one_image_are_executed(case: Any) -> None:
    model, captured, given = case
    with torch.no_grad():
        expected = model(given)
    for budget in (floor_of(captured), None):
        with captured.load(weights_budget=budget) as run:
            plan = run.streaming.plan
            assert not plan.estimated or plan.is_resident, "launches were timed"
            for got, wanted, recorded in zip(
                run(given), expected, captured.program.results, strict=True
            ):
                torch.testing.assert_close(got, wanted)
                assert got.stride() == recorded.view.strides
                assert same_strides(got.shape, got.stride(), wanted.stride())


def test_a_warm_up_takes_strides_that_are_never_used(case: Any) -> None:
    """As on devices that capture real launches of a recording under fake tensors."""
    model, captured, given = case
    program, state = captured.program, model.state_dict()
    bases = {
        index: (state[one.name].clone().untyped_storage(), 0)
        for index, one in captured.bindings.stored.items()
    }
    bases |= {view.value: (given.clone().untyped_storage(), 0) for view in program.inputs}
    run = EagerRun(captured.bound, bases, None)
    with torch.no_grad():
        for launch in program.launches:
            run.keep(launch, run.call(launch)())
        for result, wanted in zip(program.results, model(given), strict=True):
            torch.testing.assert_close(run.tensor(result.view), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("n_tokens", [1, 2])
def test_a_step_of_gpt2_is_executed(tmp_path: Path, n_tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.arange(n_tokens)[None] + 5
    captured = offload.capture(
        transformers.GPT2LMHeadModel(config).eval(), tokens, use_cache=False, weights=tmp_path
    )
    with captured.load(weights_budget=floor_of(captured)) as run, torch.no_grad():
        assert run.streaming.plan.transfers
        assert not run.streaming.plan.estimated
        got = run(tokens, use_cache=False).logits
        torch.testing.assert_close(got, model(tokens, use_cache=False).logits)


@pytest.mark.parametrize(
    ("shape", "one", "other", "expected"),
    [
        ((2, 3), (3, 1), (3, 1), True),
        ((2, 3), (3, 1), (1, 2), False),
        ((2, 1), (1, 1), (1, 7), True),
        ((1, 3), (9, 1), (3, 2), False),
        ((0, 3), (3, 1), (1, 1), True),
        ((), (), (), True),
    ],
)
def test_only_strides_that_are_used_count(shape, one, other, expected) -> None:
    assert same_strides(shape, one, other) is expected


def test_a_fake_implementation_that_lies_is_told_at_load(tmp_path: Path) -> None:
    @torch.library.custom_op("offload_tests::turning", mutates_args=())
    def turning(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    @turning.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return turning(self.layers(x))

    model, given = Turning(), torch.randn(3, 64)
    save_weights(model, tmp_path)
    captured = offload.capture(model, given, weights=tmp_path)
    message = (
        r"turning: returned shape \[3, 64\] with strides \[1, 3\] of float32 from byte 0 on, "
        r"the recorded result has shape \[3, 64\] with strides \[64, 1\].*"
        r"correct its fake implementation"
    )
    with pytest.raises(offload.CaptureError, match=message):
        captured.load(weights_budget=floor_of(captured))
    with captured.load() as run, pytest.raises(offload.CaptureError, match=message):
        run(given)
