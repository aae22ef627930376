"""Remedies for captured graphs that cannot be relocated, as the end of refusals."""

from __future__ import annotations

_NOT_THE_PROOF = "verify=False changes nothing, since it leaves out only the proof"

LEAVE_OUT = (
    "leave the operator that launches it out of the captured model (run it between two captured "
    f"parts), or let another operator compute it; {_NOT_THE_PROOF}"
)
"""For a kernel whose arguments are not understood."""

PASS_ALONE = (
    "pass each address to a custom kernel as a separate parameter; otherwise leave the operator "
    f"that launches it out of the captured model; {_NOT_THE_PROOF}"
)
"""For an address inside a structure."""

ALLOCATE_EACH_TIME = (
    "a custom kernel must take its memory from torch in each call; otherwise leave the operator "
    f"that launches it out of the captured model; {_NOT_THE_PROOF}"
)
"""For an address that something keeps between calls."""

HOLD_IT = (
    "if it is a tensor's, pass the tensor as an input, or make it a parameter or a buffer of the "
    "model; if it is a library's, let torch choose another library for the operator "
    "(torch.backends.cudnn.enabled = False, torch.backends.cuda.preferred_blas_library(...)), or "
    f"leave the operator that launches it out of the captured model; {_NOT_THE_PROOF}"
)
"""For memory without a known owner."""

SAME_KERNELS = (
    "if a library chooses its kernels by timing them, torch.backends.cudnn.benchmark = False or "
    "torch.use_deterministic_algorithms(True) before the load may make its choice stable; "
    "otherwise leave the operator out of the captured model"
)
"""For captures that differ each time."""

FIND_THE_LAUNCH = (
    "capture parts of the model to find the launch, and leave that out; load(verify=False) would "
    "execute it with results that may be wrong"
)
"""For results that differ at other addresses."""

INITIALISE = (
    "initialise all arguments of a custom kernel; otherwise leave the operator that launches it "
    "out of the captured model; load(verify=False) would pass the values of one capture"
)
"""For padding that a kernel reads."""

NOT_PROVED = (
    "torch.use_deterministic_algorithms(True) before the load makes torch use deterministic "
    "kernels where it has them, and load(verify=False) leaves out the proof"
)
"""For results whose bits differ each time."""
