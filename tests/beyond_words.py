"""A scaling and an activation that NumPy computes and no compiler does: their functions leave the vocabulary."""

import re
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

import refops
from refops import E4M3, E8M0, scalings
from refops.activations.declaration import Function, unary
from refops.scalings.declaration import Layout
from refops.scalings.rules import E8M0Scaling


@dataclass(frozen=True)
class Beyond(E8M0Scaling):
    """E4M3 with an E8M0 scale for 32 elements, by a function of NumPy that Numba does not know."""

    scale_rounding: str = "up"
    title, block_size, fmt = "beyond words", 32, E4M3

    @property
    def layout(self):
        return Layout(block=(1, 32), scale_format=E8M0, padding=(128, 4), scale_order="gemm")

    def scale_code(self, words):
        encode = words.encode(E8M0, "up")

        @words.function
        def beyond(amax, tensor_scale, p):
            return encode(np.heaviside(amax, amax))

        return beyond


def step(words):
    one = words.number(1)

    def value(x, p):
        return np.heaviside(x, one)

    def slope(x, p):
        return x - x

    return value, slope


STEP = unary("step", Function("step", step), formula="1 where x >= 0", op="Step")


@contextmanager
def known():
    """A context in which `refops` has both."""
    before = scalings.SCALINGS
    scalings.SCALINGS, refops.ACTIVATIONS["step"] = (*before, Beyond), STEP
    try:
        yield
    finally:
        scalings.SCALINGS = before
        del refops.ACTIVATIONS["step"]


def check_refusals(kernels):
    """Every call refuses each of them with one sentence, which includes what the compiler said."""
    x = np.ones((32, 64), np.float32)
    rule = r"the scale rule of Beyond\(scale_rounding='up'\) .* function beyond \(beyond_words.py, line \d+\) .*"
    formula = r"the formula of step .* function value \(beyond_words.py, line \d+\) .*"
    cases = [
        (lambda: kernels.quantize(x, Beyond()), rule + re.escape("only the words of refops/scalings/arithmetic.py")),
        (
            lambda: kernels.activation("step", x),
            formula + re.escape("only the words of refops/activations/arithmetic.py"),
        ),
    ]
    with known():
        refops.quantize(x, Beyond())
        refops.activation("step", x)
        for call, sentence in 2 * cases:
            with pytest.raises(TypeError, match=sentence) as caught:
                call()
            assert "\n" not in str(caught.value) and "heaviside" in str(caught.value.__cause__)
