"""Demands of models for plans of streaming."""

from hypothesis import strategies as st
from streaming_cases import (
    ALIGNMENT,
    demands,
    floor_of,
    full_of,
)


@st.composite
def demands_and_budgets(draw):
    demand = draw(demands())
    floor, full = floor_of(demand), full_of(demand)
    return demand, draw(st.integers(floor, full + ALIGNMENT))
