"""Offline models: compiled for a device by its vendor's compiler, in the vendor's file format."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from offload.backends import Backend
from offload.errors import FileError
from offload.load.offline import load_offline_model
from offload.run import Executable
from offload.timeline import Scheduling


class OfflineModel:
    """An Ascend offline model (`.om`), to be loaded. Nothing of it was recorded here."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Find the file; it is read when it is loaded.

        Raises:
            FileError: there is no such file.
        """
        self.path = Path(path).absolute()
        if not self.path.is_file():
            raise FileError(f"{self.path}: there is no such file")

    def __repr__(self) -> str:
        """The file, and the next step."""
        return f"OfflineModel({str(self.path)!r}): load() makes it resident on an NPU"

    def load(
        self,
        device: str | torch.device | Backend = "npu",
        *,
        scheduling: str = Scheduling.OFFLOAD,
    ) -> Executable:
        """Make the model resident: its feature map and weights in memory of the executable.

        The executable takes the model's inputs in order (or by their names) and returns a tuple of
        its outputs. Their addresses may be new at each execution; the feature map's is fixed.

        Args:
            device: device type, which may have an index (`npu:1`), or a backend.
            scheduling: as `Captured.load`; the model is one launch either way.

        Raises:
            BackendUnavailable: the device is not available here, or it loads no offline models.
            CaptureError: a shape or dtype of the model is unknown before it is executed, or torch
                does not have it.
            BindingError: there is no such scheduling, or OFFLOAD_DEBUG is not a level.
            FileError: the folder of OFFLOAD_DUMP cannot be written to.
            ExecutionError: the file cannot be loaded, or the device has no memory for it.
        """
        return load_offline_model(self.path, device, scheduling=scheduling)
