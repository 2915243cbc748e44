"""Two faults at once: they are named, in little time, and what refutes a pair early refutes it on the whole."""

import contextlib
import time
from itertools import islice

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle
from refops.oracle.conventions import CONVENTIONS
from refops.oracle.diagnosis.budget import Budget
from refops.oracle.diagnosis.pairs import EQUAL_PAIRS, Pairs
from refops.oracle.diagnosis.search import Search
from refops.oracle.geometry import crop, whole
from refops.oracle.operation import Case
from refops.oracle.replay import NotApplicable, Setting

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
M, K = 224, 352
MXFP8 = refops.MXFP8Scaling(refops.E4M3)
RHT = refops.NVFP4Scaling(rht=True)
STOCHASTIC = refops.NVFP4Scaling(stochastic_rounding=True, seed=7, rht=True)
#: Processor seconds for a wrong dump of 224 x 352: the slowest of 165 took 2.1 where twelve processes shared two cores.
SECONDS = 2.5

#: What took longest: operation, scaling, whether with dbias, two conventions with their choices, and the names.
SLOW = {
    "stochastic": ("quantize", STOCHASTIC, False, ("missing-factor", "max"), ("scale-off-by-one", (1, "both"))),
    "transformed": (
        "quantize",
        RHT,
        False,
        ("neighbour-block-scale", ("stored", 1)),
        ("subnormal-codes-flushed", "codes"),
    ),
    "both ends": (
        "quantize",
        STOCHASTIC,
        False,
        ("neighbour-block-scale", ("both", 1)),
        ("input-shifted", ("x", "", 0, -16)),
    ),
    "activation": ("gelu", RHT, False, ("nibble-sign-leaks", ("low", "copied")), ("scale-off-by-one", (-1, "stored"))),
    "dbias": ("dgelu", MXFP8, True, ("erf-gelu", "float64"), ("other-limit", 127)),
}


def normal(shape=(M, K), seed=0, dtype=BF16):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def dump_of(op, scaling, dbias, *faults, shape=(M, K)):
    """(inputs, outputs of both copies): those of a kernel that follows some conventions."""
    x = normal(shape)
    inputs = {"dy": normal(shape, 1), "x": x} if op.startswith("d") else {"x": x}
    options = {"columnwise": True, **({"dbias": True} if dbias else {})}
    if op == "quantize":
        result = refops.quantize(*inputs.values(), scaling, **options)
    else:
        function = refops.activation_grad_quantize if "dy" in inputs else refops.activation_quantize
        result = function(op.removeprefix("d"), *inputs.values(), scaling, **options)
    q, sums = result if dbias else (result, None)
    outputs = {name: array.copy() for name, array in vars(q).items() if isinstance(array, np.ndarray)}
    case = Case(op, inputs, scaling, {})
    setting = Setting(case, {}, {**outputs, **({"dbias": sums} if dbias else {})})
    setting.probe = whole(setting.shape)
    replay = setting.replay()
    for name, choice in faults:
        CONVENTIONS[name].apply(replay, choice)
    for name, made in replay.run(whole(setting.shape), list(outputs)).items():
        part = crop(case, name, outputs[name], whole(setting.shape))
        part[...] = made.reshape(part.shape)
    if dbias:
        outputs["dbias"] = replay.dbias(slice(0, shape[1]))
    return inputs, outputs


@pytest.mark.parametrize("kind", SLOW)
def test_two_faults_are_named_in_little_time(kind):
    op, scaling, dbias, *faults = SLOW[kind]
    inputs, outputs = dump_of(op, scaling, dbias, *faults)
    oracle.check(op, inputs, outputs, scaling=scaling, diagnose=False)  # tables are made once
    seconds = []
    while not seconds or (min(seconds) > SECONDS and len(seconds) < 4):
        start = time.process_time()
        report = oracle.check(op, inputs, outputs, scaling=scaling)
        seconds.append(time.process_time() - start)
    assert set(report.diagnosis[0].names) == {name for name, _ in faults}, str(report)
    assert min(seconds) <= SECONDS


@pytest.mark.parametrize("op", ["swiglu", "gelu"])
@pytest.mark.parametrize("rule", ["floor", "even"])
def test_codes_under_wrong_scales_hide_no_fault(op, rule):
    """By itself the missing rounding seems to spoil many codes: those whose scale the other fault made."""
    x = normal((64, 512))
    kernel = refops.activation(op, x.astype(F))
    wrong = refops.quantize(kernel, refops.MXFP8Scaling(refops.E4M3, scale_rounding=rule))
    report = oracle.check(op, x, wrong, scaling=MXFP8)
    assert set(report.diagnosis[0].names) == {"missing-rounding", f"scale-{rule}"}, str(report)


@pytest.mark.parametrize("kind", ["transformed", "dbias"])
def test_what_a_sample_refutes_does_not_explain_the_whole(kind):
    op, scaling, dbias, *faults = SLOW[kind]
    inputs, outputs = dump_of(op, scaling, dbias, *faults)
    case = Case(op, inputs, scaling, {})
    right = dump_of(op, scaling, dbias)[1]
    wrong = {name: outputs[name] != array for name, array in right.items()}
    with np.errstate(all="ignore"):
        search = Search(case, outputs, wrong, right, Budget())
        pairs = Pairs(search, search.singles())
        refuted = 0
        for first, second in islice(pairs.tried(), 0, 600, 12):
            pair = (*first.candidate, *second.candidate)
            try:
                early = pairs.leave_too_much(first, second) or search.is_refuted(pair)
                if early:
                    refuted += 1
                    assert not search.evaluate(pair, [whole(search.shape)]).enough, pair
            except (NotApplicable, ValueError, LookupError):
                continue
    assert refuted > 20


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)])
@pytest.mark.parametrize("op", ["gelu", "dgelu", "swiglu", "dswiglu"])
def test_functions_from_a_table_are_the_functions(op, dtype):
    gated = op.endswith("swiglu")
    x = normal((96, 128 if gated else 64), dtype=dtype)
    x[0, :6] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7
    inputs = {"dy": normal((96, 64), 1, dtype), "x": x} if op.startswith("d") else {"x": x}
    setting = Setting(Case(op, inputs, None, {}), {}, {})
    region = whole(setting.shape)
    tabulated, plain = setting.replay(), setting.replay()
    plain.looked_up = lambda name, numbers: getattr(plain.bound, name)(numbers)
    with np.errstate(all="ignore"):
        for columns in (slice(6, 40), slice(6, region.columns.stop)):  # of the second some numbers are known
            looked_up, computed = (replay.compute(region.rows, columns) for replay in (tabulated, plain))
            assert looked_up.tobytes() == computed.tobytes()
        special, expected = (replay.compute(region.rows, slice(0, 6)) for replay in (tabulated, plain))
    assert np.array_equal(special, expected, equal_nan=True)
    assert setting.tables


def test_pairs_end_soon_after_one_that_makes_all_bits(monkeypatch):
    op, scaling, dbias, *faults = SLOW["activation"]
    inputs, outputs = dump_of(op, scaling, dbias, *faults)
    every, tried = Pairs.tried, []

    def recorded(pairs):
        for pair in every(pairs):
            tried.append([result.candidate[0] for result in pair])
            yield pair

    monkeypatch.setattr(Pairs, "tried", recorded)
    report = oracle.check(op, inputs, outputs, scaling=scaling)
    assert report.diagnosis[0].exact
    found = tried.index([(CONVENTIONS[name], choice) for name, choice in faults])
    assert found > EQUAL_PAIRS  # else as many pairs again would be no more
    assert len(tried) <= found + 1 + EQUAL_PAIRS + 1


@pytest.mark.parametrize(
    ("op", "scaling"), [("quantize", STOCHASTIC), ("gelu", RHT), ("quantize", MXFP8)], ids=["random", "transform", "mx"]
)
def test_what_replays_share_is_what_each_would_compute(op, scaling):
    """A replay takes values and codes from those before it: alone it makes the same bits."""
    inputs, outputs = dump_of(op, scaling, False, shape=(48, 64))
    case = Case(op, inputs, scaling, {})
    region = whole(case.matrix_shape)
    shared, alone = Setting(case, outputs, outputs), Setting(case, outputs, outputs)
    alone.cache = shared.cache  # what choices are made from
    candidates = []
    for convention in CONVENTIONS.values():
        if not convention.reads:
            with contextlib.suppress(NotApplicable):
                candidates += [((convention, choice),) for choice in convention.choices_for(shared.replay())]
    chosen = np.random.default_rng(0).permutation(len(candidates))
    pairs = [candidates[i] + candidates[j] for i, j in zip(chosen[0::2], chosen[1::2], strict=False)]

    def run(setting, candidate):
        replay = setting.replay()
        try:
            with np.errstate(all="ignore"):
                for convention, choice in candidate:
                    convention.apply(replay, choice)
                return {name: made.tobytes() for name, made in replay.run(region, list(outputs)).items()}
        except (NotApplicable, ValueError, LookupError) as error:
            return type(error)

    assert len(pairs) > 150
    for candidate in candidates[::2] + pairs[::2]:
        alone.values_cache.clear()
        assert run(shared, candidate) == run(alone, candidate), candidate
    kinds = {key[0] for key in shared.values_cache}
    assert {"prepared", "codes"} <= kinds


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30, 7e37])
def test_the_amax_of_a_transform_is_that_of_all_groups(scale):
    x = (normal(dtype=F) * F(scale)).astype(BF16)
    replay = Setting(Case("quantize", {"x": x}, RHT, {}), {}, {}).replay()
    values = replay.values(slice(0, M), slice(0, K))
    with np.errstate(all="ignore"):
        few, every = (
            np.fmax.reduce(np.abs(part), axis=None)
            for part in (replay.largest_transformed(values, "columnwise"), replay.transform(values, "columnwise"))
        )
    assert np.array_equal(few, every, equal_nan=True)
