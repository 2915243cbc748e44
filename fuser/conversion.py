"""`convert`: a model of torch's modules computes with operations of this package, under a recipe bound to each module.

A module that is converted stays the object that it was, with its parameters, hooks, attributes and name. Only its class
changes, to a subclass of torch's whose forward runs operations. They read the module's parameters at every call, so
whatever replaces these (`.to()`, `load_state_dict(assign=True)`, `torch.func.functional_call`, a weight norm) is seen.
The operations are no submodules: state dicts and parameter names are those of the model as it was.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import itertools
import math
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from fuser import ops
from fuser.dispatch import computes_in
from fuser.fuser import OperationFuser
from fuser.op import BasicOperation, FusibleOperation
from fuser.quantization.contexts import (
    autocast,
    get_align_size_for_quantization,
    quantized_model_init,
)
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.quantizers import is_replaying, notes_scales
from fuser.quantization.state import FP8GlobalStateManager
from fuser.recipe import Recipe, _expression_of
from fuser.sequential import HoldsFusers, fusers_of
from fuser.tracing import (
    OLD_TORCH,
    NotScriptable,
    WhenTraced,
    leave_for,
    outside_compile,
    refuse_proxy,
    refuse_strict_export,
)
from refops.arguments import did_you_mean, require_flag, shown, with_article
from refops.scalings import Scaling
from refops.survey import match_names

__all__ = [
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

#: What says which recipe a module gets, by its name: one for all, one for each pattern, or a function.
Rule = Recipe | Mapping[str, Recipe | None] | Callable[[str, torch.nn.Module], Recipe | None] | None


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
    | `LayerNorm`, `RMSNorm` with a weight | `ops.LayerNorm`, `ops.RMSNorm`: statistics in float32 |
    | `ReLU`, `SiLU`, `GELU(approximate="tanh")`, none in place | the operation of that name |
    | `Sequential` | itself; neighbours that were converted run as one pipeline, with its fusions |

    Modules stay the same objects, and so do their parameters: optimizers, hooks, tied weights, state dicts and names
    of parameters are not touched. `isinstance(module, torch.nn.Linear)` still holds, and `in_features`,
    `normalized_shape`, `eps` and the like are there. `module.recipe` is what a module quantizes with; it can be
    assigned to, also None. Inside of a `fuser.autocast` of the caller's that one decides, also to switch it off.

    What is not converted: subclasses of these modules, whose forward may do more (LoRA layers, say); convolutions,
    recurrent layers, `Bilinear`; attention's own products in `MultiheadAttention`; `LazyLinear` before its first
    forward; layers whose sizes are not whole blocks of the recipe; modules of others' with matrices of their own
    (parameters of two dimensions and more), embeddings and norms aside. These are named in a warning, since the model
    then computes partly in high precision. The exact GELU, other activations and norms without a weight stay torch's
    without a word: nothing in them is quantized. Functions that a forward calls (`F.linear`, `F.gelu`) can't be seen; a
    parent whose forward says `self.child.weight` of a converted child is named in the warning; one that says
    `self.block.child.weight` or `self.layers[0].weight` is not: `compare` and `statistics` name each layer of which
    nothing was quantized in their runs. The fast path of `TransformerEncoderLayer` in eval
    mode, which reads weights, is switched off where the layer is part of `model`. A layer of which `linear1` and
    `linear2` alone are given to `convert` computes without quantization there.

    An input may have another dtype than a linear layer's weight, which is an error in torch: the output has the
    weight's. In `torch.autocast` a linear layer returns its dtype; norms and activations return the dtype that torch's
    do, so that float32 stays float32, where the operations of `fuser.ops`, as TE's, return autocast's.

    Scales and amax histories of delayed scaling are part of copies and pickles of the model, not of its state dict:
    `scaling_state` has them apart. A warning, once for each call of `convert`, says where a forward pass without
    gradients casts with scales of 1, since no step has set any.
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
    model, left = converted(
        model,
        recipe,
        filter=filter,
        pad=pad,
        inplace=inplace,
        share_parameters=share_parameters,
        strict=strict,
    )
    if left:
        warnings.warn("left in high precision:\n  " + "\n  ".join(left), UserWarning, stacklevel=2)
    return model


def converted(
    model: torch.nn.Module,
    recipe: Rule,
    *,
    filter: Callable[[str, torch.nn.Module], bool] | None = None,
    pad: bool = False,
    inplace: bool = True,
    share_parameters: bool = False,
    strict: bool = False,
) -> tuple[torch.nn.Module, list[str]]:
    """The result of `convert`, without its warning, and a line for each module that stays in high precision."""
    _require_module(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                "model must have Python modules to be converted; got one that torch.jit compiled"
                f"{f' as {name!r}' if name else ''}: convert the model before that"
            )
    for name, flag in (("pad", pad), ("inplace", inplace), ("share_parameters", share_parameters), ("strict", strict)):
        require_flag(flag, name)
    if share_parameters and inplace:
        raise ValueError("share_parameters must come with inplace=False: in place there is only one set of parameters")
    names = _names_of(model)
    recipes = _recipes_for(names, recipe, filter)
    reasons = {
        module: _reason_to_leave(module, chosen, names[module][0])
        for module, chosen in recipes.items()
        if chosen is not None
    }
    left = {module: reason for module, reason in reasons.items() if reason}
    will = {module for module, reason in reasons.items() if reason is None and _may_become(module)}
    problems = [f"{names[module][0] or 'the model'} ({type(module).__name__}): {why}" for module, why in left.items()]
    problems += [
        f"{name or 'the model'} ({type(parent).__name__}) reads {', '.join(read)} in its forward: not quantized there"
        for parent, (name, *_) in names.items()
        if (read := _weights_read_by(parent, will))
    ]
    if problems and strict:
        raise ValueError("strict must be False here: not all is converted:\n  " + "\n  ".join(problems))
    for module in names:
        if isinstance(module, _Converted) and module not in will:
            _class_without_conversion(module)  # raises before anything is changed
    if not inplace:
        memo: dict[int, Any] = (
            {id(parameter): parameter for parameter in model.parameters()} if share_parameters else {}
        )
        duplicate = copy.deepcopy(model, memo)
        copies = dict(zip(model.modules(), duplicate.modules(), strict=True))
        recipes = {copies[module]: chosen for module, chosen in recipes.items()}
        will, model = {copies[module] for module in will}, duplicate
    notice = _Notice()
    for name, module in model.named_modules():
        if module in will:
            _become(module, recipes[module], pad=pad, name=name, notice=notice)
        else:
            _restore(module)
    _convert_containers(model)
    return model, problems


def scaling_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales and amax histories of delayed scaling in a converted model, to be saved beside its state dict.

        torch.save({"model": model.state_dict(), "scaling": fuser.scaling_state(model)}, path)

    Args:
        model: a module with layers that `convert` made. Operations of `fuser.ops` have theirs in the state dict.

    Returns:
        Name of each linear layer that delayed scaling has quantized -> the extra state of its operation, 1-D uint8 on
        the CPU (`fuser.extra_state`). Empty under recipes that keep nothing from step to step.

    Raises:
        TypeError: `model` is no module.
    """
    _require_module(model)
    states = {
        name: module._pipeline._basic_ops[0].get_extra_state()
        for name, module in model.named_modules()
        if isinstance(module, ConvertedLinear) and module._pipeline is not None
    }
    return {name: state for name, state in states.items() if state.numel()}


def load_scaling_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give a converted model the scales and amax histories that `scaling_state` returned.

    Args:
        model: converted under delayed scaling. Of a wrapper that adds to the names, as `AveragedModel`, the module
            inside. Layers that `state` does not name keep what they have.
        state: as returned, in memory or from `torch.load(weights_only=True)`.

    Raises:
        TypeError: `model` is no module, or `state` no mapping.
        ValueError: `state` names what is no linear layer of `model` under delayed scaling. Nothing is loaded then.
        RuntimeError: a tensor is no extra state of such a layer.
    """
    _require_module(model)
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a mapping from names to tensors; got {shown(state)}")
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in state:
        module = modules.get(name)
        if not isinstance(module, ConvertedLinear) or module.recipe is None or not module.recipe.delayed():
            raise ValueError(
                "state must name linear layers that convert put under delayed scaling; got "
                f"{name!r}{did_you_mean(name, modules) if module is None else f', which is {module}'}"
            )
    for name, saved in state.items():
        linear: Any = modules[name]
        linear.pipeline()._basic_ops[0].set_extra_state(saved)


def _require_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {shown(model)}")


# ---------------------------------------------------------------------- who is converted, by which recipe


def _names_of(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Each module with all its names."""
    names: dict[torch.nn.Module, list[str]] = {}
    try:
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
    except RecursionError:
        raise ValueError(
            f"model must hold no module that is inside of itself; got {with_article(type(model).__name__)} that does"
        ) from None
    return names


def _recipes_for(
    names: Mapping[torch.nn.Module, list[str]], rule: Rule, filter: Callable[[str, torch.nn.Module], bool] | None
) -> dict[torch.nn.Module, Recipe | None]:
    """The recipe of every module that quantizes, or could."""
    asked = {module: every for module, every in names.items() if isinstance(module, _KINDS) or own_matrices(module)}
    decide = _function_of(rule, names, asked)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function of a name and a module; got {shown(filter)}")
    recipes: dict[torch.nn.Module, Recipe | None] = {}
    for module, every in asked.items():
        kept = [filter is None or bool(filter(name, module)) for name in every]
        if len(set(kept)) > 1:
            raise ValueError(f"filter must say the same for all names of a module; {every} are one module, got {kept}")
        chosen = [decide(name, module) if kept[0] else None for name in every]
        if any(one != chosen[0] for one in chosen):
            raise ValueError(f"recipe must be the same for all names of a module; {every} are one module, got {chosen}")
        if chosen[0] is not None:
            require_recipe(chosen[0], f"recipe of {every[0]!r}" if every[0] else "recipe")
        recipes[module] = chosen[0]
    return recipes


def _function_of(
    rule: Rule, names: Mapping[torch.nn.Module, list[str]], asked: Mapping[torch.nn.Module, list[str]]
) -> Callable[[str, torch.nn.Module], Recipe | None]:
    """The rule as a function. `names`: of all modules; `asked`: of those that may get a recipe."""
    if isinstance(rule, Mapping):
        return _function_of_patterns(dict(rule), names, asked)
    if rule is None or isinstance(rule, Recipe):
        return lambda name, module: rule
    if not callable(rule) or recipe_hint(rule):
        raise TypeError(
            f"recipe must be a recipe, a mapping, a function or None; got {_shortly(rule)}{recipe_hint(rule)}"
        )
    return rule


def _function_of_patterns(
    patterns: dict[Any, Any],
    names: Mapping[torch.nn.Module, list[str]],
    asked: Mapping[torch.nn.Module, list[str]],
) -> Callable[[str, torch.nn.Module], Recipe | None]:
    """The first pattern that matches decides; each must decide for some module that it makes a difference to."""
    modules = {name: module for module, every in asked.items() for name in every}
    matched = {pattern: _matched(pattern, names, list(modules)) for pattern in patterns}
    if not matched:
        raise ValueError("recipe must have at least one pattern of names; got {}")
    deciding = {name: next((p for p, found in matched.items() if name in found), None) for name in modules}
    for pattern, recipe in patterns.items():
        decided = [name for name, by in deciding.items() if by == pattern]
        if not decided:
            others = ", ".join(repr(p) for p in dict.fromkeys(deciding[name] for name in matched[pattern]))
            raise ValueError(
                "recipe must have patterns that decide, and the first that matches does; "
                f"got {pattern!r} behind {others}, which decides for all that it matches"
            )
        kept = [modules[name] for name in decided if _may_become(modules[name]) or _has_products(modules[name])]
        if recipe is not None and not kept:
            kinds = ", ".join(dict.fromkeys(repr(modules[name]) for name in decided))
            raise ValueError(
                f"recipe must be None for modules that are never converted; got one for {pattern!r}, which is {kinds}"
            )
    return lambda name, module: patterns.get(deciding[name])


def _matched(pattern: Any, names: Mapping[torch.nn.Module, list[str]], asked: list[str]) -> set[str]:
    """The names that a pattern matches, and those inside a module that it names."""
    if not isinstance(pattern, str):
        hint = "; what goes by class is a function of name and module" if isinstance(pattern, type) else ""
        raise TypeError(f"recipe must have patterns of names as keys, as 'encoder.*'; got {shown(pattern)}{hint}")
    every = {name for those in names.values() for name in those}
    inside = f"{pattern}." if pattern else ""
    found = {name for name in asked if pattern in every and (name == pattern or name.startswith(inside))}
    with contextlib.suppress(LookupError):
        found |= set(match_names([pattern], asked))
    if not found:
        hint = did_you_mean(pattern, asked)
        if not hint and (".*" in pattern[:-2] or set(pattern) & set("^$|()\\+")):
            hint = "; '*' stands for any characters, regular expressions are not taken"
        raise ValueError(
            "recipe must have patterns that match names of linear layers, norms, activations or other modules that "
            f"multiply; got {pattern!r}{hint}"
        )
    return found


def require_recipe(value: Any, argument: str) -> None:
    """`TypeError` unless `value` is a recipe."""
    if not isinstance(value, Recipe):
        raise TypeError(f"{argument} must be a recipe of fuser.recipe; got {_shortly(value)}{recipe_hint(value)}")


def recipe_hint(value: Any) -> str:
    """What an error adds about a value that stands for a recipe and is none; "" for a function."""
    if isinstance(value, Scaling) or (isinstance(value, type) and issubclass(value, Scaling)):
        return "; BlockScaledRecipe(scaling) makes a recipe of a scaling with blocks"
    if isinstance(value, type):
        return f"; make one of the class: {value.__name__}()"
    if isinstance(value, Quantizer):
        return "; CustomRecipe(qfactory=...) makes a recipe of quantizers"
    if isinstance(value, str | torch.dtype):
        return f"; make one, such as {_expression_of(value) or 'fuser.recipe.MXFP8BlockScaling()'}"
    return "; a module is not a recipe" if isinstance(value, torch.nn.Module) else ""


def _shortly(value: Any) -> str:
    return with_article(type(value).__name__) if isinstance(value, torch.nn.Module) else shown(value)


def _torch_class(module: torch.nn.Module) -> type:
    """The class of a module without its conversion and parametrizations."""
    cls = type(module)
    if isinstance(module, _Converted):
        return next(base for base in cls.__mro__ if base in CONVERTED)
    return cls.__bases__[0] if parametrize.is_parametrized(module) else cls


def _reason_to_leave(module: torch.nn.Module, recipe: Recipe, name: str) -> str | None:
    """Why products of a module stay in high precision despite a recipe; None if they do not."""
    cls = _torch_class(module)
    if cls is torch.nn.Linear:
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        dtype = next(module.parameters()).dtype  # without computing a weight that is parametrized
        if not dtype.is_floating_point or dtype == torch.float64:
            return f"operations take float32, float16 and bfloat16; its weight is {dtype}"
        return _misfit(module, recipe, name)
    if isinstance(module, torch.nn.LazyLinear):
        return "its sizes are not known before its first forward; convert it after that"
    if _is_a(module, "torch.distributed.fsdp", "FSDPModule") and cls.__bases__[-1] in CONVERTED:
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


def _has_products(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Linear, torch.nn.MultiheadAttention, *_OTHER_PRODUCTS)) or bool(
        own_matrices(module)
    )


def _misfit(module: Any, recipe: Any, name: str) -> str | None:
    """Why a linear layer's sizes do not fit a recipe, given as many input rows as the recipe asks for."""
    rows = get_align_size_for_quantization(recipe)
    weight = module._parameters.get("weight")
    out_features, in_features = (module.out_features, module.in_features) if weight is None else weight.shape
    (linear,) = _of_module(_linear_operations((out_features, in_features), False), name)
    with autocast(recipe=recipe, _graph=True):
        linear.reset_recipe_state(recipe=recipe)
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


#: What a parent may read of a weight without multiplying by it.
_FACTS = {
    *("device", "dtype", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_meta", "is_cuda"),
    *("is_cpu", "is_floating_point", "is_contiguous", "stride", "itemsize", "element_size", "nbytes", "__class__"),
    *("norm", "std", "var", "isfinite"),
}
#: Functions that say such a thing of what they are called with.
_QUESTIONS = {"isinstance", "hasattr", "type", "id", "is_tensor", "is_floating_point"}


def _weights_read_by(parent: torch.nn.Module, converted: set[torch.nn.Module]) -> list[str]:
    """`child.weight` of each converted child whose weight or bias the parent's forward, or what it calls, reads."""
    children = {name for name, child in parent.named_children() if child in converted}
    if not children:
        return []
    found: dict[str, None] = {}
    pending, seen = ["forward"], set()
    while pending:
        method = pending.pop()
        if method in seen:
            continue
        seen.add(method)
        for tree in _sources_of(type(parent), method):
            nodes = list(ast.walk(tree))
            attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
            only_asked = {id(node.value) for node in attributes if node.attr in _FACTS}
            for node in nodes:
                if isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                    only_asked |= {id(node.left), *map(id, node.comparators)}
                if isinstance(node, ast.Call) and _name_of(node.func) in _QUESTIONS:
                    only_asked |= set(map(id, node.args))
            only_asked |= _stored_to_be_asked(nodes, only_asked)
            for node in attributes:
                if _is_self(node.value):
                    pending.append(node.attr)
                owner = node.value
                if not (isinstance(owner, ast.Attribute) and _is_self(owner.value) and owner.attr in children):
                    continue
                if node.attr in ("weight", "bias") and isinstance(node.ctx, ast.Load) and id(node) not in only_asked:
                    found[f"{owner.attr}.{node.attr}"] = None
    return list(found)


def _stored_to_be_asked(nodes: list[ast.AST], only_asked: set[int]) -> set[int]:
    """The values of local names of which only attributes such as the shape are read."""
    used = {node.id for node in nodes if isinstance(node, ast.Name) and _is_loaded(node) and id(node) not in only_asked}
    return {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        and all(isinstance(target, ast.Name) and target.id not in used for target in node.targets)
    }


def _name_of(function: ast.expr) -> str:
    """The last part of what is called: "is_tensor" of `torch.is_tensor`."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_loaded(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _sources_of(cls: type, method: str) -> Iterator[ast.AST]:
    """The source of a method of a module's class, and of the overridden methods that it calls.

    torch's that read weights on a fast path do not count: it is switched off.
    """
    for base in cls.__mro__:
        if method not in vars(base) or base in (torch.nn.Module, *_FAST_PATHS):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(vars(base)[method])))
        except (OSError, TypeError, SyntaxError):  # no function of Python's, or one without a source
            return
        yield tree
        if not any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(tree)):
            return


# ---------------------------------------------------------------------- what they become


_COMPUTED = (
    "operations of fuser can't be part of a graph: a weight or bias is no plain parameter, but a tensor that "
    "a parametrization, a weight norm, FSDP or functional_call put in its place"
)
_REPLACED = (
    "operations of fuser can't be part of a graph: a parameter was replaced in the compiled function, "
    "as by functional_call"
)


class _Notice:
    """Whether a module of those that one call of `convert` converted has warned of scales that nothing has set."""

    given = False


class _Converted(HoldsFusers, NotScriptable, torch.nn.Module):
    """Mixin of the classes that modules get: their forward runs operations, which read the module's parameters."""

    recipe: Recipe | None
    pad: bool
    _name: str
    _pipeline: OperationFuser | None
    _ready: WhenTraced
    _notice: _Notice
    _made_for: tuple[Any, ...]
    _make_operations: Callable[..., list[BasicOperation]]

    def extra_repr(self) -> str:
        """torch's text, the recipe's class, and the card where the recipe names one."""
        recipe = self.recipe and type(self.recipe).__name__
        card = f"products={self.recipe.products!r}" if self.recipe and self.recipe.products else ""
        return ", ".join(filter(None, [super().extra_repr(), f"recipe={recipe}", card]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Like the forward of torch's module, under the module's recipe or that of the `autocast` around the call."""
        refuse_proxy(input, self)
        if not _in_graph():
            return outside_compile(_run_eagerly, self, input)
        reason = self._why_outside()
        return outside_compile(self._run, input, reason=reason) if reason else self._run(input)

    def _run(self, input: torch.Tensor) -> torch.Tensor:
        if not self.takes(input):
            return super().forward(input)
        if not _in_graph():
            _refuse_distributed([self], input)
            _warn_of_first_scales([self])
        with self.quantizing():
            return self._call_operations(input)

    def _call_operations(self, input: torch.Tensor) -> torch.Tensor:
        return self._present_pipeline()(input)

    def takes(self, input: torch.Tensor) -> bool:
        """Whether operations compute this input; torch computes what they can't: shapes without values and float64."""
        return isinstance(input, torch.Tensor) and not input.is_meta and computes_in(input.dtype)

    def _has_values(self) -> bool:
        """Whether no parameter is on the meta device. Computed ones are not looked at: each access may differ."""
        parameters = self.parameters() if self._modules else self._parameters.values()
        return not any([value is not None and value.is_meta for value in parameters])

    def pipeline(self) -> OperationFuser:
        """The operations that stand for this module, with the parameters that it has now."""
        present = {name: value for name in ("weight", "bias") if (value := getattr(self, name, None)) is not None}
        facts = [(name, value.device, value.shape) for name, value in present.items()]
        made_for = (facts, self._settings(present))
        if self._pipeline is None or self._made_for != made_for:
            self._pipeline = OperationFuser(_of_module(self._make_operations(present), self._name))
            self._made_for = made_for
        for basic in self._pipeline._basic_ops:
            for name in basic._parameters.keys() & present.keys():
                basic._parameters[name] = present[name]
        return self._pipeline

    def _present_pipeline(self) -> OperationFuser:
        """`pipeline()`; while torch.compile traces, the one that was made before."""
        return self._pipeline if _in_graph() else self.pipeline()  # type: ignore[return-value]

    def _prepare(self) -> str:
        """Make the pipeline for a compiled call. Returns why there can't be one, or ""."""
        leave_for(_REPLACED)
        _warn_of_first_scales([self])
        values = [value for op in self.pipeline()._basic_ops for value in op._parameters.values()]
        plain = all(type(value) in (torch.nn.Parameter, type(None)) for value in values)
        return "" if plain else leave_for(_COMPUTED)

    def _why_outside(self) -> str:
        """Why a call that is traced can't be part of the graph; "" if it can."""
        reason = self._ready.value
        if reason:
            return reason
        for op in self._pipeline._basic_ops:  # type: ignore[union-attr]
            for name, value in op._parameters.items():
                present = getattr(self, name, None)
                if present is not None and present is not value:
                    return _REPLACED
        return ""

    def _settings(self, present: dict[str, torch.Tensor]) -> Any:
        """The other arguments of its operations; `present`: its weight and bias."""
        return ()

    def fusers(self) -> list[tuple[OperationFuser, Recipe | None]]:
        """The pipeline of its operations, with its recipe."""
        return [(self.pipeline(), self.recipe)]

    def quantizing(self) -> contextlib.AbstractContextManager[Any]:
        """The `autocast` in which this module computes: the caller's, if there is one, else its own."""
        if FP8GlobalStateManager._of_thread.state.autocast_depth:
            return contextlib.nullcontext()
        if not torch.compiler.is_dynamo_compiling():
            self._refuse_computing_again()
        return autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def _refuse_computing_again(self) -> None:
        """`RuntimeError` if autograd calls a module whose quantization is not that of its last call.

        Calls of `fuser.checkpoint`, and in an `autocast`, have that.
        """
        if torch._C._current_graph_task_id() == -1 or is_replaying() or self._pipeline is None:
            return
        key: Any = self._pipeline._basic_ops[0]._recipe_key
        before = None if key is None else key[0]
        present = None if self.recipe is None else repr(self.recipe)
        if before == present and (self.recipe is None or not self.recipe.delayed()):
            return
        why = "with scales that were updated since" if before == present else "under another recipe than"
        raise RuntimeError(
            f"{self._name or type(self).__name__} is computed again in the backward pass, {why} its forward pass: use "
            "fuser.checkpoint instead of torch.utils.checkpoint.checkpoint, with any use_reentrant"
        )


#: How many rows a linear layer's input has before the ones that `pad` appends, while its operations run forward, for
#: who observes them; None: nothing was appended.
rows_before_padding: ContextVar[int | None] = ContextVar("fuser_rows_before_padding", default=None)


@contextlib.contextmanager
def _padding(rows: int) -> Iterator[None]:
    token = rows_before_padding.set(rows)
    try:
        yield
    finally:
        rows_before_padding.reset(token)


def _refuse_distributed(modules: Iterable[_Converted], input: torch.Tensor) -> None:
    """`RuntimeError` for a parameter or an input that is a DTensor: operations would compute with this rank's part."""
    given = [("input", input), *itertools.chain.from_iterable(module._parameters.items() for module in modules)]
    for name, value in given:
        if _is_a(value, "torch.distributed.tensor", "DTensor"):
            raise RuntimeError(
                f"operations of a converted model take plain tensors; got a DTensor as {name}, as parallelize_module "
                "makes them for tensor parallelism. Shard with fully_shard or DistributedDataParallel, write the layer "
                "as fuser.ops.Linear(tensor_parallel_mode=...), or leave it to torch by the filter of convert"
            )


def _is_a(value: Any, home: str, name: str) -> bool:
    """Whether a value is of a class of a module, which there is none of before that is imported."""
    return isinstance(value, getattr(sys.modules.get(home), name, ()))


def _warn_of_first_scales(modules: Iterable[_Converted]) -> None:
    """Warn once if a forward pass without gradients, of modules by their own recipes, casts with scales of 1.

    Such a pass updates no scales, so that those after it do the same. Not in `fuser.checkpoint`, whose reentrant kind
    runs without gradients first.
    """
    if torch.is_grad_enabled() or notes_scales() or FP8GlobalStateManager._of_thread.state.autocast_depth:
        return
    if FP8GlobalStateManager.fp8_graph_capturing():
        return
    for module in modules:
        is_delayed = isinstance(module, ConvertedLinear) and module.recipe is not None and module.recipe.delayed()
        if not is_delayed or module._notice.given:
            continue
        operations: list[Any] = [] if module._pipeline is None else module._pipeline._basic_ops
        if not operations or operations[0]._has_first_scales():
            module._notice.given = True
            warnings.warn(
                f"{module._name or type(module).__name__}: delayed scaling has seen no step, so its scales are still "
                "1, and small values become zero. A forward pass without gradients does not change that. First call "
                "the model with gradients enabled, as many times as it has linear layers in a row, or load scales: "
                "fuser.load_scaling_state, or a pickled model (the state dict has none)",
                UserWarning,
                stacklevel=2,
            )


def _run_eagerly(module: Any, input: Any) -> Any:
    """Call a module outside of a graph. Errors about input that `convert` can fix say how."""
    if isinstance(input, torch.Tensor) and input.is_nested:
        raise RuntimeError(
            f"input of {type(module).__name__} must be no nested tensor: those come from the fast path of a "
            "TransformerEncoder in eval mode, which convert switches off where it gets the encoder, not a layer of it"
        )
    try:
        return module._run(input)
    except ValueError as error:
        if "M % " in str(error) and "pad=True" not in str(error):
            error.args = (f"{error}; fuser.convert(..., pad=True) pads M of linear layers", *error.args[1:])
        raise


class ConvertedLinear(_Converted, torch.nn.Linear):
    """`torch.nn.Linear` as `ops.BasicLinear` and `ops.Bias`; see `convert`."""

    def _make_operations(self, present: dict[str, torch.Tensor]) -> list[BasicOperation]:
        return _linear_operations(present["weight"].shape, "bias" in present)

    def takes(self, input: torch.Tensor) -> bool:
        """An input with a dtype that operations don't take is an error: nothing stays in high precision unnoticed."""
        return isinstance(input, torch.Tensor) and not input.is_meta and self._has_values()

    def rows_short_of_blocks(self, input: torch.Tensor) -> int:
        """How many rows of zeros `pad` appends to an input under the recipe in force; 0 without one."""
        if not self.pad or not FP8GlobalStateManager.is_fp8_enabled():
            return 0
        return -math.prod(input.shape[:-1]) % get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())

    def _call_operations(self, input: torch.Tensor) -> torch.Tensor:
        short = self.rows_short_of_blocks(input)
        if not short:
            return self._present_pipeline()(input)
        rows = input.reshape(-1, input.shape[-1])
        with contextlib.nullcontext() if _in_graph() else _padding(rows.shape[0]):
            y = self._present_pipeline()(torch.nn.functional.pad(rows, (0, 0, 0, short)))
        return y[: rows.shape[0]].view(*input.shape[:-1], y.shape[-1])


class _ConvertedNorm(_Converted):
    def _settings(self, present: dict[str, torch.Tensor]) -> Any:
        module: Any = self
        return module.eps, tuple(module.normalized_shape), present["weight"].dtype

    def _make_operations(self, present: dict[str, torch.Tensor]) -> list[BasicOperation]:
        module: Any = self
        op = getattr(ops, _torch_class(module).__name__)(
            module.normalized_shape,
            eps=torch.finfo(torch.float32).eps if module.eps is None else module.eps,
            device=present["weight"].device,
            dtype=present["weight"].dtype,
        )
        return [op.requires_grad_(False)]  # a bias that the module does not have stays zero

    def takes(self, input: torch.Tensor) -> bool:
        """Not in 16 bits without eps: the default that torch adds then has changed between versions."""
        module: Any = self
        return super().takes(input) and self._has_values() and (module.eps is not None or input.itemsize == 4)


class ConvertedLayerNorm(_ConvertedNorm, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` as `ops.LayerNorm`; see `convert`."""


class ConvertedRMSNorm(_ConvertedNorm, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` as `ops.RMSNorm`; see `convert`."""


class _ConvertedActivation(_Converted):
    def _make_operations(self, present: dict[str, torch.Tensor]) -> list[BasicOperation]:
        return [getattr(ops, _torch_class(self).__name__)()]


class ConvertedGELU(_ConvertedActivation, torch.nn.GELU):
    """`torch.nn.GELU(approximate="tanh")` as `ops.GELU`; see `convert`."""


class ConvertedReLU(_ConvertedActivation, torch.nn.ReLU):
    """`torch.nn.ReLU` as `ops.ReLU`; see `convert`."""


class ConvertedSiLU(_ConvertedActivation, torch.nn.SiLU):
    """`torch.nn.SiLU` as `ops.SiLU`; see `convert`."""


class ConvertedSequential(HoldsFusers, NotScriptable, torch.nn.Sequential):
    """`torch.nn.Sequential` in which neighbours that were converted run as one pipeline; see `convert`.

    A module with hooks runs by itself, for torch to run the hooks, and so does a linear layer whose input is padded.
    """

    _joined: WhenTraced
    _pipelines: dict[tuple[int, int], OperationFuser]

    def forward(self, input: Any) -> Any:
        """Like the forward of torch's container."""
        refuse_proxy(input, self)
        return self._run(input) if _in_graph() else outside_compile(_run_eagerly, self, input)

    def _run(self, input: Any) -> Any:
        children: list[Any] = list(self)
        joined = self._joined.value if _in_graph() else _joining(children)
        x, start = input, 0
        while start < len(children):
            stop = _end_of_run(children, joined, start)
            if stop - start > 1 and not children[start].takes(x):
                stop = start + 1
            if stop - start > 1 and self._is_padded(children[start:stop], x):
                stop = _end_of_run(children, joined, start, padded=True)
            x = self._run_pipeline(x, start, stop) if stop - start > 1 else children[start](x)
            start = stop
        return x

    def _is_padded(self, run: list[_Converted], x: torch.Tensor) -> bool:
        with run[0].quantizing():
            return any([isinstance(child, ConvertedLinear) and child.rows_short_of_blocks(x) > 0 for child in run])

    def _run_pipeline(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        run: list[Any] = list(self)[start:stop]
        if not _in_graph():
            _refuse_distributed(run, x)
            _warn_of_first_scales(run)
            with run[0].quantizing():
                return self._pipeline_of(start, stop)(x)
        for child in run:
            reason = child._why_outside()
            if reason:
                return outside_compile(self._run_pipeline, x, start, stop, reason=reason)
        with run[0].quantizing():
            return self._pipelines[start, stop](x)

    def _prepare(self) -> tuple[bool, ...]:
        """Make the pipelines that a compiled call may need. Returns which children join the ones before them."""
        children = list(self)
        joined = _joining(children)
        for start in range(len(children)):
            if joined[start] and joined[start - 1] and not any(map(_pads, children)):
                continue  # runs begin at their first, or after it if its dtype leaves that to torch
            for padded in (False, True):
                stop = _end_of_run(children, joined, start, padded=padded)
                if stop - start > 1:
                    self._pipeline_of(start, stop)
        return joined

    def fusers(self) -> list[tuple[OperationFuser, Recipe | None]]:
        """The fusers of the runs of converted modules in it, and of its other children."""
        found: list[tuple[OperationFuser, Recipe | None]] = []
        children: list[Any] = list(self)
        joined, start = _joining(children), 0
        while start < len(children):
            first, stop = children[start], _end_of_run(children, joined, start)
            is_run = stop - start > 1
            found += [(self._pipeline_of(start, stop), first.recipe)] if is_run else fusers_of(first)
            start = stop
        return found

    def _pipeline_of(self, start: int, stop: int) -> OperationFuser:
        """The pipeline of a run of children, with the operations and parameters that they have now."""
        run: list[Any] = list(self)[start:stop]
        operations = [op for child in run for op in child.pipeline()._basic_ops]
        pipeline = self._pipelines.get((start, stop))
        if pipeline is None or pipeline._basic_ops != operations:
            pipeline = self._pipelines[start, stop] = OperationFuser(operations)
        return pipeline


def _joining(children: list[Any]) -> tuple[bool, ...]:
    """For each child, whether it may run in one pipeline with the one before it."""
    if torch.nn.modules.module._has_any_global_hook():
        return (False,) * len(children)
    runs = list(map(_runs_in_pipelines, children))
    return tuple(
        i > 0 and runs[i - 1] and runs[i] and children[i - 1].recipe == child.recipe and _takes_all_dtypes(child)
        for i, child in enumerate(children)
    )


def _runs_in_pipelines(child: Any) -> bool:
    if not isinstance(child, _Converted) or "forward" in vars(child):
        return False
    hooked = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks
    return not hooked and not any(value is not None and value.is_meta for value in child._parameters.values())


def _takes_all_dtypes(child: Any) -> bool:
    """False for a norm without eps: the operations before it decide which dtype it gets."""
    return getattr(child, "eps", 0) is not None


def _pads(child: Any) -> bool:
    return isinstance(child, ConvertedLinear) and child.pad


def _end_of_run(children: list[Any], joined: tuple[bool, ...], start: int, *, padded: bool = False) -> int:
    """The end of the children that run as one pipeline from `start` on. `padded`: those that pad run by themselves."""
    stop = start + 1
    while (
        stop < len(children) and joined[stop] and not (padded and (_pads(children[stop - 1]) or _pads(children[stop])))
    ):
        stop += 1
    return stop


def _in_graph() -> bool:
    """Whether torch.compile traces this call, and can have pipelines as operators of its graph."""
    if not torch.compiler.is_dynamo_compiling() or OLD_TORCH:
        return False
    refuse_strict_export()
    return True


#: Class of torch -> what its modules become.
CONVERTED: dict[type, type[_Converted]] = {
    cls.__bases__[1]: cls
    for cls in (ConvertedLinear, ConvertedLayerNorm, ConvertedRMSNorm, ConvertedGELU, ConvertedReLU, ConvertedSiLU)
}
#: Modules of torch that multiply by their parameters and are not converted.
_OTHER_PRODUCTS = (
    torch.nn.modules.conv._ConvNd,
    torch.nn.RNNBase,
    torch.nn.RNNCellBase,
    torch.nn.Bilinear,
)
#: Modules whose parameters of several dimensions are not operands of torch's products, or that quantize themselves.
_NO_PRODUCTS = (
    NonDynamicallyQuantizableLinear,  # a part of MultiheadAttention, which is named
    torch.nn.Embedding,
    torch.nn.EmbeddingBag,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.nn.GroupNorm,
    torch.nn.modules.batchnorm._NormBase,
    FusibleOperation,
)
#: Modules that a rule gives recipes to, beside those with matrices of their own.
_KINDS = (*CONVERTED, *_OTHER_PRODUCTS, torch.nn.MultiheadAttention)
#: Attribute that switches off a fast path of torch, which reads the weights of its children: class -> (name, value).
_FAST_PATHS: dict[type, tuple[str, Any]] = {
    torch.nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    torch.nn.TransformerEncoder: ("use_nested_tensor", False),
}


def _linear_operations(weight: Any, with_bias: bool) -> list[BasicOperation]:
    """The operations for a weight of a shape."""
    out_features, in_features = weight
    # On meta: the parameters are the module's, whose values and random numbers are drawn already.
    with quantized_model_init(enabled=False):
        made: list[BasicOperation] = [ops.BasicLinear(in_features, out_features, device="meta")]
    return [*made, ops.Bias(out_features, device="meta")] if with_bias else made


def _of_module(operations: list[BasicOperation], name: str) -> list[BasicOperation]:
    """Operations with the name that a CustomRecipe's roles show, whose scales keep still while others take their turn.

    In `torch.autocast` norms and activations have the dtypes of torch's.

    Each converted module quantizes in a context of its own, and leaving that updates what is registered anywhere.
    """
    for op in operations:
        op.__dict__["name"] = name
        op._keeps_unseen_scales = op._dtypes_of_torch = True
    return operations


def _may_become(module: Any) -> bool:
    """Whether a module computes what the operation does, dtypes and sizes aside."""
    cls = _torch_class(module)
    if cls not in CONVERTED or "forward" in vars(module):
        return False
    if cls is torch.nn.GELU:
        return module.approximate == "tanh"
    return not getattr(module, "inplace", False) and module._parameters.get("weight", module) is not None


#: Attributes that a converted module has. What it had under these names before comes back with torch's class.
_SETTINGS = ("recipe", "pad", "_name", "_pipeline", "_ready", "_notice", "_made_for")


def _become(module: Any, recipe: Any, *, pad: bool, name: str, notice: _Notice) -> None:
    if not isinstance(module, _Converted):
        own = {name: vars(module)[name] for name in _SETTINGS if name in vars(module)}
        module.__class__ = _own_class(module, CONVERTED[_torch_class(module)])
        module._own_attributes = own
        module._pipeline, module._ready = None, WhenTraced(module._prepare)
    elif module._pipeline is not None and module._name != name:  # converted again, as a part of another model
        module._pipeline = _renamed(module._pipeline, name)
    module.recipe, module.pad, module._name, module._notice = recipe, pad, name, notice


def _renamed(pipeline: OperationFuser, name: str) -> OperationFuser | None:
    """A module's pipeline under another name, with its delayed scales; None if a function of names made quantizers."""
    operations: list[Any] = pipeline._basic_ops
    for op in operations:
        suspended = op._suspended_recipe_state
        for metas in (op._fp8_metas, suspended and suspended[0]):
            if any(meta["recipe"].custom() for meta in (metas or {}).values() if meta):
                return None
    _of_module(operations, name)
    return pipeline


def _restore(module: Any) -> None:
    """Give a module torch's class again."""
    if isinstance(module, _Converted):
        module.__class__ = _class_without_conversion(module)
        own = module.__dict__.pop("_own_attributes", {})
        for name in _SETTINGS:
            module.__dict__.pop(name, None)
        module.__dict__.update(own)


def _class_without_conversion(module: _Converted) -> type:
    """`ValueError` if something else changed the class after `convert` did."""
    present = type(module)
    if not parametrize.is_parametrized(module) and present not in CONVERTED.values():
        raise ValueError(
            f"model must hold modules of the classes that convert gave them; one became {present.__name__}"
        )
    return _own_class(module, _torch_class(module))


def _own_class(module: torch.nn.Module, cls: type) -> type:
    """`cls`; of a module with parametrizations a subclass that has its properties for them."""
    if not parametrize.is_parametrized(module):
        return cls
    own = {name: value for name, value in vars(type(module)).items() if name not in ("__dict__", "__weakref__")}
    return type(type(module).__name__, (cls,), own)


def _convert_containers(model: torch.nn.Module) -> None:
    """Let containers follow what their modules have become."""
    for module in model.modules():
        if type(module) in (torch.nn.Sequential, ConvertedSequential):
            neighbours = itertools.pairwise(isinstance(child, _Converted) for child in module.children())
            for name in ("_pipelines", "_joined"):
                module.__dict__.pop(name, None)
            module.__class__ = ConvertedSequential if (True, True) in neighbours else torch.nn.Sequential
            if isinstance(module, ConvertedSequential):
                module._pipelines, module._joined = {}, WhenTraced(module._prepare)
        for cls, (name, value) in _FAST_PATHS.items():
            if isinstance(module, cls):
                _switch(module, name, value, off=any(isinstance(part, _Converted) for part in module.modules()))


def _switch(module: torch.nn.Module, name: str, value: Any, *, off: bool) -> None:
    before = "_before_conversion"
    if off and before not in vars(module) and hasattr(module, name):
        setattr(module, before, getattr(module, name))
        setattr(module, name, value)
    elif not off and before in vars(module):
        setattr(module, name, vars(module).pop(before))
