"""Addresses of the host's memory that are left in arguments which nobody initialised."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from test_relocation_discover import LAYOUTS, Layout, capture, kernel, memcpy, pack

from offload.backends.relocation.captures import GraphCapture, GraphNode, NodeKind, OwnedRange
from offload.backends.relocation.discover import discover
from offload.backends.relocation.words import Discovery, Noise, NoiseKind, Word
from offload.errors import CaptureError

HOST = 0x7E12_3456_7000
DECOY = 0x7DDD_EEEE_8000
# Equal in the two captures of one layout, the heap being the same; other ones while that lives.
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
    """As behind a structure of numbers of four bytes, whose halves belong to different words."""
    found = found_in(
        captures_of(lambda at: struct.pack("<IQI", 5, FAR[at.number], 6) + pack(at[0]), FAR)
    )
    decoy, host = pack(DECOY), pack(FAR[0])
    assert found.noise == (
        Noise(0, 0, 0, b"\5\0\0\0" + host[:4], b"\5\0\0\0" + decoy[:4], kind=NoiseKind.HOST),
        Noise(0, 0, 8, host[4:] + b"\6\0\0\0", decoy[4:] + b"\6\0\0\0", kind=NoiseKind.HOST),
    )
    found = found_in(captures_of(lambda at: pack(at[0]) + b"\5\0\0\0" + pack(STALE[at.number])))
    assert [(one.offset_bytes, len(one.again)) for one in found.noise] == [(8, 8)]
    found = found_in(captures_of(lambda at: b"\5\0\0\0" + pack(FAR[at.number]), FAR))
    assert [(one.offset_bytes, one.again) for one in found.noise] == [
        (0, b"\5\0\0\0" + decoy[:4]),
        (8, decoy[4:]),
    ]


def test_half_of_it_may_be_noise_of_one_layout():
    """The upper half follows the layout alone, as it does where the heap is elsewhere."""
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
    assert [one.offset_bytes for one in found.noise] == [8, 16]
    assert found.noise[0].again[:4] == struct.pack("<I", beside[1])


def test_a_number_beside_it_that_differs_with_the_layout_is_refused():
    def arguments(at: Layout) -> bytes:
        distance = (at[1] - at[0]) // 512
        return pack(at[0]) + struct.pack("<IQI", distance, FAR[at.number], 0)

    with pytest.raises(CaptureError, match=r"parameter 1 .* is no address of an allocation"):
        found_in(captures_of(arguments, FAR))


@pytest.mark.parametrize("number", range(4))
def test_what_is_no_address_of_the_host_in_every_capture_is_refused(number):
    captures = captures_of(lambda at: pack(at[0], STALE[at.number]))
    captures[number] = dataclasses.replace(captures[number], host_words=frozenset())
    with pytest.raises(CaptureError, match=r"parameter 1 .* is no address of an allocation"):
        found_in(captures)


@pytest.mark.parametrize("place", ["another allocation", "a guard", "an owner's"])
def test_an_address_of_the_pool_or_of_an_owner_is_never_the_hosts(place):
    """Whatever a capture says of its memory."""
    first = LAYOUTS[0]
    strange = {"another allocation": first[1], "a guard": first[1] - 4096, "an owner's": HOST + 64}
    words = (strange[place], strange[place], *STALE[2:])
    captures = captures_of(lambda at: pack(at[0], words[at.number]), words)
    owned = [OwnedRange(HOST + 64, 64, "somebody")]
    captures = [dataclasses.replace(one, owned=owned) for one in captures]
    with pytest.raises(CaptureError, match=r"parameter 1 .* is no address of an allocation"):
        found_in(captures)


def test_host_tables_and_operands_are_read_whole():
    """Every byte of what a copy or a memset is given is used: none of it is padding."""
    tables = captures_of(lambda at: (pack(0, at[2]), pack(at[0], STALE[at.number])),
                         make=lambda parts: memcpy(*parts))  # fmt: skip
    with pytest.raises(CaptureError, match=r"byte 8 of a host table .* is no address"):
        found_in(tables)

    def memset(content: bytes) -> GraphNode:
        return GraphNode(1, NodeKind.MEMSET, "memset", (64,), (content,))

    with pytest.raises(CaptureError, match=r"memset 'memset' .* is no address"):
        found_in(captures_of(lambda at: pack(STALE[at.number]), make=memset))
