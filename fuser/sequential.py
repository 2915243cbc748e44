"""A sequence of modules in which neighbouring operations are fused.

Behaviour: TE's ops/sequential.py, except: surplus extra inputs are an error, and hooks of contained operations run.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fuser.channels import check_extra_inputs
from fuser.fuser import OperationFuser
from fuser.op import BasicOperation, FusibleOperation
from fuser.recipe import Recipe
from fuser.tracing import OLD_TORCH, NotScriptable, WhenTraced, refuse_proxy


class Sequential(NotScriptable, torch.nn.Module):
    """Calls modules one after the other, like `torch.nn.Sequential`; each run of `FusibleOperation`s is fused.

    Takes modules, or one dict from names to modules. It works as a list: indexing, slicing (a new container with the
    same modules), `append`, `extend`, `insert`, `pop`, `del`, `+`, `+=`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self._grouped = WhenTraced(self._group)
        self._module_groups: list[OperationFuser | torch.nn.Module] | None = None
        self._modules_of_groups: list[torch.nn.Module] = []
        if len(args) == 1 and isinstance(args[0], dict):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            for module in args:
                self.append(module)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        self._module_groups = None
        super().add_module(name, module)

    # ------------------------------------------------------------------ as a list

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules.values())

    def __getitem__(self, idx: int | slice) -> torch.nn.Module | Sequential:
        keys = self._keys_at(idx)
        if isinstance(idx, slice):
            return self.__class__(*(self._modules[key] for key in keys))
        return self._modules[keys[0]]

    def __setitem__(self, idx: int, module: torch.nn.Module) -> None:
        if isinstance(idx, slice):
            raise TypeError(f"Sequential takes one module at an integer index; got {idx}")
        self._module_groups = None
        self._modules[self._keys_at(idx)[0]] = module

    def __delitem__(self, idx: int | slice) -> None:
        self._module_groups = None
        for key in self._keys_at(idx):
            del self._modules[key]

    def _keys_at(self, idx: int | slice) -> list[str]:
        keys = list(self._modules)
        if isinstance(idx, slice):
            return keys[idx]
        if not -len(keys) <= idx < len(keys):
            raise IndexError(f"Attempted to access index {idx}, but there are {len(keys)} entries")
        return [keys[idx]]

    def _next_key(self) -> str:
        """One above the highest number among the keys; where all are names, as of `torch.nn.Sequential`."""
        numbers = [int(key) for key in self._modules if key.isdecimal()]
        return str(1 + max(numbers) if numbers else len(self._modules))

    def append(self, module: torch.nn.Module) -> Sequential:
        """Add `module` at the end. Returns self."""
        self.add_module(self._next_key(), module)
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Add `modules` at the end. Returns self."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, idx: int, module: torch.nn.Module) -> Sequential:
        """Put `module` before position `idx`; those from there on move up by one key. Returns self."""
        modules = list(self._modules.values())
        modules.insert(idx, module)
        self.append(module)
        self._modules.update(zip(self._modules, modules, strict=True))
        return self

    def pop(self, idx: int | slice) -> torch.nn.Module | Sequential:
        """Remove what is at `idx` and return it."""
        removed = self[idx]
        del self[idx]
        return removed

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(modules)

    def __add__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self.__class__(*self).extend(modules)

    # ------------------------------------------------------------------ running

    @classmethod
    def _make_module_groups(cls, modules: Iterable[torch.nn.Module]) -> list[OperationFuser | torch.nn.Module]:
        """A fuser for each maximal run of operations; other modules as they are."""
        groups: list[Any] = []
        for module in modules:
            if not isinstance(module, FusibleOperation):
                groups.append(module)
            elif groups and isinstance(groups[-1], list):
                groups[-1].append(module)
            else:
                groups.append([module])
        return [OperationFuser(group) if isinstance(group, list) else group for group in groups]

    def _fusers(self) -> list[OperationFuser]:
        """The groups that are runs of operations."""
        return [group for group in self._module_groups or () if isinstance(group, OperationFuser)]

    def _update_groups(self) -> list[OperationFuser]:
        """Group the modules, unless that was done and they are the same. Returns the runs of operations.

        `setattr(model, "0", module)` can replace a module, `model[0].basic_ops[0] = op` a part of one.
        """
        modules, grouped, fusers = self._modules.values(), self._modules_of_groups, self._fusers()
        are_same = len(grouped) == len(modules) and all(map(operator.is_, grouped, modules))
        if self._module_groups is not None and are_same and all(map(OperationFuser.is_current, fusers)):
            return fusers
        self._module_groups = self._make_module_groups(self)
        self._modules_of_groups = list(self)
        return self._fusers()

    def _group(self) -> None:
        self._update_groups()

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[torch.nn.Module | int, dict[str, Any]] | None = None,
    ) -> Any:
        """The last module's output, or `(output, *extra_outputs)`.

        `extra_inputs`: those of all operations, in order; `ValueError` if there are too few or too many.
        `op_kwargs`: keyword arguments for basic operations, by module or index.
        """
        refuse_proxy(input, self)
        if torch.compiler.is_dynamo_compiling() and not OLD_TORCH:
            _ = self._grouped.value
            fusers = self._fusers()
        else:
            fusers = self._update_groups()
        needed = sum([group.num_extra_inputs for group in fusers])
        if len(extra_inputs) != needed:
            wanted = itertools.chain.from_iterable(fuser.wanted_extra_inputs() for fuser in self._fusers())
            check_extra_inputs(wanted, extra_inputs)
        kwargs_of = self._resolve_op_kwargs(op_kwargs) if op_kwargs else None

        x = input
        remaining = iter(extra_inputs)
        extra_outputs: list[torch.Tensor] = []
        for group in self._module_groups:
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            group_inputs = itertools.islice(remaining, group.num_extra_inputs)
            kwargs = [kwargs_of.get(op, {}) for op in group._basic_ops] if kwargs_of else None
            x = group(x, *group_inputs, basic_op_kwargs=kwargs)
            if group._routes.public_outputs:
                x, *outputs = x
                extra_outputs.extend(outputs)
        return (x, *extra_outputs) if extra_outputs else x

    def _resolve_op_kwargs(
        self, op_kwargs: Mapping[torch.nn.Module | int, dict[str, Any]]
    ) -> dict[FusibleOperation, dict[str, Any]]:
        resolved: dict[FusibleOperation, dict[str, Any]] = {}
        for key, kwargs in op_kwargs.items():
            op = self[key] if isinstance(key, int) else key
            if not isinstance(op, BasicOperation):
                raise ValueError(
                    f"Attempted to provide forward kwargs to {op.__class__.__name__}, "
                    "but Sequential only allows providing forward kwargs to a BasicOperation."
                )
            resolved[op] = kwargs
        known = {op for fuser in self._fusers() for op in fuser._basic_ops}
        if not known.issuperset(resolved):
            unknown = [op.__class__.__name__ for op in resolved if op not in known]
            raise ValueError(f"op_kwargs contains keys that are not in this Sequential: {unknown}")
        return resolved


class HoldsFusers:
    """A module whose fusers run operations that are none of its submodules, as `fuser.convert` makes them."""

    def fusers(self) -> list[tuple[OperationFuser, Recipe | None]]:
        """The fusers that a call of it uses, each with what it quantizes with outside of `autocast`."""
        raise NotImplementedError


def fusers_of(target: torch.nn.Module | OperationFuser) -> list[tuple[OperationFuser, Recipe | None]]:
    """The fusers that a call of `target` would use, as far as its structure tells, each with the recipe bound to it."""
    found: list[tuple[OperationFuser, Recipe | None]]
    if isinstance(target, OperationFuser):
        found = [(target, None)]
    elif isinstance(target, FusibleOperation):
        found = [(OperationFuser([target]), None)]
    elif isinstance(target, HoldsFusers):
        found = target.fusers()
    elif isinstance(target, Sequential):
        found = [entry for group in Sequential._make_module_groups(target) for entry in fusers_of(group)]
    else:
        return [entry for child in target.children() for entry in fusers_of(child)]
    return [(part, recipe) for fuser, recipe in found for part in fuser.parts()]
