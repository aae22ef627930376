"""Checks a Plan against its Program: where Values lie, and the order of its Steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from offload.errors import PlanError
from offload.plan.check_steps import Touch, check_steps
from offload.plan.place_lifetimes import check_lifetimes
from offload.plan.plan import Plan, SlotKind
from offload.plan.steps import Copy, LaneKind
from offload.program import PLACED_ROLES, Effect, EffectKind, Launch, Program
from offload.program.collectives import COPIED_AT_START


def check_plan(program: Program, plan: Plan) -> None:
    """Check a Plan against its Program; every backend runs this before it instantiates.

    Raises:
        PlanError: a used Value has no place, lies outside its slot or off its alignment; an input,
            output or weight lies in the feature map; two Values share bytes of it while both exist;
            a host constant has a place; or, for several lanes of launches, as `check_steps`.
    """
    used = {view.value for launch in program.launches for view in launch.views()}
    used |= {index for launch in program.launches for index in launch.writes}
    used |= {result.view.value for result in program.results}
    used |= {view.value for view in program.inputs}
    for value in program.values:
        place = plan.places[value.index]
        if place is None:
            if value.index in used and not value.on_host:
                raise PlanError(f"%{value.index} ({value.name}) is used but has no place")
            continue
        if value.on_host:
            raise PlanError(f"%{value.index} ({value.name}) is a host constant and has a place")
        slot = plan.slots[place.slot]
        if place.offset_bytes + value.size_bytes > slot.size_bytes or place.offset_bytes < 0:
            raise PlanError(
                f"%{value.index} ({value.name}) covers bytes {place.offset_bytes} to "
                f"{place.offset_bytes + value.size_bytes} of slot {slot.name}, which has "
                f"{slot.size_bytes}"
            )
        if slot.kind is SlotKind.FEATURE_MAP:
            if value.role not in PLACED_ROLES:
                raise PlanError(f"{value.role} %{value.index} ({value.name}) in the feature map")
            if place.offset_bytes % plan.alignment_bytes:
                raise PlanError(
                    f"%{value.index} ({value.name}) at byte {place.offset_bytes} is not aligned to "
                    f"{plan.alignment_bytes}"
                )
    _check_shared(program, plan)
    # For one lane of launches, lifetimes and `check_streaming` (for copies) prove as much.
    n_of_launches = sum(lane.kind is LaneKind.LAUNCHES for lane in plan.lanes)
    if plan.launch_lanes or plan.collective_lanes or n_of_launches > 1:
        check_order(program, plan)


def _check_shared(program: Program, plan: Plan) -> None:
    """Check that no two Values share bytes of the feature map while both exist."""
    feature_map = plan.feature_map.index
    placed = [
        (value, place)
        for value, place in zip(program.values, plan.places, strict=True)
        if place is not None and place.slot == feature_map
    ]
    check_lifetimes(
        [plan.lifetimes[one.index] for one, _ in placed],
        [one.size_bytes for one, _ in placed],
        [place.offset_bytes for _, place in placed],
    )


def check_order(program: Program, plan: Plan) -> None:
    """Prove that lanes touch bytes of slots, weights and effects in a correct order.

    Raises:
        PlanError: as `check_steps`.
    """
    check_steps(plan.lanes, len(program.launches), _PlanTouches(program, plan))


_GUARD = Effect(EffectKind.GUARD)
_UNSEEN = Effect(EffectKind.UNSEEN)
_MADE_IN_AN_EXECUTION = (SlotKind.OUTPUT, SlotKind.FEATURE_MAP, SlotKind.OPERATOR)


@dataclasses.dataclass(frozen=True)
class _PlanTouches:
    """The accesses of a Plan's launches and copies: bytes of slots, pieces of weights, effects.

    The first launch that touches a Value in an execution makes it: it may begin without content.
    """

    program: Program
    plan: Plan

    @functools.cached_property
    def _makers(self) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for launch in self.program.launches:
            for value in (*launch.reads, *launch.writes):
                found.setdefault(value, launch.index)
        return found

    @functools.cached_property
    def _pieces(self) -> Mapping[int, list[int]]:
        """The pieces of weights under a budget, by Value; empty where rows are gathered."""
        found: dict[int, list[int]] = {}
        if self.plan.streaming is not None:
            found = {one.value: [] for one in self.plan.streaming.gathers}
            for index, piece in enumerate(self.plan.streaming.pieces):
                found.setdefault(piece.value, []).append(index)
        return found

    @functools.cached_property
    def _overlapping(self) -> Mapping[int, str]:
        """Inputs that share memory with others, by Value, and the name of the first of these."""
        first: dict[int, int] = {}
        for one in self.program.overlaps:
            values = [self.program.inputs[leaf].value for leaf in (one.first, one.second)]
            roots = {first.get(value, value) for value in values}
            for value in {*values, *(each for each, root in first.items() if root in roots)}:
                first[value] = min(roots)
        return {value: self.program.values[root].name for value, root in first.items()}

    def at_first(self) -> Iterator[Touch]:
        """Data of callers and the model, and resident pieces."""
        for shared in sorted(set(self._overlapping.values())):
            yield Touch(f"the memory of {shared}", 0, 1, None, True)
        for slot in self.plan.slots:
            if slot.kind not in _MADE_IN_AN_EXECUTION:
                yield Touch(_name(slot.index, slot.name), 0, slot.size_bytes, None, True)
        for indices in self._pieces.values():
            for index in indices:
                if not self._streamed(index):
                    yield self._piece(index, is_write=True)
        effects = {effect for launch in self.program.launches for effect in launch.effects}
        for effect in sorted({*effects, _GUARD, _UNSEEN}):
            yield Touch(effect, 0, 1, None, True)

    def of_launch(self, launch: int, execution: int) -> Iterator[Touch]:
        """Its effects and Values: reads, and results or writes."""
        one = self.program.launches[launch]
        yield from self._effects(one)
        yield from self._overlaps(one)
        yield from self._values(one, execution)

    def _values(self, one: Launch, execution: int) -> Iterator[Touch]:
        for value in dict.fromkeys((*one.reads, *one.writes)):
            if value in self._pieces:
                for is_write in (False, True)[: 1 + (value in one.writes)]:
                    for index in self._pieces[value]:
                        yield self._piece(index, is_write=is_write)
                continue
            place = self.plan.places[value]
            if place is None:
                continue  # a host constant
            slot = self.plan.slots[place.slot]
            is_made = slot.kind in _MADE_IN_AN_EXECUTION
            begin, end = (
                place.offset_bytes,
                place.offset_bytes + self.program.values[value].size_bytes,
            )
            content = (value, execution) if is_made else None
            is_first = is_made and self._makers[value] == one.index
            memory = _name(slot.index, slot.name)
            if not is_first:
                yield Touch(memory, begin, end, content, False)
            if is_first or value in one.writes:
                yield Touch(memory, begin, end, content, True)

    def _overlaps(self, launch: Launch) -> Iterator[Touch]:
        """Memory that inputs share, once, whichever of these inputs it reads and writes."""
        written = {self._overlapping.get(value) for value in launch.writes}
        shared = (self._overlapping.get(value) for value in (*launch.reads, *launch.writes))
        for one in dict.fromkeys(shared):
            if one is not None:
                yield Touch(f"the memory of {one}", 0, 1, None, one in written)

    def _effects(self, launch: Launch) -> Iterator[Touch]:
        """Its effects: unseen work is ordered with everything, guards with what callers can see."""
        effects = launch.effects
        for effect in sorted(effects):
            yield Touch(effect, 0, 1, None, True)
        if _UNSEEN not in effects:
            yield Touch(_UNSEEN, 0, 1, None, False)
        seen = any(self.program.values[one].role not in PLACED_ROLES for one in launch.writes)
        if (seen or effects) and _GUARD not in effects:
            yield Touch(_GUARD, 0, 1, None, False)

    def of_copy(self, copy: Copy, execution: int) -> Iterator[Touch]:
        """Its piece, or the accesses of the launch that starts its collective."""
        if self.plan.collective_lanes is not None:
            started = self.program.launches[copy.piece]
            if started.name in COPIED_AT_START:
                started = dataclasses.replace(started, reads=())
            yield from self._overlaps(started)
            yield from self._values(started, execution)
        else:
            yield self._piece(copy.piece, is_write=True)

    def launch_name(self, launch: int) -> str:
        """The launch, with its line."""
        return str(self.program.launches[launch].name) + f" (launch {launch})"

    def copy_name(self, copy: Copy) -> str:
        """The copy, by its weight or the launch that starts its collective."""
        if self.plan.collective_lanes is not None:
            return f"the exchange that {self.launch_name(copy.piece)} starts"
        assert self.plan.streaming is not None
        piece = self.plan.streaming.pieces[copy.piece]
        return f"the copy of {self.program.values[piece.value].name}"

    def _streamed(self, index: int) -> bool:
        assert self.plan.streaming is not None
        return self.plan.streaming.pieces[index].streamed

    def _piece(self, index: int, *, is_write: bool) -> Touch:
        assert self.plan.streaming is not None
        piece = self.plan.streaming.pieces[index]
        end = piece.memory_offset_bytes + piece.size_bytes
        return Touch("weights", piece.memory_offset_bytes, end, index, is_write)


def _name(slot: int, name: str) -> str:
    return f"slot {slot} ({name})"
