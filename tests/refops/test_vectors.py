"""refops against arrays that other implementations produced: bit for bit, divergences asserted by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rule_calls
from vector_parts import PARTS, compare_everything

import refops
from refops import conformance
from refops.conformance import compare_vectors
from refops.quantization import hadamard, quantize
from refops.scalings import arithmetic

pytestmark = pytest.mark.check

VECTORS = Path(__file__).resolve().parent.parent / "vectors"
FILES = sorted(VECTORS.glob("*.npz"))

ZERO_SIGN = "TE's Python reference encodes -0 and NaN as 0"
OCP_NAN = "torchao makes the scale of a block with NaN or inf NaN (0xFF)"
#: The documented divergences of each file's author: exactly these appear, no others.
DIVERGENCES = {
    "cast_e2m1__bf16__te_py": {ZERO_SIGN},
    "cast_e2m1__fp16__te_py": {ZERO_SIGN},
    "cast_e2m1__fp32__te_py": {ZERO_SIGN},
    "cast_e8m0__fp32__te_cpp_cuda_hdr": {"torch rounds 2^-127 < x < 1.5 * 2^-127 up, not to nearest"},
    "dequant_mxfp8__e4m3__torchao": set(),
    "fp8_current__bf16__te_py": {"TE's Python reference caps an overflowing scale at the input dtype's maximum"},
    "fp8_delayed_update__fp32__te_py": {
        "TE's Python path multiplies by 1 / amax and keeps the scale while a NaN is in the history"
    },
    "mxfp8_ocp__e4m3__bf16__torchao_src": {OCP_NAN},
    "mxfp8_ocp__e4m3__fp32__torchao_src": {OCP_NAN},
    "mxfp8_ocp__e5m2__bf16__torchao_src": {OCP_NAN},
    "mxfp8_ocp__e5m2__fp32__torchao_src": {OCP_NAN},
    "nvfp4__bf16__te_py": {ZERO_SIGN},
    "nvfp4__fp16__te_py": {ZERO_SIGN},
    "nvfp4__fp32__te_py": {ZERO_SIGN},
    "nvfp4_rht__bf16__te_py": {ZERO_SIGN},
    "nvfp4_rht__fp16__te_py": {ZERO_SIGN},
    "act_unary__torch_f64__te_cpp": {"the host's tanhf is up to one ulp from the nearest float32"},
    "nvfp4_rht__fp32__te_py": {ZERO_SIGN, "the reference rounds partial sums to float32"},
    **{
        f"nvfp4_other__{dtype}__torchao_modelopt": {
            "torchao's one-level mode has no global scale",
            "torchao clamps block scales to >= 2^-6",
            "modelopt divides by the scale and gives zero blocks scale 1",
        }
        for dtype in ("bf16", "fp16", "fp32")
    },
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_vectors(path):
    comparisons = compare_everything(path)
    assert comparisons and all(c.elements for c in comparisons)
    assert [c for c in comparisons if not c.ok] == []
    assert {c.divergence for c in comparisons if c.divergence} == DIVERGENCES.get(path.stem, set())


def test_every_kind_of_vector_is_there():
    """53 files: a missing one would pass unseen above."""
    assert len(FILES) == 53
    assert {conformance.Vectors(path).kind for path in FILES} == {*conformance.COMPARISONS, *PARTS}
    assert set(PARTS) - set(conformance.COMPARISONS) == set(conformance.OF_PARTS)


def test_total_of_compared_elements():
    """The README's numbers: of everything, and of what the report compares."""
    comparisons = [c for path in FILES for c in compare_everything(path)]
    assert sum(c.elements for c in comparisons) == 5_786_225
    assert sum(c.differing for c in comparisons) == sum(c.explained for c in comparisons)
    assert sum(c.elements for c in compare_vectors(VECTORS)) == 5_609_130


def test_directory_without_vectors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"directory must hold vector files \(\*\.npz\); got"):
        compare_vectors(tmp_path)


def test_block_scale_multiplies_by_one_sixth_of_the_global_scale():
    """TE rounds S_enc / 6 first. No vector tells that order from (amax / 6) * S_enc, so here is a case that does.

    amax 3 gives S_enc = 896 and float32(896 * float32(1/6)) = 149.33334; times 2.25 that is 336.00003, above the tie
    between 320 and 352. (2.25 / 6) * 896 is 336 exactly and would fall to the even code of 320.
    """
    rule = rule_calls.nvfp4()
    s_enc, _ = both = rule.tensor(np.array([3], np.float32))
    assert s_enc == 896
    assert rule.byte(np.array([2.25], np.float32), both) == refops.encode(np.float32(352), refops.E4M3)


def _one_code_off(function):
    def faulty(*args, **kwargs):
        codes = function(*args, **kwargs).copy()
        codes.flat[codes.size // 2] ^= 1
        return codes

    return faulty


#: A fault put into the code, and a file that must notice it.
FAULTS = {
    "fp8_scale_inverted": (
        refops.CurrentScaling,
        "block_scale",
        lambda f: lambda self, words: lambda *a: f(self, words)(*a)[::-1],
        "fp8_scale_from_amax__te_cuda_src",
    ),
    "block_scale_overflow_as_per_tensor": (
        refops.BlockScaling,
        "numbers",
        lambda f: lambda self, dtype: f(self, np.dtype(np.float32)),
        "fp8_block__aligned__bf16__te_py",
    ),
    "mx_scale_rounds_down": (
        refops.MXFP8Scaling,
        "scale_code",
        lambda f: lambda self, words: f(replace(self, scale_rounding="floor"), words),
        "mxfp8_rceil__e4m3__bf16__te_cpp",
    ),
    "one_mx_code_off": (quantize, "encode_tile", _one_code_off, "mxfp8_rceil__e5m2__fp32__te_cpp"),
    "nvfp4_scale_truncated": (
        arithmetic,
        "encode_tile",
        lambda f: lambda x, fmt, **k: f(x, fmt, rounding="toward_zero"),
        "nvfp4_scales__te_cuda_src",
    ),
    "nvfp4_multiplier_misses_global_scale": (
        refops.NVFP4Scaling,
        "multiplier",
        lambda f: lambda self, words: lambda code, tensor_scale: f(self, words)(code, (np.float32(1), np.float32(1))),
        "nvfp4__fp32__te_py",
    ),
    "hadamard_signs_ignored": (
        hadamard,
        "transform_groups",
        lambda f: lambda g, mask, *a, **k: f(g, 0, *a, **k),
        "nvfp4_rht__bf16__te_py",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_vectors_notice_a_fault(name, monkeypatch):
    module, attribute, make_faulty, file = FAULTS[name]
    monkeypatch.setattr(module, attribute, make_faulty(getattr(module, attribute)))
    assert not all(c.ok for c in compare_everything(VECTORS / f"{file}.npz"))
