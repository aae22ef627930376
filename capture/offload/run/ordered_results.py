"""Results of many batches in order, with a bounded number in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from offload.errors import BindingError


class Batch(Protocol):
    """A batch that is in flight."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def result(self) -> Any:
        """Wait, and return its result."""
        ...

    def cancel(self) -> object:
        """Cancel what has not begun; its result is not requested."""
        ...


def ordered_results(
    begin: Callable[[tuple[Any, ...], dict[str, Any]], Batch],
    batches: Iterable[Any],
    *,
    buffersize: int,
    buffer_bytes: int | None,
    bytes_of: Callable[[tuple[Any, ...], dict[str, Any]], int],
) -> Iterator[Any]:
    """Yield the results of batches, in order.

    Args:
        begin: begins a batch with its arguments, and returns at once.
        batches: a tuple is positional arguments, a dict keywords, anything else one argument.
        buffersize: how many may be in flight.
        buffer_bytes: how many of their bytes may be in flight; a single batch may exceed it.
        bytes_of: the bytes of a batch.

    Raises:
        BindingError: a limit is less than 1, or not an integer.
    """
    check_limit("buffersize", buffersize)
    if buffer_bytes is not None:
        check_limit("buffer_bytes", buffer_bytes)
    return _results(begin, iter(batches), buffersize, buffer_bytes, bytes_of)


def check_limit(name: str, limit: object) -> None:
    """Raise a BindingError unless `limit` is an integer of at least 1."""
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise BindingError(f"{name}: expected an integer of at least 1, got {limit!r}")


def _results(
    begin: Callable[[tuple[Any, ...], dict[str, Any]], Batch],
    batches: Iterator[Any],
    buffersize: int,
    buffer_bytes: int | None,
    bytes_of: Callable[[tuple[Any, ...], dict[str, Any]], int],
) -> Iterator[Any]:
    in_flight: deque[tuple[Batch, int]] = deque()
    flying_bytes, failure = 0, None
    try:
        while True:
            while in_flight and in_flight[0][0].done():
                flying_bytes -= in_flight[0][1]
                yield in_flight.popleft()[0].result()
            try:
                args, kwargs = arguments_of(next(batches))
            except StopIteration:
                break
            except Exception as error:  # raised after the results before it
                failure = error
                break
            size_bytes = 0 if buffer_bytes is None else bytes_of(args, kwargs)
            while in_flight and (
                len(in_flight) >= buffersize
                or (buffer_bytes is not None and flying_bytes + size_bytes > buffer_bytes)
            ):
                batch, ended_bytes = in_flight.popleft()
                flying_bytes -= ended_bytes
                yield batch.result()
            try:
                in_flight.append((begin(args, kwargs), size_bytes))
            except Exception as error:  # the batch's own error, in its place
                failure = error
                break
            flying_bytes += size_bytes
            del args, kwargs  # from here on only the batch's executions hold them
        while in_flight:
            yield in_flight.popleft()[0].result()
        if failure is not None:
            raise failure
    finally:
        for batch, _ in in_flight:
            batch.cancel()


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional arguments and keywords of a batch."""
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, dict):
        return (), batch
    return (batch,), {}
