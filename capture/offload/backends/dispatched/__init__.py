"""torch's operators, launched one by one by the host, on any device of torch."""

from offload.backends.dispatched.backend import DispatchBackend

__all__ = ["DispatchBackend"]
