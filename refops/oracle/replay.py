"""A kernel written out in stages whose rules can be exchanged: what another convention would have written.

Each operation is evaluated on a rectangle of its result: load -> formula -> rounding -> amax -> scale -> multiply ->
cast -> store. Every stage is a method; a convention (`refops.oracle.conventions`) replaces or wraps one on an instance,
so that two conventions of different stages compose. With nothing replaced the result is that of `refops`, bit for bit.

This is no second reference: it shares `refops`' arithmetic on purpose. Its output is compared with a dump only to say
*which* rule a kernel follows; whether the dump is right is decided by the enclosure.
"""

import math
from dataclasses import dataclass

import numpy as np

from refops.activations import ONE, ZERO, bind_activation, sigmoid
from refops.formats import E2M1, E4M3, E8M0, encode_tile
from refops.ops import PATHS, path_of
from refops.oracle.geometry import DIRECTIONS, Geometry, Region, part_of
from refops.quantization import mxfp8, nvfp4
from refops.quantization.block import LARGEST_SCALE
from refops.quantization.hadamard import transform_groups
from refops.quantization.layout import block_amax, block_view, ceil_div, pad_to_blocks
from refops.quantization.per_tensor import FLT_MAX, quieted
from refops.rounding import philox_bytes, stored
from refops.scaling import BlockScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling
from refops.tiles import SUM_CHUNK, Matrix, column_chunks, row_sum, sum_in_order

F = np.float32
#: Elements that all evaluations of a whole tensor together may compute in one diagnosis.
WHOLE_TENSOR_WORK = 1 << 26


#: Relative difference of two amaxes that float32 arithmetic explains.
AMAX_NOISE = 2.0**-19


def amax_is_near(amax, other):
    """Where two amaxes differ by no more than the noise of float32 arithmetic."""
    return np.abs(amax.astype(np.float64) - other) <= AMAX_NOISE * np.abs(other.astype(np.float64))


class NotApplicable(Exception):  # noqa: N818 (an answer, not an error)
    """A convention has no meaning for this operation, or would cost too much to try."""


@dataclass(frozen=True)
class RowLayout:
    """Where the activated half and the gate of output column h lie in a row: runs of `run` columns that alternate.

    `run` is H for [act | gate]; `gate_first` exchanges the two.
    """

    run: int
    gate_first: bool = False

    def columns(self, h, gate):
        """Columns of the activated values (or gates) of output columns `h`."""
        second = gate != self.gate_first
        return (h // self.run) * (2 * self.run) + h % self.run + second * self.run

    def locate(self, column):
        """Return (is gate, h) of row columns: the inverse of `columns`."""
        second = column // self.run % 2 == 1
        return second != self.gate_first, column // (2 * self.run) * self.run + column % self.run


class Setting:
    """What every replay of one diagnosis shares: the case, its matrices, the dump, and what was computed already.

    Attributes:
        case: the `Case`.
        outputs, reference: output name -> whole array, as dumped and as the reference writes it.
        shape: (M, K) of the result.
        probing: amaxes of a changed formula may be taken from the dump (confirmed later from the whole tensor).
        whole_halo: replays that need the blocks beside a region compute all of its rows and columns.
        probe: a region with wrong entries, from which conventions may estimate a factor; None where there is none.
        scale_values: what the dump holds most often among its wrong scales.
    """

    def __init__(self, case, outputs, reference):
        self.case, self.outputs, self.reference = case, outputs, reference
        self.probing, self.whole_halo, self.probe, self.scale_values = False, True, None, []
        self.work = 0
        self.cache = {}
        self.values_cache = {}
        shape = () if case.operation.kind == "update_delayed_scale" else case.result_shape
        self.shape = (math.prod(shape[:-1]), shape[-1]) if shape else ()
        self.matrices = {}
        if case.operation.kind not in ("update_delayed_scale", "dequantize"):
            self.matrices = {n: Matrix(t) for n, t in case.inputs.items() if n != "row_scales"}
        self.bound = None
        if case.operation.activation is not None:
            params = {n: v for n, v in case.params.items() if n != "glu_interleave_size"}
            self.bound = bind_activation(case.operation.activation, params)

    def kernel(self):
        """A new replay with no rule exchanged."""
        kind = self.case.operation.kind
        if kind == "update_delayed_scale":
            return UpdateKernel(self)
        return DequantizeKernel(self) if kind == "dequantize" else TensorKernel(self)

    def spend(self, elements):
        """Account for an evaluation of a whole tensor; NotApplicable when too much was spent."""
        if self.work + elements > WHOLE_TENSOR_WORK:
            raise NotApplicable("too many evaluations of the whole tensor")
        self.work += elements

    def settled_amax(self, direction, amax, part=None):
        """`amax`, or what the dump has in its place where they differ by the noise of float32 arithmetic.

        Scales and codes follow from the amax that the kernel found: a last bit of it moves many ties.
        """
        dumped = self.outputs.get(f"amax_{direction}")
        if dumped is None or (part is None) != (dumped.size == 1):
            return amax
        dumped = dumped if part is None else dumped[part]
        return np.where(amax_is_near(dumped, amax), dumped, amax)

    def dumped_amax(self, direction):
        """The tensor's amax as the dump has it (or as its scale implies), float32 (1,), or None."""
        amax = self.outputs.get(f"amax_{direction}")
        if amax is None:
            amax = self.outputs.get("amax_rowwise", self.outputs.get("amax_columnwise"))
        scale_inv = self.outputs.get(f"{direction}_scale_inv")
        if amax is None and scale_inv is not None and scale_inv.dtype == np.float32 and scale_inv.shape == (1,):
            amax = scale_inv * self.case.scaling.fmt.max
        return amax if amax is not None and amax.shape == (1,) else None


class Kernel:
    """What the replays have in common: the stages' exchange, and the record of what was exchanged.

    Attributes:
        setting: the `Setting`.
        case, operation, scaling: shortcuts; scaling is None where nothing is quantized.
        applied: (convention, choice) pairs, in order.
        changed: stages that they changed.
        facts: words that their sentences use.
    """

    def __init__(self, setting):
        self.setting, self.case, self.operation = setting, setting.case, setting.case.operation
        self.scaling = self.case.scaling
        self.applied, self.changed, self.facts = (), set(), {}

    def require(self, condition):
        """Raise NotApplicable unless `condition` holds."""
        if not condition:
            raise NotApplicable

    def wrap(self, stage, around):
        """Replace method `stage` by one that calls `around` with the present method first, then its arguments."""
        inner = getattr(self, stage)
        setattr(self, stage, lambda *arguments: around(inner, *arguments))

    def after(self, stage, change):
        """Pass what `stage` returns through `change`."""
        self.wrap(stage, lambda inner, *arguments: change(inner(*arguments)))

    @property
    def out_dtype(self):
        """Dtype of the values that are written."""
        for name in ("y", "dx"):
            if name in self.setting.outputs:
                return self.setting.outputs[name].dtype
        return self.dtype

    def to_dtype(self, values, dtype):
        """Stage: float32 -> a high-precision dtype, as stored."""
        return stored(values, dtype)


class TensorKernel(Kernel):
    """An activation, its gradient (scaled by row or not) or the identity; written as values or quantized.

    Attributes (knobs beside the methods):
        x_layout, dx_layout: `RowLayout` of a gated activation's input and of its gradient.
        casts_rounded, amax_rounded, dbias_rounded: as in `refops.ops.Path`.
        block_amax_rounded: the same for block amaxes; None: as casts_rounded.
        hadamard: direction -> whether its values go through the Hadamard transform.
        hadamard_amax: whether the columnwise amax is taken after it.
        fmt, scale_max: element format, and the value that amax is mapped to.
        block_shapes: direction -> (rows, columns) of the elements that share a scale.
        halo: whether the replay of a rectangle needs the blocks beside it.
    """

    def __init__(self, setting):
        super().__init__(setting)
        self.kind = self.operation.kind
        self.scaling = self.case.scaling if self.case.quantizes else None
        self.bound, self.shape = setting.bound, setting.shape
        self.dtype = self.case.inputs["x"].dtype
        self.gated = self.case.gated
        self.gradient = self.kind.endswith("grad")
        self.scaled = self.kind.startswith("scaled")
        self.width = self.shape[1] // 2 if self.gated and self.gradient else self.shape[1]
        interleave = self.case.params.get("glu_interleave_size", 0)
        self.x_layout = self.dx_layout = RowLayout(interleave or max(self.width, 1))
        path = PATHS["unfused"]
        if self.kind != "quantize" and self.scaling is not None:
            path = path_of(self.scaling)
        self.casts_rounded, self.amax_rounded = path.casts_rounded, path.amax_rounded
        self.dbias_rounded, self.block_amax_rounded = path.dbias_rounded, None
        self.halo = False
        if self.scaling is not None:
            self.fmt = self.scaling.fmt
            self.scale_max = self.fmt.max
            self.block_shapes = {direction: Geometry.of(self.scaling, direction).block for direction in DIRECTIONS}
            rht = isinstance(self.scaling, NVFP4Scaling) and self.scaling.rht
            self.hadamard = {"rowwise": False, "columnwise": rht}
            self.hadamard_amax = True
            self.rounding, self.saturate = "nearest_even", True
            if isinstance(self.scaling, NVFP4Scaling):
                self.sign_mask, self.four_over_six = self.scaling.sign_mask, self.scaling.four_over_six
                self.e4m3_max = self.scaling.e4m3_max

    # --- the formula ------------------------------------------------------------------------------

    def load(self, name, rows, columns):
        """Stage: float32 inputs; `columns` are a slice or indices."""
        return self.setting.matrices[name].read(rows, columns)

    def load_upstream(self, rows, columns):
        """Stage: the output's gradient."""
        return self.load("dy", rows, columns)

    def row_scale(self, rows):
        """Stage: the rows' scales, float32 (R, 1)."""
        return self.case.inputs["row_scales"].reshape(-1, 1)[rows].astype(F)

    def value(self, act):
        """Stage: the activation."""
        return self.bound.value(act)

    def derivative(self, act):
        """Stage: its derivative. The scaled kernels evaluate two of them in an order of their own."""
        name, p = self.bound.activation.name, self.bound.parameters
        if self.scaled and name == "swiglu":
            s = sigmoid(act)
            return s + (act * s) * (ONE - s)
        if self.scaled and name == "clamped_swiglu":
            limit, alpha = F(p["limit"]), F(p["alpha"])
            clamped = np.where(act <= limit, act, limit)
            s = sigmoid(alpha * clamped)
            return np.where(act <= limit, s + ((alpha * clamped) * s) * (ONE - s), ZERO)
        return self.bound.derivative(act)

    def gate(self, gate):
        """Stage: what the activation is multiplied with."""
        return self.bound.gate(gate)

    def gate_slope(self, gate):
        """Stage: its derivative; the scaled kernel of clamped_swiglu lets a NaN gate pass."""
        slope = self.bound.gate_slope(gate)
        if self.scaled and self.bound.activation.name == "clamped_swiglu":
            slope = np.where(np.isnan(gate), ONE, slope)
        return slope

    def forward(self, act, gate, scale):
        """Stage: the output from act, gate (or None) and the row's scale (or None)."""
        y = self.value(act)
        if gate is not None:
            y = y * self.gate(gate)
        return y if scale is None else y * scale

    def backward_act(self, dy, act, gate):
        """Stage: the gradient of act; dy has the row's scale in it."""
        if gate is None:
            return dy * self.derivative(act)
        if self.scaled:
            return dy * (self.derivative(act) * self.gate(gate))
        return (self.derivative(act) * dy) * self.gate(gate)

    def backward_gate(self, dy, act, gate):
        """Stage: the gradient of gate."""
        if self.scaled:
            return dy * (self.value(act) * self.gate_slope(gate))
        return (self.gate_slope(gate) * dy) * self.value(act)

    def halves(self, rows, h):
        """float32 act and gate (None for unary) of output columns `h` (indices)."""
        if not self.gated:
            return self.load("x", rows, as_slice(h)), None
        return tuple(self.load("x", rows, as_slice(self.x_layout.columns(h, gate))) for gate in (False, True))

    def compute(self, rows, columns):
        """Unrounded float32 result of a rectangle."""
        if self.kind == "quantize":
            return self.load("x", rows, columns)
        column = np.arange(columns.start, columns.stop)
        scale = self.row_scale(rows) if self.scaled else None
        if not self.gradient:
            return self.forward(*self.halves(rows, column), scale)
        if not self.gated:
            return self.backward_act(self._scaled_upstream(rows, column, scale), *self.halves(rows, column))
        is_gate, h = self.dx_layout.locate(column)
        out = np.empty((rows.stop - rows.start, len(column)), F)
        for chosen, backward in ((~is_gate, self.backward_act), (is_gate, self.backward_gate)):
            if chosen.any():
                part = h[chosen]
                dy = self._scaled_upstream(rows, part, scale)
                out[:, as_slice(np.flatnonzero(chosen))] = backward(dy, *self.halves(rows, part))
        return out

    def _scaled_upstream(self, rows, h, scale):
        dy = self.load_upstream(rows, as_slice(h))
        return dy if scale is None else dy * scale

    def values(self, rows, columns):
        """Unrounded float32 result of a rectangle, kept for replays with the same formula. Do not write to it."""
        key = (self._formula_key(), rows.start, rows.stop, columns.start, columns.stop)
        cache = self.setting.values_cache
        if key not in cache:
            if sum(v.size for v in cache.values()) > 1 << 23:
                cache.clear()
            cache[key] = self.compute(rows, columns)
        return cache[key]

    def _formula_key(self):
        return self._applied_in(FORMULA_STAGES)

    def _applied_in(self, stages):
        """(name, choice) of the conventions of some stages."""
        return tuple((c.name, repr(choice)) for c, choice in self.applied if c.stage_of(choice) in stages)

    def round(self, values):
        """float32 values rounded to the nominal dtype."""
        return self.to_dtype(values, self.dtype).astype(F)

    # --- amax -------------------------------------------------------------------------------------

    def magnitude(self, values):
        """Stage: what the maximum is taken of."""
        return np.abs(values)

    def maximum(self, a, axis):
        """Stage: maximum along axes, NaN ignored, at least 0."""
        return np.fmax.reduce(a, axis=axis, initial=F(0))

    def block_amax(self, blocks):
        """Stage: amax of each block of a `block_view`."""
        if not self.changed & {"magnitude", "maximum"}:
            return block_amax(blocks)
        return self.maximum(self.magnitude(blocks), (1, 3))

    def tensor_amax(self, direction, region):
        """Stage: the tensor's amax, (1, 1), or with row scaling that of rows (R, 1) or columns (1, C)."""
        per_row = isinstance(self.scaling, NVFP4Scaling) and self.scaling.row_scaled
        if not per_row:
            return self.whole_amax(direction, None, None).reshape(1, 1)
        if direction == "rowwise":
            return self.whole_amax(direction, region.rows, 1).reshape(-1, 1)
        return self.whole_amax(direction, region.columns, 0).reshape(1, -1)

    def whole_amax(self, direction, part, axis):
        """Amax over the whole tensor (axis None), of the rows `part` (axis 1) or of the columns (axis 0)."""
        transformed = self.hadamard[direction] and self.hadamard_amax
        if not self.changed & VALUE_STAGES and transformed == self._reference_transformed(direction):
            known = self._reference_amax(direction)
            if known is not None:
                return self.setting.settled_amax(direction, known if part is None else known[part], part)
        if self.setting.probing and math.prod(self.shape) > 1 << 20 and part is None:
            hint = self.setting.dumped_amax(direction)
            if hint is not None:
                return hint
        stages = self._applied_in(VALUE_STAGES | {"rounding"})
        where = (transformed and direction, self.amax_rounded, axis, part and (part.start, part.stop))
        key = ("amax", stages, *where)
        if key not in self.setting.cache:
            self.setting.cache[key] = self._compute_amax(direction, transformed, part, axis)
        return self.setting.settled_amax(direction, self.setting.cache[key], part)

    def _reference_transformed(self, direction):
        return direction == "columnwise" and isinstance(self.scaling, NVFP4Scaling) and self.scaling.rht

    def _reference_amax(self, direction):
        """The reference's amax if it is that of the values that this replay takes it of, else None."""
        amax = self.setting.reference.get(f"amax_{direction}")
        if amax is None and not self._reference_transformed("columnwise"):
            other = "columnwise" if direction == "rowwise" else "rowwise"
            per_row = isinstance(self.scaling, NVFP4Scaling) and self.scaling.row_scaled
            amax = None if per_row else self.setting.reference.get(f"amax_{other}")
        if amax is None:
            return None
        path = PATHS["unfused"] if self.kind == "quantize" else path_of(self.scaling)
        exact = self.kind == "quantize" or self.dtype == F
        if path.amax_rounded == self.amax_rounded or exact:
            return amax
        # Rounding is monotone: the amax of rounded values is the rounded amax.
        return self.round(amax) if self.amax_rounded else None

    def _compute_amax(self, direction, transformed, part, axis):
        m, k = self.shape
        rows = part if axis == 1 else slice(0, m)
        columns = part if axis == 0 else slice(0, k)
        elements = (rows.stop - rows.start) * (columns.stop - columns.start)
        if elements > 1 << 20:
            self.setting.spend(elements)
        height = max(128, (1 << 17) // max(1, columns.stop - columns.start) // 128 * 128)
        maxima = []
        for start in range(rows.start, rows.stop, height):
            values = self.compute(slice(start, min(start + height, rows.stop)), columns)
            if self.amax_rounded:
                values = self.round(values)
            if transformed:
                values = self.transform(values, direction)
            maxima.append(self.maximum(self.magnitude(values), axis))
        if axis == 1:
            return np.concatenate(maxima) if maxima else np.zeros(0, F)
        return self.maximum(np.array(maxima, F).reshape(len(maxima), -1), 0).astype(F)

    # --- scales -----------------------------------------------------------------------------------

    def encode_scale(self, amax):
        """Stage (per tensor, block): the encode scale of each amax."""
        amax = np.where(amax < F(self.scaling.amax_epsilon), F(self.scaling.amax_epsilon), amax).astype(F)
        per_block = isinstance(self.scaling, BlockScaling)
        scale = self.scale_max / amax
        scale = np.where(np.isinf(scale), LARGEST_SCALE[self.dtype] if per_block else FLT_MAX, scale)
        if self.scaling.power_2_scale:
            scale = power_of_two_below(scale)
        return np.where((amax == 0) | ~np.isfinite(amax), F(1), scale).astype(F)

    def given_scale(self):
        """Stage (delayed): the encode scale."""
        return np.full((1, 1), self.scaling.scale, F)

    def decode_scale(self, scale):
        """Stage (per tensor, block): what is stored for an encode scale."""
        return F(1) / scale

    def scale_byte(self, amax):
        """Stage (MXFP8): the scale byte of each block amax."""
        return mxfp8.scale_byte(amax, self.scaling.fmt, self.scaling.scale_rounding)

    def byte_multiplier(self, byte):
        """Stage (MXFP8): what elements are multiplied with."""
        return mxfp8.ENCODE_MULTIPLIER[byte]

    def global_scale(self, amax):
        """Stage (NVFP4): S_enc of each tensor (or row) amax."""
        return nvfp4.global_encode_scale(amax, self.e4m3_max)

    def block_byte(self, amax, s_enc):
        """Stage (NVFP4): the E4M3 scale byte of each block amax."""
        return self.encode_block_scale(np.fmin(amax * (s_enc * nvfp4.ONE_SIXTH), FLT_MAX))

    def encode_block_scale(self, scale):
        """Stage (NVFP4): the cast of a block scale to E4M3."""
        return encode_tile(scale, E4M3)

    def nvfp4_multiplier(self, byte, s_enc):
        """Stage (NVFP4): what elements are multiplied with."""
        return nvfp4.encode_multiplier(byte, s_enc)

    def scales(self, amax, tensor_amax):
        """Stage: (what is stored, what elements are multiplied with) for each block."""
        if isinstance(self.scaling, MXFP8Scaling):
            byte = self.scale_byte(amax)
            return byte, self.byte_multiplier(byte)
        if isinstance(self.scaling, NVFP4Scaling):
            s_enc = self.global_scale(tensor_amax)
            byte = self.block_byte(amax, s_enc)
            return byte, self.nvfp4_multiplier(byte, s_enc)
        scale = self.given_scale() if isinstance(self.scaling, DelayedScaling) else self.encode_scale(amax)
        return self.decode_scale(scale), scale

    def stored_scale(self, scale):
        """Stage: the scales as they are written."""
        return scale

    def stored_amax(self, amax, direction):
        """Stage: the amax as it is written."""
        return amax

    # --- casts ------------------------------------------------------------------------------------

    def multiply(self, values, multiplier):
        """Stage: values times encode multiplier."""
        return values * multiplier

    def encode(self, values, bits):
        """Stage: the cast to codes; `bits` are random bits or None."""
        if bits is not None:
            return encode_tile(values, self.fmt, rounding="stochastic", random_bits=bits)
        return encode_tile(values, self.fmt, saturate=self.saturate, rounding=self.rounding)

    def random_bits(self, direction, region):
        """Stage: random bits of a rectangle, (R, C), or None without stochastic rounding."""
        scaling = self.scaling
        if not (isinstance(scaling, NVFP4Scaling) and scaling.stochastic_rounding):
            return None
        columnwise = direction == "columnwise"
        outer, inner = (region.columns, region.rows) if columnwise else (region.rows, region.columns)
        if scaling.random_bits is not None:
            given = scaling.random_bits
            bits = (given[columnwise] if isinstance(given, tuple) else given)[outer, inner]
        else:
            bits = self._philox_bits(columnwise, outer, inner)
        return bits.T if columnwise else bits

    def _philox_bits(self, columnwise, outer, inner):
        """Random bits of a rectangle in its stored orientation; those of the call are kept for other replays."""
        key = ("bits", columnwise, outer.start, outer.stop, inner.start, inner.stop)
        cache = self.setting.values_cache
        usual = "random" not in self.changed
        if usual and key in cache:
            return cache[key]
        m, k = self.shape
        blocks_per_row = (m if columnwise else k) // 16
        block = np.arange(inner.start // 16, inner.stop // 16)
        number = columnwise * m * (k // 16) + np.arange(outer.start, outer.stop)[:, None] * blocks_per_row + block
        bits = self.philox(number.ravel()).reshape(number.shape[0], -1)
        if usual:
            cache[key] = bits
        return bits

    def philox(self, number):
        """Stage: random bytes of each 16-element block."""
        return philox_bytes(self.scaling.seed, self.scaling.offset, number)

    def hadamard_groups(self, groups):
        """Stage: the transform of (n, 16, C) along axis 1."""
        return transform_groups(groups, self.sign_mask, self.dtype).astype(F)

    def transform(self, values, direction):
        """The Hadamard transform along a direction's blocks: of groups of 16 rows for columnwise copies."""
        along_rows = values if direction == "columnwise" else np.ascontiguousarray(values.T)
        groups = along_rows.reshape(-1, 16, along_rows.shape[1])
        transformed = self.hadamard_groups(groups).reshape(along_rows.shape)
        return transformed if direction == "columnwise" else np.ascontiguousarray(transformed.T)

    def block_error(self, codes, scales, blocks, tensor_amax):
        """Stage (4over6): the error of each block in TE's order of additions."""
        scale = E4M3.values[scales][:, None, :, None]
        amax = tensor_amax[:, None, :, None]
        difference = ((E2M1.values[codes] * scale) * amax) / F(6 * self.e4m3_max) - blocks
        error = np.abs(difference) if self.four_over_six == "mae" else difference * difference
        if error.shape[3] == 1:
            return sum_in_order(np.moveaxis(error, 1, 0))[..., 0]
        rows = sum_in_order(np.moveaxis(error, 3, 0))
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        return rows[:, 0]

    def take_four(self, error_of_four, error_of_six):
        """Stage (4over6): where the block maximum becomes 4."""
        return error_of_four < error_of_six

    def choose_four_or_six(self, blocks, amax, tensor_amax):
        """(codes, scale bytes) of 4over6."""
        s_enc = self.global_scale(tensor_amax)
        base = (amax / F(6)) * s_enc
        made = []
        for factor in (F(1), F(1.5)):
            scales = self.encode_block_scale(np.fmin(base * factor, F(448)))
            multiplier = self.nvfp4_multiplier(scales, s_enc)[:, None, :, None]
            codes = self.encode(self.multiply(blocks, multiplier), None)
            made.append((codes, scales, self.block_error(codes, scales, blocks, tensor_amax)))
        (codes6, scales6, error6), (codes4, scales4, error4) = made
        four = self.take_four(error4, error6)
        return np.where(four[:, None, :, None], codes4, codes6), np.where(four, scales4, scales6)

    def quantize_blocks(self, values, amax_values, direction, region):
        """Return (codes (R, C), stored scales, one for each block)."""
        rows, columns = self.block_shapes[direction] or region.shape
        blocks = block_view(pad_to_blocks(values, rows, columns), rows, columns)
        tensor_amax = None
        if self.block_shapes[direction] is None:  # per tensor
            delayed = isinstance(self.scaling, DelayedScaling)
            amax = None if delayed else self.tensor_amax(direction, region)
        else:
            amax_blocks = blocks
            if amax_values is not values:
                amax_blocks = block_view(pad_to_blocks(amax_values, rows, columns), rows, columns)
            amax = self.block_amax(amax_blocks)
            if isinstance(self.scaling, NVFP4Scaling):  # with row scaling one for each row (column) of a block
                tensor_amax = self.tensor_amax(direction, region)
                tensor_amax = tensor_amax[:: rows if len(tensor_amax) > 1 else 1]
                tensor_amax = tensor_amax[:, :: columns if tensor_amax.shape[1] > 1 else 1]
        if isinstance(self.scaling, NVFP4Scaling) and self.four_over_six:
            codes, scales = self.choose_four_or_six(blocks, amax, tensor_amax)
        else:
            scales, multiplier = self.scales(amax, tensor_amax)
            bits = self.random_bits(direction, region)
            if bits is not None:
                bits = block_view(pad_to_blocks(np.ascontiguousarray(bits), rows, columns), rows, columns)
            codes = self.encode(self.multiply(blocks, multiplier[:, None, :, None]), bits)
        codes = codes.reshape(codes.shape[0] * codes.shape[1], -1)[: values.shape[0], : values.shape[1]]
        return codes, scales

    # --- outputs ----------------------------------------------------------------------------------

    def run(self, region, names):
        """Return output name -> what is written of `region`, in the stored orientation (`crop` of a dump)."""
        if not self.halo:
            return self._run(region, names)
        made = {}
        for direction in DIRECTIONS:
            mine = [name for name in names if direction in name]
            wide = self._with_halo(region, direction)
            inside = Region(
                slice(region.rows.start - wide.rows.start, region.rows.stop - wide.rows.start),
                slice(region.columns.start - wide.columns.start, region.columns.stop - wide.columns.start),
            )
            for name, array in self._run(wide, mine).items():
                made[name] = part_of(self.scaling, name, array, inside)
        return made

    def _with_halo(self, region, direction):
        """The region with the blocks beside it: all of them, so that their order wraps, or a tile at each end."""
        edges = []
        for part, size, along in zip(
            (region.rows, region.columns), self.shape, (direction == "columnwise", direction == "rowwise"), strict=True
        ):
            if not along:
                edges.append(part)
            elif self.setting.whole_halo:
                edges.append(slice(0, size))
            else:
                edges.append(slice(max(part.start - 128, 0), min(part.stop + 128, size)))
        return Region(*edges)

    def _run(self, region, names):
        with np.errstate(all="ignore"):
            made = {}
            if self.scaling is not None:
                for direction in DIRECTIONS:
                    if any(n in QUANTIZED and direction in n for n in names):
                        made |= self._quantized(direction, region, names)
            elif "y" in names or "dx" in names:
                name = "dx" if self.gradient else "y"
                made[name] = self.to_dtype(self.values(region.rows, region.columns), self.out_dtype)
            return {name: made[name] for name in names if name in made}

    def _quantized(self, direction, region, names):
        made = {}
        geometry = Geometry.of(self.scaling, direction)
        needed = {n for n in names if direction in n}
        if not needed <= {f"amax_{direction}"}:
            unrounded = self.values(region.rows, region.columns)
            rounded = None
            if self.casts_rounded or self.block_amax_rounded:
                rounded = self.round(unrounded)
            values = rounded if self.casts_rounded else unrounded
            amax_values = values
            if self.block_amax_rounded is not None:
                amax_values = rounded if self.block_amax_rounded else unrounded
            if self.hadamard[direction]:
                same = amax_values is values
                values = self.transform(values, direction)
                amax_values = values if same else self.transform(amax_values, direction)
            codes, scales = self.quantize_blocks(values, amax_values, direction, region)
            made[f"{direction}_data"] = geometry.store_codes(codes)
            shape = self.block_shapes[direction]
            scales = self.stored_scale(scales)
            made[f"{direction}_scale_inv"] = geometry.store_scales(scales, shape, region.shape)
        if f"amax_{direction}" in needed:
            made[f"amax_{direction}"] = self.stored_amax(self.tensor_amax(direction, region).reshape(-1), direction)
        return made

    # --- sums -------------------------------------------------------------------------------------

    def sum_terms(self, columns):
        """Stage: float32 (M, C), what the bias gradient adds up."""
        values = self.compute(slice(0, self.shape[0]), columns)
        if not self.dbias_rounded:
            return values
        if self.scaling is None:
            return self.to_dtype(values, self.out_dtype).astype(F)
        return self.round(values)

    def column_sum(self, terms):
        """Stage: sums over rows, in chunks of 128 rows."""
        m, columns = terms.shape
        chunks = np.zeros((ceil_div(m, SUM_CHUNK) * SUM_CHUNK, columns), F)
        chunks[:m] = terms
        chunks = chunks.reshape(-1, SUM_CHUNK, columns)
        return sum_in_order(sum_in_order(np.moveaxis(chunks, 1, 0)))

    def dbias(self, columns):
        """What is written of the bias gradient."""
        with np.errstate(all="ignore"):
            return self.to_dtype(self.column_sum(self.sum_terms(columns)), self.dtype)

    def row_gradient_terms(self, dy, act, gate, rows):
        """Stage: what the gradient of a row's scale adds up."""
        return dy * self.forward(act, gate, None)

    def drow_scales(self, rows):
        """What is written of the gradients of row scales."""
        with np.errstate(all="ignore"):
            total = np.zeros(rows.stop - rows.start, F)
            for chunk in column_chunks(self.width):
                h = np.arange(chunk.start, chunk.stop)
                terms = self.row_gradient_terms(self.load_upstream(rows, chunk), *self.halves(rows, h), rows)
                total += self.sum_row(terms)
            return self.to_dtype(total, self.case.inputs["row_scales"].dtype)

    def sum_row(self, terms):
        """Stage: the sum of at most 128 columns."""
        return row_sum(terms)


class DequantizeKernel(Kernel):
    """The high-precision tensor that a Quantized stands for."""

    def __init__(self, setting):
        super().__init__(setting)
        q = self.case.inputs["q"]
        self.q = q.unswizzled() if q.with_gemm_swizzled_scales else q
        self.scaling = q.scaling
        self.direction = "rowwise" if self.q.rowwise_data is not None else "columnwise"
        self.geometry = Geometry.of(self.scaling, self.direction)
        self.shape, self.dtype = setting.shape, q.dtype
        self.fmt = self.scaling.fmt
        self.hadamard = self.direction == "columnwise" and isinstance(self.scaling, NVFP4Scaling) and self.scaling.rht

    def codes(self, region):
        """Stage: codes of a rectangle, (R, C)."""
        return self.geometry.codes(getattr(self.q, f"{self.direction}_data"), self.shape, region.rows, region.columns)

    def whole_scales(self):
        """Stage: the scales as stored, whole."""
        return getattr(self.q, f"{self.direction}_scale_inv")

    def decode(self, codes):
        """Stage: values of codes."""
        return self.fmt.values[codes]

    def decode_scale(self, scales):
        """Stage: values of stored scales."""
        if isinstance(self.scaling, MXFP8Scaling):
            return E8M0.values[scales]
        return E4M3.values[scales] if isinstance(self.scaling, NVFP4Scaling) else scales

    def amax(self, region):
        """Stage (NVFP4): the amax, broadcast against (R, C)."""
        amax = getattr(self.q, f"amax_{self.direction}")
        if not self.scaling.row_scaled:
            return amax.reshape(1, 1)
        return amax[region.columns][None] if self.direction == "columnwise" else amax[region.rows][:, None]

    def factor(self):
        """Stage (NVFP4): the constant."""
        return F(1) / F(6 * self.scaling.e4m3_max)

    def block_factor(self, scales, region):
        """Stage: what elements are multiplied with; `scales` are values, one an element or broadcast."""
        if isinstance(self.scaling, NVFP4Scaling):
            return (scales * self.amax(region)) * self.factor()
        return scales

    def multiply(self, values, factor):
        """Stage: element times factor."""
        return values * factor

    def spread(self, scales, region):
        """Stage: stored scales -> one for each element of a rectangle."""
        return self.geometry.expand(self.geometry.scales(scales, region.rows, region.columns), region.shape)

    def inverse_hadamard(self, values):
        """Stage: the transform undone, along groups of 16 rows."""
        groups = values.reshape(-1, 16, values.shape[1])
        mask = self.scaling.sign_mask
        return transform_groups(np.ascontiguousarray(groups), mask, F, inverse=True).reshape(values.shape)

    def run(self, region, names):
        """Return {"y": what is written of `region`}."""
        with np.errstate(all="ignore"):
            scales = self.decode_scale(self.spread(self.whole_scales(), region))
            factor = self.block_factor(scales, region)
            values = self.multiply(self.decode(self.codes(region)), factor)
            if self.hadamard:
                values = self.inverse_hadamard(values)
            return {"y": self.to_dtype(values, self.out_dtype)}


class UpdateKernel(Kernel):
    """The update of delayed scales.

    Attributes (knobs): fmt, margin, algorithm, keep_unused as in `refops.update_delayed_scale`.
    """

    def __init__(self, setting):
        super().__init__(setting)
        params = self.case.params
        self.fmt, self.margin = params["fmt"], params.get("margin", 0)
        self.algorithm, self.keep_unused = params.get("algorithm", "max"), params.get("keep_unused", True)
        history, scale = self.case.inputs.values()
        self.history = np.asarray(history).reshape(len(history), -1)
        self.scale = np.asarray(scale, F).reshape(-1)

    def amax(self, history):
        """Stage: the amax that the next scale is made from."""
        if callable(self.algorithm):
            made = np.asarray(self.algorithm(np.asarray(self.case.inputs["amax_history"])))
            return made.reshape(self.scale.shape).astype(F)
        return np.fmax.reduce(quieted(history), axis=0) if self.algorithm == "max" else history[0]

    def roll(self, history):
        """Stage: the history moved by one, row 0 cleared."""
        return np.concatenate([np.zeros_like(history[:1]), history[2:], history[:1]])[: len(history)]

    def unused(self, history):
        """Stage: columns that stay as they are."""
        return (history[0] == 0) & self.keep_unused & (not callable(self.algorithm))

    def fresh_scale(self, amax):
        """Stage: the scale of each amax."""
        scale = (self.fmt.max * F(2.0**-self.margin)) / amax
        return np.where(np.isinf(scale), FLT_MAX, scale)

    def usable(self, amax):
        """Stage: amaxes that give a scale."""
        return np.isfinite(amax) & (amax > 0)

    def run(self, region, names):
        """Return name -> what is written."""
        with np.errstate(all="ignore"):
            history = self.history
            amax, unused = self.amax(history), self.unused(history)
            scale = np.where(self.usable(amax) & ~unused, self.fresh_scale(amax), self.scale).astype(F)
            history = np.where(unused, history, self.roll(history)).astype(F)
            shapes = {name: self.case.slots[name].shape for name in ("amax_history", "scale")}
            made = {"amax_history": history.reshape(shapes["amax_history"]), "scale": scale.reshape(shapes["scale"])}
            return {name: made[name] for name in names}


#: Stages that change the values before any rounding: those of a formula, and of the amax besides.
FORMULA_STAGES = {"input", "gate", "function", "product", "upstream", "row-scale", "result"}
VALUE_STAGES = FORMULA_STAGES | {"magnitude", "maximum", "hadamard"}
#: The arrays of a Quantized.
QUANTIZED = {f"{d}_{what}" for d in DIRECTIONS for what in ("data", "scale_inv")} | {f"amax_{d}" for d in DIRECTIONS}


def as_slice(index):
    """An ascending run of indices as a slice, others as they are."""
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def power_of_two_below(scale):
    """Positive float32 with the mantissa cleared."""
    return (np.ascontiguousarray(scale, F).view(np.uint32) & np.uint32(0xFF800000)).view(F)
