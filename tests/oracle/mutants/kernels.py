"""A right kernel for every operation, built from pieces that a fault replaces one at a time.

`Kernel` is written as a kernel's author would: whole tensors, NumPy and ml_dtypes casts, its own exp and tanh that are
up to one ulp off. It shares no arithmetic with `refops` or its oracle, except the Philox bits of stochastic rounding.
It is no reference: it is the thing that the oracle judges, right as it stands and wrong with a piece replaced.
"""

import ml_dtypes
import numpy as np

import refops
from refops.rounding import philox_bytes

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
FLT_MAX = np.finfo(np.float32).max
DEFAULTS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, "beta1": 4.0, "beta2": 25.0}
#: Gated activation -> function of its activated half.
ACT_OF = {
    "glu": "sigmoid",
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped",
    "situglu": "situ",
}
CODE_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
NAN_CODES = {"e4m3": 0x7F, "e5m2": 0x7F, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x7}


# --- helpers ----------------------------------------------------------------------------------------------------------


def off_by_an_ulp(nearest, x):
    """`nearest` with a quarter of its elements one ulp up and a quarter one down, by the bits of `x`: a fast exp."""
    step = ((x.view(np.uint32) * np.uint32(2654435761)) >> np.uint32(30)).astype(np.int32)
    bits = nearest.view(np.int32)
    moved = np.where(step == 1, bits + 1, np.where(step == 2, bits - 1, bits)).view(F)
    return np.where(np.isfinite(nearest) & (nearest != 0) & (np.abs(nearest) != 1), moved, nearest)


def limit_of(fmt_name):
    """Largest finite value of a format."""
    return F(ml_dtypes.finfo(CODE_DTYPES[fmt_name]).max)


def cast(v, fmt_name):
    """Saturating cast to nearest even: float32 -> uint8 codes."""
    limit, nan = limit_of(fmt_name), np.isnan(v)
    codes = np.clip(np.where(nan, F(0), v), -limit, limit).astype(CODE_DTYPES[fmt_name]).view(np.uint8)
    return np.where(nan, np.uint8(NAN_CODES[fmt_name]), codes)


def decode(codes, fmt_name):
    """Codes -> float32."""
    return codes.view(CODE_DTYPES[fmt_name]).astype(F)


def tiles(v, rows, columns):
    """(R, C) -> (R/rows, rows, C/columns, columns), zeros beyond the edge."""
    v = pad(v, rows, columns)
    return v.reshape(v.shape[0] // rows, rows, v.shape[1] // columns, columns)


def pad(a, rows, columns):
    """Zeros up to multiples of (rows, columns)."""
    return np.pad(a, ((0, -a.shape[0] % rows), (0, -a.shape[1] % columns)))


def spread(scales, rows, columns, shape):
    """One entry a block -> one entry an element."""
    return np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[: shape[0], : shape[1]]


def pack(codes):
    """FP4 codes (R, C) -> bytes (R, C/2), the first code in the low nibble."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def unpack(data):
    """Undo `pack`."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def gemm_index(shape):
    """Flat position of entry (i, j) of padded scales in the order that GEMMs read: 128 x 4 tiles of 512 bytes."""
    i, j = np.indices(shape)
    return ((i // 128) * (shape[1] // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4


def gemm_order(scales):
    """Padded scales [outer, block] stored in the order that GEMMs read, in the same shape."""
    out = np.empty(scales.size, scales.dtype)
    out[gemm_index(scales.shape).ravel()] = scales.ravel()
    return out.reshape(scales.shape)


def read_in_gemm_order(scales):
    """What a GEMM finds for each (i, j) in these bytes."""
    return scales.ravel()[gemm_index(scales.shape)]


def mx_byte_up(amax, largest):
    """Round amax / largest up to a power of two."""
    bits = np.asarray(amax * (F(1) / largest), F).view(np.uint32)
    exponent, mantissa = (bits >> 23).astype(np.int32), bits & np.uint32(0x7FFFFF)
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    return np.where(np.isinf(amax), 254, exponent + up).astype(np.uint8)


def mx_byte_ocp(amax, fmt_name, rule):
    """2^(e - emax): e from amax rounded down ("floor"), up ("ceil_ocp"), half up to the format's mantissa ("even")."""
    emax, mantissa = {"e4m3": (8, 3), "e5m2": (15, 2), "e3m2": (4, 2), "e2m3": (2, 3)}[fmt_name]
    if rule == "even":
        amax = (amax.view(np.uint32) + np.uint32(1 << (22 - mantissa)) & np.uint32(0x7F800000)).view(F)
    fraction, exponent = np.frexp(np.where(np.isfinite(amax), amax, F(1)))
    exponent = exponent - ((fraction == 0.5) | (rule != "ceil_ocp"))
    return exponent_byte(exponent - emax, amax)


def exponent_byte(exponents, amax):
    """Clamp exponents to E8M0; zero blocks get 0, infinite ones 254."""
    return np.where(amax == 0, 0, np.where(np.isinf(amax), 254, np.clip(exponents + 127, 0, 254))).astype(np.uint8)


def hadamard_matrix(mask):
    """The 16-point transform with its signs, normalised: out = v @ matrix."""
    i = np.arange(16)
    parity = np.array([[bin(a & b).count("1") & 1 for b in i] for a in i])
    signs = np.where(mask >> i & 1, -1.0, 1.0)
    return signs[:, None] * np.where(parity, -0.25, 0.25)


# --- activations: float32, term by term -------------------------------------------------------------------------------


def _gelu(k, x):
    return x * (F(0.5) + F(0.5) * k.tanh(x * (F(0.79788456) + F(0.03567741) * x * x)))


def _gelu_slope(k, x):
    t = k.tanh(F(0.79788456) * x * (F(1) + F(0.044715) * x * x))
    return F(0.5) * x * ((F(1) - t * t) * (F(0.79788456) + F(0.1070322243) * x * x)) + F(0.5) * (F(1) + t)


def _silu(k, x, alpha=1):
    return x * k.sigmoid(F(alpha) * x)


def _silu_slope(k, x, alpha=1):
    z = F(alpha) * x
    s = k.sigmoid(z)
    return z * s * (F(1) - s) + s


def _clamped(k, x):
    c = np.fmin(x, k.limit)
    return c * k.sigmoid(k.alpha * c)


def _clamped_slope(k, x):
    return np.where(x <= k.limit, _silu_slope(k, np.fmin(x, k.limit), k.alpha), F(0))


def _situ(k, x):
    return k.beta1 * k.tanh(x / k.beta1) * k.sigmoid(x)


def _situ_slope(k, x):
    t, s = k.tanh(x / k.beta1), k.sigmoid(x)
    return (F(1) - t * t) * s + k.beta1 * t * s * (F(1) - s)


def _sigmoid_slope(k, x):
    s = k.sigmoid(x)
    return s * (F(1) - s)


VALUES = {
    "gelu": _gelu,
    "qgelu": lambda k, x: _silu(k, x, 1.702),
    "relu": lambda k, x: np.where(x > 0, x, F(0)),
    "srelu": lambda k, x: np.where(x > 0, x * x, F(0)),
    "silu": _silu,
    "sigmoid": lambda k, x: k.sigmoid(x),
    "clamped": _clamped,
    "situ": _situ,
}
SLOPES = {
    "gelu": _gelu_slope,
    "qgelu": lambda k, x: _silu_slope(k, x, 1.702),
    "relu": lambda k, x: np.where(x > 0, F(1), F(0)),
    "srelu": lambda k, x: np.where(x > 0, F(2) * x, F(0)),
    "silu": _silu_slope,
    "sigmoid": _sigmoid_slope,
    "clamped": _clamped_slope,
    "situ": _situ_slope,
}


# --- the kernel -------------------------------------------------------------------------------------------------------


class Kernel:
    """One operation on given inputs. Every public method is a piece that `outputs` can replace by keyword.

    Attributes:
        op: a name of the oracle's operations.
        scaling, params: as for the oracle.
        inputs: name -> array; for dequantize {"q": Quantized}.
        rowwise, columnwise, dbias: what is written.
        rng: random numbers for where a fault strikes.
        limit, alpha, glu_linear_offset, beta1, beta2: parameters, float32.
    """

    def __init__(self, op, scaling, params, inputs, *, rowwise=True, columnwise=False, dbias=False, seed=0):
        self.op, self.scaling, self.params, self.inputs = op, scaling, params, inputs
        self.rowwise, self.columnwise, self.dbias = rowwise, columnwise, dbias
        self.rng = np.random.default_rng(seed + 7919)
        for name, default in DEFAULTS.items():
            setattr(self, name, F(params.get(name, default)))
        name = op.removeprefix("scaled_")
        self.gradient = "dy" in inputs
        self.activation = name[1:] if self.gradient else name
        self.gated = self.activation in ACT_OF
        self.function = ACT_OF.get(self.activation, self.activation)
        self.dtype = inputs["x"].dtype if "x" in inputs else BF16
        self.fmt = None if scaling is None else scaling.fmt.name

    def outputs(self, **pieces):
        """What the kernel writes: name -> array. `pieces` replace methods and attributes of the same name."""
        for name, piece in pieces.items():
            assert hasattr(self, name), f"no piece {name}"
            setattr(self, name, piece)
        with np.errstate(all="ignore"):
            if self.op == "dequantize":
                return {"y": self.store(self.dequantized())}
            if self.op == "update_delayed_scale":
                return self._update()
            f = self.computed()
            return self._plain(f) if self.scaling is None else self._quantized(f)

    def right(self):
        """A fresh kernel without a fault on the same inputs: what it writes."""
        flags = {"rowwise": self.rowwise, "columnwise": self.columnwise, "dbias": self.dbias}
        return Kernel(self.op, self.scaling, self.params, self.inputs, **flags).outputs()

    # --- elementary functions

    def exp(self, x):
        return off_by_an_ulp(np.exp(x.astype(np.float64)).astype(F), x)

    def tanh(self, x):
        return off_by_an_ulp(np.tanh(x.astype(np.float64)).astype(F), x)

    def sigmoid(self, x):
        return F(1) / (F(1) + self.exp(-x))

    # --- the activation

    def load(self, array):
        return array.reshape(-1, array.shape[-1]).astype(F)

    def split(self, x):
        """[act | gate] -> act, gate."""
        g = self.params.get("glu_interleave_size", 0)
        if g:
            parts = x.reshape(len(x), -1, 2, g)
            return parts[:, :, 0].reshape(len(x), -1), parts[:, :, 1].reshape(len(x), -1)
        half = x.shape[1] // 2
        return x[:, :half], x[:, half:]

    def join(self, d_act, d_gate):
        """Undo `split`."""
        g = self.params.get("glu_interleave_size", 0)
        if g:
            rows = len(d_act)
            return np.stack([d_act.reshape(rows, -1, g), d_gate.reshape(rows, -1, g)], axis=2).reshape(rows, -1)
        return np.concatenate([d_act, d_gate], axis=1)

    def value(self, x):
        return VALUES[self.function](self, x)

    def slope(self, x):
        return SLOPES[self.function](self, x)

    def gate(self, g):
        if self.activation == "clamped_swiglu":
            return np.fmin(np.fmax(g, -self.limit), self.limit) + self.glu_linear_offset
        return self.beta2 * self.tanh(g / self.beta2) if self.activation == "situglu" else g

    def gate_slope(self, g):
        if self.activation == "clamped_swiglu":
            return np.where((g <= self.limit) & (g >= -self.limit), F(1), F(0))
        if self.activation == "situglu":
            t = self.tanh(g / self.beta2)
            return F(1) - t * t
        return np.ones_like(g)

    def between(self, v):
        """What happens to the activated half before the product with the gate."""
        return v

    def row_scale(self, f):
        """Multiply rows by their scales."""
        return f * self.load(self.inputs["row_scales"].reshape(-1, 1))

    def computed(self):
        """The float32 result (M, N), before any rounding."""
        x = self.load(self.inputs["x"])
        if self.op == "quantize":
            return x
        if self.gradient:
            dy = self.load(self.inputs["dy"])
            if "row_scales" in self.inputs:
                dy = self.row_scale(dy)
            return self.backward(dy, x)
        f = self.forward(x)
        return self.row_scale(f) if "row_scales" in self.inputs else f

    def forward(self, x):
        if not self.gated:
            return self.value(x)
        act, gate = self.split(x)
        return self.between(self.value(act)) * self.gate(gate)

    def backward(self, dy, x):
        if not self.gated:
            return self.slope(x) * dy
        act, gate = self.split(x)
        return self.join(
            self.slope(act) * dy * self.gate(gate), self.gate_slope(gate) * dy * self.between(self.value(act))
        )

    # --- what is written without scaling

    def store(self, f):
        """Round to the output's dtype."""
        return f.astype(self.dtype)

    def rounded(self, f):
        """Round to the input's dtype and back."""
        return f.astype(self.dtype).astype(F)

    def column_sum(self, v):
        return v.sum(axis=0, dtype=F)

    def row_gradient(self):
        """Gradient of the row scales."""
        return (self.load(self.inputs["dy"]) * self.forward(self.load(self.inputs["x"]))).sum(axis=1, dtype=F)

    def _plain(self, f):
        shape = self.inputs["x"].shape
        if not self.gradient:
            return {"y": self.store(f).reshape(*shape[:-1], -1)}
        out = {"dx": self.store(f).reshape(shape)}
        if self.dbias:
            out["dbias"] = self.store_sum(self.column_sum(self.summed(f)))
        if "row_scales" in self.inputs:
            row_scales = self.inputs["row_scales"]
            out["drow_scales"] = self.row_gradient().astype(row_scales.dtype).reshape(row_scales.shape)
        return out

    def store_sum(self, total):
        return total.astype(self.dtype)

    # --- which values the fused kernels use

    @property
    def fused(self):
        """Whether the kernel sees the values before they are rounded to the input's dtype."""
        s = self.scaling
        if isinstance(s, refops.NVFP4Scaling):
            return not (s.rht or s.row_scaled)
        return isinstance(s, refops.DelayedScaling | refops.CurrentScaling | refops.MXFP8Scaling)

    def before_cast(self, f):
        return f if isinstance(self.scaling, refops.DelayedScaling) else self.rounded(f)

    def before_amax(self, f):
        """Values for the amax of the whole tensor."""
        per_tensor = refops.DelayedScaling | refops.CurrentScaling | refops.NVFP4Scaling
        return f if self.fused and isinstance(self.scaling, per_tensor) else self.rounded(f)

    def summed(self, f):
        """Values for the bias gradient."""
        return f if isinstance(self.scaling, refops.DelayedScaling | refops.MXFP8Scaling) else self.rounded(f)

    # --- scales and casts

    def magnitude(self, v):
        return np.abs(v)

    def maximum(self, v, axis=None):
        """Largest of `v`; NaN does not count."""
        return np.fmax.reduce(v, axis=axis, initial=F(0))

    def tensor_amax(self, v):
        return F(self.maximum(self.magnitude(v)))

    def block_amax(self, v, rows, columns):
        """One entry a block."""
        return self.maximum(self.magnitude(tiles(v, rows, columns)), axis=(1, 3))

    def largest(self):
        """The format's largest value, as the scale's numerator."""
        return limit_of(self.fmt)

    def floor_amax(self, amax):
        return np.fmax(amax, F(self.scaling.amax_epsilon))

    def power_of_two(self, scale):
        """Round a scale down to a power of two where the settings ask for it."""
        if not self.scaling.power_2_scale:
            return scale
        return (np.asarray(scale, F).view(np.uint32) & np.uint32(0x7F800000)).view(F)

    def scale_of(self, amax):
        """FP8 scale for each amax."""
        block = isinstance(self.scaling, refops.BlockScaling)
        overflow = ml_dtypes.finfo(self.dtype).max if block else FLT_MAX
        amax = self.floor_amax(np.asarray(amax, F))
        scale = np.asarray(self.largest() / amax, F)
        scale = self.power_of_two(np.where(np.isinf(scale), F(overflow), scale))
        return np.where((amax == 0) | ~np.isfinite(amax), F(1), scale)

    def stored_scale(self, scale):
        return (F(1) / scale).astype(F)

    def product(self, v, scale):
        return v * scale

    def cast(self, v):
        return cast(v, self.fmt)

    # --- quantization

    def _quantized(self, f):
        v, wide = self.before_cast(f), self.before_amax(f)
        s = self.scaling
        if isinstance(s, refops.DelayedScaling | refops.CurrentScaling):
            out = self.per_tensor(v, wide)
        elif isinstance(s, refops.BlockScaling):
            out = self.blocks(v)
        elif isinstance(s, refops.MXFP8Scaling):
            out = self.mxfp8(v)
        else:
            out = self.nvfp4(v, wide)
        if self.dbias:
            out["dbias"] = self.store_sum(self.column_sum(self.summed(f)))
        return out

    def per_tensor(self, v, wide):
        amax = self.tensor_amax(wide)
        delayed = isinstance(self.scaling, refops.DelayedScaling)
        scale = F(self.scaling.scale) if delayed else F(self.scale_of(amax))
        codes = self.cast(self.product(v, scale))
        out = {}
        for made, name, data in ((self.rowwise, "rowwise", codes), (self.columnwise, "columnwise", codes.T)):
            if made:
                out[f"{name}_data"] = np.ascontiguousarray(data)
                out[f"{name}_scale_inv"] = np.array([self.stored_scale(scale)], F)
                out[f"amax_{name}"] = np.array([amax], F)
        return out

    def block_scales(self, v, rows, columns):
        """Scale of each block of float32 block scaling."""
        return self.scale_of(self.block_amax(v, rows, columns))

    def blocks(self, v):
        edge = 128 if self.scaling.block_dim == 2 else 1
        out = {}
        for made, name, matrix in ((self.rowwise, "rowwise", v), (self.columnwise, "columnwise", v.T)):
            if made:
                scale = self.block_scales(matrix, edge, 128)
                out[f"{name}_data"] = self.cast(self.product(matrix, spread(scale, edge, 128, matrix.shape)))
                stored = self.stored_scale(scale)
                out[f"{name}_scale_inv"] = pad(stored if edge > 1 else stored.T, 1, 4)
        return {name: np.ascontiguousarray(array) for name, array in out.items()}

    def mx_byte(self, amax):
        """amax -> E8M0 byte by the rule of the settings."""
        rule = self.scaling.scale_rounding
        return mx_byte_up(amax, self.largest()) if rule == "up" else mx_byte_ocp(amax, self.fmt, rule)

    def mx_multiplier(self, byte):
        return np.ldexp(F(1), 127 - byte.astype(np.int32)).astype(F)

    def mx_bytes(self, v, rows, columns):
        """Scale byte of each block."""
        return self.mx_byte(self.block_amax(v, rows, columns))

    def mx_stored(self, byte):
        return byte

    def mx_spread(self, scales, rows, columns, shape):
        """Which scale each element uses."""
        return spread(scales, rows, columns, shape)

    def mxfp8(self, v):
        edge = 32 if self.scaling.two_d else 1
        out = {}
        for made, name, rows, columns in (
            (self.rowwise, "rowwise", edge, 32),
            (self.columnwise, "columnwise", 32, edge),
        ):
            if not made:
                continue
            byte = self.mx_bytes(v, rows, columns)
            multiplier = self.mx_spread(self.mx_multiplier(byte), rows, columns, v.shape)
            out[f"{name}_data"] = self.cast(self.product(v, multiplier))
            scales = self.mx_stored(byte)
            if name == "rowwise":
                scales = pad(np.repeat(scales, edge, axis=0)[: len(v)], 128, 4)
            else:
                scales = pad(np.repeat(scales, edge, axis=1)[:, : v.shape[1]], 4, 128)
            out[f"{name}_scale_inv"] = scales
        return out

    # --- NVFP4

    def global_scale(self, amax):
        s = np.fmin(F(self.scaling.e4m3_max * 6) / amax, FLT_MAX)
        return np.where((amax == 0) | (s == 0), F(1), s).astype(F)

    def nv_byte(self, amax, s_enc):
        return cast(np.fmin(amax * (s_enc * (F(1) / F(6))), FLT_MAX), "e4m3")

    def nv_multiplier(self, byte, s_enc):
        return np.fmin(F(1) / (decode(byte, "e4m3") * (F(1) / s_enc)), FLT_MAX)

    def hadamard(self, v):
        """Groups of 16 rows of (M, K), rounded to the input's dtype."""
        groups = v.astype(np.float64).reshape(-1, 16, v.shape[1])
        total = np.einsum("gik,ij->gjk", groups, self.hadamard_matrix()) + 0.0
        return self.rounded(total.reshape(v.shape).astype(F))

    def hadamard_matrix(self):
        return hadamard_matrix(self.scaling.sign_mask)

    def random_bytes(self, rows, columns, first):
        """One byte an element, blocks numbered from `first`."""
        number = first + np.arange(rows * columns // 16)
        return philox_bytes(self.scaling.seed, self.scaling.offset, number).reshape(rows, columns)

    def stochastic(self, v, random_bytes):
        """E2M1 codes: add a random share of the step, then cut."""
        a = np.fmin(np.abs(v), F(16))
        step = np.where(a < 2, F(0.5), np.where(a < 4, F(1), F(2)))
        t = (a.astype(np.float64) + step.astype(np.float64) * (random_bytes / 256)).astype(F)
        step = np.where(t < 2, F(0.5), np.where(t < 4, F(1), F(2)))
        cut = np.fmin(np.floor(t / step) * step, F(6))
        return cast(np.where(np.isnan(v), F(6), np.copysign(cut, v)), "e2m1")

    def nv_amax(self, wide):
        """Amax of a direction: one, or one a row of the stored orientation."""
        if self.scaling.row_scaled:
            return self.maximum(self.magnitude(wide), axis=1)
        return np.array([self.tensor_amax(wide)], F)

    def row_values(self, v):
        return v

    def column_values(self, v):
        return self.hadamard(v) if self.scaling.rht else v

    def nvfp4(self, v, wide):
        m, n = v.shape
        out = {}
        if self.rowwise:
            random = self.random_bytes(m, n, 0) if self.scaling.stochastic_rounding else None
            amax = self.nv_amax(wide)
            data, scales = self.nv_direction(self.row_values(v), amax, random)
            out |= {"rowwise_data": data, "rowwise_scale_inv": scales, "amax_rowwise": amax}
        if self.columnwise:
            random = self.random_bytes(n, m, m * n // 16) if self.scaling.stochastic_rounding else None
            transformed = self.column_values(v)
            amax = self.column_amax(wide, transformed)
            data, scales = self.nv_direction(np.ascontiguousarray(transformed.T), amax, random)
            out |= {"columnwise_data": data, "columnwise_scale_inv": scales, "amax_columnwise": amax}
        return out

    def column_amax(self, wide, transformed):
        return self.nv_amax((transformed if self.scaling.rht else wide).T)

    def nv_edge(self):
        """Rows of a block in the stored orientation."""
        return 16 if self.scaling.two_d else 1

    def nv_candidate(self, v, byte, s_enc, edge):
        """Codes of (R, C) given the scale bytes."""
        multiplier = spread(self.nv_multiplier(byte, s_enc), edge, 16, v.shape)
        return self.cast(self.product(v, multiplier))

    def nv_direction(self, v, amax, random):
        """Packed codes and padded scales, blocks along the last axis; `amax` has one entry or one a row."""
        edge, amax = self.nv_edge(), amax[:, None]
        maxima, s_enc = self.block_amax(v, edge, 16), self.global_scale(amax)
        if self.scaling.four_over_six:
            codes, byte = self.four_over_six(v, maxima, amax, s_enc, edge)
        else:
            byte = self.nv_byte(maxima, s_enc)
            if random is None:
                codes = self.nv_candidate(v, byte, s_enc, edge)
            else:
                multiplier = spread(self.nv_multiplier(byte, s_enc), edge, 16, v.shape)
                codes = self.stochastic(self.product(v, multiplier), random)
        scales = np.repeat(self.nv_stored(byte, s_enc), edge, axis=0)
        return pack(codes), pad(scales, 128, 4)

    def nv_stored(self, byte, s_enc):
        """Stored bytes, one a block or one a tile."""
        return byte

    def error(self, d):
        return np.abs(d) if self.scaling.four_over_six == "mae" else d * d

    def choose_four(self, error6, error4):
        return error4 < error6

    def four_over_six(self, v, maxima, amax, s_enc, edge):
        """Codes and bytes of the better of two attempts: the block's maximum becomes 6 or 4."""
        attempts = []
        for factor in (F(1), F(1.5)):
            byte = cast(np.fmin(maxima / F(6) * s_enc * factor, F(448)), "e4m3")
            codes = self.nv_candidate(v, byte, s_enc, edge)
            scale = spread(decode(byte, "e4m3"), edge, 16, v.shape)
            d = decode(codes, "e2m1") * scale * amax / F(6 * self.scaling.e4m3_max) - v
            d = tiles(self.error(d), edge, 16)
            total = np.zeros(d.shape[:3], F)
            for j in range(16):
                total = total + d[..., j]
            while total.shape[1] > 1:
                half = total.shape[1] // 2
                total = total[:, :half] + total[:, half:]
            attempts.append((codes, byte, total[:, 0]))
        (codes6, byte6, error6), (codes4, byte4, error4) = attempts
        four = self.choose_four(error6, error4)
        return np.where(spread(four, edge, 16, v.shape), codes4, codes6), np.where(four, byte4, byte6)

    # --- the way back

    def scales_read(self, scales):
        """Stored scales as the kernel finds them."""
        return scales

    def factors(self, q, columnwise):
        """What each code of the stored orientation is multiplied by."""
        s = q.scaling
        scales = self.scales_read(q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv)
        outer, inner = q.matrix_shape[::-1] if columnwise and not isinstance(s, refops.MXFP8Scaling) else q.matrix_shape
        if isinstance(s, refops.DelayedScaling | refops.CurrentScaling):
            return self.per_element(scales)
        if isinstance(s, refops.BlockScaling):
            valid = scales if s.block_dim == 2 else scales.T
            return self.per_element(spread(valid, 128 if s.block_dim == 2 else 1, 128, (outer, inner)))
        if isinstance(s, refops.MXFP8Scaling):
            rows, columns = (32, 1) if columnwise else (1, 32)
            return self.per_element(
                np.ldexp(F(1), spread(scales, rows, columns, (outer, inner)).astype(np.int32) - 127)
            )
        amax = q.amax_columnwise if columnwise else q.amax_rowwise
        values = spread(decode(scales, "e4m3"), 1, 16, (outer, inner))
        return self.per_element(values * self.global_amax(amax)[:, None] * self.tail_factor())

    def global_amax(self, amax):
        return amax

    def tail_factor(self):
        return F(1) / F(6 * self.scaling.e4m3_max)

    def per_element(self, factors):
        """The factor itself."""
        return factors.astype(F)

    def codes_read(self, data):
        """Codes of the stored orientation, decoded."""
        nv = isinstance(self.scaling, refops.NVFP4Scaling)
        return decode(unpack(data) if nv else data, self.fmt)

    def dequantized(self):
        q = self.inputs["q"]
        columnwise = q.rowwise_data is None
        values = self.codes_read(q.columnwise_data if columnwise else q.rowwise_data) * self.factors(q, columnwise)
        if not columnwise or isinstance(q.scaling, refops.MXFP8Scaling):
            return values
        rht = isinstance(q.scaling, refops.NVFP4Scaling) and q.scaling.rht
        return self.inverse_hadamard(values.T) if rht else values.T

    def inverse_hadamard(self, v):
        """Undo `hadamard`."""
        groups = v.astype(np.float64).reshape(-1, 16, v.shape[1])
        return np.einsum("gjk,ij->gik", groups, self.hadamard_matrix()).reshape(v.shape).astype(F)

    # --- delayed scaling's update

    def newest_amax(self, history):
        """The amax that the next scale follows from."""
        if self.params.get("algorithm", "max") == "max":
            return self.maximum(history, axis=0)
        return history[0]

    def roll(self, history):
        return np.concatenate([np.zeros_like(history[:1]), history[2:], history[:1]])[: len(history)]

    def numerator(self):
        return limit_of(self.params["fmt"].name) * F(2.0 ** -self.params.get("margin", 0))

    def next_scale(self, amax):
        return self.numerator() / amax

    def scale_amax(self, history):
        return self.newest_amax(history)

    def unused(self, newest):
        """Columns that this step did not see: nothing changes there."""
        return newest == 0

    def _update(self):
        history, scale = self.inputs["amax_history"], self.inputs["scale"]
        amax, unused = self.scale_amax(history), self.unused(history[0])
        fresh = np.fmin(self.next_scale(amax), FLT_MAX)
        new_scale = np.where(unused | ~np.isfinite(amax) | (amax <= 0), scale, fresh).astype(F)
        return {"amax_history": np.where(unused, history, self.roll(history)), "scale": new_scale}
