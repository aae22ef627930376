"""Loads at once, and loads that fail, beside executables that share the store."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from device_streaming import (
    GIVEN,
    LOADS,
    check,
    expected_of,
    failing_load,
    on_devices,
)
from shared_stores import load

import offload
from offload.backends import host_memory
from offload.backends.captured.device_streaming import store_bytes

pytestmark = pytest.mark.slow


def test_room_on_the_host_is_asked_for_what_is_not_there_yet(
    device, headed, headed_budget, monkeypatch
):
    with load(headed, device, headed_budget) as one:
        needed = store_bytes(one.streaming.plan)
        monkeypatch.setattr(host_memory, "free_bytes", lambda: needed // 10)
        load(headed, device, headed_budget).close()
        with pytest.raises(offload.PlanError, match=f"needs {needed} bytes of host memory"):
            load(headed, device, headed_budget, share_store=False)


def test_loads_at_once_share(device, headed, headed_budget, pinned):
    """The second begins when the first has its memory and has read some of it."""
    inputs = [torch.randn(*GIVEN) for _ in range(2)]
    expected = expected_of(headed, inputs)
    others: list[offload.Executable] = []

    def load_another(done_bytes: int, _total: int, _what: str) -> None:
        if done_bytes and not others:
            others.append(load(headed, device, headed_budget))

    with load(headed, device, headed_budget, progress=load_another) as one:
        (other,) = others
        with other:
            assert pinned() == store_bytes(one.streaming.plan)
            check(other, inputs, expected, device.settle)
            check(one, inputs, expected, device.settle)


def test_threads_load_at_once(device, headed, headed_budget, pinned):
    given = torch.randn(*GIVEN)
    expected = expected_of(headed, [given])
    loaded: list[offload.Executable] = []
    begin = threading.Barrier(3)

    def make() -> None:
        begin.wait()
        loaded.append(load(headed, device, headed_budget))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(loaded) == 3
    assert pinned() == store_bytes(loaded[0].streaming.plan)
    for run in loaded:
        check(run, [given], expected, device.settle)
        run.close()
    assert pinned() == 0


def test_who_comes_first_may_fail(device, headed, headed_budget, pinned):
    """The other one reads what the first has not read."""
    given = torch.randn(*GIVEN)
    others: list[offload.Executable] = []

    def stop(done_bytes: int, _total: int, _what: str) -> None:
        if not others:
            others.append(load(headed, device, headed_budget))
        elif done_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(headed, device, headed_budget, progress=stop)
    gc.collect()
    (other,) = others
    with other:
        assert pinned() == store_bytes(other.streaming.plan)
        assert other.streaming.shared_store_bytes == 0
        check(other, [given], expected_of(headed, [given]), device.settle)
    assert pinned() == 0


@pytest.mark.parametrize(("device", "function", "nth"), on_devices(LOADS), indirect=["device"])
def test_a_load_that_fails_beside_one_that_shares_leaves_that_as_it_was(
    function, nth, device, headed, headed_budget
):
    """It uses the existing bytes, and more."""
    given = torch.randn(*GIVEN)
    expected = expected_of(headed, [given])
    load(headed, device, headed_budget).close()
    more = headed_budget + 2 * 64 * 1024
    with load(headed, device, more) as one:
        check(one, [given], expected, device.settle)
        gc.collect()
        held = device.held()
        with (
            failing_load(device, function, nth),
            contextlib.suppress(offload.ExecutionError),  # some calls are no longer made
        ):
            load(headed, device, headed_budget).close()
        gc.collect()
        assert device.held() == held
        assert one.streaming.shared_store_bytes == 0
        check(one, [given], expected, device.settle)
        with load(headed, device, headed_budget) as other:
            assert other.streaming.shared_store_bytes == one.streaming.store_bytes
            check(other, [given], expected, device.settle)
            check(one, [given], expected, device.settle)
