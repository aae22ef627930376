"""What a user calls: `capture` and `open`, and the Captured that they give."""

from offload.api.captured import Captured
from offload.api.captured import open_model as open
from offload.api.capturing import capture

__all__ = ["Captured", "capture", "open"]
