"""Give modules the classes of their conversion, and torch's again."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.utils import parametrize

from fuser.conversion.modules import CONVERTED, Converted, Notice, conversion_of, of_module, torch_class
from fuser.conversion.sequences import ConvertedSequential
from fuser.fuser import OperationFuser
from fuser.tracing import WhenTraced

#: Attribute that switches off a fast path of torch, which reads the weights of its children: class -> (name, value).
FAST_PATHS: dict[type, tuple[str, Any]] = {
    torch.nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    torch.nn.TransformerEncoder: ("use_nested_tensor", False),
}

#: Attributes that a converted module has. What it had under these names before comes back with torch's class.
_SETTINGS = ("recipe", "pad", "_name", "_pipeline", "_ready", "_notice", "_made_for")


def become(module: Any, recipe: Any, *, pad: bool, name: str, notice: Notice) -> None:
    if not isinstance(module, Converted):
        own = {name: vars(module)[name] for name in _SETTINGS if name in vars(module)}
        cls: Any = conversion_of(module)
        module.__class__ = _own_class(module, cls)
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
    of_module(operations, name)
    return pipeline


def restore(module: Any) -> None:
    """Give a module torch's class again."""
    if isinstance(module, Converted):
        module.__class__ = class_without_conversion(module)
        own = module.__dict__.pop("_own_attributes", {})
        for name in _SETTINGS:
            module.__dict__.pop(name, None)
        module.__dict__.update(own)


def class_without_conversion(module: Converted) -> type:
    """`ValueError` if something else changed the class after `convert` did."""
    present = type(module)
    if not parametrize.is_parametrized(module) and present not in CONVERTED.values():
        raise ValueError(
            f"model must hold modules of the classes that convert gave them; one became {present.__name__}"
        )
    return _own_class(module, torch_class(module))


def _own_class(module: torch.nn.Module, cls: type) -> type:
    """`cls`; of a module with parametrizations a subclass that has its properties for them."""
    if not parametrize.is_parametrized(module):
        return cls
    own = {name: value for name, value in vars(type(module)).items() if name not in ("__dict__", "__weakref__")}
    return type(type(module).__name__, (cls,), own)


def convert_containers(model: torch.nn.Module) -> None:
    """Let containers follow what their modules have become."""
    for module in model.modules():
        if type(module) in (torch.nn.Sequential, ConvertedSequential):
            neighbours = itertools.pairwise(isinstance(child, Converted) for child in module.children())
            for name in ("_pipelines", "_joined"):
                module.__dict__.pop(name, None)
            module.__class__ = ConvertedSequential if (True, True) in neighbours else torch.nn.Sequential
            if isinstance(module, ConvertedSequential):
                module.start_pipelines()
        for cls, (name, value) in FAST_PATHS.items():
            if isinstance(module, cls):
                _switch(module, name, value, off=any(isinstance(part, Converted) for part in module.modules()))


def _switch(module: torch.nn.Module, name: str, value: Any, *, off: bool) -> None:
    before = "_before_conversion"
    if off and before not in vars(module) and hasattr(module, name):
        setattr(module, before, getattr(module, name))
        setattr(module, name, value)
    elif not off and before in vars(module):
        setattr(module, name, vars(module).pop(before))
