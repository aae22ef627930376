"""Checks that captures of one Program are the same graph in different layouts."""

from __future__ import annotations

from collections.abc import Sequence

from offload.backends.captured.relocation.captures import GraphCapture, node_text
from offload.backends.captured.relocation.words import CapturesDiffer


def check_alike(captures: Sequence[GraphCapture], launch_names: Sequence[str]) -> None:
    """Compare everything but the bytes that may hold addresses.

    Args:
        captures: of one Program, the first two in one layout.
        launch_names: for messages, each launch's operator and source.

    Raises:
        CapturesDiffer: nodes, edges, launches or allocations differ in some capture, or the first
            two are not in one layout.
    """
    first, again = captures[:2]
    for other in captures[1:]:
        _check_nodes(first, other, launch_names)
        if list(first.edges) != list(other.edges):
            raise CapturesDiffer(
                "the graph",
                f"its {len(first.edges)} edges differ from the {len(other.edges)} of another "
                "capture",
            )
        if _kinds(first) != _kinds(other):
            raise CapturesDiffer(
                "the graph",
                f"it allocates {_allocated(first)} in one capture, and {_allocated(other)} in "
                "another",
            )
    if [one.address for one in first.allocations] != [one.address for one in again.allocations]:
        raise CapturesDiffer("the graph", "two captures in one layout have different addresses")


def _check_nodes(first: GraphCapture, other: GraphCapture, launch_names: Sequence[str]) -> None:
    for node, (one, two) in enumerate(zip(first.nodes, other.nodes, strict=False)):
        where = node_text(first, launch_names, node)
        same = (one.kind, one.signature) == (two.kind, two.signature)
        if not same or list(map(len, one.parts)) != list(map(len, two.parts)):
            raise CapturesDiffer(
                where,
                f"another capture has {two.kind} {two.name!r} there, or launches it differently",
            )
        if first.launches[node] != other.launches[node]:
            raise CapturesDiffer(where, "another launch made it in another capture")
    if len(first.nodes) != len(other.nodes):
        raise CapturesDiffer(
            "the graph", f"{len(first.nodes)} nodes, and {len(other.nodes)} in another capture"
        )


def _kinds(capture: GraphCapture) -> list[tuple[int | None, int]]:
    return [(one.value, one.size_bytes) for one in capture.allocations]


def _allocated(capture: GraphCapture) -> str:
    total_bytes = sum(one.size_bytes for one in capture.allocations)
    return f"{len(capture.allocations)} blocks of {total_bytes} bytes"
