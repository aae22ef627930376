"""The null backend: no device. It computes nothing, and is the template for new backends."""

from __future__ import annotations

from offload.backends.base import Capabilities
from offload.backends.loaded import LaunchReport, Loaded, Prepared
from offload.native import _native
from offload.plan import Plan, check_plan
from offload.plan.topology import CostTable, Machine
from offload.program import BoundProgram


class NullBackend:
    """Holds the words that a device would hold, and a virtual clock over the cost table.

    It stands for a machine whose resident object has one word per tensor argument of each launch,
    so the words patched by an execution are those of a captured graph.
    """

    name = "null"
    capabilities = Capabilities(computes=False)
    opaque = weights = timing = offline = sizes = lanes = dispatch = None

    def machine(self, index: int | None = None) -> Machine:
        """Describe a machine with 64-byte alignment and the default cost table."""
        return Machine("null", "null device", 0, 64, CostTable())

    def records(self) -> str:
        """Programs are recorded on the CPU."""
        return "cpu"

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Return the Program unchanged: every Value is where the Plan puts it."""
        return Prepared(bound)

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Lay out one word per tensor argument and result, in launch order.

        Raises:
            PlanError: the Plan does not fit the Program.
        """
        program = prepared.program
        check_plan(program, plan)
        costs = self.machine().costs
        relocations: list[tuple[int, int, int]] = []
        launch_ns: list[int] = []
        for launch in program.launches:
            for view in (*launch.views(), *launch.made()):
                place = plan.places[view.value]
                if place is not None:
                    offset_bytes = place.offset_bytes + view.offset_bytes
                    relocations.append((len(relocations), place.slot, offset_bytes))
            launch_ns.append(costs.operator_ns.get(launch.name, costs.launch_ns))
        resident = _native.NullResident(relocations, costs.word_ns, costs.submit_ns, launch_ns)
        reports = tuple(LaunchReport("none", 0) for _ in program.launches)
        return Loaded(resident, frozenset(), lambda: reports)

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Do nothing: it computes nothing."""
