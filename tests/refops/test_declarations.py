"""What every declaration of an activation keeps to: no literal in a formula, names once, words that exist."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import refops
from refops import activations, oracle
from refops.activations import ACTIVATIONS, Arithmetic
from refops.activations.declaration import RESERVED, Function, Parameter, forms, gated, unary

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


def test_a_parameter_of_two_defaults_is_refused():
    """`DEFAULT_PARAMETERS` could not say which one an activation has."""

    def row(name, default):
        function = Function(name, lambda words: None, parameters=(Parameter("alpha", default, other=0.5),))
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
        Function(f"of {other}", lambda words: None, parameters=(Parameter("alpha", 1.0, other=other),))
        for other in (0.5, 2.0)
    )
    row = gated("elu", first, second, formula="", op="ELU")
    with pytest.raises(ValueError, match=r"parameters of elu must have one name each; got .*0\.5.* and .*2\.0"):
        activations._defaults([row])
    same = gated("elu", first, first, formula="", op="ELU")
    assert same.parameters == ("alpha",)


@pytest.mark.parametrize("name", ["out_dtype", "dbias", "width", "lambda", "_alpha", "a b", ""])
def test_a_parameter_that_no_call_could_take_is_refused(name):
    with pytest.raises(ValueError, match=f"name of a parameter must be .*; got '{name}'"):
        Parameter(name, 1.0, other=2.0)


def test_the_arguments_beside_parameters_are_reserved():
    """Of every call that takes parameters by name, on each backend."""
    stub = Path(refops.__file__).parents[1] / "cuda_kernels" / "__init__.pyi"
    calls = [node for node in ast.walk(ast.parse(stub.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    listed = [node.args for node in calls if node.args.kwarg is not None]
    names = {argument.arg for args in listed for argument in (*args.args, *args.kwonlyargs)}
    for call in (vars(refops)[name] for name in refops.__all__):
        if inspect.isfunction(call):
            parameters = inspect.signature(call).parameters.values()
            if any(p.kind is p.VAR_KEYWORD for p in parameters):
                names |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert {"x", "dbias", "fast_math"} <= names <= RESERVED


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
