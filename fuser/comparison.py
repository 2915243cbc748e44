"""`compare`: one training step of a model under each recipe, beside the same step in the model's own precision."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from fuser.conversion import CONVERTED, Rule, _Converted, convert
from fuser.explanation import copied
from fuser.op import BasicOperation, FusibleOperation
from fuser.pipeline import ForwardStep, forward_observers
from fuser.quantization.contexts import autocast
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fuser.recording import QuantizationRecord, largest, operations_of, statistics, text_of, worst
from refops.arguments import require_flag, shown
from refops.display.console import make_table
from refops.display.numbers import decibels, percent
from refops.display.plot import MOST_TENSORS_DRAWN, heat_map, require_picture, save, short_labels

__all__ = ["Comparison", "LayerComparison", "RecipeComparison", "compare"]


def default_recipes() -> list[Recipe]:
    """What `compare` takes where no recipes are given: TE's."""
    return [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


@dataclass(frozen=True)
class LayerComparison:
    """What a recipe does to one layer: errors relative to the step without a recipe, ||a - b|| / ||b||.

    Attributes:
        layer: its name in the model.
        output: error of its output, which has the errors of the layers before in it; of one that leaves quantized, for
            a linear layer behind it in a `Sequential`, as that. None: it was not seen.
        gradient: error of the gradients of its own parameters; None: it has none.
        records: its quantized tensors, `QuantizationRecord`s.
    """

    layer: str
    output: float | None
    gradient: float | None
    records: tuple[QuantizationRecord, ...] = ()


@dataclass(frozen=True)
class RecipeComparison:
    """What a recipe does to a model: errors relative to the step without a recipe, ||a - b|| / ||b||.

    Attributes:
        recipe: what it is called.
        loss: its value under the recipe.
        loss_error: |loss - plain loss| / |plain loss|.
        output: error of the model's output.
        gradient: error of the gradients of all parameters together.
        layers: list of `LayerComparison`: each layer that may be converted or has parameters, and the model, named "".
        left: what `convert` named in its warning: what stays in high precision, and why.
    """

    recipe: str
    loss: float
    loss_error: float
    output: float | None
    gradient: float | None
    layers: list[LayerComparison] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

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
    """

    loss: float
    recipes: list[RecipeComparison]

    def __getitem__(self, recipe: str) -> RecipeComparison:
        """What was found under the recipe of that name."""
        for found in self.recipes:
            if found.recipe == recipe:
                return found
        raise KeyError(
            f"recipe must be one of {', '.join(found.recipe for found in self.recipes)}; got {shown(recipe)}"
        )

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each layer under each recipe: recipe, layer, errors, and SQNR and shares of each tensor."""
        return [
            {
                "recipe": of_recipe.recipe,
                "layer": layer.layer,
                "output": layer.output,
                "gradient": layer.gradient,
                **{
                    f"{record.tensor}_{column}": getattr(record.measurement, column)
                    for record in layer.records
                    for column in ("sqnr_db", "flushed", "saturated")
                },
            }
            for of_recipe in self.recipes
            for layer in of_recipe.layers
        ]

    def __str__(self) -> str:
        names = [found.recipe for found in self.recipes]
        totals = make_table(
            "<recipe", "loss", "error", "output", "gradient", "worst SQNR dB", "flushed %", "saturated %"
        )
        for found in self.recipes:
            measured = [record.measurement for record in found.records]
            totals.add_row(
                found.recipe,
                f"{found.loss:.4g}",
                _error(found.loss_error),
                _error(found.output),
                _error(found.gradient),
                decibels(worst(measured)) if measured else "-",
                percent(largest(one.flushed for one in measured)),
                percent(largest(one.saturated for one in measured)),
            )
        parts: list[Any] = [f"Loss without a recipe: {self.loss:.4g}. Errors are relative to that step.", "", totals]
        for title, value in (("output", lambda layer: layer.output), ("gradients", lambda layer: layer.gradient)):
            grid = self._by_layer(value)
            if grid:
                table = make_table("<layer", *names)
                for layer, errors in grid.items():
                    table.add_row(layer, *map(_error, errors))
                parts += [f"Error of each layer's {title}:", "", table]
        tensors = self._tensors()
        if tensors:
            table = make_table("<tensor", *names)
            for tensor, records in tensors.items():
                table.add_row(tensor, *("-" if one is None else decibels(one.measurement) for one in records))
            parts += ["SQNR of each quantized tensor, dB:", "", table]
        for line in dict.fromkeys(line for found in self.recipes for line in found.left):
            who = ", ".join(found.recipe for found in self.recipes if line in found.left)
            parts.append(f"left in high precision under {who}: {line}")
        return text_of(*parts)

    def _by_layer(self, value: Callable[[LayerComparison], float | None]) -> dict[str, list[float | None]]:
        """Layer -> a number for each recipe, of the layers that have one."""
        columns = [{layer.layer: value(layer) for layer in found.layers} for found in self.recipes]
        layers = dict.fromkeys(layer for column in columns for layer in column)
        grid = {layer or "(model)": [column.get(layer) for column in columns] for layer in layers}
        return {layer: errors for layer, errors in grid.items() if any(error is not None for error in errors)}

    def _tensors(self) -> dict[str, list[QuantizationRecord | None]]:
        columns = [{record.name: record for record in found.records} for found in self.recipes]
        return {name: [c.get(name) for c in columns] for name in dict.fromkeys(n for column in columns for n in column)}

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the errors of each layer's output and gradients, and each tensor's SQNR, under each recipe, in dB.

        At most 60 rows a panel, those with the largest errors. The suffix of `path` gives the format.

        Raises:
            PlotError: no matplotlib, a suffix that it does not know, or no such directory.
        """
        require_picture(path, "path")
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        sqnr = {
            n: [None if r is None else r.measurement.sqnr_db for r in records] for n, records in self._tensors().items()
        }
        panels = {
            "Output of each layer": _in_decibels(self._by_layer(lambda layer: layer.output)),
            "Gradients of each layer": _in_decibels(self._by_layer(lambda layer: layer.gradient)),
            "Quantized tensors (SQNR)": _worst_rows(sqnr),
        }
        panels = {title: grid for title, grid in panels.items() if grid}
        longest = max(len(name) for grid in panels.values() for name in grid)
        figure, axes = plt.subplots(
            len(panels),
            1,
            sharex=True,
            squeeze=False,
            layout="constrained",
            figsize=(0.085 * longest + 1.1 * len(self.recipes) + 3, 0.27 * sum(map(len, panels.values())) + 1.5),
            height_ratios=[len(grid) for grid in panels.values()],
        )
        for (title, grid), color, axis in zip(panels.items(), ("Blues", "Greens", "Purples"), axes.flat, strict=False):
            numbers = np.array([[math.nan if n is None else n for n in row] for row in grid.values()], np.float64)
            finite = numbers[np.isfinite(numbers)]
            heat_map(figure, axis, numbers, color, max(10.0, finite.max() if finite.size else 0), lambda n: f"{n:.1f}")
            axis.set_title(f"{title}: signal to error, dB; darker is better", fontsize=10, loc="left")
            axis.set_yticks(range(len(grid)), short_labels(list(grid)), fontsize=8, parse_math=False)
        names = [found.recipe for found in self.recipes]
        axes[-1, 0].set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor", fontsize=8)
        save(figure, path, "path")


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}" if error else "0"


def _in_decibels(grid: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """Relative errors as signal to error."""

    def signal(error: float | None) -> float | None:
        if error is None or math.isnan(error):
            return None
        return -20 * math.log10(error) if error else math.inf

    return _worst_rows({name: [signal(error) for error in errors] for name, errors in grid.items()})


def _worst_rows(grid: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """The rows with the lowest numbers, in their own order: as many as a picture has room for."""
    lowest = {name: min((n for n in row if n is not None), default=math.inf) for name, row in grid.items()}
    kept = set(sorted(grid, key=lambda name: lowest[name])[:MOST_TENSORS_DRAWN])
    return {name: row for name, row in grid.items() if name in kept}


# ---------------------------------------------------------------------- finding out


def compare(
    model: torch.nn.Module,
    batch: Any,
    recipes: Recipe | Sequence[Recipe] | Mapping[str, Rule] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    pad: bool = True,
    plot: str | PathLike[str] | None = None,
    quiet: bool = False,
) -> Comparison:
    """Run a training step of a model without a recipe and under each, print and return what differs.

        fuser.compare(model, batch)
        fuser.compare(model, {"input_ids": tokens, "labels": tokens}, [MXFP8BlockScaling(), NVFP4BlockScaling()])

    Each step is one forward and backward pass of a copy of the model, converted as `convert` does; under delayed
    scaling there is one before it, for scales to be known. The model itself is not touched: parameters, gradients,
    buffers, training mode, scales and torch's random numbers are what they were. Every step starts from the same
    random state, so dropout is the same in all.

    Args:
        model: a module of torch's modules, of operations of `fuser.ops`, converted or not, on the device of `batch`.
        batch: what to call it with: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
        recipes: a recipe, some of them, or a mapping from names to what `convert` takes; by default all of TE's.
        loss: a function from the model's output to a scalar. By default the output itself if it is a scalar, its `loss`
            if it has one, else the sum of its elements with random weights, the same in every step.
        pad: as of `convert`: any number of tokens.
        plot: also draw it to this file.
        quiet: do not print.

    Returns:
        `Comparison`.

    Raises:
        TypeError: `model` is no module, or `recipes` none of these. ValueError: no recipes, two of one name, a loss
            that is no scalar or can't be made of the output, or a model on the meta device. PlotError: `plot` can't be
            drawn to.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {shown(model)}")
    if any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
        raise ValueError("model must have values to compare; got one with parameters or buffers on the meta device")
    require_flag(pad, "pad")
    rules = _named(recipes)
    if plot is not None:
        require_picture(plot, "plot")
    plain = _step(_converted(model, None, pad)[0], None, batch, loss, rounds=1)
    comparison = Comparison(plain.loss, [])
    for name, rule in rules.items():
        duplicate, left = _converted(model, rule, pad)
        rounds = 2 if isinstance(rule, Recipe) and rule.delayed() else 1
        comparison.recipes.append(_compared(name, plain, _step(duplicate, rule, batch, loss, rounds=rounds), left))
    if not quiet:
        print(comparison)
    if plot is not None:
        comparison.plot(plot)
    return comparison


def _named(recipes: Any) -> dict[str, Rule]:
    if recipes is None:
        recipes = default_recipes()
    if isinstance(recipes, Mapping):
        rules = dict(recipes)
    else:
        given = [recipes] if isinstance(recipes, Recipe) else recipes
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise TypeError(
                f"recipes must be a recipe, a list of recipes or a mapping from names; got {shown(recipes)}"
            )
        short = [type(one).__name__ for one in given]
        names = [name if short.count(name) == 1 else repr(one) for name, one in zip(short, given, strict=True)]
        if len(set(names)) < len(names):
            raise ValueError(f"recipes must differ; got {', '.join(names)}")
        rules = dict(zip(names, given, strict=True))
    if not rules:
        raise ValueError("recipes must hold at least one; got none")
    return rules


def _converted(model: torch.nn.Module, rule: Rule, pad: bool) -> tuple[torch.nn.Module, list[str]]:
    """A copy of the model, converted, and what stays in high precision."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        duplicate = convert(model, rule, pad=pad, inplace=False)
    left = [line for one in caught for line in str(one.message).split("\n  ")[1:]]
    return duplicate, left


@dataclass
class _Step:
    """What is compared of a step."""

    loss: float
    output: torch.Tensor | None
    layers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    records: list[QuantizationRecord]


def _step(model: torch.nn.Module, rule: Rule, batch: Any, loss: Any, *, rounds: int) -> _Step:
    """Run a step of a model that is ours to change; the last of `rounds` is what counts."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()] if tensor.device.type == "cuda"}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for last in (number == rounds - 1 for number in range(rounds)):
        outputs: dict[str, list[torch.Tensor]] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(torch.enable_grad())
            recorder = None
            if last and any(op.num_quantizers("forward") for _, op in operations_of(model)):
                recorder = stack.enter_context(statistics(model))
            if last:
                stack.enter_context(_listening(model, outputs))
            model.zero_grad()
            for name, buffer in model.named_buffers():
                buffer.detach().copy_(buffers[name])
            with _quantizing(rule):
                result = _call(model, batch)
            value = _loss_of(result, loss)
            if value.requires_grad:
                value.backward()
    tensors = [t for t in _tensors(result) if t is not value and t.numel() > 1]
    return _Step(
        loss=value.item(),
        output=_flat(tensors),
        layers={name: _flat(found) for name, found in outputs.items()},
        gradients={name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        records=[] if recorder is None else recorder.records,
    )


def _quantizing(rule: Rule) -> contextlib.AbstractContextManager[Any]:
    """One recipe is in force around the model, so operations of `fuser.ops` in it quantize too."""
    if rule is None:
        return autocast(enabled=False)
    return autocast(recipe=rule) if isinstance(rule, Recipe) else contextlib.nullcontext()


def _call(model: torch.nn.Module, batch: Any) -> Any:
    batch = copied(dict(batch) if isinstance(batch, Mapping) else batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _tensors(result: Any) -> list[torch.Tensor]:
    """The floating-point tensors in an output."""
    result = dict(result) if isinstance(result, Mapping) else result
    return [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _loss_of(result: Any, loss: Any) -> torch.Tensor:
    if loss is not None:
        value = loss(result)
    else:
        value = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is None and value is None:
        tensors = _tensors(result)
        if len(tensors) == 1 and tensors[0].numel() == 1:
            value = tensors[0]
        else:
            if not tensors:
                raise ValueError(
                    f"loss must be given for an output without floating-point tensors; got {shown(result)}"
                )
            generator = torch.Generator().manual_seed(0)
            weights = [torch.randn(t.shape, generator=generator).to(t.device) for t in tensors]
            value = sum((t.float() * w).sum() / t.numel() ** 0.5 for t, w in zip(tensors, weights, strict=True))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ValueError(f"loss must return a scalar tensor; got {shown(value)}")
    return value


@contextlib.contextmanager
def _listening(model: torch.nn.Module, outputs: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Collect the outputs of layers by name: of operations as their pipelines compute them, unsplit by hooks."""
    last_ops: dict[BasicOperation, str] = {}
    for layer, op in operations_of(model):
        last_ops = {other: name for other, name in last_ops.items() if name != layer} | {op: layer}

    def observe(fuser: Any, step: ForwardStep) -> None:
        layer = last_ops.get(fuser._basic_ops[step.basic_op_indices[-1]])
        if layer is not None:
            is_quantized = isinstance(step.output, QuantizedTensorStorage)
            outputs.setdefault(layer, []).append((step.output.dequantize() if is_quantized else step.output).detach())

    handles = []
    for name, module in model.named_modules():
        is_shown = (
            not name or isinstance(module, tuple(CONVERTED)) or any(True for _ in module.parameters(recurse=False))
        )
        if is_shown and not isinstance(module, FusibleOperation | _Converted):

            def keep(_: Any, __: Any, result: Any, name: str = name) -> None:
                outputs.setdefault(name, []).extend(tensor.detach() for tensor in _tensors(result)[:1])

            handles.append(module.register_forward_hook(keep))
    forward_observers.append(observe)
    try:
        yield
    finally:
        forward_observers.remove(observe)
        for handle in handles:
            handle.remove()


def _flat(tensors: Sequence[torch.Tensor]) -> Any:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors]) if tensors else None


def _relative(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float | None:
    """||found - wanted|| / ||wanted||; rows that `pad` appended at the end do not count."""
    if found is None or wanted is None or not wanted.numel() or found.numel() < wanted.numel():
        return None
    difference = (found[: wanted.numel()] - wanted).norm().item()
    size = wanted.norm().item()
    return difference / size if size else (math.inf if difference else 0.0)


def _compared(name: str, plain: _Step, step: _Step, left: list[str]) -> RecipeComparison:
    own: dict[str, list[str]] = {}  # layer -> names of its parameters
    for parameter in plain.gradients:
        own.setdefault(parameter.rpartition(".")[0].partition(".basic_ops.")[0], []).append(parameter)
    records: dict[str, list[QuantizationRecord]] = {}
    for record in step.records:
        records.setdefault(record.layer, []).append(record)

    def gradient_error(names: Sequence[str]) -> float | None:
        both = [n for n in names if n in step.gradients]
        return _relative(_flat([step.gradients[n] for n in both]), _flat([plain.gradients[n] for n in both]))

    layers = dict.fromkeys(itertools.chain(plain.layers, own))
    return RecipeComparison(
        name,
        step.loss,
        abs(step.loss - plain.loss) / abs(plain.loss) if plain.loss else abs(step.loss),
        _relative(step.output, plain.output),
        gradient_error(list(plain.gradients)),
        [
            LayerComparison(
                layer,
                _relative(step.layers.get(layer), plain.layers.get(layer)),
                gradient_error(own.get(layer, [])),
                tuple(records.get(layer, [])),
            )
            for layer in layers
        ],
        left,
    )
