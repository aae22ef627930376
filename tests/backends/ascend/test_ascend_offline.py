"""Offline models on the simulated Ascend runtime: opened, loaded, executed at new addresses."""

from __future__ import annotations

import json

import pytest
import torch
from ascend_offline import Tensor
from click.testing import CliRunner
from offline_models import N_BYTES, WEIGHTS, on_device, write_model
from simulated_ascend import install

import offload
from offload import cli
from offload.errors import BackendUnavailable, BindingError, CaptureError, ExecutionError, FileError
from offload.native import _native

DEVICE = "npu-simulated"


def execute(ascend, run):
    """Execute on other numbers at other addresses; return whether the result is right."""
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    out = on_device(ascend, torch.zeros(2, 2))
    (z,) = run(on_device(ascend, x), y=on_device(ascend, y), out=(out,))
    return z.data_ptr() == out.data_ptr() and torch.equal(out, x + WEIGHTS + y)


@pytest.fixture
def path(ascend, monkeypatch, tmp_path):
    install(ascend, monkeypatch)
    return write_model(ascend, tmp_path / "model.om")


def test_an_offline_model_computes_at_moved_addresses(ascend, path):
    with offload.open(path).load(DEVICE) as run:
        for _ in range(3):
            assert execute(ascend, run)
            assert run.last_execution.bytes_copied == 0


def test_only_moved_buffers_are_given_another_address(ascend, path):
    with offload.open(path).load(DEVICE) as run:
        x, y, moved, out = (on_device(ascend, torch.randn(2, 2)) for _ in range(4))
        run(x, y, out=(out,))
        assert ascend.calls("aclUpdateDataBuffer") == 3
        assert list(run.last_execution.substages_ns) == ["buffer updates", "execute enqueue"]
        ascend.forget_calls()
        run(x, y, out=(out,))
        assert ascend.calls("aclUpdateDataBuffer") == 0
        assert run.last_execution.policy == "none"
        assert list(run.last_execution.substages_ns) == ["execute enqueue"]
        run(x, moved, out=(out,))
        assert ascend.calls("aclUpdateDataBuffer") == 1
        assert run.last_execution.words_patched == 1
        assert ascend.calls("aclmdlExecuteAsync") == 2


def test_the_environment_has_it_said_and_kept(ascend, path, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OFFLOAD_DEBUG", "3")
    monkeypatch.setenv("OFFLOAD_DUMP", str(tmp_path / "dumps"))
    with offload.open(path).load(DEVICE) as run:
        loaded, planned, *lines = capsys.readouterr().err.splitlines()
        assert loaded.startswith(
            f"offload: loaded model on {DEVICE}: 1 launch as one task, 4 slots"
        )
        assert loaded.endswith(f"; kept in {tmp_path / 'dumps' / '0001-model'}")
        assert planned.startswith("offload: planned: feature map 0 bytes")
        assert "lane launches:" in lines
        x, y, moved, out = (on_device(ascend, torch.randn(2, 2)) for _ in range(4))
        run(x, y, out=(out,))
        run(x, moved, out=(out,))
        first, second = capsys.readouterr().err.splitlines()
        assert first.endswith("; moved: every slot that is bound, for the first time")
        assert "1 slots changed, 1 words patched" in second
        assert second.endswith("; moved: input y")
    about = json.loads((tmp_path / "dumps" / "0001-model" / "load.json").read_text())
    assert (about["name"], about["device"]) == ("model", DEVICE)
    monkeypatch.setenv("OFFLOAD_DUMP", str(path))
    with pytest.raises(FileError, match="OFFLOAD_DUMP cannot be written there"):
        offload.open(path).load(DEVICE)


def test_the_command_line_inspects_it(path):
    shown = CliRunner().invoke(cli.main, ["inspect", str(path), "--device", DEVICE])
    assert shown.exit_code == 0, shown.output
    assert "feature map 0 bytes" in shown.output


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_the_command_line_refuses_it_by_name_where_no_device_loads_it(path, command):
    done = CliRunner().invoke(cli.main, [command, str(path), "--device", "cpu"])
    assert done.exit_code == 1
    assert f"{path}: device 'cpu' loads no offline models (.om): load it on npu" in done.stderr


def test_its_feature_map_is_fixed_and_said(path):
    with offload.open(path).load(DEVICE) as run:
        with pytest.raises(BindingError, match="stays where it was loaded"):
            run(
                torch.ones(2, 2),
                torch.ones(2, 2),
                feature_map=torch.empty(64, dtype=torch.uint8),
            )
        text = run.explain()
    assert "its feature map (64 bytes) lies where it was loaded" in text
    assert "it was compiled elsewhere" in text


def test_closing_gives_memory_and_model_back(ascend, path):
    live_bytes = ascend.live_bytes
    kinds = ("stream", "event", "model")
    before = {kind: ascend.live(kind) for kind in kinds}
    run = offload.open(path).load(DEVICE)
    assert ascend.live_bytes > live_bytes
    run.close()
    assert ascend.live_bytes == live_bytes
    assert {kind: ascend.live(kind) for kind in kinds} == before
    assert ascend.calls("aclmdlUnload") == 1


@pytest.mark.parametrize(
    ("function", "nth"),
    [
        ("aclmdlQuerySize", 1),
        ("aclrtMalloc", 1),
        ("aclrtMalloc", 2),
        ("aclmdlLoadFromFileWithMem", 1),
        ("aclmdlGetDesc", 1),
        ("aclmdlGetInputDims", 2),
        ("aclmdlGetOutputDims", 1),
        ("aclmdlAddDatasetBuffer", 1),
        ("aclmdlAddDatasetBuffer", 3),
    ],
)
def test_a_failure_while_loading_leaves_nothing_behind(ascend, path, function, nth):
    offload.open(path).load(DEVICE).close()
    live_bytes = ascend.live_bytes
    ascend.forget_calls()
    ascend.fail(function, 500000, nth=nth)
    with pytest.raises(ExecutionError, match="500000 ACL_ERROR_INTERNAL_ERROR"):
        offload.open(path).load(DEVICE)
    assert ascend.live_bytes == live_bytes
    is_loaded = ascend.calls("aclmdlGetDesc") > 0  # queried once it is loaded
    assert ascend.calls("aclmdlUnload") == is_loaded
    made = {
        "aclmdlCreateDesc": "aclmdlDestroyDesc",
        "aclmdlCreateDataset": "aclmdlDestroyDataset",
        "aclCreateDataBuffer": "aclDestroyDataBuffer",
    }
    for make, destroy in made.items():
        assert ascend.calls(make) == ascend.calls(destroy)
    with offload.open(path).load(DEVICE) as run:
        assert execute(ascend, run)


@pytest.mark.parametrize("function", ["aclUpdateDataBuffer", "aclmdlExecuteAsync"])
def test_an_execution_that_fails_can_be_tried_again(ascend, path, function):
    with offload.open(path).load(DEVICE) as run:
        ascend.fail(function, 500000)
        with pytest.raises(ExecutionError, match="500000"):
            execute(ascend, run)
        assert execute(ascend, run)


def test_arguments_are_checked(path):
    with offload.open(path).load(DEVICE) as run:
        with pytest.raises(BindingError, match="x"):
            run(torch.ones(3, 2), torch.ones(2, 2))
        with pytest.raises(BindingError):
            run(torch.ones(2, 2))


def test_shapes_and_types_that_are_not_known_are_refused(ascend, path, tmp_path):
    dynamic = write_model(
        ascend,
        tmp_path / "dynamic.om",
        inputs=[Tensor("x", (-1, 2), N_BYTES), Tensor("y", (2, 2), N_BYTES)],
    )
    live_bytes = ascend.live_bytes
    with pytest.raises(CaptureError, match="input 'x' of shape \\[-1, 2\\] takes 16 bytes"):
        offload.open(dynamic).load(DEVICE)
    foreign = write_model(
        ascend, tmp_path / "foreign.om", outputs=[Tensor("z", (2, 2), N_BYTES, data_type=29)]
    )
    with pytest.raises(CaptureError, match="output 'z' has data type 29, which torch lacks"):
        offload.open(foreign).load(DEVICE)
    blocked = write_model(  # as many bytes as the shape has
        ascend, tmp_path / "blocked.om", outputs=[Tensor("z", (2, 2), N_BYTES, format=29)]
    )
    with pytest.raises(
        CaptureError, match="output 'z' has format 29, in which the layout of its elements"
    ):
        offload.open(blocked).load(DEVICE)
    assert ascend.live_bytes == live_bytes


def test_files_and_devices_that_are_none_are_refused(path, tmp_path):
    with pytest.raises(FileError, match="there is no such file"):
        offload.open(tmp_path / "none.om")
    (tmp_path / "broken.om").write_bytes(b"no model")
    assert repr(offload.open(tmp_path / "broken.om")) == (
        f"OfflineModel({str(tmp_path / 'broken.om')!r}): load() makes it resident on an NPU"
    )
    with pytest.raises(ExecutionError, match=r"broken\.om: reading what an offline model needs"):
        offload.open(tmp_path / "broken.om").load(DEVICE)
    with pytest.raises(BackendUnavailable, match="device 'cpu' loads no offline models"):
        offload.open(path).load("cpu")


def test_the_native_model_tells_what_it_takes(ascend, path):
    model = _native.AscendOfflineModel(device=0, path=str(path))
    assert model.inputs == [("x", 0, (2, 2), 16, 2), ("y", 0, (2, 2), 16, 2)]
    assert model.outputs == [("z", 0, (2, 2), 16, 2)]
    assert (model.work_bytes, model.weight_bytes) == (64, 16)
    with pytest.raises(ExecutionError, match="was never patched"):
        model.execute()
    model.close()
    with pytest.raises(ExecutionError, match="the program was closed"):
        model.execute()
