"""Unused CPU results that a launch of another device gives beside its own.

Fused attention on a device returns its seed and offset this way, for a backward pass. An execution
of a Program does not return them, so they are left out of it, and their use is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.console.user_code import user_location
from offload.errors import CaptureError


class UnusedResults:
    """The results that were set aside while a call is recorded.

    Owner: one LaunchRecorder, on whose thread it is called.
    """

    def __init__(self) -> None:
        # The storages are kept, so that their identities are not reused.
        self._refusals: dict[int, tuple[torch.UntypedStorage, str]] = {}

    def set_aside(
        self, operator: str, tensor: torch.Tensor, outcomes: Sequence[Any], device: torch.device
    ) -> bool:
        """Set a new result aside if it lies on the CPU and another result on the device.

        Args:
            operator: the operator that returned it.
            tensor: the result.
            outcomes: all results of the operator.
            device: of the recording.

        Returns:
            Whether it was set aside.
        """
        if tensor.device == device or tensor.device.type != "cpu":
            return False
        if not any(isinstance(one, torch.Tensor) and one.device == device for one in outcomes):
            return False
        place = next(index for index, one in enumerate(outcomes) if one is tensor)
        refusal = (
            f"{user_location()}: result {place} of {operator}, of shape {list(tensor.shape)}, is "
            f"on the CPU, and the recording is on {device}: an execution does not give it, so that "
            f'it must not be used; compute it on the device, with device="{device}"'
        )
        storage = tensor.untyped_storage()
        self._refusals[storage._cdata] = (storage, refusal)
        return True

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse the use of a tensor that was set aside.

        Raises:
            CaptureError: it was; the message names the launch that returned it.
        """
        held = self._refusals.get(tensor.untyped_storage()._cdata)
        if held is not None:
            raise CaptureError(held[1])
