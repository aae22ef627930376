"""torch's own attention layers, which take another path while watched: eager's counts."""

from __future__ import annotations

import pytest
import torch
from checks import Call, assert_same, check, normal, refusal
from torch import nn

import offload

PADDED = {
    "inside": [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]],
    "at the end": [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]],
    "at both ends": [[1, 0, 0, 0, 1], [0, 0, 0, 1, 1]],
}


def padding(kind: str) -> torch.Tensor:
    return torch.tensor(PADDED[kind], dtype=torch.bool)


def encoder(nested: bool = False, heads: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, heads, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("heads", [2, 3])
def test_encoder(nested, heads):
    run = check(encoder(nested, heads), *(Call(normal(2, 5, 12)) for _ in range(3)))
    fused = [one.name for one in run.program.launches]
    assert (fused == ["aten::_transformer_encoder_layer_fwd"] * 2) is (heads == 2)


@pytest.mark.parametrize("first", PADDED)
def test_encoder_with_padding(first):
    kinds = [first, *PADDED]
    check(
        encoder(),
        *(Call(normal(2, 5, 12), src_key_padding_mask=padding(kind)) for kind in kinds),
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", PADDED)
def test_nested_encoder_with_padding(kind):
    """Eager reads the mask, and gives zeros at places padded at the end."""
    model = encoder(nested=True)

    def call(x, mask):
        return model(x, src_key_padding_mask=mask)

    assert "enable_nested_tensor=False" in refusal(call, normal(2, 5, 12), padding(kind))
    if kind == "at the end":
        message = refusal(call, normal(2, 5, 12), padding(kind), host_reads="guard")
        assert "enable_nested_tensor=False" in message
        return
    with torch.no_grad(), offload.capture(call, host_reads="guard") as captured:
        captured(normal(2, 5, 12), padding(kind))
        for other in PADDED:
            x = normal(2, 5, 12)
            expected = call(x, padding(other))
            if other == "at the end":
                with pytest.raises(offload.BindingError, match="left_aligned"):
                    captured.load()(x, padding(other))
            else:
                assert_same(captured.load()(x, padding(other)), expected)


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x, mask=None):
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=self.need_weights)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_self_attention(need_weights, masked):
    masks = [padding(kind) for kind in PADDED]
    calls = [Call(normal(2, 5, 12), *([mask] if masked else [])) for mask in masks]
    run = check(SelfAttention(need_weights).eval(), *calls)
    names = [one.name for one in run.program.launches]
    assert "aten::_native_multi_head_attention" in names


def test_layer_through_the_handle():
    """A hook, needed to watch it, would keep it from eager's path."""
    layer = encoder().layers[0]
    everything = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
    for mask in (padding("inside"), everything):
        calls = [Call(normal(2, 5, 12), src_key_padding_mask=mask) for _ in range(2)]
        run = check(layer, *calls)
        assert run.program.launches[-1].name == "aten::_transformer_encoder_layer_fwd"
    with pytest.raises(offload.CaptureError, match=r"captured\(x\)"), offload.capture(layer):
        layer(normal(2, 5, 12))


def test_training_takes_the_long_path():
    run = check(encoder().train(), *(Call(normal(2, 5, 12)) for _ in range(2)), tolerance=1e-5)
    assert len(run.program.launches) > 20


def test_a_function_mode_of_the_user():
    """With a mode around the call, eager takes the long path as well."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = encoder()
    with torch.no_grad(), Mode(), offload.capture(model) as captured:
        model(normal(2, 5, 12))
    assert len(captured.program.launches) > 20


def test_lookups_are_put_back():
    before = torch.overrides.has_torch_function, torch.compiler.is_compiling
    refusal(lambda x: x * x.sum().item(), normal(2))
    check(encoder(), Call(normal(2, 5, 12)))
    assert (torch.overrides.has_torch_function, torch.compiler.is_compiling) == before
