"""`convert`: a model of torch's modules computes with operations of this package, under a recipe bound to each module.

A module that is converted stays the object that it was, with its parameters, hooks, attributes and name. Only its class
changes, to a subclass of torch's whose forward runs operations. They read the module's parameters at every call, so
whatever replaces these (`.to()`, `load_state_dict(assign=True)`, `torch.func.functional_call`, a weight norm) is seen.
The operations are no submodules: state dicts and parameter names are those of the model as it was.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser.conversion.modules import (
    Converted,
    ConvertedConv1D,
    ConvertedGELU,
    ConvertedLayerNorm,
    ConvertedLinear,
    ConvertedReLU,
    ConvertedRMSNorm,
    ConvertedSiLU,
    Notice,
    require_module,
)
from fuser.conversion.reasons import (
    TABLES,
    may_become,
    reason_to_leave,
    refusal_on_gpus,
    weights_refused_on_gpus,
)
from fuser.conversion.rules import Rule, names_of, recipes_for
from fuser.conversion.scales import load_scaling_state, scaling_state, warn_of_lost_scales
from fuser.conversion.sequences import ConvertedSequential
from fuser.conversion.sources import readings_of_weights
from fuser.conversion.switching import become, class_without_conversion, convert_containers, restore
from fuser.fusible import FusibleOperation
from fuser.recipe import Recipe
from refops.arguments import require_flag

__all__ = [
    "ConvertedConv1D",
    "ConvertedGELU",
    "ConvertedLayerNorm",
    "ConvertedLinear",
    "ConvertedRMSNorm",
    "ConvertedReLU",
    "ConvertedSequential",
    "ConvertedSiLU",
    "convert",
    "load_scaling_state",
    "scaling_state",
]


def convert(
    model: torch.nn.Module,
    recipe: Rule,
    *,
    filter: Callable[[str, torch.nn.Module], bool] | None = None,
    pad: bool = False,
    inplace: bool = True,
    share_parameters: bool = False,
    strict: bool = False,
) -> torch.nn.Module:
    """Make the linear layers, norms and activations of a model compute as TransformerEngine does, under a recipe.

        fuser.convert(model, MXFP8BlockScaling())
        loss = model(x).sum()  # quantizes, without autocast
        loss.backward()

    | module of `torch.nn` | becomes |
    |---|---|
    | `Linear` | `ops.BasicLinear`, `ops.Bias`: quantized operands in forward and backward |
    | GPT-2's `Conv1D`: a class of that name | the same, with the weight transposed |
    | `LayerNorm`, `RMSNorm` with a weight | `ops.LayerNorm`, `ops.RMSNorm`: statistics in float32 |
    | `ReLU`, `SiLU`, `GELU(approximate="tanh")`, none in place | the operation of that name |
    | `Sequential` | itself; neighbours that were converted run as one pipeline, with its fusions |

    Modules stay the same objects, and so do their parameters: optimizers, hooks, tied weights, state dicts and names
    of parameters are not touched. `isinstance(module, torch.nn.Linear)` still holds, and `in_features`,
    `normalized_shape`, `eps` and the like are there. `module.recipe` is what a module quantizes with; it can be
    assigned to, also None. Inside of a `fuser.autocast` of the caller's that one decides, also to switch it off.

    A `Conv1D` is tried out: it is converted if it holds no tensors and modules but a weight and a bias, and its forward
    computes `x @ weight + bias` with the other attributes that it has at the time, in training and evaluation.

    What is not converted: subclasses of these modules, whose forward may do more (LoRA layers, say); convolutions,
    recurrent layers, `Bilinear`; attention's own products in `MultiheadAttention`; `LazyLinear` before its first
    forward; layers whose sizes are not whole blocks of the recipe; modules of others' with matrices of their own
    (parameters of two dimensions and more), embeddings and norms aside; operations of `fuser.ops`, which quantize in a
    `fuser.autocast` alone. These are named in a warning, since the model then computes partly in high precision. The
    exact GELU, other activations and norms without a weight stay torch's without a word: nothing in them is quantized.
    Functions that a forward calls (`F.linear`, `F.gelu`) can't be seen. A parent whose forward reads
    `self.child.weight` of a converted child, or of an embedding under one recipe for the whole model, is named in the
    warning; so is one whose source is not known and that may read it. `self.block.child.weight` and
    `self.layers[0].weight` are not found: `compare` and `statistics` name each layer of which nothing was quantized in
    their runs. The fast path of `TransformerEncoderLayer` in eval mode, which reads weights, is switched off where the
    layer is part of `model`. A layer of which `linear1` and `linear2` alone are given to `convert` computes without
    quantization there.

    FP8 layers of sizes that TE and cuBLAS refuse on a GPU, no multiples of 16, are converted, and named in a warning of
    its own; `compare` sees the rows, too.

    An input of another dtype than a linear layer's weight is an error, as in torch; operations of `fuser.ops`, as TE's,
    cast it. In `torch.autocast` a linear layer returns its dtype; norms and activations return the dtype that torch's
    do, so that float32 stays float32, where the operations of `fuser.ops`, as TE's, return autocast's. Norms compute
    with float32 parameters beside an input in 16 bits, as torch's do, where TE's round them to that dtype.

    Scales and amax histories of delayed scaling are part of copies and pickles of the model, not of its state dict:
    `scaling_state` has them apart. `convert(model, None)` drops them, and so does a call under a recipe of
    another class: a warning names the layers that lose scales which a step has set, before anything is changed. `model`
    keeps them where `inplace=False` converts a copy. A warning, once for each call of `convert`, says where a forward
    pass without gradients casts with scales of 1, since no step has set any.
    Shallow copies, by `copy.copy` or for `DataParallel`, share their module's operations: not for several threads.
    Each call of a pipeline is a step of its history: a layer that a model calls twice moves on twice. Under one
    `fuser.autocast` around the model, each moves on once. Activations are computed again in backward by
    `fuser.checkpoint`. torch's own checkpoint is an error under delayed scaling, whose amaxes it would record twice,
    and where its backward is outside of the `autocast` that gave the forward pass another recipe.

    Args:
        model: any module, also a single layer.
        recipe: a recipe of `fuser.recipe`; or a mapping from patterns of names, as `"encoder.*"`, to recipes or None,
            the first that matches a name decides, and a name that none matches gets None; the name of a module, as
            "encoder", stands for all that is in it, too; or a function `(name, module)` to a recipe or None. None: the
            module is torch's, and becomes so again if it was converted before.
        filter: `filter(name, module)` to whether a module may be converted; asked of linear layers, norms, activations
            and whatever else multiplies.
        pad: append rows of zeros to a linear layer's input where the recipe's blocks want more of them
            (`get_align_size_for_quantization`), and drop those of its output. Values of the other rows do not change,
            weight gradients get zeros added. False: such an input is an error under MXFP8, NVFP4 and other blocks.
        inplace: convert `model` itself; False: a copy.
        share_parameters: a copy has the parameters of `model` instead of its own. Buffers are its own.
        strict: `ValueError` in place of the warning.

    Returns:
        `model`, or the copy.

    Raises:
        TypeError: `model` is no module, or torch.jit's; the rule none of these, a pattern no text, or what stands for a
            recipe none.
        ValueError: a pattern decides for no module, or gives a recipe only to what is never converted; one module has
            two names with different recipes; `share_parameters` without `inplace=False`; or `strict` and something
            stays in high precision.
    """
    require_module(model)
    for name, flag in (("pad", pad), ("inplace", inplace), ("share_parameters", share_parameters), ("strict", strict)):
        require_flag(flag, name)
    if share_parameters and inplace:
        raise ValueError("share_parameters must come with inplace=False: in place there is only one set of parameters")
    plan = planned(model, recipe, filter)
    problems = "\n  ".join([*plan.left, *plan.left_to_autocast])
    if problems and strict:
        raise ValueError(f"strict must be False here: not all is converted:\n  {problems}")
    if inplace:
        warn_of_lost_scales(model, plan.recipes)
    if plan.refused_on_gpus:
        warnings.warn(refusal_on_gpus(plan.refused_on_gpus), UserWarning, stacklevel=2)
    model = carried_out(model, plan, pad=pad, inplace=inplace, share_parameters=share_parameters)
    if problems:
        warnings.warn(f"left in high precision:\n  {problems}", UserWarning, stacklevel=2)
    return model


_IN_AUTOCAST = (
    "an operation of fuser.ops, which takes its recipe from a fuser.autocast around its call, not from convert"
)


@dataclass
class Plan:
    """What a rule makes of a model.

    Attributes:
        recipes: of each module that it converts.
        left: a line for each module that stays in high precision despite a recipe.
        left_to_autocast: a line for each operation of `fuser.ops` that a recipe is for: it quantizes in an `autocast`.
        refused_on_gpus: the weights in `recipes` whose FP8 products a GPU refuses for their sizes.
    """

    recipes: dict[torch.nn.Module, Recipe] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    left_to_autocast: list[str] = field(default_factory=list)
    refused_on_gpus: list[str] = field(default_factory=list)


def planned(model: torch.nn.Module, rule: Rule, filter: Callable[[str, torch.nn.Module], bool] | None = None) -> Plan:
    """The plan, of which nothing is carried out. Raises what `convert` does about a model and a rule."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                "model must have Python modules to be converted; got one that torch.jit compiled"
                f"{f' as {name!r}' if name else ''}: convert the model before that"
            )
    names = names_of(model)
    plan = Plan()
    for module, recipe in recipes_for(names, rule, filter).items():
        name = names[module][0]
        reason = recipe and reason_to_leave(module, recipe, name)
        who = f"{name or 'the model'} ({type(module).__name__})"
        if recipe is not None and isinstance(module, FusibleOperation):
            plan.left_to_autocast.append(f"{who}: {_IN_AUTOCAST}")
        elif reason:
            plan.left.append(f"{who}: {reason}")
        elif recipe is not None and may_become(module):
            plan.recipes[module] = recipe
    plan.refused_on_gpus = weights_refused_on_gpus((one, of, names[one][0]) for one, of in plan.recipes.items())
    # A recipe for the whole model is for an output head, too, that multiplies by the table of an embedding.
    tables = {
        module
        for module, (name, *_) in names.items()
        if isinstance(rule, Recipe) and isinstance(module, TABLES) and (filter is None or filter(name, module))
    }
    for parent, (name, *_) in names.items():
        who = f"{name or 'the model'} ({type(parent).__name__})"
        plan.left += [f"{who} {phrase}" for phrase in readings_of_weights(parent, {*plan.recipes, *tables})]
        if isinstance(parent, Converted) and parent not in plan.recipes:
            class_without_conversion(parent)
    return plan


def carried_out(
    model: torch.nn.Module, plan: Plan, *, pad: bool, inplace: bool, share_parameters: bool = False
) -> torch.nn.Module:
    """The model, or a copy, with the modules of a plan converted, and no others."""
    recipes = plan.recipes
    if not inplace:
        values = [value for module in model.modules() for value in vars(module).values()]
        # Computed by autograd, which torch does not copy: a weight that prune or weight_norm sets before each call.
        computed = [value for value in values if isinstance(value, torch.Tensor) and not value.is_leaf]
        memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}
        if share_parameters:
            memo |= {id(parameter): parameter for parameter in model.parameters()}
        duplicate = copy.deepcopy(model, memo)
        copies = dict(zip(model.modules(), duplicate.modules(), strict=True))
        recipes = {copies[module]: recipe for module, recipe in recipes.items()}
        model = duplicate
    notice = Notice()
    for name, module in model.named_modules():
        if module in recipes:
            become(module, recipes[module], pad=pad, name=name, notice=notice)
        else:
            restore(module)
    convert_containers(model)
    return model
