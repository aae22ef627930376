"""Executables: Programs resident on a device, and what they report."""

from offload.run.executable import Executable
from offload.run.reports import LastExecution, MemoryReport
from offload.run.ticket import Ticket

__all__ = ["Executable", "LastExecution", "MemoryReport", "Ticket"]
