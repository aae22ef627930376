"""Encoders, decoders, vision and speech models of transformers, with tiny random weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from families import (
    N_REPLAYS,
    N_ROWS,
    N_TOKENS,
    Batch,
    assert_close,
    replay_without_model,
    tokens,
)
from torch import nn

import offload


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the families are its configurations")


TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def pixels(turn: int) -> Batch:
    generator = torch.Generator().manual_seed(turn)
    return {"pixel_values": torch.empty(2, 3, 32, 32).normal_(generator=generator)}


def build(transformers: Any, model: str, **options: Any) -> nn.Module:
    """A model of this class, with the options of its configuration."""
    cls = getattr(transformers, model)
    return cls(cls.config_class(**options))


ENCODERS = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", {"max_position_embeddings": 40}),
    "electra": ("ElectraModel", {"embedding_size": 16}),
    "albert": ("AlbertModel", {"embedding_size": 16}),
    "bert for tokens": ("BertForTokenClassification", {"num_labels": 5}),
    "mpnet": ("MPNetModel", {}),
    "modernbert": (
        "ModernBertModel",
        {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(transformers, family):
    cls, options = ENCODERS[family]
    replay_without_model(partial(build, transformers, cls, **{**TINY, **options}), tokens)


def test_encoder_with_token_types_and_all_outputs(transformers):
    model = partial(
        build,
        transformers,
        "BertModel",
        **TINY,
        output_hidden_states=True,
        output_attentions=True,
        attn_implementation="eager",
    )

    def make(turn):
        kinds = torch.arange(N_TOKENS).expand(N_ROWS, -1) > turn
        return tokens(turn, token_type_ids=kinds.long())

    replay_without_model(model, make)


def test_distilbert(transformers):
    model = partial(
        build, transformers, "DistilBertModel", dim=32, n_layers=2, n_heads=4, hidden_dim=48
    )
    replay_without_model(model, tokens)


DECODERS = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "gemma": ("GemmaForCausalLM", {"num_key_value_heads": 1, "head_dim": 8}),
    "phi": ("PhiForCausalLM", {"num_key_value_heads": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_decoders(transformers, family, use_cache):
    cls, options = DECODERS[family]
    model = partial(build, transformers, cls, **{**TINY, **options}, use_cache=use_cache)
    replay_without_model(model, lambda turn: tokens(turn, left=True))


@pytest.mark.parametrize("use_cache", [False, True])
def test_gpt2(transformers, use_cache):
    model = partial(
        build,
        transformers,
        "GPT2LMHeadModel",
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=64,
        n_positions=32,
        use_cache=use_cache,
    )
    replay_without_model(model, lambda turn: tokens(turn, left=True))


@pytest.mark.parametrize("padded", [False, True])
def test_static_cache(transformers, padded):
    """Each decoding step writes the caller's cache in place: one program, many caches."""
    model = build(transformers, "LlamaForCausalLM", **TINY, num_key_value_heads=2).eval()
    twin = copy.deepcopy(model)

    def make(turn, length=16):
        cache = transformers.StaticCache(config=twin.config, max_cache_len=length)
        generator = torch.Generator().manual_seed(turn)
        ids = torch.randint(2, 64, (2, 5), generator=generator)
        with torch.no_grad():
            twin(input_ids=ids, past_key_values=cache)
        mask = torch.ones(2, 6, dtype=torch.int64)
        mask[:, : turn % 3] = 0
        more = {"attention_mask": mask} if padded else {}
        positions = {"cache_position": torch.tensor([5]), "position_ids": torch.tensor([[5]] * 2)}
        return {"input_ids": ids[:, :1] + 1, "past_key_values": cache, **positions, **more}

    with torch.no_grad(), offload.capture(model) as captured:
        model(**make(0))
    del model
    run = captured.load()
    for turn in range(1, N_REPLAYS):
        own, theirs = make(turn), make(turn)
        with torch.no_grad():
            expected = twin(**theirs)
        got = run(**own)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert_close(own["past_key_values"], theirs["past_key_values"])


def test_t5_encoder(transformers):
    model = partial(
        build,
        transformers, "T5EncoderModel", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        vocab_size=64,
    )  # fmt: skip
    replay_without_model(model, tokens)


def test_t5_encoder_and_decoder(transformers):
    model = partial(
        build,
        transformers, "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2,
        num_heads=4, vocab_size=64, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip

    def make(turn):
        generator = torch.Generator().manual_seed(100 + turn)
        decoder = torch.randint(2, 64, (N_ROWS, 5), generator=generator)
        return tokens(turn, decoder_input_ids=decoder)

    replay_without_model(model, make)


VISION_TINY = {key: TINY[key] for key in TINY if key.startswith(("hidden", "num", "inter"))}
VISION = {
    "vit": ("ViTModel", {**VISION_TINY, "image_size": 32, "patch_size": 8}),
    "deit": ("DeiTModel", {**VISION_TINY, "image_size": 32, "patch_size": 8}),
    "dinov2": ("Dinov2Model", {**VISION_TINY, "image_size": 32, "patch_size": 8}),
    "clip": ("CLIPVisionModel", {**VISION_TINY, "image_size": 32, "patch_size": 8}),
    "convnext": ("ConvNextModel", {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1]}),
    "resnet": (
        "ResNetModel",
        {"embedding_size": 8, "hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 1, 1]},
    ),
    "mobilenet": ("MobileNetV2Model", {"image_size": 32, "depth_multiplier": 0.25}),
    "segformer": (
        "SegformerModel",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16},
    ),
    "swin": (
        "SwinModel",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
         "window_size": 4},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", VISION)
def test_vision(transformers, family):
    cls, options = VISION[family]
    replay_without_model(partial(build, transformers, cls, **options), pixels)


def test_clip_text_and_image(transformers):
    text = {**TINY, "projection_dim": 16, "eos_token_id": 63, "bos_token_id": 1}
    vision = {**VISION_TINY, "image_size": 32, "patch_size": 8, "projection_dim": 16}
    model = partial(
        build, transformers, "CLIPModel", text_config=text, vision_config=vision, projection_dim=16
    )
    replay_without_model(model, lambda turn: {**tokens(turn), **pixels(turn)})


def test_whisper_encoder(transformers):
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, vocab_size=64,
        max_source_positions=20, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip

    def make(turn):
        generator = torch.Generator().manual_seed(turn)
        return {"input_features": torch.empty(2, 8, 40).normal_(generator=generator)}

    replay_without_model(lambda: transformers.WhisperModel(config).get_encoder(), make)


def test_wav2vec2(transformers):
    model = partial(
        build,
        transformers, "Wav2Vec2Model", **VISION_TINY, vocab_size=32, conv_dim=(8, 8, 8),
        conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, do_stable_layer_norm=False,
        feat_extract_norm="group",
    )  # fmt: skip

    def make(turn):
        generator = torch.Generator().manual_seed(turn)
        return {"input_values": torch.empty(2, 800).normal_(generator=generator)}

    replay_without_model(model, make)


MASKED = {
    "longt5": ("LongT5Model", {"d_kv": 8}),
    "switch transformers": ("SwitchTransformersModel", {"d_kv": 8, "num_experts": 4}),
}


@pytest.mark.parametrize("family", MASKED)
def test_masked_encoders_and_decoders_of_long_texts(transformers, family):
    """Their eager forward reads the mask on the host, and checks whether it is being compiled."""
    name, options = MASKED[family]
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    model = build(transformers, name, vocab_size=64, **sizes, **options).eval()
    given = tokens(0)["input_ids"]
    batch = {"input_ids": given, "decoder_input_ids": given, "use_cache": False}
    batch["attention_mask"] = torch.ones_like(given)
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        with offload.capture(model) as captured:
            recorded = model(**batch).last_hidden_state
        assert torch.equal(recorded, expected)
        assert_close(captured(**batch).last_hidden_state, expected)
    assert any("is_compiling() returning True" in read for read in captured.program.host_reads)


def test_a_model_that_gives_another_result_when_it_is_compiled(transformers):
    """PaliGemma's mask then differs: with a mask of ones the result differs from eager."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    vision = {**sizes, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    model = build(
        transformers,
        "PaliGemmaModel",
        text_config={**text, "model_type": "gemma", "vocab_size": 64},
        vision_config={**vision, "model_type": "siglip_vision_model", "projection_dim": 32},
        projection_dim=32,
        image_token_index=63,
    ).eval()
    ids = tokens(0)["input_ids"].clamp(max=60)
    mask = torch.ones_like(ids)
    with torch.no_grad(), pytest.raises(offload.CaptureError, match="another result 0"):
        offload.capture(model, input_ids=ids, attention_mask=mask, use_cache=False)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).last_hidden_state
        captured = offload.capture(model, input_ids=ids, use_cache=False)
        assert_close(captured(input_ids=ids, use_cache=False).last_hidden_state, expected)
