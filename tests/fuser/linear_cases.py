"""What the tests of linear ops share: recipes, float64 products, explicit quantizers, the fusions that fired."""

import torch
from one_rounding import assert_one_rounding

from fuser.dtypes import DType
from fuser.op import BasicOperation
from fuser.quantization.quantizers import Float8Quantizer
from fuser.quantization.state import QuantizerRole, RecipeState
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "mxfp8": MXFP8BlockScaling,
    "block": Float8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}


def seeded(*shape, seed=0, dtype=torch.float32, requires_grad=False):
    """Normal numbers that depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(requires_grad)


def linear_quantizers(recipe):
    """New `(input, weight, grad_output)` quantizers, as a linear op has them."""
    roles = [QuantizerRole("linear", tensor) for tensor in ("input", "weight", "grad_output")]
    x, w = RecipeState.create(recipe, mode="forward", num_quantizers=2, roles=roles[:2]).make_quantizers()
    (dy,) = RecipeState.create(recipe, mode="backward", num_quantizers=1, roles=roles[2:]).make_quantizers()
    return x, w, dy


def exact_linear(x, w, dy=None):
    """`{name: (float64 value, magnitude of the operands)}` of y, and of dx and dw where `dy` is given."""
    x, w = x.detach().double(), w.detach().double()
    rows = x.reshape(-1, x.shape[-1])
    results = {"y": (x @ w.t(), x.abs() @ w.t().abs())}
    if dy is not None:
        dy = dy.detach().double()
        columns = dy.reshape(-1, dy.shape[-1]).t()
        results["dx"] = (dy @ w, dy.abs() @ w.abs())
        results["dw"] = (columns @ rows, columns.abs() @ rows.abs())
    return results


def assert_product(actual, expected):
    """One rounding of a float32 product; `expected` is `(float64 value, magnitude)`."""
    assert_one_rounding(actual.detach(), *expected)


def plan(ops):
    """`[(class name, [indices of basic ops])]` of mapped ops, as `OperationFuser._forward_ops` lists them."""
    return [(type(op).__name__, list(indices)) for op, indices in ops]


class QuantizerNeighbour(BasicOperation):
    """Passes data through, and offers its neighbours delayed-scaling quantizers. Remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.forward_quantizer = Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), DType.kFloat8E4M3)
        self.backward_quantizer = Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), DType.kFloat8E5M2)

    def get_input_quantizer(self):
        return self.forward_quantizer

    def get_grad_output_quantizer(self):
        return self.backward_quantizer

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None):
        self.input = input_
        return input_.dequantize() if hasattr(input_, "dequantize") else input_

    def op_backward(self, ctx, grad_output):
        self.grad_output = grad_output
        return grad_output.dequantize() if hasattr(grad_output, "dequantize") else grad_output
