"""Conventions of the delayed scale's update."""

import numpy as np

from refops.oracle.conventions.registry import computing
from refops.quantization.delayed import quieted
from refops.scalings.declaration import FLT_MAX

F = np.float32


def require_update(replay):
    """NotApplicable unless this is the update of delayed scales."""
    replay.require(replay.updates)


def require_named_algorithm(replay, name):
    """NotApplicable unless the update takes its amax by algorithm `name`."""
    require_update(replay)
    replay.require(replay.algorithm == name)


@computing(
    "reciprocal-times-maximum",
    "The scale is the format's maximum times a rounded 1 / amax, where TE divides: torch's number / tensor.",
    stage="quotient",
)
def reciprocal_times_maximum(replay):
    require_update(replay)

    def fresh_scale(amax):
        scale = (F(1) / amax * replay.fmt.max) / F(2.0**replay.margin)
        return np.where(np.isinf(scale), FLT_MAX, scale)

    replay.fresh_scale = fresh_scale


@computing(
    "scale-not-updated",
    "The scale is the old one, whatever the amax history holds: what the update makes is not returned.",
    stage="usable",
)
def scale_not_updated(replay):
    require_update(replay)
    replay.usable = lambda amax: np.zeros(amax.shape, bool)


@computing(
    "history-not-rolled",
    "The amax history is not rolled: {what}.",
    stage="roll",
    choices=("unchanged", "cleared"),
)
def history_not_rolled(replay, choice):
    require_update(replay)
    replay.facts["what"] = {"unchanged": "it comes back as it was", "cleared": "only its first row is cleared"}[choice]

    def roll(history):
        kept = history.copy()
        if choice == "cleared":
            kept[0] = 0
        return kept

    replay.roll = roll


@computing(
    "newest-at-the-end",
    "The amax history {what}, where TE rolls it towards row 0 and clears row 0 for the next step.",
    stage="roll",
    choices=("forward", "forward uncleared", "last cleared", "uncleared", "shifted"),
)
def newest_at_the_end(replay, choice):
    require_update(replay)
    replay.facts["what"] = {
        "forward": "is rolled away from row 0",
        "forward uncleared": "is rolled away from row 0, which is not cleared",
        "last cleared": "is rolled towards row 0 and its last row is cleared",
        "uncleared": "is rolled but row 0 is not cleared",
        "shifted": "keeps its newest entry at the end and drops the oldest",
    }[choice]

    def roll(history):
        rolled = np.roll(history, 1 if choice.startswith("forward") else -1, axis=0)
        if choice == "forward":
            rolled[0] = 0
        elif choice == "last cleared":
            rolled[-1] = 0
        elif choice == "shifted":
            rolled[-1] = history[-1]
        return rolled

    replay.roll = roll


@computing(
    "margin-inverted",
    "The scale is multiplied by 2^margin, where TE divides by it.",
    stage="margin",
)
def margin_inverted(replay):
    require_update(replay)
    replay.require(replay.margin)
    replay.margin = -replay.margin


@computing("margin-ignored", "The margin is ignored.", stage="margin")
def margin_ignored(replay):
    require_update(replay)
    replay.require(replay.margin)
    replay.margin = 0


@computing(
    "margin-linear",
    "The margin is {what}, where TE divides the scale by 2^margin.",
    stage="margin",
    choices=("subtracted", "divisor"),
)
def margin_linear(replay, choice):
    require_update(replay)
    margin = replay.margin
    replay.require(margin)
    replay.margin = 0
    replay.facts["what"] = {"subtracted": "subtracted from the format's maximum", "divisor": "a divisor itself"}[choice]
    if choice == "divisor":
        replay.after("fresh_scale", lambda scale: scale / F(margin))
    else:
        replay.fresh_scale = lambda amax: (replay.fmt.max - F(margin)) / amax


@computing(
    "newest-amax-only",
    "The scale follows the newest amax alone, where the maximum of the history was asked for.",
    stage="update-amax",
)
def newest_amax_only(replay):
    require_named_algorithm(replay, "max")
    replay.algorithm = "most_recent"


@computing(
    "maximum-instead-of-newest",
    "The scale follows the maximum of the history, where the newest amax was asked for.",
    stage="update-amax",
)
def maximum_instead_of_newest(replay):
    require_named_algorithm(replay, "most_recent")
    replay.algorithm = "max"


@computing(
    "scale-from-old-history",
    "The scale follows {what}, where TE takes {own}.",
    stage="update-amax",
    choices=("older", "second", "last", "all but the oldest", "first half", "minimum"),
)
def scale_from_old_history(replay, choice):
    require_update(replay)
    replay.require(len(replay.history) > 1)
    replay.facts["what"] = {
        "older": "the history without its newest entry",
        "second": "the entry before the newest",
        "last": "the last row of the history",
        "all but the oldest": "the history without its last row",
        "first half": "the first half of the history",
        "minimum": "the minimum of the history",
    }[choice]
    replay.facts["own"] = "the newest amax" if replay.algorithm == "most_recent" else "the maximum of all"
    half = max(len(replay.history) // 2, 1)
    replay.amax = {
        "older": lambda history: np.fmax.reduce(quieted(history[1:]), axis=0),
        "second": lambda history: history[1],
        "last": lambda history: history[-1],
        "all but the oldest": lambda history: np.fmax.reduce(quieted(history[:-1]), axis=0),
        "first half": lambda history: np.fmax.reduce(quieted(history[:half]), axis=0),
        "minimum": lambda history: np.fmin.reduce(quieted(history), axis=0),
    }[choice]


@computing(
    "scale-from-one-row",
    "The scale follows row {row} of the history, where {own} was asked for.",
    stage="update-amax",
    choices=lambda replay: [] if not replay.updates else range(2, min(len(replay.history) - 1, 64)),
    last=True,
)
def scale_from_one_row(replay, choice):
    require_update(replay)
    replay.facts["row"] = choice
    replay.facts["own"] = "the newest amax" if replay.algorithm == "most_recent" else "the maximum"
    replay.amax = lambda history: history[choice]


@computing(
    "history-mean",
    "The scale follows the mean of the history, where its {own} was asked for.",
    stage="update-amax",
)
def history_mean(replay):
    require_update(replay)
    replay.require(not callable(replay.algorithm))
    replay.facts["own"] = {"max": "maximum", "most_recent": "newest entry"}[replay.algorithm]
    replay.amax = lambda history: history.mean(axis=0, dtype=F)


@computing(
    "unused-rolled",
    "A tensor whose newest amax is 0 is {what}.",
    stage="unused",
)
def unused_rolled(replay):
    require_update(replay)
    replay.require(not callable(replay.algorithm))
    replay.keep_unused = not replay.keep_unused
    replay.facts["what"] = (
        "left as it is, where keep_unused=False rolls its history"
        if replay.keep_unused
        else "updated, where keep_unused=True leaves its history and scale as they are"
    )


@computing(
    "unusable-amax-used",
    "An amax of 0, inf or NaN makes the scale {what}, where TE keeps the old scale.",
    stage="usable",
    choices=("its quotient", "1", "NaN-checked only"),
)
def unusable_amax_used(replay, choice):
    require_update(replay)
    replay.facts["what"] = {"its quotient": "what the division gives", "1": "1"}.get(choice, "what the division gives")
    usable = replay.usable
    if choice == "NaN-checked only":
        replay.usable = lambda amax: ~np.isnan(amax)
        return
    replay.usable = lambda amax: np.ones(amax.shape, bool)
    if choice == "1":
        replay.wrap("fresh_scale", lambda inner, amax: np.where(usable(amax), inner(amax), F(1)))


@computing(
    "scale-overflow",
    "An overflowing scale becomes {what}, where TE takes the largest float32.",
    stage="overflow",
    choices=("inf", "1", "old"),
)
def scale_overflow(replay, choice):
    require_update(replay)
    value = {"inf": F(np.inf), "1": F(1)}.get(choice, replay.scale)
    replay.facts["what"] = {"old": "the old scale"}.get(choice, choice)
    replay.after("fresh_scale", lambda scale: np.where(scale == FLT_MAX, value, scale))


@computing(
    "nan-history",
    "A NaN in the history makes its maximum NaN, where TE ignores it.",
    stage="update-amax",
)
def nan_history(replay):
    require_named_algorithm(replay, "max")
    replay.amax = lambda history: np.maximum.reduce(history, axis=0)
