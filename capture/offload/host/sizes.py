"""How many sizes of a Family are kept ready, and what became of them."""

from __future__ import annotations

import dataclasses

from offload.console.amounts import parse_bytes, show_bytes, show_count


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How a Program whose sizes vary is loaded.

    Attributes:
        instances: the memory that instances may take (activations, constants and launches), in
            bytes or as text such as `16MiB`. The least recently used go first; the one in use
            stays.
    """

    instances: int | str = "16MiB"

    @property
    def budget_bytes(self) -> int:
        """The memory that instances may take.

        Raises:
            BindingError: `instances` is no number of bytes.
        """
        return parse_bytes(self.instances, "sizes.instances")


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceReport:
    """What became of the instances of one executable.

    Attributes:
        hits, misses: executions whose sizes were ready, and others.
        evicted: instances that went to make room.
        kept: those that are ready now.
        kept_bytes: what they take.
        sizes: of the latest execution, by Dim; empty before the first.
        was_hit: whether they were ready.
        prepare_ns: what making them ready took; 0 where they were.
    """

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    kept: int = 0
    kept_bytes: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    was_hit: bool = False
    prepare_ns: int = 0

    def __str__(self) -> str:
        latest = ", ".join(f"{name} = {size}" for name, size in self.sizes)
        state = "ready" if self.was_hit else f"prepared in {self.prepare_ns / 1e6:.2f} ms"
        return (
            f"{show_count(self.kept, 'instance')} of {show_bytes(self.kept_bytes)}, "
            f"{self.hits:,} hits, {self.misses:,} misses, {self.evicted:,} evicted"
            + (f"; latest {latest}: {state}" if latest else "")
        )
