"""A golden file's contents: inputs, reference outputs, intermediate amaxes and scales, and the header.

The arithmetic is `refops`' own, called step by step; nothing here is a second implementation.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import refops
from refops.activations import bind_activation
from refops.formats import FORMATS, ElementFormat
from refops.golden.descriptions import describe
from refops.golden.inputs import make_amaxes, make_row_scales, make_tensor
from refops.golden.matrix import Recipe, settings_fields
from refops.hints import Array
from refops.ops import ActivationGradSource, ActivationSource, path_of, quantize
from refops.oracle.operation import QUANTIZED_ARRAYS, Case, require_operation
from refops.quantization.hadamard import HadamardSource
from refops.quantization.layout import block_amax, block_view, pad_to_blocks
from refops.quantization.quantize import random_bytes
from refops.scalings import SCALINGS, Scaling
from refops.scalings.arithmetic import REFERENCE
from refops.survey import as_matrix
from refops.tiles import InputSource

F = np.float32
#: Version of the layout of golden files; a reader refuses others.
LAYOUT = 1


@dataclass(frozen=True)
class Golden:
    """The contents of a golden file.

    Attributes:
        header: plain data: layout, refops (version), operation, parameters, scaling, shape, dtype, seed, inputs,
            columnwise, arrays (full name -> dtype, shape, description), digest.
        arrays: full name ("input.x", "output.rowwise_data", "intermediate.rowwise_encode_scale") -> array.
    """

    header: dict[str, Any]
    arrays: dict[str, Array]

    def _group(self, group):
        prefix = f"{group}."
        return {name.removeprefix(prefix): a for name, a in self.arrays.items() if name.startswith(prefix)}

    @property
    def inputs(self) -> dict[str, Array]:
        """Input name -> array."""
        return self._group("input")

    @property
    def outputs(self) -> dict[str, Array]:
        """Output name -> what the reference writes."""
        return self._group("output")

    @property
    def intermediates(self) -> dict[str, Array]:
        """Name -> amax or scale on the way."""
        return self._group("intermediate")

    @property
    def op(self) -> str:
        """Name of the operation."""
        return self.header["operation"]

    @property
    def scaling(self) -> Scaling | None:
        """The settings, or None."""
        return settings_from_dict(self.header["scaling"])

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the operation."""
        return {name: _from_json(None, name, value) for name, value in self.header["parameters"].items()}

    def case(self) -> Case:
        """The `Case` that the file is about."""
        return Case(self.op, self.inputs, self.scaling, self.params)

    def stale_outputs(self) -> list[str]:
        """Names of the outputs that this version of refops would write otherwise."""
        outputs = self.outputs
        reference = self.case().reference(outputs)
        return [name for name, a in outputs.items() if np.asarray(reference[name]).tobytes() != a.tobytes()]


def build_golden(recipe: Recipe) -> Golden:
    """Return the `Golden` of a `Recipe`.

    Raises:
        ValueError, TypeError: the shape or parameters do not fit the operation.
    """
    operation = require_operation(recipe.op)
    inputs = _make_inputs(recipe, operation)
    case = Case(recipe.op, inputs, recipe.scaling, recipe.params)
    outputs = _reference(case)
    arrays = {f"input.{name}": a for name, a in inputs.items()}
    arrays |= {f"output.{name}": a for name, a in outputs.items()}
    if case.quantizes:
        arrays |= {f"intermediate.{name}": a for name, a in _intermediates(case, outputs).items()}
    arrays = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
    header = {
        "layout": LAYOUT,
        "refops": refops.__version__,
        "operation": operation.name,
        "parameters": {name: _to_json(value) for name, value in recipe.params.items()},
        "scaling": settings_as_dict(case.scaling),
        "shape": list(recipe.shape),
        "dtype": recipe.dtype.name,
        "seed": recipe.seed,
        "inputs": recipe.inputs,
        "columnwise": recipe.columnwise,
        "arrays": {
            name: {"dtype": a.dtype.name, "shape": list(a.shape), "description": describe(name, case)}
            for name, a in arrays.items()
        },
    }
    header["digest"] = digest(header, arrays)
    return Golden(header, arrays)


def digest(header, arrays):
    """SHA-256 of the header without its digest, and of the arrays' names, dtypes, shapes and bytes."""
    described = {key: value for key, value in header.items() if key != "digest"}
    sha = hashlib.sha256(canonical_json(described).encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(f"\n{name} {array.dtype.name} {list(array.shape)}\n".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def canonical_json(value):
    """One line of ASCII, keys sorted."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# --- settings and parameters as JSON ----------------------------------------------------------------------------------


def settings_as_dict(scaling):
    """All fields of settings by name, with their class; None for None."""
    if scaling is None:
        return None
    return {"class": type(scaling).__name__} | {f: _to_json(getattr(scaling, f)) for f in settings_fields(scaling)}


def settings_from_dict(described):
    """Undo `settings_as_dict`.

    Raises:
        ValueError: an unknown class; whatever the settings raise.
    """
    if described is None:
        return None
    classes = {cls.__name__: cls for cls in SCALINGS}
    values = dict(described)
    name = values.pop("class", None)
    if name not in classes:
        raise ValueError(f"scaling must be one of {', '.join(classes)}; got {name!r}")
    return classes[name](**{field: _from_json(classes[name], field, value) for field, value in values.items()})


def _to_json(value):
    if isinstance(value, ElementFormat):
        return value.name
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(owner, name, value):
    if name == "fmt" or isinstance(getattr(owner, name, None), ElementFormat):
        return FORMATS[value]
    return float(value) if value in ("inf", "-inf") else value


# --- inputs and outputs ----------------------------------------------------------------------------------------------


def _make_inputs(recipe, operation):
    """Input name -> array, for the operation alone."""
    kind, shape, seed = recipe.inputs, recipe.shape, recipe.seed
    if operation.kind == "update_delayed_scale":
        return {
            "amax_history": make_amaxes(kind, shape, seed=seed, stream=0),
            "scale": make_amaxes("mixed", shape[1:] or (1,), seed=seed, stream=1),
        }
    x = make_tensor(kind, shape, recipe.dtype, seed=seed)
    if operation.kind == "dequantize":
        columnwise = recipe.columnwise
        q = quantize(x, recipe.scaling, rowwise=not columnwise, columnwise=columnwise)
        return {name: getattr(q, name) for name in QUANTIZED_ARRAYS if getattr(q, name) is not None}
    inputs = {"x": x}
    if "dy" in operation.inputs:
        gated = bind_activation(operation.activation, {}).gated
        width = shape[-1] // 2 if gated else shape[-1]
        inputs["dy"] = make_tensor(kind, (*shape[:-1], width), recipe.dtype, seed=seed, stream=1)
    if "row_scales" in operation.inputs:
        inputs["row_scales"] = make_row_scales(math.prod(shape[:-1]), seed=seed, stream=2)
    return {name: inputs[name] for name in operation.inputs}


def _reference(case):
    """Everything that the reference writes; rowwise alone where the scaling has no columnwise copy of this shape."""
    wanted = {name: np.empty(0, slot.dtype) for name, slot in case.slots.items()}
    try:
        return case.reference(wanted)
    except ValueError:  # row-scaled NVFP4 refuses some columnwise copies; a shape that nothing fits fails again
        return case.reference({name: a for name, a in wanted.items() if "columnwise" not in name})


def values_source(case):
    """The `Source` of the float32 values that are cast to codes, before any Hadamard transform."""
    operation, inputs = case.operation, case.inputs
    if operation.kind == "quantize":
        return InputSource(inputs["x"])
    bound = bind_activation(operation.activation, case.params)
    kind = ActivationSource if operation.kind == "activation" else ActivationGradSource
    source = kind(bound, *inputs.values())
    return source.rounded() if path_of(case.scaling).casts_rounded else source


def _intermediates(case, outputs):
    """Amax of each block and encode scales: name -> float32 array, oriented and repeated as the scales are stored.

    Without padding. Under stochastic rounding also the random byte of each element.
    """
    source, scaling, layout, found = values_source(case), case.scaling, case.scaling.layout, {}
    for columnwise, copy in enumerate(("rowwise", "columnwise")):
        if f"{copy}_data" not in outputs:
            continue
        amax = outputs.get(f"amax_{copy}")
        slot = case.slots[f"{copy}_scale_inv"]
        scales = layout.scales_by_outer(outputs[slot.name][slot.valid_slices], columnwise)
        with np.errstate(all="ignore"):
            maxima = amax
            if layout.block is not None:
                maxima = _block_amaxes(source, scaling, columnwise)
                found[f"{copy}_block_amax"] = layout.scales_by_outer(maxima, columnwise)
            shared, tensor_scale = F(0), scaling.tensor_scale(REFERENCE)
            if tensor_scale is not None:
                shared = tensor_scale(amax[:, None])
                found[f"{copy}_global_encode_scale"] = shared[0][:, 0]
            multiplier = scaling.multiplier(REFERENCE)
            if multiplier is None:
                _, factor = scaling.block_scale(REFERENCE)(maxima, shared, scaling.numbers(source.dtype))
                factor = np.broadcast_to(factor, maxima.shape)
            else:
                factor = multiplier(scales, shared)
            factor = factor if layout.block is None else layout.scales_by_outer(factor, columnwise)
            found[f"{copy}_encode_scale"] = factor
            if scaling.random is not None:
                outer, inner = (slice(0, size) for size in layout.oriented(source.shape, columnwise))
                found[f"{copy}_random_bits"] = random_bytes(
                    scaling.random, None, outer, inner, source.shape, columnwise
                )
    return found


def _block_amaxes(source, scaling, columnwise):
    """max |x| of the block that each stored scale serves, [outer, block]."""
    if columnwise and scaling.hadamard is not None:
        source = HadamardSource(source, scaling.hadamard)
    layout, values = scaling.layout, as_matrix(source)
    values = values.T if columnwise else values
    amax = block_amax(block_view(pad_to_blocks(values, *layout.block), *layout.block))
    return np.repeat(amax, layout.block[0] // layout.run[0], axis=0)[: layout.scale_counts(source.shape, columnwise)[0]]
