"""Tensors that do not view plain memory: named in a typed refusal, without ending the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offload

KINDS = {
    "TwoTensor": "a TwoTensor",
    "DTensor": "a DTensor",
    "MaskedTensor": "a MaskedTensor",
    "functional": "a tensor of a transform",
    "zeros": "a tensor of zeros without memory",
    "sparse": "torch.sparse_coo",
    "compressed": "torch.sparse_csr",
    "quantized": "a quantized tensor",
    "mkldnn": "torch._mkldnn",
    "nested": "a nested tensor",
    "jagged": "a nested tensor",
    "meta": "is on meta",
}
PLACES = {"buffer": "'held'", "list": "'held[0]'", "closure": "'tensor'", "input": "args[0]"}
# For these the recorder sees another tensor object, only the memory, or values computed from it.
UNNAMED = ("functional", "quantized", "meta", "TwoTensor")
# The model's own line raises this in eager too: it adds a plain tensor.
RAISED_BY_TORCH = "RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor"


@pytest.mark.slow
def test_unusual_tensors_are_refused_by_name():
    script = Path(__file__).with_name("unusual_tensors.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    for kind, words in KINDS.items():
        assert found[f"{kind} unused"] == "captured"
        for place, name in PLACES.items():
            message = found[f"{kind} {place}"]
            if kind == "DTensor" and place != "input":
                assert message.startswith(RAISED_BY_TORCH)
                continue
            assert message.startswith("CaptureError: "), (kind, place, message)
            assert words in message
            assert name in message or (kind in UNNAMED and place != "input"), message
    assert "a result uses a TwoTensor" in found["TwoTensor parameter"]
    assert len(found) == len(KINDS) * 5 + 1


@pytest.mark.parametrize("n_bytes", [0, 12])
def test_a_freed_or_shrunk_input_is_refused_before_anything_runs(n_bytes):
    ran = []

    def function(x):
        ran.append(x)
        return x * 2

    freed = torch.empty(4).clone()
    freed.untyped_storage().resize_(n_bytes)
    message = rf"args\[0\] has 4 elements.* of {n_bytes} bytes, where 16 are.*restore it"
    with (
        pytest.raises(offload.CaptureError, match=message),
        offload.capture(function) as block,
    ):
        block(freed)
    assert not ran
