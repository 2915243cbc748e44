"""The calls of `refops` at the speed of the CPU: the scalar functions of the kernels, compiled by Numba.

    from cuda_kernels import host
    q = host.activation_quantize("swiglu", x, refops.MXFP8Scaling(refops.E4M3))

Same signatures, results and errors as `refops`, for NumPy arrays and CPU tensors of PyTorch, which are viewed without a
copy; results hold NumPy arrays. Quantizing calls also take `swizzled_scales=True`; `amax(x)` is the largest magnitude.
Bits equal those of `refops` except where an activation or the Hadamard transform is computed: there they lie inside
`refops.oracle.check`. With `arithmetic="exact"` those of activations are equal too: float32 takes twice as long, of
situglu's gradient five times, bfloat16 and float16 as long as with "accurate", the default.

Loops are compiled on first use and kept on disk (`host.compile`). Calls share the CPUs of the process
(`set_num_threads`); results do not depend on how many there are.
"""

from cuda_kernels.errors import explain_missing_numba

with explain_missing_numba():
    from cuda_kernels import simt

if simt.SIMULATED:
    raise ImportError("cuda_kernels.host is compiled, but NUMBA_ENABLE_CUDASIM=1 asks for the simulator: unset it")

from cuda_kernels.host.backend import HostBackend
from cuda_kernels.host.calls import Doing, repeated
from cuda_kernels.host.threads import get_num_threads, set_num_threads
from cuda_kernels.interface import Interface
from refops.hints import Array
from refops.quantization.layout import swizzle, unswizzle
from refops.quantization.result import Quantized

_interface: Interface[Array, Quantized] = Interface(HostBackend())


def _with(doing: Doing) -> Interface[Array, Quantized]:
    return Interface(HostBackend(doing))


activation = repeated(_interface.activation, _with)
activation_grad = repeated(_interface.activation_grad, _with)
scaled_activation = repeated(_interface.scaled_activation, _with)
scaled_activation_grad = repeated(_interface.scaled_activation_grad, _with)
quantize = repeated(_interface.quantize, _with)
activation_quantize = repeated(_interface.activation_quantize, _with)
activation_grad_quantize = repeated(_interface.activation_grad_quantize, _with)
dequantize = repeated(_interface.dequantize, _with)
update_delayed_scale = _interface.update_delayed_scale
hadamard_transform = repeated(_interface.hadamard_transform, _with)
encode = _interface.encode
decode = _interface.decode
amax = repeated(_interface.amax, _with)

__all__ = [
    "activation",
    "activation_grad",
    "activation_grad_quantize",
    "activation_quantize",
    "amax",
    "decode",
    "dequantize",
    "encode",
    "get_num_threads",
    "hadamard_transform",
    "quantize",
    "scaled_activation",
    "scaled_activation_grad",
    "set_num_threads",
    "swizzle",
    "unswizzle",
    "update_delayed_scale",
]
