"""Roles of backends and residents: those that only some devices have are present or None."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.backends import CpuBackend, NullBackend, Prepared, result_source, slot_triggers
from offload.backends.cpu.streaming import CpuWeights
from offload.load import budget
from offload.load.offline import load_offline_model
from offload.load.place import place
from offload.native import _native
from offload.plan import SlotKind
from offload.plan.streaming import Streaming
from offload.program import Role

ROLES = ("opaque", "weights", "timing", "offline", "sizes", "lanes")


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture
def model() -> Deep:
    torch.manual_seed(0)
    return Deep().eval()


@pytest.fixture
def captured(model: Deep) -> offload.Captured:
    return offload.capture(model, torch.zeros(4, 64))


def has(backend: object) -> set[str]:
    return {role for role in ROLES if getattr(backend, role) is not None}


def test_each_backend_has_the_roles_of_its_device() -> None:
    cuda = pytest.importorskip("offload.backends.cuda")
    ascend = pytest.importorskip("offload.backends.ascend")
    assert has(NullBackend()) == set()
    assert has(CpuBackend()) == {"weights", "sizes"}
    assert has(cuda.CudaBackend()) == {"opaque", "weights", "timing", "lanes"}
    assert has(ascend.AscendBackend()) == {"weights", "timing", "offline"}
    assert has(ascend.TorchAscendBackend()) == {"weights", "timing", "offline"}


def test_a_device_without_a_role_refuses_what_needs_it(captured: offload.Captured) -> None:
    with pytest.raises(offload.BackendUnavailable, match="'null' cannot stream weights from a sto"):
        captured.load("null", weights_budget="1 MiB")
    with pytest.raises(offload.BackendUnavailable, match="'null' loads no offline models"):
        load_offline_model(Path("model.om"), "null", scheduling="offload")


class Placed(CpuWeights):
    """Prepares again once weights have places, or has nothing to prepare."""

    def __init__(self, *, prepares: bool) -> None:
        super().__init__(64)
        self.prepares = prepares
        self.given: list[Streaming] = []
        self.made: list[Prepared] = []

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        self.given.append(streaming)
        self.made.append(dataclasses.replace(prepared) if self.prepares else prepared)
        return self.made[-1]


@pytest.mark.parametrize("prepares", [True, False])
def test_what_is_prepared_for_streamed_weights_is_placed_and_loaded(
    prepares: bool, model: Deep, captured: offload.Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preparation that is returned unchanged is not placed again."""
    role = Placed(prepares=prepares)
    placed: list[Prepared] = []
    instantiated: list[Prepared] = []

    def noted_place(prepared: Prepared, backend: Any) -> Any:
        placed.append(prepared)
        return place(prepared, backend)

    class Noted(CpuBackend):
        weights = role

        def instantiate(self, prepared: Prepared, plan: Any) -> Any:
            instantiated.append(prepared)
            return super().instantiate(prepared, plan)

    monkeypatch.setattr(budget, "place", noted_place)
    x = torch.randn(4, 64)
    with captured.load(Noted(), weights_budget="80 KiB") as run, torch.no_grad():
        assert run.streaming.plan.transfers
        assert role.given[-1].pieces == run.streaming.plan.pieces
        torch.testing.assert_close(run(x), model(x))
    assert [id(one) for one in instantiated] == [id(one) for one in role.made]
    assert [id(one) for one in placed] == [id(one) for one in role.made if prepares]


def test_a_stream_of_the_host_answers_as_those_of_devices_do(
    captured: offload.Captured, model: Deep
) -> None:
    """Weights read where they are stored have no store in memory; their waits are always known."""
    with captured.load(weights_budget="80 KiB") as run, torch.no_grad():
        run(torch.zeros(4, 64))
        assert (run.streaming.store_bytes, run.streaming.shared_store_bytes) == (None, None)
        assert run.streaming.wait_ns is not None
        assert run.streaming.wait_ns >= 0
        assert run.streaming.discarded_bytes == 0
    asked = ("store_bytes", "shared_store_bytes", "wait_ns", "discarded_bytes")
    for stream in (_native.WeightStream, _native.DeviceWeightStream):
        assert [name for name in asked if not hasattr(stream, name)] == []


def replay(**python: Any) -> _native.Replay:
    """A replay of a resident without a device and without roles."""
    spec = _native.CallSpec(
        device="cpu",
        inputs=[],
        outputs=[],
        results=[],
        weights=[],
        overlaps=[],
        feature_map_slot=0,
        alignment_bytes=1,
        shapes=_native.CallShapes(inputs=[], outputs_bytes=[], results=[], feature_map_bytes=0),
    )
    return _native.Replay(
        spec=spec,
        triggers=[_native.Trigger.FEATURE_MAP],
        resident=_native.NullResident([], 0, 0, [5]),
        host_scheduled=False,
        positional=[],
        keyword={},
        match=lambda args, kwargs: [],
        result_form="list",
        build_result=lambda tensors: tensors,
        match_buffers=lambda out: [],
        check_feature_map=lambda feature_map: None,
        **python,
    )


def test_a_call_brings_what_a_role_of_the_resident_takes() -> None:
    with pytest.raises(ValueError, match="caller's stream is for a resident on a device with str"):
        replay(current_stream=lambda device: 0)
    with pytest.raises(ValueError, match="states of generators are drawn for a resident whose"):
        replay(draw=lambda: [0, 0])
    replay().close()


def test_what_slots_and_results_are_called_on_the_native_side(captured: offload.Captured) -> None:
    with captured.load() as run:
        triggers = dict(
            zip((slot.kind for slot in run.plan.slots), slot_triggers(run.plan), strict=True)
        )
    assert triggers[SlotKind.INPUT] == triggers[SlotKind.OUTPUT] == _native.Trigger.IO
    assert triggers[SlotKind.WEIGHT] == _native.Trigger.WEIGHT
    assert triggers[SlotKind.FEATURE_MAP] == _native.Trigger.FEATURE_MAP
    assert result_source(Role.WEIGHT) == _native.ResultSource.WEIGHT
    with pytest.raises(KeyError):
        result_source(Role.ACTIVATION)
