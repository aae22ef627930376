"""Executables: Programs resident on a device, and what they report."""

from offload.replay.executable import Executable, Ticket
from offload.replay.reports import LastExecution, MemoryReport

__all__ = ["Executable", "LastExecution", "MemoryReport", "Ticket"]
