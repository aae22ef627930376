"""Executables: Programs resident on a device, and their reports."""

from offload.console.not_called import is_not_called
from offload.run.executable import Executable
from offload.run.reports import LastExecution, MemoryReport
from offload.run.tasks import Tasks, tasks
from offload.run.ticket import Ticket

is_not_called(__name__)

__all__ = ["Executable", "LastExecution", "MemoryReport", "Tasks", "Ticket", "tasks"]
