"""exp and tanh are the nearest float32: a part of the exhaustive comparison, what it rests on, and that it can fail."""

import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from refops import elementary

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests" / "exhaustive" / "correct_rounding.py"
F, FUNCTIONS = np.float32, ("exp", "tanh")
UNIT = Fraction(1, 2**53)
FLT_MAX = np.finfo(F).max


@pytest.fixture
def script(monkeypatch):
    """The script, as a module that has compiled what it compiles."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import correct_rounding

    for name in FUNCTIONS:
        correct_rounding.compare(name, np.ones(1, F))
    return correct_rounding


def test_part_of_the_exhaustive_comparison():
    """`make exhaustive` on one float32 in 2048, as a user runs it."""
    command = [sys.executable, str(SCRIPT), "--fraction", "1/2048", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    verdict = r"2,097,152 values x 2 functions: 0 misrounded \([\d,]+ decided by rational arithmetic\) in \d+ s"
    assert re.fullmatch(verdict, done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("constant", "factor"),
    [
        ("LOG2_E", 1.5),
        ("LN_2_HIGH", 1 + 2.0**-40),
        ("LN_2_LOW", 1 + 2.0**-8),
        ("FIRST", 2.0**24),
        ("REST", 1 + 2.0**-30),
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_constant_is_found(script, monkeypatch, capsys, name, constant, factor):
    """In NumPy's arrays, whose constants are read at each call; compiled code keeps its own."""
    right = getattr(elementary, constant)
    wrong = (*right[:-1], right[-1] * factor) if constant == "REST" else right * factor
    monkeypatch.setattr(elementary, constant, wrong)
    assert script.main(["--fraction", "1/4096", "--functions", name, "--workers", "1"]) == 1
    verdict = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.match(r"1,048,576 values x 1 functions: [1-9][\d,]* misrounded", verdict)


def sample(seed=0):
    """Some hundred float32 where the functions are neither flat nor linear."""
    rng = np.random.default_rng(seed)
    small = np.exp2(rng.uniform(-20, 3, 200)) * rng.choice([-1, 1], 200)
    return np.concatenate([rng.uniform(-103, 88, 200), 2 * rng.standard_normal(200), small]).astype(F)


def in_float64():
    """The functions of `refops.elementary` before they are rounded to float32."""
    return elementary.make_elementary(elementary.ARRAYS._replace(narrow=lambda y: y))


@pytest.mark.parametrize(("name", "units"), [("exp", 2.3), ("tanh", 8)])
def test_error_in_float64_is_within_the_derived_bound(script, name, units):
    """Relative, in units of 2^-53, against rational arithmetic; half a unit is too little, so something is measured."""
    x = sample()
    x = x[np.abs(x) < 8] if name == "tanh" else x
    results = getattr(in_float64(), name)(x)
    assert all(within(script, name, one, y, units) for one, y in zip(x, results, strict=True))
    assert not all(within(script, name, one, y, 0.5) for one, y in zip(x, results, strict=True))


@pytest.mark.parametrize(("name", "units"), [("exp", 4), ("tanh", 256)])
def test_error_of_the_other_formulas_is_within_their_bound(script, name, units):
    """Those that the exhaustive comparison relies on: what it says of them, and its margin."""
    function, _ = script.IN_FLOAT64[name]
    x = sample(1)
    x = x[np.abs(x) < 8] if name == "tanh" else x
    assert all(within(script, name, one, function(float(one)), units) for one in x)
    assert 2 * units * UNIT <= script.BOUNDS[name]


def within(script, name, x, y, units):
    """Whether a float64 is at most so many units from the true value, for a float32 x."""
    x, y, error = abs(x) if name == "tanh" else x, abs(Fraction(float(y))), Fraction(units) * UNIT
    return script.is_above(name, x, y * (1 - error)) and not script.is_above(name, x, y * (1 + error))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rational_arithmetic_decides(script, name):
    """Between neighbours of which one is the nearest, whichever it is."""
    x = sample(2)[:200]
    nearest = getattr(elementary, name)(x)
    for one, y in zip(x, nearest, strict=True):
        inward = np.nextafter(y, F(0))
        assert script.decided(name, one, inward) == y
        if abs(y) < 1 or name == "exp":
            assert script.decided(name, one, y) == y


def test_rational_arithmetic_decides_at_the_ends(script):
    assert script.decided("exp", F(88.72283), FLT_MAX) == FLT_MAX
    assert script.decided("exp", F(88.72284), FLT_MAX) == np.inf
    assert script.decided("exp", F(-103.97208), F(0)) == F(2.0**-149)
    assert script.decided("exp", F(-103.97209), F(0)) == 0
    with pytest.raises(ArithmeticError, match=r"exp\(.*0\.0.*\) is too close to 1\.0"):
        script.is_above("exp", F(0), Fraction(1))


@pytest.mark.parametrize("x", [F(0.0), F(-0.0), F(np.inf), F(-np.inf), F(np.nan)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_are_compared_too(script, name, x):
    """A function that is wrong there alone differs in one value."""
    right = script.OURS[name][0]

    def wrong(values):
        same = values.view(np.uint32) == np.array(x).view(np.uint32)
        return np.where(same, F(0.5), right(values)).astype(F)

    values = np.array([1, x, 2], F)
    assert script.compare(name, values) == ({"differences": 0, "decided": 0}, None)
    script_ours = {**script.OURS, name: (wrong, script.OURS[name][1])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "OURS", script_ours)
        assert script.compare(name, values)[0]["differences"] == 1
