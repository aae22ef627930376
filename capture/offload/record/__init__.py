"""Recording: a model's call becomes a Program. The only user of torch's dispatch internals."""

from offload.record.recorder import Parameters, Recorder, Recording
from offload.record.verify import verify

__all__ = ["Parameters", "Recorder", "Recording", "verify"]
