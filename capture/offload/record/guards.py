"""Guards: host reads whose values each execution must find again, and what they exclude."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.record.operators import NO_NESTED_ENCODER
from offload.record.reading_trainers import trainer_that_reads

if TYPE_CHECKING:
    from offload.record.storages import TrackedStorage

_ADVICE = (
    '. Compute it with tensors, pass it as an argument, or capture with host_reads="guard" to have '
    "each execution check that it is as recorded"
)
# By type of device; executions of graphs on "cuda" do not wait for the host.
_ADVICE_ON = {
    "cuda": ". Compute it with tensors on the device (torch.where, masks), pass it as an argument, "
    "or read it outside of the captured model",
    "npu": f'{_ADVICE}, which needs load(scheduling="host") on this device',
}


def refuse_write_beside_numpy(operator: str, tracked: TrackedStorage) -> None:
    """Refuse a launch that writes memory that NumPy has seen or made.

    Raises:
        CaptureError: `tracked` is such memory.
    """
    if tracked.exposed_at:
        raise CaptureError(
            f"{user_location()}: {operator} writes {tracked.value.name}, which NumPy can see since "
            f"{tracked.exposed_at}: what is read there later cannot be guarded. Copy the tensor "
            "before .numpy()"
        )
    if tracked.foreign:
        raise CaptureError(
            f"{user_location()}: {operator} writes a tensor that the call made over NumPy's "
            "memory, which a replay would not make again: write a .clone() of it"
        )


class HostReadGuards:
    """The host reads of a recorded call, and whether they are allowed.

    Owner: one LaunchRecorder.

    Attributes:
        notes: on reads that became guards.
        deferred: the first read that was let pass, as the error that refuses it. The call goes on
            as if unobserved, and its recording is not used.
        refused_at: the first read that was refused or let pass, and the user's line.
        device_type: of the recording's device, which may not execute guards.
    """

    def __init__(self, *, allowed: bool, may_defer: Callable[[], bool] = lambda: False) -> None:
        """Begin without guards.

        Args:
            allowed: reads become guards; otherwise each is refused.
            may_defer: whether a refused read is let pass.
        """
        self.notes: list[str] = []
        self.deferred: CaptureError | None = None
        self.refused_at = ""
        self.device_type = "cpu"
        self._allowed = allowed
        self._may_defer = may_defer
        self._changed_state_at = ""

    def note_change(self) -> None:
        """Note that a launch changes state: a guard after it would fail too late."""
        self._changed_state_at = self._changed_state_at or user_location()

    def note(self, what: str) -> None:
        """Note that a read became a guard."""
        self.notes.append(f"guarded: {what} at {user_location()}")

    def require(self, what: str, reason: str, advice: str = "") -> None:
        """Check that a read can be guarded.

        Args:
            what: what reads.
            reason: why that depends on values.
            advice: what to do instead, as the end of a sentence; empty: what the device allows.

        Raises:
            CaptureError: reads are to be avoided, or state has changed already.
        """
        place = user_location()
        advice = advice or _ADVICE_ON.get(self.device_type, _ADVICE)
        if not self._allowed:
            self.refuse(
                what,
                CaptureError(f"{place}: {what}: {reason}, which a replay cannot repeat{advice}"),
            )
        elif self._changed_state_at:
            raise CaptureError(
                f"{place}: {what} is guarded, but the call has already changed state at "
                f"{self._changed_state_at}, so a failing guard would come too late: read before "
                "the first change of an input, buffer, parameter or random generator"
            )

    def refuse(self, what: str, refusal: CaptureError) -> None:
        """Refuse a read, or let it pass.

        Raises:
            CaptureError: the refusal.
        """
        self.refused_at = self.refused_at or f"{what} at {user_location()}"
        if self.deferred is None and not self._may_defer():
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame
        self.deferred = self.deferred or refusal

    def note_read(self, name: str, outcomes: list[Any]) -> None:
        """Note an operator that reads tensors and returns one number.

        Raises:
            CaptureError: as `require`; or the operator returns something else.
        """
        trainer, advice = trainer_that_reads()
        reason = f"{trainer or 'it'} reads a tensor's value on the host"
        if name == "aten::_nested_tensor_from_mask_left_aligned":
            reason += f" ({NO_NESTED_ENCODER} to avoid it)"
        self.require(name, reason, f": {advice}" if trainer else "")
        if len(outcomes) != 1 or not isinstance(outcomes[0], (bool, int, float, complex)):
            raise CaptureError(
                f"{user_location()}: {name} reads tensors on the host and does not return one "
                "number, which cannot be guarded: call it outside the model"
            )
        self.note(name)
