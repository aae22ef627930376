"""Fusion: groups of launches become compiled kernels, as a rewrite from Program to Program.

Regions of consecutive launches (`regions`) are extracted as Programs (`extraction`). Each becomes
the C++ source of one function: loops by torch's Inductor (`graph`, `inductor`), linear layers and
attention by templates (`templates`). All new sources are compiled into one shared object (`making`,
`toolchain`), kept for later processes (`cache`). A kernel is proved at its first execution against
the launches that it replaces (`proof`).
"""

from offload.compile.cache import CacheRefused, KernelCache, open_cache
from offload.compile.choice import Choice, choice_key
from offload.compile.fusion import Fused, FusedRegion, Fusion, fuse
from offload.compile.triton_kernels import compiled_triton, with_triton_code
from offload.console.not_called import is_not_called

is_not_called(__name__)

__all__ = [
    "CacheRefused",
    "Choice",
    "Fused",
    "FusedRegion",
    "Fusion",
    "KernelCache",
    "choice_key",
    "compiled_triton",
    "fuse",
    "open_cache",
    "with_triton_code",
]
