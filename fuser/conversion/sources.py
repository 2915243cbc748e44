"""Which parents compute with the weights of their children themselves, as far as their source tells."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch

from fuser.conversion.switching import FAST_PATHS

#: What a parent may read of a weight without multiplying by it.
_FACTS = {
    *("device", "dtype", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_meta", "is_cuda"),
    *("is_cpu", "is_floating_point", "is_contiguous", "stride", "itemsize", "element_size", "nbytes", "__class__"),
    *("norm", "std", "var", "isfinite"),
}
#: Functions that say such a thing of what they are called with.
_QUESTIONS = {"isinstance", "hasattr", "type", "id", "is_tensor", "is_floating_point"}
#: Functions that look up rows of a weight.
_LOOKUPS = {"embedding", "embedding_bag"}


def readings_of_weights(parent: torch.nn.Module, owners: Collection[torch.nn.Module]) -> list[str]:
    """What a parent's forward, or what it calls, does with the weights and biases of children in `owners`, as phrases.

    Where there is no source, the names in the compiled code tell whether it could read them.
    """
    children = {name: None for name, child in parent.named_children() if child in owners}
    if not children:
        return []
    read: dict[str, None] = {}
    hidden: dict[str, None] = {}
    pending, seen = ["forward"], set()
    while pending:
        method = pending.pop()
        if method in seen:
            continue
        seen.add(method)
        for function, names in _functions(parent, method):
            tree = _tree_of(function)
            if tree is not None:
                found, called = _reads(tree, names, children)
                read |= dict.fromkeys(found)
                pending += called
            elif inspect.isfunction(function):
                mentioned = _names_in(function.__code__)
                pending += mentioned
                if {"weight", "bias"} & set(mentioned):
                    hidden[method] = None
            elif method == "forward" or hasattr(function, "__get__"):  # others don't get the parent
                hidden[method] = None
    phrases = [f"reads {', '.join(read)} in its forward: not quantized there"] if read else []
    if hidden:
        phrases.append(
            f"has no source of {', '.join(hidden)}, where it may read weights of {', '.join(children)}: "
            "fuser.statistics tells whether they are quantized when it runs"
        )
    return phrases


def _functions(parent: torch.nn.Module, method: str) -> Iterator[tuple[Any, set[str]]]:
    """What stands for a method of a module, and the overridden ones that it calls; each with its names for the module.

    torch's that read weights on a fast path do not count: it is switched off.
    """
    own = vars(parent).get(method)
    if callable(own):
        function, names = _function_and_names(own, parent, bound=False)
        if not isinstance(function, torch.nn.Module):  # torch.compile's forward is that of the module inside
            yield function, names
        return
    for base in type(parent).__mro__:
        if method not in vars(base) or base in (torch.nn.Module, *FAST_PATHS):
            continue
        function, names = _function_and_names(vars(base)[method], parent, bound=True)
        if not callable(function):
            return
        yield function, names
        if not inspect.isfunction(function) or "super" not in _names_in(function.__code__):
            return


def _function_and_names(value: Any, parent: torch.nn.Module, *, bound: bool) -> tuple[Any, set[str]]:
    """The function inside of a property, a method or a partial, and its arguments and variables that are the module."""
    given: tuple[Any, ...] = (parent,) if bound or getattr(value, "__self__", None) is parent else ()
    if isinstance(value, functools.partial):
        given = value.args
    function = _inside(value)
    if not inspect.isfunction(function):
        return function, set()
    variables: list[tuple[str, Any]] = [*zip(function.__code__.co_varnames, given, strict=False)]
    with contextlib.suppress(ValueError):  # of a variable that has no value yet
        outer = inspect.getclosurevars(function)
        variables += [*outer.nonlocals.items(), *outer.globals.items()]
    return function, {name for name, found in variables if found is parent}


def _inside(value: Any) -> Any:
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return _inside(value.func)
    if isinstance(value, property):
        return _inside(value.fget)
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return _inside(value.__func__)
    return inspect.unwrap(value) if inspect.isfunction(value) else value


def _tree_of(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no function of Python's, or one without a source of its own
        return None


def _names_in(code: types.CodeType) -> list[str]:
    """The attributes and globals that compiled code names, with the functions inside of it."""
    inside = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return [*code.co_names, *itertools.chain.from_iterable(map(_names_in, inside))]


def _reads(tree: ast.AST, names: Collection[str], children: Collection[str]) -> tuple[list[str], list[str]]:
    """`child.weight` of each child whose weight or bias is read; and every attribute that is read of the module.

    `names`: what the module is called in there.
    """
    nodes = list(ast.walk(tree))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    only_asked = {id(node.value) for node in attributes if node.attr in _FACTS}
    for node in nodes:
        if isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            only_asked |= {id(node.left), *map(id, node.comparators)}
        if isinstance(node, ast.Call) and _name_of(node.func) in _QUESTIONS | _LOOKUPS:
            only_asked |= set(map(id, node.args))
    only_asked |= _stored_to_be_asked(nodes, only_asked)
    of_module = [node for node in attributes if isinstance(node.value, ast.Name) and node.value.id in names]
    owners = {id(node): node.attr for node in of_module if node.attr in children}
    found = [
        f"{owners[id(node.value)]}.{node.attr}"
        for node in attributes
        if id(node.value) in owners
        and node.attr in ("weight", "bias")
        and isinstance(node.ctx, ast.Load)
        and id(node) not in only_asked
    ]
    return found, [node.attr for node in of_module]


def _stored_to_be_asked(nodes: list[ast.AST], only_asked: set[int]) -> set[int]:
    """The values of local names of which only attributes such as the shape are read."""
    loaded = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    used = {node.id for node in loaded if id(node) not in only_asked}
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
