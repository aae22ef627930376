"""Streams of an Ascend device: their number, those held, and errors where none is left."""

from __future__ import annotations

import pytest
import torch
from ascend_client import INTERNAL_ERROR, NO_STREAM_RESOURCE, RESOURCE_ALLOC_FAIL
from ascend_kernels import AtenCapturer
from ascend_residents import Chain, live
from simulated_ascend import SimulatedAscendBackend, install

import offload
from offload.errors import OutOfStreams
from offload.native import _native

NAMES = {
    NO_STREAM_RESOURCE: "ACL_ERROR_RT_NO_STREAM_RESOURCE",
    RESOURCE_ALLOC_FAIL: "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL",
}
BUDGETS = {
    "Ascend310B1": 512,
    "Ascend310P3": 1024,
    "Ascend910A": 2048,
    "Ascend910B": 2048,  # of the first generation, as the next entry
    "Ascend910ProB": 2048,
    "Ascend910B1": 1984,
    "Ascend910B4-1": 1984,
    "Ascend910_9391": 1984,
    "Ascend950PR_9579": 1984,
}


@pytest.mark.parametrize("code", NAMES)
def test_streams_that_ran_out_are_an_error_of_their_own(ascend, code):
    ascend.set_software_sq(False)  # models use up streams
    ascend.set_no_stream_code(code)
    ascend.set_soc_name("Ascend310P3")
    held = Chain(ascend)
    ours = _native.ascend_streams()
    ascend.set_stream_limit(ascend.streams_in_use())
    before = live(ascend)
    with pytest.raises(OutOfStreams, match=f"{code} {NAMES[code]}") as raised:
        Chain(ascend)
    assert f"offload holds {ours}, and a device has 1024 (Ascend310P3)" in str(raised.value)
    assert "0 of them free" in str(raised.value)
    assert live(ascend) == before
    held.resident.close()
    assert _native.ascend_streams() == ours - 1
    Chain(ascend).resident.close()


@pytest.mark.parametrize("code", NAMES)
def test_a_capture_that_finds_no_stream_is_the_same_error(ascend, code):
    before = live(ascend)
    ascend.fail("aclmdlRICaptureBegin", code)
    with pytest.raises(OutOfStreams, match=f"beginning to capture a model: {code}"):
        Chain(ascend, form="capture")
    assert live(ascend) == before


@pytest.mark.parametrize(("soc_name", "budget"), BUDGETS.items())
def test_the_budget_is_that_of_the_chip(soc_name, budget):
    assert _native.ascend_stream_budget(soc_name) == budget


@pytest.mark.parametrize("soc_name", ["", "Ascend310", "Ascend031", "Kirin9000"])
def test_no_budget_is_made_up_for_other_chips(soc_name):
    assert _native.ascend_stream_budget(soc_name) is None


def stream_note(run):
    return next(one for one in run.notes() if one.startswith("streams: "))


@pytest.mark.parametrize("form", ["build", "capture"])
def test_how_many_streams_are_held_is_said(form, ascend, monkeypatch):
    backend = SimulatedAscendBackend(AtenCapturer(ascend), form=form)
    install(ascend, monkeypatch, backend)
    captured = offload.capture(torch.sin, torch.ones(3))
    ascend.set_soc_name("Ascend910B1")
    before = _native.ascend_streams()
    with captured.load(backend.name) as run:
        assert _native.ascend_streams() == before + 1
        assert stream_note(run).startswith("streams: 1, as the runtime reports;")
        assert stream_note(run).endswith("Ascend910B1 has 1984 for all its users")
        assert stream_note(run) in run.explain()
    ascend.forget_calls()
    ascend.fail("aclmdlRIGetStreams", INTERNAL_ERROR)
    ascend.set_soc_name("Ascend031")
    with captured.load(backend.name) as run:
        assert _native.ascend_streams() == before + 1
        assert "streams: 1 at least; this runtime does not report" in stream_note(run)
        assert stream_note(run).endswith("how many Ascend031 has is not documented")
    assert _native.ascend_streams() == before
