"""The update of the delayed scale from its history."""

import numpy as np

import refops

from .held_common import F
from .registry import Where, planted

PARAMS = {"fmt": refops.E4M3}


def _history(rng):
    """Eight amaxes of 12 tensors, newest first, none of them 0."""
    return {
        "amax_history": rng.uniform(0.5, 20, (8, 12)).astype(np.float32),
        "scale": rng.uniform(10, 100, 12).astype(np.float32),
    }


def _rolled(history):
    """The history after its step."""
    return np.concatenate([np.zeros_like(history[:1]), history[2:], history[:1]])


@planted("update_delayed_scale", _history, Where(("scale",)), params=PARAMS)
def maximum_stops_before_the_last_entry(amax_history, scale):
    """The loop over the history runs to length - 1: the oldest entry does not enter the maximum."""
    amax = np.zeros(12, F)
    for i in range(len(amax_history) - 1):
        amax = np.maximum(amax, amax_history[i])
    return {"amax_history": _rolled(amax_history), "scale": F(448) / amax}


@planted("update_delayed_scale", _history, Where(("history",)), params=PARAMS)
def history_rolled_the_other_way(amax_history, scale):
    """Row i moves to row i + 1 and the oldest is dropped; rows should move to i - 1, the newest to the end."""
    rolled = np.zeros_like(amax_history)
    for i in range(1, len(amax_history)):
        rolled[i] = amax_history[i - 1]
    return {"amax_history": rolled, "scale": F(448) / amax_history.max(axis=0)}


@planted("update_delayed_scale", _history, Where(("scale",)), params={**PARAMS, "margin": 2})
def margin_multiplies_the_scale(amax_history, scale):
    """The scale is multiplied by 2^margin, where it should be divided by it."""
    amax = amax_history.max(axis=0)
    return {"amax_history": _rolled(amax_history), "scale": (F(448) * F(2.0**2)) / amax}


@planted("update_delayed_scale", _history, Where(("history",)), params=PARAMS)
def newest_row_is_not_cleared(amax_history, scale):
    """Row 0 keeps the newest amaxes after the roll; it should be zero for the next step."""
    rolled = _rolled(amax_history)
    rolled[0] = amax_history[0]
    return {"amax_history": rolled, "scale": F(448) / amax_history.max(axis=0)}


def _some_unused(rng):
    """As `_history`, every fourth tensor not seen in this step."""
    made = _history(rng)
    made["amax_history"][0, 3::4] = 0
    return made


@planted("update_delayed_scale", _some_unused, Where(("history", "scale"), every=("column", 4, (3,))), params=PARAMS)
def unused_tensors_are_updated_too(amax_history, scale):
    """Tensors whose newest amax is 0, unseen in this step, get a new scale and a rolled history; both should stay."""
    return {"amax_history": _rolled(amax_history), "scale": F(448) / amax_history.max(axis=0)}


@planted("update_delayed_scale", _history, Where(("scale",)), params={**PARAMS, "algorithm": "most_recent"})
def most_recent_takes_the_last_row(amax_history, scale):
    """The newest amax is read from the last row of the history, which holds the one before; it is in row 0."""
    return {"amax_history": _rolled(amax_history), "scale": F(448) / amax_history[-1]}


@planted("update_delayed_scale", _history, Where(("scale",)), params=PARAMS)
def reciprocal_stored_as_the_new_scale(amax_history, scale):
    """The new scale is amax / 448, its reciprocal."""
    return {"amax_history": _rolled(amax_history), "scale": amax_history.max(axis=0) / F(448)}
