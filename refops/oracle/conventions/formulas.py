"""Conventions of the formula: another function, other operands, other arithmetic, other places of act and gate."""

from dataclasses import replace

import numpy as np

from refops.activations import ACTIVATIONS, DEFAULT_PARAMETERS, BoundActivation
from refops.ops import SCALED_ACTIVATIONS
from refops.oracle.conventions.arithmetic import (
    LowPrecisionArithmetic,
    TanhArithmetic,
    evaluate,
    normal_cdf,
    normal_density,
)
from refops.oracle.conventions.registry import computing
from refops.oracle.replay import RowLayout, TensorKernel

F = np.float32
SMALLEST_NORMAL = F(2.0**-126)
#: Functions of a formula: attribute of a kernel, formula of the activation, attribute of `Formula`.
FUNCTIONS = (
    ("value", "act", "value"),
    ("derivative", "act", "derivative"),
    ("gate", "gate", "value"),
    ("gate_slope", "gate", "derivative"),
)


def require_activation(kernel):
    """NotApplicable unless the kernel computes an activation or its gradient."""
    kernel.require(isinstance(kernel, TensorKernel) and kernel.bound is not None)


def require_gated(kernel):
    """NotApplicable unless its rows are [act | gate]."""
    require_activation(kernel)
    kernel.require(kernel.gated and kernel.width > 0)


# --- which column is what -------------------------------------------------------------------------


def _sides(kernel):
    """Whether a wrong layout holds for the input alone or for the gradient that is written too."""
    return ("both", "input", "output") if isinstance(kernel, TensorKernel) and kernel.gradient else ("input",)


def _lay_out(kernel, choice, layout):
    kernel.require(layout != kernel.x_layout)
    if choice in ("both", "input"):
        kernel.x_layout = layout
    if choice in ("both", "output"):
        kernel.dx_layout = layout
    kernel.facts["where"] = {"both": "x and dx", "input": "x", "output": "dx alone"}[choice]


@computing(
    "gate-order",
    "The row is taken as [gate | act]: the activation is applied to the second half of {where}, where TE applies it to "
    "the first.",
    stage="gate",
    choices=lambda kernel: [side for side in _sides(kernel) if side != "output"],  # that is swapped-halves
)
def gate_order(kernel, choice):
    require_gated(kernel)
    _lay_out(kernel, choice, replace(kernel.x_layout, gate_first=True))


@computing(
    "gate-interleaved",
    "Act and gate alternate column by column in {where}, where TE has them in two halves [act | gate].",
    stage="gate",
    choices=lambda kernel: [(side, first) for first in (False, True) for side in _sides(kernel)],
)
def gate_interleaved(kernel, choice):
    require_gated(kernel)
    side, gate_first = choice
    _lay_out(kernel, side, RowLayout(1, gate_first))


@computing(
    "interleave-ignored",
    "glu_interleave_size is ignored in {where}: the row is taken as [act | gate].",
    stage="gate",
    choices=_sides,
)
def interleave_ignored(kernel, choice):
    require_gated(kernel)
    kernel.require(kernel.case.params.get("glu_interleave_size", 0))
    _lay_out(kernel, choice, RowLayout(kernel.width))


# --- which function -------------------------------------------------------------------------------


@computing(
    "erf-gelu",
    "GELU is the exact form with erf, where TE has the tanh approximation.",
    stage="function",
    choices=("float64", "float32"),
)
def erf_gelu(kernel, choice):
    require_activation(kernel)
    kernel.require(kernel.bound.activation.name in ("gelu", "geglu"))

    def cdf(x):
        exact = normal_cdf(x)
        if choice == "float64":
            return exact
        return F(0.5) * (F(1) + (2 * exact - 1).astype(F))

    kernel.value = lambda x: (x * cdf(x)).astype(F)
    kernel.derivative = lambda x: (cdf(x) + x * normal_density(x)).astype(F)


def _other_activations(kernel):
    if not isinstance(kernel, TensorKernel) or kernel.bound is None:
        return []
    known = SCALED_ACTIVATIONS if kernel.scaled else ACTIVATIONS
    own = kernel.bound.activation
    return [name for name in known if ACTIVATIONS[name].gated == own.gated and name != own.name]


@computing(
    "other-activation",
    "It computes {other}, not {own}.",
    stage="function",
    choices=_other_activations,
)
def other_activation(kernel, choice):
    kernel.facts["own"], kernel.facts["other"] = kernel.bound.activation.name, choice
    activation = ACTIVATIONS[choice]
    given = kernel.bound.parameters
    kernel.bound = BoundActivation(activation, {p: given.get(p, DEFAULT_PARAMETERS[p]) for p in activation.parameters})


#: Parameter -> values that leave it out of the formula.
NEUTRAL = {"limit": (np.inf,), "alpha": (1.0,), "glu_linear_offset": (0.0,), "beta1": (1.0, 1e30), "beta2": (1.0, 1e30)}


def _other_parameters(kernel):
    if not isinstance(kernel, TensorKernel) or kernel.bound is None:
        return []
    own = kernel.bound.parameters
    alone = [
        {name: value}
        for name in own
        for value in (*NEUTRAL[name], DEFAULT_PARAMETERS[name])
        if F(value) != F(own[name])
    ]
    pairs = [{**a, **b} for i, a in enumerate(alone) for b in alone[i + 1 :] if set(a) != set(b)]
    defaults = {name: DEFAULT_PARAMETERS[name] for name in own}
    every = [defaults] if len(own) > 2 and defaults != own else []
    return alone + pairs + every


@computing(
    "parameters-ignored",
    "{operation} is evaluated with {what}, where the call has {given}.",
    stage="function",
    choices=_other_parameters,
)
def parameters_ignored(kernel, choice):
    own = kernel.bound.parameters

    def listed(values):
        shown = {n: f"no {n}" if v in (np.inf, 1e30) else f"{n}={v:g}" for n, v in values.items()}
        return ", ".join(shown.values())

    kernel.facts["operation"] = kernel.operation.name
    kernel.facts["what"], kernel.facts["given"] = listed(choice), listed({n: own[n] for n in choice})
    kernel.bound = BoundActivation(kernel.bound.activation, {**own, **choice})


@computing(
    "upstream-gradient-missing",
    "The gradient is not multiplied with dy.",
    stage="upstream",
)
def upstream_gradient_missing(kernel):
    require_activation(kernel)
    kernel.require(kernel.gradient)
    kernel.after("load_upstream", np.ones_like)


@computing(
    "nan-propagated",
    "NaN passes through a minimum, a maximum or a comparison, where TE's fmaxf, fminf and comparisons drop it.",
    stage="function",
)
def nan_propagated(kernel):
    require_activation(kernel)
    for name, _, _ in FUNCTIONS:
        kernel.wrap(name, lambda inner, x: np.where(np.isnan(x), F(np.nan), inner(x)))


# --- which arithmetic -----------------------------------------------------------------------------


@computing(
    "rounded-intermediate",
    "{what} rounded to {dtype} before the next product, where TE keeps float32 until the end.",
    stage="product",
    choices=("value", "all", "product", "derivative"),
)
def rounded_intermediate(kernel, choice):
    require_activation(kernel)
    kernel.require(kernel.dtype != F)
    kernel.require(kernel.gradient or kernel.gated or kernel.scaled)
    kernel.facts["dtype"] = kernel.dtype
    kernel.facts["what"] = {
        "value": "The activation is",
        "derivative": "The derivative is",
        "all": "The activation, its derivative and the gate are",
        "product": "The product of activation and gate is",
    }[choice]
    if choice == "product":
        kernel.require(kernel.scaled or kernel.gradient)
        if not kernel.gradient:
            kernel.wrap("forward", lambda inner, act, gate, scale: kernel.round(inner(act, gate, None)) * scale)
        elif kernel.gated:
            kernel.facts["what"] = "The product of dy and the slope is"
            own_round = kernel.round
            kernel.backward_act = lambda dy, act, gate: own_round(kernel.derivative(act) * dy) * kernel.gate(gate)
            kernel.backward_gate = lambda dy, act, gate: own_round(kernel.gate_slope(gate) * dy) * kernel.value(act)
        else:
            kernel.require(kernel.scaled)
            scale_of = kernel.row_scale
            kernel.facts["what"] = "The product of dy and the row's scale is"
            kernel.wrap("load_upstream", lambda inner, rows, h: kernel.round(inner(rows, h) * scale_of(rows)))
            kernel.row_scale = lambda rows: np.ones_like(scale_of(rows))
        return
    names = {"value": ("value",), "derivative": ("derivative",), "all": ("value", "derivative", "gate", "gate_slope")}
    kernel.require(choice != "derivative" or kernel.gradient)
    for name in names[choice]:
        kernel.after(name, kernel.round)


@computing(
    "low-precision-arithmetic",
    "The formula is evaluated in {dtype}, {how}, where TE evaluates it in float32.",
    stage="product",
    choices=("whole", "each"),
)
def low_precision_arithmetic(kernel, choice):
    dequantizes = not isinstance(kernel, TensorKernel) and hasattr(kernel, "block_factor")
    dtype = getattr(kernel, "out_dtype", None) if dequantizes else getattr(kernel, "dtype", None)
    kernel.require(dtype is not None and dtype != F)
    kernel.facts["dtype"] = dtype
    kernel.facts["how"] = {
        "whole": "each function and product rounded",
        "each": "each operation inside the functions rounded too",
    }[choice]
    if dequantizes:
        kernel.facts["how"] = "scale and product rounded"
        kernel.require(choice == "whole")
        kernel.after("block_factor", lambda factor: factor.astype(dtype).astype(F))
        kernel.wrap("multiply", lambda inner, v, f: inner(v.astype(dtype).astype(F), f).astype(dtype).astype(F))
        return
    require_activation(kernel)
    _exchange_arithmetic(kernel, LowPrecisionArithmetic(dtype, choice == "whole"))
    for name, _, _ in FUNCTIONS:
        kernel.after(name, kernel.round)
    own_round, scaled = kernel.round, kernel.scaled

    def forward(act, gate, scale):
        y = kernel.value(act)
        if gate is not None:
            y = own_round(y * kernel.gate(gate))
        return y if scale is None else own_round(y * own_round(scale))

    def backward_act(dy, act, gate):
        if gate is None:
            return own_round(dy * kernel.derivative(act))
        if scaled:
            return own_round(dy * own_round(kernel.derivative(act) * kernel.gate(gate)))
        return own_round(own_round(kernel.derivative(act) * dy) * kernel.gate(gate))

    def backward_gate(dy, act, gate):
        if scaled:
            return own_round(dy * own_round(kernel.value(act) * kernel.gate_slope(gate)))
        return own_round(own_round(kernel.gate_slope(gate) * dy) * kernel.value(act))

    kernel.forward, kernel.backward_act, kernel.backward_gate = forward, backward_act, backward_gate


def _exchange_arithmetic(kernel, arithmetic):
    """Evaluate the activation's functions under an `Arithmetic`."""
    activation, parameters = kernel.bound.activation, kernel.bound.parameters
    for name, half, which in FUNCTIONS:
        formula = getattr(activation, half)
        if formula is not None:
            function, names = getattr(formula, which), getattr(formula, f"{which}_parameters")
            setattr(kernel, name, lambda x, f=function, n=names: evaluate(arithmetic, f, n, parameters, x))


@computing(
    "sigmoid-through-tanh",
    "The sigmoid is 0.5 + 0.5 tanh(x / 2), which loses all digits far below zero; TE has 1 / (1 + e^-x).",
    stage="product",
)
def sigmoid_through_tanh(kernel):
    require_activation(kernel)
    name = kernel.bound.activation.name
    kernel.require(name not in ("gelu", "geglu", "relu", "reglu", "srelu", "sreglu"))
    _exchange_arithmetic(kernel, TanhArithmetic())


def _flush(values):
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(F(0), values), values)


@computing(
    "subnormals-flushed",
    "float32 subnormals are flushed to zero (-ftz=true, fast math); TE keeps them.",
    stage="input",
    last=True,
    choices=("inputs and results", "inputs", "results", "scaled values"),
)
def subnormals_flushed(kernel, choice):
    kernel.require(isinstance(kernel, TensorKernel))
    if choice.startswith("inputs"):
        kernel.after("load", _flush)
    if choice.endswith("results"):
        kernel.after("compute", _flush)
        if kernel.bound is not None:
            for name, _, _ in FUNCTIONS:
                kernel.after(name, _flush)
    if kernel.scaling is not None:
        kernel.wrap("multiply", lambda inner, v, m: _flush(inner(_flush(v), _flush(m))))


# --- scales of rows -------------------------------------------------------------------------------


@computing("row-scale-missing", "The rows are not multiplied with row_scales.", stage="row-scale")
def row_scale_missing(kernel):
    kernel.require(isinstance(kernel, TensorKernel) and kernel.scaled)
    kernel.after("row_scale", np.ones_like)


@computing(
    "row-scale-before-activation",
    "row_scales multiply {what}, where TE multiplies the activation's output.",
    stage="row-scale",
    choices=("act", "both"),
)
def row_scale_before_activation(kernel, choice):
    kernel.require(isinstance(kernel, TensorKernel) and kernel.scaled)
    scale_of = kernel.row_scale
    kernel.facts["what"] = "the activation's input" if choice == "act" else "the whole input row"
    kernel.require(choice == "act" or kernel.gated)

    def halves(inner, rows, h):
        act, gate = inner(rows, h)
        scale = scale_of(rows)
        return act * scale, gate if gate is None or choice == "act" else gate * scale

    kernel.wrap("halves", halves)
    if not kernel.gradient:
        kernel.row_scale = lambda rows: np.ones_like(scale_of(rows))


@computing(
    "row-scale-rounded",
    "The product with row_scales is made of values rounded to {dtype}, where TE multiplies in float32.",
    stage="row-scale",
)
def row_scale_rounded(kernel):
    kernel.require(isinstance(kernel, TensorKernel) and kernel.scaled and kernel.dtype != F)
    kernel.facts["dtype"] = kernel.dtype
    kernel.after("row_scale", kernel.round)


# --- gradients of row scales and biases -----------------------------------------------------------


@computing(
    "row-scale-gradient-scaled",
    "The gradient of row_scales is multiplied with row_scales once more.",
    stage="row-gradient",
)
def row_scale_gradient_scaled(kernel):
    kernel.require(isinstance(kernel, TensorKernel) and kernel.scaled and kernel.gradient)
    kernel.wrap(
        "row_gradient_terms",
        lambda inner, dy, act, gate, rows: inner(dy, act, gate, rows) * kernel.row_scale(rows),
    )
