"""TE's formulas in torch, run eagerly."""

import numpy as np

from peers.formulas import formulas, named_arrays, parts
from peers.registry import Offer, as_numpy, as_torch
from peers.subjects import SUBJECTS

NAME, PACKAGES, FORMULAS = "torch formulas, eager", ("torch",), True


class TorchArrays:
    """torch as `formulas` uses it."""

    def __init__(self):
        import torch

        self._torch = torch
        self.sigmoid, self.where = torch.sigmoid, torch.where
        self.signbit, self.matmul = torch.signbit, torch.matmul

    def f32(self, x):
        return x.to(self._torch.float32)

    def bf16(self, x):
        return x.to(self._torch.bfloat16)

    def i32(self, x):
        return x.to(self._torch.int32)

    def u8(self, x):
        return x.to(self._torch.uint8)

    def like(self, v, x):
        return v.to(x.dtype)

    def constant(self, number):
        return self._torch.full((), number, dtype=self._torch.float32)

    def barrier(self, v):
        return v

    def array(self, array):
        return self._torch.from_numpy(array)

    def amax(self, v, axes):
        return v.abs().amax(axes)

    def clip(self, v, low, high):
        return v.clamp(low, high)

    def bits(self, v):
        return v.view(self._torch.int32)

    def from_bits(self, v):
        return v.view(self._torch.float32)

    def to_e4m3(self, v):
        return v.to(self._torch.float8_e4m3fn).view(self._torch.uint8)

    def from_e4m3(self, codes):
        return codes.view(self._torch.float8_e4m3fn).to(self._torch.float32)

    def repeat_rows(self, v, times):
        return v.repeat_interleave(times, 0)

    def stack(self, arrays):
        return self._torch.stack(arrays, -1)

    def concatenate(self, arrays):
        return self._torch.cat(arrays, 1)

    def take(self, table, codes):
        return table[codes.to(self._torch.int32)]

    def gelu(self, v):
        return self._torch.nn.functional.gelu(v, approximate="tanh")

    def sum_rows(self, v):
        return v.sum(0)


def prepare(x):
    """An input as the tuple of tensors that a formula takes for it."""
    return tuple(as_torch(part) for part in parts(x))


def flat(function):
    """A function of the prepared inputs."""
    return lambda *prepared: function(*(tensor for tensors in prepared for tensor in tensors))


def reader(name):
    """Function of a formula's tuple to name -> NumPy array."""
    return lambda result: named_arrays(SUBJECTS[name], [np.asarray(as_numpy(tensor)) for tensor in result])


def offers():
    return [
        Offer(name, flat(function), reader(name), prepare, dtypes=("bfloat16", "float32"))
        for name, function in formulas(TorchArrays()).items()
    ]
