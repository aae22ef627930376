"""Decoders of public shapes as tables of layers, with times by a simple model of a device.

A launch takes the longer of its arithmetic and its memory traffic, plus the gap before it. Weights
are bf16. The embedding is left out: it is gathered by row and never streamed whole.
"""

from __future__ import annotations

import dataclasses

from offload.plan.streaming import WeightDemand, WeightUse
from offload.plan.topology import Link

FLOPS = 600e12
MEMORY_BYTES_PER_SECOND = 4e12
GAP_NS = 3_000.0
LINK = Link(bytes_per_second=55e9, overhead_ns=8_000.0)
"""PCIe 5 x16 as a copy engine reaches it, and the overhead of one copy of a graph."""

GRANULE_BYTES = 2 << 20
ALIGNMENT_BYTES = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """A model of the Llama 3 family; sizes in elements."""

    title: str
    n_layers: int
    hidden: int
    key_value: int
    intermediate: int
    vocabulary: int = 128_256


LLAMA_8B = Decoder("8B", 32, 4_096, 1_024, 14_336)
LLAMA_70B = Decoder("70B", 80, 8_192, 1_024, 28_672)


class _Table:
    """Launches and weights, in order."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.launch_ns: list[float] = []
        self.weights: list[WeightUse] = []

    def launch(self, flops: float, traffic_bytes: float) -> None:
        busy = max(flops / FLOPS, traffic_bytes / MEMORY_BYTES_PER_SECOND)
        self.launch_ns.append(GAP_NS + busy * 1e9)

    def weight(self, name: str, n_elements: int) -> None:
        launches = (len(self.launch_ns),)
        self.weights.append(WeightUse(len(self.weights), 2 * n_elements, launches, name))

    def linear(self, name: str, n_in: int, n_out: int) -> None:
        self.weight(name, n_in * n_out)
        self.launch(2.0 * n_in * n_out * self.n_tokens, 2.0 * n_in * n_out)

    def norm(self, name: str, hidden: int) -> None:
        self.weight(name, hidden)
        self.launch(0, 4.0 * hidden * self.n_tokens)


def demand_of(decoder: Decoder, n_tokens: int) -> WeightDemand:
    """The demand for weights of a pass over this many tokens at once; 1: a decoding step."""
    table = _Table(n_tokens)
    hidden, inner = decoder.hidden, decoder.intermediate
    for layer in range(decoder.n_layers):
        table.norm(f"layers.{layer}.input_norm", hidden)
        table.linear(f"layers.{layer}.q", hidden, hidden)
        table.linear(f"layers.{layer}.k", hidden, decoder.key_value)
        table.linear(f"layers.{layer}.v", hidden, decoder.key_value)
        table.launch(4.0 * n_tokens**2 * hidden, 0)  # attention
        table.linear(f"layers.{layer}.o", hidden, hidden)
        table.norm(f"layers.{layer}.post_norm", hidden)
        table.linear(f"layers.{layer}.gate", hidden, inner)
        table.linear(f"layers.{layer}.up", hidden, inner)
        table.launch(0, 6.0 * inner * n_tokens)  # the gate's activation and product
        table.linear(f"layers.{layer}.down", inner, hidden)
    table.norm("norm", hidden)
    table.linear("lm_head", hidden, decoder.vocabulary)
    return WeightDemand(tuple(table.launch_ns), tuple(table.weights))
