"""TE's formulas in torch, compiled by inductor."""

import shutil

from peers.formulas import formulas
from peers.registry import Offer
from peers.torch_eager import TorchArrays, flat, prepare, reader

NAME, PACKAGES, FORMULAS = "torch formulas, torch.compile", ("torch",), True

#: Else a rounding to bfloat16 between float32 values is dropped.
OPTIONS = {"emulate_precision_casts": True}


def offers():
    if shutil.which("g++") is None:
        raise ImportError("torch.compile needs a C++ compiler, and g++ is not there")
    import torch

    def compiled(function):
        return torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)

    return [
        Offer(name, flat(compiled(function)), reader(name), prepare, dtypes=("bfloat16", "float32"))
        for name, function in formulas(TorchArrays()).items()
    ]
