"""Discovery on hand-made captures: which differing bytes are noise, and which are refused."""

from __future__ import annotations

import random
import struct

import pytest
from captures_of_one_kernel import LEAVE_OUT, of_one_kernel
from graph_captures import LAYOUTS, Layout, capture, pack
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.backends.captured.relocation.captures import (
    GraphNode,
    NodeKind,
)
from offload.backends.captured.relocation.discover import discover
from offload.backends.captured.relocation.words import Noise, Word
from offload.errors import CaptureError


def test_pointer_tables_passed_by_value():
    """As for foreach kernels: thousands of addresses, sizes between them, an uninitialised tail."""

    def table(at: Layout) -> bytes:
        rows = [at[i % 3] + 16 * i for i in range(2000)]
        rest = random.Random(at.number).randbytes(800)
        return pack(*rows) + pack(*range(2000)) + rest

    found = discover(of_one_kernel(table), 2)
    assert len(found.words) == 2000
    assert found.words[7] == Word(0, 0, 56, 1, 112)
    assert {one.offset_bytes for one in found.noise} == set(range(32000, 32800, 8))


@pytest.mark.parametrize(
    "stale",
    [
        # Into the first layout in one capture, elsewhere in the other.
        lambda at: [at[1], 0x1234, at[2], 99][at.number],
        # All of one layout: the upper halves are the layout's, the lower ones stale.
        lambda at: [at[1], at[2] + 8, at[0], at[1] + 64][at.number],
    ],
)
def test_a_stale_pointer_in_a_tail_is_noise(stale):
    found = discover(of_one_kernel(lambda at: pack(at[0], stale(at))), 2)
    assert found.words == (Word(0, 0, 0, 0, 0),)
    assert [one.offset_bytes for one in found.noise] == [8]


def test_bytes_of_noise_that_are_alike_by_chance_stay_noise():
    content = [b"\1\2\3\4", b"\1\2\6\4", b"\5\2\3\6", b"\7\7\7\7"]
    found = discover(of_one_kernel(lambda at: content[at.number] + bytes(4)), 2)
    assert found.noise == (Noise(0, 0, 0, content[0] + bytes(4), content[1] + bytes(4)),)
    assert found.noise[0].mask == b"\0\0\xff\0\0\0\0\0"


def test_a_stale_pointer_to_elsewhere_whose_upper_half_follows_the_layout_is_refused():
    """Nothing shows that its upper half is noise: it may be a separate number beside noise, and the
    proof cannot set it to its value in another layout.
    """
    stale = [0x7F10_0000_1000, 0x7F10_0000_2000, 0x5560_0000_3000, 0x7F10_0000_4000]
    with pytest.raises(CaptureError, match=r"parameter 1 .* differs between captures"):
        discover(of_one_kernel(lambda at: pack(at[0], stale[at.number])), 2)
    stale[2] = 0x7F10_0000_3000
    found = discover(of_one_kernel(lambda at: pack(at[0], stale[at.number])), 2)
    assert [one.offset_bytes for one in found.noise] == [8]


@pytest.mark.parametrize("kind", [NodeKind.MEMCPY, NodeKind.MEMSET])
def test_an_operand_that_differs_in_one_layout_is_refused(kind):
    """A copy has no padding: the difference is memory that each capture allocates separately."""
    captures = [
        capture(GraphNode(1, kind, "copy", (64,), (pack(0x6000_0000_0000 + one.number),)),
                layout=one) for one in LAYOUTS
    ]  # fmt: skip
    with pytest.raises(CaptureError, match=f"operand.*{LEAVE_OUT}"):
        discover(captures, 2)


def test_padding_beside_a_number_is_noise_by_bytes():
    def arguments(at: Layout) -> bytes:
        return struct.pack("<II", 42, [5, 6, 7, 8][at.number])

    found = discover(of_one_kernel(arguments), 2)
    assert [(one.offset_bytes, one.mask) for one in found.noise] == [(0, b"\0\0\0\0\xff\0\0\0")]


def test_noise_at_the_end_of_arguments_that_are_no_multiple_of_a_word():
    found = discover(of_one_kernel(lambda at: pack(at[0]) + bytes([1, 0, 0, at.number])), 2)
    assert found.noise == (Noise(0, 0, 8, b"\1\0\0\0", b"\1\0\0\1"),)
    assert found.noise[0].mask == b"\0\0\0\xff"
    assert found.words == (Word(0, 0, 0, 0, 0),)


def test_beside_an_address_in_the_middle_of_a_word_noise_is_noise():
    def arguments(at: Layout) -> bytes:
        return struct.pack("<I", at.number + 1) + pack(at[0]) + struct.pack("<I", 9 - at.number)

    found = discover(of_one_kernel(arguments), 2)
    assert found.words == (Word(0, 0, 4, 0, 0),)
    assert found.noise == (
        Noise(0, 0, 0, b"\1\0\0\0", b"\2\0\0\0"),
        Noise(0, 0, 12, b"\x09\0\0\0", b"\x08\0\0\0"),
    )


def test_beside_half_an_address_noise_is_noise():
    def arguments(at: Layout) -> bytes:
        return struct.pack("<II", at[1] & 0xFFFFFFFF, at.number + 1)

    found = discover(of_one_kernel(arguments), 2)
    assert found.words == (Word(0, 0, 0, 1, 0, 4),)
    assert found.noise == (Noise(0, 0, 4, b"\1\0\0\0", b"\2\0\0\0"),)


def test_what_cannot_be_explained_is_listed_where_its_node_may_stay():
    def arguments(at: Layout) -> bytes:
        return pack(at[0], at.number)

    with pytest.raises(CaptureError, match=r"parameter 1 .*differs between captures"):
        discover(of_one_kernel(lambda at: pack(at[0], at[1] - at[2])), 2)
    captures = of_one_kernel(lambda at: pack(at[0], at[1] - at[2]))
    found = discover(captures, 2, leaves_unexplained=True)
    assert found.words == (Word(0, 0, 0, 0, 0),)
    (one,) = found.unexplained
    assert one.node == 0
    assert "parameter 1" in one.why
    assert "leave the operator" not in one.why  # its node keeps its captured form instead
    assert discover(of_one_kernel(arguments), 2, leaves_unexplained=True).unexplained == ()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("number"), st.integers(0, 1 << 40)),
            st.tuples(st.integers(0, 2), st.integers(-4096, 5000)),
            st.tuples(st.just("noise"), st.binary(min_size=32, max_size=32)),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_random_arguments_are_named_word_by_word(words):
    def arguments(at: Layout) -> bytes:
        content = b""
        for kind, detail in words:
            if kind == "number":
                content += pack(detail)
            elif kind == "noise":
                # The lowest byte differs between the first two captures, whatever the others hold.
                own = detail[at.number * 8 : at.number * 8 + 8]
                content += bytes([at.number]) + own[1:]
            else:
                content += pack(at[kind] + detail)
        return content

    expected = {
        (index * 8, kind, detail)
        for index, (kind, detail) in enumerate(words)
        if isinstance(kind, int)
    }
    found = discover(of_one_kernel(arguments), 2)
    assert {(one.offset_bytes, one.value, one.value_offset_bytes) for one in found.words} == {
        (offset, min(kind, 2), detail) for offset, kind, detail in expected
    }
    noise = {index * 8 for index, (kind, _) in enumerate(words) if kind == "noise"}
    assert {one.offset_bytes for one in found.noise} == noise
