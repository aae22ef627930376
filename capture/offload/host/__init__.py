"""Host scheduling: Programs whose sizes vary."""

from offload.console.not_called import is_not_called
from offload.host.executable_for_each_size import ExecutableForEachSize
from offload.host.loading import FamilyLoad, load_family, refuse_for_families
from offload.host.padded_executable import PaddedExecutable, PaddingReport
from offload.host.promotion import PromotedSizes, PromotionReport
from offload.host.sized_executable import SizedExecutable
from offload.host.sizes import InstanceReport, Sizes

is_not_called(__name__)

__all__ = [
    "ExecutableForEachSize",
    "FamilyLoad",
    "InstanceReport",
    "PaddedExecutable",
    "PaddingReport",
    "PromotedSizes",
    "PromotionReport",
    "SizedExecutable",
    "Sizes",
    "load_family",
    "refuse_for_families",
]
