"""cuda_kernels: readable Numba CUDA kernels for the operations of `refops`, and their functions compiled for the CPU.

To come: this package is still empty. It will import from `refops` only descriptions (formats, settings), never
arithmetic: two implementations that share arithmetic cannot check each other.
"""
