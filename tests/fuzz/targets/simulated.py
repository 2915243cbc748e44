"""Targets of `cuda_kernels`: the kernels of a GPU, run as Python in the simulator on small cases, beside `refops`."""

import numpy as np
from arguments_fuzz import (
    FLOAT_DTYPES,
    FORMATS,
    FP8,
    SCALINGS,
    activation_name,
    contents,
    directions,
    laid_out,
    parameters,
    plain,
    spoiled,
)
from harness import DocumentedError, require, target
from judge import agree, judged_by_the_oracle, same_values

import refops
from arrays import same_bits
from refops.activations import ACTIVATIONS

NEEDS = ("cuda_kernels.gpu",)
NAMES = (
    "activation",
    "activation_grad",
    "activation_grad_quantize",
    "activation_quantize",
    "amax",
    "decode",
    "dequantize",
    "encode",
    "hadamard_transform",
    "quantize",
    "scaled_activation",
    "scaled_activation_grad",
    "update_delayed_scale",
)


def small(case, k=None):
    """A small tensor of any layout."""
    sizes = (case.choose([1, 3, 16, 32]), k or case.choose([16, 32, 64]))
    return laid_out(case, contents(case, sizes, case.choose(FLOAT_DTYPES)))


@target("simulated", [f"cuda_kernels.{name}" for name in NAMES], cases=160, seconds=120, needs=NEEDS, simulated=True)
def simulated(case):
    """The same calls give the same bits, or lie inside of the oracle, or are refused with the same error."""
    name = case.choose(NAMES)
    x, op = small(case), activation_name(case)
    gated = ACTIVATIONS[op].gated
    scaling = case.draw(SCALINGS)
    if name == "amax":
        (given,) = spoiled(case, {"x": x}).values()
        result = case.call("cuda_kernels.amax", given)
        wide = plain(x).astype(np.float32)
        expected = np.max(np.where(np.isnan(wide), 0, np.abs(wide)), initial=0)
        require(
            given is not x or float(np.asarray(result).reshape(())) == float(expected), "another amax", result, expected
        )
        return
    params = parameters(case, op)
    dy = laid_out(case, contents(case, (x.shape[0], x.shape[1] // (1 + gated)), x.dtype))
    scaled = case.choose(refops.SCALED_ACTIVATIONS)
    scales = contents(case, (x.shape[0],), np.float32)
    scaled_dy = contents(case, (x.shape[0], x.shape[1] // (1 + ACTIVATIONS[scaled].gated)), x.dtype)
    fmt = case.choose(FORMATS)
    codes = case.rng.integers(0, 1 << fmt.bits, x.shape, np.uint8)
    history = np.abs(contents(case, (4, 3), np.float32))
    calls = {
        "activation": {"name": op, "x": x, **params},
        "activation_grad": {"name": op, "dy": dy, "x": x, **params},
        "scaled_activation": {"name": scaled, "x": x, "row_scales": scales},
        "scaled_activation_grad": {"name": scaled, "dy": scaled_dy, "x": x, "row_scales": scales},
        "quantize": {"x": x, "scaling": scaling, **directions(case)},
        "activation_quantize": {"name": op, "x": x, "scaling": scaling, **directions(case)},
        "activation_grad_quantize": {"name": op, "dy": dy, "x": x, "scaling": scaling, **directions(case)},
        "encode": {"x": x, "fmt": fmt, "saturate": case.chance(0.5)},
        "decode": {"codes": codes, "fmt": fmt},
        "hadamard_transform": {"x": x, "sign_mask": case.below(65536)},
        "update_delayed_scale": {"amax_history": history, "scale": np.ones(3, np.float32), "fmt": case.choose(FP8)},
    }
    if name == "dequantize":
        dequantize(case, x, scaling)
        return
    positions = {
        "name": 0,
        "dy": 1,
        "x": 2,
        "codes": 2,
        "amax_history": 2,
        "row_scales": 3,
        "scale": 3,
        "scaling": 4,
        "fmt": 4,
    }
    arguments = spoiled(case, calls[name], 0.2)
    args = [arguments.pop(key) for key in sorted((k for k in arguments if k in positions), key=positions.get)]
    one, other = agree(case, f"refops.{name}", f"cuda_kernels.{name}", args, arguments, same_errors=False)
    if name in ("encode", "decode"):
        require((same_bits if name == "encode" else same_values)(one, other), "other values")  # NaNs have any payload
    elif name == "update_delayed_scale":
        require(all(same_values(a, b) for a, b in zip(one, other, strict=True)), "other scales")
    elif name in ("activation", "activation_grad") and not case.number % 2:
        inputs = {"dy": plain(args[1]), "x": plain(args[2])} if name == "activation_grad" else plain(args[1])
        judged_by_the_oracle(
            args[0] if name == "activation" else f"d{args[0]}", inputs, np.asarray(other), params=arguments
        )
    elif name == "quantize" and not getattr(args[1], "rht", False):
        host = other.to_host()
        for field in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax_rowwise"):
            left, right = getattr(one, field), getattr(host, field)
            require((left is None) == (right is None) and (left is None or same_bits(left, right)), f"{field} differs")


def dequantize(case, x, scaling):
    """Both ways through the simulator."""
    worked, q = case.attempt("cuda_kernels.quantize", x, scaling)
    if not worked:
        raise DocumentedError(str(q)) from q
    values = case.call("cuda_kernels.dequantize", q)
    expected = refops.dequantize(q.to_host())
    require(same_values(np.asarray(values), expected), "other values")
