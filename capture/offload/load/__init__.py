"""Loading: a Program becomes an Executable on a device. `pipeline` shows the whole chain."""

from offload.console.not_called import is_not_called

is_not_called(__name__)
