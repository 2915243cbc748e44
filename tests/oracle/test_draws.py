"""Random numbers of stochastic rounding that elements share: named or noted with their groups, and nothing else is."""

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle
from refops.oracle.draws import CHANCE, GROUPS, Ends, SharedDraws, chance_of_agreement, said
from refops.oracle.fairness import Fairness
from refops.oracle.operation import arrays_of
from tiers import sampled

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
NAME = ("random-number-shared",)
SCALINGS = {
    "1 x 16": refops.NVFP4Scaling(stochastic_rounding=True, seed=3),
    "16 x 16": refops.NVFP4Scaling(two_d=True, stochastic_rounding=True, seed=3),
    "transform": refops.NVFP4Scaling(rht=True, stochastic_rounding=True, seed=3),
}


def normal(shape, seed=0, dtype=BF16):
    return np.random.default_rng(seed).standard_normal(shape, F).astype(dtype)


def draw(rng, shape, group):
    """One byte for each group of (rows, columns) elements; None: as many as there are."""
    edges = [size if edge is None else edge for edge, size in zip(group, shape, strict=True)]
    numbers = rng.integers(0, 256, [-(-size // edge) for size, edge in zip(shape, edges, strict=True)])
    bits = numbers.astype(np.uint8).repeat(edges[0], axis=0).repeat(edges[1], axis=1)
    return np.ascontiguousarray(bits[: shape[0], : shape[1]])


def quantized(x, scaling, bits):
    """The rowwise arrays of a kernel with random bits of its own."""
    settings = {"two_d": scaling.two_d, "rht": scaling.rht, "stochastic_rounding": True, "random_bits": bits}
    return arrays_of(refops.quantize(x, refops.NVFP4Scaling(**settings)))


#: Groups that share a number -> words; a kernel whose rows or tiles are of these sizes.
SHARED = {
    (None, None): "the whole tensor",
    (1, None): "each stored row",
    (None, 1): "each stored column",
    (128, 128): "a tile of 128 x 128 elements",
    (16, 16): "a tile of 16 x 16 elements",
    (1, 128): "128 elements of a stored row",
    (1, 16): "16 elements of a stored row",
    (16, 1): "16 elements of a stored column",
    (1, 4): "4 elements of a stored row",
    (1, 2): "2 elements of a stored row",
}
CASES = [
    (group, scaling, shape, dtype)
    for group in SHARED
    for scaling, shape, dtype in (
        ("1 x 16", (96, 320), F),
        ("16 x 16", (192, 160), BF16),
        ("transform", (256, 384), BF16),
    )
]


@sampled(("group", "scaling", "shape", "dtype"), CASES, 4)
@pytest.mark.parametrize("bits", ["any", "given"])
def test_elements_that_share_a_number_are_named_or_noted(group, scaling, shape, dtype, bits):
    if all(edge is not None and edge >= size for edge, size in zip(group, shape, strict=True)):
        pytest.skip("one group")
    rng, x = np.random.default_rng(11), normal(shape, dtype=dtype)
    outputs = quantized(x, SCALINGS[scaling], draw(rng, shape, group))
    report = oracle.check("quantize", x, outputs, scaling=SCALINGS[scaling], random_bits=bits)
    if report.ok:  # by chance the means are fair: what is right stays right
        [note] = [note for note in report.notes if "random" in note]
        assert bits == "any" and f"one random number rounds {SHARED[group]}," in note
        return
    assert report.diagnosed and report.diagnosis[0].names == NAME, str(report)
    assert f"One random number rounds {SHARED[group]}," in report.diagnosis[0].sentence, str(report)
    assert report.diagnosis[0].place is None and report.diagnosis[0].explained == 1


@pytest.mark.parametrize("op", ["gelu", "swiglu", "dgelu"])
def test_behind_an_activation(op):
    shape = (256, 256)
    inputs = {"x": normal((256, 512 if op == "swiglu" else 256))}
    scaling = refops.NVFP4Scaling(
        stochastic_rounding=True, random_bits=draw(np.random.default_rng(2), shape, (1, None))
    )
    if op == "dgelu":
        inputs = {"dy": normal(shape, 1)} | inputs
        q = refops.activation_grad_quantize("gelu", *inputs.values(), scaling)
    else:
        q = refops.activation_quantize(op, *inputs.values(), scaling)
    report = oracle.check(op, inputs, q, scaling=SCALINGS["1 x 16"], random_bits="any")
    said_so = [str(answer) for answer in report.diagnosis] or list(report.notes)
    assert any("ne random number rounds each stored row," in words for words in said_so), str(report)


def test_one_copy_alone():
    """The rowwise copy shares, the columnwise one draws for each element: the answer says which."""
    shape, scaling = (256, 512), SCALINGS["1 x 16"]
    x = normal(shape)
    own = refops.NVFP4Scaling(stochastic_rounding=True, seed=44)
    outputs = arrays_of(refops.quantize(x, own, rowwise=False, columnwise=True))
    outputs |= quantized(x, scaling, draw(np.random.default_rng(5), shape, (None, None)))
    report = oracle.check("quantize", x, outputs, scaling=scaling, random_bits="any")
    [answer] = report.diagnosis
    assert answer.names == NAME and str(answer.place) == "the rowwise copy" and answer.explained == 1
    quiet = oracle.check("quantize", x, outputs, scaling=scaling, random_bits="any", diagnose=False)
    assert not quiet.ok and not quiet.diagnosis


def test_numbers_that_move_values_towards_one_infinity():
    """floor(x + u): of a negative value the other neighbour is the upper one."""
    shape, fmt = (256, 256), refops.E2M1
    rng, x = np.random.default_rng(7), normal(shape, dtype=F)
    q = refops.quantize(x, refops.NVFP4Scaling())
    scales = refops.decode(q.rowwise_scale_inv[:, :16], refops.E4M3).astype(F).repeat(16, axis=1)
    encode = F(448 * 6) / np.abs(x).max()
    scaled = x * np.minimum(F(1) / (scales * (F(1) / encode)), np.finfo(F).max)
    both = [refops.encode(scaled, fmt, rounding=rounding) for rounding in ("down", "up")]
    both = [codes if codes.shape == shape else refops.formats.unpack_fp4(codes) for codes in both]
    low, high = (refops.formats.E2M1.values[codes] for codes in both)
    with np.errstate(invalid="ignore", divide="ignore"):
        up = (scaled - low) / (high - low) + rng.random((256, 1)) >= 1
    codes = np.where(up, both[1], both[0])
    outputs = arrays_of(q) | {"rowwise_data": (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)}
    report = oracle.check("quantize", x, outputs, scaling=SCALINGS["1 x 16"], random_bits="any")
    said_so = [str(answer) for answer in report.diagnosis] or list(report.notes)
    assert any("ne random number rounds each stored row, upwards or downwards," in words for words in said_so), str(
        report
    )


@pytest.mark.parametrize("bits", ["any", "given"])
@pytest.mark.parametrize("shape", [(256, 512), (80, 208)])
def test_each_copy_by_its_stored_rows(shape, bits):
    """A columnwise copy is stored transposed, and its kernel draws once for each of its rows."""
    rng, x, scaling = np.random.default_rng(6), normal(shape), SCALINGS["1 x 16"]
    outputs = quantized(x, scaling, draw(rng, shape, (1, None)))
    turned = quantized(np.ascontiguousarray(x.T), scaling, draw(rng, shape[::-1], (1, None)))
    outputs |= {name.replace("rowwise", "columnwise"): array for name, array in turned.items()}
    report = oracle.check("quantize", x, outputs, scaling=scaling, random_bits=bits)
    said_so = [str(answer) for answer in report.diagnosis[:1]] or list(report.notes)
    assert any("ne random number rounds each stored row," in words for words in said_so), str(report)
    assert not report.diagnosis or report.diagnosis[0].names == NAME


# --- what must not be called shared -----------------------------------------------------------------------------------


def fixed_bits(value):
    return lambda rng, shape: np.full(shape, value, np.uint8)


def fixed_by_rows(rng, shape):
    """Truncation in even rows, to nearest in odd ones: no number is random."""
    return np.repeat(np.where(np.arange(shape[0]) % 2, 128, 0).astype(np.uint8)[:, None], shape[1], axis=1)


def half_of_the_rows(rng, shape):
    bits = draw(rng, shape, (1, None))
    bits[::2] = draw(rng, shape, (1, 1))[::2]
    return bits


def low_bits(rng, shape):
    return rng.integers(0, 200, shape).astype(np.uint8)


def two_values(rng, shape):
    return rng.choice(np.array([64, 192], np.uint8), shape)


def nearly_shared(rng, shape):
    """The number of the row, in which the lowest four bits are each element's own."""
    return draw(rng, shape, (1, None)) & 0xF0 | draw(rng, shape, (1, 1)) >> 4


OTHERS = {
    "truncation": fixed_bits(0),
    "nearest": fixed_bits(128),
    "up": fixed_bits(255),
    "by rows": fixed_by_rows,
    "half of the rows": half_of_the_rows,
    "low": low_bits,
    "two values": two_values,
    "nearly shared": nearly_shared,
    "independent": lambda rng, shape: draw(rng, shape, (1, 1)),
}


@sampled(("fault", "bits"), [(fault, bits) for bits in ("any", "given") for fault in OTHERS], 2)
def test_other_draws_are_not_called_shared(fault, bits):
    shape = (192, 256)
    x = normal(shape)
    outputs = quantized(x, SCALINGS["1 x 16"], OTHERS[fault](np.random.default_rng(8), shape))
    report = oracle.check("quantize", x, outputs, scaling=SCALINGS["1 x 16"], random_bits=bits)
    assert not any("random-number-shared" in answer.names for answer in report.diagnosis), str(report)
    assert not any("random number" in note for note in report.notes), str(report)
    assert report.ok == (fault == "independent" and bits == "any") or fault in ("two values", "nearly shared")


def test_nearest_rounding_is_not_called_shared():
    x, scaling = normal((256, 512)), SCALINGS["1 x 16"]
    for outputs in (refops.quantize(x, refops.NVFP4Scaling()), refops.quantize(np.abs(x), refops.NVFP4Scaling())):
        inputs = x if (outputs.rowwise_data & 8).any() else np.abs(x)
        report = oracle.check("quantize", inputs, outputs, scaling=scaling, random_bits="any")
        assert not report.ok and not report.diagnosis and not any("random" in note for note in report.notes)


def test_few_elements_are_no_evidence():
    """A chance of 10^-26 needs dozens of elements: 16 agree with one number by accident."""
    x = normal((16, 16))
    bits = draw(np.random.default_rng(1), (16, 16), (16, 2))
    report = oracle.check(
        "quantize", x, quantized(x, SCALINGS["1 x 16"], bits), scaling=SCALINGS["1 x 16"], random_bits="any"
    )
    assert report.ok and not any("16 elements" in note for note in report.notes)


def test_independent_draws_never_agree():
    """Of all groups, in both senses, for flat, few and equal values: the chance that is stated is an upper one."""
    rng = np.random.default_rng(9)
    for number in range(60):
        shape = tuple(rng.integers(1, 90, 2))
        values = (rng.standard_normal(shape) * rng.choice([0.05, 1, 4])).astype(F)
        if number % 3 == 0:
            values = rng.choice(values.ravel()[:3], shape)
        codes = refops.encode(values, refops.E2M1, rounding="stochastic", random_bits=draw(rng, shape, (1, 1)))
        draws = SharedDraws(shape)
        draws.add(slice(0, shape[0]), slice(0, shape[1]), (values, values), codes, refops.E2M1)
        assert draws.all_found() == []


def test_the_chance_is_that_of_independent_draws():
    """Counted: how often 3 elements with independent draws agree with one number."""
    rng, p = np.random.default_rng(4), np.array([[0.2, 0.5, 0.9]])
    trials = 20_000
    agree = sum(Ends(p, rng.random((1, 3)) < p, (1, None)).agree() for _ in range(trials))
    assert abs(np.log(agree / trials) - chance_of_agreement(p, (1, None))) < 0.05 and CHANCE < -50


def test_every_group_has_words_of_its_own():
    words = [said((group, "magnitude")) for group in GROUPS]
    assert len(set(words)) == len(words)


def test_what_is_certain_counts_alone():
    """Values that may lie anywhere between two neighbours are no evidence, whatever their codes."""
    rng, shape = np.random.default_rng(3), (64, 64)
    values = rng.uniform(0.1, 5.9, shape).astype(F)
    codes = refops.encode(values, refops.E2M1, rounding="stochastic", random_bits=draw(rng, shape, (1, None)))
    for high, expected in ((values, ((1, None), "magnitude")), (values * F(1.01), None)):
        draws = SharedDraws(shape)
        draws.add(slice(0, 64), slice(0, 64), (values, high), codes, refops.E2M1)
        assert draws.found() == expected


def test_shared_draws_may_be_fair():
    """Which is why a note says it: the means of many rows are those of fair bits."""
    rng, fairness = np.random.default_rng(1), Fairness()
    values = rng.uniform(0.1, 5.9, (4096, 64)).astype(F)
    bits = draw(rng, values.shape, (1, 16))
    fairness.add(values, refops.encode(values, refops.E2M1, rounding="stochastic", random_bits=bits), refops.E2M1)
    assert not fairness.bias()
