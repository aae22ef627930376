"""Words, bytes and calls of a header with many tasks on the simulated Ascend device."""

from __future__ import annotations

import struct

import pytest
import torch
from ascend_kernels import AtenCapturer
from ascend_residents import LOOK_ALIKE, gather_by
from aten_kernel import AtenKernel
from simulated_ascend import SimulatedAscendBackend, install

import offload
from offload.native import _native

COPY, LAUNCH = "aclrtMemcpyAsync", "aclrtLaunchKernel"
LAUNCH_WITH_BASES = "aclrtLaunchKernelWithHostArgs"
SELECT, ADD = "aclnnIndexSelect", "aclnnAdd"
N_TASKS, N_IO_WORDS = 6300, 1600
BLOCK_BYTES = 64  # of a kernel's arguments in the table, including alignment of the next one


@pytest.mark.slow
def test_ten_moved_addresses_of_6300_tasks_touch_only_their_words(ascend, monkeypatch):
    """In the executable's report, in the copied bytes, and in the table on the device."""
    n_inputs = N_IO_WORDS // 2
    moved = range(100, 110)
    seen: list[bytes] = []
    monkeypatch.setattr(AtenKernel, "execute", lambda _self, block: seen.append(block))
    backend = install(ascend, monkeypatch, SimulatedAscendBackend(AtenCapturer(ascend)))

    def negate_often(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = list(inputs)
        for step in range(N_TASKS):
            results[step % n_inputs] = results[step % n_inputs].neg()
        return results

    inputs = [torch.ones(4) for _ in range(n_inputs)]
    outputs = [torch.empty(4) for _ in range(n_inputs)]
    with offload.capture(negate_often, *inputs).load(backend.name) as run:
        run(*inputs, out=outputs)
        assert run.last_execution.words_patched == 2 * N_TASKS
        before = seen[-N_TASKS:]
        others = [torch.ones(4) if at in moved else one for at, one in enumerate(inputs)]
        ascend.start_trace()
        run(*others, out=outputs)
        copies = [one for one in ascend.trace if one.startswith(f"{COPY} ")]
        assert len(seen) == 2 * N_TASKS
        after = seen[-N_TASKS:]
        assert run.last_execution.policy == "io"
        assert run.last_execution.slots_changed == len(moved)
        assert run.last_execution.words_patched == len(moved)
        run(*(torch.ones(4) for _ in inputs), out=[torch.empty(4) for _ in outputs])
        assert run.last_execution.words_patched == N_IO_WORDS

    # Each input is an argument of one task, and tasks with such a word are adjacent.
    changed_bytes = BLOCK_BYTES * (len(moved) - 1) + 8
    assert len(copies) == 1
    assert f" bytes={changed_bytes} " in copies[0]
    words = {
        (task, word): new
        for task, blocks in enumerate(zip(before, after, strict=True))
        for word, (old, new) in enumerate(
            zip(*(struct.unpack(f"<{len(one) // 8}Q", one) for one in blocks), strict=True)
        )
        if old != new
    }
    assert sorted(task for task, _ in words) == list(moved)
    assert [words[key] for key in sorted(words)] == [others[at].data_ptr() for at in moved]


class Large:
    """Kernels of two addresses each; a quarter of them have an address of an input or output.

    Slots: inputs and outputs, then the feature map.
    """

    def __init__(self, ascend, refresh, *, n_io_slots, n_tasks=N_TASKS):
        n_io_words = N_IO_WORDS * n_tasks // N_TASKS
        binary = _native.AscendBinary(0, ascend.binary({"nothing": (24, lambda *_: None)}))
        gather, kept = gather_by(ascend, refresh)
        relocations, words = [], []
        for task in range(n_tasks):
            # Tasks with such a word are spread over all of them.
            io = task * n_io_words // n_tasks
            is_io = io != (task - 1) * n_io_words // n_tasks
            slots = [io % n_io_slots if is_io else n_io_slots, n_io_slots]
            for offset, slot in zip((8, 16), slots, strict=True):
                relocations.append((len(words), slot, 64 * task))
                words.append((task, offset))
        assert sum(slot < n_io_slots for _, slot, _ in relocations) == n_io_words
        self.resident = _native.AscendResident(
            device=0,
            arena_bytes=0,
            kernels=[
                (binary.function("nothing"), 1, task, struct.pack("<3Q", LOOK_ALIKE, 0, 0))
                for task in range(n_tasks)
            ],
            words=words,
            relocations=relocations,
            triggers=[_native.Trigger.IO] * n_io_slots + [_native.Trigger.FEATURE_MAP],
            n_launches=n_tasks,
            gather=gather,
            keep=(binary, kept),
        )
        self.n_slots = n_io_slots + 1


@pytest.mark.parametrize("refresh", ["kernel", "operators"])
def test_a_gather_whose_bases_do_not_fit_copies_what_changed_of_them(ascend, refresh):
    large = Large(ascend, refresh, n_io_slots=160)
    assert 40 + 8 * (large.n_slots + 1) > _native.ASCEND_LAUNCH_BYTES
    large.resident.patch([(base, 1 << 32 | base << 20) for base in range(large.n_slots)])
    large.resident.execute()
    first = large.resident.refresh_counts
    assert first["bytes_copied"] == 8 * (large.n_slots + 1)
    ascend.forget_calls()
    large.resident.patch([(base, 1 << 40) for base in range(20, 30)])
    large.resident.execute()
    counts = large.resident.refresh_counts
    assert counts["bytes_copied"] - first["bytes_copied"] == 8 * 10
    assert counts["copies"] == counts["gathers"] == 2
    assert counts["bytes_launched"] == 0
    assert ascend.calls(COPY) == 1
    assert ascend.calls(LAUNCH) == (refresh == "kernel")
    assert ascend.calls(SELECT) == ascend.calls(ADD) == (refresh == "operators")
    large.resident.finish()


@pytest.mark.parametrize("refresh", ["kernel", "operators"])
@pytest.mark.parametrize("n_io_slots", [(20, 40), (160, 320)], ids=["few", "many"])
def test_a_gather_takes_bytes_for_slots_and_the_same_calls_for_all(ascend, refresh, n_io_slots):
    """All slots move; otherwise only the number of slots, or of words, changes."""

    def taken(n_io_slots: int, n_tasks: int) -> tuple[int, dict[str, int]]:
        large = Large(ascend, refresh, n_io_slots=n_io_slots, n_tasks=n_tasks)
        for round_ in (1, 2):
            before = large.resident.refresh_counts
            ascend.forget_calls()
            large.resident.patch(
                [(base, round_ << 40 | base << 20) for base in range(large.n_slots)]
            )
            large.resident.execute()
        counts = large.resident.refresh_counts
        calls = {
            name: ascend.calls(name) for name in (COPY, LAUNCH, LAUNCH_WITH_BASES, SELECT, ADD)
        }
        large.resident.finish()
        large.resident.close()
        sizes = ("bytes_copied", "bytes_launched")
        return sum(counts[size] - before[size] for size in sizes), calls

    few, many = n_io_slots
    found = {
        (slots, tasks): taken(slots, tasks) for slots in n_io_slots for tasks in (1260, N_TASKS)
    }
    fits = refresh == "kernel" and many == 40
    for (slots, _), (n_bytes, calls) in found.items():
        # A base for each slot and the feature map; in launch arguments also zero, and five words.
        assert n_bytes == 8 * (slots + 1) + (8 + 40 if fits else 0)
        assert calls == found[few, N_TASKS][1]
    assert found[few, N_TASKS][1] == {
        COPY: int(not fits),
        LAUNCH: int(refresh == "kernel" and not fits),
        LAUNCH_WITH_BASES: int(fits) if refresh == "kernel" else 2,  # by the operators
        SELECT: int(refresh == "operators"),
        ADD: int(refresh == "operators"),
    }
