"""Golden inputs show faults: kernels with one (`faulty_quantizers`) fail on every file that can show it.

`cannot_show` says which files cannot, and why; all others must.
"""

from functools import cache
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from faulty_quantizers import TILE, VECTOR, Kernel

import refops
from refops import oracle
from refops.golden import INPUT_KINDS, Recipe, build_golden, golden_matrix
from refops.golden.preimages import preimage_of
from refops.oracle.geometry import Geometry
from refops.oracle.operation import Case
from refops.survey import SCALINGS, as_matrix
from tiers import sampled

F = np.float32
FAULTS = tuple(Kernel.__dataclass_fields__)
FTZ = ("flushes_inputs", "flushes_results")
MATRIX = list(golden_matrix())
#: Scalings whose bytes follow from bits of the amax.
ROUNDED_OTHERWISE = {n for n, row in SCALINGS.items() if getattr(row.scaling, "scale_rounding", "up") != "up"}
#: Scalings under which a small tensor has few blocks with an amax of their own.
FEW = {"nvfp4-16x16", "nvfp4-row-scaled", "e8m0-128x128"}
#: Operations of all shapes of formulas.
OPERATIONS = ("gelu", "dgelu", "swiglu", "dswiglu")
#: Every operation that quantizes.
OF_ALL = [name for name, operation in oracle.operation.OPERATIONS.items() if operation.takes_scaling]
DTYPES = ("bfloat16", "float16", "float32")
#: What NVFP4's files of default seed do not show: no bfloat16 result lies so near to a change of the code under their
#: amax, and the amax of a dglu comes from the half that is not designed.
NOT_SHOWN = {
    ("silu", "rounds_scales_twice", "rounding", "bfloat16"),
    ("geglu", "rounds_scales_twice", "rounding", "bfloat16"),
    ("clamped_swiglu", "rounds_scales_twice", "rounding", "bfloat16"),
    ("dsituglu", "rounds_scales_twice", "rounding", "bfloat16"),
    ("dglu", "rounds_scales_twice", "mixed", "float32"),
    ("dglu", "rounds_scales_twice", "rounding", "float32"),
}


@cache
def goldens(op, scaling, kinds=tuple(INPUT_KINDS)):
    """(recipe, its golden) of the matrix, for an operation under a scaling and kinds of numbers."""
    named = SCALINGS[scaling].scaling
    recipes = [r for r in MATRIX if (r.op, r.scaling) == (op, named) and r.inputs in kinds and not r.params]
    assert {recipe.inputs for recipe in recipes} == set(kinds)
    return [(recipe, build_golden(recipe)) for recipe in recipes]


def cast_values(golden):
    """float32 (M, K): what is cast, and what the amax of the tensor is taken from."""
    case, scaling = golden.case(), golden.scaling
    exact = case.operation.kind == "quantize"
    with np.errstate(all="ignore"):
        rounded, unrounded = as_matrix(case.source.rounded()), as_matrix(case.source)
    cast = rounded if scaling.path.casts_rounded or exact else unrounded
    if scaling.given is not None:
        return cast, cast
    return cast, rounded if scaling.path.amax_rounded or exact else unrounded


def amax_rounds(golden):
    """Whether rounding to the dtype changes the amax of the tensor, where one is kept."""
    unrounded = np.abs(as_matrix(golden.case().source))
    rounded = np.abs(as_matrix(golden.case().source.rounded()))
    return golden.scaling.layout.amax is not None and unrounded.max() != rounded.max()


def run(kernel, golden, dtype):
    """What a kernel writes for a golden file's inputs."""
    cast, amax_values = cast_values(golden)
    bits = {copy: golden.intermediates.get(f"{copy}_random_bits") for copy in ("rowwise", "columnwise")}
    return kernel.run(cast, golden.scaling, bits, dtype, amax_values)


def expected(golden):
    """The golden outputs in the form of `Kernel.run`."""
    scaling, shape, found = golden.scaling, golden.case().matrix_shape, {}
    whole = tuple(slice(0, size) for size in shape)
    for copy in ("rowwise", "columnwise"):
        geometry, layout = Geometry.of(scaling, copy), scaling.layout
        scales = layout.scales_by_outer(golden.outputs[f"{copy}_scale_inv"], copy == "columnwise")
        outer, blocks = layout.scale_counts(shape, copy == "columnwise")
        scales = scales[:outer, :blocks][:: layout.block[0] if layout.repeated else 1]
        codes = geometry.codes(golden.outputs[f"{copy}_data"], shape, *whole)
        found[copy] = codes, scales, golden.outputs.get(f"amax_{copy}")
    return found


def differs(got, wanted, fmt):
    """Whether values of codes, scales or amaxes differ; -0 is +0, which the oracle accepts from some kernels."""
    codes = np.array_equal(fmt.values[got[0]], fmt.values[wanted[0]], equal_nan=True)
    amax = wanted[2] is None or np.array_equal(np.ravel(got[2]), np.ravel(wanted[2]))
    return not (codes and amax and np.array_equal(got[1], wanted[1]))


def cannot_show(fault, recipe, shape):
    """Why a file of "quantize" cannot show a fault rowwise, or ""."""
    scaling, kind, layout, dtype = recipe.scaling, recipe.inputs, recipe.scaling.layout, recipe.dtype.name
    one_scale, two_level = layout.block is None, layout.two_level
    coded, tiny = layout.scale_format is not None, kind == "tiny"
    few = (
        coded and (layout.block[0] > 1 or layout.amax == "rows"),
        "few blocks have an amax of their own in so small a tensor",
    )
    rules = {
        "flushes_inputs": [
            (dtype == "float16", "float16's subnormals are normal in float32"),
            (scaling.given is not None, "scale 1 makes zero of all that is subnormal"),
            (one_scale and not tiny, "beside the amax of the tensor all that is subnormal is cast to zero"),
        ],
        "flushes_results": [
            (dtype == "float16", "float16's subnormals are normal in float32"),
            (scaling.given is not None, "scale 1 makes zero of all that is subnormal"),
            ((one_scale or two_level) and not tiny, "the scale of the tensor is not subnormal"),
            (coded and not two_level and layout.scale_format != refops.E8M0, "UE5M3 has no such small scale"),
            (
                getattr(scaling, "scale_rounding", "up") == "floor"
                and (scaling.fmt.name, kind) not in (("e4m3", "special"), ("int8", "special"), ("int8", "extreme")),
                "the rule reads bits; only byte 254, of an amax of 2^127 times the largest power of two or more, has "
                "a subnormal multiplier",
            ),
        ],
        "ties_away": [
            (scaling.random is not None, "stochastic rounding has no ties"),
            (scaling.given is not None and tiny, "scale 1 makes zero of all"),
            (tiny and coded and not two_level and layout.scale_format != refops.E8M0, "blocks have scale 0"),
            (
                kind == "extreme" and (one_scale or two_level) and not scaling.power_2_scale and scaling.given is None,
                "the scale of the dtype's largest value is no power of two: hardly a product is a tie",
            ),
        ],
        "flushes_codes": [
            (scaling.fmt.twos_complement, "integers have no subnormals"),
            (scaling.given is not None and tiny, "scale 1 makes zero of all"),
            (tiny and dtype == "bfloat16" and scaling.fmt != refops.E2M1, "bfloat16 has no numbers so small"),
        ],
        "signed_amax": [
            (kind == "special" and one_scale, "infinities of both signs"),
            (tiny and not one_scale and not coded, "scales have reached the largest power of two"),
            (tiny and coded and not two_level and layout.scale_format != refops.E8M0, "blocks have scale 0"),
        ],
        "loses_tail": [
            (kind == "special" and layout.amax == "tensor", "infinities elsewhere"),
            (tiny and not one_scale and not coded, "scales have reached the largest power of two"),
            (
                not any(size % edge for size, edge in zip(shape, TILE, strict=True))
                if layout.amax == "tensor"
                else shape[1] % VECTOR == 0,
                "every vector and tile is whole",
            ),
        ],
        "rounds_scales_up": [
            (layout.scale_format != refops.E8M0, "scales are no powers of two"),
            (getattr(scaling, "scale_rounding", "up") != "up", "the rule reads bits"),
            few,
        ],
        "flushes_scales": [
            (not coded or layout.scale_format == refops.E8M0, "scales have no subnormals"),
            (tiny and layout.scale_format == refops.UE5M3, "the dtype has no numbers so small"),
            few,
        ],
        "rounds_scales_twice": [
            (not coded or layout.scale_format == refops.E8M0, "scales are not cast to a small float"),
            few,
            (tiny and not two_level, "scales are all 0"),
            (tiny and getattr(scaling, "four_over_six", None), "the scale of the smaller error is on no tie"),
            (
                dtype == "bfloat16" and (kind != "extreme" or not two_level),
                "under a power of two that all blocks share a bfloat16 number is no nearer to a tie than bfloat16 sees",
            ),
        ],
    }
    return next((reason for holds, reason in rules[fault] if holds), "")


@sampled("scaling", SCALINGS, 2, in_all=1)
def test_faulty_kernels_fail_on_every_set_and_the_right_one_on_none(scaling):
    for recipe, golden in goldens("quantize", scaling):
        wanted, fmt = expected(golden), golden.scaling.fmt
        right = run(Kernel(), golden, recipe.dtype)
        assert not any(differs(right[copy], wanted[copy], fmt) for copy in wanted), recipe.file_name
        for fault in FAULTS:
            if not cannot_show(fault, recipe, golden.case().matrix_shape):
                got = run(Kernel(**{fault: True}), golden, recipe.dtype)
                assert differs(got["rowwise"], wanted["rowwise"], fmt), f"{fault} passes {recipe.file_name}"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_shown_under_most_scalings(fault):
    """`cannot_show` does not explain everything away."""
    shown = {
        scaling
        for scaling in SCALINGS
        for recipe, golden in goldens("quantize", scaling)
        if not cannot_show(fault, recipe, golden.case().matrix_shape)
    }
    scale_formats = {name: row.scaling.layout.scale_format for name, row in SCALINGS.items()}
    coded = {name for name, fmt in scale_formats.items() if fmt not in (None, refops.E8M0)}
    able = {
        "rounds_scales_up": {n for n, fmt in scale_formats.items() if fmt == refops.E8M0} - ROUNDED_OTHERWISE - FEW,
        "flushes_scales": coded - FEW,
        "rounds_scales_twice": coded - FEW,
    }
    if fault in able:
        assert shown == able[fault]
        return
    assert len(shown) >= len(SCALINGS) - 5
    kinds = {recipe.inputs for recipe, _ in goldens("quantize", "mxfp8") if not cannot_show(fault, recipe, (37, 75))}
    assert kinds == set(INPUT_KINDS)


@sampled(("op", "scaling"), product(OPERATIONS, SCALINGS), 8)
def test_the_results_of_activations_hold_what_shows_faults(op, scaling):
    """In every mixed set, though inputs had to be found by search; a GELU is hardly ever negative."""
    for recipe, golden in goldens(op, scaling, ("mixed",)):
        wanted, fmt = expected(golden), golden.scaling.fmt
        right = run(Kernel(), golden, recipe.dtype)
        assert not any(differs(right[copy], wanted[copy], fmt) for copy in wanted), recipe.file_name
        faults = ["ties_away", "flushes_codes", "loses_tail"] + ["signed_amax"] * (op != "gelu")
        for fault in faults:
            if not cannot_show(fault, recipe, golden.case().matrix_shape):
                got = run(Kernel(**{fault: True}), golden, recipe.dtype)
                assert any(differs(got[copy], wanted[copy], fmt) for copy in wanted), f"{fault}: {recipe.file_name}"


@pytest.mark.parametrize("scaling", ["current", "block-1x128", "mxfp8", "nvfp4-1x16", "mxfp4"])
@pytest.mark.parametrize("fault", ["ties_away", "flushes_codes", "signed_amax"])
def test_the_oracle_says_wrong(fault, scaling):
    golden = build_golden(Recipe("quantize", scaling, (48, 160)))
    codes, _, _ = run(Kernel(**{fault: True}), golden, "bfloat16")["rowwise"]
    data = Geometry.of(golden.scaling, "rowwise").store_codes(codes)
    report = oracle.check("quantize", golden.inputs, {"data": data}, scaling=golden.scaling, diagnose=False)
    assert not report.ok and report.coverage is None


def test_both_roundings_of_ties_are_there():
    """To even is up for some and down for others, of both signs."""
    golden = build_golden(Recipe("quantize", "mxfp8", (64, 128), "float32"))
    x = golden.inputs["x"]
    scaled = x * np.repeat(golden.intermediates["rowwise_encode_scale"], 32, axis=1)
    grid = refops.E4M3.grid
    middle = (grid[1:] + grid[:-1]) / 2
    lower = np.searchsorted(middle, np.abs(scaled))
    tie = middle[np.minimum(lower, len(middle) - 1)] == np.abs(scaled)
    seen = {(bool(odd), bool(negative)) for odd, negative in zip(lower[tie] % 2, scaled[tie] < 0, strict=True)}
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


def test_blocks_are_zero_in_both_directions():
    golden = build_golden(Recipe("quantize", "mxfp8", (96, 160), "float32"))
    for copy in ("rowwise", "columnwise"):
        assert (golden.intermediates[f"{copy}_block_amax"] == 0).any()


@pytest.mark.parametrize("op", ["silu", "swiglu", "dgelu", "dswiglu"])
def test_preimages_are_exact_where_a_result_has_few_bits(op):
    """Numbers of three bits, from 2^-3 to 56; of silu, whose slope exceeds 1, those from 16 on."""
    width = 64 * (1 + op.endswith("swiglu"))
    inputs = {"x": np.ones((32, width), ml_dtypes.bfloat16)}
    if op.startswith("d"):
        inputs = {"dy": np.ones((32, 64), inputs["x"].dtype), **inputs}
    preimage = preimage_of(Case(op, inputs, refops.MXFP8Scaling(refops.E4M3)))
    wanted = np.ldexp(np.arange(4, 8)[:, None] / 4, np.arange(-3, 6)).ravel()
    index, close = preimage.find(wanted)
    exact = preimage.results[index] == wanted
    assert close.all() and exact[wanted >= (16 if op == "silu" else 0)].all()


def reaches_full(golden):
    """Whether some input gives the largest value of the format times a power of two: no bfloat16 has such a square."""
    if golden.op == "quantize":
        return True
    results = preimage_of(golden.case()).results
    normal = np.abs(results) > golden.scaling.fmt.max * 2.0**-120
    return (np.frexp(results[normal] / golden.scaling.fmt.max)[0] == 0.5).any()


#: Operations whose results rounding leaves as they are, in all that golden inputs make.
EXACT = ("relu", "drelu")
#: Where squares have the scales of their rounded values: no square of a bfloat16 number lies where rounding changes a
#: power of two, and of float16 only squares do that are small beside the other rows of a tall block.
SAME_SQUARES = {("bfloat16", *one) for one in product(("mxfp8", "block-1x128"), ("rowwise", "columnwise"))}
SAME_SQUARES.add(("float16", "block-1x128", "columnwise"))


@sampled("op", [op for op in OF_ALL if op != "quantize"], 11)
@pytest.mark.parametrize("scaling", ["delayed-scale-1", "current", "nvfp4-1x16", "nvfp4-rht", "mxfp8", "block-1x128"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_amax_on_the_wrong_side_of_the_rounding_shows(op, scaling, dtype):
    """The amax of the tensor by more than exp and tanh may err; without one, the scale of some block in each copy."""
    golden = build_golden(Recipe(op, scaling, (64, 256), dtype, inputs="rounding"))
    source = golden.case().source
    unrounded, rounded = as_matrix(source), as_matrix(source.rounded())
    if golden.scaling.layout.amax is not None:
        largest = [np.abs(values).max().astype(np.float64) for values in (unrounded, rounded)]
        # The other half of a dglu is larger than the one that is designed.
        assert (abs(largest[0] / largest[1] - 1) > 2.0**-15) != (op in EXACT) or op == "dglu"
        return
    found = Kernel().run(unrounded, golden.scaling, {}, np.dtype(dtype))
    for copy, (_, scales, _) in expected(golden).items():
        is_same = op in EXACT or (op == "srelu" and (dtype, scaling, copy) in SAME_SQUARES)
        assert np.array_equal(found[copy][1], scales) == is_same


#: What may be wrong with the scales of some scalings.
FAULTY_SCALES = {
    "mxfp8": ["rounds_scales_up"],
    "mxfp4": ["rounds_scales_up"],
    "nvfp4-1x16": ["flushes_scales", "rounds_scales_twice"],
}


@sampled(("op", "scaling"), product(OF_ALL, FAULTY_SCALES), 22)
def test_faulty_scales_of_every_operation_show(op, scaling):
    """In every kind that can hold them, in both copies, of all three dtypes."""
    missing = set()
    for dtype, kind in product(DTYPES, INPUT_KINDS):
        golden = build_golden(Recipe(op, scaling, (64, 256), dtype, inputs=kind))
        wanted, is_lossy = expected(golden), kind == "rounding" and amax_rounds(golden)
        for fault in FAULTY_SCALES[scaling]:
            got = run(Kernel(**{fault: True}), golden, np.dtype(dtype))
            for copy in wanted:
                shown = not np.array_equal(got[copy][1], wanted[copy][1])
                exempt = {
                    "rounds_scales_up": not reaches_full(golden) or (kind == "tiny" and dtype == "float16"),
                    "flushes_scales": kind in ("tiny", "extreme"),
                    "rounds_scales_twice": kind == "tiny" or (dtype == "bfloat16" and not is_lossy),
                }[fault]
                missing |= set() if shown or exempt else {(op, fault, kind, dtype)}
    assert missing <= NOT_SHOWN
