"""Submissions of calls with known arguments, and of calls that depend on tickets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from offload.errors import BindingError
from offload.interpreter.outside_graphs import outside_graphs
from offload.program import Program, Role
from offload.run.ordered_results import Batch, ordered_results
from offload.run.ticket import Ticket

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Submitting:
    """A callable over tensors that takes submissions; each returns a Ticket.

    A ticket among the arguments stands for its result, and is a dependency. Where that result
    already has memory, as those of executions mostly do, the submission is queued at once, and the
    device (or the executable's own thread) waits. Otherwise it is queued when the result is known.

    Attributes:
        program: the recorded program.
    """

    program: Program

    def submit(self, *args: Any, **kwargs: Any) -> Ticket:
        """Queue an execution and return at once."""
        return self._submitted(args, kwargs, ())

    def after(self, *tickets: Ticket) -> After:
        """Return submissions that depend on these tickets without taking their results.

        Raises:
            BindingError: an argument is not a ticket.
        """
        return After(self._submitted, tickets)

    @outside_graphs
    def map(
        self, batches: Iterable[Any], *, buffersize: int = 3, buffer_bytes: int | None = None
    ) -> Iterator[Any]:
        """Execute each batch, several in flight; return an iterator over the results, in order.

        A tuple is a batch's positional arguments, a dict its keywords, anything else one argument.
        Its tensors must not be written until its result has been taken: where `batches` fills
        buffers again, it needs `buffersize + 1` of them.

        While batches are executed the next is taken from `batches`, on the iterating thread. On a
        device with queues, batches from the host are copied there, and results back, on separate
        queues beside the execution: see the page on pipelines.

        Args:
            batches: taken one by one, as results are taken.
            buffersize: how many may be in flight, at least 1.
            buffer_bytes: how many bytes of tensors may be in flight, in arguments and results
                together; one batch always may. Results whose sizes vary count at their recorded
                sizes.

        Raises:
            BindingError: a limit is less than 1. The iterator raises what a batch raises in its
                place, and what `batches` raises after the results before it; batches in flight that
                have not begun are then cancelled.
        """
        return ordered_results(
            self._beginning(),
            batches,
            buffersize=buffersize,
            buffer_bytes=buffer_bytes,
            bytes_of=self._bytes_of,
        )

    def _beginning(self) -> Callable[[Args, Kwargs], Batch]:
        """Return the function that begins a batch of `map`."""
        return lambda args, kwargs: self._submitted(args, kwargs, ())

    def _bytes_of(self, args: Args, kwargs: Kwargs) -> int:
        """Return the bytes of a call: of its tensors and of its results, at recorded sizes."""
        results = sum(value.size_bytes for value in self.program.of_role(Role.OUTPUT))
        return tensor_bytes(args) + tensor_bytes(kwargs) + results

    def _submitted(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        raise NotImplementedError


class After:
    """Submissions that depend on tickets. Made by `after`."""

    def __init__(
        self,
        submitted: Callable[[Args, Kwargs, Sequence[Ticket]], Ticket],
        tickets: Sequence[Ticket],
    ) -> None:
        """Keep the tickets.

        Raises:
            BindingError: an argument is not a ticket.
        """
        for one in tickets:
            if not isinstance(one, Ticket):
                raise BindingError(f"after: expected tickets, got a {type(one).__qualname__}")
        self._submitted, self._tickets = submitted, tickets

    @outside_graphs
    def submit(self, *args: Any, **kwargs: Any) -> Ticket:
        """Submit as the underlying object does; it begins when the tickets have ended."""
        return self._submitted(args, kwargs, self._tickets)


def tickets_in(args: Args, kwargs: Kwargs) -> list[Ticket]:
    """The tickets among arguments."""
    return [one for one in (*args, *kwargs.values()) if isinstance(one, Ticket)]


def with_results(
    args: Args, kwargs: Kwargs, result_of: Callable[[Ticket], Any]
) -> tuple[Args, Kwargs]:
    """Return the arguments with results in place of tickets."""
    return (
        tuple(result_of(one) if isinstance(one, Ticket) else one for one in args),
        {name: result_of(one) if isinstance(one, Ticket) else one for name, one in kwargs.items()},
    )


def tensor_bytes(thing: Any) -> int:
    """Return the bytes of tensors in arguments, including those in lists, tuples and dicts."""
    if isinstance(thing, (list, tuple)):
        return sum(tensor_bytes(one) for one in thing)
    if isinstance(thing, Mapping):
        return sum(tensor_bytes(one) for one in thing.values())
    return int(getattr(thing, "nbytes", 0))
