"""Families of transformers' models: at each length the Program that a capture records there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import tensors_in
from same_programs import same
from torch import nn
from torch.export import Dim

import offload

pytestmark = [pytest.mark.slow, pytest.mark.long]

RECORDED, LENGTHS = 9, (1, 2, 3, 16, 31, 200)
N = Dim("n", min=1, max=256)
TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": 99, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
DECODER = {**TINY, "num_key_value_heads": 2, "use_cache": False}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 256}
ENCODER_DECODER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 99,
    "use_cache": False,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 99}
IMAGE = {name: TINY[name] for name in list(TINY)[:4]} | {"image_size": 32, "patch_size": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", TINY),
    "roberta": ("RobertaModel", TINY),
    "electra": ("ElectraModel", {**TINY, "embedding_size": 16}),
    "albert": ("AlbertModel", {**TINY, "embedding_size": 16}),
    "mpnet": ("MPNetModel", TINY),
    "modernbert": ("ModernBertModel", {**TINY, "global_attn_every_n_layers": 2}),
    "deberta": ("DebertaV2Model", {**TINY, "relative_attention": True, "position_buckets": 8}),
    "clip_text": ("CLIPTextModel", {**TINY, "eos_token_id": 98}),
    "llama": ("LlamaModel", DECODER),
    "mistral": ("MistralModel", DECODER),
    "qwen2": ("Qwen2Model", DECODER),
    "gemma": ("GemmaModel", {**DECODER, "head_dim": 8}),
    "mixtral": ("MixtralModel", {**DECODER, "num_local_experts": 2}),
    "neox": ("GPTNeoXModel", DECODER),
    "phi": ("PhiModel", DECODER),
    "gpt2": ("GPT2Model", {**GPT, "use_cache": False}),
    "t5_encoder": ("T5EncoderModel", T5),
    "t5": ("T5Model", {**T5, "use_cache": False}),
    "vit": ("ViTModel", IMAGE),
}
# They read tensors to take short cuts, except where told that they are being compiled: a capture of
# one size alone records another Program, with the same values.
TOLD = {
    "bart": ("BartModel", {**ENCODER_DECODER, "max_position_embeddings": 256}),
    "whisper": (
        "WhisperModel",
        {**ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 20,
         "max_target_positions": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1},
    ),
}  # fmt: skip


# For one token torch takes separate paths: other launches.
APART_AT_1 = {"mpnet", "deberta", "neox", "phi", "t5_encoder", "t5"}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def build(transformers: Any, name: str, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options)).eval()


def ids(length: int) -> torch.Tensor:
    return torch.randint(3, 90, (2, length))


def batch(family: str, length: int) -> dict[str, torch.Tensor]:
    if family == "vit":
        return {"pixel_values": torch.randn(length, 3, 32, 32)}
    if family in ("t5", "bart"):
        return {"input_ids": ids(length), "decoder_input_ids": ids(4)}
    if family == "whisper":
        return {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": ids(length)}
    given = ids(length)
    return {"input_ids": given, "attention_mask": torch.ones_like(given)}


def shapes(family: str) -> dict[str, Any]:
    if family == "vit":
        return {"pixel_values": {0: N}}
    if family == "whisper":
        return {"decoder_input_ids": {1: N}}
    return {name: {1: N} for name in batch(family, 1) if not name.startswith("decoder")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_length_gives_what_a_capture_records_or_a_guard_refuses(transformers, family):
    model = build(transformers, *FAMILIES[family])
    with torch.no_grad():
        captured = offload.capture(model, **batch(family, RECORDED), dynamic_shapes=shapes(family))
        assert same(captured.family.at({"n": RECORDED}), captured.program)
        refused = []
        for length in LENGTHS:
            try:
                program = captured.family.at({"n": length})
            except offload.BindingError:
                refused.append(length)
                continue
            recorded = offload.capture(model, **batch(family, length)).program
            assert same(program, recorded), length
    assert refused == ([1] if family in APART_AT_1 else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5", *TOLD])
def test_each_length_computes_what_eager_does(transformers, family):
    model = build(transformers, *{**FAMILIES, **TOLD}[family])
    with torch.no_grad():
        captured = offload.capture(model, **batch(family, RECORDED), dynamic_shapes=shapes(family))
        for length in (5, 70, 5):
            given = batch(family, length)
            pairs = zip(tensors_in(captured(**given)), tensors_in(model(**given)), strict=True)
            for got, expected in pairs:
                if family in TOLD:
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
                else:
                    assert torch.equal(got, expected)
    assert any("its sizes may vary" in note for note in captured.program.host_reads) == (
        family in TOLD
    )
