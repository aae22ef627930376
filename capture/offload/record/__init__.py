"""Recording: a model's call becomes a Program. The only user of torch's dispatch internals."""

from offload.record.eager_run import EagerRun
from offload.record.recorder import Recorder, Recording
from offload.record.verify import verify

__all__ = ["EagerRun", "Recorder", "Recording", "verify"]
