"""Ways to use offload from other systems."""
