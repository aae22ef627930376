"""Generation by a captured step over a growing cache: the tokens are eager's, for each model."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import offload

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="decodes its models")

N_TOKENS = 512
SMALL = {"vocab_size": 500, "max_position_embeddings": 1024}
LAYERS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **LAYERS)),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, **LAYERS)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=500,
            n_embd=64,
            n_layer=2,
            n_head=4,
            tie_word_embeddings=False,  # otherwise a model with random weights repeats its token
            bos_token_id=None,
            eos_token_id=None,
        )
    ),
}


class Decoder:
    """A model's step: a token, and the keys and values of earlier tokens."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name]().eval()

    def __call__(self, token, *past):
        cache = transformers.DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(keys, values, layer)
        logits = self.model(token, past_key_values=cache).logits
        grown = [one for layer in cache.layers for one in (layer.keys, layer.values)]
        return logits[:, -1:].argmax(-1), *grown

    def generate(self, step, prompt):
        token, *past = self(prompt)
        tokens = [token]
        while len(tokens) < N_TOKENS:
            token, *past = step(token, *past)
            tokens.append(token)
        return torch.cat(tokens, dim=1)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_512_tokens_of_three_prompts(name):
    decoder = Decoder(name)
    token, *past = decoder(torch.randint(500, (1, 7)))
    n = Dim("n", min=2, max=1024)
    shapes = {"token": None, "past": tuple({2: n} for _ in past)}
    captured = offload.capture(decoder, token, *past, dynamic_shapes=shapes)
    with captured.load(sizes=offload.Sizes()) as run:
        for length in (3, 7, 20):
            prompt = torch.randint(500, (1, length))
            expected = decoder.generate(decoder, prompt)
            assert len(expected.unique()) > 8, "the tokens vary, so that a wrong cache would show"
            assert torch.equal(decoder.generate(run, prompt), expected)
        # Steps from a cache of 3 to one of 530 tokens: each length occurs once.
        assert run.instances.kept + run.instances.evicted == 20 + N_TOKENS - 1 - 3
