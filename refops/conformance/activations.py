"""Activations: the float64 truth against PyTorch, the float32 values against TE's host formulas."""

import numpy as np

from refops.activations import bind_activation

#: Activations whose formula has no constant that TE rounds to float32.
WITHOUT_CONSTANTS = ("relu", "srelu", "silu", "glu", "reglu", "sreglu", "swiglu")


def compare_act_unary(v):
    """float64 truth against PyTorch's float64, float32 values against TE's formulas compiled for the host.

    The truth agrees within `_truth_bound`; "differing" counts elements outside it. The float32 values are equal to the
    bit but for gelu, where the host's tanhf is up to one ulp from the nearest float32.
    """
    x = v.arrays["x"]
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        bound = bind_activation(name, {})
        peer = "gelu_tanh" if name == "gelu" else name
        for which, ours in (("", bound.truth), ("d", lambda x, b=bound: b.truth_grad(1.0, x))):
            theirs = v.arrays[f"f64_{which}{peer}"]
            outside = ~_agrees(ours(x.astype(np.float64)), theirs, _truth_bound(name, x))
            v.compare(f"{which}{name} truth against float64", outside, np.zeros_like(outside))
        for which, ours in (("", bound.value(x)), ("d", bound.derivative(x))):
            theirs = v.arrays[f"te_f32_{which}{name}"]
            documented = {}
            if name == "gelu":
                documented["divergence"] = "the host's tanhf is up to one ulp from the nearest float32"
                documented["expected"] = _agrees(ours, theirs, _one_ulp_of_tanh(x, which))
            v.compare_floats(f"{which}{name} float32 against TE's host formula", ours, theirs, **documented)


def compare_act_gated(v):
    """float64 truth against PyTorch's float64, forward and gradient, gate order included."""
    x, dy = v.tensor("x_bits", "bf16"), v.tensor("dy_bits", "bf16")
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    half = x.shape[1] // 2
    act, gate = x[:, :half], x[:, half:]
    for name in ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu"):
        bound = bind_activation(name, {})
        peer = "geglu_tanh" if name == "geglu" else name
        permitted = _truth_bound(name, act)
        outside = ~_agrees(bound.truth(act, gate), v.arrays[f"{peer}_y_f64"], permitted * np.abs(gate))
        v.compare(f"{name} truth against float64", outside, np.zeros_like(outside))
        theirs = v.arrays[f"{peer}_dx_f64"]
        d_act, d_gate = bound.truth_grad(dy, act, gate)
        outside = ~_agrees(d_act, theirs[:, :half], permitted * np.abs(dy * gate))
        outside |= ~_agrees(d_gate, theirs[:, half:], permitted * np.abs(dy))
        v.compare(f"d{name} truth against float64", outside, np.zeros_like(outside))


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


def _one_ulp_of_tanh(x, which):
    """How far gelu or ("d") dgelu move when tanh moves by one float32 ulp, at most 2^-24, and each rounding after it.

    gelu: x (0.5 + 0.5 t) moves by |x| 2^-25, and sum and product may each round the other way, |x| 2^-24.
    dgelu: 1 - t^2 moves by 2^-23 and a rounding of 2^-24, times |x| (0.4 + 0.054 x^2); 0.5 (1 + t) by 2^-25 and 2^-24.
    """
    x = np.abs(x.astype(np.float64))
    if which == "d":
        return 2.0**-24 * (1.5 + 3.0 * x * (0.4 + 0.054 * x * x))
    return 2.0**-24 * 2.5 * x


def _agrees(ours, theirs, bound):
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    return same | (np.abs(ours - theirs) <= bound)
