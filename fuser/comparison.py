"""`compare`: one training step of a model under each recipe, beside the same step in the model's own precision."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from os import PathLike
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from rich.table import Table
from torch.utils._pytree import tree_leaves

from cuda_kernels.messages import silent
from fuser.common import copied
from fuser.conversion import (
    CONVERTED,
    ConvertedLinear,
    Rule,
    converted,
    own_matrices,
    recipe_hint,
    rows_before_padding,
)
from fuser.op import BasicOperation, FusibleOperation
from fuser.pipeline import ForwardStep, forward_observers
from fuser.quantization.contexts import autocast
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fuser.recording import (
    WORST_COLUMNS,
    QuantizationRecord,
    layer_of,
    no_record_of,
    nothing_quantized_of,
    operations_of,
    sqnr_cell,
    statistics,
    text_of,
    worst,
    worst_cells,
)
from refops.arguments import require_flag, say_who, shown, with_article
from refops.display.console import make_table, stdout_console
from refops.display.plot import MOST_TENSORS_DRAWN, heat_map, panels, require_picture, save, short_labels
from refops.products.units import NoUnitError

__all__ = ["Comparison", "LayerComparison", "RecipeComparison", "compare"]

_Value = TypeVar("_Value", float, str)

#: Relative error of a layer's input from which on its rows are taken for others.
OTHER_ROWS = 0.7
#: A delayed scale has settled if its relative change from one step to the next is at most this.
MOST_CHANGE = 0.1


def default_recipes() -> list[Recipe]:
    """The recipes that `compare` uses if none are given: TE's."""
    return [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


@dataclass(frozen=True)
class LayerComparison:
    """What a recipe does to one layer: errors relative to the step that is compared with, ||a - b|| / ||b||.

    Attributes:
        layer: its name in the model.
        output: error of its output, which has the errors of the layers before in it; of one that leaves quantized, for
            a linear layer behind it in a `Sequential`, as that. Of all calls together, if there are several; rows that
            `pad` appended do not count. None: it was not seen.
        gradient: error of the gradients of its own parameters, which are zeros where a step has none; None: neither
            step has any.
        moved: whether its input holds other rows than in the step that is compared with, since something before it (a
            router) chose otherwise: `output` is None then. It is taken for that where numbers of rows or calls differ,
            or the input has an error of 0.7 or more.
        records: its quantized tensors, `QuantizationRecord`s. One that is all zero though the layer has gradients in
            the step that is compared with has the error 1.0, an SQNR of 0 dB; one that is zero in both has no SQNR.
    """

    layer: str
    output: float | None
    gradient: float | None
    records: tuple[QuantizationRecord, ...] = field(default=(), repr=False)
    moved: bool = False


@dataclass(frozen=True)
class Coverage:
    """How much of a model is quantized.

    Attributes:
        quantized: how many layers with matrices were quantized in the step.
        layers: how many there are, tables of embeddings aside.
        parameters: share of the model's parameters that are matrices of the quantized ones, 0 to 1.
    """

    quantized: int
    layers: int
    parameters: float

    def __str__(self) -> str:
        return f"{self.quantized} of {self.layers} layers with matrices, {self.parameters:.1%} of the parameters"


@dataclass(frozen=True)
class RecipeComparison:
    """What a recipe does to a model: errors relative to the step that is compared with, ||a - b|| / ||b||.

    Attributes:
        recipe: what it is called.
        loss: its value under the recipe. None: no step could be run.
        loss_error: |loss - other loss| / |other loss|.
        output: error of the model's output: of all tensors of floating-point numbers in it but single numbers, as the
            loss. None: there are none.
        gradient: error of the gradients of all parameters together.
        layers: list of `LayerComparison`: each layer that may be converted or has parameters, and the model, named "",
            whose output is `output`.
        left: what `convert` named in its warning: what stays in high precision, and why.
        idle: names of layers of which nothing was quantized though they quantize, as `Statistics.idle`.
        coverage: `Coverage`, how much of the model was quantized.
        warmed_up: whether the step did not change a delayed scale by more than a tenth of itself. If it did, the errors
            are in part those of scales that are not the recipe's yet.
        unmeasured: names of tensors whose quantizers leave no record, as `Statistics.unmeasured`.
        error: the `ValueError` of a step that the card in force has no products for, with the card's name as `card`;
            None: the step was run.
    """

    recipe: str
    loss: float | None
    loss_error: float | None
    output: float | None
    gradient: float | None
    layers: list[LayerComparison] = field(default_factory=list, repr=False)
    left: list[str] = field(default_factory=list, repr=False)
    coverage: Coverage = Coverage(0, 0, 0.0)
    warmed_up: bool = True
    unmeasured: list[str] = field(default_factory=list, repr=False)
    idle: list[str] = field(default_factory=list, repr=False)
    error: NoUnitError | None = field(default=None, repr=False, compare=False)

    @property
    def records(self) -> list[QuantizationRecord]:
        """The quantized tensors of all layers."""
        return [record for layer in self.layers for record in layer.records]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `print(comparison)` shows tables, `.plot(path)` draws them, `.rows()` is plain data.

    Attributes:
        loss: the loss without a recipe.
        recipes: list of `RecipeComparison`, in the order that was asked for.
        baseline: `RecipeComparison` of the step that errors are relative to, itself beside the step without a recipe.
            None: errors are relative to the step without a recipe.
    """

    loss: float
    recipes: list[RecipeComparison]
    baseline: RecipeComparison | None = None

    def __getitem__(self, recipe: str) -> RecipeComparison:
        """The findings under the recipe of that name."""
        for found in self.recipes:
            if found.recipe == recipe:
                return found
        raise KeyError(
            f"recipe must be one of {', '.join(found.recipe for found in self.recipes)}; got {shown(recipe)}"
        )

    def __iter__(self) -> Iterator[RecipeComparison]:
        return iter(self.recipes)

    def __len__(self) -> int:
        return len(self.recipes)

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each layer under each recipe: recipe, layer, errors, moved, and SQNR and shares of each tensor.

        Of a tensor that was quantized several times, the worst.
        """
        return [
            {
                "recipe": of_recipe.recipe,
                "layer": layer.layer,
                "output": layer.output,
                "gradient": layer.gradient,
                "moved": layer.moved,
                **{
                    f"{tensor}_{column}": getattr(worst(records), column)
                    for tensor, records in _grouped(layer.records, lambda record: record.tensor).items()
                    for column in ("sqnr_db", "flushed", "saturated")
                },
            }
            for of_recipe in self.recipes
            for layer in of_recipe.layers
        ]

    def __str__(self) -> str:
        run = self._run()
        names = [found.recipe for found in run]
        totals = make_table("<recipe", "loss", "error", "output", "gradient", *WORST_COLUMNS)
        totals.columns[0].no_wrap = False  # rather that than numbers cut off
        for found in self.recipes:
            totals.add_row(
                found.recipe if found.warmed_up else f"{found.recipe}, not warmed up",
                f"{found.loss:.4g}" if found.error is None else f"not on {found.error.card}",
                _error(found.loss_error),
                _error(found.output),
                _error(found.gradient),
                *worst_cells([record for record in found.records if record.measurement.sqnr_db is not None]),
            )
        losses = f"Loss without a recipe: {self.loss:.4g}"
        if self.baseline is not None:
            losses += f", under {self.baseline.recipe}: {self.baseline.loss:.4g}"
        parts: list[Any] = [f"{losses}. Errors are relative to that step."]
        for coverage in dict.fromkeys(found.coverage for found in self.recipes if found.coverage.layers):
            same = [found.recipe for found in run if found.coverage == coverage]
            under = "" if len(same) == len(run) else f" under {', '.join(same)}"
            parts.append(f"Quantized{under}: {coverage}.")
        parts += ["", totals]
        notes = [
            f"Under {found.recipe} the scales were still changing after the last pass."
            for found in self.recipes
            if not found.warmed_up
        ]
        refused: dict[str, list[str]] = {}
        for found in self.recipes:
            if found.error is not None:
                rule, _, _ = str(found.error).removeprefix(f"Under {found.recipe}: ").partition("; got")
                refused.setdefault(rule, []).append(found.recipe)
        notes += [f"Under {', '.join(those)}: {rule}." for rule, those in refused.items()]
        parts += [*notes, ""] if notes else []
        for title, cell in (("output", _output_cell), ("gradients", _gradient_cell)):
            cells = {layer: [text or "-" for text in row] for layer, row in self._by_layer(cell).items()}
            if cells:
                parts += [f"Error of each layer's {title}:", "", *_tables("layer", names, cells)]
            legend = [line for word, line in _LEGEND.items() if any(word in row for row in cells.values())]
            parts += [*legend, ""] if legend else []
        tensors = self._tensors()
        if tensors:
            cells = {tensor: [sqnr_cell(records) for records in found] for tensor, found in tensors.items()}
            parts += ["SQNR of each quantized tensor, dB:", "", *_tables("tensor", names, cells)]
        for found in self.recipes:
            parts += no_record_of(found.unmeasured, f" under {found.recipe}")
        for idle in dict.fromkeys(tuple(found.idle) for found in run):
            same = [found.recipe for found in run if tuple(found.idle) == idle]
            parts += nothing_quantized_of(idle, "" if len(same) == len(run) else f" under {', '.join(same)}")
        for line in dict.fromkeys(line for found in self.recipes for line in found.left):
            who = ", ".join(found.recipe for found in self.recipes if line in found.left)
            parts.append(f"left in high precision under {who}: {line}")
        return text_of(*parts)

    def _run(self) -> list[RecipeComparison]:
        """The recipes whose steps were run: their cards have the products."""
        return [found for found in self.recipes if found.error is None]

    def _by_layer(self, value: Callable[[LayerComparison], _Value | None]) -> dict[str, list[_Value | None]]:
        """Layer -> a value for each recipe that was run, of the layers that have one."""
        columns = [{layer.layer: value(layer) for layer in found.layers} for found in self._run()]
        layers = dict.fromkeys(layer for column in columns for layer in column)
        grid = {layer or "(model)": [column.get(layer) for column in columns] for layer in layers}
        return {layer: values for layer, values in grid.items() if any(value is not None for value in values)}

    def _tensors(self) -> dict[str, list[list[QuantizationRecord]]]:
        """Tensor -> its records under each recipe that was run."""
        columns = [_grouped(found.records, lambda record: record.name) for found in self._run()]
        names = dict.fromkeys(name for column in columns for name in column)
        return {name: [column.get(name, []) for column in columns] for name in names}

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the errors of each layer's output and gradients, and each tensor's SQNR, under each recipe, in dB.

        Rows are in the model's order. A panel has those with the largest errors, as many as a page has room for
        (`refops.display.plot.MOST_TENSORS_DRAWN`); where it leaves some out its title says so, and where layers have no
        number because their rows are others. The suffix of `path` gives the format.

        Raises:
            PlotError: no matplotlib, a suffix that it does not know, or no such directory. ValueError: no layer or
                tensor has an error.
        """
        self._draw(path, "path")

    def _draw(self, path: str | PathLike[str], argument: str) -> None:
        sqnr = {name: [worst(records).sqnr_db for records in found] for name, found in self._tensors().items()}
        outputs = "Output of each layer"
        if any(layer.moved for of_recipe in self.recipes for layer in of_recipe.layers):
            outputs += ", n/a or left out where it got other rows"
        found = {
            outputs: _in_decibels(self._by_layer(lambda layer: layer.output)),
            "Gradients of each layer": _in_decibels(self._by_layer(lambda layer: layer.gradient)),
            "Quantized tensors (SQNR)": sqnr,
        }
        grids = dict(_worst_rows(title, grid) for title, grid in found.items() if grid)
        if not grids:
            raise ValueError("comparison must hold errors of layers or tensors to be drawn; got none")
        require_picture(path, argument)
        longest = max(len(name) for grid in grids.values() for name in grid)
        width = 0.085 * longest + 1.1 * len(self._run()) + 3
        rows = [len(grid) for grid in grids.values()]
        figure, axes = panels(len(grids), width, 0.27 * sum(rows) + 1.5, height_ratios=rows)
        for (title, grid), color, axis in zip(grids.items(), ("Blues", "Greens", "Purples"), axes, strict=False):
            numbers = np.array([[math.nan if n is None else n for n in row] for row in grid.values()], np.float64)
            finite = numbers[np.isfinite(numbers)]
            heat_map(figure, axis, numbers, color, max(10.0, finite.max() if finite.size else 0), lambda n: f"{n:.1f}")
            axis.set_title(f"{title}: signal to error, dB; darker is better", fontsize=10, loc="left")
            axis.set_yticks(range(len(grid)), short_labels(list(grid)), fontsize=8, parse_math=False)
        names = [found.recipe for found in self._run()]
        axes[-1].set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor", fontsize=8)
        save(figure, path, argument)


def _tables(what: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[Table]:
    """Tables with a column for each recipe, as many side by side as the console is wide; at least one."""
    room = stdout_console().width - max(map(len, [what, *rows]))
    first = 0
    while first < len(names):
        ends = itertools.accumulate(len(name) + 2 for name in names[first:])
        last = first + max(1, sum(end <= room for end in ends))
        table = make_table(f"<{what}", *names[first:last])
        for row, cells in rows.items():
            table.add_row(row, *cells[first:last])
        yield table
        first = last


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}" if error else "0"


def _output_cell(layer: LayerComparison) -> str | None:
    if layer.moved:
        return "moved"
    return None if layer.output is None else _error(layer.output)


def _gradient_cell(layer: LayerComparison) -> str | None:
    return None if layer.gradient is None else _error(layer.gradient)


#: What the cells of the tables of errors mean that hold no number.
_LEGEND = {
    "moved": "moved: its input holds other rows than in the step that is compared with, or it was not called: "
    "something before it (a router) chose otherwise. The errors of its gradients have that in them.",
    "-": "-: it was not seen, as inside of one kernel with its neighbours.",
}


def _grouped(
    records: Sequence[QuantizationRecord], key: Callable[[QuantizationRecord], str]
) -> dict[str, list[QuantizationRecord]]:
    """The records of each key, in order."""
    found: dict[str, list[QuantizationRecord]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def _in_decibels(grid: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """Relative errors as signal to error."""

    def signal(error: float | None) -> float | None:
        if error is None or math.isnan(error):
            return None
        return -20 * math.log10(error) if error else math.inf

    return {name: [signal(error) for error in errors] for name, errors in grid.items()}


def _worst_rows(title: str, grid: dict[str, list[float | None]]) -> tuple[str, dict[str, list[float | None]]]:
    """The rows with the lowest numbers, in their own order, as many as fit in a picture, under a title that says so."""
    lowest = {name: min((n for n in row if n is not None), default=math.inf) for name, row in grid.items()}
    kept = set(sorted(grid, key=lambda name: lowest[name])[:MOST_TENSORS_DRAWN])
    if len(kept) < len(grid):
        title += f", the {len(kept)} worst of {len(grid)}"
    return title, {name: row for name, row in grid.items() if name in kept}


# ---------------------------------------------------------------------- finding out


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

    Each step is one forward and backward pass of a copy of the model, converted as `convert` does. Under delayed
    scaling it is repeated until no scale changes by more than a tenth, at most as often as there are scales to be found
    one after the other, two for each layer, and two times more (buffers are put back in between, other state is not);
    the last step counts. The model itself is not touched: parameters, gradients, buffers, training mode, scales and
    torch's random numbers are what they were. Every step starts from the same random state, so dropout is the same in
    all. An `autocast` around the call decides nothing here. A `fuser.products`
    does, for every step: cards to be compared with one another are named by recipes. A recipe that its card has no
    products for is reported as that, unless none is left.

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
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {shown(model)}")
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
    for rule in {**rules, **reference}.values():  # before the first step, which takes longer: a rule may be wrong
        converted(model, rule, pad=pad, inplace=False, share_parameters=True)
    with silent() if quiet else contextlib.nullcontext(), _gradients_stay(model):
        plain = _run_step(converted(model, None, pad=pad, inplace=False)[0], None, batch, loss)
        known = {name: _step_under(name, model, rule, batch, loss, pad) for name, rule in reference.items()}
        base = next(iter(known.values()), plain)
        comparisons: list[RecipeComparison] = []
        for name, rule in rules.items():
            try:
                step = known[name] if name in known else _step_under(name, model, rule, batch, loss, pad)
            except NoUnitError as error:
                comparisons.append(RecipeComparison(name, None, None, None, None, error=error))
            else:
                comparisons.append(_compared(name, base, step))
    refused = [one.error for one in comparisons if one.error is not None]
    if len(refused) == len(comparisons):
        raise refused[0]
    beside_plain = next((_compared(name, plain, step) for name, step in known.items()), None)
    comparison = Comparison(plain.loss, comparisons, beside_plain)
    if not quiet:
        print(comparison)
    if plot is not None:
        comparison._draw(plot, "plot")
    return comparison


def _check_batch(model: torch.nn.Module, batch: Any) -> None:
    """`TypeError` unless a model can be called with a batch, as far as its signature says."""
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


@dataclass
class _Calls:
    """Tensors of layers, by name, one for each call; without rows that `pad` appended.

    Attributes:
        outputs: of the layers whose outputs are seen.
        inputs: of the layers that do not take what another one in the same pipeline returns.
        first: every layer that was called -> the first one in its pipeline, of which `inputs` has the rows.
    """

    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)


@dataclass
class _Outcome:
    """What is compared of a step. The last five: of `RecipeComparison`."""

    loss: float
    output: list[torch.Tensor]
    calls: _Calls
    gradients: dict[str, torch.Tensor]
    records: list[QuantizationRecord]
    unmeasured: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    warmed_up: bool = True
    left: list[str] = field(default_factory=list)
    coverage: Coverage = Coverage(0, 0, 0.0)


def _step_under(name: str, model: torch.nn.Module, rule: Rule, batch: Any, loss: Any, pad: bool) -> _Outcome:
    """Run a step of a copy of a model, converted by a rule. An error of plain text begins with the rule's name."""
    duplicate, left = converted(model, rule, pad=pad, inplace=False)
    try:
        step = _run_step(duplicate, rule, batch, loss)
    except Exception as error:
        if [str(error)] == list(error.args):
            say_who(error, f"Under {name}")
        raise
    return replace(step, left=left, coverage=_coverage(duplicate, rule, step.idle))


def _run_step(model: torch.nn.Module, rule: Rule, batch: Any, loss: Any) -> _Outcome:
    """Run a step of a model that may be changed, outside of the caller's `autocast`.

    Where it turns out to have delayed scales, which start from 1, the step is run again until they settle, and the
    last one counts. One more step uncovers the gradients of one more layer at worst, so the steps are at most two more
    than there are states, of which each layer has two.
    """
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()] if tensor.device.type == "cuda"}
    put_back = _saved_buffers(model)
    with FP8GlobalStateManager.set_aside(), torch.enable_grad():
        found = _run_once(model, rule, batch, loss, devices)
        states = [s for forward in (True, False) for s in FP8GlobalStateManager.registered_states(forward)]
        found.warmed_up = not states
        for _ in range(len(states) + 2):
            if found.warmed_up:
                break
            used = [state.scale.clone() for state in states]
            put_back()
            model.zero_grad()
            found = _run_once(model, rule, batch, loss, devices)
            found.warmed_up = all(
                torch.allclose(state.scale, before, rtol=MOST_CHANGE, atol=0, equal_nan=True)
                for state, before in zip(states, used, strict=True)
            )
    return found


def _run_once(model: torch.nn.Module, rule: Rule, batch: Any, loss: Any, devices: set[torch.device]) -> _Outcome:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        recorder = None
        if any(op.num_quantizers("forward") for _, op in operations_of(model)):
            recorder = stack.enter_context(statistics(model))
        calls = stack.enter_context(_listening(model))
        with _quantizing(rule):
            result = _call(model, batch)
        value = _loss_of(result, loss)
        if value.requires_grad:
            value.backward()
    output = [t.detach() for t in _tensors(result) if t is not value and t.numel() > 1]
    calls.outputs[""] = output
    return _Outcome(
        loss=value.item(),
        output=output,
        calls=calls,
        gradients={name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        records=[] if recorder is None else recorder.records,
        unmeasured=[] if recorder is None else recorder.unmeasured,
        idle=[] if recorder is None else recorder.idle,
    )


def _saved_buffers(model: torch.nn.Module) -> Callable[[], None]:
    """Remember a model's buffers; the result restores their names, shapes and values."""
    present = {module: dict(module._buffers) for module in model.modules()}
    values = {buffer: buffer.detach().clone() for buffer in model.buffers()}

    def put_back() -> None:
        for module, buffers in present.items():
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.resize_(value.shape).copy_(value)

    return put_back


def _quantizing(rule: Rule) -> contextlib.AbstractContextManager[Any]:
    """Put the recipe in force around the model if it is a single one: operations of `fuser.ops` in it quantize, too."""
    if rule is None:
        return autocast(enabled=False)
    return autocast(recipe=rule) if isinstance(rule, Recipe) else contextlib.nullcontext()


def _call(model: torch.nn.Module, batch: Any) -> Any:
    batch = copied(dict(batch) if isinstance(batch, Mapping) else batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _tensors(result: Any) -> list[torch.Tensor]:
    """The floating-point tensors in an output: in sequences, mappings and dataclasses."""
    found = []
    for leaf in tree_leaves(_fields_of(result)):
        if isinstance(leaf, torch.Tensor):
            found += [leaf] if leaf.is_floating_point() else []
        elif _fields_of(leaf) is not leaf:
            found += _tensors(leaf)
    return found


def _fields_of(result: Any) -> Any:
    """A mapping, dataclass or namespace as a dict; anything else as it is."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, SimpleNamespace):
        return dict(vars(result))
    if is_dataclass(result) and not isinstance(result, type):
        return {entry.name: getattr(result, entry.name) for entry in fields(result)}
    return result


def _loss_of(result: Any, loss: Any) -> torch.Tensor:
    own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is not None:
        value, rule = loss(result), "loss must return a scalar tensor"
    elif own is not None:
        value, rule = own, "loss must be given for an output whose own loss is no scalar tensor"
    else:
        return _made_loss(result)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ValueError(f"{rule}; got {shown(value)}")
    return value


def _made_loss(result: Any) -> torch.Tensor:
    """The only number in the output, or the randomly weighted sum of all of its numbers."""
    tensors = _tensors(result)
    if not tensors:
        raise ValueError(
            "loss must be given for an output in which no floating-point tensors are found, in lists, mappings and "
            f"dataclasses; got one of type {type(result).__name__}"
        )
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=generator).to(t.device) for t in tensors]
    sums = [(t.float() * w).sum() / max(1, t.numel()) ** 0.5 for t, w in zip(tensors, weights, strict=True)]
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


@contextlib.contextmanager
def _listening(model: torch.nn.Module) -> Iterator[_Calls]:
    """Collect what layers take and return: of operations from their pipelines, which hooks would split."""
    calls = _Calls()
    operations = list(operations_of(model))
    layer_with = {op: layer for layer, op in operations}
    ending = set(dict(operations).values())

    def observe(fuser: Any, step: ForwardStep) -> None:
        first, last = fuser._basic_ops[0], fuser._basic_ops[step.basic_op_indices[-1]]
        if first in layer_with and step.basic_op_indices[0] == 0:
            calls.inputs.setdefault(layer_with[first], []).append(_own_rows(step.input))
        for index in step.basic_op_indices:
            layer = layer_with.get(fuser._basic_ops[index])
            if layer is not None:
                calls.first[layer] = layer_with.get(first, layer)
        if last in ending:
            calls.outputs.setdefault(layer_with[last], []).append(_own_rows(step.output))

    handles = []
    for name, module in model.named_modules():
        is_layer = isinstance(module, tuple(CONVERTED)) or any(True for _ in module.parameters(False))
        runs_operations = isinstance(module, (FusibleOperation, *CONVERTED.values()))
        if name and is_layer and not runs_operations and layer_of(name) == name:

            def keep(_: Any, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                calls.first[name] = name
                for found, tensors in ((calls.inputs, [args, kwargs]), (calls.outputs, result)):
                    found.setdefault(name, []).extend(tensor.detach() for tensor in _tensors(tensors)[:1])

            handles.append(module.register_forward_hook(keep, with_kwargs=True))
    forward_observers.append(observe)
    try:
        yield calls
    finally:
        forward_observers.remove(observe)
        for handle in handles:
            handle.remove()


def _own_rows(tensor: Any) -> torch.Tensor:
    """A tensor of a pipeline without the rows that `pad` appended."""
    plain = (tensor.dequantize() if isinstance(tensor, QuantizedTensorStorage) else tensor).detach()
    rows = rows_before_padding.get()
    return plain if rows is None else plain[:rows]


def _moved(layer: str, base: _Calls, step: _Calls) -> bool:
    """Whether a layer's calls have other rows than in the step that is compared with, as far as they tell."""
    if not layer or layer not in base.outputs:
        return False
    first = step.first.get(layer)
    if first is None:
        return True
    found, wanted = step.inputs.get(first, []), base.inputs.get(first, [])
    if not found or not wanted:
        return False
    if [one.numel() for one in found] != [other.numel() for other in wanted]:
        return True
    error = _relative(found, wanted)
    return error is not None and error >= OTHER_ROWS


def _relative(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float | None:
    """||found - wanted|| / ||wanted|| over all tensors; None if there are none, or if they do not match."""
    sizes = [other.numel() for other in wanted]
    if not sum(sizes) or [one.numel() for one in found] != sizes:
        return None
    a, b = (torch.cat([one.flatten().double() for one in tensors]) for tensors in (found, wanted))
    difference, size = (a - b).norm().item(), b.norm().item()
    return difference / size if size else (math.inf if difference else 0.0)


def _coverage(model: torch.nn.Module, rule: Rule, idle: Sequence[str]) -> Coverage:
    """The coverage of a model converted by a rule that is also in force around its operations of `fuser.ops`.

    `idle`: the layers of which nothing was quantized.
    """
    matrices: dict[torch.nn.Module, list[torch.Tensor]] = {}
    quantized: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        own = [*own_matrices(module).values()]
        quantizes = False
        if isinstance(module, BasicOperation) and module.num_quantizers("forward"):
            own = [*module.parameters()]
            quantizes = isinstance(rule, Recipe)
        elif isinstance(module, ConvertedLinear):
            quantizes = module.recipe is not None
        if quantizes and layer_of(name) not in idle:
            quantized.add(module)
        if own:
            matrices[module] = own
    every = sum(parameter.numel() for parameter in model.parameters())
    held = {parameter for module in quantized & matrices.keys() for parameter in matrices[module]}
    return Coverage(len(quantized), len(matrices), sum(one.numel() for one in held) / every if every else 0.0)


def _vanished(record: QuantizationRecord) -> QuantizationRecord:
    """The record of an all-zero tensor which is not zero in the step that is compared with: its error is 1.0, 0 dB.

    A gradient of a matrix is not zero, so neither operand of its product, the input and the output's gradient, is.
    """
    if record.tensor.startswith("weight"):
        return record
    return replace(record, measurement=replace(record.measurement, sqnr_db=0.0))


def _compared(name: str, base: _Outcome, step: _Outcome) -> RecipeComparison:
    """Compare a step with another one. Of a parameter that has no gradient in one of them it is zero there."""
    own: dict[str, list[str]] = {}  # layer -> names of its parameters
    for parameter in {**base.gradients, **step.gradients}:
        own.setdefault(layer_of(parameter.rpartition(".")[0]), []).append(parameter)
    learning = {
        layer
        for layer, names in own.items()
        if any(
            name in base.gradients and base.gradients[name].ndim > 1 and base.gradients[name].any() for name in names
        )
    }
    records = _grouped(
        [_vanished(record) if record.all_zero and record.layer in learning else record for record in step.records],
        lambda record: record.layer,
    )

    def gradient_error(names: Sequence[str]) -> float | None:
        found = [step.gradients[n] if n in step.gradients else torch.zeros_like(base.gradients[n]) for n in names]
        wanted = [base.gradients[n] if n in base.gradients else torch.zeros_like(step.gradients[n]) for n in names]
        return _relative(found, wanted)

    return RecipeComparison(
        name,
        step.loss,
        abs(step.loss - base.loss) / abs(base.loss) if base.loss else abs(step.loss),
        _relative(step.output, base.output),
        gradient_error(list({**base.gradients, **step.gradients})),
        [
            LayerComparison(
                layer,
                None if moved else _relative(step.calls.outputs.get(layer, []), base.calls.outputs.get(layer, [])),
                gradient_error(own.get(layer, [])),
                tuple(records.get(layer, [])),
                moved,
            )
            for layer in dict.fromkeys(itertools.chain(base.calls.outputs, own))
            for moved in [_moved(layer, base.calls, step.calls)]
        ],
        step.left,
        step.coverage,
        step.warmed_up,
        step.unmeasured,
        step.idle,
    )
