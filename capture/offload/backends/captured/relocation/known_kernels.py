"""Known kernels: the bytes of their arguments at which addresses stand.

They are kernels of proved graphs, and those that were launched with known arguments
(`GraphNode.declared`).

A kernel is the same function whatever its operands, so a program of other sizes needs no comparison
of layouts for known kernels: one capture has the addresses, and their owners, since its allocations
lie apart. This is decided per capture: if anything else in the arguments looks like an address of
that capture, or of memory that the driver knows, nothing is taken from here, and all captures are
made and compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence, Set

from offload.backends.captured.relocation.addresses import Layout, Owned
from offload.backends.captured.relocation.captures import GraphCapture, GraphNode, NodeKind
from offload.backends.captured.relocation.discover import GUARD_BYTES
from offload.backends.captured.relocation.words import (
    HALF_BYTES,
    WORD_BYTES,
    Discovery,
    OwnedConstant,
    Word,
    number_scratch,
)

_LEAST_ADDRESS, _MOST_ADDRESS = 1 << 16, 1 << 57
"""The range of possible device addresses, as in `constants`."""

_Found = tuple[int, int, int, int, int, int]


@dataclasses.dataclass(slots=True)
class _Arguments:
    """The bytes of a kernel's arguments, by meaning.

    Attributes:
        addresses: where words of eight bytes were addresses of Values, in some launch.
        owned: where they were addresses with an owner.
        unread: uninitialised bytes in some launch, according to its proof.
    """

    addresses: set[int] = dataclasses.field(default_factory=set)
    owned: set[int] = dataclasses.field(default_factory=set)
    unread: set[int] = dataclasses.field(default_factory=set)


class _Unknown(Exception):
    """Something differs from the known launches of a kernel."""


class KnownKernels:
    """The known kernels of one device.

    Owner: a backend's module, for the life of the process. Thread: callers run one at a time, or
    lose what another one learns.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._kernels: dict[Hashable, _Arguments] = {}

    def __len__(self) -> int:
        """The number of known kernels."""
        return len(self._kernels)

    def learn(
        self, capture: GraphCapture, discovery: Discovery, sizes_bytes: Sequence[int]
    ) -> None:
        """Learn from a graph whose proof has succeeded.

        Excludes kernels that receive half an address, or one outside its Value: a single capture
        does not determine the Value of these.

        Args:
            capture: compared with others.
            discovery: of its words.
            sizes_bytes: of each Value, including scratch Values.
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
            if node.kind is NodeKind.KERNEL and index not in unclear and node.declared is None
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
            or (node.kind is NodeKind.KERNEL and node.declared is not None)
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
        """The words of one capture; None if other captures are needed.

        Args:
            capture: its allocations lie apart.
            n_values: of the Program; scratch Values are numbered from here.
            is_known_address: asks the driver.
        """
        if not self.knows(capture):
            return None
        reader = _Reader(capture, is_known_address)
        try:
            for index, node in enumerate(capture.nodes):
                if node.declared is not None:
                    reader.declared(index, node.parts[0], node.declared)
                elif node.kind is NodeKind.KERNEL:
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

    def declared(self, node: int, content: bytes, addresses: Sequence[int]) -> None:
        """Read the addresses of a kernel that was launched with known arguments."""
        for offset in addresses:
            if not self._is_allocations(node, offset, _word(content, offset)):
                raise _Unknown

    def kernel(self, node: int, content: bytes, known: _Arguments) -> None:
        """Read all words of a kernel's arguments, including those in the middle of others."""
        taken = {at for offset in known.addresses for at in range(offset, offset + WORD_BYTES)}
        for offset in sorted(known.addresses):
            value = _word(content, offset)
            if self._is_allocations(node, offset, value):
                continue
            self._constant(node, offset, value, known.owned)
            if value and not self._owned.candidates(value):
                raise _Unknown  # neither an address of this capture nor 0
        for offset in range(0, len(content) - WORD_BYTES + 1, HALF_BYTES):
            if not taken.isdisjoint(_span(offset)):
                continue
            value = _word(content, offset)
            if self._layout.candidates(value):
                # Unread bytes of one launch may be an address in another, or a remainder: they are
                # followed in either case, without effect on kernels that do not read them.
                if not known.unread.issuperset(_span(offset)):
                    raise _Unknown
                self._is_allocations(node, offset, value)
                taken.update(_span(offset))
            elif offset % WORD_BYTES == 0:
                self._constant(node, offset, value, known.owned)

    def operands(self, node: int, content: bytes) -> None:
        """Read the addresses of a copy or memset, which fill all its bytes; 0: host memory."""
        for offset in range(0, len(content), WORD_BYTES):
            value = _word(content, offset)
            if value and not self._is_allocations(node, offset, value):
                self._constant(node, offset, value, frozenset((offset,)))

    def _is_allocations(self, node: int, offset: int, value: int) -> bool:
        """Whether it is an address of the capture, which is then noted."""
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
        """Read a number, or an owner's address if known launches had one there too."""
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
    """The identity of a kernel: its function, by the driver's handle, and its argument layout."""
    return function_of(node.signature), node.name, node.parameters


def function_of(signature: Hashable) -> Hashable:
    """A kernel by the driver's handles, (function, kernel of a library), from its signature.

    Edges may have added data to the signature (`read_graph`).
    """
    while isinstance(signature, tuple) and isinstance(signature[0], tuple):
        signature = signature[0]
    return signature


def _word(content: bytes, offset: int) -> int:
    return int.from_bytes(content[offset : offset + WORD_BYTES], "little")


def _span(offset: int) -> range:
    return range(offset, offset + WORD_BYTES)
