"""Others' arrays of what no public call returns: scale functions, tables, truths (else `refops.conformance`)."""

import numpy as np
import rule_calls

from refops.activations import bind_activation
from refops.conformance import Vectors, compare_file, fp8_settings
from refops.formats import E8M0, FORMATS
from refops.scalings import CurrentScaling
from refops.scalings.arithmetic import REFERENCE

F = np.float32
#: Activations whose formula has no constant that TE rounds to float32.
WITHOUT_CONSTANTS = ("relu", "srelu", "silu", "glu", "reglu", "sreglu", "swiglu")


def compare_everything(path):
    """The comparisons with one vector file, of what public calls return and of their parts."""
    vectors, found = Vectors(path), compare_file(path)
    if vectors.kind in PARTS:
        with np.errstate(all="ignore"):
            PARTS[vectors.kind](vectors)
    return found + vectors.comparisons


def compare_scale_from_amax(v):
    """Scale and reciprocal for every amax, epsilon, power-of-two setting and input dtype."""
    amax = v.arrays["amax_bits"].view(F)
    for variant in v.variants:
        scaling = CurrentScaling(FORMATS[variant["fp8"]], variant["pow_2_scales"], variant["eps"])
        numbers = scaling.numbers(F)._replace(largest_scale=F(variant["value_for_inf"]))
        inverse, scale = scaling.block_scale(REFERENCE)(amax, F(0), numbers)
        name = f"FP8 scale from amax, {fp8_settings(variant)}, {variant['x_dtype']}"
        v.compare_floats(name, scale, v.arrays[f"{variant['id']}_scale_bits"])
        v.compare_floats(name + ", inverse", inverse, v.arrays[f"{variant['id']}_scale_inv_bits"])


def compare_e8m0_tables(v):
    """Decode scale and encode multiplier of every scale byte."""
    v.compare_floats("E8M0 value", E8M0.values, v.arrays["value_f32_bits"])
    multiplier = rule_calls.inverse_power(np.arange(256))
    v.compare_floats("E8M0 encode multiplier", multiplier, v.arrays["recip_f32_bits"])


def compare_nvfp4_scales(v):
    """Global and block scales for every pair of amaxes."""
    rule = rule_calls.nvfp4()
    s_enc, s_dec = rule.tensor(v.arrays["global_amax_bits"].view(F))
    v.compare_floats("NVFP4 global encode scale", s_enc, v.arrays["S_enc_bits"])
    scales = rule.byte(v.arrays["block_amax_bits"].view(F), (s_enc[:, None], s_dec[:, None]))
    v.compare("NVFP4 block scale", scales, v.arrays["block_scale"])


def compare_unary_truth(v):
    """float64 truth and derivative against PyTorch's float64; "differing" counts elements outside `_truth_bound`."""
    x = v.arrays["x"]
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        bound, peer = bind_activation(name, {}), "gelu_tanh" if name == "gelu" else name
        for which, ours in (("", bound.truth), ("d", lambda x, b=bound: b.truth_grad(1.0, x))):
            _compare_truth(
                v, f"{which}{name}", ours(x.astype(np.float64)), v.arrays[f"f64_{which}{peer}"], _truth_bound(name, x)
            )


def compare_gated_truth(v):
    """float64 truth against PyTorch's float64, forward and gradient, gate order included."""
    x, dy = (v.tensor(name, "bf16").astype(np.float64) for name in ("x_bits", "dy_bits"))
    half = x.shape[1] // 2
    act, gate = x[:, :half], x[:, half:]
    for name in ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu"):
        bound, peer = bind_activation(name, {}), "geglu_tanh" if name == "geglu" else name
        permitted = _truth_bound(name, act)
        y, dx = (v.arrays[f"{peer}_{part}_f64"] for part in ("y", "dx"))
        _compare_truth(v, name, bound.truth(act, gate), y, permitted * np.abs(gate))
        bounds = permitted * np.abs(dy * gate), permitted * np.abs(dy)
        halves = zip(
            bound.truth_grad(dy, act, gate), (dx[:, :half], dx[:, half:]), bounds, ("act", "gate"), strict=True
        )
        for ours, theirs, within, part in halves:
            _compare_truth(v, f"d{name} d_{part}", ours, theirs, within)


def _compare_truth(v, name, ours, theirs, bound):
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs)) | (np.abs(ours - theirs) <= bound)
    v.compare(f"{name} truth against float64", ~same, np.zeros_like(same))


def _truth_bound(name, x):
    """How far two float64 evaluations of an activation or its derivative may lie apart.

    Without constants: a dozen roundings of terms up to 1 + |x| (+ x^2 for the square), 2^-48 of them. gelu and qgelu
    besides: TE rounds their constants to float32, which moves z = 2u or 1.702 x by at most 2^-24 relative (two
    constants of 2^-25), and x s(z) and its derivative by at most 0.25 |x| and 1 times that, since |z s'(z)| < 0.23.
    """
    x = np.abs(x.astype(np.float64))
    if name in WITHOUT_CONSTANTS:
        return 2.0**-48 * (1.0 + x + x * x * (name in ("srelu", "sreglu")))
    return 2.0**-24 * (1.0 + 0.25 * x)


#: Kind of file -> the comparison.
PARTS = {
    "fp8_scale_from_amax": compare_scale_from_amax,
    "e8m0_tables": compare_e8m0_tables,
    "nvfp4_scales": compare_nvfp4_scales,
    "act_unary": compare_unary_truth,
    "act_gated": compare_gated_truth,
}
