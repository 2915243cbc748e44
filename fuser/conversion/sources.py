"""Which parents compute with the weights of their children themselves, as far as their source tells."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator

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


def weights_read_by(parent: torch.nn.Module, converted: Collection[torch.nn.Module]) -> list[str]:
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
        if method not in vars(base) or base in (torch.nn.Module, *FAST_PATHS):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(vars(base)[method])))
        except (OSError, TypeError, SyntaxError):  # no function of Python's, or one without a source
            return
        yield tree
        if not any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(tree)):
            return
