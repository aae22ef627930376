"""The thread that calls methods at given times."""

from __future__ import annotations

import threading
import time
from weakref import WeakMethod

from offload.run.alarm import Alarm


class Called:
    def __init__(self, *, fails: bool = False) -> None:
        self.event = threading.Event()
        self.fails = fails

    def ring(self) -> None:
        self.event.set()
        if self.fails:
            raise RuntimeError("a method that fails")


def test_methods_are_called_whatever_others_raise(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    alarm, failing, other = Alarm(), Called(fails=True), Called()
    now = time.monotonic_ns()
    alarm.call_at(now + 2_000_000, WeakMethod(other.ring))
    alarm.call_at(now + 1_000_000, WeakMethod(failing.ring))
    assert failing.event.wait(60)
    assert other.event.wait(60)
    assert [str(one.exc_value) for one in told] == ["a method that fails"]
    again = Called()
    alarm.call_at(time.monotonic_ns(), WeakMethod(again.ring))
    assert again.event.wait(60)
