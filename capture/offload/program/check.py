"""The check of every Program: recorded, rewritten or read from a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from offload.errors import ProgramError
from offload.program.collectives import check_groups, group_name
from offload.program.launch import Kernel, Launch, Opaque, Operator
from offload.program.program import Program
from offload.program.structure import Structure
from offload.program.triton_kernels import TritonKernel
from offload.program.values import ITEM_BYTES, Role, TensorView, Value, span_bytes

# More than any machine can address; sums of sizes stay far below 64 bits.
_MAXIMUM_BYTES = 2**56


def check_program(program: Program) -> None:
    """Check that a Program is consistent: every index in range, every view inside its Value.

    Executing a Program that passes accesses only the memory of its own Values, if its callees do
    what its launches state.

    Raises:
        ProgramError: the parts contradict each other; the message says where.
    """
    for position, value in enumerate(program.values):
        _check_value(position, value)
    _check_host_constants(program)
    if sum(value.size_bytes for value in program.values) > _MAXIMUM_BYTES:
        raise ProgramError("the values take more bytes than a machine can address")
    _check_inputs(program)
    _check_results(program)
    _check_weights(program)
    _check_overlaps(program)
    _check_launches(program)
    _check_collectives(program)


def _check_value(position: int, value: Value) -> None:
    if value.index != position:
        raise ProgramError(f"values[{position}] has the index %{value.index}")
    _check_layout(value, f"values[{position}]")
    span = span_bytes(value.shape, value.strides, value.dtype)
    if span > value.size_bytes:
        raise ProgramError(
            f"values[{value.index}] spans {span} bytes, and its size is {value.size_bytes}"
        )


def _check_layout(one: Value | TensorView, where: str) -> None:
    """Check the numbers that sizes are computed from."""
    numbers = (*one.shape, *one.strides)
    is_whole = all(isinstance(number, int) and number >= 0 for number in numbers)
    if not is_whole or len(one.shape) != len(one.strides):
        raise ProgramError(
            f"{where} has the shape {one.shape} with strides {one.strides}: expected as many of "
            "both, whole numbers from 0 on"
        )
    if one.dtype not in ITEM_BYTES:
        raise ProgramError(f"{where} has the unknown dtype {one.dtype!r}")


def _check_host_constants(program: Program) -> None:
    """No launch writes or returns a host constant: it has no memory."""
    changed = {index for launch in program.launches for index in launch.writes}
    changed |= {view.value for launch in program.launches for view in launch.made()}
    changed |= {result.view.value for result in program.results}
    for value in program.values:
        if value.host_content is None:
            continue
        where = f"values[{value.index}], a constant on the CPU,"
        if program.device == "cpu" or value.role not in (Role.INPUT, Role.WEIGHT):
            raise ProgramError(
                f"{where} has the role {value.role} in a program on {program.device}"
            )
        if len(value.host_content) != value.size_bytes:
            raise ProgramError(
                f"{where} has {len(value.host_content)} bytes, and its size is {value.size_bytes}"
            )
        if value.index in changed:
            raise ProgramError(f"{where} is written or returned")


def _check_view(program: Program, view: TensorView, where: str) -> Value:
    """Check that a view lies inside its Value, and return the Value."""
    if not 0 <= view.value < len(program.values):
        raise ProgramError(f"{where} names %{view.value} of {len(program.values)} values")
    value = program.values[view.value]
    _check_layout(view, where)
    if view.offset_bytes < 0:
        raise ProgramError(f"{where} begins {-view.offset_bytes} bytes before %{value.index}")
    if view.end_bytes > value.size_bytes:
        raise ProgramError(
            f"{where} covers bytes {view.offset_bytes} to {view.end_bytes} of %{value.index}, "
            f"which has {value.size_bytes}"
        )
    if view.offset_bytes % ITEM_BYTES[view.dtype]:
        raise ProgramError(f"{where} begins inside an element, at byte {view.offset_bytes}")
    if view.conjugate and not view.dtype.startswith("complex"):
        raise ProgramError(f"{where} is the conjugate of {view.dtype}")
    return value


def _check_inputs(program: Program) -> None:
    for leaf, view in enumerate(program.inputs):
        where = f"inputs[{leaf}]"
        value = _check_view(program, view, where)
        if view.offset_bytes or view.end_bytes != value.size_bytes:
            raise ProgramError(f"{where} is a part of %{value.index}, not the whole")
    _check_roles(program, Role.INPUT, [view.value for view in program.inputs], "an input")
    structure = program.arguments_structure
    kinds = [child.kind for child in structure.children]
    if structure.kind != "tuple" or kinds != ["tuple", "dict"]:
        raise ProgramError("arguments_structure is not a tuple of positional and keyword arguments")
    if not all(isinstance(key, str) for key in structure.children[1].keys):
        raise ProgramError("arguments_structure has a keyword that is not a string")
    if list(_leaves(structure)) != list(range(len(program.inputs))):
        raise ProgramError("arguments_structure does not hold each input once, in order")
    names = [name for name in (*program.parameter_names, *program.keyword_only_names) if name]
    if len(set(names)) != len(names) or "" in program.keyword_only_names:
        raise ProgramError("parameter_names and keyword_only_names do not name each parameter once")


def _check_roles(program: Program, role: Role, found: Sequence[int], what: str) -> None:
    if sorted(found) != [value.index for value in program.of_role(role)]:
        raise ProgramError(f"the values of role {role} are not those that {what} names, each once")


def _leaves(structure: Structure) -> Iterator[int]:
    if structure.kind == "tensor":
        yield structure.leaf
    for child in structure.children:
        yield from _leaves(child)


def _check_results(program: Program) -> None:
    returned = set()
    for position, result in enumerate(program.results):
        where = f"results[{position}]"
        value = _check_view(program, result.view, where)
        if value.role is Role.ACTIVATION:
            raise ProgramError(
                f"{where} is the activation %{value.index}, which callers cannot see"
            )
        if value.role is Role.OUTPUT:
            returned.add(value.index)
        leaf = result.input_leaf
        if not -1 <= leaf < len(program.inputs) or (
            leaf >= 0 and program.inputs[leaf] != result.view
        ):
            raise ProgramError(f"{where} is not the input {leaf} that it is declared to be")
    _check_roles(program, Role.OUTPUT, sorted(returned), "a result")
    # A tensor may appear at several places of the result; first appearances are in order.
    first_seen = list(dict.fromkeys(_leaves(program.result_structure)))
    if first_seen != list(range(len(program.results))):
        raise ProgramError("result_structure does not hold each result, in order")


def _check_weights(program: Program) -> None:
    for index, views in program.weight_views.items():
        where = f"the holders of %{index}"
        if not views:
            raise ProgramError(f"{where} are missing")
        for view in views:
            _check_view(program, view, where)
            if view.value != index:
                raise ProgramError(f"{where} hold %{view.value}")
    _check_roles(program, Role.WEIGHT, list(program.weight_views), "weights")


def _check_overlaps(program: Program) -> None:
    n_inputs = len(program.inputs)
    for position, overlap in enumerate(program.overlaps):
        if not 0 <= overlap.first < overlap.second < n_inputs:
            raise ProgramError(f"overlaps[{position}] is not a pair of the {n_inputs} inputs")
        one, other = (program.inputs[leaf] for leaf in (overlap.first, overlap.second))
        if not -other.end_bytes < overlap.distance_bytes < one.end_bytes:
            raise ProgramError(f"overlaps[{position}] lists inputs that do not overlap")


# ---- launches -----------------------------------------------------------------------------------


def _check_launches(program: Program) -> None:
    made_at: dict[int, int] = {}
    for position, launch in enumerate(program.launches):
        where = f"launches[{position}]"
        if launch.index != position:
            raise ProgramError(f"{where} has the index {launch.index}")
        if not isinstance(launch.callee, (Operator, Opaque, Kernel, TritonKernel)):
            raise ProgramError(
                f"{where}: expected an Operator, an Opaque, a Kernel or a TritonKernel as its "
                f"callee, got {launch.callee!r}"
            )
        for view in (*launch.views(), *launch.made()):
            _check_view(program, view, where)
        if any(not 0 <= index < len(program.values) for index in (*launch.reads, *launch.writes)):
            raise ProgramError(f"{where} reads or writes a value that does not exist")
        _check_accesses(program, launch, where)
        if isinstance(launch.callee, Kernel):
            _check_kernel(program, launch, launch.callee, where)
        if isinstance(launch.callee, TritonKernel):
            _check_triton(program, launch, launch.callee, where)
        _check_derived(program, launch, where)
        for view in launch.made():
            if made_at.setdefault(view.value, launch.index) != launch.index:
                raise ProgramError(f"{where} makes %{view.value} a second time")
    _check_order(program, made_at)


def _check_accesses(program: Program, launch: Launch, where: str) -> None:
    """Live ranges follow from reads and writes, so these must contain every view."""
    given = {view.value for view in launch.views()}
    made = [view.value for view in launch.made()]
    reads, writes = set(launch.reads), set(launch.writes)
    if not given <= reads | writes:
        raise ProgramError(f"{where} takes values that it is not declared to read or write")
    sees_more = isinstance(launch.callee, Opaque)  # it reads and writes weights in place
    if not set(made) <= writes or not (sees_more or writes <= given.union(made)):
        raise ProgramError(f"{where} is not declared to write exactly what it makes and takes")
    if len(set(made)) != len(made) or given.intersection(made):
        raise ProgramError(f"{where} makes a value twice, or one that it takes")
    for index in made:
        if program.values[index].role in (Role.INPUT, Role.WEIGHT):
            raise ProgramError(f"{where} makes the {program.values[index].role} %{index}")


def _check_kernel(program: Program, launch: Launch, kernel: Kernel, where: str) -> None:
    """The code takes and writes as many bytes as the launches that it replaces."""
    replaced = kernel.replaces
    check_program(replaced)
    made = [program.values[view.value] for view in launch.made()]
    inside = [
        *(replaced.values[view.value] for view in replaced.inputs),
        *(replaced.values[result.view.value] for result in replaced.results),
    ]
    given = [program.values[view.value] for view in launch.views()]
    outside = [one for one in given if one.role is not Role.DERIVED] + made
    scratch = outside[len(inside) :]
    if [one.size_bytes for one in outside[: len(inside)]] != [one.size_bytes for one in inside]:
        raise ProgramError(
            f"{where} takes or makes other sizes than the launches that its kernel replaces"
        )
    if any(one.role is not Role.SCRATCH for one in scratch):
        raise ProgramError(
            f"{where} makes values that the launches that its kernel replaces do not return"
        )
    if set(launch.writes) != {one.index for one in made}:
        raise ProgramError(f"{where} writes its arguments, which no kernel may do")
    derived = [one for one in given if one.role is Role.DERIVED]
    packed = [one for at, one in enumerate(given) if at in kernel.packed]
    if len(packed) != len(kernel.packed) or len(packed) > len(derived):
        raise ProgramError(
            f"{where} has no derived values in place of the values that it does not read"
        )
    if any(one.role is not Role.WEIGHT for one in packed):
        raise ProgramError(f"{where} does not read a value that is not a weight")


def _check_triton(program: Program, launch: Launch, kernel: TritonKernel, where: str) -> None:
    """It takes what its signature names, makes nothing, and works on memory of the device."""
    try:
        kernel.check(launch.arguments)
    except ProgramError as error:
        raise ProgramError(f"{where}: {error}") from None
    if launch.results or launch.guard is not None or launch.guards_shape:
        raise ProgramError(f"{where}: {kernel.name} returns nothing, and reads nothing on the host")
    if any(program.values[view.value].on_host for view in launch.views()):
        raise ProgramError(f"{where}: {kernel.name} takes a host constant, which is on the host")


def _check_derived(program: Program, launch: Launch, where: str) -> None:
    """Derived Values are made from weights that no launch writes, and only by deriving launches."""
    derives = isinstance(launch.callee, Kernel) and launch.callee.derives
    roles = {program.values[index].role for index in launch.writes}
    if derives != (Role.DERIVED in roles) or (derives and roles != {Role.DERIVED}):
        raise ProgramError(f"{where} writes the roles {sorted(roles)} with derives={derives}")
    if not derives:
        return
    if any(program.values[index].role is not Role.WEIGHT for index in launch.reads):
        raise ProgramError(f"{where} derives from values that are not weights")
    written = {index for one in program.launches for index in one.writes}
    if changed := written.intersection(launch.reads):
        raise ProgramError(f"{where} derives from %{min(changed)}, which a launch writes")


def _check_collectives(program: Program) -> None:
    """Each collective is followed by a launch that waits for it and reads all that it holds."""
    under_way: dict[int, frozenset[int]] = {}  # by Value that it makes or writes, what it holds
    names = []
    for launch in program.launches:
        where = f"launches[{launch.index}]"
        if launch.waits:
            (view,) = launch.views()
            held = under_way.pop(view.value, None)
            if held is None or not held <= set(launch.reads):
                raise ProgramError(f"{where} waits for %{view.value}, which no collective is using")
        elif launch.is_collective:
            names.append(group_name(launch.arguments))
            under_way.update(dict.fromkeys(launch.writes, launch.held()))
    if under_way:
        raise ProgramError(f"nothing waits for the collective that uses %{min(under_way)}")
    check_groups(program.groups, names)


def _check_order(program: Program, made_at: Mapping[int, int]) -> None:
    """No Value may be used before the launch that makes it: until then it has no memory."""
    for launch in program.launches:
        for view in launch.views():
            if made_at.get(view.value, -1) >= launch.index:
                raise ProgramError(f"launches[{launch.index}] uses %{view.value} before it is made")
