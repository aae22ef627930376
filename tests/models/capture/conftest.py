"""What tests of captures share."""

from __future__ import annotations

import pytest
import torch
from checks import capture, normal

from offload.api.recording_turn import is_recording


@pytest.fixture
def nothing_stays():
    """Modes, flags, hooks and generators are torch's own again after each test."""
    lookups = torch.overrides.has_torch_function, torch.compiler.is_compiling
    generator, cache = torch.random.default_generator, torch.is_autocast_cache_enabled()
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.overrides._get_current_function_mode_stack()
    assert (torch.overrides.has_torch_function, torch.compiler.is_compiling) == lookups
    assert not torch.compiler.is_compiling()
    assert torch.random.default_generator is generator
    assert torch.is_autocast_cache_enabled() == cache
    assert not is_recording()
    function, x = torch.sin, normal(2)
    assert torch.equal(capture(function, x)(x), x.sin())
