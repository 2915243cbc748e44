"""Faults that people plant in kernels, each in a kernel of its own, written by those who do not know the conventions."""
