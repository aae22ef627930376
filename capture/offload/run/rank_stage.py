"""What executables of one stage of a pipeline over ranks have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from offload.distributed.groups import note_left_message
from offload.errors import BindingError, ExecutionError
from offload.program import BoundProgram, Role
from offload.run.executable import Executable
from offload.run.submitting import Args, Kwargs
from offload.run.weight_holders import HeldWeights, StageWeights


class RankStage:
    """One stage of a Program whose other stages run on other ranks.

    Owner: the caller. Thread: one at a time.

    Attributes:
        run: the stage's Executable, messages included.
        number: of the stage, and of this rank in its group.
        whole_bytes: of the weights of all stages.
        how_timed: the times of launches by which this rank proposed the cut, in words.
    """

    def __init__(
        self,
        run: Executable,
        whole: BoundProgram,
        number: int,
        n_stages: int,
        of_stages: StageWeights,
        *,
        how_timed: str,
    ) -> None:
        self.run = run
        self.number = number
        self.whole_bytes = _weight_bytes(whole)
        self.how_timed = how_timed
        self._n_stages = n_stages
        self._weights = HeldWeights(whole, of_stages)
        self._ended = ""  # why no call may follow

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that this stage uses."""
        return _weight_bytes(self.run.bound)

    @property
    def is_last(self) -> bool:
        """Whether calls on this rank return the results."""
        return self.number == self._n_stages - 1

    def close(self) -> None:
        """Close the stage; idempotent."""
        self.run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _executed(self, calls: Iterable[tuple[Args, Kwargs]]) -> list[Any]:
        """Execute the stage for each of these arguments, in order.

        A call that ends after messages were exchanged is the last one: those of a later call would
        be taken for the ones that it still owes.

        Raises:
            BindingError: the first arguments do not fit, or a rank holds old content of a weight;
                nothing has run.
            ExecutionError: an execution failed, here or in an earlier call; or the stage is closed.
        """
        if self._ended:
            raise ExecutionError(self._ended)
        if self.run.closed:
            raise ExecutionError("the executable is closed: load the program again")
        self._weights.begin_call()
        results: list[Any] = []
        for args, kwargs in calls:
            try:
                results.append(self.run(*args, **kwargs))
            except BaseException as error:
                if results or not isinstance(error, BindingError):
                    self._ended = (
                        f"stage {self.number}: an earlier call ended in execution {len(results)} "
                        f"({type(error).__qualname__}), and other ranks may be at another one: "
                        "make the groups again, and load again"
                    )
                    for group in self.run.bound.program.groups:
                        note_left_message(group.name)
                raise
        return results

    def _refuse_arguments(self) -> None:
        """Refuse arguments on a rank that receives what it reads.

        Raises:
            BindingError: always.
        """
        raise BindingError(
            f"stage {self.number} takes no arguments, as the first rank sends what it reads: call "
            "run() here"
        )


def _weight_bytes(bound: BoundProgram) -> int:
    return sum(one.size_bytes for one in bound.program.of_role(Role.WEIGHT))
