"""A world with a virtual clock, in which calls, promotions and their costs are simulated."""

from __future__ import annotations

import dataclasses

from offload.host.promoter import Promoter
from offload.host.promotion import KERNELS
from offload.host.promotion_work import NotPromoted


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of a choice of sizes, in ns and bytes."""

    resident: int
    promoted: int
    preparation: int
    n_bytes: int = 1


class Run:
    """A stand-in for an executable of some sizes alone."""

    def __init__(self):
        self.n_executions = 1  # its proof
        self.is_closed = False

    @property
    def last_execution(self):
        return self

    def close(self):
        self.is_closed = True

    def rebind_weights(self):
        pass


class World:
    """Calls in sequence; preparations block them, or run beside them."""

    def __init__(
        self, costs, *, budget=10**9, beside=False, fails=(), expected=KERNELS, known=None
    ):
        self.expected, self.in_turn = expected, not beside
        self.costs, self.beside, self.fails = costs, beside, fails
        self.now = self.preparing = 0
        self.calls_ns = self.preparations_ns = 0
        self.counts = {}
        self.made_sizes = []
        self._due = None
        self.promoter = Promoter(
            ("n",),
            budget,
            self,
            start=self._start if beside else None,
            clock_ns=lambda: self.now + self.preparing,
            known=known,
        )

    # A promoter's work.
    def kept(self, sizes, args, kwargs):
        return sizes

    def made(self, sizes, call, is_wanted):
        assert call == sizes
        assert is_wanted()
        costs = self.costs[sizes[0]]
        if self.beside:
            self.preparing = costs.preparation
        else:
            self.now += costs.preparation
        self.preparations_ns += costs.preparation
        self.made_sizes.append(sizes[0])
        if sizes[0] in self.fails:
            raise NotPromoted("it fails")
        return Run(), costs.n_bytes

    def publish(self, sizes, run):
        return run

    def _start(self, work):
        sizes = self.promoter.report().preparing[0][1]
        self._due = self.now + self.costs[sizes].preparation, work

    def call(self, size):
        if self._due is not None and self.now >= self._due[0]:
            (_, work), self._due = self._due, None
            work()
            self.preparing = 0
        own = self.promoter.accounts.find((size,), (), {})
        costs = self.costs[size]
        taken = costs.resident if own is None else costs.promoted
        if own is not None:
            own.n_executions += 1
        self.now += taken
        self.calls_ns += taken
        self.counts[size] = self.counts.get(size, 0) + 1
        self.promoter.accounts.charge((size,), taken, own is not None)

    def is_promoted(self, size):
        account = self.promoter.accounts.account((size,))
        return account is not None and account.is_promoted

    @property
    def total_ns(self):
        return self.calls_ns + self.preparations_ns

    @property
    def best_ns(self):
        """The optimum in hindsight: all or no calls of each choice of sizes by a separate one."""
        return sum(
            min(n * self.costs[size].resident, self._bought_ns(size, n))
            for size, n in self.counts.items()
        )

    @property
    def unpromoted_ns(self):
        return sum(n * self.costs[size].resident for size, n in self.counts.items())

    @property
    def least_ns(self):
        """A lower bound: every call by its own executable."""
        return sum(n * self.costs[size].promoted for size, n in self.counts.items())

    def _bought_ns(self, size, n):
        return self.costs[size].preparation + n * self.costs[size].promoted
