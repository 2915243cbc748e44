"""refops: the golden reference for fused activations and low-precision scaling, in NumPy.

What a CUDA, Triton or CUTLASS kernel that follows TransformerEngine must write, to the bit: FP8 with delayed,
current and block scaling, MXFP8, NVFP4, the activations and their gradients, and the fused combinations. Scalings that
TE lacks, MXFP4 and MXINT8 among them, are quantized the same way: `refops.SCALINGS` has all.

    import refops
    q = refops.activation_quantize("swiglu", x, refops.MXFP8Scaling(refops.E4M3), columnwise=True)
    q.rowwise_data, q.rowwise_scale_inv        # codes and E8M0 scale bytes in TE's layout
    refops.dequantize(q)
"""

from refops.activations import ACTIVATIONS, DEFAULT_PARAMETERS
from refops.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    INT8,
    UE5M3,
    ElementFormat,
    FloatFormat,
    IntegerFormat,
    decode,
    encode,
    pack_fp4,
    unpack_fp4,
)
from refops.ops import (
    SCALED_ACTIVATIONS,
    activation,
    activation_grad,
    activation_grad_quantize,
    activation_quantize,
    dequantize,
    quantize,
    scaled_activation,
    scaled_activation_grad,
)
from refops.products import gemm
from refops.quantization.block_scales import block_scales_as_mxfp8
from refops.quantization.delayed import update_delayed_scale
from refops.quantization.hadamard import hadamard_transform
from refops.quantization.layout import swizzle, unswizzle
from refops.quantization.result import Quantized
from refops.scalings import (
    SCALINGS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    NVFP4Scaling,
)

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_PARAMETERS",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "INT8",
    "SCALED_ACTIVATIONS",
    "UE5M3",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "ElementFormat",
    "FloatFormat",
    "IntegerFormat",
    "MXFP8Scaling",
    "NVFP4Scaling",
    "Quantized",
    "activation",
    "activation_grad",
    "activation_grad_quantize",
    "activation_quantize",
    "block_scales_as_mxfp8",
    "decode",
    "dequantize",
    "encode",
    "gemm",
    "hadamard_transform",
    "pack_fp4",
    "quantize",
    "scaled_activation",
    "scaled_activation_grad",
    "swizzle",
    "unpack_fp4",
    "unswizzle",
    "update_delayed_scale",
]

# A scaling whose file was added is public too.
globals().update({cls.__name__: cls for cls in SCALINGS})
__all__.extend(cls.__name__ for cls in SCALINGS if cls.__name__ not in __all__)
