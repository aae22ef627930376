"""Recording: a model's call becomes a Program. The only user of torch's dispatch internals."""

from offload.console.not_called import is_not_called
from offload.record.callables import Parameters, parameters_of, refuse_hidden_reads
from offload.record.dynamic_shapes import DynamicShapes, VaryingSizes, varying_sizes
from offload.record.fake_weights import FakeWeights, device_of_call
from offload.record.operators import is_plain_class
from offload.record.plain_call import PlainCall
from offload.record.recorder import Recorder
from offload.record.recording import Recording
from offload.record.repeatable_call import called_again, is_called_again
from offload.record.same_outcome import is_close, same_but_for_kernels
from offload.record.sized_functions import SizedFunctions
from offload.record.surroundings import refuse_transforms
from offload.record.verify import OutcomeDiffers, verify
from offload.record.whole_layers import WholeLayers
from offload.record.whole_program import WholeProgram

is_not_called(__name__)

__all__ = [
    "DynamicShapes",
    "FakeWeights",
    "OutcomeDiffers",
    "Parameters",
    "PlainCall",
    "Recorder",
    "Recording",
    "SizedFunctions",
    "VaryingSizes",
    "WholeLayers",
    "WholeProgram",
    "called_again",
    "device_of_call",
    "is_called_again",
    "is_close",
    "is_plain_class",
    "parameters_of",
    "refuse_hidden_reads",
    "refuse_transforms",
    "same_but_for_kernels",
    "varying_sizes",
    "verify",
]
