"""How many sizes of a Family are kept, and reports on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from offload.console.amounts import parse_bytes, show_bytes, show_count
from offload.errors import BindingError
from offload.host.promotion import PromotionReport
from offload.program.family import Dim


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How a Program whose sizes vary is loaded.

    Attributes:
        instances: the memory that instances may take, in bytes or as text such as `16MiB`. The
            least recently used are evicted first; the one in use stays. In a resident of all sizes
            an instance is the numbers and constants of its sizes, and the grids and argument blocks
            of a capturer's kernels; otherwise a separate executable, with launches and activations,
            except where activations of all executables share one arena.
        buckets: by Dim, the ends of the ranges of sizes in which activations have the same places;
            half steps (16, 24, 32, 48 and so on) by default, and beyond the last end. Larger
            buckets take more memory, and are planned less often.
        promoted: the memory that executables of repeated sizes may take, as `instances`, beside the
            arena, which they share where the device allows it; the least recently used are evicted
            first. Sizes, or with `pad` buckets, get one when it would have saved, over the
            executions so far, the cost of making it: on the CPU with kernels (`fuse=`), which a
            thread makes while calls continue; on `cuda` and `npu` as one task, for which the due
            call waits. None: no promotion.
        pad: by parameter, the value that pads its tensors to the end of their bucket; then only
            buckets are executed. Empty: each call is executed at its own sizes.
    """

    instances: int | str = "16MiB"
    buckets: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    pad: Mapping[str, float] = dataclasses.field(default_factory=dict)
    promoted: int | str | None = None

    def __post_init__(self) -> None:
        """Refuse another structure.

        Raises:
            BindingError: `buckets` or `pad` is not a mapping, or has other contents than described.
        """
        if not isinstance(self.buckets, Mapping):
            raise BindingError(
                "sizes.buckets: expected for each Dim where its buckets end, such as "
                f"{{'n': [16, 64]}}, got {self.buckets!r}"
            )
        if not isinstance(self.pad, Mapping):
            raise BindingError(
                "sizes.pad: expected for each parameter a number, such as {'ids': 0}, got "
                f"{self.pad!r}"
            )
        for name, ends in self.buckets.items():
            if isinstance(ends, str) or not isinstance(ends, Sequence):
                raise BindingError(f"sizes.buckets[{name!r}]: expected a list, got {ends!r}")

    def ends_for(
        self, dims: Sequence[Dim], ends: Callable[[Dim, Sequence[int]], list[int]]
    ) -> list[list[int]]:
        """Return the ends of buckets, by Dim, as `ends` completes the given ones.

        Raises:
            BindingError: buckets are given for an unknown Dim, or end at an impossible size.
        """
        names = [one.name for one in dims]
        if unknown := set(self.buckets).difference(names):
            raise BindingError(
                f"sizes.buckets: expected ends for {', '.join(names)}, got some for "
                f"{min(unknown)}, which is not a Dim"
            )
        for name, given in self.buckets.items():
            if not all(type(one) is int and one >= 0 for one in given):
                raise BindingError(
                    f"sizes.buckets[{name!r}]: expected whole numbers from 0 on, got {given!r}"
                )
        return [ends(one, self.buckets.get(one.name, ())) for one in dims]

    @property
    def budget_bytes(self) -> int:
        """The memory that instances may take.

        Raises:
            BindingError: `instances` is not a number of bytes.
        """
        return parse_bytes(self.instances, "sizes.instances")

    @property
    def promoted_bytes(self) -> int:
        """The memory that executables of repeated sizes may take.

        Raises:
            BindingError: `promoted` is not a number of bytes.
        """
        return 0 if self.promoted is None else parse_bytes(self.promoted, "sizes.promoted")


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceReport:
    """A report on the instances of one executable.

    Attributes:
        hits, misses: executions whose sizes were ready, and others.
        evicted: instances evicted to make room.
        kept: instances that are ready now.
        kept_bytes: their bytes.
        buckets: ranges of sizes for which activations were placed so far.
        sizes: of the latest execution, by Dim; empty before the first.
        was_hit: whether they were ready.
        prepare_ns: the duration of making them ready; 0 if they were.
        promotion: the promotion of repeated sizes; None without promotion.
    """

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    kept: int = 0
    kept_bytes: int = 0
    buckets: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    was_hit: bool = False
    prepare_ns: int = 0
    promotion: PromotionReport | None = None

    def __str__(self) -> str:
        latest = ", ".join(f"{name} = {size}" for name, size in self.sizes)
        state = "ready" if self.was_hit else f"prepared in {self.prepare_ns / 1e6:.2f} ms"
        return (
            f"{show_count(self.kept, 'instance')} of {show_bytes(self.kept_bytes)}, "
            f"{self.hits:,} hits, {self.misses:,} misses, {self.evicted:,} evicted"
            + (f"; latest {latest}: {state}" if latest else "")
            + (f"; {self.promotion}" if self.promotion is not None else "")
        )
