"""The sizes from which torch's kernels are faster than the templates.

Durations of templates divided by torch's, on a Xeon with AVX-512 and AMX, one thread:

- products in bfloat16: 0.1 to 0.7 at 1 to 4 rows, 0.4 to 1.1 at 8, 1.8 to 2.2 at 16 (of a matrix of
  384 columns and more), 5 at 64;
- attention in bfloat16: 0.4 to 0.8 up to 576 scores in a head, 1.0 at 1,024, 2.2 at 4,096;
- attention in float32, heads of 64 numbers: 0.8 at 128 x 128 scores, 1.0 at 256 x 256 and at
  512 x 256, 0.9 at 16 x 1,024, 1.2 at 64 x 1,024, 1.3 at 512 x 512.
"""

from __future__ import annotations

import functools

import torch

TILED_ROWS = 8
TILED_SCORES = 1024
"""For bfloat16; beyond these oneDNN's products in processor tiles (AMX) are faster."""

BLOCKED_ROWS = 16
BLOCKED_COLUMNS = 256
"""Beyond both, torch's attention is faster: its blocks stay in the caches."""


@functools.cache
def has_tiles() -> bool:
    """Whether this processor multiplies bfloat16 matrices in tiles."""
    return bool(torch.cpu._is_amx_tile_supported())


def why_no_product(dtype: str, rows: int) -> str:
    """Why a product of so many rows stays as recorded; empty if the template is faster."""
    if dtype == "bfloat16" and rows > TILED_ROWS and has_tiles():
        return f"a product of bfloat16 with more than {TILED_ROWS} rows, {_IN_TILES}"
    return ""


def why_no_attention(dtype: str, rows: int, columns: int) -> str:
    """The same for attention with so many scores in each head."""
    if columns > BLOCKED_COLUMNS and rows > BLOCKED_ROWS:
        return (
            f"attention of more than {BLOCKED_ROWS} rows to more than {BLOCKED_COLUMNS}, which "
            "torch computes in blocks"
        )
    if dtype == "bfloat16" and rows * columns > TILED_SCORES and has_tiles():
        return f"attention of bfloat16 with more than {TILED_SCORES} scores, {_IN_TILES}"
    return ""


_IN_TILES = "which torch computes in this processor's tiles (AMX)"
