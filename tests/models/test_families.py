"""Families of models: captured once, the model gone, replayed over other values and padding.

Encoders, decoders, vision and speech models of transformers with tiny random weights, convolutional
nets as torchvision has them, and recurrent nets. Eager runs on a deep copy that is kept.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload

N_REPLAYS = 4
Batch = dict[str, torch.Tensor]


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif hasattr(tree, "__dict__"):
        yield from tensors_in(vars(tree))


def assert_close(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    own, theirs = list(tensors_in(got)), list(tensors_in(expected))
    assert own
    assert len(own) == len(theirs)
    for one, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def forward_must_not_run(*_: Any, **__: Any) -> None:
    raise AssertionError("the model ran")


def replay_without_model(
    build_model: Callable[[], nn.Module], make: Callable[[int], Batch]
) -> offload.Executable:
    """Capture on the first batch, drop the model, replay others at new addresses against a copy.

    `make` gives the batch of a turn: other values, and other padding where the model takes masks.
    """
    model = build_model().eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = twin(**make(0))
        with offload.capture(model) as captured:
            recorded = model(**make(0))
    assert_close(recorded, expected)
    model.forward = forward_must_not_run
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    run = captured.load()
    kept = []  # so that no address is used twice
    for turn in range(1, N_REPLAYS + 1):
        batch = make(turn)
        before = {name: tensor.clone() for name, tensor in batch.items()}
        with torch.no_grad():
            expected = twin(**make(turn))
        out = out_for(run, turn)
        feature_map = torch.empty(run.feature_map_bytes, dtype=torch.uint8).fill_(255)
        got = run(**batch, out=out, feature_map=feature_map)
        assert_close(got, expected)
        for given in tensors_in(out):
            assert any(given is one for one in tensors_in(got))
        for name, tensor in batch.items():
            assert torch.equal(tensor, before[name]), name
        assert run.last_execution.policy == "all"
        kept.append((batch, out, feature_map, got))
    tickets = [run.submit(**make(turn)) for turn in (2, 3)]
    for turn, ticket in zip((2, 3), tickets, strict=True):
        with torch.no_grad():
            assert_close(ticket.result(), twin(**make(turn)))
    return run


def out_for(run: offload.Executable, turn: int) -> Any:
    """Buffers for the results on every other turn, for those that may have one."""
    if turn % 2 == 0:
        return None
    values = run.program.values
    views = [result.view for result in run.program.results]
    fresh = [values[view.value].role == "output" for view in views]
    buffers = [
        torch.empty(view.shape, dtype=getattr(torch, view.dtype)) if own else None
        for view, own in zip(views, fresh, strict=True)
    ]
    return nested(run.program.result_structure, buffers)


def nested(structure: Any, buffers: list[torch.Tensor | None]) -> Any:
    """Buffers nested as the result, in plain containers."""
    if structure.kind == "tensor":
        return buffers[structure.leaf]
    if structure.kind == "constant":
        return None
    items = [nested(child, buffers) for child in structure.children]
    return dict(zip(structure.keys, items, strict=True)) if structure.keys else items


# ---- transformers --------------------------------------------------------------------------------


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
N_ROWS, N_TOKENS = 3, 12


def tokens(turn: int, *, left: bool = False, **more: torch.Tensor) -> Batch:
    """Token numbers, and a mask that is full when recorded and padded otherwise at every replay."""
    generator = torch.Generator().manual_seed(turn)
    ids = torch.randint(2, 64, (N_ROWS, N_TOKENS), generator=generator)
    lengths = torch.randint(1, N_TOKENS + 1, (N_ROWS, 1), generator=generator)
    lengths[turn % N_ROWS] = N_TOKENS
    if turn == 0:
        lengths.fill_(N_TOKENS)
    mask = (torch.arange(N_TOKENS).expand(N_ROWS, -1) < lengths).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids, "attention_mask": mask, **more}


def pixels(turn: int) -> Batch:
    generator = torch.Generator().manual_seed(turn)
    return {"pixel_values": torch.empty(2, 3, 32, 32).normal_(generator=generator)}


def build(transformers: Any, model: str, **options: Any) -> nn.Module:
    """A model of this class, with the options its own configuration takes."""
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


# ---- convolutional nets --------------------------------------------------------------------------


def convolution(n_in: int, n_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(n_out),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(n_in, n_out, 3, stride)
        self.second = convolution(n_out, n_out, 3)[:2]
        self.shortcut = nn.Identity() if stride == 1 else convolution(n_in, n_out, 1, stride)[:2]

    def forward(self, x):
        y = self.second(self.first(x))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet18(nn.Module):
    """The layers of ResNet-18, narrower."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 8, 16, 24, 32)
        self.stem = nn.Sequential(convolution(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks = []
        for stage in range(4):
            stride = 1 if stage == 0 else 2
            blocks.append(Residual(widths[stage], widths[stage + 1], stride))
            blocks.append(Residual(widths[stage + 1], widths[stage + 1], 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        y = self.blocks(self.stem(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))


class Inception(nn.Module):
    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.one = convolution(n_in, 8, 1)
        self.three = nn.Sequential(convolution(n_in, 6, 1), convolution(6, 12, 3))
        self.five = nn.Sequential(convolution(n_in, 4, 1), convolution(4, 6, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(n_in, 6, 1))

    def forward(self, x):
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class GoogLeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 16, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(
            Inception(16), Inception(32), nn.MaxPool2d(3, 2, 1), Inception(32), Inception(32)
        )
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(32, 10)

    def forward(self, x):
        y = self.blocks(self.stem(x)).mean((2, 3))
        return {"logits": self.head(self.drop(y)), "features": y}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 16, 24]
        self.down = nn.ModuleList(
            [convolution(one, other, 3) for one, other in itertools.pairwise(widths)]
        )
        self.raise_ = nn.ModuleList(
            [nn.ConvTranspose2d(24, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)]
        )
        self.up = nn.ModuleList([convolution(32, 16, 3), convolution(16, 8, 3)])
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skipped = []
        for level, block in enumerate(self.down):
            x = block(x)
            if level < 2:
                skipped.append(x)
                x = F.max_pool2d(x, 2)
        for raised, block in zip(self.raise_, self.up, strict=True):
            x = block(torch.cat([raised(x), skipped.pop()], 1))
        return self.last(x), F.interpolate(x, scale_factor=2.0, mode="bilinear")


def images(turn: int) -> Batch:
    generator = torch.Generator().manual_seed(turn)
    return {"x": torch.empty(2, 3, 48, 48).normal_(generator=generator)}


def images_channels_last(turn: int) -> Batch:
    return {"x": images(turn)["x"].contiguous(memory_format=torch.channels_last)}


@pytest.mark.parametrize("make", [images, images_channels_last])
@pytest.mark.parametrize("net", [ResNet18, GoogLeNet, UNet])
def test_convolutional_nets(net, make):
    replay_without_model(net, make)


@pytest.mark.parametrize("net", [ResNet18, GoogLeNet, UNet])
def test_convolutional_nets_in_training(net):
    """Batch statistics, running statistics and dropout, from the same seed as eager."""
    model = net().train()
    twin = copy.deepcopy(model)
    with torch.no_grad(), offload.capture(model) as captured:
        torch.manual_seed(0)
        model(**images(0))
        torch.manual_seed(0)
        twin(**images(0))
    for turn in range(1, N_REPLAYS):
        torch.manual_seed(turn)
        got = captured(**images(turn))
        torch.manual_seed(turn)
        with torch.no_grad():
            expected = twin(**images(turn))
        assert_close(got, expected)
        assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


# ---- recurrent nets ------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.cell = cell(16, 12, num_layers=2, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 5)

    def forward(self, input_ids, attention_mask):
        embedded = self.embed(input_ids) * attention_mask[..., None]
        outputs, state = self.cell(embedded)
        return self.head(outputs), state


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets(cell, bidirectional):
    model = partial(Recurrent, cell, batch_first=True, bidirectional=bidirectional)
    replay_without_model(model, tokens)


def test_unrolled_cells():
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTMCell(8, 12), nn.LSTMCell(12, 12)

        def forward(self, x):
            states = [(x.new_zeros(2, 12), x.new_zeros(2, 12)) for _ in range(2)]
            outputs = []
            for step in x.unbind(1):
                states[0] = self.first(step, states[0])
                states[1] = self.second(states[0][0], states[1])
                outputs.append(states[1][0])
            return torch.stack(outputs, 1), states

    def make(turn):
        return {"x": torch.empty(2, 6, 8).normal_(generator=torch.Generator().manual_seed(turn))}

    replay_without_model(Unrolled, make)
