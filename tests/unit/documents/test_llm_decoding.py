"""The decoding page's example runs unchanged, and its tokens are those of `generate`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import offload

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "llm_decoding.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names that the page's code defines, block after block."""
    pytest.importorskip("transformers", reason="the page decodes one of its models")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.mark.slow
def test_tokens_are_those_of_generate(names):
    prompt = torch.randint(512, (1, 6))
    expected = names["model"].generate(
        prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    replayed = names["generate_static"](prompt, names["static"], n_tokens=40)
    assert torch.equal(replayed, expected[:, 6:])
    assert len(replayed.unique()) > 8, "the tokens vary, so that a wrong cache would show"


def test_a_growing_cache_gives_the_same_tokens(names):
    """One resident, with separate numbers for each length."""
    run = names["run"]
    before, n_executions = run.instances, run.last_execution.n_executions
    prompt = torch.randint(512, (1, 6))
    expected = names["model"].generate(
        prompt, max_new_tokens=90, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    replayed = names["generate"](prompt, run, n_tokens=90)
    assert torch.equal(replayed, expected[:, 6:])
    assert len(replayed.unique()) > 8, "the tokens vary, so that a wrong cache would show"
    assert run.last_execution.n_executions == n_executions + 89
    assert run.instances.misses - before.misses == 44  # of 6 to 94, 6 to 50 were met before
    assert run.instances.sizes == (("n", 94),)


def test_one_program_serves_all(names):
    run = names["static"].load()
    token, cache = names["prefill"](torch.randint(512, (1, 4)))
    with torch.no_grad():
        run(run(token, cache), cache)
    assert run.last_execution.n_executions == 2
    assert run.last_execution.bytes_copied == 0
    assert [int(layer.cumulative_length) for layer in cache.layers] == [6] * 4


def test_the_step_under_a_budget_streams_what_does_not_stay(names):
    plan = names["streamed"].streaming.plan
    assert plan.transfer_bytes > 0
    assert plan.memory_bytes <= 500 * 1024
    assert all(one.device.type == "meta" for one in names["unbuilt"].parameters())


def test_other_sizes_are_refused(names):
    token, cache = names["prefill"](torch.randint(512, (2, 4)))
    with pytest.raises(offload.BindingError, match="batch_size"):
        names["static"](token, cache)


@torch.no_grad()
def test_a_prefill_can_be_captured_for_its_length(names):
    step, prompts = names["step"], torch.randint(512, (3, 1, 7))
    _, cache = names["prefill"](prompts[0])
    cache.reset()
    captured = offload.capture(step, prompts[0], cache)
    for prompt in prompts:
        cache.reset()
        expected, own = names["prefill"](prompt)
        assert torch.equal(captured(prompt, cache), expected)
        assert torch.equal(names["static"](expected, cache), step(expected, own))


@torch.no_grad()
def test_sampling_draws_as_eager_does(names):
    def sample(tokens, cache):
        logits = names["model"](tokens, past_key_values=cache).logits[:, -1]
        return torch.multinomial(logits.softmax(-1), 1)

    captured = offload.capture(sample, *names["prefill"](torch.randint(512, (1, 5))))
    prompt, tokens = torch.randint(512, (1, 5)), []
    for one in (captured, sample):
        token, cache = names["prefill"](prompt)
        torch.manual_seed(3)
        for _ in range(6):
            token = one(token, cache)
            tokens.append(int(token))
    assert tokens[:6] == tokens[6:]


def test_python_counters_are_refused(names):
    """As the page says of dynamic caches and of sliding windows."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=6,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    caches = (
        transformers.DynamicCache(config=config),
        transformers.StaticCache(config=config, max_cache_len=16),
    )
    for cache in caches:
        with torch.no_grad():
            model(torch.randint(64, (1, 3)), past_key_values=cache)
            with pytest.raises(offload.CaptureError, match="argument"):
                offload.capture(model, torch.randint(64, (1, 1)), past_key_values=cache)
