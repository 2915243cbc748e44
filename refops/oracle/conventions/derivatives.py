"""Conventions of parts of activations and derivatives: missing terms, missing clamps, fitted numbers, coarse words."""

import numpy as np

from refops.activations import REFERENCE, Arithmetic
from refops.arguments import BFLOAT16
from refops.oracle.conventions.fits import distance, dumped_values, fitted_number
from refops.oracle.conventions.formulas import require_activation
from refops.oracle.conventions.registry import computing
from refops.oracle.geometry import Region

F = np.float32
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}


def require_gradient(replay):
    """NotApplicable unless the kernel computes the gradient of an activation."""
    require_activation(replay)
    replay.require(replay.gradient)


def words_of(replay):
    """Names of the elementary functions in the formulas of a replay's activation."""
    used = {word for function in replay.bound.activation.functions for word in function.words}
    return {name for name in ("sigmoid", "exp", "tanh") if any(word.startswith(name) for word in used)}


# --- operands -------------------------------------------------------------------------------------


@computing(
    "x-and-dy-exchanged",
    "The inputs x and dy are exchanged: the derivative is that of dy, and x is what it is multiplied by.",
    stage="input",
)
def x_and_dy_exchanged(replay):
    require_gradient(replay)
    replay.require(not replay.gated)
    other = {"x": "dy", "dy": "x"}
    replay.wrap("load", lambda inner, name, rows, columns: inner(other[name], rows, columns))


@computing(
    "derivative-at-output",
    "The derivative is taken at {what}, where TE takes it at x.",
    stage="function",
    choices=("output", "rounded output"),
)
def derivative_at_output(replay, choice):
    require_gradient(replay)
    own, value = replay.derivative, replay.value
    replay.facts["what"] = "the activation's output"
    replay.require(choice == "output" or replay.dtype != F)
    kept = (lambda x: replay.round(value(x))) if choice == "rounded output" else value
    replay.derivative = lambda x: own(kept(x))


#: What stands where the other belongs: choice -> (what the sentence says is found, where what belongs).
EXCHANGED = {
    "f for f'": ("the activation f stands", "its derivative f' belongs"),
    "f' for f": ("the derivative f' of the activation stands", "the activation f itself belongs"),
    "both": ("the activation f and its derivative f' stand", "the other one of the two belongs"),
}


@computing(
    "function-for-derivative",
    "In {operation} {found} where {belongs}: look at which of the two is kept.",
    stage="function",
    choices=tuple(EXCHANGED),
)
def function_for_derivative(replay, choice):
    require_activation(replay)
    uses_derivative, uses_function = replay.gradient, replay.gated or not replay.gradient
    replay.require((uses_derivative or choice == "f' for f") and (uses_function or choice == "f for f'"))
    replay.facts["operation"] = replay.operation.name
    replay.facts["found"], replay.facts["belongs"] = EXCHANGED[choice]
    value, derivative = replay.value, replay.derivative
    if choice != "f' for f":
        replay.derivative = value
    if choice != "f for f'":
        replay.value = derivative


@computing(
    "factor-missing",
    "{what} not multiplied by {factor}.",
    stage="product",
    choices=("gate", "gate of act", "activation of gate", "activation", "slope of act", "slope of gate"),
)
def factor_missing(replay, choice):
    require_activation(replay)
    replay.require(replay.gated or choice == "slope of act")
    replay.require(replay.gradient == (choice not in ("gate", "activation")))
    replay.facts["what"], replay.facts["factor"] = {
        "gate": ("The activation is", "the gate"),
        "activation": ("The gate is", "the activation"),
        "gate of act": ("The gradient of act is", "the gate"),
        "activation of gate": ("The gradient of gate is", "the activation of act"),
        "slope of act": ("The gradient is", "the activation's derivative"),
        "slope of gate": ("The gradient of gate is", "the derivative of the gate"),
    }[choice]
    ones = lambda x: np.ones_like(x)  # noqa: E731
    if choice == "activation":
        replay.value = ones
    elif choice == "gate":
        replay.gate = ones
    elif choice == "gate of act":
        replay.backward_act = lambda dy, act, gate: replay.derivative(act) * dy
    elif choice == "activation of gate":
        replay.backward_gate = lambda dy, act, gate: replay.gate_slope(gate) * dy
    elif choice == "slope of act":
        replay.derivative = ones
    else:
        replay.require(len(replay.bound.activation.gate.words or ()) > 0)
        replay.gate_slope = ones


@computing(
    "gate-input-in-gradient",
    "The gradient of gate is multiplied by {what}, where TE multiplies by the activation of act.",
    stage="product",
    choices=("act", "gate"),
)
def gate_input_in_gradient(replay, choice):
    require_gradient(replay)
    replay.require(replay.gated)
    replay.facts["what"] = "act itself" if choice == "act" else "the gate"
    replay.backward_gate = lambda dy, act, gate: (
        (replay.gate_slope(gate) * dy) * (act if choice == "act" else replay.gate(gate))
    )


# --- terms of the derivative ----------------------------------------------------------------------


class PairArithmetic(Arithmetic):
    """float32 with the second word of a pair exchanged.

    Attributes:
        sigmoid_rest, tanh_rest: function of the first word, or None for the right one.
    """

    def __init__(self, sigmoid_rest=None, tanh_rest=None):
        self.sigmoid_rest, self.tanh_rest = sigmoid_rest, tanh_rest

    def sigmoid_pair(self, x):
        """(s, what stands for 1 - s)."""
        s, rest = super().sigmoid_pair(x)
        return s, rest if self.sigmoid_rest is None else self.sigmoid_rest(s)

    def tanh_pair(self, x):
        """(t, what stands for 1 - t t)."""
        t, rest = super().tanh_pair(x)
        return t, rest if self.tanh_rest is None else self.tanh_rest(t)


#: How a term is left out: name -> (word, stand-in for the second of its pair, what the sentence says).
TERMS = {
    "1 - s": ("sigmoid", np.ones_like, "lacks the factor 1 - sigmoid of its second term"),
    "x s (1 - s)": ("sigmoid", np.zeros_like, "is the sigmoid alone: the term with 1 - sigmoid is missing"),
    "1 + s": ("sigmoid", lambda s: F(1) + s, "has 1 + sigmoid where 1 - sigmoid is right"),
    "s": ("sigmoid", np.positive, "has the sigmoid where 1 - sigmoid is right"),
    "1 - t t": ("tanh", np.ones_like, "lacks the factor 1 - tanh^2"),
    "sech": ("tanh", np.zeros_like, "lacks the term with 1 - tanh^2"),
    "1 - t": ("tanh", lambda t: F(1) - t, "has 1 - tanh where 1 - tanh^2 is right"),
    "1 + t t": ("tanh", lambda t: F(1) + t * t, "has 1 + tanh^2 where 1 - tanh^2 is right"),
}


@computing(
    "derivative-term",
    "The derivative {what}.",
    stage="function",
    choices=(*TERMS, "first term", "factor of x"),
)
def derivative_term(replay, choice):
    require_gradient(replay)
    words = words_of(replay)
    if choice in TERMS:
        word, rest, replay.facts["what"] = TERMS[choice]
        replay.require(word in words)
        changed = PairArithmetic(**{f"{word}_rest": rest})
        replay.derivative = _plain(replay, changed)
        if replay.gated and any(one.startswith(word) for one in replay.bound.activation.gate.words):
            replay.gate_slope = replay.bound.using(changed).gate_slope
        return
    replay.require(words)
    own = replay.derivative
    first = _plain(replay, PairArithmetic(np.zeros_like, np.zeros_like))
    if choice == "first term":
        replay.facts["what"] = "is the term with the slope of the elementary function alone: the other one is missing"
        replay.derivative = lambda x: own(x) - first(x)
        return
    replay.facts["what"] = "lacks the factor x of its second term"
    replay.derivative = lambda x: first(x) + np.where(x == 0, F(0), (own(x) - first(x)) / x)


def _plain(replay, arithmetic):
    """The derivative in another arithmetic, in the order that has pairs."""
    return replay.bound.using(arithmetic).derivative


# --- constants of formulas ------------------------------------------------------------------------


class OtherConstant(Arithmetic):
    """float32 with one constant of the formula exchanged.

    Attributes:
        own, other: the constant, and what stands for it.
        seen: the constants that formulas asked for.
    """

    def __init__(self, own=None, other=None):
        self.own, self.other, self.seen = own, other, []

    def number(self, c):
        """The constant, or the other one in its place."""
        self.seen.append(F(c))
        return F(self.other) if self.own is not None and F(c) == F(self.own) else F(c)


def constants_of(function):
    """The constants of a `Function`'s formula but 0, 1 and their half, in its order."""
    words = OtherConstant()
    function.body(words)
    return [float(c) for c in dict.fromkeys(words.seen) if c not in (0, 0.5, 1)]


def _other_constants(replay):
    require_activation(replay)
    choices = []
    for own in constants_of(replay.bound.activation.act):
        others = [float(f"{own:.{digits}g}") for digits in (1, 2, 3, 4)]
        choices += [(own, other) for other in dict.fromkeys([1.0, 0.0, 2 * own, *others]) if F(other) != F(own)]
        choices.append((own, "fitted"))
    return choices


@computing(
    "formula-constant",
    "The formula of {operation} has the constant {found:.7g}, where TE has {own:.7g}.",
    stage="function",
    choices=_other_constants,
    last=True,
)
def formula_constant(replay, choice):
    own, other = choice
    if other == "fitted":
        other = _fitted(replay, own, own, lambda trial, number: _set_constant(trial, own, number))
        replay.require(F(other) != F(own))
    replay.facts["operation"], replay.facts["found"], replay.facts["own"] = replay.operation.name, other, own
    _set_constant(replay, own, other)


def _set_constant(replay, own, other):
    replay.bound = replay.bound.using(OtherConstant(own, other))


@computing(
    "argument-factor",
    "The argument of the {word} in {operation} has the factor {found:g}, which TE does not have.",
    stage="function",
    last=True,
)
def argument_factor(replay):
    require_activation(replay)
    words = words_of(replay)
    replay.require(words and not replay.bound.parameters)
    found = _fitted(replay, "argument", 1.0, _set_argument_factor)
    replay.require(F(found) != 1)
    replay.facts["word"], replay.facts["operation"] = max(words), replay.operation.name
    replay.facts["found"] = found
    _set_argument_factor(replay, found)


def _set_argument_factor(replay, factor):
    """Let x f(x) be x f(factor x): the value of the scaled argument, divided by the factor, and its slope."""
    factor, value, derivative = F(factor), replay.value, replay.derivative
    replay.value = lambda x: value(x * factor) / factor
    replay.derivative = lambda x: derivative(x * factor)


# --- parameters -----------------------------------------------------------------------------------

#: Parameter -> values that kernels have for it, besides the neutral ones.
COMMON = {
    "limit": (5.0, 6.0, 6.5, 8.0, 10.0),
    "alpha": (1.7, 1.703, 1.5, 2.0),
    "glu_linear_offset": (-1.0, 0.5, 2.0),
    "beta1": (2.0, 5.0, 8.0, 25.0),
    "beta2": (4.0, 10.0, 20.0, 50.0),
}


def _parameters_to_try(replay):
    require_activation(replay)
    declared = replay.bound.activation.declared
    common = [(p.name, value) for p in declared for value in COMMON.get(p.name, ())]
    inverses = [(p.name, 1 / replay.bound.parameters[p.name]) for p in declared if replay.bound.parameters[p.name]]
    return [*common, *inverses, *((p.name, "fitted") for p in declared)]


@computing(
    "other-parameter",
    "The kernel evaluates {operation} with {name}={found:g}, where the call has {name}={own:g}.",
    stage="function",
    choices=_parameters_to_try,
    last=True,
)
def other_parameter(replay, choice):
    name, value = choice
    require_activation(replay)
    if value == "fitted":
        value = _fitted(
            replay, name, replay.bound.parameters[name] or 1.0, lambda trial, v: _set_parameter(trial, name, v)
        )
    own = replay.bound.parameters[name]
    known = next(p for p in replay.bound.activation.declared if p.name == name)
    replay.require(
        F(value) not in [F(v) for v in (own, known.default, *known.neutral)]
    )  # parameters-ignored says those
    replay.facts["operation"], replay.facts["name"] = replay.operation.name, name
    replay.facts["found"], replay.facts["own"] = value, own
    _set_parameter(replay, name, value)


def _set_parameter(replay, name, value):
    replay.bound = _bound_with(replay, **{name: value})


def _bound_with(replay, **parameters):
    """The activation of a replay with other parameters."""
    bound = replay.bound
    return type(bound)(bound.activation, {**bound.parameters, **parameters}, bound.arithmetic)


def _fitted(replay, name, start, change):
    """The number with which `change(replay, number)` comes nearest to the dump on a part of the probe."""
    setting = replay.setting
    key = ("fitted", name)
    if key not in setting.cache:
        setting.cache[key] = _fit(replay, abs(start), change)
    return setting.cache[key]


def _fit(replay, start, change):
    setting = replay.setting
    replay.require(setting.probe is not None and setting.shape)
    region, rows = setting.probe, setting.probe.rows
    if replay.layout is None or replay.layout.block is None or max(e[0] for e in replay.block_shapes.values()) <= 32:
        region = Region(slice(rows.start, min(rows.start + 32, rows.stop)), region.columns)
    dumped = dumped_values(replay, region)

    def distance_of(number):
        trial = setting.replay()
        change(trial, number)
        return distance(trial.compute(region.rows, region.columns), dumped)

    with np.errstate(all="ignore"):
        right = distance(setting.replay().compute(region.rows, region.columns), dumped)
        number = fitted_number(distance_of, start)
        replay.require(distance_of(number) < 0.9 * right)
    return number


# --- clamps ---------------------------------------------------------------------------------------

CLAMPS = {
    "gate": "the gate is not clamped",
    "act": "act is not clamped",
    "gate above": "the gate is clamped at limit alone, not at -limit",
    "gate below": "the gate is clamped at -limit alone, not at limit",
    "act below": "act is clamped at -limit too",
    "offset inside": "glu_linear_offset is added before the gate is clamped",
    "output": "the activation is clamped, not its input",
    "slopes": "the gradients are not zero beyond the limits",
    "slope of act": "the gradient of act is not zero above the limit",
    "slope of gate": "the gradient of gate is not zero beyond the limits",
    "slopes unclamped": "the derivative is that of the unclamped function",
    "strict": "the gradients are zero at the limits themselves too",
}


@computing(
    "clamp-variant",
    "The kernel clamps differently: {what}.",
    stage="function",
    choices=tuple(CLAMPS),
)
def clamp_variant(replay, choice):
    require_activation(replay)
    replay.require("limit" in replay.bound.parameters and "glu_linear_offset" in replay.bound.parameters)
    replay.facts["what"] = CLAMPS[choice]
    of_slopes = choice.startswith("slope") or choice == "strict"
    replay.require(replay.gradient or not of_slopes)
    limit, offset = F(replay.bound.parameters["limit"]), F(replay.bound.parameters["glu_linear_offset"])
    free = type(replay)(replay.setting)  # the same without a limit
    free.bound = _bound_with(replay, limit=float("inf"))
    (_change_slopes if of_slopes else _change_clamps)(replay, free, choice, limit, offset)


def _change_clamps(replay, free, choice, limit, offset):
    own_value, own_slope, own_gate, own_mask = replay.value, replay.derivative, replay.gate, replay.gate_slope
    if choice == "gate":
        replay.gate, replay.gate_slope = free.gate, free.gate_slope
    elif choice == "act":
        replay.value, replay.derivative = free.value, free.derivative
    elif choice in ("gate above", "gate below"):
        beyond = (lambda g: g < -limit) if choice == "gate above" else (lambda g: g > limit)
        replay.gate = lambda g: np.where(beyond(g), free.gate(g), own_gate(g))
        replay.gate_slope = lambda g: np.where(beyond(g), free.gate_slope(g), own_mask(g))
    elif choice == "act below":
        replay.value = lambda x: own_value(np.fmax(x, -limit))
        replay.derivative = lambda x: np.where(x < -limit, F(0), own_slope(x))
    elif choice == "offset inside":
        replay.gate = lambda g: np.fmin(np.fmax(g + offset, -limit), limit)
        replay.gate_slope = lambda g: own_mask(g + offset)
    else:
        replay.value = lambda x: np.fmin(free.value(x), limit)
        replay.derivative = lambda x: np.where(free.value(x) <= limit, free.derivative(x), F(0))


def _change_slopes(replay, free, choice, limit, offset):
    own_slope, own_mask = replay.derivative, replay.gate_slope
    if choice in ("slopes", "slope of act"):
        replay.derivative = lambda x: own_slope(np.fmin(x, limit))
    if choice in ("slopes", "slope of gate"):
        replay.gate_slope = np.ones_like
    if choice == "slopes unclamped":
        replay.derivative, replay.gate_slope = free.derivative, np.ones_like
    if choice == "strict":
        replay.derivative = lambda x: np.where(x == limit, F(0), own_slope(x))
        replay.gate_slope = lambda g: np.where(np.abs(g) == limit, F(0), own_mask(g))


# --- words in low precision -----------------------------------------------------------------------


class RoundedWord(Arithmetic):
    """float32 with the argument or the result of one elementary function rounded to a dtype."""

    def __init__(self, word, where, dtype):
        self.word, self.where_, self.dtype = word, where, dtype

    def _rounded(self, word, function, x):
        if word != self.word:
            return function(x)
        to = lambda v: np.asarray(v).astype(self.dtype).astype(F)  # noqa: E731
        x = to(x) if self.where_ != "result" else x
        result = function(x)
        return to(result) if self.where_ != "argument" else result

    def exp(self, x):
        """e^x, by the rounding."""
        return self._rounded("exp", super().exp, x)

    def tanh(self, x):
        """tanh, by the rounding."""
        return self._rounded("tanh", super().tanh, x)

    def sigmoid(self, x):
        """Sigmoid, by the rounding."""
        return self._rounded("sigmoid", super().sigmoid, x)


def _roundings_of_words(replay):
    require_activation(replay)
    words = words_of(replay)
    words |= {"exp"} if "sigmoid" in words else set()
    return [
        (word, where, dtype)
        for where in ("result", "argument", "both")
        for word in ("sigmoid", "exp", "tanh")
        for dtype in DTYPES
        if word in words
    ]


@computing(
    "word-low-precision",
    "The {where} of {word} rounded to {dtype}, where TE has float32.",
    stage="product",
    choices=_roundings_of_words,
)
def word_low_precision(replay, choice):
    word, where, name = choice
    require_activation(replay)
    replay.facts["word"], replay.facts["dtype"] = word, DTYPES[name]
    replay.facts["where"] = {"both": "argument and the result"}.get(where, where)
    replay.facts["word"] = f"{word} {'are' if where == 'both' else 'is'}"
    replay.require(replay.bound.arithmetic is REFERENCE)
    replay.bound = replay.bound.using(RoundedWord(word, where, DTYPES[name]))
