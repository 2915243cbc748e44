"""TE's formulas in torch, compiled by inductor twice: for the very shape, and for any shape.

Neither is the faster everywhere, so each operation and shape keeps the one that is: both are timed in its first call.
"""

import itertools
import shutil
import time

from peers.formulas import formulas
from peers.registry import Offer
from peers.torch_eager import TorchArrays, flat, prepare, reader

NAME, PACKAGES, FORMULAS = "torch formulas, torch.compile", ("torch",), True

#: Else a rounding to bfloat16 between float32 values is dropped.
OPTIONS = {"emulate_precision_casts": True}
#: Calls of each that decide, after one that compiles.
TRIALS = 2


class Faster:
    """A function in several versions; calls with tensors of one shape go to the version that is fastest for it."""

    def __init__(self, versions):
        self._versions, self.chosen = versions, {}

    def __call__(self, *tensors):
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes not in self.chosen:
            self.chosen[shapes] = self._fastest(tensors)
        return self._versions[self.chosen[shapes]](*tensors)

    def _fastest(self, tensors):
        """Name of the version with the shortest of alternating calls."""
        for run in self._versions.values():
            run(*tensors)
        times = dict.fromkeys(self._versions, float("inf"))
        for _, (name, run) in itertools.product(range(TRIALS), self._versions.items()):
            start = time.perf_counter()
            run(*tensors)
            times[name] = min(times[name], time.perf_counter() - start)
        return min(times, key=times.get)


def offers():
    if shutil.which("g++") is None:
        raise ImportError("torch.compile needs a C++ compiler, and g++ is not there")
    import torch

    def compiled(function):
        def for_shapes(dynamic):
            return torch.compile(function, fullgraph=True, dynamic=dynamic, options=OPTIONS)

        return Faster({"very shape": for_shapes(False), "any shape": for_shapes(True)})

    return [
        Offer(name, flat(compiled(function)), reader(name), prepare, dtypes=("bfloat16", "float32"))
        for name, function in formulas(TorchArrays()).items()
    ]
