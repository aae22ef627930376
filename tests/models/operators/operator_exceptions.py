"""Operators of PyTorch's database that are refused, or compared otherwise than by their bits."""

from __future__ import annotations

# Refused operators and a part of the reason. At most 25 of those that take float32.
HOST_READ = "reads a tensor's value on the host"

SHAPE = "shape depends on the data"

UNWRITTEN = "uninitialised memory"

LAYOUT = "only plain strided tensors"

REFUSED = {
    "__getitem__": SHAPE,  # one sample indexes with a mask
    "allclose": HOST_READ,
    "argwhere": SHAPE,
    "as_strided_partial_views": "pass the whole tensor as input",
    "bincount": SHAPE,
    "cov": HOST_READ,
    "empty": UNWRITTEN,
    "empty_like": UNWRITTEN,
    "empty_permuted": UNWRITTEN,
    "empty_strided": UNWRITTEN,
    "equal": HOST_READ,
    "istft": HOST_READ,
    "item": HOST_READ,
    "linalg_lstsq": SHAPE,
    "linalg_lstsq_grad_oriented": SHAPE,
    "masked_select": SHAPE,
    "narrow": HOST_READ,
    "new_empty": UNWRITTEN,
    "new_empty_strided": UNWRITTEN,
    "nn_functional_gaussian_nll_loss": HOST_READ,
    "nn_functional_one_hot": HOST_READ,
    "nonzero": SHAPE,
    "repeat_interleave": SHAPE,
    "sparse_mm_reduce": LAYOUT,
    "sparse_sampled_addmm": LAYOUT,
    "tensor_split": "on the host",
    "to_sparse": LAYOUT,
    "unique": SHAPE,
    "unique_consecutive": SHAPE,
}

# Operators without a CPU kernel in eager, or without one for the samples.
NOT_ON_CPU = {
    "jiterator_2inputs_2outputs": "compiles GPU code",
    "jiterator_4inputs_with_extra_args": "compiles GPU code",
    "jiterator_binary": "compiles GPU code",
    "jiterator_binary_return_by_ref": "compiles GPU code",
    "jiterator_unary": "compiles GPU code",
    "nn_functional_batch_norm_without_cudnn": "is a variant for GPUs",
    "torch_ops_aten__efficient_attention_forward": "is a GPU kernel",
    "torch_ops_aten__flash_attention_forward": "is a GPU kernel",
}

# Operators whose last bits differ. Under a dispatch mode torch decomposes some otherwise.
WITH_VECTORS = "computes the singular or eigenvectors too under a dispatch mode"

ROUNDED = {
    "__rmatmul__": "folds a batch into one matrix under a dispatch mode",
    "linalg_cond": WITH_VECTORS,
    "linalg_eigvalsh": WITH_VECTORS,
    "linalg_lstsq": "differs between two eager calls, with the alignment of its operands",
    "linalg_lstsq_grad_oriented": "differs between two eager calls, as linalg_lstsq",
    "linalg_matrix_norm": WITH_VECTORS,
    "linalg_norm": WITH_VECTORS,
    "linalg_svdvals": WITH_VECTORS,
    "matmul": "folds a batch into one matrix under a dispatch mode",
    "norm_nuc": WITH_VECTORS,
}

# Operators that do not check their integer or boolean operands: other values are undefined.
UNCHECKED_INTEGERS = {
    "_unsafe_masked_index": "reads out of bounds where the mask is false",
    "_unsafe_masked_index_put_accumulate": "writes out of bounds where the mask is false",
    "nn_functional_embedding_bag": "offsets must ascend",
}

# In-place variants that change an operand's shape, which is the caller's tensor.
CHANGES_SHAPE = "changed its storage or shape in place"

REFUSED_IN_PLACE = {
    "as_strided": CHANGES_SHAPE,
    "as_strided_partial_views": CHANGES_SHAPE,
    "resize_": CHANGES_SHAPE,
    "resize_as_": CHANGES_SHAPE,
    "squeeze": CHANGES_SHAPE,
    "squeeze_multiple": CHANGES_SHAPE,
    "t": CHANGES_SHAPE,
    "transpose": CHANGES_SHAPE,
    "unsqueeze": CHANGES_SHAPE,
}
