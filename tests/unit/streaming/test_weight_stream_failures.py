"""Streams of weights that fail, fork or end: typed errors, and the next execution works."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import threading

import pytest
import streams
import torch
from streams import (
    PAGE_BYTES,
    WEIGHT_BYTES,
    Chain,
    Streamed,
    batch,
    three_slots,
    two_slots,
    two_tails,
    write_file,
)

import offload
from offload.native import _native
from offload.timeline import Scheduling


class Picking(Chain):
    """Fails in the middle where the picked row does not exist."""

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            x = torch.relu(x @ layer)
        x = torch.index_select(x, 0, row)
        for layer in self.layers[half:]:
            x = torch.relu(x @ layer)
        return x


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "weights.bin"


def test_memory_that_ran_out_is_told_from_other_failures():
    memory_bytes = 1 << 50  # more than the address space
    weight = _native.StreamedWeight(
        name="small",
        size_bytes=PAGE_BYTES,
        pieces=[(0, PAGE_BYTES, 0, False)],
        source=torch.zeros(PAGE_BYTES, dtype=torch.uint8),
    )
    with pytest.raises(offload.OutOfMemory, match=f"need {memory_bytes} bytes of memory"):
        _native.WeightStream(
            memory_bytes=memory_bytes,
            granule_bytes=PAGE_BYTES,
            weights=[weight],
            transfers=[],
            n_launches=1,
        )


def test_a_truncated_file_fails_the_launch_that_needs_it(file):
    both = Streamed(Chain(4), (batch(),), two_slots, file=file)
    both.check(batch())
    whole = file.read_bytes()
    os.truncate(file, streams.HEADER_BYTES + 2 * WEIGHT_BYTES + 100)
    for _ in range(2):
        with pytest.raises(
            offload.ExecutionError, match=r"layers\.\d: .*weights\.bin: (it was written|expected)"
        ):
            both.run(batch())
    file.write_bytes(whole)
    both.stream.refresh()
    both.check(batch())
    both.check(batch())


def test_a_file_that_is_deleted_stays_readable(file):
    both = Streamed(Chain(4), (batch(),), two_slots, file=file)
    file.unlink()
    for _ in range(5):
        both.check(batch())
    both.stream.refresh()
    with pytest.raises(offload.ExecutionError, match=r"weights\.bin: cannot be opened"):
        both.run(batch())


def test_a_launch_that_fails_abandons_the_pass(file):
    x, good, bad = batch(), torch.tensor([0, 2]), torch.tensor([0, 9])
    for scheduling in Scheduling:
        both = Streamed(Picking(6), (x, good), three_slots, file=file, scheduling=scheduling)
        both.check(x, good)
        for generation in range(2, 6):
            with pytest.raises(offload.ExecutionError, match="index_select"):
                both.run(x, bad)
            both.check(x, good)
            assert both.stream.generation == generation


def test_loading_what_is_not_there(file):
    both = Streamed(Chain(3), (batch(),), two_tails, file=file, load=False)
    os.truncate(file, 5000)
    with pytest.raises(offload.FileError, match=r"layers\.\d: .*got"):
        both.stream.load()
    write_file(file, both.weights)
    both.stream.load()
    both.check(batch())


def stream_of(source, **changes):
    arguments = {
        "memory_bytes": 8192,
        "granule_bytes": PAGE_BYTES,
        "weights": [
            _native.StreamedWeight(
                name="one", size_bytes=8192, pieces=[(0, 8192, 0, False)], source=source
            )
        ],
        "transfers": [],
        "n_launches": 1,
    }
    return _native.WeightStream(**(arguments | changes))


def test_what_cannot_be_streamed_is_refused(tmp_path):
    content = torch.arange(8192).to(torch.uint8)
    for source, message in [
        (_native.FileRange(str(tmp_path / "none"), 0), "one: .*cannot be opened"),
        (_native.FileRange(str(tmp_path), 0), "regular file"),
        (_native.FileRange(__file__, 10**7), "expected 8192 bytes at offset 10000000, got 0"),
    ]:
        with pytest.raises(offload.FileError, match=message):
            stream_of(source)
    with pytest.raises(offload.BindingError, match="one: expected a source of 8192 bytes, got 4"):
        stream_of(content[:4])
    with pytest.raises(offload.PlanError, match="one: expected a place within 100"):
        stream_of(content, memory_bytes=100)
    with pytest.raises(offload.PlanError, match="transfer 0: its piece of one is resident"):
        stream_of(content, transfers=[(0, 0, 0, 0, 0, 0)])
    with pytest.raises(offload.ExecutionError, match="give a smaller budget"):
        stream_of(content, memory_bytes=1 << 60)
    stream = stream_of(content)
    stream.load()
    assert torch.equal(stream.tensor(0), content)
    with pytest.raises(offload.BindingError, match="number 1"):
        stream.tensor(1)
    stream.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        stream.load()


def test_two_executables_share_no_stream():
    both = Streamed(Chain(3), (batch(),), two_slots)
    with pytest.raises(offload.ExecutionError, match="another executable"):
        both.executable(both.resident.bound, Scheduling.OFFLOAD)


@pytest.mark.slow
@pytest.mark.parametrize("make_plan", [three_slots, two_tails])
def test_a_fork_has_a_stream_of_its_own(make_plan, file):
    both = Streamed(Chain(5), (batch(),), make_plan, file=file)
    both.check(batch())
    for _ in range(5):
        x = batch()
        expected = both.resident(x)
        child = os.fork()
        if child == 0:
            same = all(torch.equal(both.run(x), expected) for _ in range(3))
            os._exit(0 if same else 1)
        for _ in range(3):
            both.check(batch())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    both.check(batch())
    assert both.stream.generation == 1


@pytest.mark.slow
def test_forks_beside_threads_that_use_the_stream(file):
    both = Streamed(Chain(3), (batch(),), two_slots, file=file)
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            assert len(both.stream.read_modes) == 3
            both.stream.refresh([1])
            both.run(batch())

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            both.stream.refresh()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    both.check(batch())


@pytest.mark.slow
def test_the_interpreter_exits_with_a_busy_worker(tmp_path):
    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import pathlib, torch, streams
        torch.set_num_threads(1)
        file = pathlib.Path(sys.argv[2])
        x, plan = streams.batch(), streams.three_slots
        both = streams.Streamed(streams.Chain(6), (x,), plan, file=file)
        both.run(x)
        both.run.submit(x)
        print("done")
    """
    here = str(pathlib.Path(__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), here, str(tmp_path / "weights")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
