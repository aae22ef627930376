"""What proved graphs have shown of kernels: at which bytes of their arguments addresses stand.

A kernel is the same function whatever it is launched on, so a program of other sizes needs no
comparison of layouts for kernels that are known: one capture has the addresses, and whose they are,
since each allocation of it lies apart. That holds for one capture at a time: where anything else in
the arguments looks like an address of that capture, or of memory that the driver knows, nothing is
taken from here, and all captures are made and compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence, Set

from offload.backends.captured.relocation.addresses import Layout, Owned
from offload.backends.captured.relocation.captures import GraphCapture, GraphNode, NodeKind
from offload.backends.captured.relocation.discover import GUARD_BYTES, number_scratch
from offload.backends.captured.relocation.words import (
    HALF_BYTES,
    WORD_BYTES,
    Discovery,
    OwnedConstant,
    Word,
)

_LEAST_ADDRESS, _MOST_ADDRESS = 1 << 16, 1 << 57
"""What may be a device's address at all, as in `constants`."""

_Found = tuple[int, int, int, int, int, int]


@dataclasses.dataclass(slots=True)
class _Arguments:
    """Of one kernel, by bytes of its arguments.

    Attributes:
        addresses: where words of eight bytes were addresses of Values, in some launch.
        owned: where they were addresses that an owner keeps.
        unread: bytes that nobody initialised in some launch, as its proof has shown.
    """

    addresses: set[int] = dataclasses.field(default_factory=set)
    owned: set[int] = dataclasses.field(default_factory=set)
    unread: set[int] = dataclasses.field(default_factory=set)


class _Unknown(Exception):
    """Something is not as the known launches of a kernel were."""


class KnownKernels:
    """The kernels of one device.

    Owner: a backend's module, for as long as the process. Thread: callers take turns, or lose
    what another one learns.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._kernels: dict[Hashable, _Arguments] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._kernels)

    def learn(
        self, capture: GraphCapture, discovery: Discovery, sizes_bytes: Sequence[int]
    ) -> None:
        """Take what a graph shows whose proof has succeeded.

        Not of kernels that are given half an address, or one outside of what it is of: one capture
        does not tell whose these are.

        Args:
            capture: compared with others.
            discovery: what was found of it.
            sizes_bytes: of each Value, scratch Values included.
        """
        unclear = {
            word.node
            for word in discovery.words
            if word.size_bytes < WORD_BYTES
            or not 0 <= word.value_offset_bytes <= sizes_bytes[word.value]
        }
        found = {
            index: _Arguments()
            for index, node in enumerate(capture.nodes)
            if node.kind is NodeKind.KERNEL and index not in unclear
        }
        for word in discovery.words:
            if word.node in found:
                found[word.node].addresses.add(word.offset_bytes)
        for constant in discovery.constants:
            if constant.node in found:
                found[constant.node].owned.add(constant.offset_bytes)
        for noise in discovery.noise:
            if noise.node in found:
                end = noise.offset_bytes + len(noise.first)
                found[noise.node].unread.update(range(noise.offset_bytes, end))
        for index in unclear:
            self._kernels.pop(_key(capture.nodes[index]), None)
        refused = {_key(capture.nodes[index]) for index in unclear}
        for index, arguments in found.items():
            key = _key(capture.nodes[index])
            if key in refused:
                continue
            known = self._kernels.setdefault(key, _Arguments())
            known.addresses |= arguments.addresses
            known.owned |= arguments.owned
            known.unread |= arguments.unread

    def knows(self, capture: GraphCapture) -> bool:
        """Whether each kernel of a graph is known, and nothing else needs several captures."""
        return capture.random is None and all(
            node.kind is NodeKind.EMPTY
            or (node.kind is NodeKind.KERNEL and _key(node) in self._kernels)
            or (node.kind in (NodeKind.MEMCPY, NodeKind.MEMSET) and len(node.parts) == 1)
            for node in capture.nodes
        )

    def discovery_of(
        self,
        capture: GraphCapture,
        n_values: int,
        is_known_address: Callable[[int], bool],
    ) -> Discovery | None:
        """What the words of one capture are; None where other captures have to tell.

        Args:
            capture: in a layout of its own, whose allocations lie apart.
            n_values: of the Program; scratch Values are numbered from here.
            is_known_address: asks the driver.
        """
        if not self.knows(capture):
            return None
        reader = _Reader(capture, is_known_address)
        try:
            for index, node in enumerate(capture.nodes):
                if node.kind is NodeKind.KERNEL:
                    reader.kernel(index, node.parts[0], self._kernels[_key(node)])
                elif node.kind is not NodeKind.EMPTY:
                    reader.operands(index, node.parts[0])
        except _Unknown:
            return None
        values, scratch_bytes = number_scratch(capture, reader.found, n_values)
        words = (
            Word(node, part, offset, values[allocation], address_offset, size_bytes)
            for node, part, offset, allocation, address_offset, size_bytes in sorted(reader.found)
        )
        return Discovery(tuple(words), (), tuple(reader.constants), scratch_bytes)


class _Reader:
    """Reads the arguments of one capture."""

    def __init__(self, capture: GraphCapture, is_known_address: Callable[[int], bool]) -> None:
        self._allocations = capture.allocations
        self._layout = Layout(capture, GUARD_BYTES)
        self._owned = Owned(capture.owned)
        self._is_known_address = is_known_address
        self._asked: dict[int, bool] = {}
        self.found: list[_Found] = []
        self.constants: list[OwnedConstant] = []

    def kernel(self, node: int, content: bytes, known: _Arguments) -> None:
        """All words of a kernel's arguments, those in the middle of others too."""
        taken = {at for offset in known.addresses for at in range(offset, offset + WORD_BYTES)}
        for offset in sorted(known.addresses):
            value = _word(content, offset)
            if self._is_allocations(node, offset, value):
                continue
            self._constant(node, offset, value, known.owned)
            if value and not self._owned.candidates(value):
                raise _Unknown  # no address of this capture, and not none
        for offset in range(0, len(content) - WORD_BYTES + 1, HALF_BYTES):
            if not taken.isdisjoint(_span(offset)):
                continue
            value = _word(content, offset)
            if self._layout.candidates(value):
                # What nobody read in one launch may be an address in another, or be left over: it
                # is followed in either case, which harms nobody who does not read it.
                if not known.unread.issuperset(_span(offset)):
                    raise _Unknown
                self._is_allocations(node, offset, value)
                taken.update(_span(offset))
            elif offset % WORD_BYTES == 0:
                self._constant(node, offset, value, known.owned)

    def operands(self, node: int, content: bytes) -> None:
        """The addresses of a copy or memset, of which every byte is one; 0: memory of the host."""
        for offset in range(0, len(content), WORD_BYTES):
            value = _word(content, offset)
            if value and not self._is_allocations(node, offset, value):
                self._constant(node, offset, value, frozenset((offset,)))

    def _is_allocations(self, node: int, offset: int, value: int) -> bool:
        """Whether it is an address of the capture's, which is noted then."""
        near = sorted(
            (max(-distance, distance - self._allocations[index].size_bytes, 0), index, distance)
            for index, distance in self._layout.candidates(value)
        )
        if len(near) > 1 and near[0][0] == near[1][0]:
            raise _Unknown
        if near:
            self.found.append((node, 0, offset, near[0][1], near[0][2], WORD_BYTES))
        return bool(near)

    def _constant(self, node: int, offset: int, value: int, owned: Set[int]) -> None:
        """A number, or what an owner keeps where launches that are known had that as well."""
        if not _LEAST_ADDRESS <= value < _MOST_ADDRESS:
            return
        owners = self._owned.candidates(value)
        if owners and offset in owned:
            self.constants.append(OwnedConstant(node, 0, offset, value, owners[0][0]))
            return
        if value not in self._asked:
            self._asked[value] = self._is_known_address(value)
        if owners or self._asked[value]:
            raise _Unknown


def _key(node: GraphNode) -> Hashable:
    """What a kernel is: its function, by the driver's handle, and the layout of its arguments."""
    return _function(node.signature), node.name, node.parameters


def _function(signature: Hashable) -> Hashable:
    """The first part of a signature, whatever edges with data were added to it (`read_graph`)."""
    while isinstance(signature, tuple) and isinstance(signature[0], tuple):
        signature = signature[0]
    return signature


def _word(content: bytes, offset: int) -> int:
    return int.from_bytes(content[offset : offset + WORD_BYTES], "little")


def _span(offset: int) -> range:
    return range(offset, offset + WORD_BYTES)
