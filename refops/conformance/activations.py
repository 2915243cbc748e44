"""Activations: the float64 truth against PyTorch, the float32 values against TE's host formulas."""

import numpy as np

from refops.activations import bind_activation


def compare_act_unary(v):
    """float64 truth against PyTorch, float32 values against TE's host formulas.

    PyTorch's float64 formulas cancel in the tails and use exact constants where TE has float32 ones, so agreement is
    judged by the bound of `_truth_bound`; "differing" counts elements outside it.
    """
    x = v.arrays["x"]
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        bound = bind_activation(name, {})
        peer = "gelu_tanh" if name == "gelu" else name
        for which, ours in (("", bound.truth), ("d", lambda x, b=bound: b.truth_grad(1.0, x))):
            theirs = v.arrays[f"f64_{which}{peer}"]
            outside = ~_agrees(ours(x.astype(np.float64)), theirs, _truth_bound(x))
            v.compare(f"{which}{name} truth against float64", outside, np.zeros_like(outside))
        for which, ours in (("", bound.value), ("d", bound.derivative)):
            theirs = v.arrays[f"te_f32_{which}{name}"]
            outside = ~_agrees(ours(x), theirs, _float32_bound(x))
            v.compare(f"{which}{name} float32 against TE's host formula", outside, np.zeros_like(outside))


def compare_act_gated(v):
    """float64 truth against PyTorch, forward and gradient, gate order included."""
    x, dy = v.tensor("x_bits", "bf16"), v.tensor("dy_bits", "bf16")
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    half = x.shape[1] // 2
    act, gate = x[:, :half], x[:, half:]
    for name in ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu"):
        bound = bind_activation(name, {})
        peer = "geglu_tanh" if name == "geglu" else name
        outside = ~_agrees(bound.truth(act, gate), v.arrays[f"{peer}_y_f64"], _truth_bound(act) * np.abs(gate))
        v.compare(f"{name} truth against float64", outside, np.zeros_like(outside))
        theirs = v.arrays[f"{peer}_dx_f64"]
        d_act, d_gate = bound.truth_grad(dy, act, gate)
        outside = ~_agrees(d_act, theirs[:, :half], _truth_bound(act) * np.abs(dy * gate))
        outside |= ~_agrees(d_gate, theirs[:, half:], _truth_bound(act) * np.abs(dy))
        v.compare(f"d{name} truth against float64", outside, np.zeros_like(outside))


def _truth_bound(x):
    """How far float64 values of the same real function may lie apart: TE's constants are rounded to float32.

    sqrt(2/pi), 0.044715 and 1.702 move by at most 2^-25 relative; |x f'| and |x f''| stay below 3 (1 + |x|) for every
    activation here, so the values move by at most 3 (1 + |x|) 2^-25. Squared ReLU is exact.
    """
    return 3.0 * (1.0 + np.abs(x.astype(np.float64))) * 2.0**-25


def _float32_bound(x):
    """How far two float32 evaluations in the same order may lie apart: 8 roundings of terms up to 2 (1 + |x|)."""
    return 16.0 * (1.0 + np.abs(x.astype(np.float64))) * 2.0**-24


def _agrees(ours, theirs, bound):
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    return same | (np.abs(ours - theirs) <= bound)
