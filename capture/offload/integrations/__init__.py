"""Ways into offload from other systems."""
