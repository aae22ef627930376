"""The typed errors of offload. Each message says what was expected, what came and what to do."""


class OffloadError(Exception):
    """Base of every error that offload raises on purpose."""


class CaptureError(OffloadError):
    """The call cannot be recorded; the message names the operator and the user's file and line."""


class BindingError(OffloadError, ValueError):
    """An argument of an execution does not fit; raised before anything has run."""


class CopyError(OffloadError, TypeError):
    """An object on a device, or bound to it, cannot be copied or pickled; the message says why."""


class ProgramError(OffloadError):
    """A program is inconsistent; the message says where, and what was expected."""


class PlanError(OffloadError):
    """A plan cannot be made; the message says what is needed and what sets it."""


class ExecutionError(OffloadError):
    """The device failed while executing; raised at the wait, and the first error wins."""


class DependencyError(ExecutionError):
    """An execution was not begun, as its dependency failed; the cause is the dependency's error."""


class OutOfMemory(ExecutionError):
    """A device lacks memory for the request; a smaller one, such as a smaller budget, may fit."""


class OutOfStreams(ExecutionError):
    """A device has no stream left for the request; with less loaded, it may succeed."""


class FileError(OffloadError):
    """A file (a saved program, a trace, inputs) cannot be written, or read as the expected kind."""


class BackendUnavailable(OffloadError):
    """A device cannot be used; the message names the missing library, device or version."""


class DiagnosisError(OffloadError):
    """The target cannot be diagnosed; the message says what can."""


class CostModelError(OffloadError):
    """Costs cannot be fitted, found or predicted; the message says what has to be measured."""


class TimelineError(OffloadError):
    """A timeline cannot be written or drawn; the message says what is missing or not supported."""
