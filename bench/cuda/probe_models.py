"""The models that the probes and benchmarks capture: random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Made = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]

DEVICE = "cuda"


class OnlyTensor(nn.Module):
    """A model of transformers as a module that takes tensors and returns one."""

    def __init__(self, model: nn.Module, result: str) -> None:
        super().__init__()
        self.model = model
        self._result = result

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the chosen tensor of the model's result."""
        outcome = self.model(input_ids=input_ids)
        found: torch.Tensor = getattr(outcome, self._result)
        return found


def operator_sample() -> Made:
    """Operators of many kinds: element by element, reductions, foreach, indexing, products."""

    def run(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        scaled = torch._foreach_mul([x, y, x + y], 0.5)
        softened = torch.softmax(x @ y.t(), -1)
        parts = torch.cat([x[:, ::2], y[:, 1::2]], 1)
        taken = torch.index_select(parts, 0, index)
        normal = nn.functional.layer_norm(taken, taken.shape[-1:])
        ordered = torch.sort(normal, -1).values.cumsum(-1)
        return [*scaled, softened, ordered, x.sum(0), y.amax(1), torch.where(x > 0, x, y).std()]

    x, y = (torch.randn(128, 256, device=DEVICE) for _ in range(2))
    return run, (x, y, torch.randint(0, 128, (64,), device=DEVICE))


def mlp(layers: int = 8, width: int = 512) -> Made:
    """Linear layers with ReLU between them."""
    modules = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*modules).to(DEVICE).eval()
    return model, (torch.randn(16, width, device=DEVICE),)


def encoder_layer() -> Made:
    """An encoder layer of torch's own."""
    layer = nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, batch_first=True)
    return layer.to(DEVICE).eval(), (torch.randn(4, 64, 256, device=DEVICE),)


def bert() -> Made:
    """BERT's layers, two of them."""
    import transformers

    config = transformers.BertConfig(num_hidden_layers=2)
    model = transformers.BertModel(config).to(DEVICE).eval()
    ids = torch.randint(0, config.vocab_size, (2, 64), device=DEVICE)
    return OnlyTensor(model, "last_hidden_state"), (ids,)


def gpt2() -> Made:
    """GPT-2's layers, two of them."""
    import transformers

    config = transformers.GPT2Config(n_layer=2, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).to(DEVICE).eval()
    ids = torch.randint(0, config.vocab_size, (2, 64), device=DEVICE)
    return OnlyTensor(model, "logits"), (ids,)


def llama() -> Made:
    """Llama's layers, narrower, in bfloat16."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=4096, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(0, config.vocab_size, (2, 64), device=DEVICE)
    return OnlyTensor(model, "logits"), (ids,)


def resnet50() -> Made:
    """ResNet-50 as timm builds it."""
    import timm

    model = timm.create_model("resnet50", pretrained=False).to(DEVICE).eval()
    return model, (torch.randn(2, 3, 224, 224, device=DEVICE),)


def vit() -> Made:
    """The smallest ViT of timm."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).to(DEVICE).eval()
    return model, (torch.randn(2, 3, 224, 224, device=DEVICE),)


MODELS: Mapping[str, Callable[[], Made]] = {
    "operators": operator_sample,
    "mlp": mlp,
    "encoder": encoder_layer,
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "resnet50": resnet50,
    "vit": vit,
}
