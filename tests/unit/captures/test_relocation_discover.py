"""Discovery on hand-made captures: the class of each word of a kernel's arguments."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
from graph_captures import LAYOUTS, MIB, SIZES, Layout, capture, kernel, memcpy, pack
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.backends.captured.relocation.captures import (
    Allocation,
    GraphCapture,
    GraphNode,
    NodeKind,
    OwnedRange,
)
from offload.backends.captured.relocation.discover import discover
from offload.backends.captured.relocation.words import CapturesDiffer, Noise, Word
from offload.errors import CaptureError

Arguments = Callable[[Layout], bytes]

LEAVE_OUT = (
    "leave the operator that launches it out of the captured model .* verify=False changes nothing"
)


def of_one_kernel(arguments: Arguments, **changes: object) -> list[GraphCapture]:
    return [capture(kernel(arguments(one)), layout=one, **changes) for one in LAYOUTS]


def test_addresses_become_a_value_and_an_offset_and_integers_stay():
    found = discover(of_one_kernel(lambda at: pack(at[1], 7, at[0] + 512, 0x2000000020)), 2)
    assert found.words == (Word(0, 0, 0, 1, 0), Word(0, 0, 16, 0, 512))
    assert (found.noise, found.constants, found.scratch_bytes) == ((), (), ())


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 4100, -8, -4096, MIB // 2])
def test_interior_past_the_end_and_negative_offsets_belong_to_the_allocation(offset):
    found = discover(of_one_kernel(lambda at: pack(at[0] + offset)), 2)
    assert found.words == (Word(0, 0, 0, 0, offset),)


def test_only_scratch_that_words_name_is_numbered():
    found = discover(of_one_kernel(lambda at: pack(at[2] + 8, at[2], at[1])), 2)
    assert [word.value for word in found.words] == [2, 2, 1]
    assert found.scratch_bytes == (SIZES[2],)
    assert discover(of_one_kernel(lambda at: pack(at[1])), 2).scratch_bytes == ()


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


def test_a_stale_pointer_in_a_tail_is_noise():
    """It points into the first layout in one capture, and elsewhere in the other."""
    found = discover(
        of_one_kernel(lambda at: pack(at[0], [at[1], 0x1234, at[2], 99][at.number])), 2
    )
    assert found.words == (Word(0, 0, 0, 0, 0),)
    assert [one.offset_bytes for one in found.noise] == [8]


def test_an_address_that_only_the_first_of_two_captures_had_otherwise_is_relocated():
    """It may be noise, which can be patched; if it is not, leaving it would be wrong."""
    found = discover(of_one_kernel(lambda at: pack(at[0] + 64 if at.number != 1 else at[1])), 2)
    assert found.words == (Word(0, 0, 0, 0, 64),)
    assert found.noise == ()


@pytest.mark.parametrize("noise_first", [True, False])
def test_a_number_that_differs_with_the_layout_is_refused_beside_noise(noise_first):
    """As a distance of two addresses in 32 bits, with uninitialised padding."""

    def arguments(at: Layout) -> bytes:
        parts = [at.number + 1, (at[1] - at[0]) // 512]
        return struct.pack("<II", *parts[:: 1 if noise_first else -1])

    with pytest.raises(CaptureError, match=r"parameter 0 .* differs between captures"):
        discover(of_one_kernel(arguments), 2)


def test_bytes_of_noise_that_are_alike_by_chance_stay_noise():
    content = [b"\1\2\3\4", b"\1\2\6\4", b"\5\2\3\6", b"\7\7\7\7"]
    found = discover(of_one_kernel(lambda at: content[at.number] + bytes(4)), 2)
    assert found.noise == (Noise(0, 0, 0, content[0] + bytes(4), content[1] + bytes(4)),)
    assert found.noise[0].mask == b"\0\0\xff\0\0\0\0\0"


def test_stale_pointers_of_one_layout_are_noise():
    """Their upper halves are those of the layout; the lower halves are stale."""
    found = discover(
        of_one_kernel(lambda at: pack([at[1], at[2] + 8, at[0], at[1] + 64][at.number])), 2
    )
    assert found.words == ()
    assert [one.offset_bytes for one in found.noise] == [0]


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


def test_a_look_alike_that_is_the_same_in_every_capture_is_an_integer():
    found = discover(of_one_kernel(lambda _: pack(0x7ABC_DEF0_1230)), 2, (), lambda value: False)
    assert found.words == ()


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


def test_another_offset_in_another_layout_is_refused():
    with pytest.raises(CaptureError, match="is not an address of an allocation in each of them"):
        discover(of_one_kernel(lambda at: pack(at[0] + at.number // 2 * 8)), 2)


def test_a_difference_of_addresses_is_refused():
    with pytest.raises(CaptureError, match="is not an address"):
        discover(of_one_kernel(lambda at: pack(at[1] - at[0])), 2)


@pytest.mark.parametrize("lead", [3, 6, 9])
def test_an_unaligned_address_is_refused_by_name(lead):
    aligned = "expected addresses at multiples of 4; pass each address to a custom kernel as a"
    with pytest.raises(
        CaptureError, match=f"an address at byte {lead} of its arguments: {aligned}"
    ):
        discover(of_one_kernel(lambda at: bytes(lead) + pack(at[0]) + bytes(9)), 2)


@pytest.mark.parametrize("lead", [4, 12])
def test_an_address_in_the_middle_of_a_word_is_followed(lead):
    """As in a packed structure, or in uninitialised memory of a structure of four-byte numbers."""
    found = discover(of_one_kernel(lambda at: bytes(lead) + pack(at[0] + 8) + bytes(9)), 2)
    assert found.words == (Word(0, 0, lead, 0, 8),)
    assert found.noise == ()


def test_addresses_in_the_middle_of_words_follow_each_other_and_end_the_arguments():
    found = discover(of_one_kernel(lambda at: b"\1\0\0\0" + pack(at[0], at[1], at[2] + 4)), 2)
    assert found.words == (Word(0, 0, 4, 0, 0), Word(0, 0, 12, 1, 0), Word(0, 0, 20, 2, 4))


def test_beside_an_address_in_the_middle_of_a_word_noise_is_noise():
    def arguments(at: Layout) -> bytes:
        return struct.pack("<I", at.number + 1) + pack(at[0]) + struct.pack("<I", 9 - at.number)

    found = discover(of_one_kernel(arguments), 2)
    assert found.words == (Word(0, 0, 4, 0, 0),)
    assert found.noise == (
        Noise(0, 0, 0, b"\1\0\0\0", b"\2\0\0\0"),
        Noise(0, 0, 12, b"\x09\0\0\0", b"\x08\0\0\0"),
    )


def test_a_number_beside_an_address_in_the_middle_of_a_word_is_refused():
    def arguments(at: Layout) -> bytes:
        return struct.pack("<I", (at[1] - at[0]) // 512) + pack(at[0]) + bytes(4)

    with pytest.raises(CaptureError, match=r"parameter 0 .* differs between captures"):
        discover(of_one_kernel(arguments), 2)


def test_host_tables_may_hold_addresses_in_the_middle_of_words():
    captures = [
        capture(memcpy(pack(0, one[2]), struct.pack("<I", 7) + pack(one[1]) + bytes(4)), layout=one)
        for one in LAYOUTS
    ]
    assert discover(captures, 2).words == (Word(0, 0, 8, 2, 0), Word(0, 1, 4, 1, 0))


@pytest.mark.parametrize("offset", [-3 * MIB, 5 * MIB, -(1 << 36), 1 << 33])
def test_an_address_far_outside_of_an_allocation_is_followed(offset):
    """Where an index of 0 would lie; no two layouts have anything else at that distance."""
    found = discover(of_one_kernel(lambda at: pack(at[0] + offset, at[1])), 2)
    assert found.words == (Word(0, 0, 0, 0, offset), Word(0, 0, 8, 1, 0))


@pytest.mark.parametrize("tag", [1 << 57, 1 << 63, 0xFF << 56])
def test_an_address_with_a_tag_above_it_is_refused(tag):
    """How to combine the tag with another address is unknown."""
    with pytest.raises(CaptureError, match=r"parameter 0 .* differs between captures"):
        discover(of_one_kernel(lambda at: pack(at[0] | tag)), 2)


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


@pytest.mark.parametrize("what", ["shifted", "difference", "wide difference", "hashed"])
def test_what_is_made_of_addresses_is_refused(what):
    make = {
        "shifted": lambda at: pack(at[0] >> 4),
        "difference": lambda at: struct.pack("<ii", (at[1] - at[0]) // 4, 5),
        "wide difference": lambda at: pack(at[0] - at[1]),
        "hashed": lambda at: struct.pack("<II", 5, at[0] * 0x9E3779B1 % (1 << 32)),
    }[what]
    with pytest.raises(CaptureError, match=r"parameter 1 .* differs between captures"):
        discover(of_one_kernel(lambda at: pack(at[2]) + make(at)), 2)


@pytest.mark.parametrize("offset", [0, 1, 4000, -64, 0xFF])
@pytest.mark.parametrize("lead", [0, 4])
def test_the_lower_half_of_an_address_is_followed_alone(lead, offset):
    """As where kernels know the upper half from another address; or in stale padding whose lowest
    byte was overwritten by a number, which is then part of the offset.
    """

    def arguments(at: Layout) -> bytes:
        half = struct.pack("<I", at[1] + offset & 0xFFFFFFFF)
        return pack(at[0]) + struct.pack("<I", 5) * (lead // 4) + half + struct.pack("<I", 5)

    found = discover(of_one_kernel(arguments), 2)
    assert found.words == (Word(0, 0, 0, 0, 0), Word(0, 0, 8 + lead, 1, offset, 4))
    assert found.noise == ()


def test_half_an_address_may_end_the_arguments():
    found = discover(of_one_kernel(lambda at: pack(at[0]) + pack(at[1])[:4]), 2)
    assert found.words == (Word(0, 0, 0, 0, 0), Word(0, 0, 8, 1, 0, 4))


def test_beside_half_an_address_noise_is_noise():
    def arguments(at: Layout) -> bytes:
        return struct.pack("<II", at[1] & 0xFFFFFFFF, at.number + 1)

    found = discover(of_one_kernel(arguments), 2)
    assert found.words == (Word(0, 0, 0, 1, 0, 4),)
    assert found.noise == (Noise(0, 0, 4, b"\1\0\0\0", b"\2\0\0\0"),)


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


def test_constants_with_an_owner_are_listed():
    owned = [OwnedRange(0x6000_0000_0000, 4096, "the cuBLAS workspace")]
    found = discover(
        of_one_kernel(lambda at: pack(0x6000_0000_0100, at[0], 0x6000_0000_1000), owned=owned),
        2,
        (),
        lambda value: True,
    )
    assert [(one.offset_bytes, one.owner) for one in found.constants] == [
        (0, "the cuBLAS workspace"),
        (16, "the cuBLAS workspace"),
    ]
    assert found.constants[0].address == 0x6000_0000_0100


def test_an_owner_that_moves_between_captures_keeps_its_place():
    """As the generator's cell, which each capture allocates anew: the first capture's stays."""
    captures = []
    for one in LAYOUTS:
        cell = 0x6000_0000_0000 + one.number * 0x1000
        ranges = [OwnedRange(cell, 16, "the generator's state")]
        captures.append(capture(kernel(pack(cell + 8, one[0])), layout=one, owned=ranges))
    found = discover(captures, 2)
    assert [(one.offset_bytes, one.address) for one in found.constants] == [(0, 0x6000_0000_0008)]
    assert found.noise == ()


def test_an_owners_address_stays_where_its_lower_half_follows_an_allocation():
    """A word that is an owner's address as a whole is not patched by halves."""
    captures = []
    for one in LAYOUTS:
        cell = 0x6000_0000_0000 + (one[1] & 0xFFFF_FFFF)
        ranges = [OwnedRange(cell - 8, 16, "the generator's state")]
        captures.append(capture(kernel(pack(cell, one[0])), layout=one, owned=ranges))
    found = discover(captures, 2)
    assert found.words == (Word(0, 0, 8, 0, 0),)
    assert [(one.offset_bytes, one.owner) for one in found.constants] == [
        (0, "the generator's state")
    ]


def test_of_owners_side_by_side_the_one_is_meant_that_all_captures_agree_on():
    """One past the end of the preceding one, or the beginning of the following one."""
    captures = []
    for one in LAYOUTS:
        first = 0x6000_0000_0000 + one.number * 0x10000
        second = first + 4096 + (512 if one.number == 3 else 0)  # one capture has a gap
        ranges = [OwnedRange(first, 4096, "first"), OwnedRange(second, 64, "second")]
        captures.append(
            capture(kernel(pack(first + 4096, second, one[0])), layout=one, owned=ranges)
        )
    found = discover(captures, 2)
    assert [(one.offset_bytes, one.owner) for one in found.constants] == [
        (0, "first"),
        (8, "second"),
    ]


def test_of_owners_side_by_side_everywhere_an_address_is_that_of_what_lies_there():
    owned = [OwnedRange(0x6000_0000_1000, 64, "second"), OwnedRange(0x6000_0000_0000, 4096, "one")]
    found = discover(of_one_kernel(lambda at: pack(0x6000_0000_1000, at[0]), owned=owned), 2)
    assert [one.owner for one in found.constants] == ["second"]


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


def test_an_address_kept_from_an_earlier_capture_is_refused():
    """A cache filled in the first capture gives the same dead address in every later one."""
    with pytest.raises(
        CaptureError,
        match=r"parameter 1 is always 0x.*freed after it.*must take its memory from torch",
    ):
        discover(of_one_kernel(lambda at: pack(at[0], LAYOUTS[0][1])), 2)


def test_an_address_without_owner_is_refused_where_the_driver_knows_it():
    captures = of_one_kernel(lambda at: pack(at[0], 0x6000_0000_0000))
    asked: list[int] = []

    def is_known_address(value: int) -> bool:
        asked.append(value)
        return value == 0x6000_0000_0000

    with pytest.raises(
        CaptureError,
        match=r"parameter 1 is always 0x600000000000, an address of.*: expected memory of inputs.*"
        "pass the tensor as an input, or make it a parameter or a buffer of the model",
    ):
        discover(captures, 2, (), is_known_address)
    assert asked == [0x6000_0000_0000]
    equal = of_one_kernel(lambda _: pack(1, 2, 0x6000_0000_0000))
    with pytest.raises(CaptureError, match="parameter 2 is always"):
        discover(equal, 2, (), is_known_address)


def test_copies_and_memsets_have_words():
    def nodes(at: Layout) -> list[GraphNode]:
        memset = GraphNode(1, NodeKind.MEMSET, "memset", (0, 64), (pack(at[2]),))
        return [memcpy(pack(at[0] + 64, at[1])), memset]

    found = discover([capture(*nodes(one), layout=one) for one in LAYOUTS], 2)
    assert found.words == (Word(0, 0, 0, 0, 64), Word(0, 0, 8, 1, 0), Word(1, 0, 0, 2, 0))


def test_host_tables_hold_addresses_too():
    def table(at: Layout) -> GraphNode:
        return memcpy(pack(0, at[2]), pack(at[0], 3, at[1] + 8))

    found = discover([capture(table(one), layout=one) for one in LAYOUTS], 2)
    assert found.words == (
        Word(0, 0, 8, 2, 0), Word(0, 1, 0, 0, 0), Word(0, 1, 16, 1, 8),
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
