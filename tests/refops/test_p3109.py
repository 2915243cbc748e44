"""`refops`' casts against the definitions of IEEE P3109, and against gfloat, which executes them.

Where both differ, a `Difference` says where and what `refops` gives, and it must be exactly that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import p3109
import pytest

import refops
from peers.subjects import comparable
from refops import formats, rounding

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
F = np.float32

#: OCP's formats, UE5M3 and INT8, as formats of P3109's text. INT8's magnitudes are a float's with one exponent bit.
TEXTS = {
    refops.E4M3: p3109.Format(8, 4, bias=7, largest_code=0x7E, nan=0x7F),
    refops.E5M2: p3109.Format(8, 3, bias=15, largest_code=0x7B, infinity=0x7C, nan=0x7F),
    refops.E2M1: p3109.Format(4, 2, bias=1, largest_code=0x7),
    refops.E8M0: p3109.Format(8, 1, bias=128, largest_code=0xFE, nan=0xFF, signed=False, first=1),
    refops.E3M2: p3109.Format(6, 3, bias=3, largest_code=0x1F),
    refops.E2M3: p3109.Format(6, 4, bias=1, largest_code=0x1F),
    refops.UE5M3: p3109.Format(8, 4, bias=15, largest_code=0xFE, nan=0xFF, signed=False),
    refops.INT8: p3109.Format(8, 7, bias=1, largest_code=0x7F),
}
HALVES = {
    np.dtype(ml_dtypes.bfloat16): p3109.Format(16, 8, bias=127, largest_code=0x7F7F, infinity=0x7F80, nan=0x7FFF),
    np.dtype(np.float16): p3109.Format(16, 11, bias=15, largest_code=0x7BFF, infinity=0x7C00, nan=0x7FFF),
}
ROUNDINGS = {
    "nearest_even": "NearestTiesToEven",
    "nearest_away": "NearestTiesToAway",
    "toward_zero": "TowardZero",
    "up": "TowardPositive",
    "down": "TowardNegative",
    "stochastic": "StochasticA",
}

EVEN, AWAY = (rounding.ROUNDING_MODES[mode] for mode in ("nearest_even", "nearest_away"))

each_format = pytest.mark.parametrize("fmt", TEXTS, ids=repr)


# --- the same question to both ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """A cast in the words of `refops`, and in those of P3109.

    Attributes:
        fmt, rounding: `refops`'.
        saturation: P3109's; `refops` has two of the three: SatPropagate is one for infinity, the other for the rest.
        text: the format in P3109's words.
    """

    fmt: formats.ElementFormat
    rounding: str
    saturation: str
    text: p3109.Format = field(repr=False)

    def codes(self, x, random):
        """What `refops` gives, int64."""
        bits = random.astype(np.uint8) if self.rounding == "stochastic" else None

        def encoded(saturate):
            return refops.encode(x, self.fmt, saturate=saturate, rounding=self.rounding, random_bits=bits)

        codes = encoded(self.saturation != "OvfInf")
        if self.saturation == "SatPropagate" and self.text.infinity is not None:
            codes = np.where(np.isinf(x), encoded(False), codes)
        return codes.astype(np.int64)

    def projected(self, x, random):
        """What P3109's Project gives."""
        return p3109.project(x, self.text, ROUNDINGS[self.rounding], self.saturation, random)

    def saturated(self, x, random, text):
        """The numbers of another format that its Encode meets."""
        rounded = p3109.round_to_precision(x, text, ROUNDINGS[self.rounding], random)
        return p3109.saturate(rounded, text, self.saturation, ROUNDINGS[self.rounding])


@dataclass(frozen=True)
class Difference:
    """One way in which `refops`, with OCP and NVIDIA, differs from P3109.

    Attributes:
        name: what it is about.
        theirs, ours: what P3109 says, and what `refops` does.
        happens: f(cast) -> whether it does, for some number.
        where: f(cast, x, random, codes) -> at which numbers; `codes` are those under the differences before.
        codes: f(cast, x, random, codes) -> what `refops` gives there.
    """

    name: str
    theirs: str
    ours: str
    happens: Callable = field(repr=False)
    where: Callable = field(repr=False)
    codes: Callable = field(repr=False)


def overflows(cast, x, random, codes):
    """Where the text gives infinity of a format that is the same, but has infinity where OCP has NaN."""
    text = replace(cast.text, infinity=cast.text.nan)
    return np.isinf(cast.saturated(x, random, text))


#: Below it all sums of x and random parts are float32 numbers, for these are multiples of 2^-149.
FINEST = 2.0**-124


def rounds_the_sum_up(cast, x, random, codes):
    """Where |x| and the random part are less than the smallest number, but not as a float32: tiny x have more bits."""
    smallest = cast.text.magnitudes[1]
    missing = smallest - (np.abs(x) + smallest * random / 2**p3109.RANDOM_BITS)
    return (missing > 0) & (missing <= smallest * 2.0**-25)


def smallest_code(cast, x, random, codes):
    """The code of the smallest number with the sign of x."""
    return 1 + cast.text.sign * (np.signbit(x) & cast.fmt.signed)


def even_one(cast, x, random, codes):
    """The even code of the two next to x, or of the last and what would follow."""
    below = p3109.project(np.abs(x), cast.text, "TowardZero", "SatFinite")
    return below + below % 2


DIFFERENCES = (
    Difference(
        "no sign",
        "A negative number is the smallest one: 0, or E8M0's 2^-127.",
        "Its magnitude is cast.",
        happens=lambda cast: not cast.fmt.signed,
        where=lambda cast, x, random, codes: x < 0,
        codes=lambda cast, x, random, codes: cast.projected(np.abs(x), random),
    ),
    Difference(
        "stochastic sum",
        "StochasticA compares the random part exactly.",
        "It is added in float32, as in TE's form of cvt.rs: just below the smallest number the sum may reach it.",
        happens=lambda cast: cast.rounding == "stochastic" and cast.text.magnitudes[1] >= FINEST,
        where=rounds_the_sum_up,
        codes=smallest_code,
    ),
    Difference(
        "zero",
        "There is one zero: -0, and a negative number that rounds to zero, have code 0.",
        "-0 has a code: the sign stays.",
        happens=lambda cast: cast.fmt.signed and not cast.fmt.twos_complement,
        where=lambda cast, x, random, codes: np.signbit(x) & (codes == 0),
        codes=lambda cast, x, random, codes: np.full_like(codes, cast.text.sign),
    ),
    Difference(
        "NaN without a code",
        "Each format has a NaN.",
        "FP4 and FP6 give their largest number, as NVIDIA's casts do, and INT8 zero.",
        happens=lambda cast: cast.text.nan is None,
        where=lambda cast, x, random, codes: np.isnan(x),
        codes=lambda cast, x, random, codes: np.full_like(codes, cast.fmt.code_of_nan),
    ),
    Difference(
        "overflow without infinity",
        "In a format without infinity OvfInf saturates, and infinity saturates too.",
        "Overflow and infinity are NaN where the format has one, as OCP says of E4M3.",
        happens=lambda cast: cast.saturation == "OvfInf" and cast.text.infinity is None and cast.text.nan is not None,
        where=lambda cast, x, random, codes: overflows(cast, x if cast.fmt.signed else np.abs(x), random, codes),
        codes=lambda cast, x, random, codes: cast.text.nan + cast.text.sign * (np.signbit(x) & cast.fmt.signed),
    ),
    Difference(
        "complements",
        "A negative number has the code of its magnitude, and a sign bit.",
        "INT8 has two's complements.",
        happens=lambda cast: cast.fmt.twos_complement,
        where=lambda cast, x, random, codes: codes > cast.text.sign,
        codes=lambda cast, x, random, codes: 3 * cast.text.sign - codes,
    ),
    Difference(
        "even code",
        "Codes begin with that of zero: the code of 2^k is even where k + bias is even.",
        "E8M0's codes begin with that of 2^-127: of two neighbours the other one is even.",
        happens=lambda cast: cast.text.first == 1 and cast.rounding == "nearest_even",
        where=lambda cast, x, random, codes: (np.frexp(x)[0] == 0.75) | (np.frexp(x)[0] == -0.75),
        codes=even_one,
    ),
)


def expected(cast, x, random):
    """P3109's codes with the differences, and how many numbers each changes."""
    x = exact(x)
    codes, counts = cast.projected(x, random), {}
    for difference in DIFFERENCES:
        if difference.happens(cast):
            where = difference.where(cast, x, random, codes)
            changed = np.where(where, difference.codes(cast, x, random, codes), codes)
            counts[difference.name], codes = np.count_nonzero(changed != codes), changed
    return codes, counts


def casts_of(fmt, text):
    """All that can be asked of a format."""
    for mode, saturation in product(ROUNDINGS, p3109.SATURATIONS):
        if mode != "stochastic" or fmt.has_subnormals:
            yield Cast(fmt, mode, saturation, text)


def assert_explained(fmt, text, x):
    """Every cast of x gives the codes of P3109 with the differences, and each difference that may happen does."""
    random = random_of(x, text)
    for cast in casts_of(fmt, text):
        codes, counts = expected(cast, x, random)
        np.testing.assert_array_equal(cast.codes(x, random), codes, err_msg=repr(cast))
        assert all(counts.values()), (cast, counts)


@np.errstate(invalid="ignore")  # signalling NaN
def exact(x):
    """The same numbers, float64."""
    return x.astype(np.float64)


def agree(ours, theirs):
    """Which values have the same bits, NaN being one."""
    return (ours.view(np.uint32) == theirs.astype(F).view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))


def decoded_otherwise(fmt, text):
    """The codes that `refops` and the text decode to other values."""
    ours, theirs = refops.decode(text.codes.astype(np.uint8), fmt), p3109.decode(text.codes, text)
    return np.flatnonzero(~agree(ours, theirs)).tolist()


# --- numbers ----------------------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore")  # signalling NaN
def halves(dtype):
    """Every number of a 16-bit float, as float32."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(F)


def around(text, steps):
    """Float32 numbers at most so many steps from where a code may change, infinities and NaN.

    The smallest number's 256ths are where StochasticA meets numbers that are finer than a float32 sum.
    """
    values = replace(text, largest_code=text.largest_code + 1).magnitudes
    parts = values[values > 0][0] * np.arange(1 << p3109.RANDOM_BITS) / (1 << p3109.RANDOM_BITS)
    points = np.concatenate([parts, values[:-1], (values[1:] + values[:-1]) / 2]).astype(F)
    bits = points.view(np.uint32).astype(np.int64)[:, None] + np.arange(-steps, steps + 1)
    near = np.clip(bits, 0, 0x7F800000).astype(np.uint32).view(F).ravel()
    return np.concatenate([near, -near, F([np.inf, -np.inf, np.nan])])


def random_of(x, text):
    """Random numbers for StochasticA: the last that does not move x and the first that does, then any two."""
    most = (1 << p3109.RANDOM_BITS) - 1
    finite = exact(np.where(np.isfinite(x), x, 0))
    steps = np.abs(finite) / np.ldexp(1.0, p3109.exponents_of(finite, text) - text.precision + 1)
    number = np.arange(x.size)
    decides = most - np.floor((steps - np.floor(steps)) * (most + 1)).astype(np.int64) + number % 2
    return np.where(number % 4 < 2, np.clip(decides, 0, most), number & most)


# --- refops and the text ----------------------------------------------------------------------------------------------


def test_every_format_has_a_text():
    assert list(TEXTS) == list(refops.FORMATS.values())


@each_format
def test_all_codes_decode_as_the_text_says(fmt):
    """-0 has the code of P3109's NaN; INT8's negative codes are complements, which -1 is in both ways."""
    text = TEXTS[fmt]
    differing = [text.sign] if fmt.signed else []
    if fmt.twos_complement:
        differing = [code for code in range(0x80, 0x100) if code != 0xC0]
    assert decoded_otherwise(fmt, text) == differing
    if fmt.signed:
        assert np.isnan(p3109.decode(text.codes, text)[text.sign])
        assert fmt.values[text.sign].tobytes() == F(-2 if fmt.twos_complement else -0.0).tobytes()


@pytest.mark.parametrize("steps", [2, pytest.param(32, marks=pytest.mark.full)])
@each_format
def test_all_casts_are_projections_but_for_the_differences(fmt, steps):
    assert_explained(fmt, TEXTS[fmt], np.concatenate([*map(halves, HALVES), around(TEXTS[fmt], steps)]))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_stored_as_the_text_says(dtype):
    """float32, and float64 rounded once: all 16-bit numbers, what lies in the middle, and the next on each side."""
    text = HALVES[dtype]
    magnitudes = replace(text, largest_code=text.largest_code + 1).magnitudes
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    assert list(np.flatnonzero(~agree(halves(dtype), p3109.decode(text.codes, text)))) == [text.sign]
    for wide, store in ((F, rounding.stored), (np.float64, rounding.round_once)):
        points = np.concatenate([magnitudes[:-1], middles]).astype(wide)
        near = [np.nextafter(points, wide(end)) for end in (0, np.inf)]
        x = np.concatenate([points, *near, [np.inf, np.nan]]).astype(wide)
        x = np.concatenate([x, -x])
        theirs = p3109.project(exact(x), text, "NearestTiesToEven", "OvfInf")
        with np.errstate(over="ignore"):
            ours = store(x, dtype).view(np.uint16)
        zero = np.signbit(x) & (theirs == 0)
        np.testing.assert_array_equal(ours, np.where(zero, text.sign, theirs))


# --- P3109's own formats ----------------------------------------------------------------------------------------------

OWN = [
    (precision, signed, extended)
    for precision, signed, extended in product(range(1, 9), (True, False), (True, False))
    if precision < 8 + (not signed)
]


def declared(text):
    """A format of P3109 as a row of `refops`, whose NaN follows infinity where there is one: signed ones have none."""
    return refops.FloatFormat(
        f"binary{text.width}p{text.precision}",
        exponent_bits=text.width - text.signed - text.precision + 1,
        mantissa_bits=text.precision - 1,
        bias=text.bias,
        largest_code=text.largest_code,
        infinity_code=text.infinity,
        nan_code=None if text.signed else text.nan,
        signed=text.signed,
    )


@pytest.mark.parametrize(("precision", "signed", "extended"), OWN)
def test_own_formats_are_rows_but_for_the_code_of_nan(precision, signed, extended):
    text = p3109.binary(8, precision, signed=signed, extended=extended)
    if precision > 6:
        with pytest.raises(ValueError, match="up to 5 mantissa bits"):
            declared(text)
        return
    fmt = declared(text)
    assert decoded_otherwise(fmt, text) == ([0x80] if signed else [])
    assert_explained(fmt, replace(text, nan=fmt.nan_code), around(text, 3))


def shown(value):
    """A number as the guide writes it."""
    fraction, exponent = np.frexp(value)
    if 2.0**-4 <= value < 2.0**20:
        return f"{value:.8g}"
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{2 * fraction:g} * 2^{exponent - 1}"


def test_the_guide_has_the_own_formats():
    page = (GUIDE / "fp8_formats.md").read_text()
    for precision in range(1, 9):
        cells = [f"binary8p{precision}"]
        for signed in (True, False):
            if (precision, signed, True) not in OWN:
                cells += ["-"] * 3
                continue
            extended, finite = (p3109.binary(8, precision, signed=signed, extended=e) for e in (True, False))
            largest = f"{shown(extended.magnitudes[-1])}, {shown(finite.magnitudes[-1])}"
            cells += [str(extended.bias), largest, shown(extended.magnitudes[1])]
        assert f"\n| {' | '.join(cells)} |\n" in page


def test_moving_from_ocps_formats_is_as_the_guide_says():
    """E4M3's codes to half their values in binary8p4se; E5M2's to other codes of the same values in binary8p3."""
    codes = np.arange(0x7F)
    own = p3109.binary(8, 4)
    np.testing.assert_array_equal(p3109.decode(codes, own), p3109.decode(codes, TEXTS[refops.E4M3]) / 2)
    values = TEXTS[refops.E5M2].magnitudes
    codes = np.arange(len(values))
    moved = np.where(codes < 4, 2 * codes, codes + 4)
    for extended in (True, False):
        own = p3109.binary(8, 3, extended=extended)
        held = values <= own.magnitudes[-1]
        assert values[~held].tolist() == [57344] * extended
        np.testing.assert_array_equal(p3109.encode(values[held], own), moved[held])
    assert np.isfinite(p3109.decode(np.arange(0x7C, 0x7F), own)).all()


def test_the_guide_names_the_differences():
    rows = []
    for difference in DIFFERENCES:
        concerned = [fmt for fmt, text in TEXTS.items() if any(map(difference.happens, casts_of(fmt, text)))]
        names = "all with a zero" if len(concerned) == len(TEXTS) - 1 else ", ".join(map(repr, concerned))
        rows.append(f"| {difference.name} | {difference.theirs} | {difference.ours} | {names} |")
    assert "\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n" in (GUIDE / "proofs.md").read_text()


# --- section 6.3 of OCP's MX specification ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaling",
    [
        refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor"),
        refops.MXFP8Scaling(refops.E5M2, scale_rounding="floor"),
        refops.MXFP4Scaling(scale_rounding="floor"),
        refops.MXINT8Scaling(),
    ],
    ids=repr,
)
def test_mx_blocks_are_projections_under_the_scale_of_the_specification(scaling):
    """The scale is the power of two of the amax over that of the largest element; x over it is projected, SatFinite."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((512, 64)) * 2.0 ** rng.integers(-140, 120, (512, 1))).astype(F)
    x[:254, :32] = 0
    x[:254, 3] = 2.0 ** np.arange(-126, 128)  # powers of two and their neighbours
    x[:254, 35] = np.nextafter(x[:254, 3], F(0))
    x[254, :32] = 0
    x[255, :32] = -0.0
    cast = Cast(scaling.fmt, "nearest_even", "SatFinite", TEXTS[scaling.fmt])
    blocks = exact(x).reshape(512, 2, 32)
    amax = np.abs(blocks).max(axis=2, keepdims=True)
    largest = np.frexp(amax)[1] - np.frexp(cast.text.magnitudes[-1])[1]
    scales = np.where(amax == 0, -127, np.clip(largest, -127, 127))
    codes, _ = expected(cast, np.ldexp(blocks, -scales), 0)
    q = refops.quantize(x, scaling)
    np.testing.assert_array_equal(q.rowwise_scale_inv[:512, :2], scales[..., 0] + 127)
    data = refops.unpack_fp4(q.rowwise_data) if scaling.fmt.bits == 4 else q.rowwise_data
    np.testing.assert_array_equal(data, codes.reshape(512, 64))


# --- gfloat -----------------------------------------------------------------------------------------------------------

#: UE5M3 it does not have, and its INT8 has -128.
GFLOATS_FORMATS = [fmt for fmt in TEXTS if fmt not in (refops.UE5M3, refops.INT8)]
GFLOATS = {
    "nearest_even": "TiesToEven",
    "nearest_away": "TiesToAway",
    "toward_zero": "TowardZero",
    "up": "TowardPositive",
    "down": "TowardNegative",
    "stochastic": "StochasticFastest",
}


def gfloats_codes(info, x, mode, saturation, random):
    """What gfloat's rounding and encoding give, int64."""
    import gfloat

    chance = {"srbits": random, "srnumbits": p3109.RANDOM_BITS} if mode == "stochastic" else {}
    saturates = saturation == "SatFinite"
    rounded = gfloat.round_ndarray(info, exact(x), gfloat.RoundMode[GFLOATS[mode]], sat=saturates, **chance)
    return gfloat.encode_ndarray(info, rounded).astype(np.int64)


@pytest.mark.parametrize(("precision", "signed", "extended"), OWN)
def test_gfloat_has_the_texts_own_formats_and_codes(precision, signed, extended):
    """Of unsigned formats gfloat takes no negative numbers. P3109 asks for SatFinite where there is no infinity."""
    gfloat = pytest.importorskip("gfloat")
    text = p3109.binary(8, precision, signed=signed, extended=extended)
    info = pytest.importorskip("gfloat.formats").format_info_p3109(
        8,
        precision,
        gfloat.Signedness.Signed if signed else gfloat.Signedness.Unsigned,
        gfloat.Domain.Extended if extended else gfloat.Domain.Finite,
    )
    values = np.array([gfloat.decode_float(info, int(code)).fval for code in text.codes])
    assert agree(values.astype(F), p3109.decode(text.codes, text)).all()
    x = around(text, 3)
    x = x if signed else x[~(x < 0)]
    random = random_of(x, text)
    for mode, saturation in product(ROUNDINGS, ("SatFinite", "OvfInf") if extended else ("SatFinite",)):
        theirs = gfloats_codes(info, x, mode, saturation, random)
        ours = p3109.project(exact(x), text, ROUNDINGS[mode], saturation, random)
        np.testing.assert_array_equal(theirs, ours, err_msg=f"{mode}, {saturation}")


@pytest.mark.parametrize("fmt", GFLOATS_FORMATS, ids=repr)
def test_gfloat_casts_to_ocps_formats_as_refops_does(fmt):
    """Its stochastic sum is exact. It wraps around below 2^-127, and takes no overflow to what a format has not."""
    pytest.importorskip("gfloat")
    info = getattr(pytest.importorskip("gfloat.formats"), f"format_info_ocp_{fmt.name}")
    text = TEXTS[fmt]
    x = np.concatenate([*map(halves, HALVES), around(text, 2)])
    x = x[(np.isnan(x) & (fmt.nan_code is not None)) | (x >= (-np.inf if fmt.signed else fmt.grid[0]))]
    random = random_of(x, text)
    for cast in casts_of(fmt, text):
        if cast.saturation == "SatPropagate" or (cast.saturation == "OvfInf" and fmt.nan_code is None):
            continue
        theirs = gfloats_codes(info, x, cast.rounding, cast.saturation, random)
        if cast.rounding == "stochastic":
            where = rounds_the_sum_up(cast, exact(x), random, theirs)
            theirs = np.where(where, smallest_code(cast, x, random, theirs), theirs)
        ours = cast.codes(x, random)
        np.testing.assert_array_equal(comparable(ours, fmt), comparable(theirs, fmt), err_msg=repr(cast))


# --- seeded faults ----------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")  # what is wrong may be too large
def is_noticed(fmt, text):
    """Whether a code is decoded, or a cast gives a code, that the differences do not explain."""
    true = TEXTS[fmt]
    if text.width == true.width and decoded_otherwise(fmt, text) != decoded_otherwise(fmt, true):
        return True
    x = around(true, 1)
    random = random_of(x, true)
    return any((expected(cast, x, random)[0] != cast.codes(x, random)).any() for cast in casts_of(fmt, text))


def wrong_formats():
    """Each format with each of its parameters made wrong; an unsigned one's width is in no formula."""
    for fmt, text in TEXTS.items():
        wrong = {"signed": not text.signed, "first": 1 - text.first}
        for name in ("width", "precision", "bias", "largest_code", "infinity", "nan"):
            value = getattr(text, name)
            if value is not None and (name != "width" or text.signed):
                wrong[name] = value + 1
        for name, value in wrong.items():
            yield pytest.param(fmt, replace(text, **{name: value}), id=f"{fmt!r}-{name}")


@pytest.mark.parametrize(("fmt", "text"), list(wrong_formats()))
def test_a_wrong_parameter_of_the_text_is_noticed(fmt, text):
    assert is_noticed(fmt, text)


def numbers_of_formulas():
    """Every number in the text's formulas: its function and its place among the function's constants."""
    formulas = [p3109._values, p3109.decode, p3109.exponents_of, p3109.round_to_precision, p3109.saturate, p3109.encode]
    for function in (*formulas, *p3109.ROUND_AWAY.values()):
        for place, value in enumerate(function.__code__.co_consts):
            if type(value) in (int, float):
                yield pytest.param(function, place, id=f"{function.__name__}, {value}")


@pytest.mark.parametrize(("function", "place"), list(numbers_of_formulas()))
def test_a_wrong_number_of_the_text_is_noticed(function, place, monkeypatch):
    numbers = list(function.__code__.co_consts)
    numbers[place] += 1
    monkeypatch.setattr(function, "__code__", function.__code__.replace(co_consts=tuple(numbers)))
    assert any(is_noticed(fmt, text) for fmt, text in TEXTS.items())


@pytest.mark.parametrize(("mode", "other"), list(product(p3109.ROUND_AWAY, repeat=2)))
def test_a_wrong_rounding_of_the_text_is_noticed(mode, other, monkeypatch):
    monkeypatch.setitem(p3109.ROUND_AWAY, mode, p3109.ROUND_AWAY[other])
    assert is_noticed(refops.E2M1, TEXTS[refops.E2M1]) == (mode != other)


@pytest.mark.parametrize(("saturation", "other"), list(product(p3109.SATURATIONS, repeat=2)))
def test_a_wrong_saturation_of_the_text_is_noticed(saturation, other, monkeypatch):
    true = p3109.saturate

    def wrong(x, fmt, name, mode):
        return true(x, fmt, other if name == saturation else name, mode)

    monkeypatch.setattr(p3109, "saturate", wrong)
    assert is_noticed(refops.E5M2, TEXTS[refops.E5M2]) == (saturation != other)


def test_a_wrong_number_of_random_bits_is_noticed(monkeypatch):
    monkeypatch.setattr(p3109, "RANDOM_BITS", 7)
    assert is_noticed(refops.E2M1, TEXTS[refops.E2M1])


@pytest.fixture
def no_tables():
    """Codes are not taken from tables that were made before, nor are the wrong ones afterwards."""
    formats._code_table.cache_clear()
    yield
    formats._code_table.cache_clear()


FINISH, KEY = formats._finish_codes, formats._odd_rounded_key
FAULTS = {
    "ties go away": (rounding.ROUNDING_MODES, "nearest_even", AWAY),
    "ties go to odd": (rounding.ROUNDING_MODES, "nearest_even", lambda *at: EVEN(at[0], ~at[1], at[2])),
    "ties go to even": (rounding.ROUNDING_MODES, "nearest_away", EVEN),
    "up is away from zero": (rounding.ROUNDING_MODES, "up", lambda position, odd, negative: np.full_like(odd, True)),
    "overflow is infinite": (formats, "_finish_codes", lambda code, x, fmt, saturate: FINISH(code, x, fmt, False)),
    "overflow saturates": (formats, "_finish_codes", lambda code, x, fmt, saturate: FINISH(code, x, fmt, True)),
    "zero loses its sign": (
        formats,
        "_finish_codes",
        lambda code, x, fmt, saturate: FINISH(code, np.where(x == 0, 0, x), fmt, saturate),
    ),
    "cut to 16 bits": (formats, "_odd_rounded_key", lambda x, bits: x.view(np.uint32) >> np.uint32(32 - bits)),
    "rounded twice": (formats, "_odd_rounded_key", lambda x, bits: KEY(x.astype(ml_dtypes.bfloat16).astype(F), bits)),
}


@pytest.mark.usefixtures("no_tables")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_refops_is_noticed(fault, monkeypatch):
    home, name, wrong = FAULTS[fault]
    (monkeypatch.setitem if isinstance(home, dict) else monkeypatch.setattr)(home, name, wrong)
    assert is_noticed(refops.E5M2, TEXTS[refops.E5M2])


@pytest.mark.usefixtures("no_tables")
@each_format
def test_a_wrong_row_of_refops_is_noticed(fmt):
    wrong = replace(fmt, fraction_bits=5) if fmt.twos_complement else replace(fmt, largest_code=fmt.largest_code - 1)
    x = around(TEXTS[fmt], 1)
    for cast in casts_of(wrong, TEXTS[fmt]):
        random = random_of(x, TEXTS[fmt])
        assert (expected(cast, x, random)[0] != cast.codes(x, random)).any()


def test_the_unfaulted_is_not_noticed():
    assert not any(is_noticed(fmt, text) for fmt, text in TEXTS.items())
