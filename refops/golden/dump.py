"""The dump in a golden file: inputs, what the reference writes for them, and the amaxes and scales on the way.

Inputs are made for the operation, outputs are those of the oracle's `Case`. The steps between them are taken by the
declared rules that the outputs went through, but on the whole tensor: the quantizer walks it in tiles and keeps none of
them. `test_intermediates_are_the_steps_from_input_to_output` leads from one to the other.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from refops.golden.header import make_header, params_from_header, settings_from_dict
from refops.golden.inputs import make_amaxes, make_row_scales, make_tensor
from refops.golden.matrix import Recipe
from refops.golden.probes import place_probes
from refops.hints import Array
from refops.ops import quantize
from refops.oracle.operation import Case, arrays_of, require_operation
from refops.quantization.hadamard import HadamardSource
from refops.quantization.layout import block_amax, padded_blocks
from refops.quantization.quantize import amax_by_outer, random_bytes
from refops.quantization.result import DIRECTIONS, reorder_scales
from refops.scalings import Scaling
from refops.scalings.arithmetic import REFERENCE
from refops.survey import as_matrix


@dataclass(frozen=True)
class Golden:
    """The contents of a golden file.

    Attributes:
        header: plain data: layout, refops (version), operation, parameters, scaling, shape, dtype, seed, inputs,
            copies, swizzled_scales (where it is true), arrays (full name -> dtype, shape, description), digest.
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
        return params_from_header(self.header)

    @property
    def swizzled_scales(self) -> bool:
        """Whether the scales are in the order that GEMMs read."""
        return self.header.get("swizzled_scales", False)

    def case(self) -> Case:
        """The `Case` that the file is about."""
        return Case(self.op, self.inputs, self.scaling, self.params, swizzled_scales=self.swizzled_scales)

    def stale_outputs(self) -> list[str]:
        """Names of the outputs that this version of refops would write differently."""
        outputs, case = self.outputs, self.case()
        reference = _as_stored(case, case.reference(outputs))
        return [name for name, a in outputs.items() if np.asarray(reference[name]).tobytes() != a.tobytes()]


def build_golden(recipe: Recipe) -> Golden:
    """Return the `Golden` of a `Recipe`.

    Raises:
        ValueError, TypeError: the shape or parameters do not fit the operation.
    """
    inputs = _make_inputs(recipe)
    case = Case(recipe.op, inputs, recipe.scaling, recipe.params, swizzled_scales=recipe.swizzled_scales)
    outputs = _reference(case)
    groups = {"input": inputs, "output": _as_stored(case, outputs), "intermediate": dict(_intermediates(case, outputs))}
    arrays = {
        f"{group}.{name}": np.ascontiguousarray(array)
        for group, named in groups.items()
        for name, array in named.items()
    }
    return Golden(make_header(recipe, case, arrays), arrays)


def _make_inputs(recipe):
    """Input name -> array; each has a stream of random numbers of its own."""
    operation, kind, shape, seed = require_operation(recipe.op), recipe.inputs, recipe.shape, recipe.seed
    shape_of_result = (*shape[:-1], shape[-1] // (1 + operation.gated))
    makers = {
        "x": lambda: make_tensor(kind, shape, recipe.dtype, seed=seed),
        "dy": lambda: make_tensor(kind, shape_of_result, recipe.dtype, seed=seed, stream=1),
        "row_scales": lambda: make_row_scales(math.prod(shape[:-1]), seed=seed, stream=2),
        "amax_history": lambda: make_amaxes(kind, shape, seed=seed, stream=0),
        "scale": lambda: make_amaxes("mixed", shape[1:] or (1,), seed=seed, stream=1),
    }
    if operation.kind == "dequantize":
        copies = {"rowwise": not recipe.columnwise, "columnwise": recipe.columnwise}
        x = place_probes(Case("quantize", makers["x"](), recipe.scaling), kind, seed)["x"]
        q = quantize(x, recipe.scaling, **copies)
        return arrays_of(q.swizzled() if recipe.swizzled_scales else q)
    inputs = {name: makers[name]() for name in operation.inputs}
    if recipe.scaling is None:
        return inputs
    return place_probes(Case(recipe.op, inputs, recipe.scaling, recipe.params), kind, seed)


def _reference(case):
    """Everything that the reference writes; rowwise only if the scaling has no columnwise copy of this shape."""
    wanted = {name: np.empty(0, slot.dtype) for name, slot in case.slots.items()}
    try:
        return case.reference(wanted)
    except ValueError:  # row-scaled NVFP4 refuses some columnwise copies; a shape that nothing fits fails again
        return case.reference({name: a for name, a in wanted.items() if "columnwise" not in name})


def _as_stored(case, outputs):
    """The outputs as the file has them: scales in the order that GEMMs read, where the case says so."""
    if not (case.swizzled_scales and case.quantizes):
        return outputs
    layout = case.scaling.layout
    return {
        name: reorder_scales(layout, name, array, to_swizzled=True) if name.endswith("_scale_inv") else array
        for name, array in outputs.items()
    }


# --- from a value to its code -----------------------------------------------------------------------------------------


def _intermediates(case, outputs):
    """Yield (name, array) of each copy's amaxes, encode scales and random bytes; nothing where no code is written."""
    for copy in DIRECTIONS if case.quantizes else ():
        if f"{copy}_data" in outputs:
            with np.errstate(all="ignore"):
                steps = dict(_steps(case, outputs, copy))
            yield from ((f"{copy}_{name}", array) for name, array in steps.items())


def _steps(case, outputs, copy):
    """Yield (name, array) of a copy, float32 oriented and repeated as its scales are stored, without padding."""
    scaling, layout, columnwise = case.scaling, case.scaling.layout, copy == "columnwise"
    source = case.source.rounded() if scaling.path.casts_rounded else case.source
    amax = maxima = outputs.get(f"amax_{copy}")
    if layout.block is not None:
        maxima = _block_amaxes(source, scaling, columnwise)
        yield "block_amax", layout.scales_by_outer(maxima, columnwise)
    tensor_scale = np.float32(0)
    if layout.two_level:
        tensor_scale = scaling.tensor_scale(REFERENCE)(amax_by_outer(layout, amax, slice(None)))
        yield "global_encode_scale", tensor_scale[0][:, 0]
    multiplier = scaling.multiplier(REFERENCE)
    if multiplier is None:
        _, factor = scaling.block_scale(REFERENCE)(maxima, tensor_scale, scaling.numbers(source.dtype))
        factor = np.broadcast_to(factor, maxima.shape)  # a given scale is one number
    else:
        slot = case.slots[f"{copy}_scale_inv"]
        stored = outputs[slot.name][slot.valid_slices]
        factor = multiplier(layout.scales_by_outer(stored, columnwise), tensor_scale)
    yield "encode_scale", factor if layout.block is None else layout.scales_by_outer(factor, columnwise)
    if scaling.random is not None:
        outer, inner = (slice(0, size) for size in layout.oriented(source.shape, columnwise))
        yield "random_bits", random_bytes(scaling.random, outer, inner, source.shape, columnwise)


def _block_amaxes(source, scaling, columnwise):
    """max |x| of the block that each stored scale serves, [outer, block]."""
    if columnwise and scaling.hadamard is not None:
        source = HadamardSource(source, scaling.hadamard)
    layout, values = scaling.layout, as_matrix(source)
    values = values.T if columnwise else values
    amax = block_amax(padded_blocks(values, *layout.block))
    return np.repeat(amax, layout.block[0] // layout.run[0], axis=0)[: layout.scale_counts(source.shape, columnwise)[0]]
