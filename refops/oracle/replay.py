"""An operation evaluated in stages with exchangeable rules: what another convention would have written.

Each operation is evaluated on a rectangle of its result: load -> formula -> rounding -> amax -> scale -> multiply ->
cast -> store. Every stage is a method; a convention (`refops.oracle.conventions`) replaces or wraps one on an instance,
so that two conventions of different stages compose. With nothing replaced the result is that of `refops`, bit for bit.

This is no second reference: it shares `refops`' arithmetic on purpose. Its output is compared with a dump only to say
*which* rule a kernel follows; whether the dump is right is decided by the enclosure.
"""

import dataclasses
import math

import numpy as np

from refops.formats import encode_tile
from refops.oracle.geometry import TILE, Geometry, Region, as_slice, part_of
from refops.quantization.delayed import quieted
from refops.quantization.hadamard import transform_exactly, transform_groups
from refops.quantization.layout import block_amax, ceil_div, padded_blocks
from refops.quantization.quantize import amax_of_tile, philox_groups
from refops.quantization.result import DIRECTIONS
from refops.rounding import philox_bytes, stored
from refops.scalings import UNFUSED
from refops.scalings.arithmetic import Reference
from refops.scalings.declaration import FLT_MAX
from refops.tiles import SUM_CHUNK, Matrix, column_chunks, row_sum, sum_in_order

F = np.float32
#: Elements that all evaluations of a whole tensor together may compute in one diagnosis.
WHOLE_TENSOR_WORK = 1 << 26


#: Rows or columns up to which the blocks beside a region are all of a line, so that their order wraps.
WHOLE_HALO = 512
#: Elements of a result that is kept whole, where a scale needs the amax of all.
KEPT_WHOLE = 1 << 18
#: Elements that are kept of all results.
KEPT = 1 << 23
#: Numbers from which on a new table is faster than the function.
LEAST_LOOKED_UP = 1 << 13
#: Relative difference of two amaxes that float32 arithmetic explains.
AMAX_NOISE = 2.0**-19


def amax_is_near(amax, other):
    """Where two amaxes differ by no more than the noise of float32 arithmetic."""
    amax, other = amax.astype(np.float64), other.astype(np.float64)
    return (amax == other) | (np.abs(amax - other) <= AMAX_NOISE * np.abs(np.where(np.isfinite(other), other, 0)))


class NotApplicable(Exception):  # noqa: N818 (an answer, not an error)
    """A convention has no meaning for this operation, or would cost too much to try."""


class Setting:
    """What all replays of one diagnosis share: the case, its matrices, the dump, and earlier results.

    Attributes:
        case: the `Case`.
        outputs, reference: output name -> whole array, as dumped and as the reference writes it.
        wrong: output name -> bool array, entries that are wrong; {} where they are not known.
        shape: (M, K) of the result.
        probing: amaxes of a changed formula may be taken from the dump (confirmed later from the whole tensor).
        whole_halo: replays that need the blocks beside a region compute all of its rows and columns.
        probe: a region with wrong entries, from which conventions may estimate a factor; None where there is none.
        scale_values: what the dump holds most often among its wrong scales.
    """

    def __init__(self, case, outputs, reference, wrong=None):
        self.case, self.outputs, self.reference = case, outputs, reference
        self.wrong = {} if wrong is None else wrong
        self.probing, self.whole_halo, self.probe, self.scale_values = False, True, None, []
        self.work = 0
        self.cache = {}
        self.values_cache, self.kept = {}, 0
        self.tables = {}
        self.shape = case.matrix_shape
        self.matrices = {}
        if case.operation.kind not in ("update_delayed_scale", "dequantize"):
            self.matrices = {n: Matrix(t) for n, t in case.inputs.items() if n != "row_scales"}
        self.bound = case.bound

    def faulty(self, name):
        """bool array: entries of an output in which a fault shows: the wrong ones, if any, else all other bits.

        What differs beside wrong entries is what the freedom of exp and tanh allows. Entries that follow from a wrong
        amax or scale are right under it, and only differ.
        """
        differs = self.outputs[name] != self.reference[name]
        wrong = self.wrong.get(name)
        return differs if wrong is None or not wrong.any() else differs & wrong

    def replay(self):
        """A new replay with no rule exchanged."""
        kind = self.case.operation.kind
        if kind == "update_delayed_scale":
            return UpdateReplay(self)
        return DequantizeReplay(self) if kind == "dequantize" else TensorReplay(self)

    def spend(self, elements):
        """Account for an evaluation of a whole tensor; NotApplicable when too much was spent."""
        if self.work + elements > WHOLE_TENSOR_WORK:
            raise NotApplicable("too many evaluations of the whole tensor")
        self.work += elements

    def keep(self, key, make):
        """The array of a key, made once; all are forgotten when too many elements are kept."""
        if key not in self.values_cache:
            if self.kept > KEPT:
                self.values_cache.clear()
                self.kept = 0
            self.values_cache[key] = make()
            self.kept += self.values_cache[key].size
        return self.values_cache[key]

    def settled_amax(self, direction, amax, part=None):
        """`amax`, or what the dump has in its place where they differ by the noise of float32 arithmetic.

        Scales and codes follow from the amax that the kernel found: a last bit of it moves many ties.
        """
        dumped = self.outputs.get(f"amax_{direction}")
        if dumped is None or (part is None) != (dumped.size == 1):
            return amax
        dumped = dumped if part is None else dumped[part]
        if np.array_equal(dumped, amax):  # as most often
            return amax
        return np.where(amax_is_near(dumped, amax), dumped, amax)

    def dumped_amax(self, direction):
        """The tensor's amax in the dump (or the one that its scale implies), float32 (1,), or None."""
        amax = self.outputs.get(f"amax_{direction}")
        if amax is None:
            amax = self.outputs.get("amax_rowwise", self.outputs.get("amax_columnwise"))
        scale_inv = self.outputs.get(f"{direction}_scale_inv")
        if amax is None and scale_inv is not None and scale_inv.dtype == np.float32 and scale_inv.shape == (1,):
            amax = scale_inv * self.case.scaling.fmt.max
        return amax if amax is not None and amax.shape == (1,) else None


class Table:
    """An elementwise function at numbers of a dtype of 16 bits: each that occurs is computed once.

    Args:
        function: float32 array -> float32 array.
        dtype: of 16 bits.
    """

    def __init__(self, function, dtype):
        self._function, self._dtype = function, dtype
        self._results, self._known = np.empty(1 << 16, F), np.zeros(1 << 16, bool)

    def __call__(self, x):
        """The function at float32 numbers; None where one of them is NaN or not of the dtype."""
        narrow = x.astype(self._dtype)
        if not np.array_equal(narrow.astype(F), x):
            return None
        codes = narrow.view(np.uint16)
        occurs = np.zeros(1 << 16, bool)
        occurs[codes] = True
        new = np.flatnonzero(occurs & ~self._known).astype(np.uint16)
        if new.size:
            self._results[new] = self._function(new.view(self._dtype).astype(F))
            self._known[new] = True
        return self._results.take(codes)


class StagedWords(Reference):
    """The vocabulary of scale rules whose casts are stages of a replay."""

    def __init__(self, replay):
        self._replay = replay

    def encode(self, fmt, rounding="nearest_even"):
        """f(x) -> code, by the stage."""
        return lambda x: self._replay.cast_scale(x, fmt, rounding)

    def decode(self, fmt):
        """f(code) -> value, by the stage."""
        return lambda code: self._replay.read_scale(code, fmt)


class Rule:
    """What a scaling declares about its scales, as functions of arrays.

    Attributes:
        scaling: whose.
        tensor_scale, block_scale, scale_code, multiplier, decode_factor, choice: as of `Scaling`; scale_code is None
            with float32 scales.
    """

    def __init__(self, scaling, words):
        coded = scaling.layout.scale_format is not None
        self.scaling = scaling
        self.tensor_scale, self.choice = scaling.tensor_scale(words), scaling.choice(words)
        self.block_scale, self.scale_code = scaling.block_scale(words), scaling.scale_code(words) if coded else None
        self.multiplier, self.decode_factor = scaling.multiplier(words), scaling.decode_factor(words)


class Replay:
    """What the replays have in common: how stages are exchanged, and a record of those that were.

    Attributes:
        setting: the `Setting`.
        case, operation, layout: shortcuts; layout is None where nothing is quantized.
        scaling: the settings that are followed, None where nothing is quantized; the case's unless `vary` changed them.
        computes, dequantizes, updates: which of the three kinds it is: a tensor is computed (and perhaps quantized),
            dequantized, or delayed scales are updated.
        applied: (convention, choice) pairs, in order.
        changed: stages that they changed.
        facts: words that their sentences use.
        rows: `Lines` of the tensor that a convention of a sum speaks of; None for all.
    """

    computes = dequantizes = updates = False
    rows = None

    def __init__(self, setting):
        self.setting, self.case, self.operation = setting, setting.case, setting.case.operation
        self.scaling = self.case.scaling
        self.layout = None if self.scaling is None else self.scaling.layout
        self._rule, self._varied = None, {}
        self.applied, self.changed, self.facts = (), set(), {}

    def require(self, condition):
        """Raise NotApplicable unless `condition` holds."""
        if not condition:
            raise NotApplicable

    def vary(self, **fields):
        """Follow other settings, even ones that cannot be combined; NotApplicable if the scaling has no such field."""
        settings = self.scaling
        self.require(all(hasattr(settings, name) for name in fields))
        self._varied |= fields
        self.scaling = object.__new__(type(settings))  # no copy: what it derives from its fields may be kept in it
        own = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        for name, value in (own | self._varied).items():
            object.__setattr__(self.scaling, name, value)

    @property
    def rule(self):
        """The `Rule` of the settings that are followed."""
        if self._rule is None or self._rule.scaling is not self.scaling:
            self._rule = Rule(self.scaling, StagedWords(self))
        return self._rule

    def cast_scale(self, values, fmt, rounding):
        """Stage: the cast of scales to their format."""
        return encode_tile(values, fmt, rounding=rounding)

    def read_scale(self, codes, fmt):
        """Stage: the values of scale codes; float32 scales, without a format, are their own."""
        return codes if fmt is None else fmt.values[codes]

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


class TensorReplay(Replay):
    """An activation, its gradient (scaled by row or not) or the identity; written as values or quantized.

    Attributes (knobs beside the methods):
        x_layout, dx_layout: `RowLayout` of a gated activation's input and of its gradient.
        casts_rounded, amax_rounded, dbias_rounded: as in `refops.ops.Path`.
        block_amax_rounded: the same for block amaxes; None: as casts_rounded.
        hadamard: direction -> whether its values go through the Hadamard transform.
        hadamard_amax: whether the columnwise amax is taken after it.
        fmt: format of the cast.
        numbers: run-time numbers of the scale rule.
        block_shapes: direction -> (rows, columns) of the elements that share a scale.
        halo: whether the replay of a rectangle needs the blocks beside it: those "along" the direction in which blocks
            run, or those "across"; None.
    """

    computes = True

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
        self.x_layout = self.dx_layout = self.case.row_layout
        self.halo, self._tables = None, {}
        self._follow_path(UNFUSED)
        if self.scaling is not None:
            self.follow(self.scaling)

    def follow(self, scaling):
        """Do all that settings say; their codes and scales lie as those of the case do."""
        self.scaling, self.layout = scaling, scaling.layout
        if self.kind != "quantize":
            self._follow_path(scaling.path)
        self.fmt, self.numbers = scaling.fmt, scaling.numbers(self.dtype)
        self.block_shapes = {direction: Geometry.of(scaling, direction).block for direction in DIRECTIONS}
        self.hadamard = {"rowwise": False, "columnwise": scaling.hadamard is not None}
        self.hadamard_amax = True
        self.rounding, self.saturate = "nearest_even", True

    def _follow_path(self, path):
        self.casts_rounded, self.amax_rounded = path.casts_rounded, path.amax_rounded
        self.dbias_rounded, self.block_amax_rounded = path.dbias_rounded, None

    @property
    def scale_max(self):
        """The value that amax is mapped to, where that is the largest of the element format."""
        return F(self.scaling.fmt.max)

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

    def looked_up(self, name, x):
        """A function of the activation at float32 `x`; of many inputs of 16 bits few differ: they come from a table."""
        function, is_own = getattr(self.bound, name), self.bound is self.setting.bound
        if self.dtype.itemsize != 2 or (x.size < LEAST_LOOKED_UP and not is_own):
            return function(x)
        tables = self.setting.tables if is_own else self._tables
        key = (id(self.bound), name)
        if key not in tables:
            tables[key] = Table(function, self.dtype)  # which holds the activation, so that its id stays its own
        results = tables[key](x)
        return function(x) if results is None else results  # another stage made other numbers of the inputs

    def value(self, act):
        """Stage: the activation."""
        return self.looked_up("value", act)

    def derivative(self, act):
        """Stage: its derivative."""
        return self.looked_up("scaled_derivative" if self.scaled else "derivative", act)

    def gate(self, gate):
        """Stage: the factor of the activation."""
        return self.bound.gate(gate)

    def gate_slope(self, gate):
        """Stage: its derivative."""
        return self.looked_up("scaled_gate_slope" if self.scaled else "gate_slope", gate)

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
        return self.setting.keep(key, lambda: self.compute(rows, columns))

    def _formula_key(self):
        return self._applied_in(FORMULA_STAGES)

    def _applied_in(self, stages):
        """(name, choice) of the conventions of some stages."""
        return tuple((c.name, repr(choice)) for c, choice in self.applied if c.stage_of(choice) in stages)

    def round(self, values):
        """float32 values rounded to the nominal dtype."""
        return self.to_dtype(values, self.dtype).astype(F)

    def source(self, values, direction, region):
        """Stage: what the copy of a direction quantizes, float32 (R, C), from the result's values."""
        return values

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
        if self.layout.amax != "rows":
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
        return direction == "columnwise" and self.case.scaling.hadamard is not None

    def _reference_amax(self, direction):
        """The reference's amax if it is that of the values that this replay takes it of, else None."""
        amax_of_rows = self.layout.amax == "rows"
        if amax_of_rows != (self.case.scaling.layout.amax == "rows"):
            return None
        amax = self.setting.reference.get(f"amax_{direction}")
        if amax is None and not self._reference_transformed("columnwise"):
            other = "columnwise" if direction == "rowwise" else "rowwise"
            amax = None if amax_of_rows else self.setting.reference.get(f"amax_{other}")
        if amax is None:
            return None
        path = UNFUSED if self.kind == "quantize" else self.case.scaling.path
        is_float32 = self.kind == "quantize" or self.dtype == F or not path.amax_rounded
        if self.amax_rounded and (is_float32 or self._exchanges("round", "to_dtype")):
            # Rounding is monotone: the amax of rounded values is the rounded amax.
            return self.round(amax) if is_float32 else None
        return amax if is_float32 or self.amax_rounded else None

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
            part = slice(start, min(start + height, rows.stop)), columns
            values = self.values(*part) if elements <= KEPT_WHOLE else self.compute(*part)
            if self.amax_rounded:
                values = self.round(values)
            if transformed:
                values = (
                    self.largest_transformed(values, direction) if axis is None else self.transform(values, direction)
                )
            maxima.append(self.maximum(self.magnitude(values), axis))
        if axis == 1:
            return np.concatenate(maxima) if maxima else np.zeros(0, F)
        return self.maximum(np.array(maxima, F).reshape(len(maxima), -1), 0).astype(F)

    def largest_transformed(self, values, direction):
        """The transform of those groups that can hold its largest magnitude, which is all that the amax needs.

        Which can is seen from a product in float32: it is off by less than 2^-10 of what a group adds up to.
        """
        safe = np.abs(values).max(initial=0) < 2.0**120  # neither NaN nor a sum beyond float32
        if self.changed & {"hadamard", "magnitude", "maximum"} or not safe:
            return self.transform(values, direction)
        along_rows = values if direction == "columnwise" else np.ascontiguousarray(values.T)
        groups = along_rows.reshape(-1, 16, along_rows.shape[1])
        matrix = transform_exactly(np.eye(16)[None], self.scaling.hadamard)[0].astype(F)
        magnitude = np.abs(matrix @ groups).max(axis=1)
        noise = np.abs(groups).max(axis=1) * F(4 * 2.0**-10)
        could = magnitude + noise >= (magnitude - noise).max(initial=0)
        return self.hadamard_groups(np.ascontiguousarray(groups.swapaxes(1, 2)[could].T[None]))

    # --- scales -----------------------------------------------------------------------------------

    def bounded(self, amax):
        """The amax as a scale rule sees it: amax_epsilon at least."""
        return np.where(amax < self.numbers.epsilon, self.numbers.epsilon, amax)

    def tensor_scale(self, amax):
        """Stage (two levels): what the blocks of a tensor (or row) of that amax share: (encode scale, its inverse)."""
        return F(0) if self.rule.tensor_scale is None else self.rule.tensor_scale(amax)

    def scale_code(self, rule, amax, tensor_scale):
        """Stage (coded scales): the code of each block amax by the declared `rule`, or by that of a candidate."""
        return rule(amax, tensor_scale, self.numbers)

    def code_multiplier(self, code, tensor_scale):
        """Stage (coded scales): what elements are multiplied by."""
        return self.rule.multiplier(code, tensor_scale)

    def encode_scale(self, amax):
        """Stage (float32 scales): the encode scale of each amax; amax is None where the scale is given."""
        if amax is None:
            return np.full((1, 1), self.scaling.given, F)
        return self.rule.block_scale(amax, F(0), self.numbers)[1]

    def decode_scale(self, scale):
        """Stage (float32 scales): what is stored for an encode scale."""
        return F(1) / scale

    def scales(self, amax, tensor_amax):
        """Stage: (what is stored, what elements are multiplied by) for each block."""
        if self.rule.scale_code is None:
            scale = self.encode_scale(amax)
            return self.decode_scale(scale), scale
        tensor_scale = self.tensor_scale(tensor_amax)
        code = self.scale_code(self.rule.scale_code, amax, tensor_scale)
        return code, self.code_multiplier(code, tensor_scale)

    def stored_scale(self, scale):
        """Stage: the scales as they are written."""
        return scale

    def place_scales(self, scales, direction, region):
        """Stage: one scale for each block of a rectangle, as they lie in their array."""
        geometry = Geometry.of(self.case.scaling, direction)
        return geometry.store_scales(scales, self.block_shapes[direction], region.shape)

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
        if self.scaling.random is None:
            return None
        columnwise = direction == "columnwise"
        given = self.scaling.random.of_copy(columnwise)
        outer, inner = self.layout.oriented((region.rows, region.columns), columnwise)
        if given is not None:
            return given[outer, inner].T if columnwise else given[outer, inner]

        def drawn():
            number = philox_groups(outer, inner, self.shape, columnwise)
            bits = self.philox(number.ravel()).reshape(len(number), -1)[:, : inner.stop - inner.start]
            return bits.T if columnwise else bits

        if "random" in self.changed:
            return drawn()
        key = ("bits", direction, region.rows.start, region.rows.stop, region.columns.start, region.columns.stop)
        return self.setting.keep(key, drawn)  # those of the call, for other replays

    def philox(self, number):
        """Stage: random bytes of each Philox subsequence."""
        return philox_bytes(self.scaling.random.seed, self.scaling.random.offset, number)

    def hadamard_groups(self, groups):
        """Stage: the transform of (n, 16, C) along axis 1."""
        return transform_groups(groups, self.scaling.hadamard, self.dtype).astype(F)

    def transform(self, values, direction):
        """The Hadamard transform along a direction's blocks: of groups of 16 rows for columnwise copies."""
        along_rows = values if direction == "columnwise" else np.ascontiguousarray(values.T)
        groups = along_rows.reshape(-1, 16, along_rows.shape[1])
        transformed = self.hadamard_groups(groups).reshape(along_rows.shape)
        return transformed if direction == "columnwise" else np.ascontiguousarray(transformed.T)

    def element_error(self, codes, scales, blocks, tensor_amax):
        """Stage (choice of scales): the error of each element."""
        scale = self.layout.scale_format.values[scales][:, None, :, None]
        return self.rule.choice.error(self.fmt.values[codes], scale, tensor_amax[:, None, :, None], blocks)

    def sum_errors(self, error):
        """Stage (choice of scales): the error of each block in TE's order of additions."""
        if error.shape[3] == 1:
            return sum_in_order(np.moveaxis(error, 1, 0))[..., 0]
        rows = sum_in_order(np.moveaxis(error, 3, 0))
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        return rows[:, 0]

    def is_better(self, error, best):
        """Stage (choice of scales): where a candidate replaces those before it."""
        return error < best

    def choose_scales(self, blocks, amax, tensor_amax):
        """(codes, scale codes) of the candidates with the smallest error."""
        tensor_scale, best = self.tensor_scale(tensor_amax), None
        for candidate in self.rule.choice.candidates:
            scales = self.scale_code(lambda *arguments, c=candidate: c(*arguments)[0], amax, tensor_scale)
            multiplier = self.code_multiplier(scales, tensor_scale)[:, None, :, None]
            codes = self.encode(self.multiply(blocks, multiplier), None)
            error = self.sum_errors(self.element_error(codes, scales, blocks, tensor_amax))
            if best is None:
                best = codes, scales, error
                continue
            better = self.is_better(error, best[2])
            made = (better[:, None, :, None], codes), (better, scales), (better, error)
            best = tuple(np.where(where, new, old) for (where, new), old in zip(made, best, strict=True))
        return best[:2]

    def amaxes(self, blocks, direction, region):
        """(amax of each block of a `block_view`, the tensor's amax or None): what the scales of a copy follow from."""
        if self.block_shapes[direction] is None:  # per tensor
            return self.tensor_amax(direction, region) if self.scaling.given is None else None, None
        amax, tensor_amax = self.block_amax(blocks), None
        if self.rule.tensor_scale is not None:  # with row scaling one for each row (column) of a block
            _, rows, _, columns = blocks.shape
            tensor_amax = self.tensor_amax(direction, region)
            tensor_amax = tensor_amax[:: rows if len(tensor_amax) > 1 else 1]
            tensor_amax = tensor_amax[:, :: columns if tensor_amax.shape[1] > 1 else 1]
        return amax, tensor_amax

    def spread(self, multiplier, direction, region):
        """Stage: the multiplier of each block -> that of each element, to be broadcast against a `block_view`."""
        return multiplier[:, None, :, None]

    def quantize_blocks(self, values, amax_values, direction, region):
        """Return (codes (R, C), stored scales, one for each block)."""
        rows, columns = self.block_shapes[direction] or region.shape
        blocks = padded_blocks(values, rows, columns)
        amax_blocks = blocks if amax_values is values else padded_blocks(amax_values, rows, columns)
        amax, tensor_amax = self.amaxes(amax_blocks, direction, region)
        if self.rule.choice is not None:
            codes, scales = self.choose_scales(blocks, amax, tensor_amax)
        else:
            scales, multiplier = self.scales(amax, tensor_amax)
            codes = self._cast(blocks, self.spread(multiplier, direction, region), direction, region)
        codes = codes.reshape(codes.shape[0] * codes.shape[1], -1)[: values.shape[0], : values.shape[1]]
        return codes, scales

    def _cast(self, blocks, multiplier, direction, region):
        """Codes of a `block_view`; kept, as many conventions of scales leave some multipliers as they are."""

        def make():
            bits = self.random_bits(direction, region)
            if bits is not None:
                _, rows, _, columns = blocks.shape
                bits = padded_blocks(np.ascontiguousarray(bits), rows, columns)
            return self.encode(self.multiply(blocks, multiplier), bits)

        prepared = self._prepared_key(direction, region, self.casts_rounded)
        is_random = self.scaling.random is not None
        other_bits = is_random and self.scaling is not self.case.scaling
        if prepared is None or other_bits or self._exchanges("multiply", "encode", "random_bits", "philox"):
            return make()
        cast = (direction, blocks.shape, self.fmt, self.saturate, self.rounding, is_random)
        return self.setting.keep(("codes", prepared, cast, multiplier.tobytes()), make)

    # --- outputs ----------------------------------------------------------------------------------

    def run(self, region, names):
        """Return output name -> what is written of `region`, in the stored orientation (`crop` of a dump)."""
        if self.halo is None:
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
                made[name] = part_of(self.case.scaling, name, array, inside)
        return made

    def _with_halo(self, region, direction):
        """The region with the blocks beside it: all of them, so that their order wraps, or a tile at each end."""
        edges = []
        for part, size, along in zip(
            (region.rows, region.columns), self.shape, (direction == "columnwise", direction == "rowwise"), strict=True
        ):
            if along == (self.halo == "across"):
                edges.append(part)
            elif self.setting.whole_halo or size <= WHOLE_HALO:
                edges.append(slice(0, size))
            else:
                edges.append(slice(max(part.start - TILE, 0), min(part.stop + TILE, size)))
        return Region(*edges)

    def _run(self, region, names):
        with np.errstate(all="ignore"):
            made = {}
            if self.scaling is not None:
                for direction in DIRECTIONS:
                    if any(direction in name for name in names):
                        made |= self._quantized(direction, region, names)
            elif "y" in names or "dx" in names:
                name = "dx" if self.gradient else "y"
                made[name] = self.to_dtype(self.values(region.rows, region.columns), self.out_dtype)
            return {name: made[name] for name in names if name in made}

    def _exchanges(self, *methods):
        """Whether a convention replaced one of these methods, or wrapped it."""
        return any(method in vars(self) for method in methods)

    def operands(self, direction, region):
        """(what the copy of a direction quantizes, what its block amaxes are taken of), each float32 (R, C)."""
        values = self._prepared(direction, region, self.casts_rounded)
        if self.block_amax_rounded in (None, self.casts_rounded):
            return values, values
        return values, self._prepared(direction, region, self.block_amax_rounded)

    def _prepared(self, direction, region, rounded):
        """What the copy of a direction quantizes, (R, C), or takes block amaxes of; kept as `values` are."""

        def make():
            values = self.source(self.values(region.rows, region.columns), direction, region)
            if rounded:
                values = self.round(values)
            return self.transform(values, direction) if self.hadamard[direction] else values

        key = self._prepared_key(direction, region, rounded)
        return make() if key is None else self.setting.keep(key, make)

    def _prepared_key(self, direction, region, rounded):
        """What settles `_prepared`; None where a convention exchanged one of its stages behind the formula."""
        if self._exchanges("source", "round", "to_dtype", "transform", "hadamard_groups"):
            return None
        transform = (direction, self.scaling.hadamard) if self.hadamard[direction] else None
        rows, columns = region.rows, region.columns
        place = (rows.start, rows.stop, columns.start, columns.stop)
        return ("prepared", self._formula_key(), rounded, self.dtype, transform, *place)

    def _quantized(self, direction, region, names):
        made = {}
        geometry = Geometry.of(self.case.scaling, direction)
        needed = {n for n in names if direction in n}
        if not needed <= {f"amax_{direction}"}:
            codes, scales = self.quantize_blocks(*self.operands(direction, region), direction, region)
            made[f"{direction}_data"] = geometry.store_codes(codes)
            made[f"{direction}_scale_inv"] = self.place_scales(self.stored_scale(scales), direction, region)
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


class DequantizeReplay(Replay):
    """The high-precision tensor that a Quantized stands for."""

    dequantizes = True

    def __init__(self, setting):
        super().__init__(setting)
        q = self.case.inputs["q"]
        self.q = q.unswizzled() if q.with_gemm_swizzled_scales else q
        self.scaling, self.layout = q.scaling, q.scaling.layout
        self.direction = "rowwise" if self.q.rowwise_data is not None else "columnwise"
        self.geometry = Geometry.of(self.scaling, self.direction)
        self.shape, self.dtype = setting.shape, q.dtype
        self.fmt = self.scaling.fmt
        self.hadamard = self.direction == "columnwise" and self.scaling.hadamard is not None

    def codes(self, region):
        """Stage: codes of a rectangle, (R, C)."""
        return self.geometry.codes(getattr(self.q, f"{self.direction}_data"), self.shape, region.rows, region.columns)

    def whole_scales(self):
        """Stage: the scales as stored, whole."""
        return getattr(self.q, f"{self.direction}_scale_inv")

    def decode(self, codes):
        """Stage: values of codes."""
        return self.fmt.values[codes]

    def amax(self, region):
        """Stage (two levels): the amax, broadcast against (R, C); None where decoding needs none."""
        if not self.layout.two_level:
            return None
        amax = getattr(self.q, f"amax_{self.direction}")
        return amax_of_tile(self.layout, amax, region.rows, region.columns, self.direction == "columnwise")

    def block_factor(self, scales, region):
        """Stage: what elements are multiplied by; `scales` as stored, one an element or broadcast."""
        if self.layout.scale_format is None:
            scales = self.read_scale(scales, None)
        return self.rule.decode_factor(scales, self.amax(region))

    def multiply(self, values, factor):
        """Stage: element times factor."""
        return values * factor

    def spread(self, scales, region):
        """Stage: stored scales -> one for each element of a rectangle."""
        return self.geometry.expand(self.geometry.scales(scales, region.rows, region.columns), region.shape)

    def hadamard_groups(self, groups):
        """Stage: the transform of (n, 16, C) along axis 1, undone."""
        return transform_groups(groups, self.scaling.hadamard, F, inverse=True)

    def run(self, region, names):
        """Return {"y": what is written of `region`}."""
        with np.errstate(all="ignore"):
            factor = self.block_factor(self.spread(self.whole_scales(), region), region)
            values = self.multiply(self.decode(self.codes(region)), factor)
            if self.hadamard:
                groups = np.ascontiguousarray(values).reshape(-1, 16, values.shape[1])
                values = self.hadamard_groups(groups).reshape(values.shape)
            return {"y": self.to_dtype(values, self.out_dtype)}


class UpdateReplay(Replay):
    """The update of delayed scales.

    Attributes (knobs): fmt, margin, algorithm, keep_unused as in `refops.update_delayed_scale`.
    """

    updates = True

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
#: The stage of a convention that follows other settings in all of them: it goes together with no other.
SETTINGS = "settings"


def power_of_two_below(scale):
    """Positive float32 with the mantissa cleared."""
    return (np.ascontiguousarray(scale, F).view(np.uint32) & np.uint32(0xFF800000)).view(F)
