"""Activations, their gradients and the row-scaled ones, checked against float64."""

from functools import partial

import numpy as np

from refops.activations import ACTIVATIONS, bind_activation
from refops.ops import SCALED_ACTIVATIONS
from refops.selfcheck.inputs import real_activation_inputs, synthetic_activation_inputs
from refops.selfcheck.tally import Task, U

#: Permitted error of an activation in units of U times |f| + |x| (times the gate), before rounding to the output dtype.
FORWARD_UNITS = 4
#: Permitted error of a gradient in units of U times |dy| (|f'| + 1) (times the gate).
GRADIENT_UNITS = 16
FORWARD_RULE = f"forward: float64 truth, error <= {FORWARD_UNITS} * 2^-24 * (|f| + |x|) before one rounding"
GRADIENT_RULE = f"gradient: float64 truth, error <= {GRADIENT_UNITS} * 2^-24 * |dy| (|f'| + 1) before one rounding"


def activation_tasks(ops, real):
    """Return the tasks of every activation."""
    tasks = []
    for name in ACTIVATIONS:
        task = partial(Task, "activations", name)
        tasks += [
            task(FORWARD_RULE, partial(_check_forward, ops, name, real)),
            task(GRADIENT_RULE, partial(_check_gradient, ops, name, real)),
            task("dbias: float64 sum, error at most that of any float32 order", partial(_check_dbias, ops, name)),
        ]
        if name in SCALED_ACTIVATIONS:
            tasks.append(task("row-scaled: float64 truth, the same bounds", partial(_check_scaled, ops, name)))
            if ACTIVATIONS[name].gated:
                tasks.append(
                    task("row-scaled and interleaved = in order, bit for bit", partial(_check_interleaved, ops, name))
                )
    return tasks


# --- the truth and what is permitted ---------------------------------------------------------------------------------


def _halves(name, x):
    """(act, gate or None) in float64."""
    x = x.astype(np.float64)
    return np.split(x, 2, axis=-1) if ACTIVATIONS[name].gated else (x, None)


def _magnitudes(bound, act, gate):
    """What permitted errors are relative to: |f| + |x|, |f'| + 1, for the gate |g|, |g'| + 1 (without one: 1)."""
    value = np.abs(bound.value(act, true=True)) + np.abs(act)
    slope = np.abs(bound.derivative(act, true=True)) + 1
    if gate is None:
        return value, slope, 1.0, 1.0
    return value, slope, np.abs(bound.gate(gate, true=True)), np.abs(bound.gate_slope(gate, true=True)) + 1


def _true_forward(bound, act, gate):
    """float64 output, and the unit of its permitted error."""
    value, _, gate_size, _ = _magnitudes(bound, act, gate)
    return bound.truth(act, gate), U * value * gate_size


def _true_gradient(bound, dy, act, gate):
    """float64 gradient and its permitted error, each [d_act | d_gate] for gated activations."""
    value, slope, gate_size, gate_slope = _magnitudes(bound, act, gate)
    d_act = GRADIENT_UNITS * U * np.abs(dy) * slope * gate_size
    if gate is None:
        return bound.truth_grad(dy, act), d_act
    d_gate = FORWARD_UNITS * U * np.abs(dy) * value * gate_slope
    return np.concatenate(bound.truth_grad(dy, act, gate), -1), np.concatenate([d_act, d_gate], -1)


# --- the checks ------------------------------------------------------------------------------------------------------


def _check_forward(ops, name, real, tally):
    bound = bind_activation(name, {})
    for label, x, _ in (*synthetic_activation_inputs(name), *real_activation_inputs(name, real)):
        truth, unit = _true_forward(bound, *_halves(name, x))
        for out_dtype in (x.dtype, np.float32):
            tally.close(label, ops.activation(name, x, out_dtype=out_dtype), truth, FORWARD_UNITS * unit)


def _check_gradient(ops, name, real, tally):
    bound = bind_activation(name, {})
    for label, x, dy in (*synthetic_activation_inputs(name), *real_activation_inputs(name, real)):
        truth, permitted = _true_gradient(bound, dy.astype(np.float64), *_halves(name, x))
        for out_dtype in (x.dtype, np.float32):
            tally.close(label, ops.activation_grad(name, dy, x, out_dtype=out_dtype), truth, permitted)


def _check_dbias(ops, name, tally):
    """The bias gradient is within the bound of any float32 summation order of the stored gradient."""
    for label, x, dy in synthetic_activation_inputs(name):
        dx, dbias = ops.activation_grad(name, dy, x, dbias=True)
        judged = np.isfinite(dx.astype(np.float32)).all(axis=0)  # float16 overflows in some columns
        terms = dx[:, judged].astype(np.float64)
        tally.close(label, dbias[judged], terms.sum(axis=0), len(terms) * U * np.abs(terms).sum(axis=0))


def _check_scaled(ops, name, tally):
    """Output, dx and the scales' gradient; a product with the scale is one more rounding."""
    bound = bind_activation(name, {})
    for label, x, dy in synthetic_activation_inputs(name):
        act, gate = _halves(name, x)
        row_scales = np.linspace(-1.5, 2, len(x)).astype(np.float32)
        scales, dy64 = row_scales.astype(np.float64)[:, None], dy.astype(np.float64)
        truth, unit = _true_forward(bound, act, gate)
        permitted = (FORWARD_UNITS + 1) * unit
        y = ops.scaled_activation(name, x, row_scales)
        tally.close(label, y, truth * scales, permitted * np.abs(scales))
        dx, drow_scales = ops.scaled_activation_grad(name, dy, x, row_scales)
        tally.close(f"{label} dx", dx, *_true_gradient(bound, dy64 * scales, act, gate))
        terms = dy64 * truth
        of_sum = terms.shape[1] * U * np.abs(terms).sum(axis=1)
        of_terms = (np.abs(dy64) * permitted).sum(axis=1)
        tally.close(f"{label} drow_scales", drow_scales, terms.sum(axis=1), of_sum + of_terms)


def _check_interleaved(ops, name, tally):
    """glu_interleave_size=32 gives what the plain layout gives after the columns are put in order."""
    for label, x, dy in synthetic_activation_inputs(name):
        m, width = x.shape
        scales = np.linspace(0.5, 2, m).astype(np.float32)
        mixed = x.reshape(m, 2, width // 64, 32).swapaxes(1, 2).reshape(m, width)
        y = ops.scaled_activation(name, x, scales)
        y_mixed = ops.scaled_activation(name, mixed, scales, glu_interleave_size=32)
        tally.equal(label, y_mixed, y)
        dx, dscales = ops.scaled_activation_grad(name, dy, x, scales)
        dx_mixed, dscales_mixed = ops.scaled_activation_grad(name, dy, mixed, scales, glu_interleave_size=32)
        ordered = dx_mixed.reshape(m, width // 64, 2, 32).swapaxes(1, 2).reshape(m, width)
        tally.equal(f"{label} dx", ordered, dx)
        tally.equal(f"{label} drow_scales", dscales_mixed, dscales)
