"""Formats in which weights are kept quantized, for the tests of a distributed optimizer."""

import torch

from fuser import DType
from fuser import quantization as q

E4M3 = DType.kFloat8E4M3

#: name -> how to make a new quantizer of weights.
WEIGHTS = {
    "delayed": lambda: q.Float8Quantizer(torch.full((1,), 3.7), torch.zeros(1), E4M3),
    "current": lambda: q.Float8CurrentScalingQuantizer(E4M3),
    "powers of 2": lambda: q.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True, amax_epsilon=1e-3),
    "block": lambda: q.Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    "float32 block": lambda: q.Float8BlockQuantizer(E4M3, block_scaling_dim=2, force_pow_2_scales=False),
    "mxfp8": lambda: q.MXFP8Quantizer(E4M3),
    "mxfp8 tiles": lambda: q.MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4": lambda: q.NVFP4Quantizer(with_2d_quantization=True),
}


def values(*shape, seed=0, dtype=torch.float32):
    """Of very different magnitudes, so that a scale from a part is another one."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2 ** torch.randn(shape, generator=generator)).to(dtype)
