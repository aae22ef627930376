"""`python -m offload` is the command `offload`."""

from offload.cli import main

main(prog_name="offload")
