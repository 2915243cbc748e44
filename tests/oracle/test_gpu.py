"""What an H100 wrote is judged as it should be: CUDA's own exp, tanh and multiply-adds, and torch's kernels.

`h100.npz` holds every 32nd row of a dump of `gpu_dump.py` (which kernels, and how to make one). All of it was judged
when it was made: `tests/benchmarks/results/oracle_h100.json`.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from refops import oracle

DUMP = np.load(Path(__file__).parent / "h100.npz", allow_pickle=False)
CASES = {case["name"]: case for case in json.loads(DUMP["manifest"].tobytes())["cases"]}
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
#: torch's formula multiplies in another order than TE's: right from this ulp on, in these rows.
OTHER_ORDER = {"torch dsilu float32": 3}
#: torch squares x, which overflows at 1.8e19: its NaN is not TE's.
OVERFLOWS = "torch dgelu tanh bfloat16"


def judge(name, **options):
    case = CASES[name]
    arrays = [
        {k: DUMP[key].view(DTYPES[dtype]) for k, (key, dtype) in case[group].items()} for group in ("inputs", "outputs")
    ]
    return oracle.check(case["op"], *arrays, **options)


RIGHT = [name for name, case in CASES.items() if case["expected"].startswith("right") and name != OVERFLOWS]


@pytest.mark.parametrize("name", RIGHT)
def test_kernels_of_tes_formula_are_right(name):
    assert judge(name, ulp=OTHER_ORDER.get(name, 2), diagnose=False).ok


@pytest.mark.parametrize("name", OTHER_ORDER)
def test_another_order_of_products_needs_more(name):
    assert not judge(name, ulp=2, diagnose=False).ok


def test_an_overflow_that_te_does_not_have_is_found():
    report = judge(OVERFLOWS, diagnose=False)
    assert report.arrays[0].wrong == 136
    assert all(m.inputs["x"] > 1.8e19 and m.got.startswith("nan") for m in report.mismatches)


def test_the_permitted_error_is_used():
    """CUDA's expf and tanhf are off by up to 1.75 ulp: half an ulp would reject the card in 30 of the cases."""
    assert len([name for name in RIGHT if not judge(name, ulp=0.5, diagnose=False).ok]) == 30


@pytest.mark.parametrize("name", [name for name in CASES if "erf" in name])
def test_another_gelu_is_named(name):
    report = judge(name)
    assert not report.ok and report.diagnosis[0].names == ("erf-gelu",)
