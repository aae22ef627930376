"""The user's functions: `capture`, `capture_training` and `open`, and the Captured they return."""

from offload.api.captured import Captured
from offload.api.captured import open_model as open
from offload.api.capturing import capture
from offload.api.training_step import capture_training

__all__ = ["Captured", "capture", "capture_training", "open"]
