"""Programs in files: saved without pickle, opened without executing anything; and weight files.

A saved program is one zip (see `archive`) of a Program as JSON, `program.json`, and the bytes of
its weights. Opening it checks the types of everything in it (see `program.decode`), then that its
parts are consistent (see `program.check`), and that its operators are safe (see `operators`).
"""

from offload.files.saved_programs import Saved, open_saved, save_program
from offload.files.weight_files import (
    check_stored_tensors,
    find_stored_tensors,
    has_same_content,
)

__all__ = [
    "Saved",
    "check_stored_tensors",
    "find_stored_tensors",
    "has_same_content",
    "open_saved",
    "save_program",
]
