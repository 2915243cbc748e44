"""`refops check` and `refops golden` as a user meets them: files of every kind, exit codes, one-line errors, JSON."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import refops
from refops import cli, oracle
from refops.golden import Recipe, build_golden, golden_matrix, storage
from refops.survey import SCALINGS
from tiers import sampled

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
MX = refops.MXFP8Scaling(refops.E4M3)
X = np.random.default_rng(0).standard_normal((64, 128)).astype(BF16)
DY = np.random.default_rng(1).standard_normal((64, 64)).astype(BF16)
Q = refops.activation_quantize("swiglu", X, MX, columnwise=True)
Y = refops.activation("swiglu", X)
DX, DBIAS = refops.activation_grad("swiglu", DY, X, dbias=True)
NV = refops.quantize(X, refops.NVFP4Scaling(), columnwise=True)
NO_DIAGNOSIS = "--no-diagnosis"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of inputs and right outputs of swiglu -> MXFP8 and its neighbours, in every kind of file."""
    folder = tmp_path_factory.mktemp("files")
    X.tofile(folder / "x.bin")
    DY.tofile(folder / "dy.bin")
    Y.tofile(folder / "y.bin")
    refops.activation("swiglu", X, out_dtype=F).tofile(folder / "y32.bin")
    DX.tofile(folder / "dx.bin")
    DBIAS.tofile(folder / "dbias.bin")
    np.save(folder / "x.npy", X)  # as raw bytes: npy cannot say bfloat16
    np.save(folder / "x16.npy", X.view(np.uint16))
    np.save(folder / "x32.npy", X.astype(F))
    np.save(folder / "y.npy", Y)
    np.save(folder / "float64.npy", X.astype(np.float64))
    np.savez(folder / "both.npz", x=X.astype(F), dy=DY.astype(F))
    np.savez(folder / "two.npz", a=X.astype(F), b=X.astype(F))
    save_file({"x": X, "other": X}, folder / "x.safetensors")
    (folder / "manifest.json").write_text("{}")
    save_file({"datta": Q.rowwise_data}, folder / "slip.safetensors")
    for name, q in (("q", Q), ("nv", NV)):
        arrays = oracle.operation.arrays_of(q)
        save_file(arrays, folder / f"{name}.safetensors")
        for n, array in arrays.items():
            array.tofile(folder / f"{name}.{n}.bin")
    Q.rowwise_scale_inv[:64, :2].tofile(folder / "unpadded.bin")
    np.zeros((64, 4), np.uint8).tofile(folder / "sixteen.bin")
    np.save(folder / "q.npy", Q.rowwise_data.view(ml_dtypes.float8_e4m3fn))  # as raw bytes
    wrong = Q.rowwise_data.copy()
    wrong[3, 5] ^= 8
    wrong.tofile(folder / "wrong.bin")
    write_safetensors(
        folder / "typed.safetensors",
        {"rowwise_data": ("F8_E4M3", Q.rowwise_data), "rowwise_scale_inv": ("F8_E8M0", Q.rowwise_scale_inv)},
    )
    write_safetensors(
        folder / "fp4.safetensors", {"data": ("F4", NV.rowwise_data), "scale": ("F8_E4M3", NV.rowwise_scale_inv)}
    )
    write_safetensors(folder / "odd.safetensors", {"data": ("F8_E4M3FNUZ", Q.rowwise_data)})
    history = np.linspace(0, 3, 12, dtype=F).reshape(4, 3)
    np.save(folder / "history.npy", history)
    np.save(folder / "scale.npy", np.ones(3, F))
    for name, array in zip(
        ("new_history", "new_scale"),
        refops.update_delayed_scale(history, np.ones(3, F), refops.E4M3, margin=1),
        strict=True,
    ):
        array.tofile(folder / f"{name}.bin")
    (folder / "noise.npz").write_bytes(b"PK\x03\x04 and noise")
    (folder / "golden.safetensors").write_bytes(
        storage.golden_bytes(build_golden(Recipe("swiglu", "mxfp8", (32, 128))))
    )
    plain = build_golden(Recipe("dequantize", "mxfp8", (32, 64)))
    (folder / "dequantize.safetensors").write_bytes(storage.golden_bytes(plain))
    return folder


def write_safetensors(path, arrays):
    """A safetensors file of dtypes that NumPy lacks: name -> (dtype, bytes as uint8); FP4 has two elements per byte."""
    entries, data = {}, b""
    for name, (dtype, array) in arrays.items():
        shape = [*array.shape[:-1], array.shape[-1] * (2 if dtype == "F4" else 1)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + array.size]}
        data += array.tobytes()
    text = json.dumps(entries).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


SWIGLU = ("check", "--op", "swiglu")
DSWIGLU = ("check", "--op", "dswiglu")
SCALED = ("check", "--op", "scaled_swiglu", "--input", "x=x32.npy", "--input", "row_scales=x32.npy")
NVFP4 = ("check", "--op", "quantize", "--scaling", "nvfp4-1x16", "--input", "x.safetensors")
UPDATE = ("check", "--op", "update_delayed_scale", "--input", "amax_history=history.npy", "--input", "scale=scale.npy")
MXFP8 = (*SWIGLU, "--scaling", "mxfp8", "--input", "x.bin@bfloat16:64x128")
RIGHT = [
    (*MXFP8, "--data", "q.rowwise_data.bin", "--scale", "q.rowwise_scale_inv.bin"),
    (*MXFP8, "--data", "q.rowwise_data.bin"),
    (*MXFP8, "--scale", "unpadded.bin"),
    (*MXFP8, "--data", "q.npy", "--scale", "unpadded.bin", "--ulp", "0"),
    (*MXFP8, "--data", "q.rowwise_data.bin@uint8:4096", "--padding", "zero"),
    (*MXFP8, "--outputs", "q.safetensors"),
    (*MXFP8, "--outputs", "typed.safetensors"),
    (*MXFP8, "--data", "typed.safetensors", "--output", "columnwise_data=q.safetensors"),
    (*MXFP8, "--data", "typed.safetensors:rowwise_data"),
    (*MXFP8, "--output", "columnwise_data=q.columnwise_data.bin", "--output", "columnwise_scale_inv=q.safetensors"),
    (*SWIGLU, "--scaling", "MXFP8", "--input", "x=x.bin@bfloat16:64x128", "--data", "q.rowwise_data.bin"),
    (*SWIGLU, "--scaling", "mxfp8", "--input", "x.npy@bfloat16", "--data", "q.rowwise_data.bin"),
    (*SWIGLU, "--scaling", "mxfp8", "--input", "x16.npy@bfloat16", "--data", "q.rowwise_data.bin"),
    (*SWIGLU, "--scaling", "mxfp8", "--input", "x.safetensors", "--data", "q.rowwise_data.bin"),
    (*SWIGLU, "--scaling", "mxfp8", "--input", "x.safetensors:other", "--data", "q.rowwise_data.bin"),
    (*SWIGLU, "--input", "x.bin@bfloat16:64x128", "--output", "y=y.bin"),
    (*SWIGLU, "--input", "x.bin@bfloat16:64x128", "--output", "y=y32.bin", "--out-dtype", "float32"),
    (*SWIGLU, "--input", "x.bin@bfloat16:64x128", "--output", "y=y.npy", "--out-dtype", "bfloat16"),
    (*SWIGLU, "--input", "x32.npy", "--output", "y=y.bin@bfloat16"),
    (*DSWIGLU, "--input", "x=x.bin@bfloat16:64x128", "--input", "dy=dy.bin@bfloat16:64x64",
     "--output", "dx=dx.bin", "--output", "dbias=dbias.bin"),
    (*DSWIGLU, "--input", "both.npz", "--output", "dx=dx.bin@bfloat16"),
    (*DSWIGLU, "--input", "x=both.npz", "--input", "dy=both.npz:dy", "--output", "dx=dx.bin@bfloat16"),
    (*NVFP4[:-1], "x.safetensors:x", "--outputs", "nv.safetensors"),
    (*NVFP4, "--outputs", "fp4.safetensors"),
    (*NVFP4, "--amax", "nv.amax_rowwise.bin"),
    ("check", "--op", "quantize", "--scaling", "nvfp4", "--input", "x.safetensors", "--outputs", "nv.safetensors"),
    (*MXFP8, "--output", "codes=q.rowwise_data.bin", "--output", "columnwise_scales=q.columnwise_scale_inv.bin"),
    (*UPDATE, "--param", "fmt=e4m3", "--param", "margin=1", "--param", "algorithm=max", "--param", "keep_unused=true",
     "--scale", "new_scale.bin", "--output", "amax_history=new_history.bin"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", RIGHT, ids=lambda a: " ".join(a[2:]))
def test_right_outputs(run, files, monkeypatch, arguments):
    monkeypatch.chdir(files)
    code, out, err = run(*arguments)
    assert (code, err) == (0, "") and out.startswith("RIGHT")


@pytest.mark.parametrize(
    ("data", "scales"),
    [("rowwise_data", "rowwise_scale_inv"), ("columnwise_data", "columnwise_scale_inv")],
)
def test_dequantize(run, files, monkeypatch, data, scales):
    monkeypatch.chdir(files)
    q = refops.Quantized(
        **{data: getattr(Q, data), scales: getattr(Q, scales)}, scaling=MX, shape=Q.shape, dtype=np.dtype(F)
    )
    refops.dequantize(q).tofile("dequantized.bin")
    refops.dequantize(q, dtype=BF16).tofile("dequantized16.bin")
    base = ("check", "--op", "dequantize", "--scaling", "mxfp8")
    shape = "x".join(map(str, getattr(Q, scales).shape))
    raw = ("--input", f"{data}=q.{data}.bin@uint8:64x64", "--input", f"{scales}=q.{scales}.bin@uint8:{shape}")
    for inputs in (raw, ("--input", f"{data}=q.safetensors", "--input", f"{scales}=q.safetensors")):
        assert run(*base, *inputs, "--output", "y=dequantized.bin")[0] == 0
        assert run(*base, *inputs, "--output", "y=dequantized16.bin", "--out-dtype", "bfloat16")[0] == 0
        assert run(*base, *inputs, "--output", "y=dequantized16.bin", "--out-dtype", "float16", NO_DIAGNOSIS)[0] == 1


def test_dequantize_short_names_and_whole_files(run, files, monkeypatch):
    monkeypatch.chdir(files)
    refops.dequantize(Q).tofile("y.f32")
    base = ("check", "--op", "dequantize", "--scaling", "mxfp8", "--output", "y=y.f32")
    short = ("--input", "data=q.rowwise_data.bin@uint8:64x64", "--input", "scale=q.rowwise_scale_inv.bin@uint8:512")
    assert run(*base, *short)[0] == 0
    assert run(*base, "--input", "q.safetensors")[0] == 0


def test_settings_and_parameters_reach_the_check(run, files, monkeypatch):
    monkeypatch.chdir(files)
    cases = [
        ("swiglu", "mxfp8", {"scale_rounding": "floor"}, refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor"), {}),
        ("swiglu", "mxfp8", {"fmt": "e5m2", "two_d": "true"}, refops.MXFP8Scaling(refops.E5M2, two_d=True), {}),
        ("gelu", "delayed-scale-1", {"scale": "0.5"}, refops.DelayedScaling(refops.E4M3, 0.5), {}),
        ("gelu", "block-1x128", {"block_dim": "2", "amax_epsilon": "1e3"}, None, {}),
        ("gelu", "nvfp4-1x16", {"four_over_six": "mse", "e4m3_max": "256"}, None, {}),
        ("gelu", "nvfp4-4over6", {"four_over_six": "none", "e4m3_max": "448"}, refops.NVFP4Scaling(), {}),
        ("gelu", "nvfp4-stochastic", {"seed": "0xFFFFFFFFFFFFFFFF", "offset": "9"}, None, {}),
        ("clamped_swiglu", "mxfp8", {}, MX, {"limit": 0.25, "alpha": 1.0, "glu_linear_offset": 0.5}),
    ]
    for op, name, overrides, scaling, params in cases:
        if scaling is None:
            values = {k: int(v, 0) if v[0].isdigit() and "e" not in v else v for k, v in overrides.items()}
            if "amax_epsilon" in values:
                values["amax_epsilon"] = 1e3
            scaling = replace(SCALINGS[name].scaling, **values)
        refops.activation_quantize(op, X, scaling, **params).rowwise_data.tofile("out.bin")
        base = ("check", "--op", op, "--scaling", name, "--input", "x.safetensors", "--data", "out.bin", "--ulp", "0")
        words = [w for k, v in overrides.items() for w in ("--set", f"{k}={v}")]
        words += [w for k, v in params.items() for w in ("--param", f"{k}={v}")]
        assert run(*base, *words)[0] == 0, (name, overrides)
        if scaling != SCALINGS[name].scaling or params:
            assert run(*base, NO_DIAGNOSIS)[0] == 1, (name, overrides)


def test_interleaved_gates(run, files, monkeypatch):
    monkeypatch.chdir(files)
    scales = np.linspace(0, 1, 64, dtype=F)
    np.save("row_scales.npy", scales)
    refops.scaled_activation("swiglu", X, scales, glu_interleave_size=32).tofile("y_scaled.bin")
    base = ("check", "--op", "scaled_swiglu", "--input", "x=x.safetensors", "--input", "row_scales=row_scales.npy")
    base = (*base, "--output", "y=y_scaled.bin")
    assert run(*base, "--param", "glu_interleave_size=32")[0] == 0
    assert run(*base, NO_DIAGNOSIS)[0] == 1


def test_random_bits_from_a_file(run, files, monkeypatch):
    monkeypatch.chdir(files)
    rng = np.random.default_rng(3)
    row, column = rng.integers(0, 256, (64, 128), np.uint8), rng.integers(0, 256, (128, 64), np.uint8)
    q = refops.quantize(X, refops.NVFP4Scaling(stochastic_rounding=True, random_bits=(row, column)), columnwise=True)
    row.tofile("row.bits")
    np.savez("bits.npz", rowwise=row, columnwise=column)
    q.rowwise_data.tofile("row.out")
    q.columnwise_data.tofile("column.out")
    base = ("check", "--op", "quantize", "--scaling", "nvfp4-stochastic", "--input", "x.safetensors", "--ulp", "0")
    assert run(*base, "--data", "row.out", "--set", "random_bits=row.bits@uint8:64x128")[0] == 0
    both = ("--data", "row.out", "--output", "columnwise_data=column.out", "--set", "random_bits=bits.npz")
    assert run(*base, *both)[0] == 0
    assert run(*base, "--data", "row.out", NO_DIAGNOSIS)[0] == 1


def test_a_kernel_with_random_bits_of_its_own(run, files, monkeypatch):
    """Either neighbour of a value is right then, and nothing else."""
    monkeypatch.chdir(files)
    q = refops.quantize(X, refops.NVFP4Scaling(stochastic_rounding=True, seed=12345))
    q.rowwise_data.tofile("own.out")
    q.rowwise_scale_inv.tofile("own.scales")
    base = ("check", "--op", "quantize", "--scaling", "nvfp4-stochastic", "--input", "x.safetensors", "--random-bits")
    assert run(*base, "any", "--data", "own.out", "--scale", "own.scales")[0] == 0
    assert run(*base, "given", "--data", "own.out", "--scale", "own.scales", NO_DIAGNOSIS)[0] == 1


def test_swizzled_scales(run, files, monkeypatch):
    monkeypatch.chdir(files)
    swizzled = Q.swizzled()
    swizzled.rowwise_scale_inv.tofile("swizzled.bin")
    swizzled.columnwise_scale_inv.tofile("swizzled_columnwise.bin")
    outputs = ("--scale", "swizzled.bin", "--output", "columnwise_scale_inv=swizzled_columnwise.bin")
    assert run(*MXFP8, *outputs, "--swizzled-scales")[0] == 0
    assert run(*MXFP8, *outputs, NO_DIAGNOSIS)[0] == 1


def test_padding(run, files, monkeypatch):
    monkeypatch.chdir(files)
    dirty = Q.rowwise_scale_inv.copy()
    dirty[100, 3] = 1
    dirty.tofile("dirty.bin")
    assert run(*MXFP8, "--scale", "dirty.bin")[0] == 0
    assert run(*MXFP8, "--scale", "dirty.bin", "--padding", "ignore", "--ulp", "0")[0] == 0
    assert run(*MXFP8, "--scale", "dirty.bin", "--padding", "zero", NO_DIAGNOSIS)[0] == 1


def test_torch_files(run, files, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(files)
    x = torch.from_numpy(X.view(np.int16)).view(torch.bfloat16)
    codes = torch.from_numpy(Q.rowwise_data).view(torch.float8_e4m3fn)
    torch.save({"x": x}, "x.pt")
    torch.save({"data": codes, "scale_inv": torch.from_numpy(Q.rowwise_scale_inv)}, "out.pt")
    base = (*SWIGLU, "--scaling", "mxfp8", "--input", "x.pt")
    assert run(*base, "--outputs", "out.pt")[0] == 0
    assert run(*base, "--data", "out.pt:data", "--ulp", "0")[0] == 0


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_wrong_outputs_print_the_report_and_exit_1(run, files, monkeypatch):
    monkeypatch.chdir(files)
    code, out, err = run(*MXFP8, "--data", "wrong.bin", NO_DIAGNOSIS)
    expected = oracle.check("swiglu", X, {"data": np.fromfile("wrong.bin", np.uint8)}, scaling=MX, diagnose=False)
    assert (code, err) == (1, "") and out == f"{expected}\n"
    assert "rowwise_data[3, 5]" in out


def test_json_is_the_report(run, files, monkeypatch):
    monkeypatch.chdir(files)
    for data, code in (("q.rowwise_data.bin", 0), ("wrong.bin", 1)):
        got, out, err = run(*MXFP8, "--data", data, NO_DIAGNOSIS, "--json")
        document = json.loads(out)
        assert (got, err, document["ok"]) == (code, "", code == 0)
        assert document["arrays"][0]["wrong"] == code
        assert document["operation"] == "swiglu"


def test_diagnosis_is_printed(run, files, monkeypatch):
    monkeypatch.chdir(files)
    nibbles = NV.rowwise_data
    (nibbles << 4 | nibbles >> 4).tofile("nibbles.bin")
    base = ("check", "--op", "quantize", "--scaling", "nvfp4-1x16", "--input", "x.safetensors", "--data", "nibbles.bin")
    code, out, _ = run(*base)
    assert code == 1 and "swapped-nibbles" in out
    code, out, _ = run(*base, "--json")
    assert json.loads(out)["diagnosis"][0]["names"] == ["swapped-nibbles"]
    assert "swapped-nibbles" not in run(*base, NO_DIAGNOSIS)[1]


# --- bad use: exit code 2, one line -----------------------------------------------------------------------------------

OUT = ("--data", "q.rowwise_data.bin")
GOLDEN = ("check", "--golden", "golden.safetensors")
WRITE = ("golden", "--op", "swiglu", "--scaling", "mxfp8", "--shape", "32x128", "--out", "new")
BAD = [
    (("check",), ["--op or --golden", "neither"]),
    (("check", "--op", "swigloo", *OUT), ["--op must be one of", "'swigloo'", "did you mean swiglu"]),
    ((*SWIGLU, "--scaling", "mxfp9", *OUT), ["--scaling", "'mxfp9'", "mxfp8"]),
    (MXFP8, ["--output must give at least one of rowwise_data", "none"]),
    ((*SWIGLU, "--scaling", "mxfp8", *OUT), ["--input must give x for swiglu", "nothing"]),
    ((*DSWIGLU, "--input", "x=x.npy", "--output", "dx=dx.bin"), ["--input must give dy, x for dswiglu", "got x"]),
    ((*MXFP8, "--input", "x=x32.npy", *OUT), ["--input must give x once", "'x=x32.npy'"]),
    ((*MXFP8[:-1], "z=x32.npy", *OUT), ["--input must be NAME=FILE with NAME one of x", "'z=x32.npy'"]),
    ((*MXFP8[:-1], "x.bin", *OUT), ["--input must be FILE@DTYPE:SHAPE", "'x.bin'"]),
    ((*MXFP8[:-1], "x.bin@bfloat16", *OUT), ["--input must be FILE@DTYPE:SHAPE", "'x.bin@bfloat16'"]),
    ((*MXFP8[:-1], "x.bin@bf16:64x128", *OUT), ["--input must have one of float32, float16, bfloat16, uint8 after @"]),
    ((*MXFP8[:-1], "x.bin@bfloat16:64*128", *OUT), ["--input must have sizes joined by x", "'x.bin@bfloat16:64*128'"]),
    ((*MXFP8[:-1], "x.bin@bfloat16:64x127", *OUT), ["--input must hold 16256 bytes (bfloat16 64x127)", "16384"]),
    ((*MXFP8[:-1], "x.npy@bfloat16:64x128", *OUT), ["--input must have no shape after @ for a .npy file"]),
    ((*MXFP8[:-1], "x32.npy@bfloat16", *OUT), ["--input must be bfloat16", "float32 of shape (64, 128)", "x32.npy"]),
    ((*MXFP8[:-1], "x.npy", *OUT), ["--input x must be float32, float16 or bfloat16", "uint16", "add @bfloat16"]),
    ((*MXFP8[:-1], "float64.npy", *OUT), ["--input x must be float32, float16 or bfloat16", "float64"]),
    ((*MXFP8[:-1], "missing.npy", *OUT), ["--input must be an existing file", "'missing.npy'"]),
    ((*MXFP8[:-1], "x=missing.bin@float32:3", *OUT), ["--input x must be an existing file", "'missing.bin'"]),
    ((*MXFP8[:-1], "noise.npz", *OUT), ["--input must be a readable .npz file", "'noise.npz'"]),
    ((*MXFP8[:-1], "two.npz", *OUT), ["--input must be NAME=FILE with NAME one of x", "array 'a'"]),
    ((*MXFP8[:-1], "x=two.npz", *OUT), ["--input x must name one of a, b after :", "'two.npz'"]),
    ((*MXFP8[:-1], "x.safetensors:y", *OUT), ["--input must name one of", "other, x", "'y'"]),
    ((*DSWIGLU, "--input", "x32.npy", "--output", "dx=dx.bin"), ["--input must be NAME=FILE with NAME one of dy, x"]),
    (
        (*DSWIGLU, "--input", "dy=x32.npy", "--input", "x=x32.npy", "--output", "dx=dx.bin"),
        ["--input dy must", "(64, 64)"],
    ),
    ((*MXFP8, "--data", "missing.bin"), ["--data must be an existing file", "'missing.bin'"]),
    ((*MXFP8, "--data", "."), ["--data must be a file", "'.'"]),
    ((*MXFP8, "--data", "x.bin"), ["--data must hold 4096 bytes (uint8 64x64)", "16384 bytes", "'x.bin'"]),
    ((*MXFP8, "--scale", "x.bin"), ["--scale must hold 512 bytes (uint8 128x4) or 128 bytes (uint8 64x2)", "16384"]),
    ((*MXFP8, "--scale", "sixteen.bin"), ["got 256 bytes in 'sixteen.bin', the size of scales of blocks of 16"]),
    ((*MXFP8, "--data", "x32.npy"), ["--data must be uint8 codes", "float32 of shape (64, 128)"]),
    ((*MXFP8, "--data", "q.rowwise_data.bin@uint8:32x128"), ["--data must have shape (64, 64)", "(32, 128)"]),
    ((*MXFP8, "--data", "two.npz"), ["--data must name one of a, b after :", "'two.npz'"]),
    ((*MXFP8, "--amax", "x.bin"), ["--amax is no output of swiglu: rowwise_data", "'x.bin'"]),
    (
        ("check", "--op", "swiglu", "--input", "x32.npy", "--data", "q.bin"),
        ["--data is no output of swiglu without a scaling (give --scaling, such as --scaling mxfp8)"],
    ),
    (("check", "--op", "silu", "--input", "x.bin@bf16:64x256"), ["(did you mean bfloat16?)"]),
    ((*MXFP8, "--output", "codez=q.bin"), ["--output codez is no output of swiglu (did you mean codes"]),
    ((*MXFP8, "--outputs", "slip.safetensors"), ["--outputs must hold arrays among", "'datta' (did you mean data"]),
    ((*DSWIGLU, "--input", "xx=x.npy", "--output", "dx=dx.bin"), ["--input must be NAME=FILE", "'xx=x.npy'"]),
    ((*MXFP8, "--output", "q.bin"), ["--output must be NAME=FILE with NAME one of rowwise_data", "'q.bin'"]),
    ((*MXFP8, "--output", "dx=dx.bin"), ["--output dx is no output of swiglu: rowwise_data", "'dx.bin'"]),
    ((*MXFP8, *OUT, "--output", "data=wrong.bin"), ["--output data must be given once", "'wrong.bin'", "rowwise_data"]),
    ((*MXFP8, *OUT, "--outputs", "q.safetensors"), ["--outputs must hold rowwise_data where nothing else gives it"]),
    ((*MXFP8, "--outputs", "x.safetensors"), ["--outputs must hold arrays among rowwise_data", "'other'"]),
    ((*MXFP8, "--outputs", "q.bin"), ["--outputs must end in one of .safetensors", "'q.bin'"]),
    ((*MXFP8, "--outputs", "odd.safetensors"), ["--outputs must", "odd.safetensors"]),
    ((*MXFP8, *OUT, "--out-dtype", "bfloat16"), ["--out-dtype goes with output y or dx", "rowwise_data"]),
    (
        (*SWIGLU, "--input", "x32.npy", "--output", "y=x32.npy", "--out-dtype", "float16"),
        ["--out-dtype must be that of y, float32", "'float16'"],
    ),
    ((*SWIGLU, "--input", "x32.npy", "--output", "y=y.bin"), ["--output y must hold 16384 bytes (float32 64x64)"]),
    ((*SWIGLU, "--input", "x32.npy", "--output", "y=x32.npy"), ["--output y must have shape (64, 64)", "(64, 128)"]),
    ((*MXFP8, *OUT, "--ulp", "-1"), ["--ulp", "a number >= 0", "'-1'"]),
    ((*MXFP8, *OUT, "--ulp", "nan"), ["--ulp", "a number >= 0", "'nan'"]),
    ((*MXFP8, *OUT, "--ulp", "few"), ["--ulp", "a number >= 0", "'few'"]),
    ((*MXFP8, *OUT, "--padding", "one"), ["--padding", "'one'", "zero"]),
    ((*MXFP8, *OUT, "--set", "fmt"), ["--set FIELD=VALUE", "MXFP8Scaling: fmt, two_d, scale_rounding", "'fmt'"]),
    ((*MXFP8, *OUT, "--set", "format=e5m2"), ["--set FIELD=VALUE", "fmt, two_d, scale_rounding", "'format=e5m2'"]),
    ((*MXFP8, *OUT, "--set", "fmt=fp8"), ["--set fmt must be one of e4m3", "'fp8'"]),
    ((*MXFP8, *OUT, "--set", "fmt=e2m1"), ["--set fmt must be", "E2M1"]),
    ((*MXFP8, *OUT, "--set", "two_d=yes"), ["--set two_d must be true or false", "'yes'"]),
    ((*MXFP8, *OUT, "--set", "scale_rounding=odd"), ["--set scale_rounding must be one of 'up'", "'odd'"]),
    ((*MXFP8, *OUT, "--set", "two_d=true", "--set", "two_d=false"), ["--set must give two_d once", "'two_d=false'"]),
    ((*NVFP4, "--data", "x.bin", "--set", "seed=1.5"), ["--set seed must be an integer", "'1.5'"]),
    ((*NVFP4, "--data", "x.bin", "--set", "seed=-1"), ["--set seed must be an integer in [0,", "-1"]),
    ((*NVFP4, "--data", "x.bin", "--set", "e4m3_max=256"), ["--set e4m3_max=256 needs four_over_six"]),
    ((*NVFP4, "--data", "x.bin", "--set", "random_bits=x.bin"), ["--set random_bits must be FILE@DTYPE:SHAPE"]),
    ((*NVFP4, "--data", "x.bin", "--set", "random_bits=two.npz"), ["--set random_bits must name one array", "a, b"]),
    ((*NVFP4[:3], "--set", "two_d=true", *OUT), ["--set needs --scaling", "'two_d=true'"]),
    (
        ("check", "--op", "quantize", "--input", "x32.npy", *OUT),
        ["--scaling is required for quantize, such as --scaling mxfp8; got none"],
    ),
    (("check", "--op", "dequantize", "--input", "q.safetensors", *OUT), ["--scaling is required to dequantize"]),
    (
        ("check", "--op", "dequantize", "--scaling", "mxfp8", "--output", "y=y.bin"),
        ["--input must give arrays among rowwise_data", "nothing"],
    ),
    (
        ("check", "--op", "dequantize", "--scaling", "mxfp8", "--input", "data=x32.npy", "--output", "y=y.bin"),
        ["--input rowwise_data must be uint8 codes"],
    ),
    (
        (*SCALED, "--scaling", "mxfp8", "--output", "y=y.bin"),
        ["--scaling must be None for scaled_swiglu"],
    ),
    ((*MXFP8, *OUT, "--param", "limit=3"), ["--param NAME=VALUE", "swiglu, which has none", "'limit=3'"]),
    (
        ("check", "--op", "clamped_swiglu", "--input", "x32.npy", "--param", "limits=3", "--output", "y=y.bin"),
        ["--param NAME=VALUE", "limit, alpha, glu_linear_offset", "'limits=3' (did you mean limit?)"],
    ),
    (
        ("check", "--op", "clamped_swiglu", "--input", "x32.npy", "--param", "limit=big", "--output", "y=y.bin"),
        ["--param limit must be a number", "'big'"],
    ),
    (
        ("check", "--op", "situglu", "--input", "x32.npy", "--param", "beta1=-1", "--output", "y=y32.bin"),
        ["--param beta1 must be", "-1"],
    ),
    (
        (*SCALED, "--output", "y=y32.bin"),
        ["--input row_scales must have one entry per row, 64", "(64, 128)"],
    ),
    (
        (*UPDATE, "--scale", "new_scale.bin"),
        ["--param fmt=e4m3 or --param fmt=e5m2 is required"],
    ),
    (
        (*UPDATE, "--param", "fmt=e4m3", "--param", "algorithm=mean", "--scale", "new_scale.bin"),
        ["--param algorithm must be one of 'max', 'most_recent'", "'mean'"],
    ),
    (
        (*NVFP4[:-1], "x=x.bin@bfloat16:128x8x8", "--data", "q.npy"),
        ["--input x must have", "K % 16 == 0", "(128, 8, 8)"],
    ),
    ((*GOLDEN, "--outputs", "q.safetensors", "--op", "swiglu"), ["either --golden or --op"]),
    ((*GOLDEN, "--outputs", "q.safetensors", "--input", "x=x.bin"), ["either --golden or --input"]),
    ((*GOLDEN, "--outputs", "q.safetensors"), ["rowwise_data must have shape (32, 64)", "(64, 64)"]),
    ((*GOLDEN, "--data", "q.rowwise_data.bin"), ["--data must hold 2048 bytes", "4096"]),
    (GOLDEN, ["--output must give at least one of"]),
    (("check", "--golden", "missing.safetensors", *OUT), ["--golden must be an existing file"]),
    (("check", "--golden", "x.safetensors", *OUT), ["--golden must be a golden file", "it has no header"]),
    (("check", "--golden", "manifest.json", *OUT), ["--golden must be a .safetensors file; got 'manifest.json'"]),
    (
        ("check", "--golden", "dequantize.safetensors", "--output", "y=y.bin", "--swizzled-scales"),
        ["--swizzled-scales must not be given"],
    ),
    (WRITE[:1], ["--out", "required"]),
    (("golden", "--out", "new"), ["--op and --shape, or --all", "no --op"]),
    (("golden", "--out", "new", "--op", "gelu"), ["--op and --shape, or --all", "no --shape"]),
    (("golden", "--all", "--op", "gelu", "--out", "new"), ["either --all or --op"]),
    (("golden", "--all", "--shape", "3x3", "--out", "new"), ["either --all or --shape"]),
    (("golden", "--all", "--swizzled-scales", "--out", "new"), ["either --all or --swizzled-scales"]),
    (
        ("golden", "--op", "quantize", "--scaling", "current", "--shape", "4x4", "--swizzled-scales", "--out", "new"),
        ["--swizzled-scales must be False with CurrentScaling"],
    ),
    ((*WRITE, "--op", "swigloo"), ["--op must be one of", "'swigloo'"]),
    ((*WRITE, "--shape", "32by128"), ["--shape", "sizes joined by x", "'32by128'"]),
    ((*WRITE, "--shape", "32x100"), ["--shape does not fit", "H % 32 == 0", "H=50"]),
    ((*WRITE, "--shape", "1000000x1000000"), ["--shape must have at most 2^26 elements"]),
    ((*WRITE, "--dtype", "float64"), ["--dtype", "'float64'", "bfloat16"]),
    ((*WRITE, "--seed", "-1"), ["--seed", "[0, 2^64)", "'-1'"]),
    ((*WRITE, "--seed", "one"), ["--seed", "[0, 2^64)", "'one'"]),
    ((*WRITE, "--inputs", "odd"), ["--inputs", "'odd'", "mixed"]),
    ((*WRITE, "--columnwise"), ["--columnwise must be left out for swiglu: its file holds both copies without it"]),
    ((*WRITE, "--param", "limit=1"), ["--param NAME=VALUE", "swiglu, which has none"]),
    ((*WRITE, "--set", "two_d=1.5"), ["--set two_d must be true or false"]),
    ((*WRITE, "--out", "x.bin"), ["--out must be a directory that can be written", "'x.bin'"]),
    ((*WRITE, "--out", "x.bin/below"), ["--out must be a directory that can be written", "'x.bin/below'"]),
    (("golden", "--op", "quantize", "--shape", "4x4", "--out", "new"), ["--scaling is required for quantize"]),
    (("golden", "--op", "dequantize", "--shape", "4x4", "--out", "new"), ["--scaling is required for dequantize"]),
    (
        ("golden", "--op", "scaled_swiglu", "--shape", "4x64", "--param", "glu_interleave_size=7", "--out", "new"),
        ["--param glu_interleave_size must be"],
    ),
    (
        ("golden", "--op", "quantize", "--scaling", "nvfp4-stochastic", "--set", "random_bits=x.bin@uint8:16384",
         "--shape", "16x16", "--out", "new"),
        ["--set random_bits must not be given to golden"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "parts"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_use(run, files, monkeypatch, arguments, parts):
    monkeypatch.chdir(files)
    before = sorted(p.name for p in files.iterdir())
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("refops: error: ") and all(part in err for part in parts), err
    assert sorted(p.name for p in files.iterdir()) == before


def test_an_error_inside_is_not_called_bad_use(files, monkeypatch):
    """A ValueError that no rule about arguments raised must not hide as one."""
    monkeypatch.chdir(files)

    def broken(*arguments, **options):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(oracle, "check", broken)
    with pytest.raises(ValueError, match="broadcast"):
        cli.main([*MXFP8, *OUT])


# --- golden files -----------------------------------------------------------------------------------------------------

MATRIX = list(golden_matrix())
ROUND_TRIPS = [next(r for r in MATRIX if r.op == op) for op in dict.fromkeys(r.op for r in MATRIX)]
ROUND_TRIPS += [next(r for r in MATRIX if r.op == "dgelu" and r.scaling == row.scaling) for row in SCALINGS.values()]


def options_of(recipe):
    """The words that make `recipe`, for a scaling of the table."""
    words = ["--op", recipe.op, "--shape", "x".join(map(str, recipe.shape)), "--dtype", recipe.dtype.name]
    words += ["--seed", str(recipe.seed), "--inputs", recipe.inputs]
    if recipe.scaling is not None:
        words += ["--scaling", next(name for name, row in SCALINGS.items() if row.scaling == recipe.scaling)]
    for name, value in recipe.params.items():
        words += ["--param", f"{name}={value.name if isinstance(value, refops.FloatFormat) else value}"]
    return words + ["--columnwise"] * recipe.columnwise


@sampled("recipe", ROUND_TRIPS, 3, in_all=1, ids=[r.file_name for r in ROUND_TRIPS])
def test_golden_file_round_trip(run, tmp_path, recipe):
    """Write it, take its outputs for a kernel's: right. Change one byte of any of them: wrong."""
    code, out, err = run("golden", *options_of(recipe), "--out", tmp_path / "golden")
    path = tmp_path / "golden" / recipe.file_name
    assert (code, err) == (0, "") and str(path) in out.replace("\n", "")
    golden = storage.read_golden(path)
    assert all(name in out for name in golden.arrays)
    outputs = golden.outputs
    save_file(outputs, tmp_path / "out.safetensors")
    check = ("check", "--golden", path, "--outputs")
    assert run(*check, tmp_path / "out.safetensors")[0] == 0
    assert run(*check, tmp_path / "out.safetensors", "--ulp", "0")[0] == 0
    for name, array in outputs.items():
        changed = array.copy()
        # The top byte of the first element: another exponent, beyond any tolerance.
        changed.view(np.uint8).reshape(-1)[array.itemsize - 1] ^= 0x44 if array.itemsize > 1 else 0x08
        save_file(outputs | {name: changed}, tmp_path / "changed.safetensors")
        assert run(*check, tmp_path / "changed.safetensors", NO_DIAGNOSIS)[0] == 1, name


def test_golden_json(run, tmp_path):
    code, out, err = run(*WRITE[:-1], tmp_path / "g", "--json")
    document = json.loads(out)
    assert (code, err, document["directory"]) == (0, "", str(tmp_path / "g"))
    manifest = json.loads((tmp_path / "g" / "manifest.json").read_text())["files"]
    assert {f.pop("file"): f for f in document["files"]} == manifest and len(manifest) == 1


def test_damaged_golden_file(run, files, tmp_path):
    data = bytearray((files / "golden.safetensors").read_bytes())
    data[-1] ^= 1
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(data)
    code, out, err = run("check", "--golden", path, "--outputs", files / "q.safetensors")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--golden must be as it was written" in err and str(path) in err
    assert "differs in 1 of" in err and f"expected 0x{data[-1] ^ 1:02x}, found 0x{data[-1]:02x}" in err


@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_golden_file_with_swizzled_scales(run, tmp_path, op):
    """A dump is expected in the same order; the option may say so once more."""
    words = ("golden", "--op", op, "--scaling", "mxfp8", "--shape", "160x192", "--swizzled-scales", "--out", tmp_path)
    code, out, err = run(*words)
    assert (code, err) == (0, "") and "swizzled in tiles of 128 x 4" in " ".join(out.split())
    (path,) = tmp_path.glob("*.safetensors")
    golden = storage.read_golden(path)
    save_file(golden.outputs, tmp_path / "out.safetensors")
    check = ("check", "--golden", path, "--outputs", tmp_path / "out.safetensors")
    assert run(*check)[0] == run(*check, "--swizzled-scales", "--ulp", "0")[0] == 0
    if op == "quantize":
        q = refops.quantize(golden.inputs["x"], MX, columnwise=True)
        save_file(oracle.operation.arrays_of(q), tmp_path / "out.safetensors")
        assert run(*check, NO_DIAGNOSIS)[0] == 1, "plain scales are not what the file has"


def test_golden_file_of_another_reference(run, files, monkeypatch):
    monkeypatch.chdir(files)
    golden = build_golden(Recipe("swiglu", "mxfp8", (32, 128)))
    golden.arrays["output.rowwise_data"][0, 0] ^= 1
    golden.header["digest"] = storage.digest(golden.header, golden.arrays)
    Path("stale.safetensors").write_bytes(storage.golden_bytes(golden))
    code, out, err = run("check", "--golden", "stale.safetensors", "--outputs", "q.safetensors")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--golden must hold what this refops writes" in err and "whose rowwise_data differs" in err


@pytest.mark.full
@pytest.mark.sweep
def test_all_golden_files(run, tmp_path):
    """The whole matrix, in less than a minute of processor time."""
    import time

    start = time.process_time()
    code, out, err = run("golden", "--all", "--seed", "5", "--out", tmp_path / "all")
    assert time.process_time() - start < 60
    assert (code, err) == (0, "") and f"{len(MATRIX):,} files" in out
    manifest = json.loads((tmp_path / "all" / "manifest.json").read_text())["files"]
    names = {p.name for p in (tmp_path / "all").iterdir()}
    assert names == {"manifest.json", *manifest} == {"manifest.json", *(r.file_name for r in golden_matrix(5))}
    for name in sorted(manifest)[::400]:
        golden = storage.read_golden(tmp_path / "all" / name)
        save_file(golden.outputs, tmp_path / "out.safetensors")
        assert run("check", "--golden", tmp_path / "all" / name, "--outputs", tmp_path / "out.safetensors")[0] == 0


def test_help_names_operations_inputs_and_outputs(run):
    for command in ("check", "golden"):
        code, out, err = run(command, "--help")
        assert (code, err) == (0, "")
        assert all(name in out for name in oracle.OPERATIONS)
    out = run("check", "--help")[1]
    assert all(name in out for name in ("dy", "row_scales", "drow_scales", "rowwise_scale_inv", "amax_history"))
