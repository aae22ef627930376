"""A cost model in which headers take no time, for tests of streamed weights."""

from __future__ import annotations

from offload.costs import STAGES, Coefficient, CostModel, HeaderModel, HeaderShape

NOTHING = Coefficient(0, 0, 0)
NO_HEADER = CostModel(
    HeaderModel(
        {
            stage: dict.fromkeys(HeaderShape(1, 1, 1, 1, 1, 1).terms(stage), NOTHING)
            for stage in STAGES
        },
        1,
    ),
    issue_ns=0,
    handoff_ns=0,
    launch_ns={},
)
"""Launch costs are learned from the timeline itself."""
