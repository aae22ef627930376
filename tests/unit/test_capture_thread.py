"""Captures are made on one thread of the process, one behind the other, whoever asks."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading

import pytest

import offload
from offload.backends.cuda.capture_thread import run_on_capture_thread


def test_everything_runs_on_one_thread_of_its_own():
    """Libraries keep plans and handles by thread."""
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = [one.result() for one in [threads.submit(ask) for _ in range(6)]]
    assert len({*found, ask()}) == 1
    assert found[0] != threading.get_ident()


def ask() -> int:
    return run_on_capture_thread(threading.get_ident)


def test_who_is_there_already_is_refused():
    """It would wait for itself."""
    with pytest.raises(offload.CaptureError, match=r"inside of another one's capture.*: load it b"):
        run_on_capture_thread(ask)
    assert ask() != threading.get_ident()


def test_errors_come_to_the_caller():
    def fail() -> None:
        raise offload.CaptureError("no")

    with pytest.raises(offload.CaptureError, match=r"^no$"):
        run_on_capture_thread(fail)


def test_the_child_of_a_fork_has_a_thread_of_its_own():
    """Also where the parent's is busy."""
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait(10)

    waiting = threading.Thread(target=run_on_capture_thread, args=(wait,))
    waiting.start()
    begun.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends it, where it waits for a thread that is not there
        os._exit(0 if ask() != threading.get_ident() else 1)
    end.set()
    waiting.join()
    assert os.waitpid(child, 0)[1] == 0
