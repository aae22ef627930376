"""Loads on two devices with given durations of launches."""

from offload.backends import CpuBackend
from offload.load import device_times
from offload.load import devices as device_loading

TWO = [CpuBackend(threads=1), CpuBackend(threads=1)]


def let_launches_take(monkeypatch, costs_ns):
    """Set the durations of launches on each device, by its index; calls are not timed.

    None: the launch cannot run there.
    """

    def launch_ns(self, at):
        n_launches = len(self.bound.program.launches)
        return [costs_ns[at](index) for index in range(n_launches)]

    monkeypatch.setattr(device_times.DeviceTimes, "launch_ns", launch_ns)
    monkeypatch.setattr(device_loading._DevicesLoad, "_quicker_single", lambda *_: None)


def alternating(period, other):
    """Ten launches are expensive here, and ten there, so that every device gets some."""
    return [
        lambda index: 1e6 if index // period % 2 else 1e3,
        lambda index: 1e3 if index // period % 2 else other,
    ]
