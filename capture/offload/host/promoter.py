"""Promotion: repeated sizes get their own executables, one at a time."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from offload.errors import BindingError
from offload.host.promotion import (
    NEVER_NS,
    REVIEWED_AFTER,
    Choice,
    Prepared,
    PromotedSizes,
    PromotionReport,
    due_ns,
    least_due_ns,
    predicted_preparation_ns,
    to_demote,
)
from offload.host.promotion_work import NotNow, NotPromoted, Promoting, Publish, Work
from offload.native import _native
from offload.run import Executable

_MOST_ACCOUNTS = 4096
"""The number of choices of sizes whose durations are counted."""


_MOST_KNOWN = 64
"""The number of promotions from which others are predicted."""


Start = Callable[[Callable[[], None]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """An executable of one choice of sizes, and its origin."""

    run: Any
    size_bytes: int
    preparation_ns: int
    rented_executions: int
    rented_ns: int


class Promoter:
    """Decides by `promotion`'s functions which sizes get their own executables, and holds these.

    Calls are counted natively (`accounts`). The call by which sizes are due starts a preparation:
    on a thread, with copies of its tensors, or the call waits. One choice of sizes is prepared at a
    time; other calls continue meanwhile. A failure is reported, and its sizes are not tried again.

    Owner: one executable, held weakly. Thread: any. Errors: only those of an interrupt.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        budget_bytes: int,
        work: Work,
        *,
        start: Start | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        known: Mapping[Choice, Prepared] | None = None,
    ) -> None:
        """Begin without promotions.

        Args:
            names: of the Dims.
            budget_bytes: the memory that promoted executables may take.
            work: makes executables.
            start: begins a preparation; None: as `work` says, on a thread or in turn.
            clock_ns: the clock of preparations.
            known: earlier measurements, by sizes.
        """
        self._names = names
        self._budget_bytes = budget_bytes
        self._work = work
        self._start = start or (_in_turn if work.in_turn else _in_a_thread)
        self._clock_ns = clock_ns
        self._lock = threading.RLock()
        self._made: dict[Choice, _Made] = {}
        self._known: dict[Choice, Prepared] = dict(known or {})
        self._refused: dict[Choice, str] = {}
        self._preparing: Choice = ()
        self._n_demoted = self._n_gone = 0
        self._n_rebound = self._waited_ns = 0
        self._is_closed = False
        own = weakref.ref(self)  # a native reference, unseen by the collector, would keep it

        def on_due(sizes: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            promoter = own()
            if promoter is not None:
                promoter._on_due(sizes, args, kwargs)

        self.accounts = _native.Promotions(
            most=_MOST_ACCOUNTS, review_after=REVIEWED_AFTER, on_due=on_due
        )
        self._predict()
        _promoters.add(self)

    def _on_due(self, sizes: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin what is due: a promotion, or the review of a promotion."""
        gone: list[_Made] = []  # outlives the lock: its destruction waits for executions
        with self._lock:
            account = self.accounts.account(sizes)
            if self._is_closed or account is None:
                return
            if account.is_promoted:
                gone += self._review(sizes, account)
                return
            due = (
                NEVER_NS
                if sizes in self._refused
                else due_ns(sizes, self._known, self._work.expected)
            )
            n_executions, ns, _ = account.resident
            if ns < due or self._preparing:
                self.accounts.set_due(sizes, due)
                return
            self._preparing = sizes
            self.accounts.armed = False
        try:
            call = self._work.kept(sizes, args, kwargs)
            self._start(lambda: self._prepare(sizes, call, (n_executions, ns)))
        except NotNow:
            self._end(sizes)
        except Exception as error:
            self._end(sizes, refusal=_error_text(error))
        except BaseException:  # an interrupt, which the call raises; the next call tries again
            self._end(sizes)
            raise

    def _prepare(self, sizes: Choice, call: Any, rented: tuple[int, int]) -> None:
        """Make an executable, and publish it. Only interrupts (not Exceptions) propagate."""
        n_rebound, begin_ns = self._n_rebound, self._clock_ns()
        gone: list[_Made] = []  # outlives the lock: its destruction waits for executions
        refusal = ""
        try:
            run, size_bytes = self._work.made(sizes, call, lambda: not self._is_closed)
            preparation_ns = self._clock_ns() - begin_ns
            if size_bytes > self._budget_bytes:
                run.close()
                raise NotPromoted(
                    f"it takes {size_bytes:,} bytes, and all may take {self._budget_bytes:,}"
                )
            made = _Made(run, size_bytes, preparation_ns, *rented)
            with self._lock:
                if self._is_closed:
                    gone.append(made)
                    run.close()
                    return
                if n_rebound != self._n_rebound:
                    run.rebind_weights()
                gone += self._add(sizes, made)
        except Exception as error:
            # A failure after weights were rebound meanwhile does not exclude these sizes.
            if n_rebound == self._n_rebound:
                refusal = _error_text(error)
                self._learn_failure(sizes, self._clock_ns() - begin_ns)
        finally:
            waited_ns = self._clock_ns() - begin_ns if self._work.in_turn else 0
            self._end(sizes, refusal, waited_ns)

    def _add(self, sizes: Choice, made: _Made) -> list[_Made]:
        """Publish an executable; return those evicted to make room."""
        self._learn(sizes, made.preparation_ns)
        published = self._work.publish(sizes, made.run)
        self._made[sizes] = made
        self.accounts.set(sizes, published)
        bytes_of = {one: other.size_bytes for one, other in self._made.items()}
        used = {one: _used(self.accounts, one) for one in self._made}
        demoted = to_demote(used, bytes_of, self._budget_bytes, sizes)
        self._n_demoted += len(demoted)
        return [self._drop(one) for one in demoted]

    def _learn(self, sizes: Choice, preparation_ns: int) -> None:
        before = self._known.get(sizes)
        share = None if before is None else before.saved_share
        self._known[sizes] = Prepared(preparation_ns, share)
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _learn_failure(self, sizes: Choice, preparation_ns: int) -> None:
        """An early failure says nothing about the cost of others; a late one does."""
        with self._lock:
            predicted_ns = predicted_preparation_ns(sizes, self._known, self._work.expected)
            self._learn(sizes, max(preparation_ns, round(predicted_ns)))

    def _drop(self, sizes: Choice) -> _Made:
        """Withdraw an executable; running calls of it continue."""
        self.accounts.set(sizes, None)
        made = self._made.pop(sizes)
        self._n_gone += _n_executions(made.run)
        return made

    def _end(self, sizes: Choice, refusal: str = "", waited_ns: int = 0) -> None:
        with self._lock:
            self._waited_ns += waited_ns
            if refusal:
                self._refused[sizes] = refusal
            self._preparing = ()
            self._predict()
            self.accounts.armed = not self._is_closed

    def _review(self, sizes: Choice, account: _native.SizesAccount) -> list[_Made]:
        """Learn what an executable saves; drop it if it saves nothing."""
        resident_ns, promoted_ns = account.resident[2], account.promoted[2]
        if not resident_ns or sizes not in self._made:
            return []
        gone: list[_Made] = []
        share = 1 - promoted_ns / resident_ns
        self._known[sizes] = Prepared(self._made[sizes].preparation_ns, share)
        if share <= 0:
            gone.append(self._drop(sizes))
            self._refused[sizes] = (
                f"no quicker: {promoted_ns / 1e3:,.1f} us by {self._work.expected.what} of its "
                f"own, and {resident_ns / 1e3:,.1f} us without"
            )
        self._predict()
        return gone

    def _predict(self) -> None:
        """Let calls of all sizes that may be due by now report that."""
        self.accounts.least_due_ns = least_due_ns(self._known, self._work.expected)

    def executables(self) -> list[tuple[Choice, Executable]]:
        """Return all promoted executables, by their sizes."""
        with self._lock:
            return [(sizes, one.run) for sizes, one in self._made.items()]

    def n_executions(self) -> int:
        """The executions of promoted executables, dropped ones included; without their proofs."""
        with self._lock:
            return self._n_gone + sum(_n_executions(one.run) for one in self._made.values())

    def rebind_weights(self) -> None:
        """Make all use the storages that the parameters have now.

        An executable that cannot, as on a device whose kernels keep the addresses of weights, is
        dropped: the executable of all sizes already uses them, and its sizes may be promoted again.
        """
        gone: list[_Made] = []  # outlives the lock: its destruction waits for executions
        with self._lock:
            self._n_rebound += 1  # checked by executables made later
            made = list(self._made.items())
        for sizes, one in made:
            try:
                one.run.rebind_weights()
            except BindingError:
                with self._lock:
                    if self._made.get(sizes) is one:
                        gone.append(self._drop(sizes))
                        self._n_demoted += 1

    def report(self) -> PromotionReport:
        """Report the promotions so far."""
        with self._lock:
            promoted = []
            for sizes, made in self._made.items():
                account = self.accounts.account(sizes)
                n_executions, _, promoted_ns = (0, 0, 0) if account is None else account.promoted
                promoted.append(
                    PromotedSizes(
                        self._named(sizes),
                        made.size_bytes,
                        made.rented_executions,
                        made.rented_ns,
                        made.preparation_ns,
                        0 if account is None else account.resident[2],
                        promoted_ns,
                        n_executions,
                    )
                )
            return PromotionReport(
                tuple(promoted),
                sum(one.size_bytes for one in self._made.values()),
                self._budget_bytes,
                self._named(self._preparing),
                self._n_demoted,
                tuple((self._named(sizes), why) for sizes, why in self._refused.items()),
                self.accounts.least_due_ns,
                self._work.expected.what,
                self._waited_ns,
            )

    def _named(self, sizes: Choice) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self._names, sizes, strict=False))

    def stop(self) -> None:
        """Stop promoting. An executable being made is dropped when it is ready."""
        self._is_closed = True
        self.accounts.armed = False

    def close(self) -> None:
        """Stop promoting, and close promoted executables."""
        with self._lock:
            self.stop()
            made = list(self._made.values())
            self._made.clear()
            self.accounts.clear()
        for one in made:
            one.run.close()

    def _restart(self) -> None:
        """Reset in a forked child, which has no preparing thread."""
        self._lock = threading.RLock()
        self._preparing = ()
        self.accounts.armed = not self._is_closed


def _n_executions(run: Executable) -> int:
    """Count executions without the first, which proved it."""
    return max(0, run.last_execution.n_executions - 1)


def _used(accounts: _native.Promotions, sizes: Choice) -> int:
    account = accounts.account(sizes)
    return 0 if account is None else account.used


def _error_text(error: BaseException) -> str:
    if isinstance(error, NotPromoted):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def new_promoter(
    owner: object,
    promoting: Promoting,
    names: tuple[str, ...],
    budget_bytes: int,
    publish: Publish,
) -> Promoter:
    """Return a Promoter that stops once its owner has been destroyed.

    Args:
        owner: the executable of all sizes, held weakly.
        promoting: how it promotes.
        names: of the Dims.
        budget_bytes: the memory that promoted executables may take.
        publish: makes an executable share the owner's turns; must not refer to the owner.
    """
    promoter = Promoter(names, budget_bytes, promoting.work(publish), known=promoting.known)
    weakref.finalize(owner, promoter.stop).atexit = False
    return promoter


def _in_turn(work: Callable[[], None]) -> None:
    work()


def _in_a_thread(work: Callable[[], None]) -> None:
    """Not a daemon: one that the interpreter leaves inside torch would end the process."""
    threading.Thread(target=work, name="offload-promote").start()


_promoters: weakref.WeakSet[Promoter] = weakref.WeakSet()


def _restart_all() -> None:
    for one in list(_promoters):
        one._restart()


os.register_at_fork(after_in_child=_restart_all)
