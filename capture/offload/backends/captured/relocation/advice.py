"""Remedies for captured graphs that cannot be relocated, as the end of refusals."""

from __future__ import annotations

_NOT_THE_PROOF = "verify=False changes nothing, since it leaves out the proof alone"

LEAVE_OUT = (
    "leave the operator that launches it out of the captured model (run it between two captured "
    f"parts), or let another operator compute it; {_NOT_THE_PROOF}"
)
"""For a kernel whose arguments are not understood."""

PASS_ALONE = (
    "give a kernel of your own each address as a parameter by itself; otherwise leave the operator "
    f"that launches it out of the captured model; {_NOT_THE_PROOF}"
)
"""For an address inside a structure."""

ALLOCATE_EACH_TIME = (
    "a kernel of your own must take its memory from torch in each call; otherwise leave the "
    f"operator that launches it out of the captured model; {_NOT_THE_PROOF}"
)
"""For an address that something keeps between calls."""

HOLD_IT = (
    "if it is a tensor's, pass that as an input, or let the model hold it as a parameter or a "
    "buffer; if it is a library's, have torch choose another one for the operator "
    "(torch.backends.cudnn.enabled = False, torch.backends.cuda.preferred_blas_library(...)), or "
    f"leave the operator that launches it out of the captured model; {_NOT_THE_PROOF}"
)
"""For memory without a known owner."""

SAME_KERNELS = (
    "where a library chooses its kernels by measuring, torch.backends.cudnn.benchmark = False or "
    "torch.use_deterministic_algorithms(True) before the load may keep its choice; otherwise leave "
    "the operator out of the captured model"
)
"""For captures that differ each time."""

FIND_THE_LAUNCH = (
    "capture parts of the model to find the launch, and leave that out; load(verify=False) would "
    "execute it with results that may be wrong"
)
"""For results that differ at other addresses."""

INITIALISE = (
    "initialise all arguments of a kernel of your own; otherwise leave the operator that launches "
    "it out of the captured model; load(verify=False) would give it what one capture has there"
)
"""For padding that a kernel reads."""

NOT_PROVED = (
    "torch.use_deterministic_algorithms(True) before the load has torch take other kernels where "
    "it has some, and load(verify=False) leaves the proof out"
)
"""For results whose bits differ each time."""
