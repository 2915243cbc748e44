"""TE's formulas in jax.numpy, under jit."""

import numpy as np

from peers.formulas import formulas, named_arrays, parts
from peers.registry import Offer
from peers.subjects import SUBJECTS

NAME, PACKAGES, FORMULAS = "jnp formulas, jit", ("jax", "jaxlib"), True


class JaxArrays:
    """jax.numpy as `formulas` uses it."""

    def __init__(self):
        import jax
        import jax.numpy as jnp

        self._jnp, self._jax = jnp, jax
        self._bitcast = jax.lax.bitcast_convert_type
        self.sigmoid, self.where = jax.nn.sigmoid, jnp.where
        self.clip, self.signbit, self.matmul = jnp.clip, jnp.signbit, jnp.matmul

    def f32(self, x):
        return x.astype(self._jnp.float32)

    def bf16(self, x):
        return x.astype(self._jnp.bfloat16)

    def i32(self, x):
        return x.astype(self._jnp.int32)

    def u8(self, x):
        return x.astype(self._jnp.uint8)

    def like(self, v, x):
        # XLA may keep more digits than a conversion asks for; reduce_precision may not be dropped.
        if x.dtype == self._jnp.bfloat16:
            v = self._jax.lax.reduce_precision(v, 8, 7)
        return v.astype(x.dtype)

    def constant(self, number):
        return self._jnp.float32(number)

    def barrier(self, v):
        # XLA makes 1 / (a / b) of it b / a, which rounds once less.
        return self._jax.lax.optimization_barrier(v)

    def array(self, array):
        return self._jnp.asarray(array)

    def amax(self, v, axes):
        return self._jnp.abs(v).max(axes)

    def bits(self, v):
        return self._bitcast(v, self._jnp.int32)

    def from_bits(self, v):
        return self._bitcast(v, self._jnp.float32)

    def to_e4m3(self, v):
        return self._bitcast(v.astype(self._jnp.float8_e4m3fn), self._jnp.uint8)

    def from_e4m3(self, codes):
        return self._bitcast(codes, self._jnp.float8_e4m3fn).astype(self._jnp.float32)

    def repeat_rows(self, v, times):
        return self._jnp.repeat(v, times, axis=0)

    def stack(self, arrays):
        return self._jnp.stack(arrays, -1)

    def concatenate(self, arrays):
        return self._jnp.concatenate(arrays, 1)

    def take(self, table, codes):
        return table[codes.astype(self._jnp.int32)]

    def gelu(self, v):
        return self._jax.nn.gelu(v, approximate=True)

    def sum_rows(self, v):
        return v.sum(0)


def offers():
    import jax

    def prepare(x):
        return tuple(jax.numpy.asarray(part) for part in parts(x))

    def flat(function):
        jitted = jax.jit(function)
        return lambda *prepared: jax.block_until_ready(jitted(*(array for arrays in prepared for array in arrays)))

    def reader(name):
        return lambda result: named_arrays(SUBJECTS[name], [np.asarray(array) for array in result])

    return [
        Offer(name, flat(function), reader(name), prepare, dtypes=("bfloat16", "float32"))
        for name, function in formulas(JaxArrays()).items()
    ]
