"""Loads models made by a device's own compiler."""

from __future__ import annotations

from pathlib import Path

import torch

from offload.backends import Backend
from offload.errors import BackendUnavailable
from offload.load.options import named_backend, named_scheduling
from offload.load.place import place
from offload.load.switched import switched
from offload.run import Executable


def load_offline_model(
    path: Path, device: str | torch.device | Backend, *, scheduling: str
) -> Executable:
    """Make an offline model resident; the arguments are those of `OfflineModel.load`.

    Raises:
        BackendUnavailable, CaptureError, BindingError, FileError, ExecutionError: as
            `OfflineModel.load`.
    """
    backend, index = named_backend(device)
    how = named_scheduling(scheduling)
    if backend.offline is None:
        raise BackendUnavailable(
            f"{path}: device {backend.name!r} loads no offline models (.om): load it on npu"
        )
    with switched(path.stem) as asked:
        prepared, its_backend = backend.offline.open(path, index)
        run = Executable(prepared, place(prepared, its_backend), its_backend, how)
        return asked.done(prepared.bound, run, verify=True)
