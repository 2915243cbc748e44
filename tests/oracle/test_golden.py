"""Golden files: the same bytes everywhere, written whole or not at all, verified when read, and right."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import refops
from declared_scalings import Squares64
from refops import oracle
from refops.files import FileError
from refops.formats import encode, unpack_fp4
from refops.golden import (
    INPUT_KINDS,
    GoldenWriter,
    Recipe,
    build_golden,
    golden_bytes,
    golden_matrix,
    header,
    read_golden,
    storage,
    write_golden,
)
from refops.golden.inputs import make_amaxes, make_row_scales, make_tensor
from refops.golden.matrix import scaling_label
from refops.oracle.operation import OPERATIONS
from refops.survey import SCALINGS, cast_source
from tiers import sampled

ROOT = Path(refops.__file__).parent.parent
F = np.float32
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
#: One file of each kind that another machine would notice first: transcendental functions, random bits, float64 in the
#: Hadamard transform, sums. SHA-256 with refops' version taken for "0", of layout 2 and of layout 1.
COMMITTED = [
    (
        Recipe("dswiglu", "mxfp8", (34, 128), "bfloat16", 3),
        "d95b711729285aed086fbb4328b3b264e605182fd7590085724d15dc8d5b2c4a",
        "c54a90c88542bb9ccd346b99a8759955ab66098da93ff34fc272f2898b0b03ae",
    ),
    (
        Recipe("situglu", "current", (7, 66), "float32", 1 << 63, "extreme"),
        "8913717c965846233e869f8c3328f8f0418778ad0d0f3c97fc8a7ec864adb65b",
        "ead68defe64e64107ffdb668175a6ea82b20ac8c8f5d19a4ace221f29e1f1509",
    ),
    (
        Recipe("quantize", "nvfp4-rht", (32, 48), "float16", 1),
        "147dcf4b17d35053f26cf27a49c14a1be06da13e5c4ef1dcd87caafa60e338c1",
        "02f9b5267e7a5076ed14336d28ef2734e3e56e2fd3b6f1a6d162efa6f03a32a5",
    ),
    (
        Recipe("quantize", "nvfp4-stochastic", (16, 32), "bfloat16", 2, "special"),
        "765627ee540b2d46a2c8f1d74bc1da525209729edd8ebe1a77107ddb5d490896",
        "67e57d78222074ee4a6e4a15c6bbdb915cb320d02dc3e6b25f2dc694817f8138",
    ),
]
#: The matrix by file name; a sample of it stands for all in the slower tests.
MATRIX = {recipe.file_name: recipe for recipe in golden_matrix()}
SAMPLE = sorted(MATRIX)[::53]


@cache
def golden_of(name):
    """The file of that name, built once for the tests that read it."""
    return build_golden(MATRIX[name])


class Derived(refops.MXFP8Scaling):
    """A scaling that no file declares."""


def contents(directory):
    """Relative path -> bytes of everything in a directory."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in Path(directory).rglob("*") if p.is_file()}


# --- the same bytes everywhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "expected", "older"), COMMITTED, ids=[one[0].file_name for one in COMMITTED])
def test_bytes_are_those_of_other_machines(recipe, expected, older, monkeypatch):
    monkeypatch.setattr(refops, "__version__", "0")
    golden = build_golden(recipe)
    assert sha256(golden_bytes(golden)).hexdigest() == expected
    assert sha256(golden_bytes(in_layout_1(golden))).hexdigest() == older


def in_layout_1(golden):
    """The same file as an earlier version of refops wrote it."""
    head = header.as_layout(golden.header, 1)
    return replace(golden, header=head | {"digest": header.digest(head, golden.arrays)})


@pytest.mark.parametrize(("op", "columnwise"), [("swiglu", False), ("dequantize", True)])
def test_files_of_layout_1_are_read_and_compared(tmp_path, op, columnwise):
    old = in_layout_1(build_golden(Recipe(op, "mxfp8", (8, 64), columnwise=columnwise)))
    assert old.header["columnwise"] is columnwise and "copies" not in old.header
    path = tmp_path / "old.safetensors"
    path.write_bytes(golden_bytes(old))
    assert read_golden(path).header == old.header and read_golden(path).stale_outputs() == []

    def change(head, arrays):
        next(iter(arrays.values())).view(np.uint8).reshape(-1)[0] ^= 1

    said = damaged(path, change, tmp_path)
    assert "first at byte 0" in said and "header" not in said
    assert damaged(path, lambda head, arrays: head.update(seed="0"), tmp_path).startswith("its header is not what")


@pytest.mark.parametrize(
    ("recipe", "copies"),
    [
        (Recipe("swiglu", "mxfp8", (8, 64)), ["rowwise", "columnwise"]),
        (Recipe("quantize", "nvfp4-row-scaled", (16, 48)), ["rowwise"]),
        (Recipe("dequantize", "mxfp8", (8, 64)), ["rowwise"]),
        (Recipe("dequantize", "mxfp8", (8, 64), columnwise=True), ["columnwise"]),
        (Recipe("dgelu", None, (8, 64)), []),
    ],
)
def test_a_header_says_which_copies_the_file_holds(recipe, copies):
    golden = build_golden(recipe)
    assert golden.header["copies"] == copies
    held = {name.split(".")[1].split("_")[0] for name in golden.arrays if name.endswith("wise_data")}
    assert held == set(copies)


@pytest.mark.parametrize("every", [12, pytest.param(4, marks=pytest.mark.full)])
def test_bytes_do_not_depend_on_the_processor_or_on_hashing(every):
    """In a process of its own, without the vector instructions that NumPy found here, and with another hash seed."""
    umath = np._core._multiarray_umath
    features = [f for f in umath.__cpu_dispatch__ if umath.__cpu_features__[f]]
    if not features:
        pytest.skip("NumPy found no vector instructions here beyond the ones it always uses")
    code = (
        "from hashlib import sha256; from refops.golden import *\n"
        "import numpy as np\n"
        f"assert not any(np._core._multiarray_umath.__cpu_features__[f] for f in {features})\n"
        "matrix = {r.file_name: r for r in golden_matrix()}\n"
        f"for name in {SAMPLE[::every]}: print(sha256(golden_bytes(build_golden(matrix[name]))).hexdigest())"
    )
    environment = {"NPY_DISABLE_CPU_FEATURES": " ".join(features), "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    here = [sha256(golden_bytes(build_golden(MATRIX[name]))).hexdigest() for name in SAMPLE[::every]]
    assert done.stdout.split() == here


def test_every_argument_changes_the_bytes_and_the_name():
    base = Recipe("dclamped_swiglu", "mxfp8", (32, 128), "bfloat16", 0)
    others = [
        replace(base, op="dswiglu"),
        replace(base, scaling="mxfp8-e5m2"),
        replace(base, scaling=refops.MXFP8Scaling(refops.E4M3, two_d=True)),
        replace(base, shape=(128, 128)),
        replace(base, shape=(2, 16, 128)),
        replace(base, dtype="float16"),
        replace(base, seed=1),
        replace(base, inputs="extreme"),
        replace(base, params={"limit": 1.0}),
    ]
    everything = [base, *others]
    assert len({recipe.file_name for recipe in everything}) == len(everything)
    assert len({golden_bytes(build_golden(recipe)) for recipe in everything}) == len(everything)


def test_committed_names():
    """Names are part of the contract: scripts hold them."""
    scaling = refops.MXFP8Scaling(refops.E5M2, two_d=True)
    params = {"limit": 2.5, "alpha": 1.0}
    recipe = Recipe("clamped_swiglu", scaling, (2, 3, 64), "float16", 5, "special", params)
    assert recipe.file_name == (
        "clamped_swiglu__mxfp8-e5m2+two_d=True__alpha=1.0__limit=2.5__float16__2x3x64__special__seed5.safetensors"
    )
    assert Recipe("dequantize", "current", (4, 8)).file_name == (
        "dequantize__current__rowwise__bfloat16__4x8__mixed__seed0.safetensors"
    )
    assert [scaling_label(row.scaling) for row in SCALINGS.values()] == list(SCALINGS)
    assert scaling_label(Squares64()) == "Squares64+power_2_scale=False", "a class without a row"


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLE[::3])
def test_file_is_what_the_safetensors_library_reads(name, tmp_path):
    golden = golden_of(name)
    path = tmp_path / name
    path.write_bytes(golden_bytes(golden))
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(golden.arrays)
        for key, array in golden.arrays.items():
            read = file.get_tensor(key)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert read.tobytes() == array.tobytes()
        header = json.loads(file.metadata()["refops"])
    assert header == golden.header
    assert set(header["arrays"]) == set(golden.arrays)


def test_arrays_are_aligned_and_listed_in_one_order():
    data = golden_bytes(build_golden(Recipe("dswiglu", "nvfp4-1x16", (16, 64), "float16")))
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    entries = json.loads(data[8 : 8 + length])
    del entries["__metadata__"]
    sizes = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
    end = 0
    for entry in entries.values():
        start, stop = entry["data_offsets"]
        assert start == end and start % sizes[entry["dtype"]] == 0
        assert stop - start == sizes[entry["dtype"]] * np.prod(entry["shape"])
        end = stop
    assert len(data) == 8 + length + end


@sampled("name", SAMPLE, 3)
def test_read_gives_what_was_built(name, tmp_path):
    recipe, built = MATRIX[name], golden_of(name)
    path = tmp_path / name
    path.write_bytes(golden_bytes(built))
    golden = read_golden(path)
    assert golden.header == built.header
    assert (golden.op, golden.scaling, golden.params) == (recipe.op, recipe.scaling, recipe.params)
    assert golden.arrays.keys() == built.arrays.keys()
    assert all(golden.arrays[key].tobytes() == array.tobytes() for key, array in built.arrays.items())
    assert golden.stale_outputs() == []


def test_settings_survive_the_header():
    """Every field, also at other values than the tables'."""
    for scaling in (
        refops.DelayedScaling(refops.E5M2, 0.1),
        refops.CurrentScaling(refops.E4M3, power_2_scale=True, amax_epsilon=1e-3),
        refops.BlockScaling(refops.E5M2, 1, power_2_scale=False, amax_epsilon=0.5),
        refops.MXFP8Scaling(refops.E2M3, two_d=True, scale_rounding="ceil_ocp"),
        refops.NVFP4Scaling(stochastic_rounding=True, seed=(1 << 64) - 1, offset=3),
        refops.NVFP4Scaling(rht=True, sign_mask=0x1234),
        refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True),
    ):
        golden = build_golden(Recipe("quantize", scaling, (32, 32)))
        header = json.loads(json.dumps(golden.header))
        assert replace(golden, header=header).scaling == scaling


@dataclass(frozen=True)
class OfFormats(refops.NVFP4Scaling):
    """Formats in a field without a default, and in one that may be None."""

    scale_format: refops.FloatFormat = field(kw_only=True)
    other: refops.FloatFormat | None = None


@pytest.mark.parametrize("other", [None, refops.E5M2])
def test_a_field_of_any_name_that_holds_a_format_survives_the_header(other, monkeypatch):
    monkeypatch.setattr(header, "SCALINGS", (OfFormats,))
    scaling = OfFormats(scale_format=refops.UE5M3, other=other)
    described = json.loads(json.dumps(header.settings_as_dict(scaling)))
    assert header.settings_from_dict(described) == scaling


def test_infinite_parameters_survive_the_header(tmp_path):
    path = write_golden(tmp_path, "clamped_swiglu", shape=(4, 16), params={"limit": float("inf")})
    assert read_golden(path).params == {"limit": float("inf")}


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_inputs_are_of_every_class(dtype):
    mixed, rounding, extreme, special, tiny = (make_tensor(kind, (14, 160), dtype, seed=5) for kind in INPUT_KINDS)
    assert rounding.tobytes() == mixed.tobytes()  # another one is the largest result of an activation
    values = mixed.astype(F)
    assert np.isfinite(values).all() and (values == 0).any() and (np.signbit(values) & (values == 0)).any()
    assert 30 < np.abs(values).max() <= 256
    bell = values[0::5]
    assert abs(bell.mean()) < 0.3 and 1.3 < bell.std() < 2.0
    # ties: exactly between two E4M3 values, two E5M2 values, two E2M1 values
    for fmt, rows in ((refops.E4M3, values[2::5]), (refops.E5M2, values[2::5]), (refops.E2M1, values[3::5])):
        middle = (fmt.grid[1:] + fmt.grid[:-1]) / 2
        assert np.isin(np.abs(rows), middle).mean() > 0.2
    info = ml_dtypes.finfo(dtype)
    magnitudes = np.abs(extreme.astype(np.float64))
    assert np.isfinite(magnitudes).all() and magnitudes.max() == float(info.max)
    assert ((magnitudes > 0) & (magnitudes < float(info.smallest_normal))).any()
    assert (magnitudes == 0).all(axis=1).sum() == 4  # two rows of 0, two of -0
    values = special.astype(F)
    assert np.isnan(values).all(axis=1).any() and np.isinf(values).all(axis=1).any()
    assert {np.inf, -np.inf} <= set(values[np.isinf(values)])
    assert len(np.unique(special.view(f"u{dtype.itemsize}")[np.isnan(values)])) == 1
    magnitudes = np.abs(tiny.astype(np.float64))
    assert 0 < magnitudes.max() < 16 * float(info.smallest_normal)
    assert ((magnitudes > 0) & (magnitudes < float(info.smallest_normal))).mean() > 0.1


def test_inputs_depend_on_seed_stream_and_position_alone():
    a = make_tensor("mixed", (10, 64), F, seed=1)
    assert (a == make_tensor("mixed", (2, 5, 64), F, seed=1).reshape(10, 64)).all()
    assert (a != make_tensor("mixed", (10, 64), F, seed=2)).mean() > 0.5
    assert (a != make_tensor("mixed", (10, 64), F, seed=1, stream=1)).mean() > 0.5
    assert make_tensor("mixed", (0, 64), F, seed=1).shape == (0, 64)


def test_row_scales_and_amaxes():
    scales = make_row_scales(200, seed=0, stream=2)
    assert scales.dtype == F and {0, 1} <= set(scales) and (scales >= 0).all() and (scales <= 1).all()
    assert len(np.unique(scales)) > 100
    for kind in INPUT_KINDS:
        amaxes = make_amaxes(kind, (64, 8), seed=0, stream=0)
        assert amaxes.dtype == F and not (amaxes < 0).any() and (amaxes == 0).any()
        assert np.isinf(amaxes).any() == np.isnan(amaxes).any() == (kind == "special")


# --- what it holds is right -------------------------------------------------------------------------------------------


def by_element(golden, name, columnwise, shape):
    """An intermediate array of scales as one value an element of the (M, K) tensor."""
    layout, array = golden.scaling.layout, golden.intermediates[name]
    if layout.block is None:
        return np.broadcast_to(array, shape)
    outer, inner = layout.oriented(shape, columnwise)
    spread = layout.scales_by_outer(array, columnwise).repeat(layout.run[0], 0).repeat(layout.run[1], 1)[:outer, :inner]
    return spread.T if columnwise else spread


@sampled(("op", "scaling"), product(["quantize", "dgelu", "swiglu"], SCALINGS), 2, in_all=1)
def test_intermediates_are_the_steps_from_input_to_output(op, scaling):
    """block amax from the values; codes = cast(value * encode scale); the decode scale is that of the amax."""
    named = SCALINGS[scaling]
    golden = build_golden(Recipe(op, scaling, (160, 192 * (1 + (op == "swiglu"))), "bfloat16", 11))
    x = golden.inputs["x"]
    if op == "quantize":
        values = x.astype(F)
    elif op == "swiglu":
        values = refops.activation("swiglu", x, out_dtype=F)
    else:
        values = refops.activation_grad("gelu", golden.inputs["dy"], x, out_dtype=F)
    unrounded = values
    layout = named.scaling.layout
    if named.scaling.path.casts_rounded:
        values = values.astype(ml_dtypes.bfloat16).astype(F)
    fmt = named.scaling.fmt
    for direction in ("rowwise", "columnwise"):
        columnwise = direction == "columnwise"
        cast = values
        if columnwise and named.scaling.hadamard is not None:
            q = refops.quantize(values.astype(ml_dtypes.bfloat16), named.scaling, rowwise=False, columnwise=True)
            source = cast_source(values.astype(ml_dtypes.bfloat16), q)
            cast = source.read(slice(0, values.shape[0]), slice(0, values.shape[1]))
        with np.errstate(all="ignore"):
            scaled = cast * by_element(golden, f"{direction}_encode_scale", columnwise, values.shape)
        codes = golden.outputs[f"{direction}_data"]
        if layout.packed == 2:
            codes = unpack_fp4(codes)
        if layout.data_transposed(columnwise):
            codes = codes.T
        options = {}
        if named.scaling.random is not None:
            bits = golden.intermediates[f"{direction}_random_bits"]
            options = {"rounding": "stochastic", "random_bits": np.ascontiguousarray(bits.T if columnwise else bits)}
        assert (encode(scaled, fmt, **options) == codes).all()
        if f"{direction}_block_amax" in golden.intermediates:
            amax = by_element(golden, f"{direction}_block_amax", columnwise, values.shape)
            height, width = layout.oriented(layout.block, columnwise)
            for i in range(0, values.shape[0], height):
                for j in range(0, values.shape[1], max(width, 64)):
                    block = cast[i : i + height, j : j + width]
                    assert amax[i, j] == np.abs(block).max()
        if f"amax_{direction}" in golden.outputs and not layout.two_level:
            assert golden.outputs[f"amax_{direction}"][0] == np.abs(unrounded).max()


@sampled("name", SAMPLE, 3)
def test_oracle_finds_golden_outputs_right_and_changed_ones_wrong(name):
    golden = golden_of(name)
    options = {"scaling": golden.scaling, "params": golden.params, "diagnose": False}
    for ulp in (2, 0):
        report = oracle.check(golden.op, golden.inputs, golden.outputs, ulp=ulp, **options)
        assert report.ok, f"{report}"
    for output, array in golden.outputs.items():
        changed = array.copy()
        changed.view(np.uint8).reshape(-1)[0] ^= 1
        report = oracle.check(golden.op, golden.inputs, {output: changed}, ulp=0, **options)
        assert not report.ok and report.arrays[0].wrong == 1


def test_a_reference_that_changed_is_noticed():
    golden = build_golden(Recipe("swiglu", "mxfp8", (32, 128)))
    golden.arrays["output.columnwise_data"][0, 0] ^= 1
    assert golden.stale_outputs() == ["columnwise_data"]


# --- the matrix -------------------------------------------------------------------------------------------------------


def test_matrix_covers_every_operation_scaling_and_dtype():
    recipes = list(golden_matrix())
    assert len(MATRIX) == len(recipes)  # no two share a name
    seen = {(r.op, None if r.scaling is None else scaling_label(r.scaling), r.dtype.name) for r in recipes}
    for op, operation in OPERATIONS.items():
        scalings = [None, *SCALINGS] if operation.takes_scaling else [None]
        if operation.kind in ("quantize", "dequantize"):
            scalings = list(SCALINGS)
        for scaling in scalings:
            for dtype in DTYPES:
                if operation.kind != "update_delayed_scale":
                    assert (op, scaling, dtype.name) in seen, (op, scaling, dtype)
    assert ("update_delayed_scale", None, "float32") in seen
    kinds = {(r.op, r.inputs) for r in recipes}
    missing = {(op, kind) for op in OPERATIONS for kind in INPUT_KINDS} - kinds
    assert missing <= {("update_delayed_scale", "rounding")}  # its numbers are amaxes
    assert {r.seed for r in golden_matrix(9)} == {9}


@sampled("name", SAMPLE, 3)
def test_matrix_writes_everything_that_an_operation_can(name):
    """Both copies, sums, amaxes: all slots of the case."""
    golden = golden_of(name)
    assert set(golden.outputs) == set(golden.case().slots)


def test_a_scaling_without_a_columnwise_copy_of_the_shape_has_none():
    golden = build_golden(Recipe("quantize", "nvfp4-row-scaled", (16, 48)))
    assert set(golden.outputs) == {"rowwise_data", "rowwise_scale_inv", "amax_rowwise", "dbias"}
    assert not any("columnwise" in name for name in golden.arrays)


# --- bad arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"op": "swigl"}, ["op must be", "'swigl'", "swiglu"]),
        ({"op": "quantize", "scaling": "fp7"}, ["scaling must be one of", "'fp7'", "mxfp8"]),
        ({"op": "quantize", "scaling": 5}, ["scaling must be one of", "5"]),
        ({"op": "quantize", "scaling": None}, ["scaling", "required"]),
        ({"op": "dequantize"}, ["scaling is required for dequantize"]),
        ({"op": "scaled_swiglu", "scaling": "mxfp8"}, ["scaling must be None for scaled_swiglu"]),
        ({"shape": (17, 64), "scaling": "nvfp4-1x16"}, ["M % 16 == 0", "(17, 64)"]),
        ({"shape": ()}, ["shape must be", "()"]),
        ({"shape": (4, -1)}, ["shape must be an integer", "-1"]),
        ({"shape": (1 << 20, 1 << 20)}, ["shape must have at most 2^26 elements"]),
        ({"op": "swiglu", "shape": (4, 7)}, ["x must have an even last dimension", "(4, 7)"]),
        ({"dtype": "float64"}, ["dtype must be float32, float16 or bfloat16", "float64"]),
        ({"op": "update_delayed_scale", "dtype": "float16"}, ["dtype must be float32", "float16"]),
        ({"seed": 1 << 64}, ["seed must be an integer in [0, 18446744073709551616)"]),
        ({"inputs": "odd"}, ["inputs must be one of 'mixed', 'rounding', 'extreme', 'special', 'tiny'", "'odd'"]),
        ({"op": "gelu", "params": np.ones((2, 2))}, ["params must be a dict", "float64 of shape (2, 2)"]),
        ({"op": "gelu", "params": int}, ["params must be a dict", "<class 'int'>"]),
        ({"op": "gelu", "params": {"limit": 1.0}}, ["params must be among those of gelu", "'limit'"]),
        (
            {
                "op": "quantize",
                "scaling": refops.NVFP4Scaling(stochastic_rounding=True, random_bits=np.zeros((64, 64), np.uint8)),
            },
            ["random bits from seed and offset", "random_bits"],
        ),
        (
            {"op": "quantize", "scaling": Derived(refops.E4M3)},
            ["scaling must be of a declared class", "derived from it", "got Derived(fmt=E4M3"],
        ),
    ],
    ids=str,
)
def test_bad_arguments(arguments, parts, tmp_path):
    arguments = {"op": "gelu", "shape": (64, 64)} | arguments
    with pytest.raises((ValueError, TypeError)) as error:
        write_golden(tmp_path / "new", **arguments)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert not (tmp_path / "new").exists()


# --- swizzled scales --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("op", ["quantize", "dswiglu"])
def test_swizzled_files_hold_the_same_but_for_the_order_of_scales(op, scaling, tmp_path):
    plain, swizzled = (
        read_golden(write_golden(tmp_path, op, scaling, shape=(160, 192), swizzled_scales=flag))
        for flag in (False, True)
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == 2, "the name says it"
    assert swizzled.swizzled_scales and not plain.swizzled_scales and "swizzled_scales" not in plain.header
    q = refops.Quantized(
        **{n: a for n, a in plain.outputs.items() if n != "dbias"},
        scaling=plain.scaling,
        shape=(160, 192),
        dtype=np.dtype(F),
    ).swizzled()
    for name, array in swizzled.arrays.items():
        short = name.split(".")[1]
        expected = getattr(q, short) if name.startswith("output.") and short != "dbias" else plain.arrays[name]
        assert array.tobytes() == expected.tobytes(), name
        described = swizzled.header["arrays"][name]["description"]
        assert ("then swizzled" in described or "and swizzled" in described) == name.endswith("scale_inv")
        assert ("transposed and swizzled" in described) == (
            scaling == "mxfp8" and name.endswith("columnwise_scale_inv")
        )
    options = {"scaling": swizzled.scaling, "padding": "zero", "diagnose": False}
    assert oracle.check(op, swizzled.inputs, swizzled.outputs, swizzled_scales=True, **options).ok
    assert not oracle.check(op, swizzled.inputs, swizzled.outputs, **options).ok
    assert swizzled.stale_outputs() == []
    swizzled.outputs["rowwise_scale_inv"].flat[0] ^= 1
    assert swizzled.stale_outputs() == ["rowwise_scale_inv"]


@pytest.mark.parametrize("columnwise", [False, True])
def test_swizzled_inputs_of_dequantize(columnwise):
    plain, swizzled = (
        build_golden(Recipe("dequantize", "mxfp8", (160, 192), columnwise=columnwise, swizzled_scales=flag))
        for flag in (False, True)
    )
    name = f"input.{'columnwise' if columnwise else 'rowwise'}_scale_inv"
    assert plain.arrays[name].tobytes() != swizzled.arrays[name].tobytes()
    assert plain.arrays["output.y"].tobytes() == swizzled.arrays["output.y"].tobytes()
    assert swizzled.case().inputs["q"].with_gemm_swizzled_scales and swizzled.stale_outputs() == []


@pytest.mark.parametrize("scaling", [None, "current", "block-1x128", "mxint8"])
def test_scales_without_an_order_of_their_own_are_not_swizzled(scaling):
    with pytest.raises(ValueError, match="swizzled_scales must be False with"):
        Recipe("silu", scaling, swizzled_scales=True)
    with pytest.raises(TypeError, match="swizzled_scales must be True or False"):
        Recipe("silu", "mxfp8", swizzled_scales=1)


# --- what differs in a file -------------------------------------------------------------------------------------------


def damaged(path, change, tmp_path):
    """What is said of a golden file after `change` of its (header, arrays)."""
    golden = read_golden(path)
    head, arrays = json.loads(json.dumps(golden.header)), {n: a.copy() for n, a in golden.arrays.items()}
    change(head, arrays)
    other = tmp_path / "damaged.safetensors"
    other.write_bytes(golden_bytes(replace(golden, header=head, arrays=arrays)))
    with pytest.raises(FileError) as error:
        read_golden(other)
    found = storage.digest(head, arrays)
    said = str(error.value)
    assert f"expected {head['digest']}, found {found}: " in said and "\n" not in said
    return said.split(f"found {found}: ")[1]


@pytest.mark.parametrize("name", ["input.x", "output.rowwise_data", "intermediate.rowwise_block_amax"])
def test_a_changed_array_is_named_with_its_first_byte(small, tmp_path, name):
    def change(head, arrays):
        data = arrays[name].view(np.uint8).reshape(-1)
        data[[6, 9]] ^= 5
        change.bytes = data[6] ^ 5, data[6]

    said = damaged(small, change, tmp_path)
    size = read_golden(small).arrays[name].nbytes
    expected, found = change.bytes
    assert said == (
        f"{name} differs in 2 of {size:,} bytes, first at byte 6 (expected 0x{expected:02x}, found 0x{found:02x})"
    )


def test_several_changed_arrays_are_counted(small, tmp_path):
    def change(head, arrays):
        for array in arrays.values():
            array.view(np.uint8).reshape(-1)[0] ^= 1

    assert f", and {len(read_golden(small).arrays) - 1} more arrays" in damaged(small, change, tmp_path)


#: A change of the header -> what is said of it.
CHANGED_HEADERS = {
    "digest": ({"digest": "0" * 64}, "all arrays are right, the digest itself differs"),
    "description": ({"arrays": {}}, "arrays of its header differs"),
    "seed": ({"seed": 1}, "its header is not what it was, for it asks for other arrays"),
    "operation": ({"operation": "relu"}, "its header is not what it was, for it asks for other arrays"),
    "operation of the same shapes": ({"operation": "geglu"}, "; or its header is not what it was"),
    "operation of other arrays": ({"operation": "dgelu"}, "the header asks for other arrays than the file has, "),
    "shape": ({"shape": [4096, 4096]}, "its header is not what it was, shape [4096, 4096] is not that of its arrays"),
    "kind of inputs": ({"inputs": "mixes"}, "its header is not what it was, inputs must be one of"),
    "missing": ({"dtype": None, "seed": None}, "its header is not what it was, seed must be an integer"),
    "key": ({"more": 1}, "more of its header differs"),
    "copies": ({"copies": ["rowwise"]}, "copies of its header differs"),
}


@pytest.mark.parametrize("name", CHANGED_HEADERS)
def test_a_changed_header_is_told_from_changed_arrays(small, tmp_path, name):
    changes, said = CHANGED_HEADERS[name]
    assert said in damaged(small, lambda head, arrays: head.update(changes), tmp_path)


def test_a_changed_file_of_another_version_is_compared_all_the_same(small, tmp_path):
    """Its digest counts with the version that wrote it; where that wrote other bytes, the message says so."""

    def older(head, arrays, and_more):
        head["refops"] = "0.0.1"
        if and_more:
            arrays["output.rowwise_data"].flat[1] ^= 1
        head["digest"] = header.digest(head, arrays)
        arrays["output.rowwise_data"].flat[0] ^= 1

    said = damaged(small, lambda *file: older(*file, False), tmp_path)
    assert said.startswith("output.rowwise_data differs in 1 of") and "compared with" not in said
    said = damaged(small, lambda *file: older(*file, True), tmp_path)
    assert said.startswith("output.rowwise_data differs in 2 of")
    assert said.endswith(f"; compared with refops {refops.__version__}, which writes another digest than 0.0.1 wrote")


@pytest.mark.parametrize(("scaling", "held"), [("mxfp8", "both copies without it"), (None, "values, and no copy")])
def test_columnwise_is_for_dequantize_alone(scaling, held):
    said = f"columnwise must be left out for swiglu: its file holds {held}, and only a dequantization chooses"
    with pytest.raises(ValueError, match=said):
        Recipe("swiglu", scaling, columnwise=True)
    with pytest.raises(TypeError, match="columnwise must be True or False"):
        Recipe("dequantize", "mxfp8", columnwise=1)


# --- reading damaged files --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small golden file."""
    return write_golden(tmp_path_factory.mktemp("small"), "swiglu", "mxfp8", shape=(4, 64))


@pytest.mark.parametrize("positions", [90, pytest.param(700, marks=pytest.mark.full)])
def test_every_changed_byte_is_noticed(small, tmp_path, positions):
    """Of so many bytes, from the first to the last."""
    data = small.read_bytes()
    path = tmp_path / "changed.safetensors"
    step = max(1, len(data) // positions)
    for position in range(0, len(data), step):
        changed = bytearray(data)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(FileError) as error:
            read_golden(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.5, 0.999])
def test_truncated_file(small, tmp_path, share):
    data = small.read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(FileError, match=r"must be a readable \.safetensors file"):
        read_golden(path)


def test_other_files_are_refused_in_one_line(small, tmp_path):
    with pytest.raises(FileError, match="must be an existing file"):
        read_golden(tmp_path / "missing.safetensors")
    with pytest.raises(FileError, match="not a directory"):
        read_golden(tmp_path)
    with pytest.raises(FileError, match="it has no header"):
        read_golden(ROOT / "tests" / "data" / "minilm_ffn.safetensors")
    golden = read_golden(small)
    path = tmp_path / "other.safetensors"
    for change, message in (
        ({"layout": 3}, "a golden file of layout 1 or 2; got"),
        ({"layout": 3}, "of layout 3, written by refops"),
        ({"layout": True, "columnwise": False}, "of layout True, written by refops"),
        ({"layout": 2.0}, "of layout 2.0, written by refops"),
        ({"layout": [2]}, "of layout [2], written by refops"),
        ({"copies": None}, "of layout 2, whose header has copies, a list; got"),
        ({"layout": 1, "columnwise": 0}, "of layout 1, whose header has columnwise, a bool; got"),
        ({"digest": None}, "do not match its digest"),
        ({"operation": "swigloo"}, "op must be one of"),
        ({"scaling": {"class": "FP7Scaling"}}, "scaling must be one of"),
        ({"arrays": None}, "it has no header"),
    ):
        header = golden.header | change
        if "digest" not in change and "layout" not in change and header["arrays"] is not None:
            header["digest"] = storage.digest(header, golden.arrays)
        path.write_bytes(golden_bytes(replace(golden, header=header)))
        with pytest.raises(FileError, match=re.escape(message)):
            read_golden(path)


# --- written whole or not at all --------------------------------------------------------------------------------------


RECIPE = Recipe("gelu", "mxfp8", (8, 64), "float32")
OTHER = Recipe("silu", "current", (8, 64), "float32")


def test_manifest_lists_what_is_there(tmp_path):
    write_golden(tmp_path, "silu", shape=(4, 8))
    write_golden(tmp_path, "gelu", "mxfp8", shape=(4, 64))
    manifest = json.loads((tmp_path / "manifest.json").read_text())["files"]
    files = contents(tmp_path)
    del files["manifest.json"]
    assert list(manifest) == sorted(files) and len(files) == 2
    for name, data in files.items():
        assert manifest[name] == {"sha256": sha256(data).hexdigest(), "bytes": len(data)}


def test_manifest_does_not_depend_on_the_order_of_writing(tmp_path):
    for folder, recipes in (("a", (RECIPE, OTHER)), ("b", (OTHER, RECIPE))):
        for recipe in recipes:
            with GoldenWriter(tmp_path / folder) as writer:
                writer.add(recipe)
    with GoldenWriter(tmp_path / "c") as writer:
        writer.add(OTHER)
        writer.add(RECIPE)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_manifest_forgets_files_that_are_gone(tmp_path):
    write_golden(tmp_path, "silu", shape=(4, 8)).unlink()
    path = write_golden(tmp_path, "gelu", shape=(4, 8))
    assert list(json.loads((tmp_path / "manifest.json").read_text())["files"]) == [path.name]


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": {"a": 1}}', "{", '{"files": {"a": {}}}'])
def test_a_manifest_of_something_else_is_left_alone(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(FileError, match="must hold a manifest of golden files or none"):
        write_golden(tmp_path, "silu", shape=(4, 8))
    assert contents(tmp_path) == {"manifest.json": text.encode()}


def failing(monkeypatch, module, name, call, error):
    """Let the `call`-th call of a function raise."""
    calls = iter(range(1, 1000))
    real = getattr(module, name)

    def fail(*arguments, **options):
        if next(calls) == call:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("name", "call", "error"),
    [
        ("fsync", 1, OSError(errno.ENOSPC, "No space left on device")),  # the first file
        ("fsync", 2, OSError(errno.ENOSPC, "No space left on device")),  # the second
        ("fsync", 3, OSError(errno.EIO, "Input/output error")),  # the manifest
        ("fsync", 2, KeyboardInterrupt()),
        ("replace", 1, OSError(errno.EACCES, "Permission denied")),
        ("build_golden", 2, KeyboardInterrupt()),
        ("build_golden", 2, MemoryError()),
    ],
    ids=str,
)
def test_failure_leaves_everything_as_it_was(tmp_path, monkeypatch, existing, name, call, error):
    directory = tmp_path / "deep" / "golden"
    if existing:
        write_golden(directory, "relu", shape=(4, 8))
    before = contents(tmp_path)
    failing(monkeypatch, storage if name == "build_golden" else os, name, call, error)
    with pytest.raises(type(error)), GoldenWriter(directory) as writer:
        writer.add(RECIPE)
        writer.add(OTHER)
    assert contents(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["deep"] if existing else [])


def test_ctrl_c_while_files_move_finishes_the_move(tmp_path, monkeypatch):
    failing(monkeypatch, os, "replace", 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), GoldenWriter(tmp_path) as writer:
        writer.add(RECIPE)
        writer.add(OTHER)
    files = contents(tmp_path)
    assert set(files) == {RECIPE.file_name, OTHER.file_name, "manifest.json"}
    assert set(json.loads(files["manifest.json"])["files"]) == {RECIPE.file_name, OTHER.file_name}


def test_a_directory_in_the_place_of_a_file(tmp_path):
    (tmp_path / RECIPE.file_name).mkdir()
    with pytest.raises(IsADirectoryError), GoldenWriter(tmp_path) as writer:
        writer.add(OTHER)
        writer.add(RECIPE)
    assert contents(tmp_path) == {}


def command(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "refops", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # No bytecode: written under a limit it would be cut short, and nobody would notice.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        **options,
    )


def test_a_file_that_cannot_grow_leaves_nothing(tmp_path):
    """A real limit of the operating system, as a full disk or a quota sets it."""
    resource = pytest.importorskip("resource")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    arguments = ("golden", "--op", "swiglu", "--scaling", "mxfp8", "--shape", "64x256", "--out", tmp_path / "golden")
    process = command(*arguments, preexec_fn=limit)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("refops: error: --out must be a directory that can be written") and "File too large" in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    def heed_ctrl_c():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it

    process = command("golden", "--all", "--out", tmp_path / "golden", preexec_fn=heed_ctrl_c)
    for _ in range(600):
        if list(tmp_path.glob("golden/.refops-*/*.safetensors")):
            break
        time.sleep(0.05)
    assert process.poll() is None and not list(tmp_path.glob("golden/*.safetensors"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (2, 0, 32)])
@pytest.mark.parametrize("op", ["quantize", "relu", "dequantize"])
def test_empty_tensors_under_stochastic_rounding(op, shape, tmp_path):
    """The random bits of no element are a golden array too; a dump of it can be checked and diagnosed."""
    golden = read_golden(write_golden(tmp_path, op, "nvfp4-stochastic", shape=shape))
    assert oracle.check(golden.op, golden.inputs, golden.outputs, scaling=golden.scaling).ok
