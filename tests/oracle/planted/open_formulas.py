"""Formulas and parameters: a limit, a clamp, an exchanged operand, a missing term or factor of a derivative."""

import math

import numpy as np

import refops
from planted import open_common as c
from planted.open_common import BF16, SHAPE, F
from planted.registry import Where, normal, planted

MX = refops.MXFP8Scaling(refops.E4M3)
ROW, VALUES = ("rowwise",), ("values",)
X, GATED = normal(SHAPE), normal((224, 704))
WIDE_GATED = normal((224, 704), scale=4.0)
GRADIENT, GATED_GRADIENT = c.with_dy(SHAPE), c.with_dy(SHAPE, gated=True)


def elementwise(x, function, rows=32, columns=64):
    """A kernel of one input, tile by tile."""
    y = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, rows, columns):
        y[r, t] = function(c.f32(x[r, t])).astype(BF16)
    return {"y": y}


def gated(x, function, rows=32, columns=64):
    """A kernel of act and gate, tile by tile."""
    h = x.shape[1] // 2
    y = np.zeros((len(x), h), BF16)
    for r, t in c.tiles(y.shape, rows, columns):
        y[r, t] = function(c.f32(x[r, t]), c.f32(x[r, h + t.start : h + t.stop])).astype(BF16)
    return {"y": y}


def gradient(dy, x, function):
    """A gradient kernel of one input, tile by tile."""
    dx = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 32, 64):
        dx[r, t] = function(c.f32(dy[r, t]), c.f32(x[r, t])).astype(BF16)
    return {"dx": dx}


def gated_gradient(dy, x, function):
    """A gradient kernel of act and gate, tile by tile."""
    h = dy.shape[1]
    dx = np.zeros(x.shape, BF16)
    for r, t in c.tiles(dy.shape, 32, 32):
        gate = slice(h + t.start, h + t.stop)
        d_act, d_gate = function(c.f32(dy[r, t]), c.f32(x[r, t]), c.f32(x[r, gate]))
        dx[r, t], dx[r, gate] = d_act.astype(BF16), d_gate.astype(BF16)
    return {"dx": dx}


@planted("clamped_swiglu", GATED, Where(VALUES), params={"limit": 1.5})
def limit_of_seven_compiled_in(x):
    """The limit is the constant 7 of the model that the kernel was written for; the caller passes 1.5."""

    def body(act, gate):
        a = np.fmin(act, F(7))
        b = np.fmin(np.fmax(gate, F(-7)), F(7))
        return a * c.sigmoid(F(1.702) * a) * (b + F(1))

    return gated(x, body)


@planted("clamped_swiglu", GATED, Where(VALUES))
def alpha_of_one(x):
    """The sigmoid is taken of the activated value itself (alpha = 1); alpha is 1.702."""

    def body(act, gate):
        a = np.fmin(act, F(7))
        return a * c.sigmoid(a) * (np.clip(gate, F(-7), F(7)) + F(1))

    return gated(x, body)


@planted("clamped_swiglu", WIDE_GATED, Where(VALUES), params={"limit": 2.0})
def act_clamped_from_below_too(x):
    """The activated half is clamped to [-limit, limit]; it should be clamped from above alone."""

    def body(act, gate):
        a = np.clip(act, F(-2), F(2))
        return a * c.sigmoid(F(1.702) * a) * (np.clip(gate, F(-2), F(2)) + F(1))

    return gated(x, body)


@planted("clamped_swiglu", WIDE_GATED, Where(VALUES), params={"limit": 2.0})
def gate_clamped_from_above_alone(x):
    """The gate is min(gate, limit); it should be clamped at -limit too."""

    def body(act, gate):
        a = np.fmin(act, F(2))
        return a * c.sigmoid(F(1.702) * a) * (np.fmin(gate, F(2)) + F(1))

    return gated(x, body)


@planted("clamped_swiglu", GATED, Where(VALUES))
def gate_without_offset(x):
    """The gate lacks the 1 that is added to it after the clamp, glu_linear_offset."""

    def body(act, gate):
        a = np.fmin(act, F(7))
        return a * c.sigmoid(F(1.702) * a) * np.clip(gate, F(-7), F(7))

    return gated(x, body)


@planted("clamped_swiglu", WIDE_GATED, Where(VALUES), params={"limit": 2.0, "glu_linear_offset": 1.0})
def offset_added_before_clamp(x):
    """The offset is added to the gate before it is clamped, clamp(gate + 1); it should be clamp(gate) + 1."""

    def body(act, gate):
        a = np.fmin(act, F(2))
        return a * c.sigmoid(F(1.702) * a) * np.clip(gate + F(1), F(-2), F(2))

    return gated(x, body)


def clamped_slopes(act, gate, limit):
    """What the gradient of clamped_swiglu is made of: c, its sigmoid, the slope before the mask, the clamped gate."""
    a = np.fmin(act, F(limit))
    z = F(1.702) * a
    s = c.sigmoid(z)
    return a, s, z * (s * (F(1) - s)) + s, np.clip(gate, F(-limit), F(limit)) + F(1)


@planted("dclamped_swiglu", c.with_dy(SHAPE, gated=True, scale=3.0), Where(VALUES), params={"limit": 2.0})
def gate_gradient_passes_beyond_limit(dy, x):
    """d_gate is not set to zero where the gate is beyond -limit or limit."""

    def body(g, act, gate):
        a, s, slope, clamped = clamped_slopes(act, gate, 2.0)
        return np.where(act <= 2, slope, F(0)) * g * clamped, g * (a * s)

    return gated_gradient(dy, x, body)


@planted("dclamped_swiglu", c.with_dy(SHAPE, gated=True, scale=3.0), Where(VALUES), params={"limit": 2.0})
def act_gradient_passes_above_limit(dy, x):
    """d_act is not set to zero where act is above the limit: the slope at the limit is used there."""

    def body(g, act, gate):
        a, s, slope, clamped = clamped_slopes(act, gate, 2.0)
        mask = (gate <= 2) & (gate >= -2)
        return slope * g * clamped, np.where(mask, g, F(0)) * (a * s)

    return gated_gradient(dy, x, body)


@planted("dgelu", GRADIENT, Where(VALUES))
def dgelu_of_dy_times_x(dy, x):
    """The arguments of the kernel are in the wrong order: x * gelu'(dy) instead of dy * gelu'(x)."""
    return gradient(x, dy, lambda g, v: c.dgelu(v) * g)


@planted("dsilu", GRADIENT, Where(VALUES))
def dsilu_without_one_minus_s(dy, x):
    """silu's derivative is x s + s; the factor 1 - s of its first term is missing, x s (1 - s) + s."""

    def body(g, v):
        s = c.sigmoid(v)
        return (v * s + s) * g

    return gradient(dy, x, body)


@planted("dgelu", GRADIENT, Where(VALUES))
def dgelu_inner_derivative_without_square(dy, x):
    """The derivative of tanh's argument is the constant 0.798; its term 0.107 x^2 is missing."""

    def body(g, v):
        t = c.tanh((c.LINEAR * v) * (F(1) + (c.RATIO * v) * v))
        return ((F(0.5) * v) * ((F(1) - t * t) * c.LINEAR) + F(0.5) * (F(1) + t)) * g

    return gradient(dy, x, body)


@planted("dgelu", GRADIENT, Where(ROW), MX)
def dgelu_slope_with_one_minus_tanh(dy, x):
    """The derivative of tanh is computed as 1 - t; it is 1 - t^2."""
    data, scale = c.mx_buffers(x.shape)
    for r, b in c.tiles(x.shape, 32, 32):
        v = c.f32(x[r, b])
        t = c.tanh((c.LINEAR * v) * (F(1) + (c.RATIO * v) * v))
        slope = (F(0.5) * v) * ((F(1) - t) * (c.LINEAR + (c.SLOPE * v) * v)) + F(0.5) * (F(1) + t)
        data[r, b], scale[r, b.start // 32] = c.mx_block(c.bf16(slope * c.f32(dy[r, b])))
    return c.rowwise(data, scale)


@planted("dqgelu", GRADIENT, Where(VALUES))
def dqgelu_without_inner_factor(dy, x):
    """The derivative of x sigmoid(1.702 x) is computed as x s (1 - s) + s; the inner factor 1.702 of the first term is
    missing."""

    def body(g, v):
        s = c.sigmoid(F(1.702) * v)
        return (v * (s * (F(1) - s)) + s) * g

    return gradient(dy, x, body)


@planted("dsrelu", GRADIENT, Where(VALUES))
def dsrelu_without_two(dy, x):
    """The derivative of max(x, 0)^2 is max(x, 0); the factor 2 is missing."""
    return gradient(dy, x, lambda g, v: np.fmax(v, F(0)) * g)


def with_zeros(rng):
    """Inputs of a gradient with many zeros in x."""
    x = c.draw(rng, SHAPE)
    x[rng.random(SHAPE) < 0.2] = 0
    return {"dy": c.draw(rng, SHAPE), "x": x}


@planted("drelu", with_zeros, Where(VALUES))
def drelu_passes_at_zero(dy, x):
    """relu's gradient passes where x >= 0; at x = 0 it should be 0, it passes where x > 0."""
    return gradient(dy, x, lambda g, v: np.where(v >= 0, g, F(0)))


@planted("dswiglu", GATED_GRADIENT, Where(VALUES, columns=(0, 351)))
def d_act_without_gate(dy, x):
    """d_act is dy silu'(act); it should be multiplied by the gate. d_gate is right."""
    return gated_gradient(dy, x, lambda g, act, gate: (c.dsilu(act) * g, g * c.silu(act)))


@planted("dgeglu", GATED_GRADIENT, Where(VALUES, columns=(352, 703)))
def d_gate_with_act_not_activated(dy, x):
    """d_gate is dy act; it should be dy gelu(act). d_act is right."""
    return gated_gradient(dy, x, lambda g, act, gate: (c.dgelu(act) * g * gate, g * act))


@planted("dswiglu", GATED_GRADIENT, Where(VALUES, columns=(0, 351)))
def d_act_with_value_for_derivative(dy, x):
    """d_act is dy silu(act) gate, with the function where its derivative silu'(act) belongs. d_gate is right."""
    return gated_gradient(dy, x, lambda g, act, gate: (c.silu(act) * g * gate, g * c.silu(act)))


@planted("gelu", X, Where(VALUES))
def gelu_with_erf(x):
    """gelu is computed with erf, x (1 + erf(x / sqrt 2)) / 2; it should have the tanh form."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return elementwise(x, lambda v: (v * 0.5 * (1 + erf(v * math.sqrt(0.5)))).astype(F))


@planted("geglu", normal((96, 256)), Where(VALUES))
def geglu_with_quick_gelu(x):
    """The activated half is act sigmoid(1.702 act), quick gelu; geglu has the tanh form of gelu."""
    return gated(x, lambda act, gate: c.qgelu(act) * gate)


@planted("qgelu", X, Where(VALUES))
def qgelu_with_tanh_gelu(x):
    """quick gelu is computed by the tanh form of gelu; it should be x sigmoid(1.702 x)."""
    return elementwise(x, c.gelu)


@planted("gelu", X, Where(ROW), MX)
def gelu_with_cubic_coefficient_applied_twice(x):
    """tanh's argument is 0.798 (x + 0.0357 x^3); 0.0357 already has the factor 0.798 in it, the coefficient there
    should be 0.0447."""
    data, scale = c.mx_buffers(x.shape)
    for r, b in c.tiles(x.shape, 32, 32):
        v = c.f32(x[r, b])
        u = c.LINEAR * (v + c.CUBIC * v * v * v)
        data[r, b], scale[r, b.start // 32] = c.mx_block(c.bf16(v * (F(0.5) + F(0.5) * c.tanh(u))))
    return c.rowwise(data, scale)


@planted("silu", X, Where(VALUES))
def sigmoid_of_plus_x(x):
    """The exponent has the wrong sign: x / (1 + e^x) instead of x / (1 + e^-x)."""
    return elementwise(x, lambda v: v / (F(1) + c.exp(v)))


@planted("swiglu", GATED, Where(VALUES))
def silu_of_gate_half(x):
    """The activation is applied to the second half of a row, act silu(gate); it belongs to the first, silu(act)
    gate."""
    return gated(x, lambda act, gate: act * c.silu(gate))


@planted("srelu", X, Where(VALUES))
def srelu_without_clamp(x):
    """x^2 is computed for negative x too; max(x, 0)^2 is 0 there."""
    return elementwise(x, lambda v: v * v)


@planted("glu", GATED, Where(VALUES))
def glu_with_silu(x):
    """The activated half is act sigmoid(act) as in swiglu; glu's is sigmoid(act) alone."""
    return gated(x, lambda act, gate: c.silu(act) * gate)


@planted("situglu", GATED, Where(VALUES), params={"beta1": 1.5, "beta2": 3.0})
def situ_betas_exchanged(x):
    """beta1 and beta2 are passed in the wrong order: 3 for the activated half and 1.5 for the gate instead of 1.5 and
    3."""

    def body(act, gate):
        beta1, beta2 = F(3), F(1.5)
        return beta1 * c.tanh(act / beta1) * c.sigmoid(act) * (beta2 * c.tanh(gate / beta2))

    return gated(x, body)


@planted("scaled_clamped_swiglu", c.with_row_scales(SHAPE), Where(VALUES), params={"limit": 1.0})
def clamp_after_the_token_probability(x, row_scales):
    """Each row is multiplied by its scale before it is clamped and activated; the scale should multiply the result."""
    y = np.zeros(SHAPE, BF16)
    for _, r in c.blocks(len(x), 32):
        act, gate = c.halves(x[r])
        p = row_scales[r, None]
        y[r] = c.clamped_swiglu(act * p, gate, limit=1.0).astype(BF16)
    return {"y": y}


@planted("quantize", normal(SHAPE, scale=0.01), Where(ROW), refops.CurrentScaling(refops.E4M3, amax_epsilon=1.0))
def epsilon_of_amax_ignored(x):
    """The amax is not raised to amax_epsilon, 1, before the scale is computed."""
    v = c.f32(x)
    amax = np.abs(v).max()
    scale = F(448) / amax
    data = np.zeros(v.shape, np.uint8)
    for r, t in c.tiles(v.shape, 32, 64):
        data[r, t] = c.e4m3(v[r, t] * scale)
    return c.rowwise(data, c.one(F(1) / scale), amax_rowwise=c.one(amax))


@planted("quantize", X, Where(ROW), refops.CurrentScaling(refops.E4M3, power_2_scale=True))
def power_of_two_not_taken(x):
    """The scale is 448 / amax with its mantissa; power_2_scale asks for a power of two at or below it."""
    v = c.f32(x)
    amax = np.abs(v).max()
    scale = F(448) / amax
    data = np.zeros(v.shape, np.uint8)
    for r, t in c.tiles(v.shape, 32, 64):
        data[r, t] = c.e4m3(v[r, t] * scale)
    return c.rowwise(data, c.one(F(1) / scale), amax_rowwise=c.one(amax))


@planted("update_delayed_scale", c.histories, Where(("scale",)), params={"fmt": refops.E5M2})
def update_with_limit_of_e4m3(amax_history, scale):
    """The new scale is 448 / amax; the tensor is in E5M2, whose limit is 57344."""
    history, new_scale = np.zeros_like(amax_history), scale.copy()
    for tensor in range(len(scale)):
        column = amax_history[:, tensor]
        new_scale[tensor] = F(448) / column.max()
        history[:-1, tensor], history[-1, tensor] = column[1:], column[0]
        history[0, tensor] = 0
    return {"amax_history": history, "scale": new_scale}


@planted(
    "update_delayed_scale", c.histories, Where(("scale",)), params={"fmt": refops.E4M3, "algorithm": "most_recent"}
)
def update_takes_maximum_for_newest(amax_history, scale):
    """The scale comes from the maximum of the history; the algorithm asked for, "most_recent", takes row 0 alone."""
    history, new_scale = np.zeros_like(amax_history), scale.copy()
    for tensor in range(len(scale)):
        column = amax_history[:, tensor]
        new_scale[tensor] = F(448) / column.max()
        history[:-1, tensor], history[-1, tensor] = column[1:], column[0]
        history[0, tensor] = 0
    return {"amax_history": history, "scale": new_scale}
