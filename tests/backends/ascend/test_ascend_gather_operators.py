"""A table of kernel arguments that operators refresh on the simulated Ascend device."""

from __future__ import annotations

import ctypes
import struct

import npu_device
import pytest
from ascend_client import INTERNAL_ERROR
from ascend_residents import COUNT, Chain, gather_by, live, plus, read

from offload.errors import ExecutionError
from offload.native import _native

COPY = "aclrtMemcpyAsync"
SELECT, ADD = "aclnnIndexSelect", "aclnnAdd"
OPERATOR_CALLS = (f"{SELECT}GetWorkspaceSize", SELECT, f"{ADD}GetWorkspaceSize", ADD)


def test_operators_gather_behind_one_copy_of_the_bases(ascend):
    before = [ascend.calls(one) for one in OPERATOR_CALLS]
    chain = Chain(ascend, refresh="operators")
    chain.bind_first()
    assert [ascend.calls(one) for one in OPERATOR_CALLS] == [
        n + m for n, m in zip(before, (1, 0, 1, 0), strict=True)
    ]
    ascend.start_trace()
    chain.run()
    names = {*OPERATOR_CALLS, COPY, "aclmdlRIExecuteAsync"}
    called = [entry.split()[0] for entry in ascend.trace]
    assert [one for one in called if one in names] == [COPY, SELECT, ADD, "aclmdlRIExecuteAsync"]
    assert [entry for entry in ascend.trace if entry.startswith(COPY) and "kind=5" in entry]
    assert chain.resident.refresh_counts == {
        "copies": 1,
        "bytes_copied": 8 * 4,  # three slots, and the base of words that are no addresses
        "gathers": 1,
        "bytes_launched": 0,
        "plans": 2,
    }
    chain.bind(output=chain.allocate())
    chain.run()
    counts = chain.resident.refresh_counts
    assert (counts["bytes_copied"], counts["gathers"], counts["plans"]) == (8 * 5, 2, 2)


@pytest.mark.parametrize("first", [1, 2], ids=["first", "second"])
def test_an_operator_that_cannot_be_repeated_is_planned_each_time(ascend, first):
    before = live(ascend)
    ascend.fail("aclSetAclOpExecutorRepeatable", INTERNAL_ERROR, nth=first)
    chain = Chain(ascend, refresh="operators")
    assert live(ascend)["executors"] == before["executors"] + 1
    _, y = chain.bind_first()
    for n_gathers in (1, 2, 3):
        chain.bind(output=y)
        chain.run()
        assert read(y) == plus(3)
        counts = chain.resident.refresh_counts
        assert (counts["gathers"], counts["plans"]) == (n_gathers, 2 + n_gathers)
    assert live(ascend)["executors"] == before["executors"] + 1
    chain.resident.close()
    assert {**live(ascend), "bytes": 0} == {**before, "bytes": 0}


def test_operators_give_all_bits_of_a_word(ascend):
    """Sums modulo 2^64; integers that are no addresses are unchanged."""
    seen: list[bytes] = []
    words = [0xFFFF_FFFF_FFFF_FFFF, 0x8000_0000_0000_0000, (1 << 53) + 1, 0]
    binary = _native.AscendBinary(
        0, ascend.binary({"look": (48, lambda block, _: seen.append(block))})
    )
    gather, _ = gather_by(ascend, "operators")
    resident = _native.AscendResident(
        device=0,
        arena_bytes=0,
        kernels=[(binary.function("look"), 1, 0, struct.pack("<6Q", *words, 0, 0))],
        words=[(0, 32), (0, 40)],
        relocations=[(0, 0, 5), (1, 0, 2**64 - 16)],
        triggers=[_native.Trigger.IO],
        n_launches=1,
        gather=gather,
        keep=binary,
    )
    bases = [(1 << 53) + 1, (1 << 62) + 3, 2**64 - 1, 8]
    for base in bases:
        resident.patch([(0, base)])
        resident.execute()
        resident.finish()
    sums = [[(base + 5) % 2**64, (base - 16) % 2**64] for base in bases]
    assert [list(struct.unpack("<6Q", block)) for block in seen] == [[*words, *two] for two in sums]


def test_operators_share_one_workspace_that_lives_as_long_as_they_run(ascend):
    Chain(ascend, refresh="operators").resident.close()  # their kernels are loaded
    before = live(ascend)
    held = []
    for n_bytes in (0, 4096):
        npu_device.operators().sim_operators_reset()
        chain = Chain(ascend, refresh="operators", workspace_bytes=n_bytes)
        held.append(ascend.live_bytes - before["bytes"])
        chain.resident.close()
    assert 4096 <= held[1] - held[0] < 2 * 4096
    chain = Chain(ascend, refresh="operators", workspace_bytes=4096)
    _, y = chain.bind_first()
    chain.resident.execute()
    assert read(y) == [0] * COUNT
    chain.resident.close()
    assert read(y) == plus(3)
    after = live(ascend)
    assert (after["executors"], after["descriptions"]) == (
        before["executors"],
        before["descriptions"],
    )


def test_a_workspace_that_grew_is_refused(ascend):
    for nth in (1, 2):
        ascend.fail("aclSetAclOpExecutorRepeatable", INTERNAL_ERROR, nth=nth)
    chain = Chain(ascend, refresh="operators", workspace_bytes=64)
    _, y = chain.bind_first()
    n_executors = live(ascend)["executors"]
    npu_device.set_more_workspace(128)
    with pytest.raises(ExecutionError, match="aclnnIndexSelect: it needs 128 bytes of workspace"):
        chain.run()
    assert live(ascend)["executors"] == n_executors
    npu_device.set_more_workspace(64)
    chain.run()
    assert read(y) == plus(3)


def test_what_cannot_be_waited_for_is_left_to_the_process(ascend):
    """While the stream is captured elsewhere, nothing that the refresh uses is released."""
    before = live(ascend)
    chain = Chain(ascend, refresh="operators", workspace_bytes=64)
    _, y = chain.bind_first()
    stream = ascend.make("aclrtCreateStream")
    chain.resident.set_stream(stream)
    chain.resident.execute()
    ascend.call("aclmdlRICaptureBegin", stream, 2)
    held = live(ascend)
    del chain.resident
    after = live(ascend)
    assert after["executors"] == held["executors"] == before["executors"] + 2
    assert after["descriptions"] == held["descriptions"] == before["descriptions"] + 6
    model = ctypes.c_uint64()
    ascend.call("aclmdlRICaptureEnd", stream, ctypes.byref(model))
    ascend.call("aclrtSynchronizeStream", stream)
    assert read(y) == plus(3)


def without_kernels(gather):
    return _native.AscendResident(
        device=0,
        arena_bytes=0,
        kernels=[],
        words=[],
        relocations=[],
        triggers=[],
        n_launches=0,
        gather=gather,
    )


def test_a_table_without_words_needs_no_operators(ascend):
    gather, _ = gather_by(ascend, "operators")
    ascend.forget_calls()
    resident = without_kernels(gather)
    resident.execute()
    resident.finish()
    assert sum(ascend.calls(one) for one in OPERATOR_CALLS) == 0


def test_what_gathers_must_be_known(ascend):
    with pytest.raises(ValueError, match="by a kernel or by 'operators', got 'magic'"):
        without_kernels("magic")
