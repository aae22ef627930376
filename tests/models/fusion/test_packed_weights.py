"""Weights that kernels read as panels: which, when they are repacked, and their memory."""

from __future__ import annotations

import ctypes
import dataclasses
import threading

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.errors import BindingError, ProgramError
from offload.native import _native
from offload.plan import SlotKind
from offload.program import Kernel, Role, check_program

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def net() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24)).eval(), torch.randn(5, 24)


def net_of(depth: int, dtype: torch.dtype) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(depth, 40), nn.ReLU(), nn.Linear(40, depth)
    return nn.Sequential(*layers).eval().to(dtype), torch.randn(5, depth, dtype=dtype)


def fused(model: nn.Module, x: torch.Tensor) -> offload.Executable:
    with torch.no_grad():
        return offload.capture(model, x).load(fuse=True)


def n_packed(run: offload.Executable) -> int:
    assert run.fusion is not None
    return len(run.fusion.packed_bytes)


@torch.no_grad()
def test_panels_are_counted_and_placed_together():
    model, x = net()
    run = fused(model, x)
    near(run(x), model(x))
    # 40 columns are two panels, 24 are one: of 32 columns each.
    assert run.fusion is not None
    assert sorted(run.fusion.packed_bytes) == [4 * 32 * 40, 4 * 2 * 32 * 24]
    assert run.memory_report().derived_bytes == 4 * 32 * (40 + 2 * 24)
    assert len(list(run.plan.of_kind(SlotKind.DERIVED))) == 1
    assert "2 packed weights" in run.explain()
    assert [report.mode for report in run.launch_reports()] == ["kernel"] * 4
    words = run.last_execution.words_patched
    run(x.clone(), feature_map=torch.empty(run.feature_map_bytes, dtype=torch.uint8))
    assert run.last_execution.words_patched <= min(words, 3)


@torch.no_grad()
@pytest.mark.parametrize("depth", [24, 25])
def test_weights_in_bfloat16_are_packed_in_pairs(depth):
    """Two rows of a panel are combined; zeros follow an odd last row."""
    model, x = net_of(depth, torch.bfloat16)
    run = fused(model, x)
    near(run(x), model(x))
    assert run.fusion is not None
    assert run.fusion.n_replaced == 3
    assert sorted(run.fusion.packed_bytes) == [2 * 32 * 40, 2 * 2 * 32 * (depth + depth % 2)]
    model[0].weight.mul_(1.5)
    model[2].weight[3:7].zero_()
    near(run(x), model(x))
    assert {report.mode for report in run.launch_reports()} == {"kernel"}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_right", [True, False])
def test_panels_have_the_bits_of_the_weight(monkeypatch, dtype, is_right):
    """A single wrong bit of a panel fails the proof, NaN or not."""
    model, x = net_of(25, dtype)
    model[0].weight[3, 2] = float("nan")
    run = fused(model, x)
    if not is_right:
        call = _native.call_kernel

        def wrong(address: int, words: list[int]) -> None:
            call(address, words)
            if len(words) == 2:  # a weight's and its panels'
                last_byte = ctypes.c_uint8.from_address(words[1] + 4 * 32 - 1)
                last_byte.value ^= 1

        monkeypatch.setattr("offload.compile.proof._native.call_kernel", wrong)
    run(x)
    derived = [
        report.mode
        for report, launch in zip(run.launch_reports(), run.program.launches, strict=True)
        if isinstance(launch.callee, Kernel) and launch.callee.derives
    ]
    assert derived == ["kernel" if is_right else "replaced"] * 2


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 129])
def test_products_where_it_does_not_pay_read_weights_in_place(rows):
    model, _ = net()
    x = torch.randn(rows, 24)
    run = fused(model, x)
    near(run(x), model(x))
    assert n_packed(run) == 0
    assert run.memory_report().derived_bytes == 0


@torch.no_grad()
def test_what_is_written_is_packed_again():
    model, x = net()
    run = fused(model, x)
    near(run(x), model(x))
    model[0].weight.mul_(1.5)
    near(run(x), model(x))
    model[2].weight[3:7].zero_()
    near(run(x), model(x))
    model.load_state_dict({name: torch.randn_like(one) for name, one in model.state_dict().items()})
    near(run(x), model(x))
    model[0].weight.data = torch.randn(40, 24)
    with pytest.raises(offload.BindingError, match="rebind_weights"):
        run(x)
    run.rebind_weights()
    near(run(x), model(x))


@torch.no_grad()
def test_what_torch_does_not_count_is_packed_again_when_asked_for():
    model, x = net()
    run = fused(model, x)
    run(x)
    model[0].weight.data.mul_(3)
    model[2].weight.numpy()[:] = 2
    run.rebind_weights()
    near(run(x), model(x))


@pytest.mark.parametrize("is_fused", [False, True])
def test_optimizer_steps_are_seen(is_fused):
    model, x = net()
    run = fused(model, x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=is_fused)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            near(run(x), model(x))


@pytest.mark.slow
@torch.no_grad()
def test_a_weight_is_packed_once_for_all_that_read_it_alike():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            y = torch.tanh(x @ self.weight.t())
            return (torch.tanh(y @ self.weight.t()) + x).mm(self.weight)

    torch.manual_seed(0)
    model, x = Tied(), torch.randn(4, 16)
    run = fused(model, x)
    near(run(x), model(x))
    assert n_packed(run) == 2  # as columns, and as rows
    model.weight.mul_(0.5)
    near(run(x), model(x))


@torch.no_grad()
def test_a_part_of_a_weight_is_packed():
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 20))

        def forward(self, x):
            return torch.mm(x, self.weight[16:32].t())

    torch.manual_seed(0)
    model, x = Split(), torch.randn(4, 20)
    run = fused(model, x)
    near(run(x), model(x))
    assert n_packed(run) == 1
    model.weight[20].zero_()
    near(run(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize(
    ("stored", "dtype", "packed"),
    [
        (torch.int32, torch.float32, 1),
        (torch.int16, torch.bfloat16, 1),
        (torch.int32, torch.bfloat16, 0),  # in place: two numbers are one element
    ],
)
def test_a_weight_that_is_stored_as_other_numbers(stored, dtype, packed):
    class Stored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bits", torch.randn(20, 16).to(dtype).view(stored))

        def forward(self, x):
            return torch.mm(x, self.bits.view(dtype))

    torch.manual_seed(0)
    model, x = Stored(), torch.randn(4, 20).to(dtype)
    run = fused(model, x)
    near(run(x), model(x))
    assert n_packed(run) == packed
    assert {report.mode for report in run.launch_reports()} == {"kernel"}


@pytest.mark.slow
@torch.no_grad()
def test_weights_that_the_model_writes_are_read_in_place():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(8, 8))

        def forward(self, x):
            y = torch.mm(x, self.state)
            self.state.add_(1)
            return y + torch.mm(x, self.state)

    model, expected = Counting(), Counting()
    x = torch.randn(4, 8)
    run = fused(model, x)
    expected.load_state_dict(model.state_dict())
    for _ in range(3):
        near(run(x), expected(x))
    assert n_packed(run) == 0


def test_tensors_of_inference_mode_are_read_in_place():
    """Torch counts no writes to them."""
    with torch.inference_mode():
        model, x = net()
    run = fused(model, x)
    assert n_packed(run) == 0
    with torch.inference_mode():
        near(run(x), model(x))
        model[0].weight.mul_(2)
        near(run(x), model(x))


@torch.no_grad()
def test_memory_that_other_processes_share_is_read_in_place():
    """They may write it, which torch's count here does not show."""
    model, x = net()
    model.share_memory()
    run = fused(model, x)
    near(run(x), model(x))
    assert n_packed(run) == 0
    memory = np.frombuffer((ctypes.c_char * 8).from_address(model[0].weight.data_ptr()), np.float32)
    memory += 1.0  # as another process would
    near(run(x), model(x))


@torch.no_grad()
def test_a_packed_weight_that_moves_to_shared_memory_is_refused():
    model, x = net()
    run = fused(model, x)
    near(run(x), model(x))
    model.share_memory()
    with pytest.raises(BindingError, match=r"0\.weight: its memory was moved .* load the program"):
        run(x)
    with pytest.raises(
        BindingError, match=r"0\.weight: its memory is now shared .* load the program"
    ):
        run.rebind_weights()
    again = fused(model, x)
    assert n_packed(again) == 0
    near(again(x), model(x))


@torch.no_grad()
def test_under_a_budget_nothing_is_packed():
    model, x = net()
    with offload.capture(model, x).load(fuse=True, weights_budget="12KiB") as run:
        near(run(x), model(x))
        assert n_packed(run) == 0


@torch.no_grad()
def test_panels_that_fail_their_proof_are_made_by_torch(monkeypatch):
    model, x = net()
    monkeypatch.setattr("offload.compile.proof.KernelProof._prove", lambda *_: False)
    run = fused(model, x)
    for _ in range(2):
        near(run(x), model(x))
        model[0].weight.add_(0.1)
    assert {report.mode for report in run.launch_reports()} == {"replaced"}


@torch.no_grad()
def test_a_write_between_executions_of_another_thread_is_seen():
    model, x = net()
    run = fused(model, x)
    run(x)
    for turn in range(20):
        thread = threading.Thread(target=nn.init.normal_, args=(model[0].weight,))
        thread.start()
        thread.join()
        near(run.submit(x).result() if turn % 2 else run(x), model(x))


@torch.no_grad()
def test_a_program_that_derives_from_what_changes_is_refused():
    model, x = net()
    program = fused(model, x).program
    launch = program.launches[0]
    assert isinstance(launch.callee, Kernel)
    assert launch.callee.derives

    def check(**changes):
        changed = dataclasses.replace(launch, **changes)
        check_program(dataclasses.replace(program, launches=(changed, *program.launches[1:])))

    with pytest.raises(ProgramError, match="derives=False"):
        check(callee=dataclasses.replace(launch.callee, derives=False))
    (weight,) = launch.reads
    values = list(program.values)
    values[weight] = dataclasses.replace(values[weight], role=Role.ACTIVATION)
    views = {index: one for index, one in program.weight_views.items() if index != weight}
    with pytest.raises(ProgramError, match="derives from values that are not weights"):
        check_program(dataclasses.replace(program, values=tuple(values), weight_views=views))


@torch.no_grad()
def test_a_kernel_that_leaves_out_what_it_has_nothing_for_is_refused():
    model, x = net()
    program = fused(model, x).program
    kernel = next(one for one in program.launches if getattr(one.callee, "packed", ()))
    assert isinstance(kernel.callee, Kernel)
    roles = [program.values[view.value].role for view in kernel.views()]
    assert [roles[at] for at in kernel.callee.packed] == [Role.WEIGHT]

    def check(*packed: int) -> None:
        callee = dataclasses.replace(kernel.callee, packed=packed)
        changed = dataclasses.replace(kernel, callee=callee)
        check_program(
            dataclasses.replace(
                program,
                launches=tuple(
                    changed if one.index == kernel.index else one for one in program.launches
                ),
            )
        )

    check(*kernel.callee.packed)
    with pytest.raises(ProgramError, match="no derived values"):
        check(*kernel.callee.packed, *kernel.callee.packed[:1], roles.index(Role.DERIVED))
    with pytest.raises(ProgramError, match="no derived values"):
        check(len(roles))
    with pytest.raises(ProgramError, match="does not read a value that is not a weight"):
        check(next(at for at, role in enumerate(roles) if role is not Role.WEIGHT))
