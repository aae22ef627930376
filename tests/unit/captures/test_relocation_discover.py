"""Discovery on hand-made captures: words that hold addresses, halves of them, or neither."""

from __future__ import annotations

import struct

import pytest
from captures_of_one_kernel import LEAVE_OUT, of_one_kernel
from graph_captures import LAYOUTS, MIB, SIZES, Layout, capture, kernel, memcpy, pack

from offload.backends.captured.relocation.captures import (
    Allocation,
    GraphCapture,
    GraphNode,
    NodeKind,
)
from offload.backends.captured.relocation.discover import discover
from offload.backends.captured.relocation.words import CapturesDiffer, Word
from offload.errors import CaptureError


def test_addresses_become_a_value_and_an_offset_and_integers_stay():
    found = discover(of_one_kernel(lambda at: pack(at[1], 7, at[0] + 512, 0x2000000020)), 2)
    assert found.words == (Word(0, 0, 0, 1, 0), Word(0, 0, 16, 0, 512))
    assert (found.noise, found.constants, found.scratch_bytes) == ((), (), ())


def test_only_scratch_that_words_name_is_numbered():
    found = discover(of_one_kernel(lambda at: pack(at[2] + 8, at[2], at[1])), 2)
    assert [word.value for word in found.words] == [2, 2, 1]
    assert found.scratch_bytes == (SIZES[2],)
    assert discover(of_one_kernel(lambda at: pack(at[1])), 2).scratch_bytes == ()


def test_an_address_that_only_the_first_of_two_captures_had_otherwise_is_relocated():
    """It may be noise, which can be patched; if it is not, leaving it would be wrong."""
    found = discover(of_one_kernel(lambda at: pack(at[0] + 64 if at.number != 1 else at[1])), 2)
    assert found.words == (Word(0, 0, 0, 0, 64),)
    assert found.noise == ()


def test_a_look_alike_that_differs_is_refused_with_kernel_parameter_and_values():
    def arguments(at: Layout) -> bytes:
        return pack(7, at[0] ^ (0x1F << 40))

    with pytest.raises(CaptureError, match=r"'fill_kernel' \(node 0\) of aten::fill_ at net.py:3"):
        discover(of_one_kernel(arguments), 2, ["aten::fill_ at net.py:3"])
    values = r"0x[0-9a-f]+, 0x[0-9a-f]+ \(twice in one layout, and in two others\)"
    expected = "expected one allocation and one offset in each layout, or padding"
    with pytest.raises(
        CaptureError, match=rf"parameter 1 .* differs .* {values}; {expected}.*{LEAVE_OUT}"
    ):
        discover(of_one_kernel(arguments), 2)


@pytest.mark.parametrize("lead", [3, 6, 9])
def test_an_unaligned_address_is_refused_by_name(lead):
    aligned = "expected addresses at multiples of 4; pass each address to a custom kernel as a"
    with pytest.raises(
        CaptureError, match=f"an address at byte {lead} of its arguments: {aligned}"
    ):
        discover(of_one_kernel(lambda at: bytes(lead) + pack(at[0]) + bytes(9)), 2)


@pytest.mark.parametrize("lead", [4, 12])
@pytest.mark.parametrize("after", [0, 4, 9])
def test_addresses_in_the_middle_of_words_are_followed(lead, after):
    """As in a packed structure, or in uninitialised memory of a structure of four-byte numbers."""
    found = discover(
        of_one_kernel(lambda at: bytes(lead) + pack(at[0], at[1], at[2] + 4) + bytes(after)), 2
    )
    expected = [(lead, 0, 0), (lead + 8, 1, 0), (lead + 16, 2, 4)]
    assert found.words == tuple(Word(0, 0, *one) for one in expected)
    assert found.noise == ()


@pytest.mark.parametrize(
    "offset",
    [0, 1, 4095, 4096, 4100, -8, -4096, MIB // 2, -3 * MIB, 5 * MIB, -(1 << 36), 1 << 33],
)
def test_an_address_inside_or_outside_of_an_allocation_is_followed(offset):
    """Far away as well, where an index of 0 would lie: only one is at that distance in each."""
    found = discover(of_one_kernel(lambda at: pack(at[0] + offset, at[1])), 2)
    assert found.words == (Word(0, 0, 0, 0, offset), Word(0, 0, 8, 1, 0))


def test_an_address_that_is_far_from_several_allocations_alike_is_refused():
    captures = [
        capture(
            kernel(pack(one[0] + 64 * MIB)),
            layout=one,
            allocations=[Allocation(one[0], 512, 0), Allocation(one[0] + 4 * MIB, 512, 1)],
        )
        for one in LAYOUTS
    ]
    with pytest.raises(CaptureError, match=r"parameter 0 .* differs between captures"):
        discover(captures, 2)


NO_ADDRESSES = {
    "another offset in another layout": lambda at: pack(at[0] + at.number // 2 * 8),
    "shifted": lambda at: pack(at[0] >> 4),
    "hashed": lambda at: struct.pack("<II", 5, at[0] * 0x9E3779B1 % (1 << 32)),
    # How to combine a tag with another address is unknown.
    "tag in bit 57": lambda at: pack(at[0] | 1 << 57),
    "tag in bit 63": lambda at: pack(at[0] | 1 << 63),
    "tag of one byte": lambda at: pack(at[0] | 0xFF << 56),
    "difference": lambda at: pack(at[1] - at[0]),
    "negative difference": lambda at: pack(at[0] - at[1]),
    "difference in 32 bits": lambda at: struct.pack("<ii", (at[1] - at[0]) // 4, 5),
    # As with uninitialised padding on either side.
    "difference after noise": lambda at: struct.pack("<II", at.number + 1, (at[1] - at[0]) // 512),
    "difference before noise": lambda at: struct.pack("<II", (at[1] - at[0]) // 512, at.number + 1),
    "difference before an address in the middle of a word": lambda at: (
        struct.pack("<I", (at[1] - at[0]) // 512) + pack(at[0]) + bytes(4)
    ),
}


@pytest.mark.parametrize("made", NO_ADDRESSES.values(), ids=NO_ADDRESSES)
def test_what_is_made_of_addresses_and_is_none_is_refused(made):
    with pytest.raises(
        CaptureError,
        match=r"parameter 1 .* differs between captures.*is not an address of an allocation",
    ):
        discover(of_one_kernel(lambda at: pack(at[2]) + made(at)), 2)


@pytest.mark.parametrize("offset", [0, 1, 4000, -64, 0xFF])
@pytest.mark.parametrize("lead", [0, 4])
@pytest.mark.parametrize("after", [0, 4])
def test_the_lower_half_of_an_address_is_followed_alone(lead, offset, after):
    """As where kernels know the upper half from another address; or in stale padding whose lowest
    byte was overwritten by a number, which is then part of the offset.
    """

    def arguments(at: Layout) -> bytes:
        half = struct.pack("<I", at[1] + offset & 0xFFFFFFFF)
        five = struct.pack("<I", 5)
        return pack(at[0]) + five * (lead // 4) + half + five * (after // 4)

    found = discover(of_one_kernel(arguments), 2)
    assert found.words == (Word(0, 0, 0, 0, 0), Word(0, 0, 8 + lead, 1, offset, 4))
    assert found.noise == ()


def test_half_an_address_whose_upper_half_is_the_same_everywhere_is_refused():
    """A kernel may have the other half as a constant, and would need another one elsewhere."""

    def near(layout: Layout) -> dict[str, object]:
        base = 0x7F00_0000_0000 + layout[0] % (64 * MIB)
        sizes = enumerate(SIZES[:2])
        return {
            "allocations": [Allocation(base + 16 * MIB * one, size, one) for one, size in sizes]
        }

    captures = [
        capture(
            kernel(struct.pack("<II", layout[0] % (64 * MIB), 5)),
            layout=layout,
            **near(layout),
        )
        for layout in LAYOUTS
    ]
    with pytest.raises(CaptureError, match=r"parameter 0 .* differs"):
        discover(captures, 2)


def test_an_address_between_two_allocations_that_are_equally_far_is_refused():
    """A pool with the same distances in each layout could not distinguish them."""

    def at_fixed_distance(layout: Layout) -> dict[str, object]:
        base = layout[0]
        return {"allocations": [Allocation(base, 512, 0), Allocation(base + MIB, 512, 1)]}

    captures = [
        capture(kernel(pack(one[0] + (MIB + 512) // 2)), layout=one, **at_fixed_distance(one))
        for one in LAYOUTS
    ]
    with pytest.raises(CaptureError, match=f"equally near to two allocations.*{LEAVE_OUT}"):
        discover(captures, 2)
    captures = [
        capture(kernel(pack(one[0] + 600)), layout=one, **at_fixed_distance(one)) for one in LAYOUTS
    ]
    assert discover(captures, 2).words == (Word(0, 0, 0, 0, 600),)


def test_copies_and_memsets_have_words():
    def nodes(at: Layout) -> list[GraphNode]:
        memset = GraphNode(1, NodeKind.MEMSET, "memset", (0, 64), (pack(at[2]),))
        return [memcpy(pack(at[0] + 64, at[1])), memset]

    found = discover([capture(*nodes(one), layout=one) for one in LAYOUTS], 2)
    assert found.words == (Word(0, 0, 0, 0, 64), Word(0, 0, 8, 1, 0), Word(1, 0, 0, 2, 0))


def test_host_tables_hold_addresses_too():
    def table(at: Layout) -> GraphNode:
        in_the_middle = struct.pack("<I", 7) + pack(at[1]) + bytes(4)
        return memcpy(pack(0, at[2]), pack(at[0], 3, at[1] + 8) + in_the_middle)

    found = discover([capture(table(one), layout=one) for one in LAYOUTS], 2)
    assert found.words == (
        Word(0, 0, 8, 2, 0), Word(0, 1, 0, 0, 0), Word(0, 1, 16, 1, 8), Word(0, 1, 28, 1, 0),
    )  # fmt: skip
    strange = [capture(memcpy(pack(0, one[2]), pack(one[0] << 8)), layout=one) for one in LAYOUTS]
    with pytest.raises(CaptureError, match="byte 0 of a host table"):
        discover(strange, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": [kernel(pack(1))]}, "nodes"),
        ({"nodes": [kernel(pack(1)), kernel(pack(2), signature="grid 2")]}, "differently"),
        ({"nodes": [kernel(pack(1)), kernel(pack(2, 3))]}, "differently"),
        ({"edges": []}, "its 1 edges differ from the 0 of another capture"),
        ({"launches": [0, 0]}, "another launch"),
        ({"allocations": []}, "it allocates .* blocks of .* bytes in one capture, and"),
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_captures_of_other_graphs_are_told_apart_from_refusals(number, changes, message):
    captures = [capture(kernel(pack(1)), kernel(pack(2)), layout=one) for one in LAYOUTS]
    assert discover(captures, 2).words == ()
    nodes = captures[number].nodes
    captures[number] = capture(*nodes, layout=LAYOUTS[number])
    fields = {name: getattr(captures[number], name) for name in captures[number].__slots__}
    captures[number] = GraphCapture(**{**fields, **changes})
    with pytest.raises(CapturesDiffer, match=message):
        discover(captures, 2)


def test_two_captures_in_one_layout_must_have_its_addresses():
    captures = [capture(kernel(pack(1)), layout=LAYOUTS[number]) for number in (0, 2, 2, 3)]
    with pytest.raises(CapturesDiffer, match="different addresses"):
        discover(captures, 2)


def test_many_large_nodes_are_read_once_each():
    """Equal parts are compared whole: only the differing parts are read further."""
    big = pack(*range(4096))
    nodes = [kernel(big) for _ in range(500)]
    captures = [
        capture(*nodes, kernel(pack(one[0])), layout=one, launches=[0] * 501, edges=[])
        for one in LAYOUTS
    ]
    found = discover(captures, 2)
    assert [word.node for word in found.words] == [500]
