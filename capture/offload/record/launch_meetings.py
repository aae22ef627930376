"""Ranks that rerun their recorded programs together: they meet at each collective."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from offload.distributed import Rendezvous
from offload.distributed.groups import rank_in, send
from offload.errors import ExecutionError
from offload.program import Launch
from offload.program.collectives import SENDS, group_name, meeting_of

Wait = Callable[[], None]


class LaunchMeetings:
    """The meetings of one run of a Program, launch by launch.

    Owner: that run. Thread: one.
    """

    def __init__(self, rendezvous: Rendezvous | None) -> None:
        """Begin a run.

        Args:
            rendezvous: where the ranks meet; None: there are no other ranks.
        """
        self._rendezvous = rendezvous
        self._later: dict[int, Wait] = {}  # by the awaited Value
        self._sending: dict[int, Any] = {}

    def called(self, launch: Launch, call: functools.partial[Any]) -> Any:
        """Return the results of a launch, called once the other ranks have come to it.

        Raises:
            CaptureError: a rank is at another launch, or has refused.
            ExecutionError: a rank has ended, or is late.
        """
        if not launch.is_collective:
            return call()
        self._meet(launch)
        try:
            if launch.name == SENDS:
                outcome, work = send(*call.args)
                self._sending |= dict.fromkeys(launch.writes, work)
                return outcome
            if launch.waits and (work := self._sending.pop(launch.writes[0], None)) is not None:
                return work.wait()
            return call()
        except (RuntimeError, ValueError) as error:
            raise ExecutionError(
                f"{launch.source}: {launch.name}: the process group failed while the recorded "
                f"program was run again, as when a rank ends or is too late: {error}"
            ) from error

    def _meet(self, launch: Launch) -> None:
        if self._rendezvous is None:
            return
        if launch.waits:
            (view,) = launch.views()
            self._later.pop(view.value, _nobody)()
            return
        group = self._rendezvous.group(group_name(launch.arguments))
        meeting = meeting_of(launch.name, launch.arguments, rank_in(group))
        is_message = meeting.sender is not None
        arrival = self._rendezvous.come(meeting, begins_message=is_message)
        if is_message:
            self._later |= dict.fromkeys(launch.writes, arrival.wait)
        else:
            arrival.wait()


def _nobody() -> None:
    """Wait for no rank."""
