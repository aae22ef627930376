"""Host scheduling: Programs whose sizes vary, one instance for each choice of sizes."""

from offload.console.not_called import is_not_called
from offload.host.sized_executable import SizedExecutable
from offload.host.sizes import InstanceReport, Sizes

is_not_called(__name__)

__all__ = ["InstanceReport", "SizedExecutable", "Sizes"]
