"""cuda_kernels: readable Numba CUDA kernels for the operations of `refops`, and their functions compiled for the CPU.

    import cuda_kernels
    q = cuda_kernels.activation_quantize("swiglu", x, MXFP8Scaling(E4M3), columnwise=True)  # x on a GPU
    q = cuda_kernels.host.activation_quantize("swiglu", x, MXFP8Scaling(E4M3), columnwise=True)  # x on the CPU

The calls, their results and their errors are those of `refops`. Arrays on a GPU may be torch tensors, CuPy or Numba
arrays or anything with a CUDA array interface; results are of the same kind. Work goes to the current stream of the
library on the array's device.

Calls of activations take `arithmetic`: "accurate", the default, is that of TE's default build; "exact" rounds exp, tanh
and division correctly and contracts nothing, so that every result has the bits of `refops`; "fast", on a GPU alone, is
what `fast_math=True` asks for too: approximate exponentials and reciprocals (at most 8 ulp of float32; a sigmoid below
2^-126 is flushed to 0, a gradient of infinity may be infinite where it is NaN). Scales and casts never change.

NumPy arrays go through the same kernels, compiled, within `emulated(target="sm_90")`, on a software
GPU; and with NUMBA_ENABLE_CUDASIM=1, set before the import, as Python in a simulator.

The package imports from `refops` what is declared there once: formats, layouts, checks of arguments, and the formulas
of activations and scales, which are compiled here. Loads, maxima, casts, sums and stores are its own, so the two check
each other, and arrays of other implementations check the formulas.
"""

import functools
import importlib
import inspect
from typing import Any

from cuda_kernels.errors import explain_missing_numba
from cuda_kernels.interface import Interface

__all__ = [
    "activation",
    "activation_grad",
    "activation_grad_quantize",
    "activation_quantize",
    "amax",
    "decode",
    "dequantize",
    "emulated",
    "encode",
    "hadamard_transform",
    "host",
    "quantize",
    "scaled_activation",
    "scaled_activation_grad",
    "update_delayed_scale",
]


def __getattr__(name: str) -> Any:
    if name == "host":
        with explain_missing_numba():
            return importlib.import_module("cuda_kernels.host")
    if name == "emulated":
        with explain_missing_numba():
            return importlib.import_module("cuda_kernels.emulator").emulated
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.lru_cache(maxsize=1)
def _gpu():
    """The module that runs the calls; imported at the first call, because it needs Numba."""
    with explain_missing_numba():
        return importlib.import_module("cuda_kernels.gpu")


def _on_gpu(method):
    """The public function for an `Interface` method; it runs on the device and in the library of its first array."""

    @functools.wraps(method)
    def call(*args, fast_math=False, **options):
        return _gpu().call(method, signature, args, options, fast_math)

    signature = inspect.signature(method)
    del call.__wrapped__
    call.__annotations__ = {**method.__annotations__, "fast_math": bool}
    extra = inspect.Parameter("fast_math", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    kept = [p for p in signature.parameters.values() if p.name != "self"]
    last = len(kept) - (kept[-1].kind is inspect.Parameter.VAR_KEYWORD)
    call.__signature__ = signature.replace(parameters=[*kept[:last], extra, *kept[last:]])
    return call


activation = _on_gpu(Interface.activation)
activation_grad = _on_gpu(Interface.activation_grad)
activation_grad_quantize = _on_gpu(Interface.activation_grad_quantize)
activation_quantize = _on_gpu(Interface.activation_quantize)
amax = _on_gpu(Interface.amax)
decode = _on_gpu(Interface.decode)
dequantize = _on_gpu(Interface.dequantize)
encode = _on_gpu(Interface.encode)
hadamard_transform = _on_gpu(Interface.hadamard_transform)
quantize = _on_gpu(Interface.quantize)
scaled_activation = _on_gpu(Interface.scaled_activation)
scaled_activation_grad = _on_gpu(Interface.scaled_activation_grad)
update_delayed_scale = _on_gpu(Interface.update_delayed_scale)
