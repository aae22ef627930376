"""Captures of all callers run on one thread of the process, one after the other."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import time

import pytest
import torch

import offload
from offload.backends.captured.capture_thread import run_on_capture_thread


def test_everything_runs_on_one_thread_of_its_own():
    """Libraries keep plans and handles by thread."""
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = [one.result() for one in [threads.submit(ask) for _ in range(6)]]
    assert len({*found, ask()}) == 1
    assert found[0] != threading.get_ident()


def ask() -> int:
    return run_on_capture_thread(threading.get_ident, "cuda")


def test_who_is_there_already_is_refused():
    """It would wait for itself."""
    with pytest.raises(
        offload.CaptureError, match=r"inside the capture of another program.*: load it b"
    ):
        run_on_capture_thread(ask, "cuda")
    assert ask() != threading.get_ident()


def test_errors_come_to_the_caller():
    def fail() -> None:
        raise offload.CaptureError("no")

    with pytest.raises(offload.CaptureError, match=r"^no$"):
        run_on_capture_thread(fail, "cuda")


def test_the_child_of_a_fork_has_a_thread_of_its_own():
    """Also where the parent's thread is busy."""
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait(10)

    waiting = threading.Thread(target=run_on_capture_thread, args=(wait, "cuda"))
    waiting.start()
    begun.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends the child if it waits for a missing thread
        os._exit(0 if ask() != threading.get_ident() else 1)
    end.set()
    waiting.join()
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_capture_leaves_set_meets_no_later_one():
    def leave() -> None:
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)

    def look() -> tuple[str, bool]:
        return torch.empty(1).device.type, torch.is_autocast_enabled("cpu")

    run_on_capture_thread(leave, "cuda")
    assert run_on_capture_thread(look, "cuda") == ("cpu", False)


def test_an_interrupt_waits_until_the_capture_has_ended(monkeypatch):
    """Until then generators hold the capture's state."""
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.05)
        ended.set()

    def interrupted(_: object) -> None:
        begun.wait(10)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(concurrent.futures.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_on_capture_thread(work, "cuda")
    assert ended.is_set()
