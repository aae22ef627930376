"""Torch's operators, launched by the host one by one: on any device that torch has."""

from offload.backends.dispatched.backend import DispatchBackend

__all__ = ["DispatchBackend"]
