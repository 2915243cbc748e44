"""What every declared scaling must keep, whatever it is: its rules, its layout, its words. Bits have other tests."""

import ast
import inspect
import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import refops
from arrays import assert_same_quantized
from refops import scalings, survey
from refops.formats import E8M0, UE5M3
from refops.rows import rows_of
from refops.scalings import NAMED, SCALINGS
from refops.scalings.arithmetic import REFERENCE
from refops.scalings.declaration import Choice, Layout, RandomBits, Scaling, require_declared, require_fit
from refops.scalings.rules import E8M0Scaling, MinifloatScaling

F = np.float32
ROWS = pytest.mark.parametrize("name", NAMED)
#: Every exponent of float32 with some mantissas, ascending: 0, subnormals, normal numbers, infinity.
AMAXES = np.sort(
    np.array(
        [e << 23 | m for e in range(255) for m in (0, 1, 0x200000, 0x400000, 0x600000, 0x7FFFFF)] + [0x7F800000],
        np.uint32,
    ).view(F)
)


def shared(scaling, amax):
    """What the blocks of a tensor of that amax share."""
    rule = scaling.tensor_scale(REFERENCE)
    return F(0) if rule is None else rule(np.array([amax], F))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"block": (1, 96)}, r"block must be .* B divides 128, .*; got \(1, 96\)"),
        ({"block": (256, 256)}, r"block must be .*; got \(256, 256\)"),
        ({"block": (2, 32)}, r"block must be \(1, B\) or \(B, B\)"),
        ({"block": (1, 0)}, r"block must be .*; got \(1, 0\)"),
        ({"block": 32}, r"block must be .*; got 32"),
        ({"packed": 2}, "shape_multiple must be divisible by packed, 2; got 1"),
        ({"packed": 3, "shape_multiple": 3}, "packed must be one of 1, 2; got 3"),
        ({"shape_multiple": 0}, "shape_multiple must be an integer in .*; got 0"),
        (
            {"shape_multiple": 16, "columnwise_multiple": 24},
            "columnwise_multiple must be divisible by shape_multiple, 16; got 24",
        ),
        ({"amax": "row"}, "amax must be one of .*; got 'row'"),
        ({"scale_order": None}, "scale_order must be one of .*; got None"),
        ({"padding": 128}, "padding must be a pair; got 128"),
        ({"padding": (0, 4)}, "padding must be an integer in .*; got 0"),
        ({}, "amax must be 'tensor' with block=None, one scale for the tensor; got None"),
        ({"amax": "rows"}, "amax must be 'tensor' with block=None, .*; got 'rows'"),
        ({"amax": "tensor", "two_level": True}, "two_level must be False with block=None, .*; got True"),
        ({"amax": "tensor", "scale_order": "fixed"}, "scale_order must be 'none' with block=None, .*; got 'fixed'"),
        ({"amax": "tensor", "padding": (1, 4)}, r"padding must be \(1, 1\) with block=None, .*; got \(1, 4\)"),
        ({"block": (1, 32)}, r"scale_order must be 'gemm' or 'fixed' with a block, \(1, 32\); got 'none'"),
        (
            {"block": (1, 32), "scale_order": "gemm", "padding": (128, 2)},
            r"padding must be divisible by \(128, 4\), .* scale_order='gemm'; got \(128, 2\)",
        ),
        (
            {"block": (1, 32), "scale_order": "fixed", "repeated": True},
            r"repeated must be False unless a block has several rows; got True with block=\(1, 32\)",
        ),
        (
            {"block": (32, 32), "scale_order": "fixed", "amax": "rows"},
            r"amax must be 'tensor' or None with a square block, \(32, 32\); got 'rows'",
        ),
        (
            {"block": (1, 32), "scale_order": "fixed", "two_level": True},
            "amax must be 'tensor' or 'rows' with two_level=True; got None",
        ),
    ],
)
def test_a_layout_that_nobody_could_walk_is_refused(attributes, message):
    with pytest.raises(ValueError, match=message):
        Layout(**attributes)


def changed(scaling, **attributes):
    """The same settings of a class with other attributes."""
    cls = dataclass(frozen=True)(type("Changed", (type(scaling),), {"__module__": __name__} | attributes))
    return cls(**{field.name: getattr(scaling, field.name) for field in fields(scaling)})


CURRENT, NVFP4 = NAMED["current"].scaling, NAMED["nvfp4-1x16"].scaling
FOUR_OVER_SIX, SQUARES = NAMED["nvfp4-4over6"].scaling, NAMED["nvfp4-16x16"].scaling
RANDOM = RandomBits(0, 0, None)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (changed(NVFP4, fmt=refops.E4M3), "fmt must have 4 bits with packed=2; got E4M3"),
        (
            changed(NVFP4, tensor_scale=lambda self, words: None),
            "tensor_scale must give a rule with two_level=True and None without; got None with two_level=True",
        ),
        (
            changed(NAMED["mxfp8"].scaling, tensor_scale=lambda self, words: abs),
            "tensor_scale must .*; got a rule with two_level=False",
        ),
        (
            changed(NVFP4, multiplier=lambda self, words: None),
            "multiplier must give a rule with a scale_format and None without; got None with scale_format=E4M3",
        ),
        (changed(NVFP4, block_size=32), "block_size must be the edge of the layout's block, 16; got 32"),
        (
            changed(CURRENT, given=F(1), path=replace(CURRENT.path, amax_rounded=True, casts_rounded=False)),
            "path.amax_rounded must equal path.casts_rounded where the scale is given",
        ),
        (
            changed(NAMED["block-1x128"].scaling, given=F(1)),
            "amax must be 'tensor' where the scale is given; got None",
        ),
        (changed(FOUR_OVER_SIX, random=RANDOM), "random must be None with a choice of scales; got RandomBits"),
        (
            changed(FOUR_OVER_SIX, layout=replace(SQUARES.layout, shape_multiple=4)),
            "shape_multiple must be divisible by 16, the edge of a square block, with a choice of scales; got 4",
        ),
        (
            changed(CURRENT, choice=lambda self, words: Choice((), None)),
            "block must not be None with a choice of scales, one for each block; got None",
        ),
        (
            changed(NAMED["block-1x128"].scaling, choice=lambda self, words: Choice((), None)),
            "scale_format must be a format with a choice of scales; got None",
        ),
        (
            changed(NAMED["mxfp8"].scaling, choice=lambda self, words: Choice((), None)),
            "amax must be 'tensor' or 'rows' with a choice of scales; got None",
        ),
    ],
)
def test_what_does_not_fit_the_layout_is_refused(scaling, message):
    with pytest.raises(ValueError, match=f"{message}.* in "):
        require_fit(scaling)


MXFP8, BLOCK, ALONE = (NAMED[name].scaling for name in ("mxfp8", "block-1x128", "nvfp4-ue5m3-alone"))


class TwoLevels(MinifloatScaling):
    """Without a top."""

    fmt, layout, formulas = refops.E2M1, NVFP4.layout, NVFP4.formulas


def with_top(top):
    """Two levels of scales, the larger one's constant `top`."""
    return type("WithTop", (TwoLevels,), {"top": top})()


@pytest.mark.parametrize(
    ("scaling", "error", "message"),
    [
        (
            changed(MXFP8, layout=((1, 4), E8M0)),
            TypeError,
            r"layout of Changed must be Layout\(.*; got \(\(1, 4\), E8M0\)",
        ),
        (type("Bare", (Scaling,), {})(), TypeError, "fmt of Bare must be a FloatFormat or IntegerFormat .*; got None"),
        (type("Bare", (Scaling,), {"fmt": "e4m3"})(), TypeError, "fmt of Bare must be a FloatFormat .*; got 'e4m3'"),
        (changed(CURRENT, path="FUSED"), TypeError, r"path of Changed must be Path\(.*; got 'FUSED'"),
        (changed(CURRENT, formulas="amax"), TypeError, r"formulas of Changed must be Formulas\(.*; got 'amax'"),
        (
            changed(MXFP8, layout=Layout((1, 4), refops.E4M3, scale_order="fixed"), block_size=4),
            ValueError,
            "scale_format must be E8M0 with scales that are powers of two; got E4M3 in ",
        ),
        (
            changed(BLOCK, layout=replace(BLOCK.layout, scale_format=refops.E4M3)),
            ValueError,
            "scale_format must be None with scales in float32; got E4M3 in ",
        ),
        (
            changed(ALONE, layout=replace(ALONE.layout, scale_format=None)),
            ValueError,
            r"scale_format must be a FloatFormat whose values are below 2\^126; got None in ",
        ),
        (
            changed(NVFP4, layout=replace(NVFP4.layout, scale_format=E8M0)),
            ValueError,
            r"scale_format must be a FloatFormat whose values are below 2\^126; got E8M0 in ",
        ),
        (
            type("Bare", (E8M0Scaling,), {"fmt": UE5M3, "layout": MXFP8.layout, "scale_rounding": "up"})(),
            ValueError,
            "fmt must have a sign, as elements have; got UE5M3 in ",
        ),
        (TwoLevels(), TypeError, "TwoLevels must have a top, the largest scale times fmt.max; got none"),
        (with_top(0.0), ValueError, "top of WithTop must be a finite float32: a positive number; got 0.0"),
        (with_top(-5), ValueError, "top of WithTop must be a finite float32: a positive number; got -5"),
        (with_top(1e39), ValueError, r"top of WithTop must be .*; got 1e\+39"),
        (with_top(np.inf), ValueError, "top of WithTop must be .*; got inf"),
        (with_top("2688"), TypeError, "top of WithTop must be .*; got '2688'"),
        (
            with_top(6 * 449),
            ValueError,
            "top must be fmt.max, 6, times a scale .* E4M3 can hold, at most 448; got 2694",
        ),
        (with_top(1e-30), ValueError, "top must be fmt.max, 6, times a scale .* E4M3 can hold, at most 448; got 1e-30"),
        (type("Bare", (Scaling,), {"fmt": refops.E4M3})(), TypeError, "Bare must have a layout; got none"),
        (
            type("Bare", (Scaling,), {"fmt": refops.E4M3, "layout": BLOCK.layout})(),
            TypeError,
            "Bare must have formulas, the rule in words; got none",
        ),
        (
            type("Bare", (Scaling,), {n: getattr(MXFP8, n) for n in ("fmt", "layout", "formulas")})(),
            TypeError,
            "Bare must have block_scale, or scale_code and multiplier; got none",
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_settings_that_the_rules_of_a_base_cannot_serve_are_refused(scaling, error, message):
    with pytest.raises(error, match=f"^{message}"):
        require_fit(scaling)


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"order": "first"}, TypeError, "Later.order must be an integer; got 'first'"),
        ({"gate_multiple": 0}, ValueError, r"Later.gate_multiple must be an integer in \[1, .*; got 0"),
        ({"gate_multiple": 1.5}, TypeError, "Later.gate_multiple must be an integer; got 1.5"),
        ({"title": 3}, TypeError, "Later.title must be a string, the name that tables show; got 3"),
        ({"at_run_time": "seed"}, TypeError, "Later.at_run_time must be a tuple of names; got 'seed'"),
        (
            {"__annotations__": {"order": str}, "order": "first"},
            TypeError,
            "a field of Later must not be named like an attribute of every class; got 'order'",
        ),
        (
            {"__annotations__": {"multiplier": float}, "multiplier": 2.0},
            TypeError,
            "a field of Later must not be named like an attribute of every class; got 'multiplier'",
        ),
    ],
)
def test_class_attributes_that_no_table_could_use_are_refused(attributes, error, message):
    cls = dataclass(frozen=True)(type("Later", (Scaling,), {"title": "later"} | attributes))
    with pytest.raises(error, match=f"^{message}"):
        require_declared(cls)
    with pytest.raises(error, match=f"^{message}"):
        scalings._declared(module(Later=cls, NAMED=()))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (("zz", MXFP8, 3), TypeError, "description of a row of NAMED must be a string; got 3"),
        ((7, MXFP8, "Seven."), TypeError, "name of a row of NAMED must be a string; got 7"),
        (("", MXFP8, "None."), ValueError, "name of a row of NAMED must be of a-z, .*; got ''"),
        (("zz y", MXFP8, "Two."), ValueError, "name of a row of NAMED must be of a-z, .*; got 'zz y'"),
        (("zz", MXFP8, "One.", "yes"), TypeError, "columnwise must be True or False; got 'yes'"),
        (("zz", MXFP8, "One.", False, None), TypeError, "title of a row of NAMED must be a string; got None"),
    ],
)
def test_a_row_that_no_command_could_show_is_refused(values, error, message):
    with pytest.raises(error, match=f"^{message}"):
        scalings._by_name(SCALINGS, [scalings.NamedScaling(*values)])


def test_a_class_that_cannot_be_declared_is_refused():
    class Plain(Scaling):
        title = "no dataclass"

    with pytest.raises(TypeError, match="Plain must be a frozen dataclass"):
        require_declared(Plain)
    with pytest.raises(TypeError, match="Plain must be a frozen dataclass"):
        require_declared(dataclass(Plain))

    @dataclass(frozen=True)
    class Required(Scaling):
        scale: float
        at_run_time = ("scale",)

    with pytest.raises(TypeError, match=r"Required\.at_run_time must name fields with a default; got 'scale'"):
        require_declared(Required)


def test_an_unknown_rounding_of_powers_of_two_is_refused_by_the_base():
    """Where a class does not check it itself, and where it is no field."""

    @dataclass(frozen=True)
    class Field(E8M0Scaling):
        scale_rounding: str = "up"
        fmt, layout = refops.E4M3, NAMED["mxfp8"].scaling.layout

    message = r"scale_rounding must be one of 'up', 'floor', 'even', 'ceil_ocp'; got 'nearest'"
    with pytest.raises(ValueError, match=message):
        Field("nearest")
    with pytest.raises(ValueError, match=message):
        require_fit(changed(NAMED["e8m0-1x128"].scaling, scale_rounding="nearest"))


@pytest.mark.parametrize("at_run_time", [(), ("amax_epsilon",)])
def test_a_declared_epsilon_counts_whether_or_not_code_is_compiled_for_it(at_run_time):
    @dataclass(frozen=True)
    class Bounded(E8M0Scaling):
        amax_epsilon: float = 0.0
        fmt, layout, scale_rounding = refops.E4M3, NAMED["mxfp8"].scaling.layout, "up"

    Bounded.at_run_time = at_run_time
    for epsilon, amax in ((1.0, 1.0), (0.0, 2.0**-30)):
        scaling = Bounded(epsilon)
        code = scaling.scale_code(REFERENCE)
        p = scaling.numbers(np.dtype(F))
        with np.errstate(all="ignore"):
            assert code(F([2.0**-30]), F(0), p) == code(F([amax]), F(0), p)
    for wrong in (-1.0, np.nan, "1"):
        with pytest.raises((TypeError, ValueError), match="amax_epsilon must be a finite float32"):
            Bounded(wrong)


def test_one_level_needs_no_top():
    """What the tensor's amax becomes is no question without a scale of the tensor."""

    class OneLevel(MinifloatScaling):
        fmt, layout, formulas = refops.E2M1, ALONE.layout, ALONE.formulas

    require_fit(OneLevel())
    assert OneLevel().decode_factor(REFERENCE)(np.uint8(0x40), None) == refops.UE5M3.values[0x40]


@pytest.mark.parametrize("name", NAMED)
def test_copies_that_share_codes_do(name):
    """A copy is served by the other's cast, in `refops` and in `fuser`: they hold the same values."""
    scaling = NAMED[name].scaling
    if not scaling.copies_share_codes:
        assert name not in ("current", "block-128x128", "nvfp4-16x16")
        return
    x = np.random.default_rng(0).standard_normal((64, 256), F)
    q = refops.quantize(x, scaling, columnwise=True)
    columnwise = replace(q, rowwise_data=None, rowwise_scale_inv=None)
    assert (refops.dequantize(q) == refops.dequantize(columnwise)).all()
    alone = refops.quantize(x, scaling, rowwise=False, columnwise=True)
    assert (alone.columnwise_data == q.columnwise_data).all()


def test_the_amax_beside_a_given_scale_is_that_of_the_values_that_are_cast():
    """As TE's kernels take it, for the history: not that of values rounded to the input's dtype."""
    x = np.random.default_rng(0).standard_normal((64, 64), F).astype(refops.arguments.BFLOAT16)
    q = refops.activation_quantize("gelu", x, refops.DelayedScaling(refops.E4M3))
    values = refops.activation("gelu", x, out_dtype=F)
    assert q.amax_rowwise == np.abs(values).max() != np.abs(values.astype(x.dtype).astype(F)).max()


@ROWS
def test_multipliers_fall_as_the_block_grows(name):
    """The oracle takes the ends of a range of amaxes for the ends of the range of scales."""
    scaling = NAMED[name].scaling
    for dtype, amax in itertools.product((F, np.float16), (2.0**-100, 1.0, 2.0**100)):
        least, most = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
        amaxes = AMAXES[(least <= AMAXES) & (most >= AMAXES)]
        with np.errstate(all="ignore"):
            rule, numbers = scaling.block_scale(REFERENCE), scaling.numbers(np.dtype(dtype))
            _, multipliers = rule(amaxes, shared(scaling, amax), numbers)
        multipliers = np.broadcast_to(multipliers, amaxes.shape)
        assert (np.diff(multipliers.astype(np.float64)) <= 0).all() and (multipliers > 0).all()


@ROWS
def test_a_tensor_scale_is_the_pair_encode_and_decode(name):
    """The header of a golden file says that encode is a constant / amax; where that is no number it is 1."""
    scaling = NAMED[name].scaling
    rule = scaling.tensor_scale(REFERENCE)
    assert (rule is not None) == scaling.layout.two_level
    if rule is None:
        return
    with np.errstate(all="ignore"):
        encode, decode = rule(AMAXES)
        constant, _ = rule(F(1))
        assert encode.dtype == decode.dtype == F and encode.shape == decode.shape == AMAXES.shape
        quotient = np.minimum(constant / AMAXES, np.finfo(F).max)
        usable = (AMAXES > 0) & (quotient > 0)
        assert (encode == np.where(usable, quotient, F(1))).all() and (decode == F(1) / encode).all()


@ROWS
def test_every_code_has_a_multiplier_and_a_factor(name):
    """NaN where the format of scales has one; never negative for a scale that a rule can give."""
    scaling = NAMED[name].scaling
    fmt = scaling.layout.scale_format
    if fmt is None:
        assert scaling.multiplier(REFERENCE) is None
        return
    codes = np.arange(1 << fmt.bits).astype(np.uint8)
    with np.errstate(all="ignore"):
        multipliers = scaling.multiplier(REFERENCE)(codes, shared(scaling, 1.0))
        factors = scaling.decode_factor(REFERENCE)(codes, F(1))
    assert multipliers.shape == factors.shape == codes.shape and multipliers.dtype == factors.dtype == F
    numbers = (fmt.values >= 0) & ~np.signbit(fmt.values)
    assert (factors[numbers] >= 0).all() and (multipliers[numbers] >= 0).all()
    assert np.isnan(factors[np.isnan(fmt.values)]).all()


@ROWS
def test_a_block_of_zeros_is_zero_and_infinity_is_no_accident(name):
    scaling, columnwise = NAMED[name].scaling, NAMED[name].columnwise
    for value in (0.0, np.inf):
        q = refops.quantize(np.full((32, 128), value, F), scaling, rowwise=not columnwise, columnwise=columnwise)
        restored = refops.dequantize(q)
        assert (restored == 0).all() if value == 0 else (restored >= 0).all()  # NaN neither


@ROWS
@pytest.mark.parametrize("shape", [(64, 256), (2, 32, 128), (32, 32)])
def test_arrays_are_those_of_the_layout(name, shape):
    scaling, layout = NAMED[name].scaling, NAMED[name].scaling.layout
    q = refops.quantize(np.ones(shape, F), scaling, columnwise=not scaling.only_rowwise)
    for columnwise, prefix in enumerate(("rowwise", "columnwise")):
        scales = getattr(q, f"{prefix}_scale_inv")
        if scales is None:
            continue
        counts = layout.scale_counts(q.matrix_shape, columnwise)
        by_outer = layout.scales_by_outer(scales, columnwise)
        assert all(stored >= valid for stored, valid in zip(by_outer.shape, counts, strict=True))
        padding = by_outer.copy()
        padding[: counts[0], : counts[1]] = 0
        assert not padding.any() and by_outer[: counts[0], : counts[1]].all()
        codes = survey.element_codes(q if prefix == "rowwise" else replace(q, rowwise_data=None))
        assert codes.shape == q.matrix_shape and codes.max() < 1 << scaling.fmt.bits
    if layout.scale_order != "fixed":
        assert_same_quantized(q.swizzled().unswizzled(), q)


@ROWS
def test_the_words_say_what_is_computed(name):
    """Sentences are there for every number on the way, and titles for tables."""
    row = NAMED[name]
    assert row.description.endswith(".") and row.title and row.scaling.title
    formulas, layout = row.scaling.formulas, row.scaling.layout
    assert formulas.multiplier and formulas.stored and formulas.decode
    assert bool(formulas.tensor_scale) == layout.two_level == (row.scaling.tensor_scale(REFERENCE) is not None)


@ROWS
def test_compiled_code_has_a_key(name):
    """Equal for settings that differ in numbers of a call alone."""
    scaling = NAMED[name].scaling
    assert hash(scaling.compiled_as) == hash(scaling.compiled_as.compiled_as)
    for field, value in (("seed", 5), ("amax_epsilon", 0.5), ("scale", 3.0)):
        if field in scaling.at_run_time and hasattr(scaling, field):
            assert replace(scaling, **{field: value}).compiled_as == scaling.compiled_as


def test_added_scalings_follow_tes():
    """The order of classes is public: TE's five, then others by name."""
    names = [cls.__name__ for cls in SCALINGS]
    tes = ["DelayedScaling", "CurrentScaling", "BlockScaling", "MXFP8Scaling", "NVFP4Scaling"]
    assert names[: len(tes)] == tes and names[len(tes) :] == sorted(names[len(tes) :])
    assert all(
        getattr(refops, name) is cls and name in refops.__all__ for name, cls in zip(names, SCALINGS, strict=True)
    )


FOLDER = Path(refops.__file__).parent / "scalings"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_rules_hold_no_bare_number(path):
    """Numba reads one as float64 or int64; a rule's numbers are np.float32 or np.uint32 constants with a name."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef) and any(
            ast.unparse(decorator) == "words.function" for decorator in function.decorator_list
        ):
            numbers = [node for node in ast.walk(function) if isinstance(node, ast.Constant) and node.value is not None]
            assert not [ast.unparse(n) for n in numbers if not isinstance(n.value, str)], (
                f"{path.name}: {function.name}"
            )


def test_unknown_settings_are_refused():
    """A class of the caller's, though it derives from a declared one's base, is no declared scaling."""

    class Own(refops.scalings.Scaling):
        pass

    with pytest.raises(TypeError, match=r"scaling must be one of DelayedScaling, .*; got .*file of refops/scalings"):
        refops.quantize(np.ones((32, 32), F), Own())


def test_every_word_is_described():
    words = [name for name, _ in inspect.getmembers(REFERENCE) if not name.startswith("_")]
    text = inspect.getdoc(inspect.getmodule(type(REFERENCE)))
    assert all(f"    {word}" in text or f", {word}(" in text for word in words)


def test_powers_of_two_are_those_of_e8m0():
    byte = np.arange(255)
    assert (REFERENCE.inverse_power(byte).astype(np.float64) * E8M0.values[byte] == 1).all()


@pytest.mark.parametrize("cls", SCALINGS, ids=lambda cls: cls.__name__)
def test_a_flag_of_numpy_is_stored_as_a_bool(cls):
    """So that layouts, formulas and fingerprints of equal settings are equal."""
    flags = [field for field in fields(cls) if field.type in (bool, "bool")]
    given = {"fmt": refops.E4M3} if "fmt" in [field.name for field in fields(cls)] else {}
    for field in flags:
        for value in (field.default, np.bool_(field.default)):
            settings = cls(**given, **{field.name: value})
            assert type(getattr(settings, field.name)) is bool
            assert repr(settings) == repr(cls(**given)) and settings.layout == cls(**given).layout


# --- declarations that are wrong --------------------------------------------------------------------------------------


ROW = NAMED["mxfp4"]


def module(**names):
    """A module of refops/scalings that has these names; its classes are its own."""
    made = ModuleType("refops.scalings.later")
    made.__file__ = "refops/scalings/later.py"
    for value in names.values():
        if isinstance(value, type):
            value.__module__ = made.__name__
    vars(made).update(names)
    return made


@pytest.mark.parametrize("rows", [ROW, [ROW], (ROW, "mxfp4"), None], ids=["one", "list", "a name", "none"])
def test_rows_that_are_no_tuple_of_rows_name_the_file(rows):
    assert rows_of(module(), "NAMED", scalings.NamedScaling, without=("later",)) == ()
    assert rows_of(module(NAMED=(ROW,)), "NAMED", scalings.NamedScaling, without=()) == (ROW,)
    with pytest.raises(TypeError, match=r"^NAMED must be a tuple of NamedScaling.*; got .* in refops/.*later\.py$"):
        rows_of(module(NAMED=rows), "NAMED", scalings.NamedScaling, without=("rules",))


def test_a_scaling_needs_a_title():
    @dataclass(frozen=True)
    class Later(scalings.Scaling):
        pass

    with pytest.raises(TypeError, match=r"Later must have a title.* in refops/scalings/later\.py"):
        scalings._declared(module(Later=Later, NAMED=()))
    Later.title = "later"
    assert scalings._declared(module(Later=Later, NAMED=())) == [Later]


def test_a_file_without_rows_is_refused():
    """NAMES instead of NAMED, or a class that is no dataclass, would declare nothing."""
    with pytest.raises(TypeError, match=r"must have NAMED, a tuple of NamedScaling, .*; got none in .*/later\.py$"):
        rows_of(module(NAMES=(ROW,)), "NAMED", scalings.NamedScaling, without=("rules",))


def test_a_name_that_is_declared_twice_is_named_alone():
    others = [row for row in NAMED.values() if row is not ROW]
    with pytest.raises(TypeError, match=r"declared twice: mxfp4$"):
        scalings._by_name(SCALINGS, [*others, ROW, ROW])
    with pytest.raises(TypeError, match=r"declared twice: MXFP4Scaling$"):
        scalings._by_name((*SCALINGS, refops.MXFP4Scaling), others)
    with pytest.raises(TypeError, match=r"the row 'mxfp4' of NAMED must have a scaling that is declared.*MXFP4Scaling"):
        scalings._by_name(tuple(cls for cls in SCALINGS if cls is not refops.MXFP4Scaling), [ROW])
