"""Families of kernels, one in a file that reads from the top.

Every file has the same six chapters: what it computes, the naive kernel, the coalesced one, the fused ones that the
package runs, their launch, their cost. A family that casts by blocks has `quantize(gpu, job)`, `job` a
`copies.BlockJob`. What else a reader needs is the vocabulary: `simt`, `reads` (what a thread computes from), `vectors`
(eight or sixteen neighbours in registers), `stores` (what a thread does with eight), `tiles` (rows turn into columns)
and `casts`; nothing here imports another family.
"""
