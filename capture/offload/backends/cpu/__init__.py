"""The CPU: launches of torch's operators and of compiled kernels, in sequence."""
