"""What every declaration of an activation keeps to: no literal in a formula, names once, words that exist."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import refops
from refops import activations, oracle
from refops.activations import ACTIVATIONS, Activation, Arithmetic
from refops.activations.declaration import OTHER_OPERATIONS, RESERVED, Function, Parameter, forms, gated, unary
from refops.oracle.operation import OPERATIONS
from refops.rows import rows_of

F = np.float32
FILES = sorted(path for path in Path(activations.__file__).parent.glob("*.py") if "ROWS = " in path.read_text("utf-8"))
FUNCTIONS = list(dict.fromkeys(function for row in ACTIVATIONS.values() for function in row.functions))


def formulas(tree):
    """The functions that factories return: those inside of functions."""
    outer = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [
        inner for node in outer for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef) and inner is not node
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_formula_has_a_literal(path):
    """2 * x would be float64 where Numba compiles it. An index of what was shared is none."""
    for function in formulas(ast.parse(path.read_text("utf-8"))):
        indices = {id(node.slice) for node in ast.walk(function) if isinstance(node, ast.Subscript)}
        numbers = [n for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, int | float)]
        assert all(id(number) in indices for number in numbers), f"{path.name}: {function.name}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=repr)
def test_formulas_use_words_of_the_vocabulary(function):
    known = {name for name, _ in inspect.getmembers(Arithmetic, inspect.isfunction)}
    assert function.words <= known, function.words - known


def test_what_is_only_rounded_is_exact():
    exact = {function.name for function in FUNCTIONS if not function.elementary}
    assert exact == {"relu", "srelu", "identity", "clamped_gate"}


@pytest.mark.parametrize("name", ["relu", "sreglu"])
def test_a_last_bit_of_what_is_only_rounded_counts(name):
    x = np.linspace(1, 4, 128, dtype=F).reshape(2, 64)
    y = refops.activation(name, x)
    assert oracle.check(name, x, y).ok
    assert not oracle.check(name, x, np.nextafter(y, F(9), dtype=F)).ok


def test_the_same_name_twice_is_refused():
    rows = list(ACTIVATIONS.values())
    with pytest.raises(ValueError, match=r"the same name, 'silu': <silu: .*> and <silu: .*>$"):
        activations._by_name([*rows, ACTIVATIONS["silu"]])
    other = replace(ACTIVATIONS["silu"], name="swish")
    with pytest.raises(ValueError, match=r"the same order, 4: <silu: .*> and <swish: .*>$"):
        activations._by_name([*rows, other])


@pytest.mark.parametrize("form", ["body", "truth", "row_scaled"])
def test_a_word_outside_of_the_vocabulary_is_named_with_the_activation(form):
    def softplus(words):
        log1p, exp = words.log1p, words.exp

        def value(x, p):
            return log1p(exp(x))

        return value, value

    plain = ACTIVATIONS["silu"].act.body
    function = Function("softplus", **{"body": plain, form: softplus})
    with pytest.raises(ValueError, match=r"^softplus must be written in words of .*arithmetic\.py; got 'log1p'"):
        unary("softplus", function, formula="ln(1 + e^x)", op="Softplus")


def _identity(words):
    return (lambda x, p: x), (lambda x, p: words.one_like(x))


def _factory_of(expression):
    """A factory whose value is an expression of x, p and the words, in line 5."""
    text = f"""
def factory(words):
    maximum, where, three, zero, exp = words.maximum, words.where, words.number(3), words.number(0), words.exp
    def value(x, p):
        return {expression}
    return value, lambda x, p: words.one_like(x)
"""
    names = {"F": F, "np": np}
    exec(compile(text, "refops/activations/zz.py", "exec"), names)
    return names["factory"]


LITERAL = r"must name its constants, such as c = words\.number\({0}\) in the factory; got {0}, which a kernel takes"
BRANCH = r"must choose by where\(condition, a, b\), maximum, at_most or at_least.*; got a branch of Python"
REFUSED_FORMULAS = {
    "x * 0.16666666": LITERAL.format("0.16666666"),
    "0.5 - x": LITERAL.format("0.5"),
    "x + 2": LITERAL.format("2"),
    "np.float64(0.5) * x": LITERAL.format(r"(np\.float64\()?0\.5\)?"),
    "p.alpha * 2.5": LITERAL.format("2.5"),
    "where(x > 0.5, x, zero)": LITERAL.format("0.5"),
    "where(x > zero, x, 0.25)": LITERAL.format("0.25"),
    "maximum(0, x)": LITERAL.format("0"),
    "exp(1.5)": LITERAL.format("1.5"),
    "7.0": LITERAL.format("7.0"),
    "None": "must compute with numbers of the vocabulary; got None",
    "x if x > zero else zero": BRANCH,
    "x > zero and x": BRANCH,
    "max(x, zero)": BRANCH,
    "zero if p.alpha == three else x": BRANCH,
}


@pytest.mark.parametrize("expression", REFUSED_FORMULAS)
@pytest.mark.parametrize("form", ["body", "row_scaled"])
def test_a_formula_that_a_kernel_cannot_take_is_refused_with_its_line(expression, form):
    factory = _factory_of(expression)
    given = {"body": _identity, form: factory if form == "body" else (lambda words: factory(words)[0])}
    function = Function("zz", parameters=(Parameter("alpha", 1.0, other=2.0),), **given)
    line = 4 if expression in ("7.0", "None") else 5
    place = rf" \(refops/activations/zz\.py, line {line}\)$"
    with pytest.raises(ValueError, match=f"^{form} of zz {REFUSED_FORMULAS[expression]}.*{place}"):
        unary("zz", function, formula="x", op="Zz")


@pytest.mark.parametrize(
    "expression",
    ["maximum(x + three, zero)", "F(0.5) * x - three", "where(x == x, -x, p.alpha)", "(x, exp(x))[1] * p.alpha"],
)
def test_a_formula_in_words_and_float32_is_taken(expression):
    function = Function("zz", _factory_of(expression), parameters=(Parameter("alpha", 1.0, other=2.0),))
    assert unary("zz", function, formula="x", op="Zz").act is function


def test_a_parameter_of_two_defaults_is_refused():
    """`DEFAULT_PARAMETERS` could not say which one an activation has."""

    def row(name, default):
        function = Function(name, _identity, parameters=(Parameter("alpha", default, other=0.5),))
        return unary(name, function, formula="alpha x", op=name.title())

    assert activations._defaults([row("elu", 1.0), row("celu", 1.0)]) == {"alpha": 1.0}
    with pytest.raises(ValueError, match=r"alpha has two defaults: 1\.0 in elu, 1\.7 in celu"):
        activations._defaults([row("elu", 1.0), row("celu", 1.7)])


def test_a_body_of_another_number_of_functions_is_refused():
    def body(words):
        return (lambda x, p: x,)

    with pytest.raises(ValueError, match=r"body must return \(value, slope\) or \(shared, value, slope\); got"):
        forms(body, activations.REFERENCE)


def test_two_parameters_of_one_name_are_refused():
    """Which of them a call meant nobody could say."""
    first, second = (
        Function(f"of {other}", _identity, parameters=(Parameter("alpha", 1.0, other=other),)) for other in (0.5, 2.0)
    )
    row = gated("elu", first, second, formula="", op="ELU")
    with pytest.raises(ValueError, match=r"parameters of elu must have one name each; got .*0\.5.* and .*2\.0"):
        activations._defaults([row])
    same = gated("elu", first, first, formula="", op="ELU")
    assert same.parameters == ("alpha",)


@pytest.mark.parametrize(
    "name",
    [
        *("out_dtype", "dbias", "width", "lambda", "_alpha", "a b", ""),
        *("self", "data", "scales", "amax", "random_bits", "seed", "offset", "first_block", "epsilon"),
        *("largest_scale", "outer", "inner", "scale_stride", "input", "grad", "quantizer"),
    ],
)
def test_a_parameter_that_no_call_could_take_is_refused(name):
    with pytest.raises(ValueError, match=f"name of a parameter must be .*; got '{name}'"):
        Parameter(name, 1.0, other=2.0)


def test_the_arguments_beside_parameters_are_reserved():
    """Of every call that takes parameters by name, on each backend and in `fuser`."""
    root = Path(refops.__file__).parents[1]
    files = [root / "cuda_kernels/__init__.pyi", root / "cuda_kernels/interface.py", *(root / "fuser").glob("*.py")]
    files += [root / "fuser/basic/activation.py", root / "fuser/xla/settings.py"]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    listed = [node.args for node in nodes if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None]
    listed = [arguments for arguments in listed if arguments.kwarg.arg in ("params", "parameters")]
    names = {argument.arg for args in listed for argument in (*args.args, *args.kwonlyargs)}
    for call in (vars(refops)[name] for name in refops.__all__):
        if inspect.isfunction(call):
            parameters = inspect.signature(call).parameters.values()
            if any(p.kind is p.VAR_KEYWORD for p in parameters):
                names |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert {"self", "x", "dbias", "fast_math", "quantizer"} <= names <= RESERVED


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"name": 7}, TypeError, "name of a parameter must be an identifier.*; got 7"),
        (
            {"default": -1.0, "positive": True},
            ValueError,
            "default of a must be a finite float32: a positive .*; got -1",
        ),
        ({"default": "7"}, TypeError, "default of a must be a number .*; got '7'"),
        ({"default": np.nan}, ValueError, "default of a must be a number .*; got nan"),
        ({"other": None}, TypeError, "other of a must be a number .*; got None"),
        ({"positive": "no"}, TypeError, "positive of a must be True or False; got 'no'"),
        ({"neutral": 1.0}, TypeError, "neutral of a must be a tuple of Real, with a comma after one; got 1.0"),
        ({"neutral": (np.nan,)}, ValueError, "neutral of a must be a number .*; got nan"),
        ({"nothing": 3.0}, ValueError, r"nothing of a must be one of neutral, \(\); got 3.0"),
    ],
)
def test_a_parameter_whose_values_no_call_would_take_is_refused(attributes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        Parameter(**{"name": "a", "default": 1.0, "other": 2.0} | attributes)


SILU = replace(ACTIVATIONS["silu"].act, jax=None)


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"name": ""}, ValueError, "name of an activation must be an identifier in lower case.*; got ''"),
        ({"name": "zz y"}, ValueError, "name of an activation must be .*; got 'zz y'"),
        ({"name": "Zz"}, ValueError, "name of an activation must be .*; got 'Zz'"),
        ({"name": "if"}, ValueError, "name of an activation must be .*; got 'if'"),
        ({"name": None}, TypeError, "name of an activation must be .*; got None"),
        ({"name": "quantize"}, ValueError, "name of an activation must be no other operation's.*; got 'quantize'"),
        ({"name": "update_delayed_scale"}, ValueError, "name of an activation must be no other operation's"),
        ({"op": "not an id"}, ValueError, "op of zz must be an identifier.*; got 'not an id'"),
        ({"op": None}, TypeError, "op of zz must be an identifier.*; got None"),
        ({"order": "first"}, TypeError, "order of zz must be an integer; got 'first'"),
        ({"number": 1.5}, TypeError, "number of zz must be an integer; got 1.5"),
        ({"act": SILU.body}, TypeError, "act of zz must be a Function; got <function"),
        ({"gate": "linear"}, TypeError, "gate of zz must be a Function or None; got 'linear'"),
        ({"formula": None}, TypeError, "formula of zz must be a str; got None"),
        ({"row_scaled": 1}, TypeError, "row_scaled of zz must be True or False; got 1"),
        ({"product": "act gate"}, TypeError, "product of zz must be callable or None; got 'act gate'"),
    ],
)
def test_an_activation_that_cannot_work_is_refused(attributes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        Activation(**{"name": "zz", "formula": "x", "act": SILU, "gate": None, "op": "Zz"} | attributes)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": 3}, "name of a function must be a str; got 3"),
        ({"body": "x"}, "body of zz must be callable; got 'x'"),
        ({"fast": 1}, "fast of zz must be callable or None; got 1"),
        (
            {"parameters": Parameter("a", 1.0, 2.0)},
            "parameters of zz must be a tuple of Parameter, with a comma after one; got Parameter",
        ),
        ({"parameters": ("a",)}, r"parameters of zz must be a tuple of Parameter; got \('a',\)"),
        ({"jax": ("zz",)}, r"jax of zz must be a str or None; got \('zz',\)"),
    ],
)
def test_a_function_of_other_kinds_is_refused(attributes, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        Function(**{"name": "zz", "body": SILU.body} | attributes)


@pytest.mark.parametrize("name", ["dgelu", "clamped_dswiglu", "scaled_dswiglu", "scaled_swiglu", "dbias_dgelu", "elu"])
def test_a_name_that_another_s_operation_has_is_refused(name):
    """It would take the gradient away; "elu" the gradient "delu" of what is there."""
    rows = [*ACTIVATIONS.values(), unary("delu", SILU, formula="x", op="DELU")]
    assert activations._by_name(rows)["delu"].derived[0] == "ddelu"
    with pytest.raises(ValueError, match=r"^<.*> must not have the name of an operation that <.*> makes; got"):
        activations._by_name([*rows, unary(name, SILU, formula="x", op="Zz")])


def test_names_of_operations_are_those_that_activations_avoid():
    names = {name for row in ACTIVATIONS.values() for name in (row.name, *row.derived)}
    assert set(OTHER_OPERATIONS) == {name for name, row in OPERATIONS.items() if row.activation is None}
    assert set(OPERATIONS) <= names | set(OTHER_OPERATIONS)


def test_a_file_without_rows_is_refused():
    """ROW instead of ROWS would declare nothing."""
    module = ModuleType("refops.activations.zz")
    module.__file__ = "refops/activations/zz.py"
    assert rows_of(module, "ROWS", Activation, without=("zz",)) == ()
    with pytest.raises(TypeError, match=r"must have ROWS, a tuple of Activation, .*; got none in .*/zz\.py$"):
        rows_of(module, "ROWS", Activation, without=("arithmetic",))


def test_a_fast_form_is_of_functions_with_an_elementary_part():
    assert all(function.elementary or function.name == "clamped_gate" for function in FUNCTIONS if function.fast)


def test_numbers_and_types_of_te_s_jax_interface():
    """`NVTE_Activation_Type` and TE's names (docs/spec/activations.md, 1.1)."""
    found = {row.number: row.jax for row in ACTIVATIONS.values() if row.number is not None}
    assert [found[number] for number in range(12)] == [
        ("gelu",),
        ("gelu", "linear"),
        ("sigmoid", "linear"),
        ("silu",),
        ("silu", "linear"),
        ("relu",),
        ("relu", "linear"),
        ("quick_gelu",),
        ("quick_gelu", "linear"),
        ("squared_relu",),
        ("squared_relu", "linear"),
        ("clamped_silu", "clamped_linear"),
    ]
    assert ACTIVATIONS["situglu"].jax is None
