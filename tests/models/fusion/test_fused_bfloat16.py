"""Models in bfloat16, fused: as near to float64 as eager, packed or not, masked or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.long]

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


class Block(nn.Module):
    """A transformer block of widths that fill no vector."""

    def __init__(self, width: int = 40, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 77), nn.Linear(77, width)

    def forward(self, x, mask):
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@torch.no_grad()
@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("tokens", [1, 3, 19, 150])
def test_a_block_is_as_near_to_float64_as_eager(tokens, mask_dtype):
    """At most twice eager's largest error, and half a unit in the last place of the results."""
    torch.manual_seed(0)
    model = Block().eval()
    wide = Block().eval().double()
    model.bfloat16()
    wide.load_state_dict(model.state_dict())
    x = torch.randn(1, tokens, 40, dtype=torch.bfloat16)
    seen = torch.rand(1, 1, tokens, tokens) < 0.8
    mask = seen if mask_dtype == torch.bool else (seen.float() * 2 - 2).to(mask_dtype)
    run = offload.capture(model, x, mask).load(fuse=True)
    for given in (x, torch.randn_like(x)):
        found, eager = run(given, mask), model(given, mask)
        exact = wide(given.double(), mask if mask_dtype == torch.bool else mask.double())
        bound = 2 * (eager - exact).abs().max() + 2**-8 * exact.abs().max()
        assert found.dtype == torch.bfloat16
        assert ((found - exact).abs() <= bound).all()
    assert run.fusion is not None
    assert run.proof is not None
    assert not run.fusion.kept
    assert run.proof.n_failed == 0
    names = [one.name for one in run.fusion.proofs]
    assert sum("attention" in name for name in names) == 1
    assert sum("mm" in name for name in names) == 4
    assert len(run.fusion.packed_bytes) == (4 if 2 <= tokens <= 128 else 0)
