"""The CUDA backend: a captured graph whose addresses are found, placed and patched."""
