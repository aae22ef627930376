"""Addresses of host memory left in uninitialised arguments."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from graph_captures import LAYOUTS, Layout, capture, kernel, memcpy, pack

from offload.backends.captured.relocation.captures import (
    GraphCapture,
    GraphNode,
    NodeKind,
    OwnedRange,
)
from offload.backends.captured.relocation.discover import discover
from offload.backends.captured.relocation.words import Discovery, Noise, NoiseKind, Word
from offload.errors import CaptureError

HOST = 0x7E12_3456_7000
DECOY = 0x7DDD_EEEE_8000
# Equal in the two captures of one layout, as the heap is the same; other addresses while that
# lives.
STALE = (HOST + 0x10, HOST + 0x10, HOST + 0x9_0040, HOST + 0xA_0070)
FAR = (HOST, HOST, HOST + (7 << 32) + 16, HOST + (9 << 32) + 32)  # in both halves


def captures_of(arguments, hosts=STALE, make=kernel) -> list[GraphCapture]:
    return [
        dataclasses.replace(
            capture(make(arguments(one)), layout=one), host_words=frozenset({hosts[one.number]})
        )
        for one in LAYOUTS
    ]


def found_in(captures: list[GraphCapture]) -> Discovery:
    return discover(captures, 2, (), lambda value: False, decoy_address=DECOY)


@pytest.mark.parametrize("hosts", [STALE, FAR])
def test_an_address_of_the_host_that_differs_with_the_layout_is_noise(hosts):
    found = found_in(captures_of(lambda at: pack(at[0], hosts[at.number]), hosts))
    assert found.words == (Word(0, 0, 0, 0, 0),)
    assert found.noise == (Noise(0, 0, 8, pack(hosts[0]), pack(DECOY), kind=NoiseKind.HOST),)


def test_it_may_begin_in_the_middle_of_a_word_and_end_the_arguments():
    """As behind a structure of four-byte numbers: all eight bytes are the decoy's."""
    found = found_in(
        captures_of(lambda at: struct.pack("<IQI", 5, FAR[at.number], 6) + pack(at[0]), FAR)
    )
    assert found.words == (Word(0, 0, 16, 0, 0),)
    assert found.noise == (Noise(0, 0, 4, pack(FAR[0]), pack(DECOY), kind=NoiseKind.HOST),)
    for hosts in (STALE, FAR):
        found = found_in(
            captures_of(
                lambda at, hosts=hosts: pack(at[0]) + b"\5\0\0\0" + pack(hosts[at.number]), hosts
            )
        )
        assert found.noise == (Noise(0, 0, 12, pack(hosts[0]), pack(DECOY), kind=NoiseKind.HOST),)


def test_half_of_it_may_be_noise_of_one_layout():
    """Only the upper half follows the layout, as it does where the heap is elsewhere."""
    hosts = (FAR[0], FAR[1] + 0x40, FAR[2], FAR[3])
    found = found_in(captures_of(lambda at: pack(at[0], hosts[at.number]), hosts))
    assert [(one.offset_bytes, one.kind) for one in found.noise] == [(8, NoiseKind.HOST)]


@pytest.mark.parametrize("beside", [(1, 1, 1, 1), (1, 2, 3, 4)])
def test_beside_it_constants_stay_and_noise_of_one_layout_is_noise(beside):
    found = found_in(
        captures_of(
            lambda at: pack(at[0]) + struct.pack("<IQI", beside[at.number], FAR[at.number], 0), FAR
        )
    )
    stale = Noise(0, 0, 12, pack(FAR[0]), pack(DECOY), kind=NoiseKind.HOST)
    number = [struct.pack("<I", one) for one in beside]
    noise = [] if beside[0] == beside[1] else [Noise(0, 0, 8, *number[:2])]
    assert list(found.noise) == [stale, *noise]


def test_a_number_beside_it_that_differs_with_the_layout_is_refused():
    def arguments(at: Layout) -> bytes:
        distance = (at[1] - at[0]) // 512
        return pack(at[0]) + struct.pack("<IQI", distance, FAR[at.number], 0)

    with pytest.raises(CaptureError, match=r"parameter 1 .* is not an address of an allocation"):
        found_in(captures_of(arguments, FAR))


def test_of_one_whose_upper_half_is_constant_both_halves_become_the_decoys():
    """Half a decoy with half a host address could point anywhere."""
    assert len({one >> 32 for one in STALE}) == 1
    found = found_in(captures_of(lambda at: struct.pack("<IQI", 5, STALE[at.number], 6)))
    assert found.noise == (Noise(0, 0, 4, pack(STALE[0]), pack(DECOY), kind=NoiseKind.HOST),)


# ---- half an address, and less -------------------------------------------------------------------


def upper(address: int) -> int:
    return address >> 32


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("beside", [(7, 7, 7, 7), (1, 2, 3, 4)])
def test_the_upper_half_of_an_address_beside_a_number_is_noise(beside, at_end):
    """As where a structure's last four-byte number is written over a tensor's address."""

    def arguments(at: Layout) -> bytes:
        halves = [beside[at.number], upper(at[1])]
        return pack(at[0]) + struct.pack("<II", *(halves if at_end else halves[::-1]))

    (one,) = found_in(captures_of(arguments)).noise
    number = [struct.pack("<I", number) for number in beside]
    halves = [
        struct.pack("<I", upper(LAYOUTS[0][1])),
        struct.pack("<I", upper(DECOY)),
    ]
    order = slice(None, None, 1 if at_end else -1)
    assert one.kind is NoiseKind.UPPER_HALF
    assert one.first == b"".join([number[0], halves[0]][order])
    assert one.again == b"".join([number[1], halves[1]][order])


def test_an_upper_half_that_is_the_decoys_is_changed_all_the_same():
    captures = captures_of(lambda at: struct.pack("<II", 7, upper(at[1])))
    decoy = (upper(LAYOUTS[0][1]) << 32) + 0x1000
    (one,) = discover(captures, 2, (), lambda value: False, decoy_address=decoy).noise
    assert one.again == struct.pack("<II", 7, upper(LAYOUTS[2][1]))


def test_upper_halves_of_the_hosts_addresses_are_told_by_each_capture():
    """The heap and an anonymous mapping may be far apart."""
    halves = (0x5555, 0x5555, 0x7E12, 0x7E13)
    captures = captures_of(lambda at: pack(at[0]) + struct.pack("<II", 7, halves[at.number]))
    with pytest.raises(CaptureError, match=r"parameter 1 .* is not an address of an allocation"):
        found_in(captures)
    told = [
        dataclasses.replace(one, host_upper_halves=frozenset({half}))
        for one, half in zip(captures, halves, strict=True)
    ]
    (one,) = found_in(told).noise
    assert (one.offset_bytes, one.kind) == (8, NoiseKind.UPPER_HALF)
    told[3] = captures[3]
    with pytest.raises(CaptureError, match=r"parameter 1 .* is not an address of an allocation"):
        found_in(told)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_upper_half_beside_a_lower_one_elsewhere_is_refused_for_that(order):
    """An address in two pieces: each is a four-byte number beside another one."""

    def arguments(at: Layout) -> bytes:
        pieces = [at[0] & 0xFFFFFFFF, at[0] >> 32]
        return b"".join(struct.pack("<II", 7, pieces[one]) for one in order)

    pieces = r"holds the lower half of an address at byte \d+ .* the upper half of one"
    with pytest.raises(CaptureError, match=pieces):
        found_in(captures_of(arguments))


def of_parameters(*sizes: int):
    """A kernel whose parameters have these sizes, each aligned to its own."""

    def make(content: bytes) -> GraphNode:
        places, at = [], 0
        for size in sizes:
            at = -(-at // size) * size
            places.append((at, size))
            at += size
        assert at == len(content)
        return GraphNode(1, NodeKind.KERNEL, "loop_kernel", (), (content,), tuple(places))

    return make


def test_a_byte_beside_an_upper_half_does_not_hide_it():
    """A kernel with the lower half elsewhere could form an address from both: refused."""

    def arguments(at: Layout) -> bytes:
        halves = [struct.pack("<I", one) for one in (at[0] >> 32, 5, at[0] & 0xFFFF_FFFF)]
        return halves[0] + bytes([10 + at.number // 2, 0, 0, 0]) + halves[1] + halves[2]

    with pytest.raises(CaptureError, match=r"the lower half of an address .* the upper half"):
        found_in(captures_of(arguments, make=of_parameters(4, 1, 4, 4)))


def test_a_byte_that_follows_the_layout_is_noise():
    """As empty function objects, which are passed as a byte that is never written."""
    stale = (0x4A, 0x4A, 0x5A, 0x6A)
    found = found_in(
        captures_of(
            lambda at: struct.pack("<IB3xQ", 128, stale[at.number], at[0]),
            make=of_parameters(4, 1, 8),
        )
    )
    assert found.words == (Word(0, 0, 8, 0, 0),)
    (one,) = found.noise
    assert (one.offset_bytes, one.kind) == (0, NoiseKind.SMALL)
    assert (one.first, one.again) == (
        struct.pack("<IB3x", 128, 0x4A),
        struct.pack("<IB3x", 128, 0x5A),
    )


@pytest.mark.parametrize("sizes", [(8, 8), (4, 2, 2, 8), (4, 4, 8)])
def test_bytes_of_a_larger_parameter_that_follow_the_layout_are_refused(sizes):
    """They may be part of a number that encodes a location."""
    stale = (0x4A, 0x4A, 0x5A, 0x6A)
    with pytest.raises(CaptureError, match=r"parameter \d .* is not an address of an allocation"):
        found_in(
            captures_of(
                lambda at: struct.pack("<IB3xQ", 128, stale[at.number], at[0]),
                make=of_parameters(*sizes),
            )
        )


@pytest.mark.parametrize("number", range(4))
def test_what_is_no_address_of_the_host_in_every_capture_is_refused(number):
    captures = captures_of(lambda at: pack(at[0], STALE[at.number]))
    captures[number] = dataclasses.replace(captures[number], host_words=frozenset())
    with pytest.raises(CaptureError, match=r"parameter 1 .* is not an address of an allocation"):
        found_in(captures)


@pytest.mark.parametrize("place", ["another allocation", "a guard", "an owner's"])
def test_an_address_of_the_pool_or_of_an_owner_is_never_the_hosts(place):
    """Whatever a capture reports of its memory."""
    first = LAYOUTS[0]
    strange = {"another allocation": first[1], "a guard": first[1] - 4096, "an owner's": HOST + 64}
    words = (strange[place], strange[place], *STALE[2:])
    captures = captures_of(lambda at: pack(at[0], words[at.number]), words)
    owned = [OwnedRange(HOST + 64, 64, "somebody")]
    captures = [dataclasses.replace(one, owned=owned) for one in captures]
    with pytest.raises(CaptureError, match=r"parameter 1 .* is not an address of an allocation"):
        found_in(captures)


def test_host_tables_and_operands_are_read_whole():
    """Every byte of the arguments of a copy or memset is used: there is no padding."""
    tables = captures_of(lambda at: (pack(0, at[2]), pack(at[0], STALE[at.number])),
                         make=lambda parts: memcpy(*parts))  # fmt: skip
    with pytest.raises(CaptureError, match=r"byte 8 of a host table .* is not an address"):
        found_in(tables)

    def memset(content: bytes) -> GraphNode:
        return GraphNode(1, NodeKind.MEMSET, "memset", (64,), (content,))

    with pytest.raises(CaptureError, match=r"memset 'memset' .* is not an address"):
        found_in(captures_of(lambda at: pack(STALE[at.number]), make=memset))
