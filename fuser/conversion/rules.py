"""Which module gets which recipe: rules are one recipe, patterns of names, or functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fuser.conversion.reasons import KINDS, has_products, may_become, own_matrices
from fuser.fusible import FusibleOperation
from fuser.quantization.quantizer import Quantizer
from fuser.recipe import Recipe, _expression_of
from refops.arguments import did_you_mean, shown, with_article
from refops.scalings import Scaling
from refops.survey import match_names

#: What says which recipe a module gets, by its name: one for all, one for each pattern, or a function.
Rule = Recipe | Mapping[str, Recipe | None] | Callable[[str, torch.nn.Module], Recipe | None] | None


def names_of(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
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


def recipes_for(
    names: Mapping[torch.nn.Module, list[str]], rule: Rule, filter: Callable[[str, torch.nn.Module], bool] | None
) -> dict[torch.nn.Module, Recipe | None]:
    """The recipe of every module that quantizes, or could."""
    operations = quantizing_operations(names)
    asked = {
        module: every
        for module, every in names.items()
        if isinstance(module, KINDS) or own_matrices(module) or module in operations
    }
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


def quantizing_operations(modules: Iterable[torch.nn.Module]) -> set[FusibleOperation]:
    """The operations of `fuser.ops` that quantize under a recipe, without those that others are made of."""
    found: set[FusibleOperation] = set()
    parts: set[FusibleOperation] = set()
    for module in modules:
        if isinstance(module, FusibleOperation):
            basic_ops: list[Any] = list(module.basic_ops) if module.is_fused_op else [module]
            if module.is_fused_op:
                parts.update(basic_ops)
            if any(op.num_quantizers("forward") for op in basic_ops):
                found.add(module)
    return found - parts


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
        kept = [modules[name] for name in decided]
        if recipe is not None and not any(
            may_become(one) or has_products(one) or isinstance(one, FusibleOperation) for one in kept
        ):
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
