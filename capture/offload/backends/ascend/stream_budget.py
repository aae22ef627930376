"""A loaded program's use of a device's streams, its scarcest resource."""

from __future__ import annotations

import functools
from collections.abc import Callable

from offload.native import _native


def streams_note(
    device: int,
    resident: _native.AscendResident | _native.AscendCapturedResident,
    *,
    streams_weights: bool,
) -> Callable[[], str]:
    """Return a function that states how many streams an executable holds and the device has.

    Args:
        device: its index.
        resident: its model.
        streams_weights: whether the model runs on the executable's own stream.

    Returns:
        The function; it raises BackendUnavailable or ExecutionError where the device does not
        identify itself.
    """
    of_model, is_reported = resident.model_streams
    return functools.partial(_says, device, of_model + streams_weights, is_reported=is_reported)


def _says(device: int, held: int, *, is_reported: bool) -> str:
    soc_name, _, _ = _native.ascend_device(device)
    budget = _native.ascend_stream_budget(soc_name)
    if budget is None:
        of_device = f"how many {soc_name} has is not documented"
    else:
        of_device = f"{soc_name} has {budget} for all its users"
    if is_reported:
        return (
            f"streams: {held}, as the runtime reports; it does not report streams that it adds "
            f"when one is full; {of_device}"
        )
    return (
        f"streams: {held} at least; this runtime does not report how many a model has "
        f"(aclmdlRIGetStreams, CANN 9.1); {of_device}"
    )
