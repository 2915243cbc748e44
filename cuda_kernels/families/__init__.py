"""Kernels by family: each file reads from the top, and needs no other but the vocabulary.

    1 what it computes     2 naive     3 coalesced     4 fused     5 its launch     6 its cost

The vocabulary is `simt` (what a thread can say), `casts` (codes and numbers), `vectors` (neighbouring values: loads,
stores, maxima) and, where rows turn into columns, `tiles`.
"""
