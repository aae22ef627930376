"""PyTorch's operator database: every sample captured, replayed with other values, against eager."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from operator_exceptions import NOT_ON_CPU, REFUSED, REFUSED_IN_PLACE, ROUNDED, UNCHECKED_INTEGERS
from operator_samples import OpInfo, SampleInput, op_db, seed_generator
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import offload

pytestmark = pytest.mark.long

DTYPES_OTHERWISE = (torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn)

N_BETWEEN_ACTIVATIONS = 4

N_IN_PLACE = 3

Change = Callable[[torch.Tensor, torch.Generator], None]


@pytest.fixture(autouse=True, scope="module")
def only_own_objects_are_collected() -> Iterator[None]:
    """The libraries have many objects, and each collection would visit them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def plain_random_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The database seeds random operators itself; here each caller seeds. And warnings are off."""
    monkeypatch.setattr(
        common_methods_invocations,
        "wrapper_set_seed",
        lambda operator, *args, **kwargs: operator(*args, **kwargs),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def is_real_or_complex(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def copy_with_layout(tensor: torch.Tensor) -> torch.Tensor:
    """The same view of a new storage."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    copy = torch.empty(0, dtype=tensor.dtype)
    storage = tensor.untyped_storage().clone()
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        copy = torch._conj(copy)
    return torch._neg_view(copy) if tensor.is_neg() else copy


def each_element_once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its expanded dimensions, so that it can be written."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def permute(tensor: torch.Tensor, generator: torch.Generator) -> None:
    elements = each_element_once(tensor)
    flat = elements.reshape(-1)
    if flat.numel() > 4096:  # cheaper, and equally different
        flat = flat.flip(0)
    else:
        flat = flat[torch.randperm(flat.numel(), generator=generator)]
    elements.copy_(flat.reshape(elements.shape))


def scale(tensor: torch.Tensor, generator: torch.Generator) -> None:
    elements = each_element_once(tensor)
    if tensor.dtype.itemsize == 1 or tensor.dtype is torch.complex32:  # no arithmetic of their own
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        elements.copy_((elements.to(wide) * 0.75).to(tensor.dtype))
    else:
        elements.mul_(0.75)


def keep(tensor: torch.Tensor, generator: torch.Generator) -> None:
    pass


# How floating-point and other operands are changed; the first that eager accepts is used. Scaling
# keeps properties that an operator may need: order, sign, symmetry, positive definiteness.
FIRST_REPLAY = ((permute, permute), (permute, keep), (scale, keep))

SECOND_REPLAY = ((scale, permute), (scale, keep))


def unchecked(strategies: tuple[tuple[Change, Change], ...]) -> tuple[tuple[Change, Change], ...]:
    return tuple(one for one in strategies if one[1] is keep)


class Operands:
    """A sample's arguments, from which others of the same layout are made."""

    def __init__(self, sample: SampleInput) -> None:
        arguments = ((sample.input, *sample.args), sample.kwargs)
        self._leaves, self._spec = tree_flatten(arguments)

    def changed(
        self, strategy: tuple[Change, Change], seed: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Positional and keyword arguments on new tensors, and those tensors."""
        generator = torch.Generator().manual_seed(seed)
        leaves, tensors = [], []
        for leaf in self._leaves:
            if not is_tensor(leaf):
                leaves.append(leaf)
                continue
            copy = copy_with_layout(leaf)
            if copy.layout is torch.strided and copy.numel():
                strategy[0 if is_real_or_complex(copy) else 1](copy, generator)
            leaves.append(copy)
            tensors.append(copy)
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs, tensors


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def used_strides(tensor: torch.Tensor) -> list[int]:
    if tensor.numel() == 0:
        return []
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def same_values(got: torch.Tensor, expected: torch.Tensor, rounded: bool) -> bool:
    if torch.equal(bytes_of(got), bytes_of(expected)):
        return True
    if not is_real_or_complex(expected):
        return False
    wide = torch.complex128 if expected.is_complex() else torch.float64
    got, expected = got.to(wide), expected.to(wide)
    tolerance = 1e-6 * expected.abs().nan_to_num(0, 0, 0).max().item() if rounded else 0.0
    return torch.allclose(got, expected, rtol=0.0, atol=tolerance, equal_nan=True)


def difference(got: Any, expected: Any, rounded: bool) -> str:
    """The difference between a replayed leaf and eager's; empty if there is none."""
    if not is_tensor(expected):
        return "" if type(got) is type(expected) and got == expected else f"{got} for {expected}"
    for what in ("dtype", "shape", "requires_grad"):
        one, other = getattr(got, what), getattr(expected, what)
        if one != other:
            return f"{what} {one} for {other}"
    if used_strides(got) != used_strides(expected):
        return f"strides {got.stride()} for {expected.stride()}"
    if (got.is_conj(), got.is_neg()) != (expected.is_conj(), expected.is_neg()):
        return "conjugate or negative bit"
    return "" if same_values(got, expected, rounded) else f"values {got} for {expected}"


def differences(got: Any, expected: Any, rounded: bool) -> list[str]:
    got_leaves, got_spec = tree_flatten(got)
    leaves, spec = tree_flatten(expected)
    if str(got_spec) != str(spec):
        return [f"structure {got_spec} for {spec}"]
    pairs = zip(got_leaves, leaves, strict=True)
    return [what for what in (difference(*pair, rounded) for pair in pairs) if what]


def replayed_wrong(
    name: str,
    function: Callable[..., Any],
    sample: SampleInput,
    seed: int,
    replays: tuple[tuple[tuple[Change, Change], ...], ...],
) -> list[str]:
    """Capture the sample's call, replay it with other values; return the differences from eager.

    Raises:
        CaptureError: the call is refused.
    """
    operands = Operands(sample)
    args, kwargs, _ = operands.changed((keep, keep), seed)
    seed_generator(seed)
    with offload.capture(function) as captured:
        captured(*args, **kwargs)
    wrong = []
    with captured.load() as run:
        for replay, strategies in enumerate(replays, start=1):
            usable = unchecked(strategies) if name in UNCHECKED_INTEGERS else strategies
            strategy, expected, expected_operands = eager(function, operands, usable, seed + replay)
            state = torch.get_rng_state()
            args, kwargs, own = operands.changed(strategy, seed + replay)
            seed_generator(seed + replay)
            got = run(*args, **kwargs)
            wrong += differences(got, expected, name in ROUNDED)
            wrong += [f"input: {one}" for one in differences(own, expected_operands, False)]
            if not torch.equal(torch.get_rng_state(), state):
                wrong.append("the random generator is elsewhere")
    return wrong


def eager(
    function: Callable[..., Any],
    operands: Operands,
    strategies: tuple[tuple[Change, Change], ...],
    seed: int,
) -> tuple[tuple[Change, Change], Any, list[torch.Tensor]]:
    """The first strategy whose values the operator accepts, its result, its operands afterwards."""
    refusals = []
    for strategy in strategies:
        args, kwargs, own = operands.changed(strategy, seed)
        seed_generator(seed)
        try:
            return strategy, function(*args, **kwargs), own
        except Exception as error:  # an operator may refuse other values with any exception
            refusals.append(error)
    raise AssertionError(f"eager takes none of the changed samples: {refusals}")


def dtypes_of(operator: OpInfo) -> list[torch.dtype]:
    if operator.supports_dtype(torch.float32, "cpu"):
        return [torch.float32]
    supported = operator.supported_dtypes("cpu")
    return [dtype for dtype in DTYPES_OTHERWISE if dtype in supported]


def samples_of(operator: OpInfo) -> list[SampleInput]:
    if operator.formatted_name in NOT_ON_CPU:
        pytest.skip(f"{operator.formatted_name} {NOT_ON_CPU[operator.formatted_name]}")
    samples: list[SampleInput] = []
    for dtype in dtypes_of(operator):
        seed_generator(0)
        samples += operator.sample_inputs("cpu", dtype, requires_grad=False)
    assert samples
    return samples


def spread(samples: list[SampleInput], count: int) -> list[SampleInput]:
    """At most `count` of the samples, evenly from all of them."""
    step = max(1, -(-len(samples) // count))
    return samples[::step]


def run_samples(
    operator: OpInfo,
    function: Callable[..., Any],
    samples: list[SampleInput],
    *replays: tuple[tuple[Change, Change], ...],
    refused: dict[str, str] = REFUSED,
) -> list[str]:
    """Run the samples; return the messages of refused ones. Fails if a result is wrong."""
    name = operator.formatted_name
    refusals, wrong = [], []
    for position, sample in enumerate(samples):
        try:
            found = replayed_wrong(name, function, sample, 10 * position + 1, replays)
        except offload.CaptureError as error:
            refusals.append(f"sample {position}: {error}")
        except offload.OffloadError as error:
            found = [f"{type(error).__name__}: {error}"]
            wrong.append((position, found))
        else:
            if found:
                wrong.append((position, found))
    assert not wrong, f"{name}: {len(wrong)} of {len(samples)} samples wrong, first {wrong[0]}"
    unexpected = [one for one in refusals if refused.get(name, "nothing is expected") not in one]
    assert not unexpected, f"{name}: {len(unexpected)} samples refused: {unexpected[0]}"
    return refusals


operators = pytest.mark.parametrize(
    "operator", [pytest.param(one, id=one.formatted_name) for one in op_db]
)


@pytest.mark.slow
@operators
def test_every_sample(operator: OpInfo):
    refusals = run_samples(operator, operator.op, samples_of(operator), FIRST_REPLAY, SECOND_REPLAY)
    if operator.formatted_name in REFUSED:
        assert refusals, "no sample is refused any more: take the operator out of the table"


@pytest.mark.slow
@operators
def test_between_activations(operator: OpInfo):
    """Operands and results share the feature map, as in the middle of a model."""

    def between(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return tree_map_only(torch.Tensor, torch.clone, operator.op(*args, **kwargs))

    if "as_strided" in operator.formatted_name:
        pytest.skip("a clone has not the storage that these samples reach into")
    run_samples(
        operator, between, spread(samples_of(operator), N_BETWEEN_ACTIVATIONS), FIRST_REPLAY
    )


@pytest.mark.slow
@operators
def test_in_place(operator: OpInfo):
    """The operator that writes its first operand, which is the caller's tensor."""
    function = operator.inplace_variant
    if function is None:
        pytest.skip("the operator has no in-place variant")
    if operator.name == "float_power":
        pytest.skip("in place it takes float64 only")
    samples = [one for one in samples_of(operator) if not one.broadcasts_input]
    refused = {**REFUSED, **REFUSED_IN_PLACE}
    run_samples(operator, function, spread(samples, N_IN_PLACE), FIRST_REPLAY, refused=refused)


def test_few_operators_are_refused():
    taking_float32 = {
        one.name
        for one in op_db
        if one.formatted_name in REFUSED and one.supports_dtype(torch.float32, "cpu")
    }
    assert len(taking_float32) <= 25, sorted(taking_float32)


def test_tables_name_operators():
    names = {one.formatted_name for one in op_db}
    for table in (REFUSED, REFUSED_IN_PLACE, NOT_ON_CPU, ROUNDED, UNCHECKED_INTEGERS):
        assert set(table) <= names
