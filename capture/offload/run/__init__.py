"""Executables: Programs resident on a device, and what they report."""

from offload.run.executable import Executable, Ticket
from offload.run.reports import LastExecution, MemoryReport

__all__ = ["Executable", "LastExecution", "MemoryReport", "Ticket"]
