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
from refops.formats import FORMATS, FloatFormat
from refops.golden.inputs import make_amaxes, make_row_scales, make_tensor
from refops.golden.recipe import Recipe, settings_fields
from refops.hints import Array
from refops.ops import ActivationGradSource, ActivationSource, path_of, quantize
from refops.oracle.geometry import Geometry
from refops.oracle.operation import QUANTIZED_ARRAYS, Case, require_operation
from refops.quantization.block import LARGEST_SCALE
from refops.quantization.layout import block_amax, block_view, pad_to_blocks
from refops.quantization.mxfp8 import ENCODE_MULTIPLIER
from refops.quantization.nvfp4 import BLOCK as NVFP4_BLOCK
from refops.quantization.nvfp4 import HadamardSource, encode_multiplier, global_encode_scale, tile_bits
from refops.quantization.per_tensor import scale_from_amax
from refops.scaling import SCALINGS, BlockScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling, Scaling
from refops.survey import as_matrix
from refops.tiles import InputSource

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
        return {name: _from_json(name, value) for name, value in self.header["parameters"].items()}

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
            name: {"dtype": a.dtype.name, "shape": list(a.shape), "description": _describe(name, case)}
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
    return classes[name](**{field: _from_json(field, value) for field, value in values.items()})


def _to_json(value):
    if isinstance(value, FloatFormat):
        return value.name
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(name, value):
    if name == "fmt":
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


def cast_source(case):
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
    source, scaling, found = cast_source(case), case.scaling, {}
    for direction in ("rowwise", "columnwise"):
        if f"{direction}_data" not in outputs:
            continue
        columnwise = direction == "columnwise"
        slot = case.slots[f"{direction}_scale_inv"]
        scales = outputs[f"{direction}_scale_inv"][slot.valid_slices]
        amax = outputs.get(f"amax_{direction}")
        with np.errstate(all="ignore"):
            if isinstance(scaling, BlockScaling | MXFP8Scaling | NVFP4Scaling):
                found[f"{direction}_block_amax"] = _block_amaxes(source, scaling, columnwise)
            if isinstance(scaling, NVFP4Scaling):
                s_enc = global_encode_scale(amax, scaling.e4m3_max)
                found[f"{direction}_global_encode_scale"] = s_enc
                found[f"{direction}_encode_scale"] = encode_multiplier(scales, s_enc[:, None])
                if scaling.stochastic_rounding:
                    found[f"{direction}_random_bits"] = _random_bytes(source.shape, scaling, columnwise)
            elif isinstance(scaling, MXFP8Scaling):
                found[f"{direction}_encode_scale"] = ENCODE_MULTIPLIER[scales]
            elif isinstance(scaling, DelayedScaling):
                found[f"{direction}_encode_scale"] = np.full(1, scaling.scale, np.float32)
            else:
                block = isinstance(scaling, BlockScaling)
                found[f"{direction}_encode_scale"] = scale_from_amax(
                    found[f"{direction}_block_amax"] if block else amax,
                    scaling.fmt,
                    epsilon=scaling.amax_epsilon,
                    power_2=scaling.power_2_scale,
                    **({"value_for_inf": LARGEST_SCALE[source.dtype]} if block else {}),
                )
    return found


def _block_amaxes(source, scaling, columnwise):
    """max |x| of the block that each stored scale serves."""
    if columnwise and isinstance(scaling, NVFP4Scaling) and scaling.rht:
        source = HadamardSource(source, scaling.sign_mask)
    geometry, values = Geometry(scaling, columnwise), as_matrix(source)
    amax = block_amax(block_view(pad_to_blocks(values, *geometry.block), *geometry.block))
    return geometry.store_scales(amax, geometry.block, values.shape)


def _random_bytes(shape, scaling, columnwise):
    """The random byte of each element, (M, K) or columnwise (K, M); see `refops.NVFP4Scaling`."""
    m, k = shape
    outer, inner = (k, m) if columnwise else (m, k)
    first = m * (k // NVFP4_BLOCK) if columnwise else 0
    return tile_bits(scaling, None, slice(0, outer), slice(0, inner), inner // NVFP4_BLOCK, first)


# --- what each array is, in a sentence --------------------------------------------------------------------------------


def _describe(full_name, case):
    """How an array of the file is laid out."""
    name = full_name.split(".", 1)[1]
    sentence = {
        "x": "[act | gate] along the last dimension" if case.gated else "the tensor",
        "y": "the result, rounded once",
        "dx": "gradient of x: [d_act | d_gate]" if case.gated else "gradient of x",
        "dy": "gradient of the output",
        "dbias": "sum of the gradient (of x, for quantize) over all but the last dimension; any order of summation",
        "row_scales": "one factor for each row",
        "drow_scales": "gradient of row_scales; any order of summation",
        "scale": "scale of each tensor",
        "amax_history": "amaxes [step, tensor], row 0 the newest",
    }.get(name)
    if name == "x" and case.params.get("glu_interleave_size"):
        size = case.params["glu_interleave_size"]
        sentence = f"act and gate in turns of {size} columns, act first"
    if sentence is None:
        direction, what = name.split("_", 1) if not name.startswith("amax_") else (name.split("_")[1], "amax")
        scaling = case.scaling
        sentence = _DESCRIPTIONS[what](scaling, direction == "columnwise")
    return f"{sentence}; row-major"


def _describe_data(scaling, columnwise):
    if isinstance(scaling, NVFP4Scaling):
        order = "[column, row]: the transposed matrix, packed along rows" if columnwise else "[row, column]"
        return f"E2M1 codes {order}, two a byte, the element of even index in the low four bits"
    order = "[row, column]"
    if columnwise:
        mx = isinstance(scaling, MXFP8Scaling)
        order = "[row, column], not transposed, scaled along columns" if mx else "[column, row]: the transposed matrix"
    return f"{scaling.fmt!r} codes {order}, one a byte"


def _scale_order(scaling, columnwise):
    """Order of one direction's scales."""
    if isinstance(scaling, BlockScaling):
        if scaling.block_dim == 2:
            return "[tile along K, tile along M]" if columnwise else "[tile along M, tile along K]"
        return "[block along M, column]" if columnwise else "[block along K, row]"
    if isinstance(scaling, MXFP8Scaling):
        return "[block along M, column]" if columnwise else "[row, block along K]"
    if isinstance(scaling, NVFP4Scaling):
        return "[column, block along M]" if columnwise else "[row, block along K]"
    return "one for the tensor"


def _describe_scales(scaling, columnwise):
    order = _scale_order(scaling, columnwise)
    if isinstance(scaling, BlockScaling):
        return f"float32 decode scales {order}, second dimension padded with zeros to a multiple of 4"
    if isinstance(scaling, MXFP8Scaling | NVFP4Scaling):
        kind = "E8M0 scale bytes" if isinstance(scaling, MXFP8Scaling) else "E4M3 scale bytes"
        outer, inner = ("columns", "rows") if columnwise else ("rows", "columns")
        return (
            f"{kind} {order}, {outer} padded with zeros to a multiple of 128 and blocks along {inner} to one of 4, "
            "not swizzled"
        )
    return "float32 decode scale, one for the tensor"


def _describe_amax(scaling, columnwise):
    if isinstance(scaling, NVFP4Scaling) and scaling.row_scaled:
        return f"float32 amax of each {'column' if columnwise else 'row'}"
    return "float32 amax of the tensor"


#: What an array is called after its direction -> function that describes it.
_DESCRIPTIONS = {
    "data": _describe_data,
    "scale_inv": _describe_scales,
    "amax": _describe_amax,
    "block_amax": lambda scaling, columnwise: (
        f"float32 amax of the block of each scale {_scale_order(scaling, columnwise)}, no padding"
    ),
    "encode_scale": lambda scaling, columnwise: (
        f"float32 factor that each element is multiplied with before the cast, {_scale_order(scaling, columnwise)}, "
        "no padding"
    ),
    "global_encode_scale": lambda scaling, columnwise: (
        f"float32 S_enc = {6 * scaling.e4m3_max} / amax, one for each amax"
    ),
    "random_bits": lambda scaling, columnwise: (
        f"random byte of each element, {'[column, row]' if columnwise else '[row, column]'}"
    ),
}
