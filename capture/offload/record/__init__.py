"""Recording: a model's call becomes a Program. The only user of torch's dispatch internals."""

from offload.record.callables import Parameters, parameters_of, refuse_hidden_reads
from offload.record.fake_weights import FakeWeights, device_of_call
from offload.record.modes import refuse_fake_mode
from offload.record.operators import is_plain_class, is_user_file, located_at, portable_location
from offload.record.recorded_call import is_called_again
from offload.record.recorder import Recorder
from offload.record.recording import Recording
from offload.record.recording_device import default_generator
from offload.record.verify import OutcomeDiffers, verify

__all__ = [
    "FakeWeights",
    "OutcomeDiffers",
    "Parameters",
    "Recorder",
    "Recording",
    "default_generator",
    "device_of_call",
    "is_called_again",
    "is_plain_class",
    "is_user_file",
    "located_at",
    "parameters_of",
    "portable_location",
    "refuse_fake_mode",
    "refuse_hidden_reads",
    "verify",
]
