"""Scales and amax histories of delayed scaling in converted models."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fuser.conversion.modules import ConvertedProduct, require_module
from fuser.recipe import Recipe
from refops.arguments import did_you_mean, shown


def scaling_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales and amax histories of delayed scaling in a converted model, to be saved beside its state dict.

        torch.save({"model": model.state_dict(), "scaling": fuser.scaling_state(model)}, path)

    Args:
        model: a module with layers that `convert` made. Operations of `fuser.ops` have theirs in the state dict.

    Returns:
        Name of each linear layer that delayed scaling quantizes -> the extra state of its operation, 1-D uint8 on the
        CPU (`fuser.extra_state`); empty of a layer that was not called yet. No names under recipes that keep nothing
        from step to step.

    Raises:
        TypeError: `model` is no module.
    """
    require_module(model)
    states = {
        name: torch.empty(0, dtype=torch.uint8)
        if module._pipeline is None
        else module._pipeline._basic_ops[0].get_extra_state()
        for name, module in model.named_modules()
        if isinstance(module, ConvertedProduct)
    }
    delayed = delayed_layers(model)
    return {name: state for name, state in states.items() if name in delayed or state.numel()}


def delayed_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The linear layers that `convert` put under delayed scaling, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ConvertedProduct) and module.recipe is not None and module.recipe.delayed()
    }


def warn_of_lost_scales(model: torch.nn.Module, recipes: Mapping[Any, Recipe]) -> None:
    """Warn of the delayed scales that a step has set in a model and that its layers lose under `recipes`.

    A recipe of another class starts anew at the next call, and torch's modules have no scales.
    """
    lost = []
    for name, module in model.named_modules():
        if not isinstance(module, ConvertedProduct) or module._pipeline is None:
            continue
        linear: Any = module._pipeline._basic_ops[0]
        before = linear.delayed_recipe()
        if before is not None and not isinstance(recipes.get(module), type(before)):
            lost.append(name or type(module).__name__)
    if lost:
        warnings.warn(
            f"the scales and amax histories of delayed scaling of {shown(lost)} are dropped. To keep them, call state "
            "= fuser.scaling_state(model) before this, and fuser.load_scaling_state(model, state) once these layers "
            "are under DelayedScaling again. Or convert a copy, inplace=False, also where a CustomRecipe keeps scales",
            UserWarning,
            stacklevel=3,
        )


def load_scaling_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give a converted model the scales and amax histories that `scaling_state` returned.

    Args:
        model: converted under delayed scaling. Of a wrapper that adds to the names, as `AveragedModel`, the module
            inside.
        state: as returned, in memory or from `torch.load(weights_only=True)`. For a part of the layers it is
            `{**scaling_state(model), **part}`: the others keep what they have.

    Raises:
        TypeError: `model` is no module, or `state` no mapping.
        ValueError: `state` names what is no linear layer of `model` under delayed scaling, or lacks one that is.
            Nothing is loaded then.
        RuntimeError: a tensor is no extra state of such a layer.
    """
    require_module(model)
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a mapping from names to tensors; got {shown(state)}")
    modules, delayed = dict(model.named_modules(remove_duplicate=False)), delayed_layers(model)
    none = "" if delayed else "; model has no such layer: convert it first, under DelayedScaling"
    taken = set(delayed.values())
    for name in state:
        module = modules.get(name)
        if module not in taken:
            raise ValueError(
                "state must name linear layers that convert put under delayed scaling; got "
                f"{name!r}{did_you_mean(name, modules) if module is None else f', which is {module}'}{none}"
            )
    named = {modules[name] for name in state}
    missing = [name for name, module in delayed.items() if module not in named]
    if missing:
        raise ValueError(
            "state must have each linear layer that convert put under delayed scaling, since others would go on with "
            f"the scales that they have, 1 if nothing has set them; got none for {shown(missing)}"
        )
    for name, saved in state.items():
        linear: Any = modules[name]
        linear.pipeline()._basic_ops[0].set_extra_state(saved)
