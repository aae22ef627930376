"""Prove that padding does not change results: execute calls with and without it, and compare.

The values of one call may hide that a model reads the padding: `x.amax(1)` of positive numbers does
not show that it reads the zeros behind them. So the call is also executed with other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.errors import CaptureError, OffloadError
from offload.interpreter.torch_names import find_dtype
from offload.program import Launch, Program, TensorView
from offload.program.structure import flatten
from offload.record import is_close, same_but_for_kernels

# At most this many calls of a bucket are compared. Some inputs, such as token types, always equal
# their padding, so that further calls prove nothing more.
_MOST_PROOFS = 8

# Factors of floating-point inputs: small, so that numbers such as -1e4, which models use as minus
# infinity, keep their magnitude.
_FACTORS = (-1.0, 2.0, -2.0)

# Below this magnitude a change by padding may be less than the tolerance of comparisons, as in a
# recording of silence: inputs are first scaled so that the largest number is 1.
_SMALL = 1e-2

# A floating-point mask has at most two values. Models rely on them: a negated mask no longer masks
# in `(1 - mask) * -1e9`.
_MOST_VALUES_OF_MASKS = 2

_COPIES = ("aten::_to_copy", "aten::copy_")

Execute = Callable[[Sequence[torch.Tensor]], Any]
"""Executes a call with these inputs, and returns its results."""


class PaddingProof:
    """The comparisons of each bucket. Thread: any, concurrently.

    Owner: one PaddedExecutable.
    """

    def __init__(
        self, program: Program, names: Mapping[int, str], padded: Sequence[float | None]
    ) -> None:
        """Begin without comparisons.

        Args:
            program: the executed program, at any sizes.
            names: of the inputs.
            padded: the padding value of each input; None where its sizes do not vary.
        """
        self._names = names
        self._padded = padded
        self._may_perturb = all(map(_may_be_given_others, program.launches))
        self._proved: set[tuple[int, ...]] = set()
        self._n_proofs: dict[tuple[int, ...], int] = {}
        self._perturbed: dict[tuple[int, ...], set[int]] = {}

    def is_proved(self, bucket: tuple[int, ...]) -> bool:
        """Whether calls of a bucket need no further comparison."""
        return bucket in self._proved

    def compare(
        self,
        bucket: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        found: Any,
        *,
        padded: Execute,
        exact: Execute,
        sizes: tuple[str, str],
    ) -> None:
        """Compare the result of a padded call with the result without padding.

        Args:
            bucket: of the call.
            tensors: its inputs.
            found: its result.
            padded: executes the call with padding.
            exact: executes it without padding.
            sizes: the sizes of the call and of its bucket, for the message.

        Raises:
            CaptureError: they differ.
        """
        base = _results(exact(tensors))
        for position, (one, other) in enumerate(zip(_results(found), base, strict=True)):
            try:
                torch.testing.assert_close(one, other, equal_nan=True, check_stride=False)
            except AssertionError as error:
                lines = [line for line in str(error).splitlines() if line.strip()]
                raise _refusal(position, sizes, "", "; ".join(lines[:3])) from None
        perturbed = self._perturbed.setdefault(bucket, set())
        for leaf in self._perturbable(tensors):
            if leaf in perturbed or _may_be_mask(tensors[leaf]):
                continue
            for change, other in _others(tensors[leaf].detach()):
                given = [other if at == leaf else one for at, one in enumerate(tensors)]
                how = f", and {self._names[leaf]} is {change}"
                self._compare_perturbed(given, base, padded, exact, sizes=sizes, how=how)
            perturbed.add(leaf)
        n_proofs = self._n_proofs.get(bucket, 0) + 1
        self._n_proofs[bucket] = n_proofs
        # Of few values it is not known yet whether they are a mask: `x.amax(1)` of two numbers.
        is_known = all(
            leaf in perturbed or _is_mask(tensors[leaf], self._padded[leaf])
            for leaf in self._perturbable(tensors)
        )
        are_distinct = all(map(_is_distinct_from, tensors, self._padded))
        if n_proofs == _MOST_PROOFS or (is_known and are_distinct):
            self._proved.add(bucket)

    def _perturbable(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the padded inputs that may also have other values, unless they are masks."""
        return [
            leaf
            for leaf, (tensor, value) in enumerate(zip(tensors, self._padded, strict=True))
            if self._may_perturb
            and value is not None
            and (tensor.is_floating_point() or tensor.is_complex())
            and tensor.element_size() > 1  # torch computes without float8
        ]

    def _compare_perturbed(
        self,
        given: Sequence[torch.Tensor],
        base: Sequence[torch.Tensor],
        padded: Execute,
        exact: Execute,
        *,
        sizes: tuple[str, str],
        how: str,
    ) -> None:
        """Compare results for other values; no evidence where the model refuses such values.

        Raises:
            CaptureError: they differ.
        """
        try:
            pairs = list(zip(_results(padded(given)), _results(exact(given)), strict=True))
        except OffloadError:  # an operator refuses the values
            return
        if any(
            _overflows(one, usual) for pair, usual in zip(pairs, base, strict=True) for one in pair
        ):
            return
        for position, (one, other) in enumerate(pairs):
            if not (same_but_for_kernels(other, one) or is_close(other, one)):
                why = "with the values of the call itself padding makes no difference"
                raise _refusal(position, sizes, how, why)


def _refusal(position: int, sizes: tuple[str, str], how: str, why: str) -> CaptureError:
    return CaptureError(
        f"result {position} at {sizes[0]} differs where inputs are padded to {sizes[1]}{how}: "
        f"{why}. Mask the padding in the model, pad with other values (a maximum with -inf), or "
        "load without pad="
    )


def _results(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, on the host."""
    leaves, _ = flatten(result, lambda one: isinstance(one, torch.Tensor), share_same=False)
    return [one.cpu() for one in leaves]


def _is_distinct_from(tensor: torch.Tensor, value: float | None) -> bool:
    """Whether a padded input has an element that differs from its padding."""
    return value is None or bool((tensor != value).any())


def _others(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield other values of an input that is not a mask, each with a description.

    Numbers of one sign show reads that mixed signs hide, such as of the two smallest numbers.
    """
    values = tensor.cpu()  # the device need not have these operators
    largest = float(values.abs().max()) if values.numel() else 0.0
    scale = 1 / largest if torch.finfo(tensor.dtype).tiny <= largest < _SMALL else 1.0
    factors = [scale * factor for factor in _FACTORS]
    for factor in ([scale] if scale != 1 else []) + factors:
        yield f"multiplied by {factor:g}", (values * factor).to(tensor.device)
    if not tensor.is_complex():
        yield "made positive", (values.abs() * scale).to(tensor.device)
        yield "made negative", (values.abs() * -scale).to(tensor.device)


def _may_be_mask(tensor: torch.Tensor) -> bool:
    return not tensor.is_complex() and len(tensor.cpu().unique()) <= _MOST_VALUES_OF_MASKS


def _is_mask(tensor: torch.Tensor, padded: float | None) -> bool:
    """Whether an input has the values of masks alone: 0, 1, and what it is padded with."""
    values = tensor.cpu()
    return bool(((values == 0) | (values == 1) | (values == padded)).all())


def _overflows(result: torch.Tensor, usual: torch.Tensor) -> bool:
    """Whether a result has non-finite numbers where those of the call itself are finite."""
    return bool((~result.cpu().isfinite() & usual.cpu().isfinite()).any())


def _may_be_given_others(launch: Launch) -> bool:
    """Whether it may receive results of other values: values that become indices stay in range."""
    if not launch.name.startswith("aten::"):
        return False
    if not launch.name.startswith(_COPIES):
        return True
    given = [one for one in launch.arguments if isinstance(one, TensorView)]
    *_, source = given
    made = [*launch.made(), *(one for one in given[:1] if len(given) > 1)]
    return not (_is_fraction(source) and any(map(_is_integer, made)))


def _is_fraction(view: TensorView) -> bool:
    return find_dtype(view.dtype).is_floating_point


def _is_integer(view: TensorView) -> bool:
    dtype = find_dtype(view.dtype)
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
