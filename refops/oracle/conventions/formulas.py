"""Conventions of the formula: another function, other operands, other arithmetic, other places of act and gate."""

from dataclasses import replace

import numpy as np

from refops.activations import ACTIVATIONS, ROW_SCALED, BoundActivation
from refops.activations.gelu import GELU
from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.words import (
    LowPrecisionArithmetic,
    TanhArithmetic,
    normal_cdf,
    normal_density,
)
from refops.tiles import RowLayout

F = np.float32
SMALLEST_NORMAL = F(2.0**-126)
#: The stages that are functions of an activation.
FUNCTIONS = ("value", "derivative", "gate", "gate_slope")


def require_activation(replay):
    """NotApplicable unless the kernel computes an activation or its gradient."""
    replay.require(replay.computes and replay.bound is not None)


def require_gated(replay):
    """NotApplicable unless its rows are [act | gate]."""
    require_activation(replay)
    replay.require(replay.gated and replay.width > 0)


# --- which column is what -------------------------------------------------------------------------


def sides_of(replay):
    """Whether a wrong layout holds for the input alone or for the gradient that is written too."""
    return ("both", "input", "output") if replay.computes and replay.gradient else ("input",)


def lay_out(replay, choice, layout):
    """Let rows of one of `sides_of` have another `RowLayout`; NotApplicable if it is the call's own."""
    replay.require(layout != replay.x_layout)
    if choice in ("both", "input"):
        replay.x_layout = layout
    if choice in ("both", "output"):
        replay.dx_layout = layout
    replay.facts["where"] = {"both": "x and dx", "input": "x", "output": "dx alone"}[choice]


@computing(
    "gate-order",
    "The row is taken as [gate | act]: the activation is applied to the second half of {where}, where TE applies it to "
    "the first.",
    stage="gate",
    choices=lambda replay: [side for side in sides_of(replay) if side != "output"],  # that is swapped-halves
)
def gate_order(replay, choice):
    require_gated(replay)
    lay_out(replay, choice, replace(replay.x_layout, gate_first=True))


@computing(
    "gate-interleaved",
    "Act and gate alternate column by column in {where}, where TE has them in two halves [act | gate].",
    stage="gate",
    choices=lambda replay: [(side, first) for first in (False, True) for side in sides_of(replay)],
)
def gate_interleaved(replay, choice):
    require_gated(replay)
    side, gate_first = choice
    lay_out(replay, side, RowLayout(1, gate_first))


@computing(
    "interleave-ignored",
    "glu_interleave_size is ignored in {where}: the row is taken as [act | gate].",
    stage="gate",
    choices=sides_of,
)
def interleave_ignored(replay, choice):
    require_gated(replay)
    replay.require(replay.case.params.get("glu_interleave_size", 0))
    lay_out(replay, choice, RowLayout(replay.width))


# --- which function -------------------------------------------------------------------------------


@computing(
    "erf-gelu",
    "GELU is the exact form with erf, where TE has the tanh approximation.",
    stage="function",
    choices=("float64", "float32"),
)
def erf_gelu(replay, choice):
    require_activation(replay)
    replay.require(replay.bound.activation.act is GELU)

    def cdf(x):
        exact = normal_cdf(x)
        if choice == "float64":
            return exact
        return F(0.5) * (F(1) + (2 * exact - 1).astype(F))

    replay.value = lambda x: (x * cdf(x)).astype(F)
    replay.derivative = lambda x: (cdf(x) + x * normal_density(x)).astype(F)


def _other_activations(replay):
    if not replay.computes or replay.bound is None:
        return []
    known = ROW_SCALED if replay.scaled else ACTIVATIONS
    own = replay.bound.activation
    return [name for name in known if ACTIVATIONS[name].gated == own.gated and name != own.name]


@computing(
    "other-activation",
    "The kernel computes {other}, not {own}.",
    stage="function",
    choices=_other_activations,
)
def other_activation(replay, choice):
    replay.facts["own"], replay.facts["other"] = replay.bound.activation.name, choice
    activation = ACTIVATIONS[choice]
    given = replay.bound.parameters
    replay.bound = BoundActivation(activation, {p.name: given.get(p.name, p.default) for p in activation.declared})


def _other_parameters(replay):
    if not replay.computes or replay.bound is None:
        return []
    own, declared = replay.bound.parameters, replay.bound.activation.declared
    alone = [{p.name: value} for p in declared for value in (*p.neutral, p.default) if F(value) != F(own[p.name])]
    pairs = [{**a, **b} for i, a in enumerate(alone) for b in alone[i + 1 :] if set(a) != set(b)]
    defaults = {p.name: p.default for p in declared}
    every = [defaults] if len(own) > 2 and defaults != own else []
    return alone + pairs + every


@computing(
    "parameters-ignored",
    "{operation} is evaluated with {what}, where the call has {given}.",
    stage="function",
    choices=_other_parameters,
)
def parameters_ignored(replay, choice):
    own = replay.bound.parameters

    nothing = {p.name: p.nothing for p in replay.bound.activation.declared}

    def listed(values):
        return ", ".join(f"no {n}" if v == nothing[n] else f"{n}={v:g}" for n, v in values.items())

    replay.facts["operation"] = replay.operation.name
    replay.facts["what"], replay.facts["given"] = listed(choice), listed({n: own[n] for n in choice})
    replay.bound = BoundActivation(replay.bound.activation, {**own, **choice})


@computing(
    "upstream-gradient-missing",
    "The gradient is not multiplied by dy.",
    stage="upstream",
)
def upstream_gradient_missing(replay):
    require_activation(replay)
    replay.require(replay.gradient)
    replay.after("load_upstream", np.ones_like)


@computing(
    "nan-propagated",
    "NaN passes through a minimum, a maximum or a comparison, where TE's fmaxf, fminf and comparisons drop it.",
    stage="function",
)
def nan_propagated(replay):
    require_activation(replay)
    for name in FUNCTIONS:
        replay.wrap(name, lambda inner, x: np.where(np.isnan(x), F(np.nan), inner(x)))


# --- which arithmetic -----------------------------------------------------------------------------


@computing(
    "rounded-intermediate",
    "{what} rounded to {dtype} before the next product, where TE keeps float32 until the end.",
    stage="product",
    choices=("value", "all", "product", "derivative"),
)
def rounded_intermediate(replay, choice):
    require_activation(replay)
    replay.require(replay.dtype != F)
    replay.require(replay.gradient or replay.gated or replay.scaled)
    replay.facts["dtype"] = replay.dtype
    replay.facts["what"] = {
        "value": "The activation is",
        "derivative": "The derivative is",
        "all": "The activation, its derivative and the gate are",
        "product": "The product of activation and gate is",
    }[choice]
    if choice == "product":
        replay.require(replay.scaled or replay.gradient)
        if not replay.gradient:
            replay.wrap("forward", lambda inner, act, gate, scale: replay.round(inner(act, gate, None)) * scale)
        elif replay.gated:
            replay.facts["what"] = "The product of dy and the slope is"
            own_round = replay.round
            replay.backward_act = lambda dy, act, gate: own_round(replay.derivative(act) * dy) * replay.gate(gate)
            replay.backward_gate = lambda dy, act, gate: own_round(replay.gate_slope(gate) * dy) * replay.value(act)
        else:
            replay.require(replay.scaled)
            scale_of = replay.row_scale
            replay.facts["what"] = "The product of dy and the row's scale is"
            replay.wrap("load_upstream", lambda inner, rows, h: replay.round(inner(rows, h) * scale_of(rows)))
            replay.row_scale = lambda rows: np.ones_like(scale_of(rows))
        return
    names = {"value": ("value",), "derivative": ("derivative",), "all": ("value", "derivative", "gate", "gate_slope")}
    replay.require(choice != "derivative" or replay.gradient)
    for name in names[choice]:
        replay.after(name, replay.round)


@computing(
    "low-precision-arithmetic",
    "The formula is evaluated in {dtype}, {how}, where TE evaluates it in float32.",
    stage="product",
    choices=("whole", "each"),
)
def low_precision_arithmetic(replay, choice):
    replay.require(not replay.updates)
    dtype = replay.out_dtype if replay.dequantizes else replay.dtype
    replay.require(dtype != F)
    replay.facts["dtype"] = dtype
    replay.facts["how"] = {
        "whole": "each function and product rounded",
        "each": "each operation inside the functions rounded too",
    }[choice]
    if replay.dequantizes:
        replay.facts["how"] = "scale and product rounded"
        replay.require(choice == "whole")
        replay.after("block_factor", lambda factor: factor.astype(dtype).astype(F))
        replay.wrap("multiply", lambda inner, v, f: inner(v.astype(dtype).astype(F), f).astype(dtype).astype(F))
        return
    require_activation(replay)
    replay.bound = replay.bound.using(LowPrecisionArithmetic(dtype, choice == "whole"))
    for name in FUNCTIONS:
        replay.after(name, replay.round)
    _change_products(replay, replay.round)


def _change_products(replay, change):
    """Let every product of the formula with dy, the gate or a row's scale pass through `change`, and that scale."""
    scaled = replay.scaled

    def forward(act, gate, scale):
        y = replay.value(act)
        if gate is not None:
            y = change(y * replay.gate(gate))
        return y if scale is None else change(y * change(scale))

    def backward_act(dy, act, gate):
        if gate is None:
            return change(dy * replay.derivative(act))
        if scaled:
            return change(dy * change(replay.derivative(act) * replay.gate(gate)))
        return change(change(replay.derivative(act) * dy) * replay.gate(gate))

    def backward_gate(dy, act, gate):
        if scaled:
            return change(dy * change(replay.value(act) * replay.gate_slope(gate)))
        return change(change(replay.gate_slope(gate) * dy) * replay.value(act))

    replay.forward, replay.backward_act, replay.backward_gate = forward, backward_act, backward_gate


@computing(
    "sigmoid-through-tanh",
    "The sigmoid is 0.5 + 0.5 tanh(x / 2), which loses all digits far below zero; TE has 1 / (1 + e^-x).",
    stage="product",
)
def sigmoid_through_tanh(replay):
    require_activation(replay)
    words = {word for function in replay.bound.activation.functions for word in function.words}
    replay.require(words & {"sigmoid", "sigmoid_pair"})
    replay.bound = replay.bound.using(TanhArithmetic())


def _flush(values):
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(F(0), values), values)


@computing(
    "subnormals-flushed",
    "float32 subnormals are flushed to zero (-ftz=true, fast math); TE keeps them.",
    stage="input",
    last=True,
    choices=("inputs and results", "all", "inputs", "results", "scaled values", "scales"),
)
def subnormals_flushed(replay, choice):
    replay.require(replay.computes)
    if choice in ("inputs and results", "inputs", "all"):
        replay.after("load", _flush)
    if choice in ("inputs and results", "results", "all"):
        replay.after("compute", _flush)
        if replay.bound is not None:
            for name in FUNCTIONS:
                replay.after(name, _flush)
            if "product" not in replay.changed:  # another convention has products of its own
                _change_products(replay, _flush)
    if choice in ("scales", "all"):
        _flush_scales(replay)
    if replay.scaling is not None and choice != "scales":
        replay.wrap("multiply", lambda inner, v, m: _flush(inner(_flush(v), _flush(m))))


def _flush_scales(replay):
    """Flush what scales are made of: the quotient amax / max of a block, the scale of the tensor and its inverse."""
    replay.require(replay.scaling is not None)
    if replay.layout.scale_format is None:
        replay.after("encode_scale", _flush)
        replay.after("decode_scale", _flush)
    elif replay.layout.two_level:
        replay.after("tensor_scale", lambda pair: tuple(map(_flush, pair)))
    else:
        reciprocal = F(1) / replay.scale_max
        replay.wrap(
            "scale_code",
            lambda inner, rule, amax, tensor_scale: inner(
                rule, np.where(_flush(amax * reciprocal) == 0, F(0), amax), tensor_scale
            ),
        )


# --- scales of rows -------------------------------------------------------------------------------


@computing("row-scale-missing", "The rows are not multiplied by row_scales.", stage="row-scale")
def row_scale_missing(replay):
    replay.require(replay.computes and replay.scaled)
    replay.after("row_scale", np.ones_like)


@computing(
    "row-scale-before-activation",
    "row_scales multiply {what}, where TE multiplies the activation's output.",
    stage="row-scale",
    choices=("act", "both"),
)
def row_scale_before_activation(replay, choice):
    replay.require(replay.computes and replay.scaled)
    scale_of = replay.row_scale
    replay.facts["what"] = "the activation's input" if choice == "act" else "the whole input row"
    replay.require(choice == "act" or replay.gated)

    def halves(inner, rows, h):
        act, gate = inner(rows, h)
        scale = scale_of(rows)
        return act * scale, gate if gate is None or choice == "act" else gate * scale

    replay.wrap("halves", halves)
    if not replay.gradient:
        replay.row_scale = lambda rows: np.ones_like(scale_of(rows))


@computing(
    "row-scale-rounded",
    "The product with row_scales is made of values rounded to {dtype}, where TE multiplies in float32.",
    stage="row-scale",
)
def row_scale_rounded(replay):
    replay.require(replay.computes and replay.scaled and replay.dtype != F)
    replay.facts["dtype"] = replay.dtype
    replay.after("row_scale", replay.round)


# --- gradients of row scales and biases -----------------------------------------------------------


@computing(
    "row-scale-gradient-scaled",
    "The gradient of row_scales is multiplied by row_scales once more.",
    stage="row-gradient",
)
def row_scale_gradient_scaled(replay):
    replay.require(replay.computes and replay.scaled and replay.gradient)
    replay.wrap(
        "row_gradient_terms",
        lambda inner, dy, act, gate, rows: inner(dy, act, gate, rows) * replay.row_scale(rows),
    )
