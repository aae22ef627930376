"""Promotion: sizes that repeat get executables of their own, one at a time."""

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
"""For so many choices of sizes it is counted what they take."""


_MOST_KNOWN = 64
"""From so many promotions others are predicted."""


Start = Callable[[Callable[[], None]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """An executable of some sizes alone, and how it came to be."""

    run: Any
    size_bytes: int
    preparation_ns: int
    rented_executions: int
    rented_ns: int


class Promoter:
    """Decides by `promotion`'s functions which sizes get executables of their own, and has them.

    Calls are counted natively (`accounts`). The call by which sizes are due has an executable made:
    by a thread, which is given copies of its tensors, or it waits. One choice of sizes is prepared
    at a time; meanwhile other calls go on as before. What fails is told in the report, and its
    sizes are not tried again.

    Owner: one executable, which it does not keep. Thread: any. Errors: those of an interrupt alone.
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
        """Promote nothing yet.

        Args:
            names: of the Dims.
            budget_bytes: the memory that executables of their own may take.
            work: makes them.
            start: begins a preparation; None: as `work` says, in a thread or in turn.
            clock_ns: by which preparations are measured.
            known: what was measured before, by sizes.
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
        own = weakref.ref(self)  # the native side would keep it, unseen by the garbage collector

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
        """Begin what an account is due for: a promotion, or the review of one."""
        gone: list[_Made] = []  # outlives the lock: its end waits for executions
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
            self._end(sizes, refusal=_told(error))
        except BaseException:  # an interrupt, which the call raises; the next one tries again
            self._end(sizes)
            raise

    def _prepare(self, sizes: Choice, call: Any, rented: tuple[int, int]) -> None:
        """Make an executable, and let calls have it. Raises what is no Exception: an interrupt."""
        n_rebound, begin_ns = self._n_rebound, self._clock_ns()
        gone: list[_Made] = []  # outlives the lock: its end waits for executions
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
            # Storages that were swapped meanwhile are no fault of these sizes.
            if n_rebound == self._n_rebound:
                refusal = _told(error)
                self._learn_failure(sizes, self._clock_ns() - begin_ns)
        finally:
            waited_ns = self._clock_ns() - begin_ns if self._work.in_turn else 0
            self._end(sizes, refusal, waited_ns)

    def _add(self, sizes: Choice, made: _Made) -> list[_Made]:
        """Let calls have an executable; those that went to make room."""
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
        """One that failed early tells nothing of what others take; one that took long does."""
        with self._lock:
            predicted_ns = predicted_preparation_ns(sizes, self._known, self._work.expected)
            self._learn(sizes, max(preparation_ns, round(predicted_ns)))

    def _drop(self, sizes: Choice) -> _Made:
        """Take an executable back; calls that have it go on."""
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
        """Learn what an executable saves; one that saves nothing goes."""
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
        """Let all sizes ask, which may be due by what is known now."""
        self.accounts.least_due_ns = least_due_ns(self._known, self._work.expected)

    def executables(self) -> list[tuple[Choice, Executable]]:
        """All that are promoted, by their sizes."""
        with self._lock:
            return [(sizes, one.run) for sizes, one in self._made.items()]

    def n_executions(self) -> int:
        """By executables of their own, those that went included; without their proofs."""
        with self._lock:
            return self._n_gone + sum(_n_executions(one.run) for one in self._made.values())

    def rebind_weights(self) -> None:
        """Have all use the storages that the parameters have now.

        One that cannot goes, as of a device whose kernels keep the addresses of weights: the
        executable of all sizes has been given them already, and its sizes may be promoted again.
        """
        gone: list[_Made] = []  # outlives the lock: its end waits for executions
        with self._lock:
            self._n_rebound += 1  # what is made later looks by itself
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
        """What became of sizes that repeat so far."""
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
        """Promote nothing more. What is being made goes when it is done."""
        self._is_closed = True
        self.accounts.armed = False

    def close(self) -> None:
        """Promote nothing more, and close what was promoted."""
        with self._lock:
            self.stop()
            made = list(self._made.values())
            self._made.clear()
            self.accounts.clear()
        for one in made:
            one.run.close()

    def _restart(self) -> None:
        """In the child of a fork, which has no thread that prepares."""
        self._lock = threading.RLock()
        self._preparing = ()
        self.accounts.armed = not self._is_closed


def _n_executions(run: Executable) -> int:
    """Besides the first, which proved it."""
    return max(0, run.last_execution.n_executions - 1)


def _used(accounts: _native.Promotions, sizes: Choice) -> int:
    account = accounts.account(sizes)
    return 0 if account is None else account.used


def _told(error: BaseException) -> str:
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
    """A Promoter that promotes nothing more once its owner has gone.

    Args:
        owner: the executable of all sizes, which is not kept.
        promoting: how it promotes.
        names: of the Dims.
        budget_bytes: the memory that executables of their own may take.
        publish: lets one take turns with the owner's; must not keep the owner.
    """
    promoter = Promoter(names, budget_bytes, promoting.work(publish), known=promoting.known)
    weakref.finalize(owner, promoter.stop).atexit = False
    return promoter


def _in_turn(work: Callable[[], None]) -> None:
    work()


def _in_a_thread(work: Callable[[], None]) -> None:
    """No daemon: one that the interpreter leaves inside of torch would end the process."""
    threading.Thread(target=work, name="offload-promote").start()


_promoters: weakref.WeakSet[Promoter] = weakref.WeakSet()


def _restart_all() -> None:
    for one in list(_promoters):
        one._restart()


os.register_at_fork(after_in_child=_restart_all)
