"""fuser: TransformerEngine's operation and fuser hierarchy in PyTorch, on `cuda_kernels` and `refops`.

To come: this package is still empty.
"""
