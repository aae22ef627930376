"""Runs pytest in a process in which the stand-in's library was loaded before torch.

    python run_cases.py LIBRARY [arguments of pytest]

Torch looks up its CUDA hooks once, at import (`getCUDAHooks` in
ATen/detail/CUDAHooksInterface.cpp).
"""

import ctypes
import sys

if __name__ == "__main__":
    library, *arguments = sys.argv[1:]
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import pytest

    sys.exit(pytest.main(arguments))
