"""The native side's kinds of slots and results, by their role in a Plan and a Program."""

from __future__ import annotations

from offload.native import _native
from offload.plan import Plan, SlotKind
from offload.program import Role

_TRIGGERS = {
    SlotKind.INPUT: _native.Trigger.IO,
    SlotKind.OUTPUT: _native.Trigger.IO,
    SlotKind.WEIGHT: _native.Trigger.WEIGHT,
    SlotKind.FEATURE_MAP: _native.Trigger.FEATURE_MAP,
    SlotKind.OPERATOR: _native.Trigger.INTERNAL,
    SlotKind.DERIVED: _native.Trigger.INTERNAL,
}

_RESULT_SOURCES = {
    Role.INPUT: _native.ResultSource.INPUT,
    Role.WEIGHT: _native.ResultSource.WEIGHT,
    Role.OUTPUT: _native.ResultSource.OUTPUT,
}


def slot_triggers(plan: Plan) -> list[_native.Trigger]:
    """Return for each slot of a Plan what makes its address change."""
    return [_TRIGGERS[slot.kind] for slot in plan.slots]


def result_source(role: Role) -> _native.ResultSource:
    """Return whose memory a result aliases that is a view of a Value of this role.

    Raises:
        KeyError: results cannot be views of such a Value.
    """
    return _RESULT_SOURCES[role]
