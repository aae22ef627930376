"""Which launch made which node of a graph, determined during the capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offload.backends.captured.relocation.captures import GraphNode
from offload.backends.cuda.driver import call, driver_bindings
from offload.backends.cuda.graph import NodeReader
from offload.errors import CaptureError, ExecutionError
from offload.program import Launch

_USUAL_DEPENDENCIES = 4  # of one node: the size of the first buffer


class NodeLog:
    """The nodes of the graph that is being captured on a stream, read as they appear.

    The host source of a copy may be overwritten later, so nodes are read at once. A launch's nodes
    are searched from the stream's current dependencies, so that a capture queries each node once;
    all nodes of the graph are read again only if a launch has left some on a stream that the
    captured one has not joined yet.

    Owner: one capture. Thread: the capture's.

    Attributes:
        launches: the launch of each node, by handle.
        known: the nodes by handle.
        added: the handles of nodes that the capturer added to those of a launch.
    """

    def __init__(self, stream: int) -> None:
        """Log a stream, by the driver's handle, whose capture has made no node yet."""
        self.launches: dict[int, int] = {}
        self.known: dict[int, GraphNode] = {}
        self.added: set[int] = set()
        self._stream = driver_bindings().CUstream(init_value=stream)
        self._reader = NodeReader()

    def note(self, launch: Launch, *, are_added: bool = False) -> None:
        """Read the nodes that the latest launch has made.

        Args:
            launch: the latest.
            are_added: these nodes are the capturer's own work for the launch.

        Raises:
            CaptureError: a node is of a kind that cannot be relocated, or the capture has failed.
        """
        try:
            _, _, graph, dependencies, *_ = call("cuStreamGetCaptureInfo", self._stream)
            _, count = call("cuGraphGetNodes", graph, 0)
            made = self._made(graph, dependencies, count)
        except ExecutionError as error:
            raise CaptureError(
                f"{launch.source}: {launch.name} ended the capture, and has to be left out of "
                f"the captured model: {error}"
            ) from error
        for handle in made:
            try:
                self.known[handle] = self._reader.read(handle)
            except CaptureError as error:
                raise CaptureError(f"{launch.source}: {launch.name}: {error}") from error
            self.launches[handle] = launch.index
        if are_added:
            self.added.update(made)

    def _made(self, graph: Any, dependencies: Iterable[Any], count: int) -> list[int]:
        """The unknown nodes of a graph of `count` nodes."""
        n_made = count - len(self.known)
        made = self._behind(dependencies, n_made)
        if len(made) == n_made:
            return made
        found, count = call("cuGraphGetNodes", graph, count)
        return [handle for handle in map(int, found[:count]) if handle not in self.known]

    def _behind(self, dependencies: Iterable[Any], n_made: int) -> list[int]:
        """Unknown nodes, found from these against the edges: `n_made` at most.

        Nodes before a known node are known too.
        """
        found: dict[int, None] = {}
        waiting = list(dependencies)
        while waiting and len(found) < n_made:
            node = waiting.pop()
            if int(node) in self.known or int(node) in found:
                continue
            found[int(node)] = None
            if len(found) < n_made:
                waiting += _dependencies(node)
        return list(reversed(found))


def _dependencies(node: Any) -> list[Any]:
    """The nodes that a node waits for."""
    room = _USUAL_DEPENDENCIES
    while True:
        found, *_, count = call("cuGraphNodeGetDependencies", node, room)
        if count < room:
            return list(found[:count])
        room *= 2
