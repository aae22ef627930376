"""Shared by devices that capture a model's work from a stream, as CUDA and Ascend do."""
