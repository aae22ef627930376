"""Power of devices: read from kernel counters and from NVML, both made up here."""

import ctypes

import pytest
import torch

import offload
from offload.backends import CpuBackend
from offload.load import watts
from offload.load.placed_devices import placed_devices


class Counter:
    """A package's folder, whose counter advances by so many uJ at each step."""

    def __init__(self, folder, name="package-0", begin_uj=1_000, range_uj=10**9):
        folder.mkdir()
        self.file, self.now, self.range_uj = folder / "energy_uj", begin_uj, range_uj
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.move(0)

    def move(self, uj):
        self.now = (self.now + uj) % (self.range_uj + 1)
        self.file.write_text(f"{self.now}\n")


def test_all_packages_count_and_counters_begin_again(tmp_path, monkeypatch):
    one = Counter(tmp_path / "intel-rapl:0")
    other = Counter(tmp_path / "intel-rapl:1", "package-1", begin_uj=10**9 - 100)
    Counter(tmp_path / "intel-rapl:0:0", "core")
    Counter(tmp_path / "intel-rapl:2", "psys")
    clock = [0]
    monkeypatch.setattr(watts.time, "perf_counter_ns", lambda: clock[0])

    def for_a_second(*uj):
        def function():
            clock[0] += 10**9
            one.move(uj[0])
            other.move(uj[1])

        return function

    found = watts.rapl_watts(
        for_a_second(5_000_000, 3_000_000), for_a_second(30_000_000, 10_000_000), tmp_path
    )
    assert (found.idle, found.busy) == (pytest.approx(8), pytest.approx(40))


def test_counters_that_are_not_there_or_not_to_be_read(tmp_path, monkeypatch):
    with pytest.raises(offload.BindingError, match=r"no counters of packages: give watts="):
        watts.rapl_watts(lambda: None, lambda: None, tmp_path)
    counter = Counter(tmp_path / "intel-rapl:0")
    counter.file.unlink()
    with pytest.raises(offload.BindingError, match=r"energy_uj cannot be read.*give watts="):
        watts.rapl_watts(lambda: None, lambda: None, tmp_path)


@pytest.mark.parametrize("content", ["", "many", "-5", "1.5", "1\n2", "\u00b2"])
def test_counters_that_hold_no_count(tmp_path, content):
    counter = Counter(tmp_path / "intel-rapl:0")
    with pytest.raises(offload.BindingError, match=r"energy_uj.*give watts="):
        watts.rapl_watts(lambda: counter.file.write_text(content), lambda: None, tmp_path)


def test_counters_that_do_not_count(tmp_path):
    """As in virtual machines: no placement is planned by no power."""
    counter = Counter(tmp_path / "intel-rapl:0")
    with pytest.raises(offload.BindingError, match=r"energy_uj did not count.*give watts="):
        watts.rapl_watts(lambda: counter.move(5), lambda: None, tmp_path)


class Nvml:
    """Four functions of the library."""

    def __init__(self, milliwatts, failing=""):
        self.milliwatts, self.failing, self.shut, self.bus_id = iter(milliwatts), failing, 0, b""

    def nvmlInit_v2(self):
        return 9 if self.failing == "nvmlInit_v2" else 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id, device):
        self.bus_id = bus_id
        return 0

    def nvmlDeviceGetPowerUsage(self, device, found):
        if self.failing == "nvmlDeviceGetPowerUsage":
            return 3
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))[0] = next(self.milliwatts)
        return 0

    def nvmlShutdown(self):
        self.shut += 1


def test_a_gpu_is_asked_before_and_after(monkeypatch):
    library = Nvml([60_000, 400_000])
    found = watts.nvml_watts(library, "00000000:3b:00.0", lambda: None)
    assert (found.idle, found.busy) == (60, 400)
    assert (library.bus_id, library.shut) == (b"00000000:3b:00.0", 1)
    for failing, n_shut in (("nvmlInit_v2", 0), ("nvmlDeviceGetPowerUsage", 1)):
        library = Nvml([], failing)
        with pytest.raises(offload.BindingError, match=rf"{failing} of NVML gives status"):
            watts.nvml_watts(library, "0", lambda: None)
        assert library.shut == n_shut


def test_devices_of_one_processor_share_what_it_draws(monkeypatch):
    captured = offload.capture(lambda x: x + 1, torch.ones(2))
    devices = placed_devices(captured.program, [CpuBackend(threads=1), CpuBackend(threads=1)])
    monkeypatch.setattr(watts, "rapl_watts", lambda *_: offload.Watts(idle=10.0, busy=50.0))
    found, notes = watts.measured_watts(devices)
    assert found == (offload.Watts(idle=5.0, busy=45.0),) * 2
    assert notes == [
        "watts of cpu: 10.0 idle, 50.0 busy, by RAPL, of whole packages, others' work included"
    ]
