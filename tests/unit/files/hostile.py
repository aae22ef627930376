"""A valid file with every feature, and its parts to tamper with."""

from __future__ import annotations

import functools
import io
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

import offload
from offload.files import open_saved, save_program
from offload.program import Program


class Model(torch.nn.Module):
    """All features: weights, state, randomness, lists, several results, aliases."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> list[Any]:
        self.calls += 1
        parts = torch.cat([self.linear(x), options["y"][:, 1:].conj().real], dim=1).chunk(2, dim=1)
        dropped = torch.nn.functional.dropout(parts[0], 0.5)
        values, indices = dropped.sort(dim=-1)
        return [x, values, {"indices": indices}, parts[1].to(torch.float64), None]


@functools.cache
def valid_file() -> bytes:
    model = Model()
    with offload.capture(model) as captured:
        model(torch.randn(2, 4), {"y": torch.randn(2, 5, dtype=torch.complex64), "scale": 0.5})
    with tempfile.TemporaryDirectory() as folder:
        save_program(captured.bound, Path(folder) / "m.offload")
        return (Path(folder) / "m.offload").read_bytes()


@functools.cache
def members() -> tuple[bytes, bytes]:
    with zipfile.ZipFile(io.BytesIO(valid_file())) as archive:
        return archive.read("program.json"), archive.read("weights.safetensors")


def tree() -> Any:
    return json.loads(members()[0])


def archive(
    program: bytes | None = None,
    weights: bytes | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as target:
        target.writestr("program.json", members()[0] if program is None else program)
        target.writestr("weights.safetensors", members()[1] if weights is None else weights)
    return buffer.getvalue()


def opened(content: bytes, folder: Path) -> Program:
    path = folder / "hostile.offload"
    path.write_bytes(content)
    return open_saved(path).bound.program
