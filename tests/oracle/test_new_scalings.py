"""A scaling that the oracle has never heard of is judged, and what is wrong with a kernel of it is named.

The scalings are those of `declared_scalings` and of this file. Their right outputs are those of `refops`, and of
formulas that are evaluated exactly; their wrong ones are those of another declaration, or right ones stored wrongly.
"""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stored_wrongly import on_scales, reciprocal, swapped, transposed

import refops
import refops.scalings
from declared_scalings import CHECKED, Of128
from declared_scalings import declared as known
from refops import Block64Scaling, MXFP4Scaling, oracle
from refops.formats import E2M1, E4M3, E8M0, UE5M3
from refops.oracle.operation import arrays_of
from refops.scalings.declaration import Choice, Layout, Scaling
from refops.scalings.rules import E8M0Scaling

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Lines(MXFP4Scaling):
    """MXFP4 with lines of another size."""

    size: int = 16

    @property
    def layout(self):
        return replace(super().layout, block=(1, self.size))


@dataclass(frozen=True)
class Relative(Scaling):
    """E2M1 with one UE5M3 byte for 16 elements, relative to the amax of the tensor: NVFP4 with a wider scale."""

    level: bool = True
    largest: float = 448.0
    down: bool = False

    title, fmt = "relative fours", E2M1
    layout = Layout(
        block=(1, 16),
        scale_format=UE5M3,
        padding=(128, 4),
        packed=2,
        amax="tensor",
        two_level=True,
        scale_order="gemm",
        shape_multiple=16,
        columnwise_multiple=16,
    )

    def tensor_scale(self, words):
        top, where, at_most, level = F(self.largest * 6), words.where, words.at_most, self.level

        def scale(amax):
            encode = where((amax > 0) & (amax <= F(3e38)), at_most(top / amax, F(3e38)), F(1))
            encode = encode if level else np.ones_like(encode)
            return encode, F(1) / encode

        return scale

    def scale_code(self, words):
        encode = words.encode(UE5M3)
        return lambda amax, tensor_scale, p: encode(amax * (tensor_scale[0] * (F(1) / F(6))))

    def multiplier(self, words):
        decode, shrink = words.decode(UE5M3), F(0.75 if self.down else 1)
        return lambda code, tensor_scale: words.reciprocal_to_scale(decode(code) * tensor_scale[1]) * shrink

    def decode_factor(self, words):
        decode, down = words.decode(UE5M3), F(1) / F(self.largest * 6)
        return lambda stored, amax: (decode(stored) * amax) * down


@dataclass(frozen=True)
class OwnRule(Of128):
    """The power of two above amax / max, or the one below that."""

    above: bool = True

    def scale_code(self, words):
        encode, largest, above = words.encode(E8M0, "up"), F(self.fmt.max), self.above

        def code(amax, tensor_scale, p):
            byte = encode(amax / largest)
            return byte if above else np.where(byte > 0, byte - np.uint8(1), byte)

        return code


@dataclass(frozen=True)
class Chosen(Relative):
    """The better of the byte that maps a block's maximum to 6 and of one half as large again; no field asks for it."""

    title = "chosen fours"

    def choice(self, words):
        encode, multiplier, down = words.encode(UE5M3), self.multiplier(words), F(1) / F(self.largest * 6)

        def candidate(factor):
            def code(amax, tensor_scale, p):
                byte = encode(amax * (tensor_scale[0] * (F(1) / F(6))) * factor)
                return byte, multiplier(byte, tensor_scale)

            return code

        def error(value, scale, amax, x):
            return np.abs((value * scale * amax) * down - x)

        return Choice((candidate(F(1)), candidate(F(1.5))), error)


@dataclass(frozen=True)
class ChosenPowers(E8M0Scaling):
    """E4M3 in lines of 32, any shape: the better of the power of two above amax / 448 and the one below that."""

    title, scale_rounding, fmt = "chosen powers", "up", E4M3
    layout = Layout(block=(1, 32), scale_format=E8M0, amax="tensor", scale_order="fixed")

    def choice(self, words):
        encode, largest = words.encode(E8M0, "up"), F(self.fmt.max)

        def candidate(factor):
            def code(amax, tensor_scale, p):
                byte = encode(amax * factor / largest)
                return byte, words.inverse_power(byte)

            return code

        return Choice((candidate(F(1)), candidate(F(0.5))), lambda value, scale, amax, x: np.abs(value * scale - x))


@pytest.fixture(autouse=True)
def declared():
    """The scalings that no package knows among those that there are."""
    with known(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            refops.scalings, "SCALINGS", (*refops.scalings.SCALINGS, Lines, Relative, OwnRule, Chosen, ChosenPowers)
        )
        yield


NEW = CHECKED | {"lines of 16": Lines(), "relative": Relative(), "own rule": OwnRule(), "chosen": Chosen()}


def normal(shape=(128, 256), seed=0):
    return np.random.default_rng(seed).standard_normal(shape, F).astype(BF16)


def spread(shape=(128, 256), seed=0):
    """Blocks of all sizes of numbers."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape, F) * 2.0 ** rng.integers(-12, 12, shape)).astype(BF16)


def dump(x, scaling, columnwise=True):
    return arrays_of(refops.quantize(x, scaling, columnwise=columnwise))


@pytest.mark.parametrize("shape", [(3, 45), (1, 33), (64, 96)])
@pytest.mark.parametrize("columnwise", [False, True])
def test_a_choice_in_partial_blocks_is_judged(shape, columnwise):
    x, scaling = spread(shape), ChosenPowers()
    outputs = dump(x, scaling, columnwise)
    oracle.check("quantize", x, outputs, scaling=scaling).raise_for_mismatch()
    for name, array in outputs.items():
        if array.dtype == np.uint8:
            wrong = array.copy()
            wrong.flat[-1] ^= 2
            report = oracle.check("quantize", x, {**outputs, name: wrong}, scaling=scaling)
            assert not report.ok, name


def named(x, outputs, scaling, op="quantize"):
    """The first answer on a dump that must be wrong."""
    report = oracle.check(op, x, outputs, scaling=scaling)
    assert not report.ok
    assert not any("diagnosis failed" in note for note in report.notes), report.notes
    return report.diagnosis[0].names if report.diagnosis else ()


# --- right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("shape", [(128, 256), (112, 416)])
@pytest.mark.parametrize("make", [normal, spread])
def test_right_outputs_are_accepted(name, make, shape):
    scaling, x = NEW[name], make(shape)
    assert oracle.check("quantize", x, dump(x, scaling), scaling=scaling).ok
    for op, of in (("gelu", x), ("swiglu", x[:, :256])):
        assert oracle.check(op, of, arrays_of(refops.activation_quantize(op, of, scaling)), scaling=scaling).ok
    q = refops.quantize(x, scaling)
    assert oracle.check("dequantize", q, refops.dequantize(q)).ok


@pytest.mark.parametrize("name", [name for name, one in NEW.items() if one.path.amax_rounded])
@pytest.mark.parametrize("seed", range(3))
def test_exactly_evaluated_formulas_are_accepted(name, seed):
    """Another evaluation of the same function: float64, rounded once. Other bits, and right."""
    scaling, x = NEW[name], spread((128, 512), seed)
    act, gate = x[:, :256].astype(np.float64), x[:, 256:].astype(np.float64)
    with np.errstate(all="ignore"):
        exact = (act / (1 + np.exp(-act)) * gate).astype(BF16)
    assert oracle.check("swiglu", x, dump(exact, scaling), scaling=scaling).ok


# --- wrong ---------------------------------------------------------------------------------------------------------


#: Scaling, what is stored instead of the right outputs, the name.
STORED: dict[str, tuple[Scaling, Any, str]] = {
    "mxfp4: nibbles exchanged": (MXFP4Scaling(), swapped, "swapped-nibbles"),
    "mxfp4: bytes one too high": (MXFP4Scaling(), on_scales(lambda s: s + np.uint8(1)), "scale-off-by-one"),
    "mxfp4: encode scales stored": (MXFP4Scaling(), reciprocal(E8M0), "inverted-scale"),
    "mxfp4: GEMM order": (MXFP4Scaling(), on_scales(refops.swizzle), "scales-swizzled"),
    "mxfp4: scales transposed": (MXFP4Scaling(), transposed, "scales-transposed"),
    "relative: nibbles exchanged": (Relative(), swapped, "swapped-nibbles"),
    "relative: GEMM order": (Relative(), on_scales(refops.swizzle), "scales-swizzled"),
    "relative: bytes one too low": (Relative(), on_scales(lambda s: s - (s > 0)), "scale-off-by-one"),
    "relative: E4M3 stored": (
        Relative(),
        on_scales(lambda s: refops.encode(UE5M3.values[s], E4M3)),
        "other-scale-format",
    ),
    "chosen: nibbles exchanged": (Chosen(), swapped, "swapped-nibbles"),
    "64: encode scales stored": (Block64Scaling(E4M3, False), on_scales(lambda s: F(1) / s), "inverted-scale"),
    "64: scales transposed": (Block64Scaling(E4M3, False), transposed, "scales-transposed"),
    "own rule: bytes one too high": (OwnRule(), on_scales(lambda s: s + np.uint8(1)), "scale-off-by-one"),
}


@pytest.mark.parametrize("what", STORED)
def test_what_is_stored_wrongly_is_named(what):
    scaling, change, name = STORED[what]
    x = spread((128, 512))
    assert named(x, change(dump(x, scaling, columnwise=False)), scaling) == (name,)


@pytest.mark.parametrize(
    ("scaling", "read", "name"),
    [
        (MXFP4Scaling(), lambda q: replace(q, rowwise_data=swapped(arrays_of(q))["rowwise_data"]), "swapped-nibbles"),
        (MXFP4Scaling(), lambda q: replace(q, rowwise_scale_inv=q.rowwise_scale_inv + np.uint8(1)), "scale-off-by-one"),
        (Relative(), lambda q: replace(q, amax_rowwise=F([448 * 6])), "missing-global-scale"),
        (
            Block64Scaling(E4M3, False),
            lambda q: replace(q, rowwise_scale_inv=F(1) / q.rowwise_scale_inv),
            "inverted-scale",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_read_wrongly_is_named(scaling, read, name):
    """Dequantization of what a kernel takes the arrays for."""
    q = refops.quantize(spread(), scaling)
    assert named(q, refops.dequantize(read(q)), None, "dequantize") == (name,)


WIDE = refops.NVFP4Scaling(scale_format=refops.UE5M3)
ALONE = refops.NVFP4Scaling(scale_format=refops.UE5M3, tensor_level=False)
#: Right settings, settings that a kernel follows instead, the name.
FOLLOWED = {
    "64: powers of two": (Block64Scaling(E4M3, False), Block64Scaling(E4M3), "power-of-two-extra"),
    "64: no powers of two": (Block64Scaling(E4M3), Block64Scaling(E4M3, False), "power-of-two-missing"),
    "relative: no tensor level": (Relative(), Relative(level=False), "missing-global-scale"),
    "relative: another flag": (Relative(), Relative(down=True), "other-setting"),
    "own rule: another flag": (OwnRule(), OwnRule(above=False), "other-setting"),
    "UE5M3: no tensor level": (WIDE, ALONE, "missing-global-scale"),
    "UE5M3: a tensor level": (ALONE, WIDE, "other-setting"),
    "UE5M3: E4M3 scales": (WIDE, refops.NVFP4Scaling(), "other-scale-format"),
    "E4M3: UE5M3 scales": (refops.NVFP4Scaling(), WIDE, "other-scale-format"),
}


@pytest.mark.parametrize("what", FOLLOWED)
def test_another_setting_is_named(what):
    own, other, name = FOLLOWED[what]
    x = normal((256, 512)) * np.repeat([1, 1.25, 1.5, 1.75], 128).astype(BF16)  # maxima all over a power of two
    outputs = {n: a for n, a in dump(x, other, columnwise=False).items() if "amax" not in n}
    assert named(x, outputs, own) == (name,)


@pytest.mark.parametrize("size", [16, 64])
def test_another_block_size_is_named(size):
    """From the data alone, and with the scales of the blocks that begin where the right ones do."""
    x = normal()
    q = refops.quantize(x, Lines(size=size))
    assert named(x, {"data": q.rowwise_data}, MXFP4Scaling()) == ("wrong-block-size",)
    scales = np.zeros((128, 8), np.uint8)
    of_each = q.rowwise_scale_inv[:, : 256 // size]
    scales[:] = of_each[:, ::2] if size == 16 else np.repeat(of_each, 2, axis=1)
    assert named(x, {"data": q.rowwise_data, "scale": scales}, MXFP4Scaling()) == ("wrong-block-size",)


@pytest.mark.parametrize("name", ["mxfp4", "64"])
def test_neighbours_scales_are_named(name):
    scaling, x = NEW[name], spread()
    outputs = dump(x, scaling, columnwise=False)
    blocks = x.shape[1] // scaling.layout.block[1]
    scales = outputs["rowwise_scale_inv"].copy()
    by_outer = scaling.layout.scales_by_outer(scales, False)
    by_outer[:, :blocks] = np.roll(by_outer[:, :blocks], -1, axis=1)
    assert named(x, outputs | {"rowwise_scale_inv": scales}, scaling) == ("neighbour-block-scale",)


def test_roundings_on_the_way_are_named():
    """Amaxes of values that are not rounded, where the path rounds."""
    x = normal((128, 512))
    unrounded = on_path(Of128(), replace(Of128().path, casts_rounded=False))
    outputs = arrays_of(refops.activation_quantize("swiglu", x, unrounded))
    assert named(x, outputs, Of128(), "swiglu") == ("missing-rounding",)


def on_path(scaling, path):
    """The same settings on another path."""
    changed = replace(scaling)
    object.__setattr__(changed, "path", path)
    return changed


def test_what_nothing_explains_is_unknown():
    x, rng = normal((64, 128)), np.random.default_rng(1)
    for scaling in (MXFP4Scaling(), Relative(), Chosen(), Block64Scaling(E4M3, False)):
        outputs = dump(x, scaling, columnwise=False)
        outputs["rowwise_data"] = rng.integers(0, 256, outputs["rowwise_data"].shape, dtype=np.uint8)
        assert named(x, outputs, scaling) == ()
