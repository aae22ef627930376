"""Loading: a Program becomes an Executable on a device. `pipeline` reads as the whole chain."""
