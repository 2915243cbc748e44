"""How an activation is declared: scalar functions with their slopes, its names and its parameters.

A file of this folder declares a function of x once, as a factory of a vocabulary (see `arithmetic`), and the
activations that are made of it, in its tuple `ROWS`. `relu.py` is the shortest. The factory binds the words that it
needs to locals and returns (value, slope), functions of x and of the parameters p.

Where value and slope have a costly part in common, as in `qgelu.py`, the factory names it: it returns (shared, value,
slope), and the latter two take what `shared(x, p)` gave as a third argument.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from numbers import Real
from typing import Any

from refops.activations.arithmetic import Arithmetic
from refops.activations.trial import require_formula
from refops.arguments import require_flag, require_integer, require_number, shown, with_article

#: Names that a parameter cannot have: the other arguments of the calls that take parameters by name, and what kernels
#: read beside them.
RESERVED = frozenset(
    (
        *("self", "cls", "name", "x", "dy", "row_scales", "scaling", "rowwise", "columnwise", "dbias", "out_dtype"),
        *(
            "glu_interleave_size",
            "swizzled_scales",
            "arithmetic",
            "fast_math",
            "cache_quantized_input",
            "compute_scale_grad",
        ),
        *("input", "grad", "fwd_input", "act_scales", "quantizer", "activation_type", "activation_recompute_in_mlp"),
        *("rows", "width", "interleave", "data", "codes", "scales", "amax", "random_bits", "seed", "offset"),
        *("first_block", "epsilon", "largest_scale", "outer", "inner", "scale_stride"),
    )
)
#: Operations of `refops` that belong to no activation; no activation may have one of these names.
OTHER_OPERATIONS = ("quantize", "dequantize", "update_delayed_scale")

#: The functions of (x, p) that a factory makes: value, slope, and both as a tuple. `forms` gives no `both` where value
#: and slope share no part; a fast factory may leave out `slope`, which is then the second of `both`.
Forms = namedtuple("Forms", "value slope both", defaults=(None, None))


# --- checks of what a row is declared with ------------------------------------------------------------


def _require_identifier(value, name, *, lower=False):
    """Raise unless `value` is a public Python identifier, in lower case if `lower`."""
    rule = f"{name} must be an identifier{' in lower case' * lower}, no keyword and without a leading underscore"
    if not isinstance(value, str):
        raise TypeError(f"{rule}; got {shown(value)}")
    if not value.isidentifier() or iskeyword(value) or value.startswith("_") or (lower and value != value.lower()):
        raise ValueError(f"{rule}; got {value!r}")


def _require_kind(value, name, kind, *, optional=False):
    """Raise TypeError unless `value` is a `kind`, or None where it is optional."""
    if not isinstance(value, kind) and not (optional and value is None):
        rule = "callable" if kind is Callable else with_article(kind.__name__)
        raise TypeError(f"{name} must be {rule}{' or None' * optional}; got {shown(value)}")


def _require_tuple(value, name, kind):
    if not isinstance(value, tuple) or not all(isinstance(one, kind) for one in value):
        comma = ", with a comma after one" if isinstance(value, kind) else ""
        raise TypeError(f"{name} must be a tuple of {kind.__name__}{comma}; got {shown(value)}")


# --- what a row is --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter of an activation.

    Attributes:
        name: its name, a field of `p` in formulas and an argument of calls: none of `RESERVED`.
        default: TE's default.
        other: an ordinary value that is not the default, for golden files and tests.
        positive: whether it must be above 0 and finite. The others may be any number, as in TE.
        neutral: values that leave it out of the formula.
        nothing: the one of `neutral` that is so large that it has no effect, which sentences of the oracle call "no"
            and the parameter's name ("no limit"); None without one.

    Raises:
        TypeError, ValueError: a name that no argument can have, or a value that no call would take.
    """

    name: str
    default: float
    other: float
    positive: bool = False
    neutral: tuple[float, ...] = ()
    nothing: float | None = None

    def __post_init__(self):
        _require_identifier(self.name, "name of a parameter")
        if self.name in RESERVED:
            raise ValueError(f"name of a parameter must be none of {', '.join(sorted(RESERVED))}; got {self.name!r}")
        require_flag(self.positive, f"positive of {self.name}")
        _require_tuple(self.neutral, f"neutral of {self.name}", Real)
        values = [("default", self.default), ("other", self.other), *(("neutral", value) for value in self.neutral)]
        for field, value in values:
            require_number(value, f"{field} of {self.name}", positive=self.positive, finite=self.positive)
        if self.nothing is not None and self.nothing not in self.neutral:
            raise ValueError(
                f"nothing of {self.name} must be one of neutral, {self.neutral}; got {shown(self.nothing)}"
            )


@dataclass(frozen=True, eq=False)
class Function:
    """A function of one number and its slope.

    Attributes:
        name: what it is called.
        body: factory of a vocabulary: (value, slope) or (shared, value, slope), in the float32 order of the kernels.
        parameters: what it reads of `p`.
        truth: a factory of its own for float64 where `body` would cancel there.
        fast: factory of `Forms` from the vocabulary of `cuda_kernels.fast`, approximate units for numbers and for pairs
            of them: value, both and, where that alone can be had for less, slope. Without one fast math has `body`.
        row_scaled: factory of the slope in the order of the kernels with a scale for each row, where that differs.
        jax: TE's name in its JAX interface; None where it has none and needs none.
    """

    name: str
    body: Callable[[Any], tuple]
    parameters: tuple[Parameter, ...] = ()
    truth: Callable[[Any], tuple] | None = None
    fast: Callable[[Any], Forms] | None = None
    row_scaled: Callable[[Any], Callable] | None = None
    jax: str | None = None

    def __post_init__(self):
        """Raise TypeError where an attribute is not of its kind."""
        _require_kind(self.name, "name of a function", str)
        _require_kind(self.body, f"body of {self.name}", Callable)
        for field in ("truth", "fast", "row_scaled"):
            _require_kind(getattr(self, field), f"{field} of {self.name}", Callable, optional=True)
        _require_tuple(self.parameters, f"parameters of {self.name}", Parameter)
        _require_kind(self.jax, f"jax of {self.name}", str, optional=True)

    def __repr__(self):
        return f"<function {self.name}>"

    @cached_property
    def words(self):
        """Names of the words that `body` asks for."""
        return words_of(self.body)

    def require_formulas(self):
        """Raise ValueError where `body` or `row_scaled` has a literal or a branch; see `trial`."""
        parameters = {p.name: p.default for p in self.parameters}
        require_formula(self.name, "body", self.body, parameters)
        if self.row_scaled is not None:
            require_formula(self.name, "row_scaled", self.row_scaled, parameters)

    @property
    def elementary(self):
        """Whether it has an exponential in it. Without one, a function is exact up to rounding: its own truth."""
        return bool(self.words & {"exp", "tanh", "sigmoid", "sigmoid_pair", "tanh_pair"})


class _Listener:
    """A vocabulary whose words do nothing; it notes which of them are asked for."""

    def __init__(self):
        self.words = set()

    def __getattr__(self, word):
        self.words.add(word)
        return lambda *arguments: 1.0


def words_of(factory):
    """Return the names of the words that a factory asks for."""
    listener = _Listener()
    factory(listener)
    return frozenset(listener.words)


def forms(factory, words):
    """Return the `Forms` that a `body` makes of a vocabulary.

    Raises:
        ValueError: it gives neither (value, slope) nor (shared, value, slope).
    """
    made = factory(words)
    if len(made) == 2:
        return Forms(*made)
    if len(made) != 3:
        raise ValueError(f"{factory.__name__} must return (value, slope) or (shared, value, slope); got {made!r}")
    shared, value_of, slope_of = made

    def value(x, p):
        return value_of(x, p, shared(x, p))

    def slope(x, p):
        return slope_of(x, p, shared(x, p))

    def both(x, p):
        part = shared(x, p)
        return value_of(x, p, part), slope_of(x, p, part)

    return Forms(value, slope, both)


@dataclass(frozen=True, eq=False)
class Activation:
    """A row of `refops.ACTIVATIONS`.

    Attributes:
        name: TE's name.
        formula: what it computes, in words of mathematics; the order of operations is the functions'.
        act: the function of x, or of the activated half.
        gate: the function of the gate half, None for unary activations.
        op: name of its class in `fuser.ops`.
        order: its place in the table, which users see; None: after those that have one, by name.
        number: TE's `NVTE_Activation_Type`, None where TE has none.
        row_scaled: whether there is a kernel with a scale for each row.
        product: factory of the gated value of (act, gate, p) in one piece, from the vocabulary of `cuda_kernels.fast`.
    """

    name: str
    formula: str
    act: Function
    gate: Function | None
    op: str
    order: int | None = None
    number: int | None = None
    row_scaled: bool = False
    product: Callable[[Any], Any] | None = None

    def __post_init__(self):
        """Raise TypeError or ValueError if an attribute, a word or a formula breaks its rule."""
        self._check_attributes()
        factories = [made for f in self.functions for made in (f.body, f.truth, f.row_scaled) if made is not None]
        unknown = sorted(word for made in factories for word in words_of(made) if not hasattr(Arithmetic, word))
        if unknown:
            rule = "must be written in words of the vocabulary, refops/activations/arithmetic.py"
            raise ValueError(f"{self.name} {rule}; got {unknown[0]!r}, which is none")
        for function in self.functions:
            function.require_formulas()

    def _check_attributes(self):
        _require_identifier(self.name, "name of an activation", lower=True)
        if self.name in OTHER_OPERATIONS:
            rule = f"must be no other operation's, {', '.join(OTHER_OPERATIONS)}"
            raise ValueError(f"name of an activation {rule}; got {self.name!r}")
        _require_kind(self.formula, f"formula of {self.name}", str)
        _require_kind(self.act, f"act of {self.name}", Function)
        _require_kind(self.gate, f"gate of {self.name}", Function, optional=True)
        _require_identifier(self.op, f"op of {self.name}")
        for field in ("order", "number"):
            if getattr(self, field) is not None:
                require_integer(getattr(self, field), f"{field} of {self.name}", low=0, high=1 << 31)
        require_flag(self.row_scaled, f"row_scaled of {self.name}")
        _require_kind(self.product, f"product of {self.name}", Callable, optional=True)

    def __repr__(self):
        return f"<{self.name}: {self.formula}>"

    @property
    def derived(self) -> tuple[str, ...]:
        """Names of the operations and functions made of it, besides its own; as in TE, d may precede the last word."""
        head, underscore, last = self.name.rpartition("_")
        gradients = dict.fromkeys((f"d{self.name}", f"{head}{underscore}d{last}"))
        return tuple(
            prefix + name
            for prefix, names in (("", gradients), ("dbias_", gradients), ("scaled_", (self.name, *gradients)))
            for name in names
        )

    @property
    def gated(self) -> bool:
        """Whether the input row is [act | gate]."""
        return self.gate is not None

    @property
    def functions(self):
        """The one or two functions."""
        return (self.act,) if self.gate is None else (self.act, self.gate)

    @cached_property
    def declared(self) -> tuple[Parameter, ...]:
        """The parameters that it accepts, each once.

        Raises:
            ValueError: two that differ have one name.
        """
        found: dict[str, Parameter] = {}
        for p in (p for function in self.functions for p in function.parameters):
            if found.setdefault(p.name, p) != p:
                raise ValueError(f"parameters of {self.name} must have one name each; got {found[p.name]} and {p}")
        return tuple(found.values())

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the activation accepts."""
        return tuple(p.name for p in self.declared)

    @property
    def jax(self) -> tuple[str, ...] | None:
        """Its type in TE's JAX interface, ("gelu",) or ("silu", "linear"); None if there is no such function."""
        names = tuple(function.jax for function in self.functions)
        return None if None in names else names


def _identity(words):
    one_like = words.one_like

    def value(g, p):
        return g

    def slope(g, p):
        return one_like(g)

    return value, slope


#: The gate of most gated activations: itself.
IDENTITY = Function("identity", _identity, jax="linear")


def unary(name, act, *, formula, op, **attributes):
    """Declare the activation f(x); see `Activation`."""
    return Activation(name, formula, act, None, op, **attributes)


def gated(name, act, gate=IDENTITY, *, formula, op, **attributes):
    """Declare the activation f(act) gate(gate) of rows [act | gate]; see `Activation`."""
    return Activation(name, formula, act, gate, op, **attributes)
