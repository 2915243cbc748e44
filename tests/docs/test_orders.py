"""The figures of the guide: a derivative has the bits that its text computes, a scale byte lies where it is shown."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import refops
from refops.activations import ACTIVATIONS, bind_activation
from refops.activations.arithmetic import REFERENCE

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import orders  # noqa: E402

F = np.float32
RANDOM = np.random.default_rng(0)
X, GATE, DY, SCALE = (RANDOM.standard_normal((64, 32)).astype(F) * 3 for _ in range(4))
WORDS = {"sigmoid": REFERENCE.sigmoid, "tanh": REFERENCE.tanh, "isnan": np.isnan, "where": np.where}
WORDS |= {
    "min": REFERENCE.at_most,
    "max": lambda a, b: REFERENCE.at_least(a, b) if np.ndim(a) else REFERENCE.maximum(F(a), b),
}


def slope(function, x, parameters, row_scaled):
    """The text of a slope, evaluated in float32."""
    if function is orders.IDENTITY:
        return np.ones_like(x)
    text, names = orders.slope_text(function, row_scaled=row_scaled and function.row_scaled is not None)
    values = {"x": x, **parameters}
    for name, meaning in names.items():
        values[name] = eval(meaning, WORDS, values)
    return np.broadcast_to(np.asarray(eval(text, WORDS, values), F), x.shape)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gradient_computed_from_the_texts_has_the_reference_s_bits(name, scaled):
    row = ACTIVATIONS[name]
    if scaled and not row.row_scaled:
        return
    kind = f"{'gated' if row.gated else 'unary'}{' with a scale for each row' * scaled}"
    texts = {what: str(text) for of, what, text in orders.products() if of == kind}
    bound, parameters = bind_activation(name, {}), {p.name: F(p.default) for p in row.declared}
    values = {"dy": DY, "row_scale": SCALE[:, :1], "x": X, "act": X, "gate": GATE}
    functions = {
        "f": bound.value,
        "g": bound.gate if row.gated else None,
        "df": lambda x: slope(row.act, x, parameters, scaled),
        "dg": lambda x: slope(row.gate, x, parameters, scaled),
    }
    made = [eval(re.sub(r"([fg])'", r"d\1", text), {}, functions | values) for text in texts.values()]
    x = np.concatenate([X, GATE], axis=1) if row.gated else X
    if scaled:
        expected, _ = refops.scaled_activation_grad(name, DY, x, SCALE[:, 0])
    else:
        expected = refops.activation_grad(name, DY, x)
    assert np.concatenate(made, axis=1).tobytes() == expected.tobytes()


def test_another_association_has_other_bits():
    """The test above can fail."""
    right, wrong = (bind_activation("silu", {}).derivative(X) * DY, X * DY * 0.5)
    assert right.tobytes() != wrong.tobytes()
    text, names = orders.slope_text(ACTIVATIONS["silu"].act)
    assert (text, names) == ("x * (s * (1 - s)) + s", {"s": "sigmoid(x)"})
    assert orders.slope_text(ACTIVATIONS["silu"].act, row_scaled=True)[0] == "s + (x * s) * (1 - s)"


def test_products_are_those_of_the_guide():
    assert [str(text) for _, _, text in orders.products()] == [
        "f'(x) * dy",
        "(f'(act) * dy) * g(gate)",
        "(g'(gate) * dy) * f(act)",
        "(dy * row_scale) * f'(x)",
        "(dy * row_scale) * (f'(act) * g(gate))",
        "(dy * row_scale) * (f(act) * g'(gate))",
    ]


def test_every_slope_is_in_the_table():
    table = orders.derivatives()
    for row in ACTIVATIONS.values():
        for function in row.functions:
            assert function is orders.IDENTITY or f"| {function.name} |" in table


# --- the swizzle ------------------------------------------------------------------------------------------------------


def offset(i, j, blocks):
    """cuBLAS's formula, as the guide gives it."""
    return ((i // 128) * (blocks // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4


def test_every_byte_of_the_figure_is_where_the_formula_says():
    figure = orders.swizzle()
    rowwise, columnwise = (
        figure.split("columnwise, stored")[0],
        figure.split("columnwise, stored")[1].split("rowwise, which")[0],
    )
    for text, swap in ((rowwise, False), (columnwise, True)):
        lines = re.findall(r"^ +(\d+)  (\d.*)$", text, re.MULTILINE)
        assert len(lines) == 3
        for first, labels in lines:
            for place, label in enumerate(labels.replace("|", "").split()):
                i, j = map(int, label.split(","))
                i, j = (j, i) if swap else (i, j)
                assert offset(i, j, 4) == int(first) + place


def test_tiles_of_the_figure_follow_each_other_along_the_blocks():
    rowwise, columnwise = orders.swizzle().split("rowwise, which")[1].split("columnwise, which")
    numbers = [[int(n) for n in re.findall(r"tile (\d)", part.split("when")[1])] for part in (rowwise, columnwise)]
    assert numbers == [[0, 1, 2, 3], [0, 2, 1, 3]]
    assert [offset(128 * r, 4 * b, 8) // 512 for r in (0, 1) for b in (0, 1)] == numbers[0]
