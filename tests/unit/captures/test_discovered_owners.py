"""Discovery on hand-made captures: constant addresses, those with an owner and those without."""

from __future__ import annotations

import pytest
from captures_of_one_kernel import of_one_kernel
from graph_captures import LAYOUTS, capture, kernel, pack

from offload.backends.captured.relocation.captures import (
    OwnedRange,
)
from offload.backends.captured.relocation.discover import discover
from offload.backends.captured.relocation.words import Word
from offload.errors import CaptureError


def test_a_look_alike_that_is_the_same_in_every_capture_is_an_integer():
    found = discover(of_one_kernel(lambda _: pack(0x7ABC_DEF0_1230)), 2, (), lambda value: False)
    assert found.words == ()


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
