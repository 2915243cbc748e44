"""What `compare` finds, and how that is printed and drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TypeVar

import numpy as np
from rich.table import Table

from fuser.conversion.reasons import refusal_on_gpus
from fuser.recording import (
    WORST_COLUMNS,
    QuantizationRecord,
    grouped,
    no_record_of,
    not_finite_in,
    nothing_quantized_of,
    sqnr_cell,
    text_of,
    worst,
    worst_cells,
)
from refops.arguments import shown
from refops.display.console import make_table, stdout_console
from refops.display.plot import MOST_TENSORS_DRAWN, heat_map, panels, require_picture, save, short_labels
from refops.products.units import NoUnitError

_Value = TypeVar("_Value", float, str)


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
            router) chose otherwise: `output` is None then. It is taken for that where only one of the steps called
            the layer, numbers of rows or calls differ, the input has an error of 0.7 or more, or a row of it is nearer
            to another row of that step than to its own: not half as far, with an error of 0.7 of how far rows are
            apart. A few rows that the layer did not have at all there are errors.
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
        in_autocast: how many of the quantized ones are operations of `fuser.ops`: those quantize since there is a
            `fuser.autocast` around the step, and `convert` alone does not make them.
    """

    quantized: int = 0
    layers: int = 0
    parameters: float = 0.0
    in_autocast: int = 0

    def __str__(self) -> str:
        text = f"{self.quantized} of {self.layers} layers with matrices, {self.parameters:.1%} of the parameters"
        if not self.in_autocast:
            return text
        need = "is an operation of fuser.ops, which needs"
        if self.in_autocast > 1:
            need = "are operations of fuser.ops, which need"
        return f"{text}; {self.in_autocast} {need} a fuser.autocast around the step, as here, beside convert"


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
        refused_on_gpus: of layers that TE or cuBLAS refuse to compute on a GPU, since a size of an FP8 operand is no
            multiple of 16, each with the operand and its shape, as "1 weight 10x64". Rows are not counted if `pad`
            appends some.
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
    coverage: Coverage = field(default_factory=Coverage)
    warmed_up: bool = True
    unmeasured: list[str] = field(default_factory=list, repr=False)
    idle: list[str] = field(default_factory=list, repr=False)
    refused_on_gpus: list[str] = field(default_factory=list, repr=False)
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
                    for tensor, records in grouped(layer.records, lambda record: record.tensor).items()
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
        for title, cell, legend in (
            ("output", _output_cell, _LEGEND_OF_OUTPUTS),
            ("gradients", _gradient_cell, _LEGEND_OF_GRADIENTS),
        ):
            cells = {layer: [text or "-" for text in row] for layer, row in self._by_layer(cell).items()}
            if cells:
                parts += [f"Error of each layer's {title}:", "", *_tables("layer", names, cells)]
            lines = [line for word, line in legend.items() if any(word in row for row in cells.values())]
            parts += [*lines, ""] if lines else []
        tensors = self._tensors()
        if tensors:
            cells = {tensor: [sqnr_cell(records) for records in found] for tensor, found in tensors.items()}
            parts += ["SQNR of each quantized tensor, dB:", "", *_tables("tensor", names, cells)]
        for found in self.recipes:
            parts += not_finite_in(found.records, f" under {found.recipe}")
        for found in self.recipes:
            parts += no_record_of(found.unmeasured, f" under {found.recipe}")
        for idle, where in self._alike(lambda found: found.idle):
            parts += nothing_quantized_of(idle, where)
        for operands, where in self._alike(lambda found: found.refused_on_gpus):
            parts.append(refusal_on_gpus(operands, where))
        for line in dict.fromkeys(line for found in self.recipes for line in found.left):
            who = ", ".join(found.recipe for found in self.recipes if line in found.left)
            parts.append(f"left in high precision under {who}: {line}")
        return text_of(*parts)

    def _alike(self, names: Callable[[RecipeComparison], list[str]]) -> Iterator[tuple[list[str], str]]:
        """Each list of names that recipes have, with " under" those recipes; "" if all of them have it."""
        run = self._run()
        for found in dict.fromkeys(tuple(names(one)) for one in run):
            same = [one.recipe for one in run if tuple(names(one)) == found]
            if found:
                yield list(found), "" if len(same) == len(run) else f" under {', '.join(same)}"

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
        columns = [grouped(found.records, lambda record: record.name) for found in self._run()]
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
_LEGEND_OF_OUTPUTS = {
    "moved": "moved: its input holds other rows than in the step that is compared with, or only one of the two steps "
    "called it: something before it (a router) chose otherwise. The errors of its gradients have that in them.",
    "-": "-: it was not seen: not called, or inside of one kernel with its neighbours.",
}
_LEGEND_OF_GRADIENTS = {"-": "-: neither this step nor the one that is compared with has a gradient of it."}


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
