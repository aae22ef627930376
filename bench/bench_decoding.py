"""Claim: one capture decodes with a cache that grows, sooner than with one of a fixed length.

512 tokens by a small Llama, one per step, from a prompt of 7. Contenders give the same tokens. Ours
is counted twice: when every length is new to this executable, and when all are known. torch.compile
has compiled and warmed up before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim

import offload
from measurements import Case, figure_of, ratio_of
from turns import take_single_turns

N_TOKENS, PROMPT = 512, 7
OURS, OURS_NEW = "offload", "offload, lengths not met before"
STATIC = "offload, a cache of a fixed length"
COMPILED, EAGER = "torch.compile(dynamic=True)", "eager"
SIZES = {"4 layers of 64": (4, 64), "6 layers of 256": (6, 256), "8 layers of 512": (8, 512)}


class Decoding:
    """One model, and the ways to decode with it."""

    def __init__(self, n_layers: int, width: int) -> None:
        self.transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        self.config = self.transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=n_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1_000,
            max_position_embeddings=1_024,
        )
        self.model = self.transformers.LlamaForCausalLM(self.config).eval()
        self.prompt = torch.randint(1_000, (1, PROMPT))

    def forward(self, tokens: torch.Tensor, past: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """The token that follows these, and all keys and values, layer by layer."""
        cache = self.transformers.DynamicCache(config=self.config)
        for layer, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(keys, values, layer)
        logits = self.model(tokens, past_key_values=cache).logits
        grown = [one for layer in cache.layers for one in (layer.keys, layer.values)]
        return logits[:, -1:].argmax(-1), *grown

    def decode(self, token: torch.Tensor, *past: torch.Tensor) -> tuple[Any, ...]:
        """A step: the captured function."""
        return self.forward(token, past)

    def captured(self) -> offload.Captured:
        """One step, at any length of the cache."""
        token, *past = self.forward(self.prompt, ())
        n = Dim("n", min=2, max=1_024)
        shapes = {"token": None, "past": tuple({2: n} for _ in past)}
        return offload.capture(self.decode, token, *past, dynamic_shapes=shapes)

    def generate(self, decode: Callable[..., Any]) -> torch.Tensor:
        """Tokens by steps that return the grown cache."""
        token, *past = self.forward(self.prompt, ())
        tokens = [token]
        while len(tokens) < N_TOKENS:
            token, *past = decode(token, *past)
            tokens.append(token)
        return torch.cat(tokens, dim=1)

    def step(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """A step that writes its cache in place."""
        token: torch.Tensor = self.model(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
        return token

    def prefilled(self) -> tuple[torch.Tensor, Any]:
        """The first new token, and a cache of a fixed length."""
        length = PROMPT + N_TOKENS
        cache = self.transformers.StaticCache(config=self.config, max_cache_len=length)
        return self.step(self.prompt, cache), cache

    def generate_static(self, step: Callable[..., Any]) -> torch.Tensor:
        """Tokens by steps that write a cache of a fixed length."""
        token, cache = self.prefilled()
        tokens = [token]
        while len(tokens) < N_TOKENS:
            tokens.append(step(tokens[-1], cache))
        return torch.cat(tokens, dim=1)


@pytest.mark.parametrize("name", SIZES)
def test_decoding(benchmark: Any, record: Callable[[Case], None], name: str) -> None:
    one = Decoding(*SIZES[name])
    with torch.no_grad():
        captured = one.captured()
        run = captured.load(sizes=offload.Sizes(instances="256MiB"))
        static = offload.capture(one.step, *one.prefilled()).load()
        compiled = torch.compile(one.decode, dynamic=True)
        expected = one.generate(one.decode)
        for found in (
            one.generate(run),
            one.generate_static(static),
            one.generate(compiled),
        ):
            assert torch.equal(found, expected)

        def new() -> torch.Tensor:
            with captured.load(sizes=offload.Sizes(instances="256MiB")) as fresh:
                return one.generate(fresh)

        contenders: dict[str, Callable[[], Any]] = {
            OURS: lambda: one.generate(run),
            OURS_NEW: new,
            STATIC: lambda: one.generate_static(static),
            COMPILED: lambda: one.generate(compiled),
            EAGER: lambda: one.generate(one.decode),
        }
        times = take_single_turns(contenders, rounds=5)
        benchmark.pedantic(contenders[OURS], rounds=1)
    record(
        Case(
            f"{N_TOKENS} tokens of a Llama of {name}",
            ratios={
                STATIC: ratio_of(times[STATIC], times[OURS], at_least=1.3),
                COMPILED: ratio_of(times[COMPILED], times[OURS], at_least=2),
                EAGER: ratio_of(times[EAGER], times[OURS]),
                OURS_NEW: ratio_of(times[OURS_NEW], times[OURS]),
            },
            figures={key: figure_of([ns / 1e6 for ns in times[key]], "ms") for key in times},
        )
    )
