"""Models whose weights are in a device format; inputs and results may not be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_loading import load
from on_npu import check_same, fail_each_call
from stored import save_weights
from torch import nn

import offload
from offload.backends.ascend import AscendBackend, KernelCapture
from offload.native import _native
from offload.program import Program

PLAIN, FRACTAL_NZ = 2, 29
SHAPE = (20, 33)
STORAGE_BYTES = 3 * 2 * 16 * 16 * 2  # fractals of 16 x 16: 33 columns take 3, 20 rows take 2
OWN = r"lies in the device's format FRACTAL_NZ, 3072 bytes for shape \[20, 33\]"


@pytest.fixture(autouse=True)
def _own_formats() -> Iterator[None]:
    torch.npu.init()
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


def format_of(tensor: torch.Tensor) -> int:
    import torch_npu

    return int(torch_npu.get_npu_format(tensor))


def cast(tensor: torch.Tensor, device_format: int = FRACTAL_NZ) -> torch.Tensor:
    """The tensor in a format, its bytes rearranged."""
    import torch_npu

    made = torch_npu.npu_format_cast(tensor, device_format)
    if format_of(made) != device_format:
        pytest.skip(f"torch_npu casts to {format_of(made)} here, not to {device_format}")
    return made


def cast_weights(model: nn.Module) -> nn.Module:
    """The model on the device, each of its matrices in FRACTAL_NZ."""
    model = model.npu()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = cast(parameter.data)
    return model


def in_fractals(matrix: torch.Tensor) -> torch.Tensor:
    """FRACTAL_NZ of 16-bit numbers, as documented: [columns / 16, rows / 16, 16, 16]."""
    n_down, n_across = (-(-size // 16) for size in matrix.shape)
    padded = torch.zeros(n_down * 16, n_across * 16, dtype=matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.view(n_down, 16, n_across, 16).permute(2, 0, 1, 3).contiguous()


def bytes_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage on the device."""
    content = torch.empty(0, dtype=torch.uint8, device="npu").set_(tensor.untyped_storage())
    return torch.utils.dlpack.from_dlpack(content).cpu()


class Mixed(nn.Module):
    """A weight with a bias, one without, a buffer that is read transposed, and plain operators."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(33, 20), nn.Linear(20, 33, bias=False)
        self.register_buffer("mix", torch.randn(33, 33) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        return (x + self.down(y)) @ self.mix.t()


def mixed() -> tuple[nn.Module, nn.Module]:
    """A model on the CPU, and the same on the device with its matrices in FRACTAL_NZ."""
    model = Mixed().half()
    on_npu = cast_weights(copy.deepcopy(model))
    on_npu.mix = cast(on_npu.mix)
    return model, on_npu


def test_a_cast_lays_matrices_out_in_fractals() -> None:
    """So that readers which assume plain bytes miss the expected results below."""
    matrix = torch.randn(SHAPE).half()
    made = cast(matrix.npu())
    assert made.untyped_storage().nbytes() == STORAGE_BYTES
    assert torch.equal(bytes_on_device(made).view(torch.half), in_fractals(matrix).flatten())
    assert torch.equal(made.cpu(), matrix)
    assert torch.equal(cast(made, PLAIN).cpu(), matrix)


def test_models_follow_inputs_and_outputs_that_move(form: str) -> None:
    model, on_npu = mixed()
    kept = []
    with load(on_npu, torch.zeros(4, 33).half().npu()) as run:
        for _ in range(3):
            x = torch.randn(4, 33).half()
            moved, out = x.npu(), torch.full((4, 33), float("nan")).half().npu()
            assert run(moved, out=out) is out
            check_same(out, model(x))
            check_same(run(moved), model(x))
            kept += [moved, out]
        copies = run._loaded.resident.copy_counts
        assert (copies["enqueued"] == 0) == (form != "enqueued")
        if form == "relocated":
            assert run.last_execution.words_patched
    for weight in (on_npu.up.weight, on_npu.down.weight, on_npu.mix):
        assert format_of(weight) == FRACTAL_NZ


def test_the_feature_map_moves_beside_weights_in_fractals() -> None:
    model, on_npu = mixed()
    x = torch.randn(4, 33).half()
    with load(on_npu, x.npu()) as run:
        if not run._loaded.moves_feature_map:
            pytest.skip("this runtime tells nothing of the kernels' arguments")
        moved = torch.empty(run.feature_map_bytes, dtype=torch.uint8).npu()
        check_same(run(x.npu(), feature_map=moved), model(x))


def test_the_host_delivers_launches_on_weights_in_fractals() -> None:
    """By the storage that knows the format; another one is refused."""
    model, on_npu = mixed()
    run = offload.capture(on_npu, torch.zeros(4, 33).half().npu()).load(scheduling="host")
    for _ in range(3):
        x = torch.randn(4, 33).half()
        check_same(run(x.npu()), model(x))
    on_npu.up.weight.data = cast(torch.randn(SHAPE).half().npu())
    with pytest.raises(offload.BindingError, match="rebind_weights"):
        run(torch.zeros(4, 33).half().npu())
    with pytest.raises(offload.BindingError, match="known only for the storage"):
        run.rebind_weights()


def test_it_is_said_which_weights_lie_in_a_format_of_the_device() -> None:
    captured = offload.capture(mixed()[1], torch.ones(4, 33).half().npu())
    formats = {one.name: one.device_format for one in captured.program.values if one.device_format}
    assert formats == dict.fromkeys(("up.weight", "down.weight", "mix"), "FRACTAL_NZ")
    assert f"{STORAGE_BYTES} B  up.weight  in FRACTAL_NZ" in str(captured.program)
    said = "in the device's own formats: weight up.weight FRACTAL_NZ (3072 bytes for [20, 33])"
    assert said in captured.explain()


@pytest.mark.parametrize("size", [20, 256], ids=["kept", "summed"])
def test_writes_to_weights_in_fractals_are_refused(size: int) -> None:
    """Small storages are compared with a copy, large ones by a checksum: both as bytes."""
    held = cast(torch.ones(size, size).half().npu())
    x = torch.ones(4, size).half().npu()
    other = cast(torch.zeros(size, size).half().npu())
    before = bytes_on_device(held)

    def writes(x: torch.Tensor) -> torch.Tensor:
        held.copy_(other)
        return x @ held

    with pytest.raises(offload.CaptureError, match=r"copy_.* writes .*the device's format FRACTAL"):
        load(writes, x)
    assert torch.equal(bytes_on_device(held), before)


def test_other_inputs_and_results_are_refused() -> None:
    x, held = torch.ones(2, 33).half().npu(), cast(torch.ones(SHAPE).half().npu())
    with pytest.raises(offload.CaptureError, match=rf"args\[1\] {OWN}"):
        load(lambda x, y: x @ y.t(), x, held)
    with pytest.raises(offload.CaptureError, match=rf"a result {OWN}"):
        load(lambda x: (x + 1, held)[1], x)
    with pytest.raises(offload.CaptureError, match=rf"a result {OWN}"):
        load(lambda x: cast(x.new_ones(SHAPE)), x)
    assert format_of(held) == FRACTAL_NZ


def test_arguments_in_a_format_of_the_device_are_refused_at_an_execution() -> None:
    """If both sizes are multiples of 16, neither shape, strides nor bytes show it."""
    x = torch.randn(16, 32).half()
    run = load(lambda x: x + 1, x.npu())
    result = run(x.npu())
    own = cast(x.npu())
    assert own.untyped_storage().nbytes() == x.nbytes
    with pytest.raises(offload.BindingError, match=r"args\[0\]: expected plain memory"):
        run(own)
    with pytest.raises(offload.BindingError, match=r"out\[0\]: expected plain memory"):
        run(x.npu(), out=own)
    assert torch.equal(own.cpu(), x)
    check_same(run(cast(own, PLAIN)), x + 1)
    check_same(result, x + 1)
    run.close()


def test_results_of_executions_are_tensors_whose_format_torch_npu_knows() -> None:
    x = torch.randn(20, 33).half()
    with load(lambda x: x + 1, x.npu()) as run, load(lambda x: x * 2, run(x.npu())) as other:
        result = run(x.npu())
        assert format_of(result) == PLAIN
        check_same(other(result), (x + 1) * 2)
        made = cast(result)
        assert torch.equal(bytes_on_device(made).view(torch.half), in_fractals(x + 1).flatten())


@pytest.mark.parametrize("n_columns", [33, 32], ids=["more bytes", "as many bytes"])
@pytest.mark.parametrize("device_format", [PLAIN, FRACTAL_NZ], ids=["to plain", "to fractals"])
def test_a_weight_that_was_cast_since_is_refused(n_columns: int, device_format: int) -> None:
    x = torch.randn(4, n_columns).half()
    model = nn.Linear(n_columns, 32).half().npu()
    first, other = (PLAIN, FRACTAL_NZ) if device_format == FRACTAL_NZ else (FRACTAL_NZ, PLAIN)
    model.weight.data = cast(model.weight.data, first)
    captured = offload.capture(model, x.npu())
    run = captured.load()
    expected = model(x.npu()).cpu()
    kept = model.weight.data
    model.weight.data = cast(kept, other)
    is_smaller = (n_columns, device_format) == (33, PLAIN)  # so that no rebinding is advised
    told = "it has another .* size" if is_smaller else "its storage was swapped"
    with pytest.raises(offload.BindingError, match=f"weight: {told}"):
        run(x.npu())
    with pytest.raises(offload.BindingError, match="stay where they were"):
        run.rebind_weights()
    with pytest.raises(offload.BindingError, match=r"weight: it lay in .*, and now lies in "):
        captured.load()
    model.weight.data = kept
    check_same(run(x.npu()), expected)
    run.close()
    with captured.load() as again:
        check_same(again(x.npu()), expected)


def test_a_weight_that_is_cast_in_place_has_another_storage() -> None:
    import torch_npu

    x = torch.randn(4, 32).half().npu()
    model = nn.Linear(32, 32).half().npu()
    run = load(model, x)
    torch_npu.npu_format_cast_(model.weight, FRACTAL_NZ)
    assert format_of(model.weight) == FRACTAL_NZ
    with pytest.raises(offload.BindingError, match="weight: its storage was swapped"):
        run(x)
    run.close()


def test_casts_inside_a_model_are_launches_like_others(form: str) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ cast(y + 1)) + 1

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ (y + 1)) + 1

    first = [torch.zeros(4, 33).half().npu(), torch.zeros(33, 20).half().npu()]
    try:
        run = load(model, *first)
    except offload.CaptureError as error:
        if "aclop" not in str(error):
            raise
        pytest.skip("this CANN casts by a compiled operator, which torch_npu cannot capture")
    with run:
        for _ in range(2):
            x, y = torch.randn(4, 33).half(), torch.randn(33, 20).half()
            check_same(run(x.npu(), y.npu()), plain(x, y))


def test_casts_in_place_inside_a_model_are_refused() -> None:
    import torch_npu

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = y + 1
        torch_npu.npu_format_cast_(z, FRACTAL_NZ)
        return x @ z

    given = torch.ones(4, 32).half().npu(), torch.ones(32, 16).half().npu()
    with pytest.raises(offload.CaptureError, match=r"npu_format_cast_.* another storage in place"):
        load(model, *given)


def test_memory_without_content_in_a_format_of_the_device_is_refused() -> None:
    held = cast(torch.ones(SHAPE).half().npu())
    x = torch.ones(4, 33).half().npu()
    with pytest.raises(offload.CaptureError, match="memory without content in the device's format"):
        load(lambda x: x @ torch.empty_like(held).t(), x)


def test_files_hold_no_formats_of_a_device(tmp_path: Path) -> None:
    model = cast_weights(nn.Linear(32, 32).half())
    captured = offload.capture(model, torch.ones(4, 32).half().npu())
    path = tmp_path / "program.offload"
    with pytest.raises(offload.FileError, match="weight lies in the device's format FRACTAL_NZ"):
        captured.save(path)
    assert not path.exists()
    model.weight.data = cast(model.weight.data, PLAIN)
    plain = offload.capture(model, torch.ones(4, 32).half().npu())
    model.weight.data = cast(model.weight.data)  # the same number of bytes
    with pytest.raises(offload.FileError, match="weight lies in the device's format FRACTAL_NZ"):
        plain.save(path)


def test_tensors_beside_weights_in_files_are_plain(tmp_path: Path) -> None:
    model, x = Mixed().half(), torch.ones(4, 33).half().npu()
    model.register_buffer("mix", model.mix, persistent=False)
    save_weights(model, tmp_path)
    on_npu = cast_weights(copy.deepcopy(model))  # all of whose matrices are in the file
    check_same(offload.capture(on_npu, x, weights=tmp_path).load()(x), model(x.cpu()))
    on_npu.mix = cast(on_npu.mix)
    with pytest.raises(offload.CaptureError, match="mix lies in the device's format FRACTAL_NZ"):
        offload.capture(on_npu, x, weights=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_weights_are_summed_and_stay_as_they_are(dtype: torch.dtype) -> None:
    model = nn.Linear(250, 300).to(dtype)  # more than is kept for comparison
    on_npu = cast_weights(copy.deepcopy(model))
    before = bytes_on_device(on_npu.weight)
    with load(on_npu, torch.zeros(4, 250, dtype=dtype).npu()) as run:
        x = torch.randn(4, 250, dtype=dtype)
        check_same(run(x.npu()), model(x))
    assert torch.equal(bytes_on_device(on_npu.weight), before)


def test_formats_that_are_plain_are_those_by_their_names() -> None:
    from torch_npu.npu._format import Format

    names = {"UNDEFINED", "NCHW", "NHWC", "ND", "NCL", "NCDHW", "NDHWC"}
    assert {Format(number).name for number in _native.PLAIN_DEVICE_FORMATS} == names


def test_models_with_plain_weights_run_where_own_formats_are_allowed() -> None:
    model, x = nn.Linear(33, 20).npu(), torch.randn(2, 33).npu()
    with load(model, x) as run:
        assert torch.equal(run(x), model(x))


@pytest.mark.parametrize("function", ["aclrtMemcpyAsync", "aclmdlRICaptureEnd"])
def test_loads_that_fail_leave_weights_as_they_were(
    function: str, simulated_npu: AscendSimulator
) -> None:
    model, x = cast_weights(nn.Linear(33, 20).half()), torch.randn(4, 33).half().npu()
    captured = offload.capture(model, x)
    before = bytes_on_device(model.weight)

    def check(call: str) -> None:
        assert format_of(model.weight) == FRACTAL_NZ, call
        assert torch.equal(bytes_on_device(model.weight), before), call

    fail_each_call(simulated_npu, function, lambda: captured.load().close(), check)


class NoKernels:
    """A capturer of own kernels, of which it makes none."""

    sized = None

    def __init__(self) -> None:
        self.n_asked = 0

    def capture(self, program: Program, device: int) -> KernelCapture:
        self.n_asked += 1
        return KernelCapture((), None)

    def gather_kernel(self, device: int) -> None:
        return None


def test_kernels_of_ones_own_are_given_plain_memory_alone() -> None:
    """They would read the bytes by shape and strides."""
    x, capturer = torch.ones(4, 33).half().npu(), NoKernels()
    captured = offload.capture(mixed()[1], x)
    with pytest.raises(offload.CaptureError, match=r"up\.weight lies in .* FRACTAL_NZ"):
        captured.load(AscendBackend(capturer))
    assert not capturer.n_asked


def test_kernels_of_ones_own_are_bound_to_plain_weights_alone() -> None:
    x, capturer = torch.ones(4, 32).half().npu(), NoKernels()
    model = nn.Linear(32, 32).half().npu()
    plain, own = model.weight.data.clone(), cast(model.weight.data)
    captured = offload.capture(model, x)
    with captured.load(AscendBackend(capturer)) as run:
        model.weight.data = plain
        run.rebind_weights()
        model.weight.data = own
        with pytest.raises(offload.BindingError, match=r"it lay in plain memory .* FRACTAL_NZ"):
            run.rebind_weights()
        with pytest.raises(offload.BindingError, match=r"it lay in plain memory .* FRACTAL_NZ"):
            captured.load(AscendBackend(capturer))
    assert capturer.n_asked == 2
