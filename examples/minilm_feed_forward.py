"""Swap a real model's feed-forward block for fuser ops, and see what each recipe does to its outputs and gradients.

The block is Linear 384 -> 1536, GELU, Linear 1536 -> 384 of MiniLM's encoder layer 3 with its weights, its input for
eight sentence pairs, and the gradient that reached it (tests/data). Errors are relative to the block in float64:
||y - y64|| / ||y64||.

    python examples/minilm_feed_forward.py [--explain]

MiniLM applies the exact GELU; ops.GELU is TransformerEngine's tanh form, whose difference is the first row's error.
FP8 blocks and MXFP8 come out equal: both scale by powers of two, which leave a mantissa as it is.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import fuser
from fuser import ops
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "minilm_ffn.safetensors"
RECIPES = {
    "none (bf16)": None,
    "fp8 delayed": DelayedScaling(amax_history_len=1),
    "fp8 current": Float8CurrentScaling(),
    "fp8 block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


def exact_block(tensors):
    """Return the block as torch modules in float64, exact GELU."""
    up, down = torch.nn.Linear(384, 1536, dtype=torch.float64), torch.nn.Linear(1536, 384, dtype=torch.float64)
    block = torch.nn.Sequential(up, torch.nn.GELU(), down)
    load(block[0], block[2], tensors)
    return block


def fuser_block(tensors):
    """Return the same block as fuser ops in bfloat16."""
    block = ops.Sequential(
        ops.Linear(384, 1536, dtype=torch.bfloat16), ops.GELU(), ops.Linear(1536, 384, dtype=torch.bfloat16)
    )
    load(block[0], block[2], tensors)
    return block


def load(up, down, tensors):
    """Copy the model's weights into two linear layers."""
    with torch.no_grad():
        for layer, name in ((up, "up"), (down, "down")):
            layer.weight.copy_(tensors[f"layer3.ffn.{name}.weight"])
            layer.bias.copy_(tensors[f"layer3.ffn.{name}.bias"])


def run(block, x, dy, recipe=None):
    """Return output, input gradient and the gradient of the first weight, as float64."""
    block.zero_grad()
    x = x.detach().to(block[0].weight.dtype, copy=True).requires_grad_()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = block(x)
    y.backward(dy.to(y.dtype))
    return [t.detach().double() for t in (y, x.grad, block[0].weight.grad)]


def errors_under(recipe, tensors, x, dy, truth):
    """Return the relative errors of y, dx and dW; delayed scaling gets a step first, to learn its scales."""
    block = fuser_block(tensors)
    if isinstance(recipe, DelayedScaling):
        run(block, x, dy, recipe)
    results = run(block, x, dy, recipe)
    return [((r - t).norm() / t.norm()).item() for r, t in zip(results, truth, strict=True)]


def main(arguments=None):
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explain", action="store_true", help="also print which fusions run under MXFP8")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)  # NVFP4 rounds gradients stochastically
    tensors = load_file(DATA)
    x = tensors["layer3.ffn.input"]
    # The gradient of a loss with unit weights on the output, at the scale of the block's real gradients.
    dy = torch.randn(x.shape) * tensors["layer3.ffn.grad_activation"].float().std()
    truth = run(exact_block(tensors), x, dy)

    table = Table(title="MiniLM layer 3 feed-forward: error relative to float64")
    for heading in ("recipe", "output", "input gradient", "weight gradient"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    for name, recipe in RECIPES.items():
        table.add_row(name, *(f"{error:.2e}" for error in errors_under(recipe, tensors, x, dy, truth)))
    console = Console()
    console.print(table)
    if options.explain:
        fuser.explain(fuser_block(tensors), x.requires_grad_(), recipe=RECIPES["mxfp8"])


if __name__ == "__main__":
    main()
