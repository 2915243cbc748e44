"""Faults that people plant in kernels: each a kernel of its own, by authors who do not know the conventions."""
