"""refops against arrays that other implementations produced: bit for bit, divergences asserted by name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rule_calls
from vector_parts import PARTS, compare_everything

import refops
from refops import conformance
from refops.conformance import compare_file, compare_vectors
from refops.elementary import tanh
from refops.quantization import hadamard, quantize
from refops.scalings import arithmetic

pytestmark = pytest.mark.check

F = np.float32
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
    "act_unary__torch_f64__te_cpp": {"the host's tanhf is up to two float32 from the nearest"},
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


# --- what explains a difference, on arrays made here ------------------------------------------------------------------


def vector_file(path, op, arrays, **meta):
    """Write arrays as a vector file of the kind `op`; return its path."""
    meta = {"op": op, "peer": {"name": "made here", "version": "1"}, **meta}
    np.savez(path, meta_json=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
    return path


#: A column whose transform under these signs has elements beside ties of float16.
BESIDE_A_TIE = np.float16(
    [
        [2.716796875, -0.2113037109375, -6.7890625, -0.0013418197631835938],
        [-1.0087890625, 6.25, -4.41796875, -1.6982421875],
        [-5.25, -2.365234375, 0.9892578125, 1.068359375],
        [-6.0625, 3.013671875, -1.15625, -8.1015625],
    ]
).ravel()
SIGNS = np.array([1, -1, -1, 1, 1, 1, -1, 1, -1, 1, 1, -1, -1, -1, 1, -1], np.int8)


def transforms_beside_a_tie():
    """x, its transform as a float32 sum from the first row to the last, and in float64; both rounded to float16."""
    matrix = refops.hadamard_transform(np.eye(16, dtype=F), 0) * SIGNS[:, None].astype(F)
    total = np.zeros(16, F)
    for value, row in zip(BESIDE_A_TIE.astype(F), matrix, strict=True):
        total += value * row
    exact = (BESIDE_A_TIE.astype(np.float64) @ matrix.astype(np.float64)).astype(np.float16)
    return BESIDE_A_TIE[:, None].repeat(16, axis=1), total.astype(np.float16), exact


def compare_transform(path, x, theirs):
    """The comparison of a transform, `theirs` for every column; all that is quantized from it must agree."""
    theirs = np.tile(theirs, (16, 1))
    arrays = {"te_signs": SIGNS, "custom_signs": SIGNS}
    arrays |= {"x_bits": x.view(np.uint16), "v_rht_bits": theirs.view(np.uint16)}
    for values, suffix, direction in ((x, "", "row"), (theirs, "_t", "col")):
        q = refops.quantize(values, refops.NVFP4Scaling())
        arrays |= {f"v_q{suffix}": q.rowwise_data, f"v_scale{suffix}": q.rowwise_scale_inv[:16, :1]}
        arrays[f"v_amax_{direction}_bits"] = q.amax_rowwise.view(np.uint32)
    variant = {"id": "v", "input": "x_bits", "signs": "custom_signs", "exact": False}
    path = vector_file(path / "rht.npz", "nvfp4_rht", arrays, input={"dtype": "fp16"}, variants=[variant])
    transform, *quantized = compare_file(path)
    assert transform.subject.endswith("transform") and all(c.ok for c in quantized)
    return transform


def test_a_float32_sum_on_the_other_side_of_a_tie_is_explained(tmp_path):
    """It differs from the reference by a float16 step, much more than a float32 sum errs: a rounding lies between.

    Element 0 is 7.619140863418579, the tie 7.619140625; theirs is 7.6171875, the reference 7.62109375.
    """
    x, theirs, exact = transforms_beside_a_tie()
    assert (np.abs(theirs.astype(F) - exact) > 15 * 2.0**-24 * np.abs(BESIDE_A_TIE.astype(F)).sum() / 4)[[0, 8]].all()
    found = compare_transform(tmp_path, x, theirs)
    assert found.differing == found.explained == 16 * np.count_nonzero(theirs != exact) == 32


@pytest.mark.parametrize("beyond", ["theirs", "ours", "where there is no tie"])
def test_a_step_further_is_not_explained(beyond, tmp_path):
    x, theirs, exact = transforms_beside_a_tie()
    at = 1 if beyond == "where there is no tie" else 0
    near, far = (exact, theirs) if beyond == "theirs" else (theirs, exact)
    for away in [far[at] - near[at]] if at == 0 else [-1, 1]:
        wrong = theirs.copy()
        wrong[at] = np.nextafter(far[at], np.float16(np.copysign(np.inf, away)))
        found = compare_transform(tmp_path, x, wrong)
        assert found.differing - found.explained == 16


def te_gelu(x, moved):
    """gelu and dgelu in float32 as TE writes them; `moved` changes each tanh."""
    t = moved(tanh(x * (F(0.79788456) + (F(0.03567741) * x) * x)))
    value = x * (F(0.5) + F(0.5) * t)
    t = moved(tanh((F(0.79788456) * x) * (F(1) + (F(0.044715) * x) * x)))
    slope = (F(0.5) * x) * ((F(1) - t * t) * (F(0.79788456) + (F(0.1070322243) * x) * x)) + F(0.5) * (F(1) + t)
    return {"gelu": value, "dgelu": slope}


def compare_gelu(path, x, theirs):
    """subject -> comparison, of gelu and dgelu."""
    arrays = {"x": x}
    for name in ("gelu", "qgelu", "relu", "srelu", "silu"):
        ours = {name: refops.activation(name, x), f"d{name}": refops.activation_grad(name, np.ones_like(x), x)}
        arrays |= {f"te_f32_{which}": (ours | theirs)[which].view(np.uint32) for which in ours}
    found = compare_file(vector_file(path / "unary.npz", "act_unary", arrays, input={}))
    return {c.subject.split()[0]: c for c in found if "gelu" in c.subject and "qgelu" not in c.subject}


def moved(steps):
    """A function that moves each tanh by so many float32, toward 1 or (below 0) -1."""

    def move(t):
        for _ in range(abs(steps)):
            t = np.nextafter(t, F(np.sign(steps)))
        return t

    return move


@pytest.mark.parametrize("steps", [0, -1, 1, -2, 2])
def test_gelu_of_another_tanh_is_explained(steps, tmp_path):
    """Each rounding after the tanh included: beside a tie the last one moves dgelu by a whole step."""
    x = (np.random.default_rng(3).standard_normal(20_000) * 2).astype(F)
    for found in compare_gelu(tmp_path, x, te_gelu(x, moved(steps))).values():
        assert found.differing == found.explained
        assert (found.differing > 1000) == (steps != 0)


@pytest.mark.parametrize("steps", [-3, 3])
def test_gelu_that_no_such_tanh_gives_is_not_explained(steps, tmp_path):
    """The tanh a float32 further off; what it gives is often another's result as well."""
    x = (np.random.default_rng(3).standard_normal(20_000) * 2).astype(F)
    theirs, permitted = te_gelu(x, moved(steps)), [te_gelu(x, moved(k)) for k in (-2, -1, 0, 1, 2)]
    for name, found in compare_gelu(tmp_path, x, theirs).items():
        unexplained = np.all([theirs[name] != y[name] for y in permitted], axis=0)
        assert found.differing - found.explained == np.count_nonzero(unexplained) > 1000


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
