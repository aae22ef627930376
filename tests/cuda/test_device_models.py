"""Models on a GPU, with random weights: captured once, replayed at new addresses against eager."""

from __future__ import annotations

import pytest
import torch
from on_device import assert_close, randint, randn, replay_at_new_addresses
from torch import nn

import offload

N_ROWS, N_TOKENS, VOCABULARY = 2, 48, 512


def normal(*shape, dtype=torch.float32):
    def make(turn):
        generator = torch.Generator("cuda").manual_seed(turn)
        return {"x": randn(*shape, generator=generator).to(dtype)}

    return make


def tokens(turn):
    generator = torch.Generator("cuda").manual_seed(turn)
    return {"input_ids": randint(2, VOCABULARY, (N_ROWS, N_TOKENS), generator=generator)}


class Named(nn.Module):
    """A model whose input is called x."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 256, 1024])
def test_mlp(width, dtype):
    layers = [part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())]
    model = Named(nn.Sequential(*layers)).cuda().to(dtype).eval()
    run = replay_at_new_addresses(model, normal(16, width, dtype=dtype))
    assert len(run.program.launches) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformer_encoder(dtype):
    layer = nn.TransformerEncoderLayer(128, 8, 256, dropout=0.0, batch_first=True)
    model = (
        Named(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).cuda().to(dtype).eval()
    )
    replay_at_new_addresses(model, normal(2, 32, 128, dtype=dtype))


def test_transformer_decoder():
    layer = nn.TransformerDecoderLayer(128, 8, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).cuda().eval()

    def make(turn):
        return {"tgt": normal(2, 16, 128)(turn)["x"], "memory": normal(2, 32, 128)(turn)["x"]}

    replay_at_new_addresses(model, make)


@pytest.mark.parametrize("name", ["resnet50", "vit_tiny_patch16_224"])
def test_timm(name):
    timm = pytest.importorskip("timm", reason="models of timm")
    model = Named(timm.create_model(name, pretrained=False)).cuda().eval()
    replay_at_new_addresses(model, normal(2, 3, 224, 224))


SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
FAMILIES = {
    "bert": (
        "BertModel",
        {**SIZES, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 256},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4,
         "use_cache": False},
    ),
    "llama": (
        "LlamaForCausalLM",
        {**SIZES, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 256, "use_cache": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family, dtype):
    transformers = pytest.importorskip("transformers", reason="models of transformers")
    cls, options = FAMILIES[family]
    model_class = getattr(transformers, cls)
    model = model_class(model_class.config_class(**options)).cuda().to(dtype).eval()
    replay_at_new_addresses(model, tokens)


def test_convolutions_in_channels_last():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2)]
    model = Named(nn.Sequential(*layers, nn.Conv2d(16, 8, 1))).cuda().eval()

    def make(turn):
        x = normal(2, 3, 32, 32)(turn)["x"]
        return {"x": x.contiguous(memory_format=torch.channels_last)}

    replay_at_new_addresses(model, make)


def replay_opaque(function, make):
    """Launches that torch's dispatcher does not see make the call one opaque launch."""
    run = replay_at_new_addresses(function, make)
    assert [one.operator for one in run.program.launches] == ["offload::opaque"]
    assert [one.mode for one in run.launch_reports()] == ["opaque"]
    return run


def test_raw_triton_kernel():
    pytest.importorskip("triton", reason="a raw Triton kernel")
    from probe_triton import add_one

    def run(x):
        return add_one(x * 2, torch.empty_like(x)) * 3

    run(normal(1024)(0)["x"])  # torch and Triton compile
    replay_opaque(run, normal(1024))


def test_raw_triton_kernel_in_place():
    pytest.importorskip("triton", reason="a raw Triton kernel")
    from probe_triton import add_one

    def run(x):
        scaled = x * 2
        add_one(scaled, scaled)
        return scaled

    replay_opaque(run, normal(1024))


def test_raw_triton_kernel_on_a_buffer():
    """It is written by the recorded call and by executions, and not by loading."""
    pytest.importorskip("triton", reason="a raw Triton kernel")
    from probe_triton import add_one

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(100_000, device="cuda"))

        def forward(self, x):
            add_one(self.steps, self.steps)
            return x * self.steps[: len(x)]

    model, make = Counting(), normal(1024)
    captured = offload.capture(model, **make(0))
    run = captured.load()
    assert run.program.opaque is not None
    for turn in (2, 3, 4):
        x = make(turn)["x"]
        assert_close(run(x=x), x * turn)
        assert torch.equal(model.steps, torch.full_like(model.steps, turn))


def test_hidden_kernels_are_found_where_no_address_is_asked_for():
    pytest.importorskip("triton", reason="a raw Triton kernel")
    from probe_triton import add_one

    def run(x):
        scaled = x * 2
        with torch._C.DisableTorchFunction():  # as an extension in C++, which no mode sees
            add_one(scaled, scaled)
        return scaled * 3

    replayed = replay_opaque(run, normal(1024))
    assert "launches what the recorder cannot see" in replayed.program.opaque.reason


@pytest.mark.parametrize("kind", ["module", "inside", "in place"])
def test_compiled_model(kind):
    model = Named(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))).cuda().eval()
    if kind == "in place":
        model.compile()
        compiled = model
    else:
        compiled = torch.compile(model)
    make, function = normal(8, 64), Named(compiled) if kind == "inside" else compiled
    captured = offload.capture(function, **make(0))
    assert captured.program.opaque is not None
    run = captured.load()
    for turn in (1, 2, 3):
        assert_close(run(**make(turn)), function(**make(turn)))


def test_compiled_model_with_graphs_of_its_own_is_refused():
    compiled = torch.compile(nn.Linear(8, 8).cuda(), mode="reduce-overhead")
    with pytest.raises(offload.CaptureError, match="CUDA graphs of its own"):
        offload.capture(compiled, torch.ones(2, 8, device="cuda"))


def test_models_without_hidden_work_stay_programs():
    model = Named(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))).cuda().eval()
    captured = offload.capture(model, **normal(8, 64)(0))
    assert captured.program.opaque is None
    assert captured.program.unchecked == ""
