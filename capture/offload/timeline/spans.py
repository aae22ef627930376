"""Spans of executions on lanes: measured, and predicted where costs are known."""

from __future__ import annotations

import dataclasses
import enum

HOST_LANE = "host"
"""The lane of the calling thread: header stages, and the launches that it issues."""

WEIGHTS_LANE = "weights"
"""The lane that copies weights to the device's memory."""

COLLECTIVES_LANE = "collectives"
"""The lane of what a process group exchanges; of several groups each has one, with its name."""

WEIGHT_WAIT = "wait for weights"
"""The name of a wait."""


class Scheduling(enum.StrEnum):
    """How a program reaches the device."""

    OFFLOAD = "offload"
    """As one task."""
    HOST = "host"
    """Launch by launch from the host: the baseline, on the same device."""


class SpanKind(enum.StrEnum):
    """What a span covers."""

    STAGE = "stage"
    """A stage of the header: convert, drain, policy, patch or submit."""
    SUBSTAGE = "substage"
    """A part of submit, on a device that reports substages."""
    ISSUE = "issue"
    """The host delivers one launch (host scheduling only)."""
    LAUNCH = "launch"
    """The device runs one launch."""
    TRANSFER = "transfer"
    """A copy of an input or result that could not be used in place."""
    WEIGHTS = "weights"
    """Bytes of a weight are copied to the device's memory while launches run."""
    WAIT = "wait"
    """A launch waits for its weights."""
    COLLECTIVE = "collective"
    """Ranks exchange tensors: from the launch that starts it, or the end of the exchange before, to
    the end of the launch that waits for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """An interval on a lane.

    Attributes:
        kind: what it covers.
        name: the stage or substage, the operator, the direction of a transfer (`copy in`, `copy
            out`), or the weight that is copied.
        lane: `host`, or the device's lane.
        begin_ns, end_ns: since the beginning of the timeline; end_ns >= begin_ns.
        launch: the index of the launch in the program, of an issue, launch, wait or collective (the
            launch that starts it); -1 otherwise.
        size_bytes: of a transfer, or of a weight's piece. Of a piece that comes partly outside the
            execution the span is the part within, and the size that of the piece.
        place: of an issue or launch, where it is in the user's code: `encoder/attention net.py:12`.
    """

    kind: SpanKind
    name: str
    lane: str
    begin_ns: int
    end_ns: int
    launch: int = -1
    size_bytes: int = 0
    place: str = ""

    @property
    def duration_ns(self) -> int:
        """The time from begin to end."""
        return self.end_ns - self.begin_ns

    def later(self, shift_ns: int) -> Span:
        """The same span, shifted by `shift_ns`."""
        begin_ns, end_ns = self.begin_ns + shift_ns, self.end_ns + shift_ns
        return dataclasses.replace(self, begin_ns=begin_ns, end_ns=end_ns)


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutionTimeline:
    """One execution.

    Attributes:
        number: of the execution, counted from 1 per executable.
        scheduling: how the program reached the device.
        spans: as measured, by begin.
        predicted: the predicted spans, beginning where the measured ones begin; empty without a
            cost model.
        policy: `none`, `io` or `all`.
        slots_changed, words_patched: how much of the header changed.
        bytes_copied: because a tensor could not be used in place.
        outputs_allocated: results without a given buffer.
        bytes_streamed: of weights, copied for it.
        times_weights: whether spans say when weights arrived and which launches waited for them.
        pass_ns: with streamed weights, the time of its launches and their waits together; None if
            not measured.
    """

    number: int
    scheduling: Scheduling
    spans: tuple[Span, ...]
    predicted: tuple[Span, ...]
    policy: str
    slots_changed: int
    words_patched: int
    bytes_copied: int
    outputs_allocated: int = 0
    bytes_streamed: int = 0
    times_weights: bool = True
    pass_ns: int | None = None

    def of_kind(self, kind: SpanKind) -> tuple[Span, ...]:
        """The measured spans of one kind."""
        return tuple(span for span in self.spans if span.kind is kind)

    def later(self, shift_ns: int) -> ExecutionTimeline:
        """The same execution, shifted by `shift_ns`."""
        return dataclasses.replace(
            self,
            spans=tuple(span.later(shift_ns) for span in self.spans),
            predicted=tuple(span.later(shift_ns) for span in self.predicted),
        )

    @property
    def begin_ns(self) -> int:
        """The beginning of the caller's call."""
        return min((span.begin_ns for span in self.spans), default=0)

    @property
    def end_ns(self) -> int:
        """The end of the last launch or transfer."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def m_l_t_ns(self) -> int:
        """The header's duration: the sum of its stages."""
        return sum(span.duration_ns for span in self.of_kind(SpanKind.STAGE))

    @property
    def predicted_m_l_t_ns(self) -> int | None:
        """The predicted duration of the header; None without a cost model."""
        if not self.predicted:
            return None
        return sum(one.duration_ns for one in self.predicted if one.kind is SpanKind.STAGE)
