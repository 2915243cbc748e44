"""refops against arrays that other implementations produced: bit for bit, divergences asserted by name."""

from pathlib import Path

import numpy as np
import pytest

import refops
from refops import conformance
from refops.conformance import compare_file, compare_vectors
from refops.quantization import block, blocks, mxfp8, nvfp4, per_tensor

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
    comparisons = compare_file(path)
    assert comparisons and all(c.elements for c in comparisons)
    assert [c for c in comparisons if not c.ok] == []
    assert {c.divergence for c in comparisons if c.divergence} == DIVERGENCES.get(path.stem, set())


def test_every_kind_of_vector_is_there():
    """53 files: a missing one would pass unseen above."""
    assert len(FILES) == 53
    assert {conformance.Vectors(path).meta["op"] for path in FILES} == set(conformance.COMPARISONS)


def test_total_of_compared_elements():
    """The README's number."""
    comparisons = compare_vectors(VECTORS)
    assert sum(c.elements for c in comparisons) == 5_777_009
    assert sum(c.differing for c in comparisons) == sum(c.explained for c in comparisons)


def test_directory_without_vectors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"directory must hold vector files \(\*\.npz\); got"):
        compare_vectors(tmp_path)


def test_block_scale_multiplies_by_one_sixth_of_the_global_scale():
    """TE rounds S_enc / 6 first. No vector tells that order from (amax / 6) * S_enc, so here is a case that does.

    amax 3 gives S_enc = 896 and float32(896 * float32(1/6)) = 149.33334; times 2.25 that is 336.00003, above the tie
    between 320 and 352. (2.25 / 6) * 896 is 336 exactly and would fall to the even code of 320.
    """
    s_enc = nvfp4.global_encode_scale(np.array([3], np.float32))
    assert s_enc == 896
    assert nvfp4.block_scale_byte(np.array([2.25], np.float32), s_enc) == refops.encode(np.float32(352), nvfp4.E4M3)


def _one_code_off(function):
    def faulty(*args, **kwargs):
        codes = function(*args, **kwargs).copy()
        codes.flat[codes.size // 2] ^= 1
        return codes

    return faulty


#: A fault put into the code, and a file that must notice it.
FAULTS = {
    "fp8_scale_inverted": (
        per_tensor,
        "scale_from_amax",
        lambda f: lambda *a, **k: np.float32(1) / f(*a, **k),
        "fp8_scale_from_amax__te_cuda_src",
    ),
    "block_scale_overflow_as_per_tensor": (
        block,
        "LARGEST_SCALE",
        lambda t: dict.fromkeys(t, per_tensor.FLT_MAX),
        "fp8_block__aligned__bf16__te_py",
    ),
    "mx_scale_rounds_down": (
        mxfp8,
        "scale_byte",
        lambda f: lambda a, fmt, rule: f(a, fmt, "floor"),
        "mxfp8_rceil__e4m3__bf16__te_cpp",
    ),
    "one_mx_code_off": (blocks, "encode_tile", _one_code_off, "mxfp8_rceil__e5m2__fp32__te_cpp"),
    "nvfp4_scale_truncated": (
        nvfp4,
        "encode_tile",
        lambda f: lambda x, fmt, **k: f(x, fmt, **k) if fmt is nvfp4.E2M1 else f(x, fmt, rounding="toward_zero"),
        "nvfp4_scales__te_cuda_src",
    ),
    "nvfp4_multiplier_misses_global_scale": (
        nvfp4,
        "encode_multiplier",
        lambda f: lambda scales, s_enc: f(scales, np.ones_like(s_enc)),
        "nvfp4__fp32__te_py",
    ),
    "hadamard_signs_ignored": (
        nvfp4,
        "transform_groups",
        lambda f: lambda g, mask, *a, **k: f(g, 0, *a, **k),
        "nvfp4_rht__bf16__te_py",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_vectors_notice_a_fault(name, monkeypatch):
    module, attribute, make_faulty, file = FAULTS[name]
    monkeypatch.setattr(module, attribute, make_faulty(getattr(module, attribute)))
    assert not all(c.ok for c in compare_file(VECTORS / f"{file}.npz"))
