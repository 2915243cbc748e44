"""Quantized checkpoints and checkpoints in shards: what is read, against formulas and the libraries themselves."""

import json
import math
import random
import struct
import warnings

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from refops import survey
from refops.checkpoints import NAMINGS, Coded, decoded
from refops.files import FileError, UnsupportedTensorError, open_tensors
from refops.survey import SCALINGS

F = np.float32
E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
RNG = np.random.default_rng(0)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F)


def normal(*shape, dtype=E4M3):
    return RNG.standard_normal(shape).astype(dtype)


def positive(*shape, dtype=F):
    return RNG.uniform(0.01, 2, shape).astype(dtype)


def raw(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


def exponents(*shape):
    return RNG.integers(110, 140, shape, np.uint8)


def halves(packed):
    """The E2M1 values of bytes, the lower half of a byte first."""
    return E2M1[np.stack([packed & 15, packed >> 4], -1)].reshape(*packed.shape[:-1], -1)


def blocks(scales, rows, columns, shape):
    """Scales as float32, one for each element."""
    wide = np.repeat(np.repeat(scales.astype(F), rows, axis=-2), columns, axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def two(exponent):
    return np.ldexp(F(1), exponent.astype(int) - 127).astype(F)


def read(path):
    """name -> (array, note) or the reason why there is none."""
    found = {}
    with open_tensors(path) as tensors:
        for tensor in decoded(tensors):
            try:
                found[tensor.name] = tensor.load()
            except UnsupportedTensorError as reason:
                found[tensor.name] = str(reason)
    return found


# --- layouts, by formula ----------------------------------------------------------------------------------------------


def _per_tensor():
    w, s = normal(40, 96), positive()
    return {"weight": w, "weight_scale": s}, w.astype(F) * s, "F8_E4M3 codes, one F32 scale per tensor"


def _per_row():
    w, s = normal(40, 96, dtype=E5M2), positive(40, 1, dtype=ml_dtypes.bfloat16)
    return {"weight": w, "weight_scale": s}, w.astype(F) * s.astype(F), "F8_E5M2 codes, one BF16 scale per row"


def _integers():
    w, s = RNG.integers(-128, 128, (8, 24), np.int8), positive(8)
    return {"weight": w, "weight_scale": s}, w.astype(F) * s[:, None], "I8 codes, one F32 scale per row"


def _tiles():
    w, s = normal(200, 300), positive(2, 3)
    parts = {"weight": w, "weight_scale_inv": s}
    return parts, w.astype(F) * blocks(s, 128, 128, w.shape), "F8_E4M3 codes, one F32 scale per 128x128 block"


def _tiles_of_experts():
    w, s = normal(3, 130, 128), positive(3, 2, 1)
    parts = {"weight": w, "weight_scale_inv": s}
    return parts, w.astype(F) * blocks(s, 128, 128, w.shape), "F8_E4M3 codes, one F32 scale per 128x128 block"


def _mxfp8():
    w, s = normal(8, 96), exponents(8, 3)
    return (
        {"weight": w, "weight_scale": s},
        w.astype(F) * blocks(two(s), 1, 32, w.shape),
        "one E8M0 scale per 1x32 block",
    )


def _mxfp8_of_its_own_dtype():
    w, s = normal(8, 96), exponents(8, 3)
    parts = {"weight": w, "weight_scale": s.view(E8M0)}
    return parts, w.astype(F) * blocks(two(s), 1, 32, w.shape), "one E8M0 scale per 1x32 block"


def _mxfp4_of_experts():
    w, s = raw(2, 8, 3, 16), exponents(2, 8, 3)
    values = halves(w.reshape(2, 8, 48))
    return {"_blocks": w, "_scales": s}, values * blocks(two(s), 1, 32, values.shape), "one E8M0 scale per 1x32 block"


def _nvfp4_divided():
    w, s, whole = raw(32, 32), positive(32, 4, dtype=E4M3), positive(1)
    values = halves(w)
    parts = {"weight_packed": w, "weight_scale": s, "weight_global_scale": whole}
    of_blocks = blocks(s.astype(F) / whole, 1, 16, values.shape)
    return parts, values * of_blocks, "U8 of two E2M1 codes each, one E4M3 scale per 1x16 block, one F32 per tensor"


def _nvfp4_multiplied():
    w, s, whole = raw(2, 32, 32), positive(2, 32, 4, dtype=E4M3), positive(2)
    values = halves(w)
    parts = {"weight": w, "weight_scale": s, "weight_scale_2": whole}
    return parts, values * blocks(s.astype(F) * whole[:, None, None], 1, 16, values.shape), "one F32 per tensor"


LAYOUTS = [
    _per_tensor,
    _per_row,
    _integers,
    _tiles,
    _tiles_of_experts,
    _mxfp8,
    _mxfp8_of_its_own_dtype,
    _mxfp4_of_experts,
    _nvfp4_divided,
    _nvfp4_multiplied,
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_codes_are_dequantized_with_their_scales(tmp_path, layout, monkeypatch):
    """In parts of few rows too: a part begins in the middle of a block."""
    parts, expected, words = layout()
    save_file({f"a.{name}": array for name, array in parts.items()}, tmp_path / "x.safetensors")
    for at_once in (1 << 22, 300):
        monkeypatch.setattr("refops.checkpoints.DECODED_AT_ONCE", at_once)
        ((name, (array, note)),) = read(tmp_path / "x.safetensors").items()
        assert name in ("a.weight", "a.") and words in note
        assert array.dtype == F and array.shape == expected.shape
        np.testing.assert_array_equal(array.view(np.uint32), expected.astype(F).view(np.uint32))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_a_large_tensor_is_dequantized_while_it_is_measured(tmp_path, layout, monkeypatch):
    parts, expected, _ = layout()
    save_file({f"a.{name}": array for name, array in parts.items()}, tmp_path / "x.safetensors")
    named = SCALINGS["mxfp8"]
    whole = survey.tensor_facts(expected), survey.measure(expected, named)
    for module in ("checkpoints", "survey"):
        monkeypatch.setattr(f"refops.{module}.AT_ONCE", 100)
    ((_, (coded, _)),) = read(tmp_path / "x.safetensors").items()
    assert isinstance(coded, Coded)
    assert (survey.tensor_facts(coded), survey.measure(coded, named)) == whole


def write(path, arrays):
    """A safetensors file of name -> (bytes, dtype, shape): also of dtypes that NumPy lacks."""
    header, data = {}, b""
    for name, (content, dtype, shape) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_fp4_of_its_own_dtype(tmp_path):
    w, s = raw(4, 16), exponents(4, 1)
    arrays = {"weight": (w.tobytes(), "F4", [4, 32]), "weight_scale": (s.tobytes(), "F8_E8M0", [4, 1])}
    write(tmp_path / "x.safetensors", arrays)
    array, note = read(tmp_path / "x.safetensors")["weight"]
    np.testing.assert_array_equal(array, halves(w) * two(s))
    assert note == "F4 codes, one E8M0 scale per 1x32 block"


#: Bits of an element, of codes and of scales.
OF_CODES = {"F8_E4M3": 8, "F4": 4, "U8": 8, "I8": 8, "I32": 32}
OF_SCALES = {"F32": 32, "BF16": 16, "F8_E4M3": 8, "F8_E8M0": 8, "U8": 8, "I32": 32}


def test_whatever_a_file_calls_codes_and_scales_is_read_or_refused(tmp_path):
    """Parts of random dtypes and shapes, or none: an array of the shape that was said, or a reason."""
    rng = random.Random(0)
    outcomes = {"decoded": 0, "as it is": 0, "refused": 0}
    for _ in range(400):
        naming, arrays = rng.choice(NAMINGS), {}
        shape = [rng.choice([0, 1, 3, 16, 32, 128, 130]) for _ in range(rng.choice([0, 1, 2, 2, 2, 3]))]
        edges = [1, rng.choice([1, 128]), rng.choice([1, 8, 16, 32, 128])][-len(shape) :]
        of_blocks = [-(-n // edge) for n, edge in zip(shape, edges, strict=False)]
        shapes = [shape, rng.choice([[], of_blocks, of_blocks]), rng.choice([[], [1], shape[:1]])]
        for suffix, of_part in zip((naming.codes, *naming.parts), shapes, strict=False):
            dtype, bits = rng.choice([*(OF_CODES if suffix == naming.codes else OF_SCALES).items()])
            bits *= math.prod(of_part)
            if bits % 8 == 0 and rng.random() < 0.9:
                arrays[f"w{suffix}"] = rng.randbytes(bits // 8), dtype, of_part
        write(tmp_path / "x.safetensors", arrays)
        with open_tensors(tmp_path / "x.safetensors") as tensors, warnings.catch_warnings():
            warnings.simplefilter("error")
            for tensor in decoded(tensors):
                try:
                    array, note = tensor.load()
                    assert tuple(array.shape) == tuple(tensor.shape) and (array.dtype == F or not note)
                    outcomes["decoded" if note else "as it is"] += 1
                except (FileError, UnsupportedTensorError) as reason:
                    assert str(reason)
                    outcomes["refused"] += 1
    assert all(count > 20 for count in outcomes.values()), outcomes


def test_what_is_not_certain_is_left_alone_and_said(tmp_path):
    tensors = {
        "alone.weight": normal(4, 4),
        "odd.weight": normal(64, 64),
        "odd.weight_scale": positive(7, 3),
        "shifted.weight": RNG.integers(-128, 128, (8, 16), np.int8),
        "shifted.weight_scale": positive(8, 1),
        "shifted.weight_zero_point": np.zeros((8, 1), np.int8),
        "bytes.weight": raw(8, 16),
        "bytes.weight_scale": exponents(8, 1),
        "plain": normal(4, 4, dtype=F),
        "plain_scale": positive(1),
        "empty.weight": normal(0, 8),
        "empty.weight_scale": positive(),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    found = read(tmp_path / "x.safetensors")
    assert found["alone.weight"].startswith("F8_E4M3 4x4 codes without scales; looked for alone.weight_scale and")
    assert found["odd.weight"] == (
        "F8_E4M3 64x64 codes with odd.weight_scale F32 7x3: a layout that refops does not know"
    )
    assert "a zero point, which refops does not know" in found["shifted.weight"]
    assert found["bytes.weight"].startswith("uint8 8x16; refops quantizes")
    assert found["empty.weight"] == "no elements (float32 of shape (0, 8))"
    assert found["odd.weight_scale"] == found["odd.weight"]  # one reason, said once of both
    for name in ("plain", "plain_scale"):  # scales of nothing stay, and others' are not taken
        np.testing.assert_array_equal(found[name][0], tensors[name])
        assert found[name][1] == ""


# --- layouts, by those who write them ---------------------------------------------------------------------------------


def _arguments(**options):
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(type="float", symmetric=True, **options)


@pytest.mark.full
@pytest.mark.parametrize("name", ["nvfp4-pack-quantized", "float-quantized", "mxfp8-quantized", "mxfp4-pack-quantized"])
def test_compressed_tensors_reads_the_same_numbers(tmp_path, name):
    """Its codes and scales, compressed by itself; it decompresses to bfloat16 or float32."""
    torch = pytest.importorskip("torch")
    compressors = pytest.importorskip("compressed_tensors.compressors", exc_type=ImportError)
    from compressed_tensors.quantization import QuantizationScheme

    few = {"nvfp4-pack-quantized": (4, 16), "mxfp4-pack-quantized": (4, 32), "mxfp8-quantized": (8, 32)}
    bits, group = few.get(name, (8, None))
    strategy = {"nvfp4-pack-quantized": "tensor_group"}.get(name, "group" if group else "channel")
    weights = _arguments(num_bits=bits, strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = compressors.BaseCompressor.get_value_from_registry(name)
    w = torch.from_numpy(normal(32, 64, dtype=F))
    amax = w.reshape(32, -1, group or 64).abs().amax(-1)
    state = {"weight": w}
    if name.startswith("nvfp4"):
        state["weight_global_scale"] = (448 * 6 / w.abs().max()).reshape(1)
        state["weight_scale"] = (amax / 6 * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    elif group:
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(amax)) - (2 if bits == 4 else 8))
        weights.scale_dtype = torch.uint8
    else:
        state["weight_scale"] = amax / 448
    stored = compressor.compress(state, scheme)
    theirs = compressor.decompress(stored, scheme)["weight"].float().numpy()
    from safetensors.torch import save_file as save_torch

    save_torch({f"a.{key}": value.contiguous() for key, value in stored.items()}, tmp_path / "x.safetensors")
    array, note = read(tmp_path / "x.safetensors")["a.weight"]
    assert "scale" in note and array.shape == (32, 64)
    np.testing.assert_allclose(array, theirs, rtol=2**-8)  # theirs: two roundings to bfloat16
    assert np.count_nonzero(array) > 1000


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    """A folder of two shards and their index."""
    names = {"a.weight": 1, "b.weight": 2, "a.weight_scale": 2}
    arrays = {"a.weight": normal(4, 8), "b.weight": normal(4, 8, dtype=F), "a.weight_scale": np.array(F(0.5))}
    for number in (1, 2):
        save_file({n: arrays[n] for n, shard in names.items() if shard == number}, tmp_path / shard_name(number))
    write_index(tmp_path, {name: shard_name(number) for name, number in names.items()})
    return tmp_path, arrays


def shard_name(number):
    return f"model-0000{number}-of-00002.safetensors"


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("given", ["", "model.safetensors.index.json"], ids=["folder", "index"])
def test_a_checkpoint_in_shards_is_one_list_of_tensors(sharded, given):
    """Codes and their scales may lie in different shards."""
    folder, arrays = sharded
    found = read(folder / given)
    assert list(found) == ["a.weight", "b.weight"]
    np.testing.assert_array_equal(found["a.weight"][0], arrays["a.weight"].astype(F) / 2)
    np.testing.assert_array_equal(found["b.weight"][0], arrays["b.weight"])


def test_a_folder_without_an_index(sharded):
    folder, _ = sharded
    (folder / "model.safetensors.index.json").unlink()
    assert list(read(folder)) == ["a.weight", "b.weight"]
    (folder / shard_name(1)).unlink()
    with pytest.raises(FileError, match=f"must be a folder that holds every shard; got .*'{shard_name(1)}' is missing"):
        read(folder)


def test_a_missing_shard_is_named(sharded):
    folder, _ = sharded
    (folder / shard_name(2)).unlink()
    with pytest.raises(FileError, match=f"every shard of its index .*json': '{shard_name(2)}' is missing"):
        read(folder)


def test_a_damaged_shard_is_named(sharded):
    folder, _ = sharded
    (folder / shard_name(2)).write_bytes((folder / shard_name(2)).read_bytes()[:-1])
    with pytest.raises(FileError, match=rf"must be a readable .safetensors file; got .*{shard_name(2)}"):
        read(folder)


@pytest.mark.parametrize(
    ("weight_map", "rule"),
    [
        ({"c.weight": shard_name(1)}, f"must name tensors that are there; got .*'{shard_name(1)}' has no 'c.weight'"),
        ({"a.weight": "../x.safetensors"}, r"must name .safetensors files in its own folder; got .*'\.\./x\.safe"),
        ({"a.weight": "x.bin"}, r"must name .safetensors files in its own folder; got .*'x\.bin'"),
        ({"a.weight": 3}, "must hold weight_map, an object of tensor names and their shards; got"),
        ([], "must hold weight_map"),
    ],
)
def test_a_bad_index_is_refused(sharded, weight_map, rule):
    folder, _ = sharded
    write_index(folder, weight_map)
    with pytest.raises(FileError, match=rule):
        read(folder)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(FileError, match=r"must be a file, or a folder that holds .safetensors files; got"):
        read(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(FileError, match=r"must be a readable .json file; got"):
        read(tmp_path)
    write_index(tmp_path, {})
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(FileError, match=r"must be a folder with one index; got .*: give one of them"):
        read(tmp_path)
