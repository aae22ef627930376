"""Folds neighbouring spans into blocks, so that a figure of any number of launches is readable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.timeline.spans import Span

BLOCKS_PER_LANE = 20
"""The least width of a folded block, as a part of the drawn time, if enough spans are short."""

FEW_SPANS = 12
"""Up to this number the spans of a lane are not folded, and each is labelled."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One span, or neighbours with the gaps between them.

    Attributes:
        begin_ns, end_ns: of the first and the last span.
        busy_ns: the sum of the spans' durations.
        spans: at least one.
    """

    begin_ns: int
    end_ns: int
    busy_ns: int
    spans: tuple[Span, ...]

    @property
    def busy_share(self) -> float:
        """The part of the block that spans take; 1 for a single span."""
        return self.busy_ns / (self.end_ns - self.begin_ns) if self.end_ns > self.begin_ns else 1.0


def fold(spans: Sequence[Span], drawn_ns: int) -> tuple[Block, ...]:
    """The spans of one lane as blocks, by begin.

    A span of at least 1/`BLOCKS_PER_LANE` of the drawn time forms a block. Shorter neighbours are
    folded until the block is that wide; less than 3/4 of that at the end joins the block before. A
    gap of that width also ends a block, so large gaps stay visible. Hence there are at most 2 *
    `BLOCKS_PER_LANE` + 1 blocks. Up to `FEW_SPANS` are not folded.

    Args:
        spans: not overlapping.
        drawn_ns: the time that the figure spans; at least 1.
    """
    ordered = sorted(spans, key=lambda span: (span.begin_ns, span.end_ns))
    if len(ordered) <= FEW_SPANS:
        return tuple(_block([span]) for span in ordered)
    blocks: list[list[Span]] = []

    def is_wide(duration_ns: int) -> bool:
        return duration_ns * BLOCKS_PER_LANE >= drawn_ns

    def joins(span: Span, block: list[Span], wide: bool) -> bool:
        alone = is_wide(span.duration_ns) or is_wide(block[-1].duration_ns)
        return not (wide or alone or is_wide(span.begin_ns - block[-1].end_ns))

    for span in ordered:
        if blocks and joins(span, blocks[-1], is_wide(_width_ns(blocks[-1]))):
            blocks[-1].append(span)
        else:
            blocks.append([span])
    # The remainder at the end may be too narrow for its count.
    narrow = len(blocks) > 1 and not is_wide(_width_ns(blocks[-1]) * 4 // 3)
    if narrow and joins(blocks[-1][0], blocks[-2], wide=False):
        blocks[-2:] = [blocks[-2] + blocks[-1]]
    return tuple(map(_block, blocks))


def _width_ns(spans: Sequence[Span]) -> int:
    return spans[-1].end_ns - spans[0].begin_ns


def _block(spans: Sequence[Span]) -> Block:
    return Block(
        spans[0].begin_ns,
        max(span.end_ns for span in spans),
        sum(span.duration_ns for span in spans),
        tuple(spans),
    )
