"""What a command opens: a saved program, or an offline model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from offload.api.captured import open_model
from offload.api.offline_model import OfflineModel
from offload.run import Executable


def load_file(
    file: Path, device: str | None, *, fuse: bool | Literal["auto"] = False, triton: bool
) -> Executable:
    """Open a file and load it, on its own device unless another is named.

    Args:
        file: the program or model.
        device: the name of a device; None for its own.
        fuse: as in `load`.
        triton: whether it may hold sources of Triton kernels, as in `offload.open`.

    Raises:
        OffloadError: as from `offload.open` and `load`.
    """
    opened = open_model(file, triton=triton)
    if isinstance(opened, OfflineModel):
        if fuse:
            raise click.UsageError(f"{file} is an offline model (.om), which holds its kernels")
        return opened.load() if device is None else opened.load(device)
    return opened.load(device, fuse=fuse)
