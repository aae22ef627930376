"""Models that are compared with eager on a device, whose algorithms differ in the last bits.

Weights are chosen so that every part matters: at the initial weights of models, whole layers add
less than the tolerance. `test_device_models_tell.py` shows this without a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Batch = Mapping[str, torch.Tensor]

N_ROWS, N_TOKENS, VOCABULARY = 2, 48, 512

# cuBLAS and cuDNN choose algorithms by alignment and workspace too, so that eager and a replay
# differ in the last bits (of TF32, for convolutions); a stale or mixed-up address gives other
# values altogether. Tolerances by dtype: for each number, and for the root mean square of all.
TOLERANCES = {torch.float32: (1e-3, 5e-3), torch.bfloat16: (5e-2, 1.5e-1)}

_GAIN = 1.35  # of a layer: roughly keeps the magnitude of numbers through an activation


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A model and its batches, made on the CPU.

    Attributes:
        build: makes the model; its package may be missing (`needs`).
        make: gives the batch of a turn, with other numbers in each turn.
        needs: the package that provides it.
        n_launches: number of its recorded launches, where known.
    """

    build: Callable[[], nn.Module]
    make: Callable[[int], Batch]
    needs: str = "torch"
    n_launches: int | None = None


class Named(nn.Module):
    """A model whose input is called x."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the wrapped model."""
        found: torch.Tensor = self.model(x)
        return found


def lively(model: nn.Module) -> nn.Module:
    """The model for inference, with random weights at which no part of it is negligible."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, _GAIN / math.sqrt(weight[0].numel()), generator=generator)
            elif name.endswith("weight"):  # of a normalisation layer
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(0, 0.2, generator=generator)
    return model.eval()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in a result."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def assert_close(got: Any, expected: Any) -> None:
    """Require the same tensors, within the differences of algorithms."""
    own, theirs = tensors_in(got), tensors_in(expected)
    assert own
    assert len(own) == len(theirs)
    for one, other in zip(own, theirs, strict=True):
        rtol, of_all = TOLERANCES.get(other.dtype, (0.0, 0.0))
        atol = of_all * float(other.double().square().mean().sqrt()) if of_all else 0.0
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def normal(*shape: int, name: str = "x") -> Callable[[int], Batch]:
    """Batches of normal numbers."""

    def make(turn: int) -> Batch:
        return {name: torch.randn(*shape, generator=torch.Generator().manual_seed(turn))}

    return make


def tokens(turn: int) -> Batch:
    """A batch of token numbers."""
    generator = torch.Generator().manual_seed(turn)
    return {"input_ids": torch.randint(2, VOCABULARY, (N_ROWS, N_TOKENS), generator=generator)}


def _mlp(width: int) -> DeviceModel:
    def build() -> nn.Module:
        layers = [part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())]
        return Named(nn.Sequential(*layers))

    return DeviceModel(build, normal(16, width), n_launches=12)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 8, 256, dropout=0.0, batch_first=True)
    return Named(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(128, 8, 256, dropout=0.0, batch_first=True)
    return nn.TransformerDecoder(layer, 2)


def _decoder_batch(turn: int) -> Batch:
    return {
        **normal(2, 16, 128, name="tgt")(turn),
        **normal(2, 32, 128, name="memory")(turn + 1000),
    }


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2)]
    return Named(nn.Sequential(*layers, nn.Conv2d(16, 8, 1)))


def _channels_last(turn: int) -> Batch:
    x = normal(2, 3, 32, 32)(turn)["x"]
    return {"x": x.contiguous(memory_format=torch.channels_last)}


def _of_timm(name: str) -> DeviceModel:
    def build() -> nn.Module:
        import timm

        return Named(timm.create_model(name, pretrained=False))

    return DeviceModel(build, normal(2, 3, 224, 224), "timm")


def _of_transformers(name: str, **options: Any) -> DeviceModel:
    def build() -> nn.Module:
        import transformers

        model_class = getattr(transformers, name)
        model: nn.Module = model_class(model_class.config_class(**options))
        return model

    return DeviceModel(build, tokens, "transformers")


_SIZES = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
}  # fmt: skip

MODELS = {
    **{f"mlp {width}": _mlp(width) for width in (64, 256, 1024)},
    "transformer encoder": DeviceModel(_encoder, normal(2, 32, 128)),
    "transformer decoder": DeviceModel(_decoder, _decoder_batch),
    "convolutions in channels last": DeviceModel(_convolutions, _channels_last),
    "resnet50": _of_timm("resnet50"),
    "vit": _of_timm("vit_tiny_patch16_224"),
    "bert": _of_transformers("BertModel", **_SIZES),
    "gpt2": _of_transformers(
        "GPT2LMHeadModel", vocab_size=VOCABULARY, n_positions=64, n_embd=128, n_layer=2, n_head=4,
        use_cache=False,
    ),
    "llama": _of_transformers(
        "LlamaForCausalLM", **_SIZES, num_key_value_heads=2, use_cache=False
    ),
}  # fmt: skip

IN_FLOAT32_ALONE = ("resnet50", "vit", "convolutions in channels last", "transformer decoder")


def cases() -> list[tuple[str, torch.dtype]]:
    """Each model in each of its dtypes."""
    return [
        (name, dtype)
        for name in MODELS
        for dtype in TOLERANCES
        if dtype is torch.float32 or name not in IN_FLOAT32_ALONE
    ]


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch, its floating-point tensors cast to a dtype."""
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in batch.items()}
