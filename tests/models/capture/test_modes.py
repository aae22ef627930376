"""The caller's modes: recording follows them, replays do not, and both leave them unchanged."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same, capture, normal, state_of, tensors_in
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import offload


class Doubling(TorchFunctionMode):
    """A caller's function mode that changes results."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if isinstance(result, torch.Tensor) and func is torch.sin else result


class Counting(TorchDispatchMode):
    """A caller's dispatch mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "enable_grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "meta device": lambda: torch.device("meta"),
    "dispatch mode": Counting,
    "function mode": Doubling,
    "deterministic": deterministic,
}


# Eager would compute other values inside these than outside.
SURROUNDINGS = {
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast on cpu: off when it was recorded, bfloat16 now",
        "autocast on cpu: bfloat16 when it was recorded, off now",
    ),
    "double": (
        lambda: default_dtype(torch.float64),
        "the default dtype: float32 when it was recorded, float64 now",
        "the default dtype: float64 when it was recorded, float32 now",
    ),
}


class Modal(nn.Module):
    """Operators whose result depends on the caller's modes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x, k):
        hidden = torch.sin(self.linear(x) @ self.linear(x).t())
        self.count.add_(1)
        steps = torch.arange(4) / 3 + torch.zeros(4) + k / 2 + torch.tensor([0.5])
        return hidden, steps * self.count, x.mul_(2), F.softmax(hidden, -1), k.sum(), k.sqrt()


def modal_arguments(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(4, 4, dtype=torch.float32).normal_(generator=generator)
    return x, torch.arange(4) + seed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("load_under_mode", [False, True])
def test_replay_does_not_depend_on_modes(mode, load_under_mode):
    model = Modal()
    twin = copy.deepcopy(model)
    with torch.no_grad(), offload.capture(model) as captured:
        model(*modal_arguments(0))
        twin(*modal_arguments(0))
    run = None if load_under_mode else captured.load()
    for seed in (1, 2):
        own, theirs = modal_arguments(seed), modal_arguments(seed)
        with torch.no_grad():
            expected = twin(*theirs)
        with MODES[mode]():
            run = run or captured.load()
            got = run(*own)
            assert not torch.is_inference_mode_enabled() or mode == "inference"
        assert_same(list(got), list(expected))
        assert_same(list(own), list(theirs))
        assert_same(state_of(model), state_of(twin))
        assert not any(one.is_inference() or one.requires_grad for one in tensors_in(list(got)))


@pytest.mark.parametrize("mode", SURROUNDINGS)
def test_surroundings_that_decide_values_are_compared(mode):
    surroundings, entered, left = SURROUNDINGS[mode]
    model, x = nn.Linear(4, 4).eval(), normal(2, 4)
    captured = capture(model, x)
    run = captured.load()
    with surroundings():
        for call in (captured, run, run.submit):
            with pytest.raises(offload.BindingError, match=entered):
                call(x)
        inside = capture(model, x)
        expected = inside(x)
    with pytest.raises(offload.BindingError, match=left):
        inside(x)
    assert_same(captured(x), model(x).detach())
    with surroundings():
        assert_same(inside(x), expected)


def test_a_saved_program_computes_what_was_recorded(tmp_path):
    model, x = nn.Linear(4, 4).eval(), normal(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(model, x)
        expected = captured(x)
    captured.save(tmp_path / "model.offload")
    assert_same(offload.open(tmp_path / "model.offload")(x), expected)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("called", ["itself", "method", "partial"])
def test_training_of_the_root_module_is_compared(recorded, called):
    model, x = nn.Dropout(0.5).train(recorded), normal(8)
    function = {
        "itself": model,
        "method": model.forward,
        "partial": functools.partial(model.forward),
    }[called]
    captured = capture(function, x)
    captured(x)
    model.train(not recorded)
    now = "evaluation" if recorded else "training"
    with pytest.raises(offload.BindingError, match=f"is in {now} mode now"):
        captured(x)
    model.train(recorded)
    captured(x)
    del model, function
    gc.collect()
    captured(x)  # the module is gone, so nothing can have changed it


@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference", *SURROUNDINGS])
def test_recording_follows_the_callers_modes(mode):
    model = Modal()
    twin = copy.deepcopy(model)
    surroundings = MODES[mode] if mode in MODES else SURROUNDINGS[mode][0]
    with surroundings():
        with offload.capture(model) as captured:
            recorded = model(*modal_arguments(0))
        with torch.no_grad():
            assert_same(list(recorded), list(twin(*modal_arguments(0))), tolerance=1e-6)
            theirs = modal_arguments(1)
            expected = twin(*theirs)
        own = modal_arguments(1)
        assert_same(list(captured(*own)), list(expected), tolerance=1e-6)
    assert_same(list(own), list(theirs))
    assert_same(state_of(model), state_of(twin))


def test_modes_are_as_before_after_recording():
    def modes():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.compiler._is_compiling_flag,
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        )

    before = modes()
    capture(torch.sin, normal(2))
    assert modes() == before
    with pytest.raises(offload.CaptureError):
        capture(lambda x: x.item(), normal(1))
    assert modes() == before
    with torch.autocast("cpu", torch.bfloat16):
        inside = modes()
        capture(nn.Linear(2, 2), normal(1, 2))
        assert modes() == inside
    assert modes() == before


@pytest.mark.parametrize(
    "profiled_range", [torch.profiler.record_function, torch.autograd.profiler.record_function]
)
def test_profiled_ranges_are_recorded_as_no_launch(profiled_range):
    class Profiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with profiled_range("outer"):
                with profiled_range("inner", "with arguments"):
                    x = self.linear(x)
                return x.relu()

    model = Profiled().eval()
    with torch.no_grad():
        captured = capture(model, normal(2, 4))
        assert [launch.name for launch in captured.program.launches] == [
            "aten::addmm",
            "aten::relu",
        ]
        assert [launch.ranges for launch in captured.program.launches] == [
            ("outer", "inner"),
            ("outer",),
        ]
        assert "# outer/inner " in str(captured.program)
        x = normal(2, 4)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as profile:
            assert_same(captured(x), model(x))
    ranges = [event.name for event in profile.events() if event.name in ("outer", "inner")]
    assert sorted(ranges) == ["inner", "outer"]  # eager's: the replay enters no range


def test_a_legacy_profiled_range_is_recorded_as_no_launch():
    def forward(x):
        handle = torch.ops.profiler._record_function_enter("legacy")
        x = x.sin()
        torch.ops.profiler._record_function_exit(handle)
        return x.cos()

    x, unseen = normal(3), normal(3)
    captured = capture(forward, x)
    assert [launch.name for launch in captured.program.launches] == ["aten::sin", "aten::cos"]
    assert [launch.ranges for launch in captured.program.launches] == [("legacy",), ()]
    assert_same(captured(unseen), forward(unseen))


def test_ranges_that_an_error_left_open_are_no_later_recordings_ranges():
    def failing(x):
        torch.ops.profiler._record_function_enter_new("left open")
        raise ValueError("as it does")

    with pytest.raises(ValueError, match="as it does"):
        capture(failing, normal(3))
    captured = capture(torch.sin, normal(3))
    assert [launch.ranges for launch in captured.program.launches] == [()]


def test_a_range_of_the_caller_may_end_in_the_call():
    outside = torch.ops.profiler._record_function_enter_new("outside")

    def forward(x):
        torch.ops.profiler._record_function_exit._RecordFunction(outside)
        with torch.profiler.record_function("own"):
            return x.sin()

    captured = capture(forward, normal(3))
    assert [launch.ranges for launch in captured.program.launches] == [("own",)]


def test_ranges_are_in_files_and_traces(tmp_path):
    def forward(x):
        with torch.profiler.record_function("part"):
            return x.sin()

    captured = capture(forward, normal(3))
    captured.save(tmp_path / "m.offload")
    opened = offload.open(tmp_path / "m.offload")
    assert opened.program == captured.program
    assert opened.program.launches[0].ranges == ("part",)
    run = opened.load()
    with run.timeline() as timeline:
        run(normal(3))
    timeline.save(tmp_path / "trace.json")
    assert '"place": "part ' in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize("is_made_so", [True, False])
@pytest.mark.parametrize("is_captured_so", [True, False])
def test_products_choose_their_kernels_as_eager_in_inference_mode(is_made_so, is_captured_so):
    """By whether a view of the weight requires gradients: one product, or a batch of them."""
    with torch.inference_mode(is_made_so):
        layer = nn.Linear(8, 7, bias=False)
    x = torch.randn(4, 5, 8).transpose(0, 1)
    with torch.inference_mode(is_captured_so), torch.no_grad():
        captured = offload.capture(layer, x)
        kernel = "aten::bmm" if is_made_so else "aten::mm"
        assert captured.program.launches[-1].name == kernel
        assert torch.equal(captured.load()(x), layer(x))
