"""An interrupt while kernels are made ends the call; work already begun runs to its end."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from kernel_sources import needs_compiler

import offload
from offload.compile import fuse, inductor

pytestmark = [needs_compiler, pytest.mark.alone]


def test_what_inductor_has_begun_goes_on(tmp_path, monkeypatch):
    with torch.no_grad():
        bound = offload.capture(lambda x: torch.softmax(x * 2, -1), torch.randn(4, 8)).bound
    lower, waits, ended = inductor.lower, threading.Event(), []

    def lower_slowly(program):
        main = threading.main_thread().ident
        assert main is not None  # it has been started
        signal.pthread_kill(main, signal.SIGINT)
        assert waits.wait(60)
        ended.append(lower(program))
        return ended[0]

    with monkeypatch.context() as patch:
        patch.setattr(inductor, "lower", lower_slowly)
        with pytest.raises(KeyboardInterrupt):
            fuse(bound, cache_folder=tmp_path)
        (worker,) = (one for one in threading.enumerate() if one.name == "offload-compile")
        assert not ended
        waits.set()
        worker.join(60)
    assert ended
    assert fuse(bound, cache_folder=tmp_path).fusion.n_kernels == 1
