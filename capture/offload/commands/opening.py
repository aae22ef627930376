"""What a command opens: a saved program, or an offline model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from offload.api.captured import open_model
from offload.api.offline_model import OfflineModel
from offload.run import Executable


def load_file(
    file: Path, device: str | None, *, fuse: bool | Literal["auto"] = False
) -> Executable:
    """What `offload.open` finds in a file, loaded where it belongs unless a device is named.

    Raises:
        OffloadError: as `offload.open` and `load` say.
    """
    opened = open_model(file)
    if isinstance(opened, OfflineModel):
        if fuse:
            raise click.UsageError(f"{file} is an offline model (.om), which holds its kernels")
        return opened.load() if device is None else opened.load(device)
    return opened.load(device, fuse=fuse)
