"""The delayed-scaling update: amax history and next scale (quantization spec 2.2)."""

import numpy as np
import pytest
from independent import FLT_MAX, F, bits

import refops
from arrays import assert_same_bits
from refops import E4M3, E5M2, update_delayed_scale

pytestmark = pytest.mark.check

INF, NAN = np.inf, np.nan


def f32(*values):
    """A float32 array of these values."""
    return np.array(values, F)


#: (history, old scale, format, options) -> (new history, new scale). The table of section 2.2, then more of its rules.
TABLE = [
    ([3, 1, 7, 2], 1, E4M3, {}, [0, 7, 2, 3], 64),
    ([3, 1, 7, 2], 1, E4M3, {"algorithm": "most_recent"}, [0, 7, 2, 3], F(448) / F(3)),
    ([3, 9, 7, 2], 1, E4M3, {}, [0, 7, 2, 3], F(448) / F(9)),
    ([0, 1, 7, 2], 5, E4M3, {}, [0, 1, 7, 2], 5),
    ([0, 1, 7, 2], 5, E4M3, {"keep_unused": False}, [0, 7, 2, 0], 64),
    ([1e-37, 0, 0, 0], 1, E4M3, {}, [0, 0, 0, 1e-37], FLT_MAX),
    ([8, 1, 7, 2], 64, E4M3, {}, [0, 7, 2, 8], 56),
    ([INF, 1, 7, 2], 5, E4M3, {}, [0, 7, 2, INF], 5),
    ([7, 0, 0, 0], 1, E5M2, {"margin": 1}, [0, 0, 0, 7], 4096),
    # inf stays in the history and freezes "max" until it rolls out; "most_recent" goes on
    ([2, 1, INF, 4], 5, E4M3, {}, [0, INF, 4, 2], 5),
    ([2, 1, INF, 4], 5, E4M3, {"algorithm": "most_recent"}, [0, INF, 4, 2], 224),
    ([2, INF, 3, 4], 5, E4M3, {}, [0, 3, 4, 2], 5),
    ([2, 3, 4, 7], 5, E4M3, {}, [0, 4, 7, 2], 64),
    # zero amax
    ([0, 0, 0, 0], 5, E4M3, {}, [0, 0, 0, 0], 5),
    ([0, 0, 0, 0], 5, E4M3, {"keep_unused": False}, [0, 0, 0, 0], 5),
    ([0, 3, 3, 3], 5, E4M3, {"algorithm": "most_recent", "keep_unused": False}, [0, 3, 3, 0], 5),
    ([-0.0, 1, 7, 2], 5, E4M3, {}, [-0.0, 1, 7, 2], 5),
    # the newest amax is not finite
    ([INF, 1, 7, 2], 5, E4M3, {"algorithm": "most_recent"}, [0, 7, 2, INF], 5),
    ([NAN, 1, 7, 2], 5, E4M3, {"algorithm": "most_recent"}, [0, 7, 2, NAN], 5),
    ([NAN, NAN], 5, E4M3, {}, [0, NAN], 5),
    # extreme amax: the quotient is the smallest scale, or overflows to FLT_MAX
    ([FLT_MAX, 1], 1, E4M3, {}, [0, FLT_MAX], F(448) / FLT_MAX),
    ([FLT_MAX, 1], 1, E5M2, {}, [0, FLT_MAX], F(57344) / FLT_MAX),
    ([2.0**-149, 0], 1, E4M3, {}, [0, 2.0**-149], FLT_MAX),
    # lengths 1 and 2
    ([7], 1, E4M3, {}, [0], 64),
    ([7], 1, E4M3, {"algorithm": "most_recent"}, [0], 64),
    ([0], 3, E4M3, {}, [0], 3),
    ([0], 3, E4M3, {"keep_unused": False}, [0], 3),
    ([2, 7], 1, E4M3, {}, [0, 2], 64),
    ([7, 2], 1, E4M3, {}, [0, 7], 64),
    ([2, 7], 1, E4M3, {"algorithm": "most_recent"}, [0, 2], 224),
    # margins: 2^-margin times the format's maximum
    ([7, 0], 1, E4M3, {"margin": 3}, [0, 7], 8),
    ([7, 0], 1, E4M3, {"margin": -3}, [0, 7], 512),
    ([3, 0], 1, E5M2, {"margin": 10}, [0, 3], F(56) / F(3)),
    ([2.0**30, 0], 1, E4M3, {"margin": -126}, [0, 2.0**30], FLT_MAX),
]


@pytest.mark.parametrize(("history", "scale", "fmt", "options", "new_history", "new_scale"), TABLE)
def test_table(history, scale, fmt, options, new_history, new_scale):
    history, scale = f32(*history), f32(scale).reshape(())
    before = history.copy()
    rolled, updated = update_delayed_scale(history, scale, fmt, **options)
    assert_same_bits(rolled, f32(*new_history), "history")
    assert type(updated) is np.float32
    assert_same_bits(np.asarray(updated), f32(new_scale).reshape(()), "scale")
    assert_same_bits(history, before, "input history")
    assert not np.shares_memory(rolled, history) and not np.shares_memory(updated, scale)


def test_scale_bits_of_the_specification():
    _, scale = update_delayed_scale(f32(3, 1, 7, 2), f32(1)[0], E4M3, algorithm="most_recent")
    assert bits(scale) == 0x43155555


@pytest.mark.parametrize("keep_unused", [True, False])
def test_columns_are_independent(keep_unused):
    """(L, n): the whole table of length 4 side by side equals column by column."""
    rows = [row for row in TABLE if len(row[0]) == 4 and not row[3].get("margin") and row[2] is E4M3]
    history, scale = f32(*[row[0] for row in rows]).T, f32(*[row[1] for row in rows])
    for algorithm in ("max", "most_recent"):
        together = update_delayed_scale(history, scale, E4M3, algorithm=algorithm, keep_unused=keep_unused)
        for column in range(len(rows)):
            alone = update_delayed_scale(
                history[:, column], scale[column], E4M3, algorithm=algorithm, keep_unused=keep_unused
            )
            assert_same_bits(together[0][:, column], alone[0])
            assert_same_bits(together[1][column : column + 1], alone[1].reshape(1))


@pytest.mark.parametrize("nan", [0x7FC00000, 0x7F800001, 0xFFC00000], ids=hex)
def test_a_nan_of_any_kind_is_ignored_in_any_column(nan):
    """np.fmax drops what stands before a signalling NaN, or not, by its place in the array."""
    column = np.array([nan, 0x40000000, 0], np.uint32).view(F)[:, None]
    for rows in ([0, 1, 2], [1, 0, 2], [1, 2, 0]):
        for columns in (1, 3, 40):
            history = np.repeat(column[rows], columns, axis=1)
            _, scale = update_delayed_scale(history, np.full(columns, 7, F), E4M3, keep_unused=False)
            assert (scale == 224).all()


@pytest.mark.parametrize("history_shape", [(4,), (4, 1), (4, 3), (1, 3), (1,), (4, 0)])
def test_shapes_are_kept(history_shape):
    scale_shape = history_shape[1:]
    history, scale = np.ones(history_shape, F), np.ones(scale_shape, F)
    new_history, new_scale = update_delayed_scale(history, scale, E4M3)
    assert (new_history.shape, new_scale.shape) == (history_shape, scale_shape)
    assert new_history.dtype == new_scale.dtype == np.float32


def test_one_entry_scale_for_a_vector_history():
    """A (1,) scale belongs to a (L,) history too and keeps its shape."""
    _, scale = update_delayed_scale(f32(7, 1), f32(1), E4M3)
    assert_same_bits(scale, f32(64))


def test_callable_algorithm():
    """It sees the history as given, its result is the amax, and it rolls always (TE's Python path)."""
    seen = []

    def smallest(history):
        seen.append(history)
        return history.min(axis=0)

    history = f32(*[[0, 3], [7, 14], [2, 28]])
    new_history, scale = update_delayed_scale(history, f32(5, 1), E4M3, algorithm=smallest)
    assert seen[0] is history
    assert_same_bits(scale, f32(5, F(448) / F(3)))  # amax 0 keeps the scale
    assert_same_bits(new_history, f32([0, 0], [2, 28], [0, 3]))
    _, scale = update_delayed_scale(history[:, 1], f32(1)[0], E4M3, algorithm=lambda h: float(h[1]))
    assert float(scale) == 32.0


@pytest.mark.parametrize("amax", [INF, NAN, 0.0, -1.0])
def test_callable_that_returns_an_unusable_amax_keeps_the_scale(amax):
    _, scale = update_delayed_scale(f32(3, 1), f32(5)[0], E4M3, algorithm=lambda h: F(amax))
    assert float(scale) == 5.0


def test_scale_that_is_not_updated_keeps_its_bits():
    """Whatever it is: a subnormal, FLT_MAX."""
    for value in (2.0**-149, FLT_MAX, 1.0000001):
        _, scale = update_delayed_scale(f32(0, 1), f32(value)[0], E4M3)
        assert bits(scale) == bits(value)


@pytest.mark.parametrize("length", [1, 2, 5, 16])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("keep_unused", [True, False])
def test_sequence_against_a_plain_model(length, algorithm, keep_unused):
    """40 steps of a simulated training loop against section 2.2 written with Python lists, one column at a time."""
    rng = np.random.default_rng(length)
    columns = 6
    history, scale = np.zeros((length, columns), F), np.ones(columns, F)
    model = [([F(0)] * length, F(1)) for _ in range(columns)]
    for step in range(40):
        live = np.exp2(rng.uniform(-20, 20, columns)).astype(F)
        live[rng.random(columns) < 0.2] = 0
        live[rng.random(columns) < 0.1] = INF
        history[0] = live
        model = [([F(live[c]), *h[1:]], s) for c, (h, s) in enumerate(model)]
        margin = int(rng.integers(-2, 3))
        history, scale = update_delayed_scale(
            history, scale, E5M2, margin=margin, algorithm=algorithm, keep_unused=keep_unused
        )
        model = [model_step(h, s, margin, algorithm, keep_unused) for h, s in model]
        for c, (h, s) in enumerate(model):
            assert history[:, c].tolist() == [float(v) for v in h], (step, c)
            assert bits(scale[c]) == bits(s), (step, c)


def model_step(history, scale, margin, algorithm, keep_unused):
    """The pseudocode of section 2.2 for one column."""
    last = history[0]
    if last == 0 and keep_unused:
        return history, scale
    new = [*history[1:], last]
    m = max(new)
    new[0] = F(0)
    amax = m if algorithm == "max" else last
    if np.isfinite(amax) and amax > 0:
        with np.errstate(over="ignore"):
            scale = F(57344 * 2.0**-margin) / amax
        scale = FLT_MAX if np.isinf(scale) else scale
    return new, scale


@pytest.mark.parametrize("columns", [None, 1])
def test_the_loop_of_the_docstring(columns):
    """Settings take the scale as the update returned it, and the update takes the settings' scale back."""
    history = np.zeros(4 if columns is None else (4, columns), F)
    scale = 1.0 if columns is None else np.ones(1, F)
    amaxes = []
    for step in range(1, 7):
        scaling = refops.DelayedScaling(E4M3, scale)
        q = refops.quantize(np.full((2, 3), step, F), scaling)
        history[0] = np.maximum(history[0], q.amax_rowwise[0])
        amaxes.append(q.amax_rowwise[0])
        history, scale = update_delayed_scale(history, scaling.scale if columns is None else scale, E4M3)
        assert np.float32(scale.item()) == F(448) / max(amaxes[-4:])
        assert hash(scaling) == hash(refops.DelayedScaling(E4M3, scaling.scale))
