"""Conventions of activations, gradients, bias gradients and scaled activations that are written unquantized."""

import math

import numpy as np

import refops
from mutants.kernels import BF16, VALUES, F, Kernel
from mutants.registry import convention

SIZE, PAIR = (512, 1024), (512, 2048)
FP32, FP16 = np.float32, np.float16

#: Phi of every bfloat16 value.
with np.errstate(invalid="ignore"):
    _ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(BF16).astype(np.float64)
_PHI = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in _ALL_BF16], F)


def normal_cdf(x):
    """Phi(x) of float32 values that came from bfloat16."""
    return _PHI[x.view(np.uint32) >> 16]


def erf_gelu(x):
    """x Phi(x)."""
    return x * normal_cdf(x)


def erf_gelu_slope(x):
    """Phi(x) + x phi(x)."""
    return normal_cdf(x) + x * np.exp(-0.5 * x.astype(np.float64) ** 2).astype(F) * F(1 / math.sqrt(2 * math.pi))


def truncated(f):
    """float32 -> bfloat16 by dropping the low half."""
    return (f.view(np.uint32) >> 16).astype(np.uint16).view(BF16)


def swapped_split(x):
    """Rows taken as [gate | act]."""
    half = x.shape[1] // 2
    return x[:, half:], x[:, :half]


# --- forward ----------------------------------------------------------------------------------------------------------


@convention("erf-gelu", "gelu", shape=SIZE)
def gelu_by_erf(k):
    """x Phi(x), torch's default, instead of the tanh form."""
    return k.outputs(value=erf_gelu)


@convention("erf-gelu", "geglu", shape=PAIR)
def geglu_by_erf(k):
    """The same in a gated activation."""
    return k.outputs(value=erf_gelu)


@convention("gate-order", "swiglu", shape=PAIR)
def swiglu_gate_first(k):
    """Rows read as [gate | act]."""
    return k.outputs(split=swapped_split)


@convention("gate-order", "geglu", shape=(300, 1000), dtype=FP16)
def geglu_gate_first(k):
    """The same in float16 at a ragged shape."""
    return k.outputs(split=swapped_split)


@convention("gate-interleaved", "swiglu", shape=PAIR)
def swiglu_interleaved(k):
    """Act and gate read from even and odd columns."""
    return k.outputs(split=lambda x: (x[:, 0::2], x[:, 1::2]))


@convention("gate-interleaved-by-runs", "swiglu", shape=PAIR)
def swiglu_interleaved_by_32(k):
    """[32 of act | 32 of gate | 32 of act ...], as a layout for GEMMs with a fused activation has it."""

    def split(x):
        parts = x.reshape(len(x), -1, 2, 32)
        return parts[:, :, 0].reshape(len(x), -1), parts[:, :, 1].reshape(len(x), -1)

    return k.outputs(split=split)


@convention("row-stride-halved", "geglu", shape=PAIR)
def geglu_with_the_stride_of_its_output(k):
    """x[row * K + column] for x[row * 2 K + column]."""

    def split(x):
        width = x.shape[1] // 2
        at = np.arange(len(x))[:, None] * width + np.arange(width)
        return x.reshape(-1)[at], x.reshape(-1)[at + width]

    return k.outputs(split=split)


@convention("gate-with-offset", "dswiglu", shape=PAIR)
def dswiglu_with_a_linear_offset(k):
    """The gate plus 1, forgotten when clamped SwiGLU was made SwiGLU."""
    return k.outputs(gate=lambda g: g + F(1))


@convention("both-halves-activated", "swiglu", shape=PAIR)
def swiglu_of_both_halves(k):
    """SiLU(act) SiLU(gate): the activation is applied to the row before it is split."""
    return k.outputs(gate=k.value)


@convention("other-activation", "silu", shape=SIZE)
def silu_as_qgelu(k):
    """sigmoid(1.702 x) for sigmoid(x)."""
    return k.outputs(function="qgelu")


@convention("other-activation", "swiglu", shape=PAIR, dtype=FP32)
def swiglu_as_reglu(k):
    """ReLU for SiLU."""
    return k.outputs(function="relu")


@convention("parameters-ignored", "clamped_swiglu", shape=PAIR, data="wide")
def clamped_without_limit(k):
    """No clamping: right for small values."""
    return k.outputs(limit=F(np.inf))


@convention("parameters-ignored", "clamped_swiglu", params={"limit": 5.0}, shape=PAIR, data="wide")
def clamped_without_offset(k):
    """The gate's + 1 forgotten."""
    return k.outputs(glu_linear_offset=F(0))


@convention("parameters-ignored", "clamped_swiglu", shape=PAIR, data="wide")
def clamped_with_alpha_one(k):
    """SiLU instead of sigmoid(1.702 c)."""
    return k.outputs(alpha=F(1))


@convention("parameters-ignored", "situglu", params={"beta1": 2.0, "beta2": 10.0}, shape=PAIR, data="wide")
def situ_with_default_betas(k):
    """The caller's betas ignored."""
    return k.outputs(beta1=F(4), beta2=F(25))


@convention("rounded-intermediate", "swiglu", shape=PAIR)
def swiglu_rounded_silu(k):
    """silu(act) stored in bfloat16 before the product: two kernels in a row."""
    return k.outputs(between=k.rounded)


@convention("rounded-intermediate", "qgeglu", shape=PAIR, dtype=FP16)
def qgeglu_rounded_qgelu(k):
    """The same in float16."""
    return k.outputs(between=k.rounded)


@convention("nan-propagated", "relu", shape=SIZE, data="with_nan")
def relu_keeps_nan(k):
    """torch's ReLU: NaN stays NaN; fmaxf gives 0."""
    return k.outputs(value=lambda x: np.maximum(x, F(0)))


@convention("nan-propagated", "clamped_swiglu", shape=PAIR, data="with_nan")
def clamp_keeps_nan(k):
    """torch.clamp: NaN passes both clamps."""

    def value(x):
        c = np.minimum(x, k.limit)
        return c * k.sigmoid(k.alpha * c)

    return k.outputs(value=value, gate=lambda g: np.minimum(np.maximum(g, -k.limit), k.limit) + k.glu_linear_offset)


@convention("subnormals-flushed", "relu", shape=SIZE, dtype=FP32, data="subnormal")
def relu_flushes(k):
    """-ftz=true: subnormal float32 values become zeros."""
    return k.outputs(value=lambda x: VALUES["relu"](k, np.where(np.abs(x) < F(2.0**-126), F(0) * x, x)))


@convention("low-precision-arithmetic", "silu", shape=SIZE)
def silu_in_bfloat16(k):
    """Every operation rounded to bfloat16."""

    def value(x):
        r = k.rounded
        return r(x * r(F(1) / r(F(1) + r(k.exp(-x)))))

    return k.outputs(value=value)


@convention("low-precision-arithmetic", "swiglu", shape=PAIR, dtype=FP16)
def swiglu_in_float16(k):
    """Every operation in half precision (__half2 arithmetic)."""

    def value(x):
        r = k.rounded
        return r(x * r(F(1) / r(F(1) + r(k.exp(-x)))))

    return k.outputs(value=value)


@convention(
    # In float32 a sigmoid through tanh differs where 1 + tanh cancels: by whole ulps there, as a coarse exp would not.
    "sigmoid-through-tanh",
    "silu",
    shape=SIZE,
    dtype=FP32,
    data="wide",
)
def silu_through_tanh(k):
    """sigmoid(x) = 0.5 + 0.5 tanh(x / 2): no relative accuracy far below zero."""
    return k.outputs(sigmoid=lambda x: F(0.5) + F(0.5) * k.tanh(F(0.5) * x))


@convention("approximate-elementary", "silu", shape=SIZE, dtype=FP32)
def silu_with_coarse_exp(k):
    """exp with 11 good bits, as from a half-precision ex2.approx."""

    def coarse(x):
        return (Kernel.exp(k, x).astype(np.float64) * (1 + 2.0**-12 * np.sin(1e3 * x.astype(np.float64)))).astype(F)

    return k.outputs(exp=coarse)


@convention("approximate-elementary", "gelu", shape=SIZE, dtype=FP32)
def gelu_with_coarse_tanh(k):
    """tanh.approx.f32: relative error 2^-11."""

    def coarse(x):
        return (Kernel.tanh(k, x).astype(np.float64) * (1 + 2.0**-11 * np.sin(1e3 * x.astype(np.float64)))).astype(F)

    return k.outputs(tanh=coarse)


@convention("truncation", "gelu", shape=SIZE)
def gelu_truncated_to_bfloat16(k):
    """The output's low half dropped instead of rounded."""
    return k.outputs(store=truncated)


@convention("ties-away", "srelu", shape=SIZE, ulp=0)
def srelu_rounds_half_up(k):
    """float32 -> bfloat16 by adding 0x8000: ties go away from zero. Squares meet ties; an ulp of freedom hides them."""
    return k.outputs(store=lambda f: ((f.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16).view(BF16))


@convention("double-rounding-fp16", "swiglu", shape=PAIR)
def swiglu_through_float16(k):
    """The result goes through float16 on its way to bfloat16."""
    return k.outputs(store=lambda f: f.astype(FP16).astype(BF16))


@convention("double-rounding-bf16", "geglu", shape=PAIR, dtype=FP32)
def geglu_through_bfloat16(k):
    """A float32 output that was rounded to bfloat16 once."""
    return k.outputs(store=lambda f: f.astype(BF16).astype(F))


@convention("byte-swapped", "swiglu", shape=PAIR)
def swiglu_big_endian(k):
    """The file holds big-endian words."""
    out = k.outputs()
    return {"y": out["y"].view(np.uint16).byteswap().view(BF16)}


@convention(("shifted-by-one", "input-shifted"), "gelu", shape=SIZE)
def gelu_one_element_late(k):
    """The buffer starts one element too early: everything is one element late."""
    y = k.outputs()["y"]
    return {"y": np.roll(y.reshape(-1), 1).reshape(y.shape)}


@convention("data-transposed", "swiglu", shape=PAIR)
def swiglu_column_major(k):
    """The output is written column by column."""
    y = k.outputs()["y"]
    return {"y": np.ascontiguousarray(y.T).reshape(y.shape)}


@convention("gate-order", "glu", shape=PAIR, dtype=FP32)
def glu_gate_first(k):
    """sigmoid(second half) * first half: torch's glu, whose gate is the second half."""
    return k.outputs(split=swapped_split)


@convention("other-activation", "reglu", shape=PAIR)
def reglu_as_swiglu(k):
    """SiLU for ReLU."""
    return k.outputs(function="silu")


@convention("rounded-intermediate", "sreglu", shape=PAIR)
def sreglu_rounded_square(k):
    """relu(act)^2 stored in bfloat16 before the product."""
    return k.outputs(between=k.rounded)


@convention("sign-inverted", "gelu", shape=SIZE)
def gelu_negated(k):
    """-gelu(x): a subtraction with its operands exchanged."""
    out = k.outputs()
    return {"y": -out["y"]}


# --- gradients --------------------------------------------------------------------------------------------------------


@convention("upstream-gradient-missing", "dgelu", shape=SIZE)
def dgelu_without_dy(k):
    """f'(x) alone."""
    return k.outputs(backward=lambda dy, x: k.slope(x))


@convention("swapped-halves", "dswiglu", shape=PAIR)
def dswiglu_gate_half_first(k):
    """Written as [d_gate | d_act]."""
    return k.outputs(join=lambda a, g: np.concatenate([g, a], axis=1))


@convention("gate-order", "dgeglu", shape=PAIR)
def dgeglu_gate_first(k):
    """x read as [gate | act]; the gradients land where they were read."""
    return k.outputs(split=swapped_split, join=lambda a, g: np.concatenate([g, a], axis=1))


@convention("erf-gelu", "dgelu", shape=SIZE)
def dgelu_by_erf(k):
    """The derivative of x Phi(x)."""
    return k.outputs(slope=erf_gelu_slope)


@convention("other-activation", "dsrelu", shape=SIZE)
def dsrelu_as_drelu(k):
    """1 above zero instead of 2 x."""
    return k.outputs(function="relu")


@convention("parameters-ignored", "dclamped_swiglu", shape=PAIR, data="wide")
def dclamped_without_limit(k):
    """The gradient passes where the forward clamped."""
    return k.outputs(limit=F(np.inf))


@convention("parameters-ignored", "dsituglu", params={"beta1": 2.0, "beta2": 10.0}, shape=PAIR, data="wide")
def dsitu_with_default_betas(k):
    """The caller's betas ignored."""
    return k.outputs(beta1=F(4), beta2=F(25))


@convention("other-activation", "dqgeglu", shape=PAIR)
def dqgeglu_as_dswiglu(k):
    """sigmoid(x) for sigmoid(1.702 x)."""
    return k.outputs(function="silu")


@convention("rounded-intermediate", "dswiglu", shape=PAIR)
def dswiglu_with_stored_silu(k):
    """d_gate from the bfloat16 silu(act) that the forward saved."""
    return k.outputs(between=k.rounded)


@convention("double-rounding-bf16", "dgelu", shape=SIZE, dtype=FP16)
def dgelu_through_bfloat16(k):
    """A float16 gradient that was bfloat16 once."""
    return k.outputs(store=lambda f: f.astype(BF16).astype(F).astype(FP16))


@convention("dbias-of-dy", "dgelu", shape=(256, 1024), dbias=True)
def dbias_sums_dy(k):
    """The bias gradient adds dy: right for a linear layer without an activation."""
    out = k.outputs()
    return out | {"dbias": k.store_sum(k.column_sum(k.load(k.inputs["dy"])))}


@convention("dbias-unrounded", "dsilu", shape=(256, 1024), dtype=FP16, dbias=True)
def dbias_sums_before_rounding(k):
    """Unfused kernels add the stored gradient; this one adds float32 values."""
    return k.outputs(summed=lambda f: f)


@convention("dbias-low-precision", "dgelu", shape=(512, 1024), dbias=True)
def dbias_in_bfloat16(k):
    """The accumulator is bfloat16: small terms drown."""

    def column_sum(v):
        total = np.zeros(v.shape[1], F)
        for row in v:
            total = k.rounded(total + row)
        return total

    return k.outputs(column_sum=column_sum)


@convention("dbias-last-chunk-missing", "dqgelu", shape=(1000, 512), dbias=True)
def dbias_without_the_tail(k):
    """Rows in chunks of 128, the incomplete last chunk (104 rows) left out."""
    return k.outputs(column_sum=lambda v: v[: len(v) // 128 * 128].sum(axis=0, dtype=F))


@convention("sign-inverted", "dswiglu", shape=(256, 1024), dbias=True)
def dswiglu_of_the_negative_loss(k):
    """The loss's gradient has the wrong sign: dx and dbias are negated."""
    upstream = -k.load(k.inputs["dy"])
    backward = k.backward
    return k.outputs(backward=lambda dy, x: backward(upstream, x))


# --- scaled activations -----------------------------------------------------------------------------------------------


@convention("row-scale-missing", "scaled_swiglu", shape=PAIR)
def scaled_swiglu_unscaled(k):
    """The token's probability is not applied."""
    return k.outputs(row_scale=lambda f: f)


@convention("row-scale-before-activation", "scaled_srelu", shape=SIZE)
def scaled_srelu_scales_first(k):
    """srelu(p x) instead of p srelu(x)."""
    row_scales = k.load(k.inputs["row_scales"].reshape(-1, 1))
    return k.outputs(forward=lambda x: k.value(x * row_scales), row_scale=lambda f: f)


@convention("interleave-ignored", "scaled_swiglu", params={"glu_interleave_size": 32}, shape=PAIR)
def scaled_swiglu_reads_halves(k):
    """[act | gate] read where blocks of 32 alternate."""
    return k.outputs(split=lambda x: (x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]))


@convention("parameters-ignored", "scaled_clamped_swiglu", params={"limit": 3.0, "alpha": 1.0}, shape=PAIR, data="wide")
def scaled_clamped_with_defaults(k):
    """The caller's limit and alpha ignored."""
    return k.outputs(limit=F(7), alpha=F(1.702))


@convention("swapped-halves", "scaled_dswiglu", shape=PAIR)
def scaled_dswiglu_gate_half_first(k):
    """Written as [d_gate | d_act]; the scales' gradient is right."""
    return k.outputs(join=lambda a, g: np.concatenate([g, a], axis=1))


@convention("row-scale-gradient-scaled", "scaled_dswiglu", shape=PAIR)
def drow_scales_scaled(k):
    """The scale's gradient is multiplied by the scale itself."""
    out = k.outputs()
    return out | {"drow_scales": out["drow_scales"] * k.inputs["row_scales"]}


@convention("row-scale-missing", "scaled_dsrelu", shape=SIZE)
def scaled_dsrelu_unscaled(k):
    """dx lacks the row's scale."""
    return k.outputs(row_scale=lambda f: f)


@convention("sign-inverted", "scaled_dswiglu", shape=PAIR)
def scaled_dswiglu_of_the_negative_loss(k):
    """dy is negated: dx and the scales' gradients change sign."""
    k.inputs = {name: -array if name == "dy" else array for name, array in k.inputs.items()}
    return k.outputs()


# --- a function for its derivative ------------------------------------------------------------------------------------


@convention("function-for-derivative", "dgelu", shape=SIZE)
def dgelu_keeps_gelu(k):
    """gelu(x) dy: the forward function is called."""
    return k.outputs(slope=k.value)


@convention("function-for-derivative", "dswiglu", shape=PAIR)
def dswiglu_with_silu_for_its_slope(k):
    """silu(act) dy gate in the gradient of act."""
    return k.outputs(slope=k.value)


@convention("function-for-derivative", "dgeglu", shape=PAIR)
def dgeglu_with_the_slope_for_gelu(k):
    """gelu'(act) dy in the gradient of gate."""
    return k.outputs(value=k.slope)


@convention("function-for-derivative", "dreglu", refops.MXFP8Scaling(refops.E4M3), shape=PAIR)
def dreglu_exchanges_both(k):
    """A structure of two floats is filled in the wrong order."""
    return k.outputs(value=k.slope, slope=k.value)


@convention("function-for-derivative", "silu", shape=SIZE)
def silu_writes_its_slope(k):
    """The forward kernel is instantiated with the derivative."""
    return k.outputs(value=k.slope)
