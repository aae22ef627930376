"""The models of the benchmarks: each makes a module and the inputs of one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]


def mlp16() -> tuple[nn.Module, Tensors]:
    """16 x (Linear 64 to 64, ReLU), batch 1: 32 launches."""
    layers = [layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers).eval(), (torch.randn(1, 64),)


class Elementwise100(nn.Module):
    """50 x (sigmoid, relu) on 64 floats: 100 launches of next to no work."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all of them."""
        for _ in range(50):
            x = torch.relu(torch.sigmoid(x))
        return x


def elementwise100() -> tuple[nn.Module, Tensors]:
    """Elementwise100 and its input."""
    return Elementwise100().eval(), (torch.randn(64),)


class Block(nn.Module):
    """A GPT-style block: causal attention and a feed-forward of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x and the result [batch, tokens, width]."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def gpt_stack(width: int = 64, tokens: int = 16) -> tuple[nn.Module, Tensors]:
    """6 GPT-style blocks."""
    blocks = nn.Sequential(*(Block(width, 4) for _ in range(6))).eval()
    return blocks, (torch.randn(1, tokens, width),)


def sines(n_launches: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A chain of this many launches, each of which reads the result of the preceding one."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n_launches):
            x = x.sin()
        return x

    return run


def wide_inputs() -> Tensors:
    """The inputs of wide_gpt_stack."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(1, 512, 256, generator=generator),)


def wide_gpt_stack() -> tuple[nn.Module, Tensors]:
    """6 GPT-style blocks of width 256 on 512 tokens, the same each time."""
    torch.manual_seed(0)
    return gpt_stack(256)[0], wide_inputs()


class Encoder(nn.Module):
    """A sentence encoder whose inputs are positional and whose result is one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """Shapes: ids, mask and types [batch, tokens]; the result [batch, tokens, width]."""
        result = self.model(input_ids=ids, attention_mask=mask, token_type_ids=types)[0]
        assert isinstance(result, torch.Tensor)
        return result


def minilm() -> tuple[nn.Module, Tensors]:
    """MiniLM on a sentence of 9 tokens."""
    from offload.commands.demo.search import load_encoder

    encoder = load_encoder()
    inputs = encoder.tokenizer("the quick brown fox jumps over it", return_tensors="pt")
    ids, mask, types = (inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
    assert ids.shape == (1, 9)
    return Encoder(encoder.model).eval(), (ids, mask, types)


MODELS: Mapping[str, tuple[str, Callable[[], tuple[nn.Module, Tensors]]]] = {
    "mlp16": ("16 × (Linear 64, ReLU), batch 1", mlp16),
    "elementwise100": ("50 × (sigmoid, relu), 64 floats", elementwise100),
    "gpt_stack": ("6 GPT blocks, width 64, 16 tokens", gpt_stack),
    "minilm": ("MiniLM, 9 tokens", minilm),
}
"""By name: the title in tables, and the function that makes it."""
