"""TE's formulas in torch, compiled by inductor: for the very shape with 4096 rows, for any shape with other rows.

Code for any shape is a tenth to a quarter slower; compiling every formula for every shape would take most of the
benchmark's time.
"""

import shutil

from peers.formulas import formulas
from peers.registry import Offer
from peers.torch_eager import TorchArrays, flat, prepare, reader

NAME, PACKAGES, FORMULAS = "torch formulas, torch.compile", ("torch",), True

STATIC_ROWS = 4096
#: Else a rounding to bfloat16 between float32 values is dropped.
OPTIONS = {"emulate_precision_casts": True}


def offers():
    if shutil.which("g++") is None:
        raise ImportError("torch.compile needs a C++ compiler, and g++ is not there")
    import torch

    def compiled(function):
        one, any_shape = (
            torch.compile(function, fullgraph=True, dynamic=dynamic, options=OPTIONS) for dynamic in (False, True)
        )
        return lambda *tensors: (one if len(tensors[0]) == STATIC_ROWS else any_shape)(*tensors)

    return [
        Offer(name, flat(compiled(function)), reader(name), prepare, dtypes=("bfloat16", "float32"))
        for name, function in formulas(TorchArrays()).items()
    ]
