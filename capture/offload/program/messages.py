"""Launches that exchange the content of a Value with another rank.

Their index is 0: `renumbered` gives them their place.
"""

from __future__ import annotations

import itertools

from offload.errors import ProgramError
from offload.program.collectives import RECEIVES, SENDS, WAIT, Group
from offload.program.launch import Argument, Launch, Operator
from offload.program.program import Program
from offload.program.values import ITEM_BYTES, Role, TensorView, Value, span_bytes


def reached_bytes(program: Program) -> dict[int, int]:
    """By Value, one past the last of its bytes that a launch or a result of a Program names."""
    found: dict[int, int] = {}
    views = itertools.chain(
        *((*launch.views(), *launch.made()) for launch in program.launches),
        (result.view for result in program.results),
    )
    for view in views:
        found[view.value] = max(view.end_bytes, found.get(view.value, 0))
    return found


def check_sendable(value: Value, reached: int) -> None:
    """Check that a Value can be sent as its first tensor.

    Args:
        value: to send.
        reached: its bytes that launches name, as from `reached_bytes`.

    Raises:
        ProgramError: launches use more of it.
    """
    if reached > message_bytes(value):
        raise ProgramError(
            f"%{value.index} ({value.name}) is larger than its first tensor: launches that use it "
            "belong with the launch that made it"
        )


def message_bytes(value: Value) -> int:
    """The bytes of a Value that are sent: those of its first tensor.

    An operator may leave its result in larger memory, whose size need not be the same each time.
    """
    return span_bytes(value.shape, value.strides, value.dtype)


def flat_view(value: Value) -> TensorView:
    """All elements of a Value that are sent, in a row, as they lie."""
    size = message_bytes(value) // ITEM_BYTES[value.dtype]
    return TensorView(value.index, 0, (size,), (1,), value.dtype)


def being_sent(value: Value, index: int, tag: int) -> Value:
    """A Value of no bytes, at this index, that stands for a message being sent."""
    return Value(index, Role.ACTIVATION, (0,), (1,), value.dtype, 0, f"sent_{tag}")


def start_receiving(value: Value, sender: int, tag: int, *, group: Group, place: str) -> Launch:
    """Start to receive all of a Value."""
    arguments = (flat_view(value), sender, tag, group.name)
    return _launch(RECEIVES, arguments, (value.index,), (value.index,), place=place)


def await_received(value: Value, place: str) -> Launch:
    """Wait until a Value has been received."""
    return _launch(WAIT, (flat_view(value),), (value.index,), (value.index,), place=place)


def start_sending(
    value: Value, sent: Value, receiver: int, tag: int, *, group: Group, place: str
) -> Launch:
    """Start to send all of a Value; `sent` is from `being_sent`."""
    arguments = (flat_view(value), receiver, tag, group.name)
    return _launch(SENDS, arguments, (value.index,), (sent.index,), flat_view(sent), place=place)


def await_sent(value: Value, sent: Value, place: str) -> Launch:
    """Wait until a Value has been sent."""
    reads = tuple(sorted((value.index, sent.index)))
    return _launch(WAIT, (flat_view(sent),), reads, (sent.index,), place=place)


def _launch(
    name: str,
    arguments: tuple[Argument, ...],
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    result: TensorView | None = None,
    *,
    place: str,
) -> Launch:
    operator = Operator(name)
    return Launch(0, operator, arguments, (result,), reads, writes, False, None, False, place)
