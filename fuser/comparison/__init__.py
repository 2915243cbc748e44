"""`compare`: one training step of a model under each recipe, beside the same step in the model's own precision."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from cuda_kernels.messages import silent
from fuser.comparison.errors import compared_steps
from fuser.comparison.findings import Comparison, LayerComparison, RecipeComparison
from fuser.comparison.steps import Outcome, run_step, step_under
from fuser.conversion import carried_out, planned
from fuser.conversion.modules import require_module
from fuser.conversion.rules import Rule, recipe_hint
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from refops.arguments import require_flag, shown, with_article
from refops.display.plot import require_picture
from refops.products.units import NoUnitError

__all__ = ["Comparison", "LayerComparison", "RecipeComparison", "compare"]


def default_recipes() -> list[Recipe]:
    """The recipes that `compare` uses if none are given: TE's."""
    return [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


def compare(
    model: torch.nn.Module,
    batch: Any,
    recipes: Recipe | Sequence[Recipe] | Mapping[str, Rule] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    baseline: Recipe | str | None = None,
    pad: bool = True,
    plot: str | PathLike[str] | None = None,
    quiet: bool = False,
) -> Comparison:
    """Run a training step of a model without a recipe and under each, print and return what differs.

        fuser.compare(model, batch)
        fuser.compare(model, {"input_ids": tokens, "labels": tokens}, [MXFP8BlockScaling(), NVFP4BlockScaling()])
        fuser.compare(model, batch, MXFP8BlockScaling(products="blackwell"), baseline=MXFP8BlockScaling())

    Each step is one forward and backward pass of a copy of the model, converted as `convert` does. Under one recipe for
    all there is a `fuser.autocast` around the step, in which operations of `fuser.ops` in the model quantize: `convert`
    gives them no recipe. Under rules that choose by name they stay in high precision, and are named.

    Under delayed scaling the step is repeated until no scale changes by more than a tenth, at most as often as there
    are scales to be found one after the other, two for each layer, and two times more (buffers are put back in between,
    other state is not); the last step counts. The model itself is not touched: parameters, gradients, buffers, training
    mode, scales and torch's random numbers are what they were. Every step starts from the same random state, so dropout
    is the same in all. An `autocast` around the call decides nothing here. A `fuser.products` does, for every step:
    cards to be compared with one another are named by recipes. A recipe that its card has no products for is reported
    as that, unless none is left.

    Args:
        model: a module of torch's modules, of operations of `fuser.ops`, converted or not, on the device of `batch`.
        batch: what to call it with: a tensor, a tuple or list of arguments, or a mapping of keyword arguments. What the
            model returns may be tensors, or lists, mappings, dataclasses and namespaces with tensors in them.
        recipes: a recipe, some of them, or a mapping from names to what `convert` takes; by default all of TE's. One
            without a name is called by its class, and where several are of that class by its `title`.
        loss: a function from the model's output to a scalar. By default the output itself if it is a scalar, its `loss`
            if it has one, else the sum of its elements with random weights, the same in every step.
        baseline: a recipe, or the name of one of `recipes`: errors are relative to its step, and show what the others
            change of it, as a card's sums do. None: relative to the step without a recipe.
        pad: as of `convert`: any number of tokens.
        plot: also draw it to this file.
        quiet: print neither tables nor what is compiled for the first time.

    Returns:
        `Comparison`.

    Raises:
        TypeError: `model` is no module, `recipes` or `baseline` none of these, `loss` no function, or `batch` is not
            what the model takes. ValueError: no recipes, two of one name, a baseline of another name, a loss that is no
            scalar or can't be made of the output, a model on the meta device, one whose copies compute with its own
            parameters, or a card that has the products of no recipe, or not those of the baseline. RuntimeError: inside
            of `torch.inference_mode`. PlotError: `plot` can't be drawn to.
    """
    require_module(model)
    if any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
        raise ValueError("model must have values to compare; got one with parameters or buffers on the meta device")
    require_flag(pad, "pad")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's output; got {shown(loss)}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("compare must be called outside of torch.inference_mode: it runs backward passes")
    _check_batch(model, batch)
    rules, reference = _named(recipes, baseline)
    if plot is not None:
        require_picture(plot, "plot")
    # before the first step, which takes longer: a rule may be wrong
    plans = {name: planned(model, rule) for name, rule in {**rules, **reference}.items()}

    def step_of(name: str, rule: Rule) -> Outcome:
        return step_under(name, model, rule, plans[name], batch, loss, pad)

    with silent() if quiet else contextlib.nullcontext(), _gradients_stay(model):
        plain = run_step(carried_out(model, planned(model, None), pad=pad, inplace=False), None, batch, loss)
        known = {name: step_of(name, rule) for name, rule in reference.items()}
        base = next(iter(known.values()), plain)
        comparisons: list[RecipeComparison] = []
        for name, rule in rules.items():
            try:
                step = known[name] if name in known else step_of(name, rule)
            except NoUnitError as error:
                comparisons.append(RecipeComparison(name, None, None, None, None, error=error))
            else:
                comparisons.append(compared_steps(name, base, step))
    refused = [one.error for one in comparisons if one.error is not None]
    if len(refused) == len(comparisons):
        raise refused[0]
    beside_plain = next((compared_steps(name, plain, step) for name, step in known.items()), None)
    comparison = Comparison(plain.loss, comparisons, beside_plain)
    if not quiet:
        print(comparison)
    if plot is not None:
        comparison._draw(plot, "plot")
    return comparison


def _check_batch(model: torch.nn.Module, batch: Any) -> None:
    """`TypeError` unless a model can be called with a batch, as far as its signature says."""
    if any(
        isinstance(one, Recipe) or (isinstance(one, type) and issubclass(one, Recipe)) for one in tree_leaves(batch)
    ):
        raise TypeError(
            "batch must be what to call the model with, and recipes come after it, compare(model, batch, recipes); "
            f"got {shown(batch)}"
        )
    if isinstance(batch, np.ndarray | torch.utils.data.DataLoader | torch.utils.data.Dataset):
        raise TypeError(f"batch must be one batch of tensors; got {with_article(type(batch).__name__)}")
    args, named = ((), dict(batch)) if isinstance(batch, Mapping) else (batch, {})
    args = args if isinstance(args, tuple | list) else (args,)
    try:
        inspect.signature(model.forward).bind(*args, **named)
    except TypeError as error:
        what = "its names are those of arguments" if named else "a tuple or list is positional arguments"
        hint = "" if named else ", and what only the loss needs goes into loss"
        raise TypeError(f"batch must be what the model takes: {what}{hint}; {error}") from None


@contextlib.contextmanager
def _gradients_stay(model: torch.nn.Module) -> Iterator[None]:
    """Restore the gradients of a model. `ValueError` if its copies computed with the model's own parameters."""
    before = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in before:
        parameter.grad = None
    try:
        yield
        reached = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient
    if reached:
        raise ValueError(
            "model must be one that can be copied: a step of its copy computed with its own parameters, as a function "
            f"that holds the model does, or a loss that does; got gradients of {shown(reached)}"
        )


def _named(recipes: Any, baseline: Any) -> tuple[dict[str, Rule], dict[str, Rule]]:
    """The rules by name; and the baseline alone, by its name, if there is one."""
    if not (baseline is None or isinstance(baseline, Recipe | str)):
        raise TypeError(
            "baseline must be a recipe, the name of one of recipes, or None; "
            f"got {shown(baseline)}{recipe_hint(baseline)}"
        )
    if recipes is None:
        recipes = default_recipes()
    if isinstance(recipes, Mapping):
        rules = dict(recipes)
        for name, one in rules.items():
            if not isinstance(name, str) or not (one is None or isinstance(one, Recipe | Mapping) or _is_function(one)):
                raise TypeError(
                    "recipes must map names to what convert takes as recipe; "
                    f"got {shown(name)}: {shown(one)}{recipe_hint(one)}"
                )
        every = rules
        if isinstance(baseline, Recipe) and baseline not in rules.values():
            title = baseline.title
            every = {**rules, title if title not in rules else f"baseline {title}": baseline}
    else:
        given = [recipes] if isinstance(recipes, Recipe) else recipes
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise TypeError(
                "recipes must be a recipe, a list of recipes or a mapping from names; "
                f"got {shown(recipes)}{recipe_hint(recipes)}"
            )
        for number, one in enumerate(given):
            if not isinstance(one, Recipe):
                raise TypeError(
                    f"recipes must hold recipes of fuser.recipe; got {shown(one)} as item {number}{recipe_hint(one)}"
                )
        besides = [baseline] if isinstance(baseline, Recipe) and baseline not in given else []
        short = [type(one).__name__ for one in (*given, *besides)]
        titles = [one.title for one in (*given, *besides)]
        names = [name if short.count(name) == 1 else title for name, title in zip(short, titles, strict=True)]
        if len(set(names)) < len(names):
            raise ValueError(f"recipes must differ; got {', '.join(names)}")
        every = dict(zip(names, (*given, *besides), strict=True))
        rules = {name: every[name] for name in names[: len(given)]}
    if not rules:
        raise ValueError("recipes must hold at least one; got none")
    if isinstance(baseline, str):
        if baseline not in rules:
            raise ValueError(f"baseline must be one of {', '.join(rules)}; got {shown(baseline)}")
        return rules, {baseline: rules[baseline]}
    return rules, dict([next(item for item in every.items() if item[1] == baseline)] if baseline is not None else [])


def _is_function(rule: Any) -> bool:
    return callable(rule) and not recipe_hint(rule)
