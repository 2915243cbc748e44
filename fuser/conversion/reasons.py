"""What may be converted, and why a module stays in high precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from fuser.common import name_of
from fuser.conversion.modules import (
    CONVERTED,
    ConvertedProduct,
    conversion_of,
    is_a,
    linear_operations,
    of_module,
    torch_class,
)
from fuser.op import FusibleOperation
from fuser.quantization.contexts import autocast, get_align_size_for_quantization
from fuser.quantization.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer
from fuser.recipe import Recipe
from refops.arguments import dimensions

#: What TE and cuBLAS want the sizes of FP8 operands to be multiples of on a GPU. A forward pass needs 8 of those sizes
#: that it does not sum over, which its backward pass does.
MULTIPLE_ON_GPUS = 16
#: How many of them a sentence names.
MOST_NAMED = 8
#: The quantizers of such operands. Other formats take no such sizes anywhere.
FP8_QUANTIZERS = (Float8Quantizer, Float8CurrentScalingQuantizer, Float8BlockQuantizer)
#: Modules of torch that multiply by their parameters and are not converted.
_OTHER_PRODUCTS = (
    torch.nn.modules.conv._ConvNd,
    torch.nn.RNNBase,
    torch.nn.RNNCellBase,
    torch.nn.Bilinear,
)
#: Modules that look up rows of their weight.
TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
#: Modules whose parameters of several dimensions are not operands of torch's products, or that quantize themselves.
_NO_PRODUCTS = (
    NonDynamicallyQuantizableLinear,  # a part of MultiheadAttention, which is named
    *TABLES,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.nn.GroupNorm,
    torch.nn.modules.batchnorm._NormBase,
    FusibleOperation,
)
#: Modules that a rule gives recipes to, beside those with matrices of their own.
KINDS = (*CONVERTED, *_OTHER_PRODUCTS, torch.nn.MultiheadAttention)


def may_become(module: Any) -> bool:
    """Whether a module computes what the operation does, dtypes and sizes aside."""
    cls = torch_class(module)
    if conversion_of(module) is None or "forward" in vars(module):
        return False
    if cls is torch.nn.GELU:
        return module.approximate == "tanh"
    return not getattr(module, "inplace", False) and module._parameters.get("weight", module) is not None


def reason_to_leave(module: torch.nn.Module, recipe: Recipe, name: str) -> str | None:
    """Why products of a module stay in high precision despite a recipe; None if they do not."""
    cls = torch_class(module)
    if issubclass(conversion_of(module) or cls, ConvertedProduct):
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        dtype = next(module.parameters()).dtype  # without computing a weight that is parametrized
        if not dtype.is_floating_point or dtype == torch.float64:
            return f"operations take float32, float16 and bfloat16; its weight is {dtype}"
        return _misfit(module, recipe, name)
    if isinstance(module, torch.nn.LazyLinear):
        return "its sizes are not known before its first forward; convert it after that"
    if is_a(module, "torch.distributed.fsdp", "FSDPModule") and cls.__bases__[-1] in CONVERTED:
        return "fully_shard made it a subclass: call fuser.convert before fully_shard"
    if isinstance(module, torch.nn.Linear) and cls is not NonDynamicallyQuantizableLinear:
        return "a subclass of Linear, whose forward may do more"
    if isinstance(module, torch.nn.MultiheadAttention):
        return "it multiplies by its in_proj_weight and out_proj.weight itself"
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return "convolutions are not quantized"
    if isinstance(module, _OTHER_PRODUCTS):
        return "there is no such operation"
    matrices = own_matrices(module)
    if not matrices:
        return None
    of_torch = cls.__module__.partition(".")[0] == "torch"
    whose = "what is computed" if of_torch else "no module of torch's; what it computes"
    return f"{whose} with {', '.join(matrices)} is not quantized"


def own_matrices(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters with two or more dimensions, by which it may multiply: not those of tables and norms.

    Of a parametrized one those that its parameters are computed from. Nothing is computed here.
    """
    if isinstance(module, (*_NO_PRODUCTS, parametrize.ParametrizationList)):
        return {}
    own = dict(module.named_parameters(recurse=False))
    if parametrize.is_parametrized(module):
        for name, parametrizations in module.parametrizations.items():  # type: ignore[operator, union-attr]
            own[name] = max(parametrizations.parameters(recurse=False), key=torch.numel)
    return {
        name: value
        for name, value in own.items()
        if not torch.nn.parameter.is_lazy(value) and value.dim() > 1 and value.is_floating_point()
    }


def has_products(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Linear, torch.nn.MultiheadAttention, *_OTHER_PRODUCTS)) or bool(
        own_matrices(module)
    )


def _linear_under(module: Any, recipe: Any, name: str) -> tuple[Any, tuple[int, int]]:
    """The operation that multiplies in a layer, with its quantizers under a recipe; and the shape of its weight."""
    if torch_class(module) is torch.nn.Linear:
        weight = module._parameters.get("weight")
        out_features, in_features = (module.out_features, module.in_features) if weight is None else weight.shape
    else:
        in_features, out_features = max(own_matrices(module).values(), key=torch.numel).shape
    linear: Any
    (linear,) = of_module(linear_operations((out_features, in_features), False), name)
    with autocast(recipe=recipe, _graph=True):
        linear.reset_recipe_state(recipe=recipe)
    return linear, (out_features, in_features)


def _misfit(module: Any, recipe: Any, name: str) -> str | None:
    """Why a linear layer's sizes do not fit a recipe, given as many input rows as the recipe asks for."""
    rows = get_align_size_for_quantization(recipe)
    linear, (out_features, in_features) = _linear_under(module, recipe, name)
    wide, high = f"K = in_features = {in_features}", f"M = out_features = {out_features}"
    operands = [
        ("forward", 0, (rows, in_features), f"an input with {wide}"),
        ("forward", 1, (out_features, in_features), f"a weight with {high} and {wide}"),
    ]
    if recipe.backward_override is None:
        operands.append(("backward", 0, (rows, out_features), f"a grad_output with K = out_features = {out_features}"))
    for mode, index, shape, described in operands:
        try:
            linear.get_quantizer(mode, index).check_shape(shape)
        except ValueError as error:
            rule, _, _ = str(error).partition("; got")
            return f"{rule}; got {described}, which pad does not change"
    return None


def weights_refused_on_gpus(modules: Iterable[tuple[torch.nn.Module, Recipe, str]]) -> list[str]:
    """`refused_on_gpus` of linear layers by what is known before a call: the shapes of their weights.

    `modules`: what is converted, with recipes and names.
    """
    weights = []
    for module, recipe, name in modules:
        if issubclass(conversion_of(module) or object, ConvertedProduct):
            linear, shape = _linear_under(module, recipe, name)
            if isinstance(linear.get_quantizer("forward", 1), FP8_QUANTIZERS):
                weights.append((name, "weight", shape))
    return refused_on_gpus(weights, pad=True)


def refused_on_gpus(operands: Iterable[tuple[str, str, Sequence[int]]], *, pad: bool) -> list[str]:
    """Layer, tensor and shape of an operand of each layer whose products a GPU refuses; of its weight first.

    Args:
        operands: layer, tensor and shape of what `FP8_QUANTIZERS` quantize.
        pad: rows are appended where there are too few.
    """
    found: dict[str, str] = {}
    for layer, tensor, (*leading, last) in sorted(operands, key=lambda operand: not operand[1].startswith("weight")):
        sizes = [last] if pad and not tensor.startswith("weight") else [math.prod(leading), last]
        if any(size % MULTIPLE_ON_GPUS for size in sizes):
            found.setdefault(layer, f"{name_of(layer, tensor)} {dimensions((*leading, last))}")
    return list(found.values())


def refusal_on_gpus(operands: Sequence[str], where: str = "") -> str:
    """The sentence about what `refused_on_gpus` found, under the recipes that `where` names."""
    named = [*operands[:MOST_NAMED], *([f"{len(operands) - MOST_NAMED} more"] if len(operands) > MOST_NAMED else [])]
    return (
        f"On a GPU TE refuses FP8 products{where} with a size that is no multiple of {MULTIPLE_ON_GPUS}: "
        f"{', '.join(named)}. Here they are emulated."
    )
