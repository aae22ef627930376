"""Submissions: of calls whose arguments are known, and of those that depend on tickets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from offload.errors import BindingError
from offload.run.ordered_results import Batch, ordered_results
from offload.run.ticket import Ticket

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Submitting:
    """What is called with tensors and takes submissions: each gives a Ticket.

    A ticket among the arguments is its result, and what the submission depends on. Where that
    result has its memory already, as executions' mostly have, the submission is queued at once, and
    the device (or the executable's own thread) waits. Else it is queued when the result is known.
    """

    def submit(self, *args: Any, **kwargs: Any) -> Ticket:
        """Queue an execution and return at once."""
        return self._submitted(args, kwargs, ())

    def after(self, *tickets: Ticket) -> After:
        """Submissions that depend on these tickets, without being given their results.

        Raises:
            BindingError: something else was given.
        """
        return After(self._submitted, tickets)

    def map(
        self, batches: Iterable[Any], *, buffersize: int = 3, buffer_bytes: int | None = None
    ) -> Iterator[Any]:
        """Execute with each batch, several in flight; an iterator over the results, in order.

        A batch that is a tuple is positional arguments, a dict keywords, anything else one
        argument. While batches are executed the next one is taken from `batches`, on the thread
        that iterates. On a device with queues batches of the host are copied there, and results
        back, by queues of their own beside the execution: see the page on pipelines.

        Args:
            batches: taken one by one, as results are taken.
            buffersize: how many may be in flight, at least 1.
            buffer_bytes: how many bytes of tensors may be, in arguments and results together; one
                batch always may. Results whose sizes vary count at their recorded sizes.

        Raises:
            BindingError: a limit is less than 1. The iterator raises what a batch raises in its
                place, and what `batches` raises after the results before it; what is in flight
                then is cancelled, if it has not begun.
        """
        return ordered_results(
            self._beginning(),
            batches,
            buffersize=buffersize,
            buffer_bytes=buffer_bytes,
            bytes_of=self._bytes_of,
        )

    def _beginning(self) -> Callable[[Args, Kwargs], Batch]:
        """What begins with a batch of `map`."""
        return lambda args, kwargs: self._submitted(args, kwargs, ())

    def _bytes_of(self, args: Args, kwargs: Kwargs) -> int:
        """What a call takes: the bytes of tensors that it is given, and of results."""
        return tensor_bytes(args) + tensor_bytes(kwargs)

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
            BindingError: something else was given.
        """
        for one in tickets:
            if not isinstance(one, Ticket):
                raise BindingError(f"after: expected tickets, got a {type(one).__qualname__}")
        self._submitted, self._tickets = submitted, tickets

    def submit(self, *args: Any, **kwargs: Any) -> Ticket:
        """Submit as what it was made of does; it begins when the tickets have ended."""
        return self._submitted(args, kwargs, self._tickets)


def tickets_in(args: Args, kwargs: Kwargs) -> list[Ticket]:
    """The tickets among arguments."""
    return [one for one in (*args, *kwargs.values()) if isinstance(one, Ticket)]


def with_results(
    args: Args, kwargs: Kwargs, result_of: Callable[[Ticket], Any]
) -> tuple[Args, Kwargs]:
    """The arguments with results in the place of tickets."""
    return (
        tuple(result_of(one) if isinstance(one, Ticket) else one for one in args),
        {name: result_of(one) if isinstance(one, Ticket) else one for name, one in kwargs.items()},
    )


def tensor_bytes(thing: Any) -> int:
    """The bytes of the tensors in arguments, in lists, tuples and dicts as well."""
    if isinstance(thing, (list, tuple)):
        return sum(tensor_bytes(one) for one in thing)
    if isinstance(thing, Mapping):
        return sum(tensor_bytes(one) for one in thing.values())
    return int(getattr(thing, "nbytes", 0))
