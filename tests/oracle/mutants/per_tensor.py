"""Conventions of FP8 with one scale for the tensor: delayed and current scaling, the delayed scale's update."""

import ml_dtypes
import numpy as np

from mutants.kernels import BF16, CODE_DTYPES, F, cast, decode, limit_of
from mutants.registry import convention
from mutants.values import erf_gelu, swapped_split
from refops import E4M3, E5M2, CurrentScaling, DelayedScaling

SIZE, PAIR = (512, 1024), (512, 2048)
DELAYED = DelayedScaling(E4M3, 3.7)
DELAYED_E5M2 = DelayedScaling(E5M2, 0.75)
CURRENT = CurrentScaling(E4M3)


# --- casts ------------------------------------------------------------------------------------------------------------


def cast_by_bits(v, fmt_name, ties_away=False):
    """Integer cast of normal values: cut the mantissa, or add half a step first; saturating."""
    mantissa = 3 if fmt_name == "e4m3" else 2
    bits = v.view(np.uint32) & np.uint32(0x7FFFFFFF)
    least = F(2.0 ** (-6 if fmt_name == "e4m3" else -14))  # least normal
    a = bits.view(F)
    if ties_away:
        bits = bits + (np.uint32(1) << np.uint32(22 - mantissa))
    cut = (bits & ~np.uint32((1 << (23 - mantissa)) - 1)).view(F)
    step = least * F(2.0**-mantissa)
    small = np.floor(a / step + F(0.5 if ties_away else 0)) * step
    return cast(np.copysign(np.where(a < least, small, cut), v), fmt_name)


@convention("no-saturation", "quantize", DELAYED, shape=SIZE, data="large")
def e4m3_overflows_to_nan(k):
    """IEEE overflow: what is beyond the largest value becomes NaN."""
    return k.outputs(cast=lambda v: v.astype(CODE_DTYPES["e4m3"]).view(np.uint8))


@convention("no-saturation", "quantize", DelayedScaling(E5M2, 1000.0), shape=SIZE, data="large")
def e5m2_overflows_to_inf(k):
    """The same in E5M2, which has infinities."""
    return k.outputs(cast=lambda v: v.astype(CODE_DTYPES["e5m2"]).view(np.uint8))


@convention("ties-away", "quantize", DelayedScaling(E4M3, 4.0), shape=SIZE)
def e4m3_ties_away(k):
    """roundTiesToAway; with a power-of-two scale bfloat16 values meet ties."""
    return k.outputs(cast=lambda v: cast_by_bits(v, "e4m3", ties_away=True))


@convention("truncation", "quantize", DELAYED_E5M2, shape=SIZE)
def e5m2_truncated(k):
    """The upper byte of a float16: E5M2 by truncation."""
    return k.outputs(cast=lambda v: cast_by_bits(v, "e5m2"))


@convention("truncation", "gelu", DELAYED, shape=SIZE)
def gelu_e4m3_truncated(k):
    """The same in E4M3 behind an activation."""
    return k.outputs(cast=lambda v: cast_by_bits(v, "e4m3"))


@convention("e4m3fnuz", "quantize", DELAYED, shape=SIZE)
def e4m3_of_another_vendor(k):
    """Bias 8, largest value 240, no -0: float8_e4m3fnuz."""
    fnuz = ml_dtypes.float8_e4m3fnuz
    return k.outputs(cast=lambda v: np.clip(v, F(-240), F(240)).astype(fnuz).view(np.uint8))


@convention("other-format", "quantize", DELAYED, shape=SIZE)
def e5m2_written(k):
    """E5M2 codes where E4M3 is asked for."""
    return k.outputs(cast=lambda v: cast(v, "e5m2"))


@convention("other-format", "dswiglu", DELAYED_E5M2, shape=PAIR)
def e4m3_written(k):
    """E4M3 codes for a gradient whose recipe says E5M2."""
    return k.outputs(cast=lambda v: cast(v, "e4m3"))


@convention("sign-lost", "quantize", DELAYED, shape=SIZE)
def magnitudes_cast(k):
    """The sign bit is dropped."""
    return k.outputs(cast=lambda v: cast(np.abs(v), "e4m3"))


@convention("sign-inverted", "quantize", DELAYED, shape=SIZE)
def sign_bit_set_for_positive(k):
    """The sign bit is 1 for values above zero."""
    return k.outputs(cast=lambda v: cast(v, "e4m3") ^ np.uint8(0x80))


@convention("zero-sign-lost", "quantize", DELAYED, shape=SIZE)
def negative_zero_lost(k):
    """-0 written as +0."""
    return k.outputs(cast=lambda v: cast(np.where(v == 0, F(0), v), "e4m3"))


@convention("nan-as-a-number", "quantize", DELAYED, shape=SIZE, data="with_nan")
def nan_written_as_zero(k):
    """NaN inputs give code 0."""
    return k.outputs(cast=lambda v: np.where(np.isnan(v), np.uint8(0), cast(v, "e4m3")))


@convention("subnormal-codes-flushed", "quantize", DelayedScaling(E4M3, 0.01), shape=SIZE)
def subnormal_codes_are_zero(k):
    """Values below the least normal E4M3 number become zero."""
    return k.outputs(cast=lambda v: cast(np.where(np.abs(v) < F(2.0**-6), np.copysign(F(0), v), v), "e4m3"))


@convention("double-rounding-fp16", "quantize", DELAYED, shape=SIZE, dtype=np.float32)
def cast_through_float16(k):
    """float32 -> float16 -> E4M3, as cvt.rn.satfinite.e4m3x2.f16x2 invites."""
    return k.outputs(cast=lambda v: cast(v.astype(np.float16).astype(F), "e4m3"))


@convention("double-rounding-bf16", "quantize", DELAYED, shape=SIZE, dtype=np.float32)
def cast_through_bfloat16(k):
    """float32 -> bfloat16 -> E4M3."""
    return k.outputs(cast=lambda v: cast(v.astype(BF16).astype(F), "e4m3"))


@convention(
    # For bfloat16 input a product rounded to the input dtype is a cast through bfloat16: the dumps are the same.
    ("product-rounded", "double-rounding-bf16"),
    "quantize",
    DELAYED,
    shape=SIZE,
)
def scaled_in_bfloat16(k):
    """x * scale in bfloat16 arithmetic."""
    return k.outputs(product=lambda v, scale: k.rounded(v * scale))


# --- delayed scaling --------------------------------------------------------------------------------------------------


@convention("inverted-scale", "quantize", DELAYED, shape=SIZE, columnwise=True)
def encode_scale_stored(k):
    """scale stored where the decode scale 1 / scale belongs."""
    return k.outputs(stored_scale=lambda scale: scale)


@convention("extra-rounding", "gelu", DELAYED, shape=SIZE)
def gelu_delayed_unfused(k):
    """The activation is stored in bfloat16 and quantized by a second kernel; the amax too comes from there."""
    return k.outputs(before_cast=k.rounded, before_amax=k.rounded)


@convention("extra-rounding", "dswiglu", DELAYED_E5M2, shape=PAIR)
def dswiglu_delayed_unfused(k):
    """The same for a gradient."""
    return k.outputs(before_cast=k.rounded, before_amax=k.rounded)


@convention("amax-rounded", "swiglu", DELAYED, shape=PAIR)
def swiglu_delayed_amax_rounded(k):
    """The data come from float32 values, the amax for the history from rounded ones."""
    return k.outputs(before_amax=k.rounded)


@convention("dbias-rounded", "dgelu", DELAYED_E5M2, shape=(128, 1024), dtype=np.float16, dbias=True)
def fused_dbias_sums_rounded(k):
    """The fused kernel adds float32 values; this one adds them rounded to float16."""
    return k.outputs(summed=k.rounded)


@convention("gate-order", "swiglu", DELAYED, shape=PAIR)
def swiglu_delayed_gate_first(k):
    """[gate | act], quantized."""
    return k.outputs(split=swapped_split)


@convention("data-transposed", "quantize", DELAYED, shape=(768, 512), columnwise=True)
def columnwise_not_transposed(k):
    """columnwise_data holds the rowwise order."""
    out = k.outputs()
    return out | {"columnwise_data": out["rowwise_data"].reshape(out["columnwise_data"].shape)}


# --- current scaling --------------------------------------------------------------------------------------------------


@convention("signed-amax", "quantize", CURRENT, shape=SIZE, data="negative_tail")
def maximum_without_magnitude(k):
    """max(x) for max |x|."""
    return k.outputs(magnitude=lambda v: v)


@convention("stale-amax", "quantize", CURRENT, shape=SIZE, data="heavy")
def amax_of_the_step_before(k):
    """The amax buffer still holds the last step's value, 1.37 times this one's."""
    amax = F(k.tensor_amax(k.load(k.inputs["x"])) * F(1.37))
    return k.outputs(tensor_amax=lambda v: amax)


@convention("stale-amax", "geglu", CURRENT, shape=PAIR)
def smaller_amax_of_the_step_before(k):
    """The same, 0.61 times: the largest values saturate."""
    amax = F(k.tensor_amax(k.forward(k.load(k.inputs["x"]))) * F(0.61))
    return k.outputs(tensor_amax=lambda v: amax)


@convention("inverted-scale", "quantize", CurrentScaling(E5M2), shape=SIZE)
def current_encode_scale_stored(k):
    """scale stored for 1 / scale."""
    return k.outputs(stored_scale=lambda scale: scale)


@convention("missing-rounding", "swiglu", CURRENT, shape=PAIR)
def swiglu_current_unrounded(k):
    """The cast reads the float32 activation; TE's reads it back from bfloat16."""
    return k.outputs(before_cast=lambda f: f)


@convention("amax-rounded", "swiglu", CURRENT, shape=PAIR)
def swiglu_current_amax_rounded(k):
    """The amax is that of the stored bfloat16 tensor, not of the float32 values."""
    return k.outputs(before_amax=k.rounded)


@convention("power-of-two-missing", "quantize", CurrentScaling(E4M3, power_2_scale=True), shape=SIZE)
def current_scale_not_rounded(k):
    """power_2_scale is ignored."""
    return k.outputs(power_of_two=lambda scale: scale)


@convention("power-of-two-extra", "quantize", CURRENT, shape=SIZE)
def current_scale_rounded(k):
    """The scale is rounded down to a power of two unasked."""
    return k.outputs(power_of_two=lambda s: (np.asarray(s, F).view(np.uint32) & np.uint32(0x7F800000)).view(F))


@convention("epsilon-missing", "quantize", CurrentScaling(E4M3, amax_epsilon=1e-4), shape=SIZE, data="tiny")
def epsilon_ignored(k):
    """amax_epsilon is ignored."""
    return k.outputs(floor_amax=lambda amax: amax)


@convention("e4m3-max-240", "quantize", CURRENT, shape=SIZE)
def numerator_240(k):
    """240 / amax: the IEEE-like E4M3's maximum."""
    return k.outputs(largest=lambda: F(240))


@convention("other-format-max", "quantize", CurrentScaling(E5M2), shape=SIZE)
def numerator_448_for_e5m2(k):
    """448 / amax in E5M2."""
    return k.outputs(largest=lambda: limit_of("e4m3"))


@convention("nan-in-amax", "quantize", CURRENT, shape=SIZE, data="with_nan")
def amax_takes_nan(k):
    """np.max semantics: one NaN makes the amax NaN; the scale's guard then makes it 1."""
    return k.outputs(maximum=lambda v, axis=None: v.max(axis=axis))


@convention("nan-in-amax", "quantize", CURRENT, shape=SIZE, data="with_nan")
def amax_and_scale_take_nan(k):
    """The same without a guard: scale and data are NaN."""
    return k.outputs(maximum=lambda v, axis=None: v.max(axis=axis), scale_of=lambda amax: k.largest() / amax)


@convention("scale-rounded-to-bf16", "quantize", CURRENT, shape=SIZE)
def scale_in_bfloat16(k):
    """The scale is kept in the tensor's dtype."""
    right = k.scale_of
    return k.outputs(scale_of=lambda amax: right(amax).astype(BF16).astype(F))


@convention("erf-gelu", "gelu", CURRENT, shape=SIZE)
def gelu_by_erf_current(k):
    """x Phi(x), then quantized."""
    return k.outputs(value=erf_gelu)


@convention(("no-saturation", "stale-amax"), "quantize", CURRENT, both=True, shape=SIZE)
def stale_amax_and_no_saturation(k):
    """Two faults: the last step's amax, 0.8 of this one's, and a cast that overflows to NaN."""
    amax = F(k.tensor_amax(k.load(k.inputs["x"])) * F(0.8))
    return k.outputs(tensor_amax=lambda v: amax, cast=lambda v: v.astype(CODE_DTYPES["e4m3"]).view(np.uint8))


# --- the scale's update -----------------------------------------------------------------------------------------------

UPDATE = "update_delayed_scale"
HISTORY = {"shape": (1024, 256), "dtype": np.float32, "data": "history"}


@convention("history-not-rolled", UPDATE, params={"fmt": E4M3}, **HISTORY)
def history_stays(k):
    """The scale is new, the history is not."""
    return k.outputs(roll=lambda history: history)


@convention("newest-at-the-end", UPDATE, params={"fmt": E4M3}, **HISTORY)
def history_rolls_the_other_way(k):
    """Row 0 is dropped, the others move up, the last row is cleared for the next amax."""
    return k.outputs(roll=lambda h: np.concatenate([h[1:], np.zeros_like(h[:1])]))


@convention("margin-inverted", UPDATE, params={"fmt": E4M3, "margin": 2}, **HISTORY)
def margin_multiplies(k):
    """2^margin for 2^-margin."""
    return k.outputs(numerator=lambda: F(448 * 4))


@convention("margin-ignored", UPDATE, params={"fmt": E4M3, "margin": 1}, **HISTORY)
def margin_left_out(k):
    """No margin."""
    return k.outputs(numerator=lambda: F(448))


@convention("inverted-scale", UPDATE, params={"fmt": E5M2}, **HISTORY)
def update_gives_decode_scale(k):
    """amax / max."""
    return k.outputs(next_scale=lambda amax: amax / k.numerator())


@convention("newest-amax-only", UPDATE, params={"fmt": E4M3}, **HISTORY)
def newest_for_maximum(k):
    """algorithm="max" takes the newest amax."""
    return k.outputs(newest_amax=lambda history: history[0])


@convention("maximum-instead-of-newest", UPDATE, params={"fmt": E5M2, "algorithm": "most_recent"}, **HISTORY)
def maximum_for_newest(k):
    """algorithm="most_recent" takes the maximum."""
    return k.outputs(newest_amax=lambda history: k.maximum(history, axis=0))


@convention("scale-from-old-history", UPDATE, params={"fmt": E4M3}, shape=(16, 512), dtype=np.float32, data="history")
def newest_not_seen(k):
    """The scale follows from the history before this step's amax came in."""
    return k.outputs(scale_amax=lambda history: k.maximum(history[1:], axis=0))


@convention("other-format-max", UPDATE, params={"fmt": E4M3}, **HISTORY)
def update_with_e5m2_maximum(k):
    """57344 / amax for E4M3."""
    return k.outputs(numerator=lambda: limit_of("e5m2"))


@convention("nan-history", UPDATE, params={"fmt": E4M3}, shape=(1024, 256), dtype=np.float32, data="history_with_nan")
def update_takes_nan(k):
    """One NaN in a column's past keeps its scale as it is: the maximum propagated it."""
    return k.outputs(newest_amax=lambda history: history.max(axis=0))


@convention("unused-rolled", UPDATE, params={"fmt": E4M3}, shape=(64, 512), dtype=np.float32, data="history")
def unused_tensors_updated(k):
    """Tensors that this step did not see roll their history and get a new scale."""
    return k.outputs(unused=lambda newest: np.zeros(newest.shape, bool))


# --- dequantize -------------------------------------------------------------------------------------------------------


@convention("inverted-scale", "dequantize", CURRENT, shape=SIZE)
def divided_by_decode_scale(k):
    """code / scale_inv."""
    return k.outputs(per_element=lambda factors: F(1) / factors)


@convention("other-format", "dequantize", CURRENT, shape=SIZE)
def e4m3_read_as_e5m2(k):
    """The codes' table is E5M2's."""
    return k.outputs(codes_read=lambda data: decode(data, "e5m2"))


@convention("data-transposed", "dequantize", CURRENT, shape=(512, 512), rowwise=False, columnwise=True)
def columnwise_read_as_rowwise(k):
    """The transposed copy comes back transposed."""
    return {"y": np.ascontiguousarray(k.outputs()["y"].T)}
