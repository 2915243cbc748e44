"""What the tests of operations share: the bound on an output, quantizers of every kind, bitwise comparison."""

import torch

from fuser.dtypes import DType
from fuser.op import OperationContext
from fuser.quantization.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

#: Error of a float32 evaluation, relative to the magnitude of the operands.
FLOAT32_ERROR = 2e-6


def assert_one_rounding(actual, truth, magnitude, error=FLOAT32_ERROR):
    """Each element is the rounding, to its dtype, of some number within error * magnitude of the float64 truth.

    Rounding is monotone, so these are the numbers between the two rounded ends. A second rounding falls outside.
    """
    assert actual.shape == truth.shape
    slack = error * magnitude
    low, high = (truth - slack).to(actual.dtype), (truth + slack).to(actual.dtype)
    wrong = ~((low <= actual) & (actual <= high))
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} elements; first: got {actual[wrong][0].item()!r}, "
        f"truth {truth[wrong][0].item()!r}, allowed {low[wrong][0].item()!r} to {high[wrong][0].item()!r}"
    )


def _delayed(**usage):
    return Float8Quantizer(torch.full((1,), 3.7), torch.zeros(1), DType.kFloat8E4M3, **usage)


#: name -> how to make a new quantizer.
QUANTIZERS = {
    "delayed": _delayed,
    "current": lambda **usage: Float8CurrentScalingQuantizer(DType.kFloat8E5M2, device="cpu", **usage),
    "mxfp8": lambda **usage: MXFP8Quantizer(DType.kFloat8E4M3, **usage),
    "block_1d": lambda **usage: Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=1, **usage),
    "block_2d": lambda **usage: Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=2, **usage),
    "nvfp4": lambda **usage: NVFP4Quantizer(**usage),
    "nvfp4_rht": lambda **usage: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **usage),
    "nvfp4_stochastic": lambda **usage: NVFP4Quantizer(stochastic_rounding=True, **usage),
}


def new_quantizer(name):
    """A quantizer for both copies. Stochastic rounding draws from torch's generator: seed it before each use."""
    return QUANTIZERS[name](rowwise=True, columnwise=True)


def same_bits(left, right):
    """Whether two plain tensors are the same in dtype, shape and every bit."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    )


def assert_same_quantized(actual, expected):
    """Both are quantized tensors with the same codes, scales and amaxes."""
    assert tuple(actual.shape) == tuple(expected.shape)
    assert actual.dtype == expected.dtype
    left, right = actual.buffers.tensors, expected.buffers.tensors
    assert left.keys() == right.keys()
    assert left
    for name, tensor in left.items():
        assert same_bits(tensor, right[name]), name


def call_forward(op, x, *, next_quantizer=None, previous_quantizer=None, extra_inputs=(), requires_grad=True):
    """Run one operation's forward as a fuser would: (output, context)."""
    ctx = OperationContext(requires_grad=requires_grad)
    with torch.no_grad():
        y, _ = op.fuser_forward(
            [ctx],
            x,
            basic_op_extra_inputs=[tuple(extra_inputs)],
            prev_op_grad_output_quantizer=previous_quantizer,
            next_op_input_quantizer=next_quantizer,
            basic_op_kwargs=[{}],
        )
    ctx.saved_tensors = list(ctx.to_save or ())
    return y, ctx


def call_backward(op, ctx, dy):
    """Run one operation's backward as a fuser would: (input gradient, parameter gradients, extra-input gradients)."""
    with torch.no_grad():
        dx, parameters, extras = op.fuser_backward([ctx], dy, basic_op_grad_extra_outputs=[()])
    return dx, list(parameters[0]), list(extras[0])
