"""`statistics`: what quantization does to each tensor of each step, while a model trains.

Every cast of a linear operation's operands is measured as `refops inspect` measures a file's tensors
(`refops.survey.Measurement`): signal to noise, what was flushed to zero, what the format's range cut off.
"""

from __future__ import annotations

import io
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any

import torch
from rich.table import Table

from fuser import dispatch
from fuser.common import name_of
from fuser.conversion.modules import Converted, require_module
from fuser.dispatch import Buffers
from fuser.dtypes import HIGH_PRECISION
from fuser.op import BasicOperation
from fuser.pipeline import rows_before_padding
from fuser.quantization.quantizer import Quantizer, quantization_observers
from fuser.quantization.quantizers import is_computing_again
from refops.arguments import did_you_mean, dimensions, require_integer, shown
from refops.display.console import make_table, print_table, stdout_console
from refops.display.numbers import decibels, percent, significant
from refops.display.plot import panels, require_picture, save, short_labels
from refops.survey import Measurement, measure_cast, measure_quantized

__all__ = ["QuantizationRecord", "Statistics", "statistics"]

#: As many lines as matplotlib's ten colors and two styles tell apart.
MOST_TENSORS_NAMED = 20
#: The axis of a share ends no lower than here, in percent: where nothing is flushed, say.
LEAST_PERCENT_SHOWN = 0.1


@dataclass(frozen=True)
class QuantizationRecord:
    """What quantization did to one tensor in one step.

    Attributes:
        step: number of the model's forward pass, from 0 on.
        layer: name of the module in the model.
        tensor: "input", "weight" or "grad_output"; of an operation with several of a kind, `GroupedLinear`, with the
            number of the one: "input 0".
        shape: of the tensor, without rows that `pad` appended, unless torch.compile compiled the call.
        amax: its largest finite magnitude.
        measurement: SQNR, shares flushed to zero and saturated, bits of an element; its `scaling` is the format's
            title. Of the rowwise copy, or the columnwise one where no other was made. A tensor that is all zero has
            no SQNR. Zeros that `pad` appended do not count.
        non_finite: how many elements are NaN or infinite, which neither `amax` nor `measurement` counts.
    """

    step: int
    layer: str
    tensor: str
    shape: tuple[int, ...]
    amax: float
    measurement: Measurement
    non_finite: int = 0

    @property
    def name(self) -> str:
        """Layer and tensor."""
        return name_of(self.layer, self.tensor)

    @property
    def all_zero(self) -> bool:
        """Whether every finite element of the tensor was zero before the cast: where gradients vanish, they were lost
        on the way to it."""
        return self.amax == 0 and self.measurement.flushed is not None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, one level deep."""
        fields = asdict(self) | {"shape": list(self.shape)}
        del fields["measurement"]
        return fields | self.measurement.as_dict()


class Statistics:
    """A context in which the casts of a model are recorded; `statistics` makes one.

    `print(s)` shows a line for each tensor, with the worst of all steps: "all zero" if it was that in one of them.

    Attributes:
        records: list of `QuantizationRecord`, in the order of the casts.
        unmeasured: names of tensors, layer and tensor as in `QuantizationRecord.name`, whose quantizers leave no
            record: they return plain tensors or a format of their own, or override `quantize`.
        idle: names of layers that quantize, by a recipe of their own or as operations of `fuser.ops`, of which nothing
            was in the steps that were measured: their forward was not called, or not under a recipe. A parent may
            read their weight. Known when the context is left.
        step: number of the forward pass that runs or ran last; -1 before the first. What is computed again in
            a backward pass is no pass of its own, and leaves no records of inputs and weights.
    """

    def __init__(self, model: torch.nn.Module, every: int) -> None:
        self.records: list[QuantizationRecord] = []
        self.unmeasured: list[str] = []
        self.idle: list[str] = []
        self.step = -1
        self._model, self._every = model, every
        #: Quantizers that were seen, by id, with the names of layer and tensor; None: another model's.
        self._roles: dict[int, tuple[weakref.ref[Quantizer], tuple[str, str] | None]] = {}
        self._hook: Any = None

    def __enter__(self) -> Statistics:
        if self._hook is not None:
            raise RuntimeError("statistics cannot be entered again before it was left")
        self._hook = self._model.register_forward_pre_hook(self._count)
        quantization_observers.append(self._observe)
        return self

    def __exit__(self, *exception: Any) -> None:
        quantization_observers.remove(self._observe)
        for quantizer, layer, tensor in quantizers_of(self._model):
            if type(quantizer).quantize is not Quantizer.quantize:
                self._note_unmeasured(layer, tensor)
        if self.step >= 0:
            self.idle = self._idle_layers()
        self._hook.remove()
        self._hook = None

    def _count(self, *_: Any) -> None:
        if not is_computing_again():
            self.step += 1

    def _observe(self, quantizer: Quantizer, original: Callable[[], torch.Tensor], quantized: Any) -> None:
        if self.step < 0 or self.step % self._every:
            return
        role = self._role_of(quantizer)
        if role is None:
            return
        layer, tensor = role
        if is_computing_again() and not tensor.startswith("grad_output"):
            return  # the first pass has been recorded
        x = original().detach()
        rows = None if tensor.startswith("weight") else rows_before_padding.get()
        measured = _measured(x, quantized, rows)
        if measured is not None:
            self.records.append(QuantizationRecord(self.step, layer, tensor, *measured))
        elif x.numel():
            self._note_unmeasured(layer, tensor)

    def _idle_layers(self) -> list[str]:
        busy = {record.layer for record in self.records}
        unmeasured = set(self.unmeasured)
        busy |= {layer for _, layer, tensor in quantizers_of(self._model) if name_of(layer, tensor) in unmeasured}
        return [layer for layer in quantizing_layers(self._model) if layer not in busy]

    def _note_unmeasured(self, layer: str, tensor: str) -> None:
        name = name_of(layer, tensor)
        if name not in self.unmeasured:
            self.unmeasured.append(name)

    def _role_of(self, quantizer: Quantizer) -> tuple[str, str] | None:
        """The names of the layer and of the tensor that a quantizer is for."""
        known = self._roles.get(id(quantizer))
        if known is None or known[0]() is not quantizer:  # a recipe has made new ones, or it is another model's
            self._roles = {key: seen for key, seen in self._roles.items() if seen[0]() is not None}
            self._roles[id(quantizer)] = weakref.ref(quantizer), None
            for one, layer, tensor in quantizers_of(self._model):
                self._roles[id(one)] = weakref.ref(one), (layer, tensor)
        return self._roles[id(quantizer)][1]

    def rows(self) -> list[dict[str, Any]]:
        """The records as plain data."""
        return [record.as_dict() for record in self.records]

    def of(self, layer: str, tensor: str) -> list[QuantizationRecord]:
        """The records of one tensor, in order. `KeyError`: there are none, though of others, or no such layer."""
        found = [record for record in self.records if (record.layer, record.tensor) == (layer, tensor)]
        if found:
            return found
        tensors = list(dict.fromkeys(record.tensor for record in self.records if record.layer == layer))
        if tensors:
            names = ", ".join(map(repr, tensors))
            raise KeyError(
                f"tensor must be one of {names}, of which {layer!r} has records; "
                f"got {shown(tensor)}{did_you_mean(tensor, tensors)}"
            )
        layers, which = list(dict.fromkeys(record.layer for record in self.records)), "have records"
        if not layers:
            layers, which = quantizing_layers(self._model), "quantize"
        if self.records or layer not in layers:
            hint = did_you_mean(layer, layers) or f", which are {shown(layers)}"
            raise KeyError(f"layer must be one of the {len(layers)} that {which}; got {shown(layer)}{hint}")
        return []

    def __repr__(self) -> str:
        return f"<Statistics: {len(self.records)} records of {self.step + 1} steps>"

    def __str__(self) -> str:
        table = make_table("<tensor", "shape", "<format", "steps", "amax", *WORST_COLUMNS)
        for name, records in grouped(self.records, lambda record: record.name).items():
            table.add_row(
                name,
                dimensions(records[-1].shape),
                records[-1].measurement.scaling,
                str(len({record.step for record in records})),
                significant(max(record.amax for record in records)),
                *worst_cells(records),
            )
        lines = [*not_finite_in(self.records), *no_record_of(self.unmeasured), *nothing_quantized_of(self.idle)]
        return text_of(table, *lines)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw SQNR, flushed and saturated shares of each tensor over the steps. The suffix gives the format.

        The legend names the tensors by their lowest SQNR, the lowest first; a step in which a tensor was all zero has
        none, and comes before all others. Of more than 20 tensors the first 20 are drawn, and the title says so.

        Raises:
            PlotError: no matplotlib, a suffix that it does not know, or no such directory. ValueError: no records.
        """
        by_name = grouped(self.records, lambda record: record.name)
        if not by_name:
            raise ValueError("statistics must hold records to be drawn; got none")
        require_picture(path, "path")

        def lowest(name: str) -> float:
            if any(record.all_zero for record in by_name[name]):
                return -math.inf
            sqnr = worst(by_name[name]).sqnr_db
            return math.inf if sqnr is None else sqnr

        names = sorted(by_name, key=lowest)[:MOST_TENSORS_NAMED]
        figure, axes = panels(3, 11, 8)
        which = "Quantized tensors by their lowest SQNR"
        if len(names) < len(by_name):
            which = f"The {len(names)} of {len(by_name)} quantized tensors whose SQNR is lowest"
        axes[0].set_title(f"{which}, the lowest first", fontsize=10, loc="left")
        columns = {"SQNR (dB)": "sqnr_db", "flushed to zero (%)": "flushed", "saturated (%)": "saturated"}
        for axis, (title, column) in zip(axes, columns.items(), strict=True):
            factor = 1 if column == "sqnr_db" else 100
            for name, label, style in zip(names, short_labels(names), ["-"] * 10 + ["--"] * 10, strict=False):
                values = [getattr(record.measurement, column) for record in by_name[name]]
                points = [math.nan if value is None else factor * value for value in values]
                steps = [record.step for record in by_name[name]]
                label = f" {label}" if label.startswith("_") else label  # else matplotlib would leave it out
                axis.plot(steps, points, style, label=label, marker="." if len(set(steps)) == 1 else None)
            axis.set_ylabel(title)
            if column != "sqnr_db":
                top = max(axis.get_ylim()[1], LEAST_PERCENT_SHOWN)
                axis.set_ylim(-0.05 * top, top)  # a line at 0 lies above the frame
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
        save(figure, path, "path")


def statistics(model: torch.nn.Module, *, every: int = 1) -> Statistics:
    """Record what quantization does to the operands of a model's linear operations, step by step.

        with fuser.statistics(model) as s:
            for batch in batches:
                train(model, batch)
        print(s)
        s.plot("statistics.png")

    A step is a forward pass of `model`, with the backward passes that follow it. Casts by quantizers that return
    plain tensors or override `quantize` leave no record, and are named after the table; those of whole groups
    (`group_quantize`) are not seen. Numbers and random numbers of the model do not
    change; each cast is measured on the CPU, which takes longer than the cast.

    Args:
        model: a model that `convert` converted, or one with operations of `fuser.ops` inside.
        every: measure the first of so many steps.

    Returns:
        `Statistics`, a context manager, which keeps its records.

    Raises:
        TypeError: `model` is no module, or `every` no integer. ValueError: no operation in it quantizes, or `every` is
            not positive.
    """
    require_module(model)
    if not any(op.num_quantizers("forward") for _, op in operations_of(model)):
        rule = "must have operations that quantize: convert it, or write it with fuser.ops"
        raise ValueError(f"model {rule}; got {type(model).__name__}")
    return Statistics(model, require_integer(every, "every", low=1, high=2**63))


def operations_of(model: torch.nn.Module) -> Iterator[tuple[str, BasicOperation]]:
    """The basic operations in a model, each with the name of the layer that it is or is a part of."""
    for name, module in model.named_modules():
        if isinstance(module, Converted):
            yield from ((layer_of(name), op) for op in (module._pipeline or module.pipeline())._basic_ops)  # type: ignore[misc]
        elif isinstance(module, BasicOperation):
            yield layer_of(name), module


def quantizing_layers(model: torch.nn.Module) -> list[str]:
    """The names of the layers that quantize under a recipe, apart from converted ones that have none."""
    modules = model.named_modules()
    without = {layer_of(name) for name, one in modules if isinstance(one, Converted) and one.recipe is None}
    found = dict.fromkeys(layer for layer, op in operations_of(model) if op.num_quantizers("forward"))
    return [layer for layer in found if layer not in without]


def layer_of(name: str) -> str:
    """The layer that a module belongs to, both by name: parts of operations and parametrizations are no layers."""
    return ".".join(itertools.takewhile(lambda part: part not in ("basic_ops", "parametrizations"), name.split(".")))


def quantizers_of(model: torch.nn.Module) -> Iterator[tuple[Quantizer, str, str]]:
    """The quantizers that the operations have now, each with the names of its layer and its tensor."""
    for layer, op in operations_of(model):
        for mode, quantizers in (op._quantizers or {}).items():
            roles = op.get_quantizer_roles(mode) or []
            kinds = list(dict.fromkeys(role.tensor_type for role in roles))
            for i, (quantizer, role) in enumerate(zip(quantizers, roles, strict=False)):
                group = f" {i // len(kinds)}" if len(roles) > len(kinds) else ""
                yield quantizer, layer, role.tensor_type + group


def _measured(
    x: torch.Tensor, quantized: Any, rows: int | None = None
) -> tuple[tuple[int, ...], float, Measurement, int] | None:
    """Of the first `rows` (None: all): shape, amax, measurement, number of non-finite elements.

    The rows behind must be zeros.

    None for a tensor without elements, of another dtype or of a format of its own.
    """
    if not x.numel() or x.dtype not in HIGH_PRECISION or not hasattr(quantized, "buffers"):
        return None
    reference = dispatch.Reference(torch.device("cpu"))
    original = reference.array(x.contiguous())
    operand = quantized.buffers.operand(columnwise=False)
    operand = quantized.buffers.operand(columnwise=True) if operand is None else operand
    if isinstance(operand, Buffers):
        measurement = measure_quantized(original, reference.quantized(operand), operand.scaling.title)
    elif isinstance(operand, torch.Tensor):  # an IdentityQuantizer's, which may cast to another dtype
        measurement = measure_cast(original, reference.array(operand.contiguous()), "none")
    else:
        return None
    own = x[:rows]
    finite, appended = own[own.isfinite()], x.numel() - own.numel()
    if measurement.saturated and finite.numel():  # a share of the zeros, too
        measurement = replace(measurement, saturated=measurement.saturated * (1 + appended / finite.numel()))
    amax = finite.abs().max().item() if finite.numel() else 0.0
    measurement = measurement if amax else replace(measurement, sqnr_db=None)
    return tuple(own.shape), amax, measurement, own.numel() - finite.numel()


#: The columns of a table that `worst_cells` fills.
WORST_COLUMNS = ("worst SQNR dB", "flushed %", "saturated %")


def worst_cells(records: Sequence[QuantizationRecord]) -> list[str]:
    """What a table says of some records together."""
    found = worst(records)
    return [sqnr_cell(records), percent(found.flushed), percent(found.saturated)]


def sqnr_cell(records: Sequence[QuantizationRecord]) -> str:
    """The lowest SQNR of some records in dB, or that one of them is of a tensor that was all zero."""
    return "all zero" if any(record.all_zero for record in records) else decibels(worst(records))


def grouped(
    records: Sequence[QuantizationRecord], key: Callable[[QuantizationRecord], str]
) -> dict[str, list[QuantizationRecord]]:
    """The records of each key, in order."""
    found: dict[str, list[QuantizationRecord]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def worst(records: Sequence[QuantizationRecord]) -> Measurement:
    """The lowest SQNR and the largest shares that some records measured; None where none has one."""
    measurements = [record.measurement for record in records]

    def chosen(choose: Callable[..., float | None], column: str) -> float | None:
        values = [getattr(one, column) for one in measurements]
        return choose((value for value in values if value is not None), default=None)

    return Measurement(
        ", ".join(dict.fromkeys(one.scaling for one in measurements)),
        sqnr_db=chosen(min, "sqnr_db"),
        flushed=chosen(max, "flushed"),
        saturated=chosen(max, "saturated"),
    )


def not_finite_in(records: Sequence[QuantizationRecord], where: str = "") -> list[str]:
    """A line that says how many tensors held NaN or inf, if any did."""
    names = list(dict.fromkeys(record.name for record in records if record.non_finite))
    if not names:
        return []
    every = len({record.name for record in records})
    return [
        f"{len(names)} of {every} quantized tensors{where} held NaN or inf, {names[0]} first. "
        "Their SQNR and shares are those of the other elements."
    ]


def no_record_of(unmeasured: Sequence[str], where: str = "") -> list[str]:
    """A line that says whose casts were not measured, if there are any."""
    if not unmeasured:
        return []
    return [
        f"No record{where} of {', '.join(unmeasured)}: quantizers that return plain tensors, or tensors of a format of "
        "their own, cannot be measured, nor those that override quantize."
    ]


def nothing_quantized_of(idle: Sequence[str], where: str = "") -> list[str]:
    """A line that says which layers would quantize and did not, if there are any."""
    if not idle:
        return []
    names = ", ".join(layer or "the model" for layer in idle)
    return [
        f"In this run{where} no product of {names} was quantized: no forward of theirs was called under a recipe. Does "
        "a parent read their weight?"
    ]


def text_of(*tables: Table | str) -> str:
    """Tables, and lines between them, as text."""
    console = stdout_console()
    console.file = text = io.StringIO()
    for table in tables:
        if isinstance(table, Table):
            print_table(console, table)
        else:
            console.print(table)
    return text.getvalue().rstrip()
