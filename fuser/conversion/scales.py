"""Scales and amax histories of delayed scaling in converted models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fuser.conversion.modules import ConvertedProduct, require_module
from refops.arguments import did_you_mean, shown


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
    require_module(model)
    states = {
        name: module._pipeline._basic_ops[0].get_extra_state()
        for name, module in model.named_modules()
        if isinstance(module, ConvertedProduct) and module._pipeline is not None
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
    require_module(model)
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a mapping from names to tensors; got {shown(state)}")
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in state:
        module = modules.get(name)
        if not isinstance(module, ConvertedProduct) or module.recipe is None or not module.recipe.delayed():
            raise ValueError(
                "state must name linear layers that convert put under delayed scaling; got "
                f"{name!r}{did_you_mean(name, modules) if module is None else f', which is {module}'}"
            )
    for name, saved in state.items():
        linear: Any = modules[name]
        linear.pipeline()._basic_ops[0].set_extra_state(saved)
