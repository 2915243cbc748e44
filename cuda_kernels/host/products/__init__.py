"""Products as tensor cores compute them, at the speed of the CPU: the bits of `refops.products.matmul`.

    from cuda_kernels.host import products
    y = products.matmul(a, b, refops.products.unit("hopper", refops.E4M3), a_format=refops.E4M3, b_format=refops.E4M3)

`panels` is what a unit reads of the operands, `groups` one step of a unit, `walk` the loop over results, which makes
panels of a piece of k at a time: memory is that of the results and a few MB for each thread.
"""

from cuda_kernels.host.products.call import matmul

__all__ = ["matmul"]
