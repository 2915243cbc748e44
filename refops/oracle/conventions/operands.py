"""Conventions of operands: one half of a row read for the other, a missing activation or factor, another row."""

from dataclasses import dataclass

import numpy as np

from refops.oracle.conventions.formulas import lay_out, require_activation, require_gated, sides_of
from refops.oracle.conventions.registry import computing
from refops.oracle.geometry import as_slice
from refops.tiles import RowLayout

F = np.float32
HALVES = ("act", "gate")


@computing(
    "half-read-twice",
    "The {missing} half is never read: {read} is read in its place.",
    stage="gate",
    choices=HALVES,
    alone=True,
)
def half_read_twice(replay, choice):
    require_gated(replay)
    replay.facts["read"], replay.facts["missing"] = choice, HALVES[choice == "act"]

    def halves(inner, rows, h):
        read = inner(rows, h)[HALVES.index(choice)]
        return read, read

    replay.wrap("halves", halves)


@computing(
    "function-missing",
    "The halves are multiplied, act times gate: the activation function is not applied to act.",
    stage="function",
    alone=True,
)
def function_missing(replay):
    require_gated(replay)
    replay.value = lambda act: act
    replay.derivative = np.ones_like


@computing(
    "other-half-missing",
    "A half is not multiplied by the other one: {what}.",
    stage="product",
    alone=True,
)
def other_half_missing(replay):
    require_gated(replay)
    if replay.gradient:
        replay.facts["what"] = "the gradient of act lacks the gate, that of gate the activation"
        replay.backward_act = lambda dy, act, gate: dy * replay.derivative(act)
        replay.backward_gate = lambda dy, act, gate: dy * replay.gate_slope(gate)
    else:
        replay.facts["what"] = "the activation lacks the gate"
        replay.wrap("forward", lambda inner, act, gate, scale: inner(act, None, scale))


@computing(
    "gate-with-offset",
    "The gate is taken plus 1, as clamped SwiGLU does: {own} has no such offset.",
    stage="gate",
    alone=True,
)
def gate_with_offset(replay):
    require_gated(replay)
    replay.require(replay.bound.gate(np.zeros(1, F))[0] == 0)
    replay.facts["own"] = replay.operation.name
    replay.after("gate", lambda gate: gate + F(1))


@computing(
    "both-halves-activated",
    "The activation is applied to the gate as well.",
    stage="gate",
    alone=True,
)
def both_halves_activated(replay):
    require_gated(replay)
    replay.gate, replay.gate_slope = replay.value, replay.derivative


#: Columns of which act and gate alternate in kernels that lay them out for their tiles; one by one is gate-interleaved.
RUNS = (2, 4, 8, 16, 32, 64, 128)


@computing(
    "gate-interleaved-by-runs",
    "Act and gate alternate every {run} columns in {where}, where {own}.",
    stage="gate",
    choices=lambda replay: [(side, run) for run in RUNS for side in sides_of(replay)],
    alone=True,
)
def gate_interleaved_by_runs(replay, choice):
    require_gated(replay)
    side, run = choice
    replay.require(replay.width % run == 0 and run < replay.width)
    own = replay.case.params.get("glu_interleave_size", 0)
    replay.facts["run"] = run
    replay.facts["own"] = f"they do every {own}" if own else "TE has them in two halves [act | gate]"
    lay_out(replay, side, RowLayout(run))


@dataclass(frozen=True)
class InvertedLayout:
    """Where a kernel looks for act and gate that permutes each tile of a row by the inverse of its interleave.

    Attributes:
        run: columns after which act and gate alternate in the row.
        tile: columns of a tile, a multiple of 2 `run`.
    """

    run: int
    tile: int

    def columns(self, h, gate):
        """As of `RowLayout`: column c of a tile holds what belongs to the place of c among [act | gate]."""
        half = self.tile // 2
        is_gate, place = RowLayout(self.run).locate(gate * half + h % half)
        return h // half * self.tile + is_gate * half + place

    def locate(self, column):
        """As of `RowLayout`: the inverse of `columns`."""
        half, place = self.tile // 2, column % self.tile
        index = RowLayout(self.run).columns(place % half, place >= half)
        return index >= half, column // self.tile * half + index % half


def _tiles_of_row(replay):
    """(side, columns of a tile) of tiles in which an interleave is not its own inverse: those of more than two runs."""
    require_gated(replay)
    run = replay.case.params.get("glu_interleave_size", 0)
    replay.require(run)
    row = 2 * replay.width
    tiles = dict.fromkeys([row, *(run << n for n in range(3, row.bit_length()))])
    return [(side, tile) for tile in tiles if row % tile == 0 and tile > 4 * run for side in sides_of(replay)]


@computing(
    "interleave-inverted",
    "Each {tile} columns of {where} are permuted by the inverse of the interleave of act and gate, {run} columns each.",
    stage="gate",
    choices=_tiles_of_row,
    alone=True,
)
def interleave_inverted(replay, choice):
    side, tile = choice
    replay.facts["tile"], replay.facts["run"] = tile, replay.x_layout.run
    lay_out(replay, side, InvertedLayout(replay.x_layout.run, tile))


@computing(
    "row-stride-halved",
    "Rows of x are read half a row apart: the stride is {found} elements, that of the output, where it is {own}.",
    stage="input",
    alone=True,
)
def row_stride_halved(replay):
    require_gated(replay)
    m, k = replay.setting.matrices["x"].shape
    replay.facts["found"], replay.facts["own"] = k // 2, k

    def load(inner, name, rows, columns):
        if name != "x" or rows.start == rows.stop:
            return inner(name, rows, columns)
        first = rows.start * (k // 2) // k
        lines = inner(name, slice(first, min((rows.stop + 1) * (k // 2) // k + 1, m)), slice(0, k)).reshape(-1)
        start = np.arange(rows.start, rows.stop) * (k // 2) - first * k
        return lines[start[:, None] + np.arange(k)[columns]]

    replay.wrap("load", load)


def _unactivated(replay):
    """(what is written, whether the amax is taken of it, too)."""
    require_activation(replay)
    what = ["x"] if not replay.gated else [] if replay.gradient else list(HALVES)
    what += ["dy"] if replay.gradient and not replay.gated else []
    amaxes = ["amax too"]
    if replay.scaling is not None and replay.layout.amax is not None:
        amaxes.append("cast alone")
    return [(written, amax) for written in what for amax in amaxes]


@computing(
    "activation-missing",
    "The {what} is written as it is: {operation} is not applied{amax}.",
    stage="result",
    choices=_unactivated,
    alone=True,
)
def activation_missing(replay, choice):
    what, amax = choice
    replay.facts["what"] = {"x": "input x", "dy": "gradient dy"}.get(what, f"{what} half")
    replay.facts["operation"], replay.facts["amax"] = replay.operation.name, ""
    if amax == "cast alone":
        replay.facts["amax"] = ", though the amax is right"
        replay.tensor_amax = replay.setting.replay().tensor_amax

    def compute(rows, columns):
        column = np.arange(columns.start, columns.stop)
        if what == "dy":
            return replay.load_upstream(rows, columns)
        if what == "x":
            return replay.load("x", rows, columns)
        return replay.halves(rows, column)[HALVES.index(what)]

    replay.compute = compute


@computing(
    "gradient-of-other-half",
    "Each half of the gradient holds that of the other half.",
    stage="result",
    alone=True,
)
def gradient_of_other_half(replay):
    require_gated(replay)
    replay.require(replay.gradient and replay.scaling is not None)  # of values alone that is swapped-halves
    replay.tensor_amax = replay.setting.replay().tensor_amax

    def compute(inner, rows, columns):
        is_gate, h = replay.dx_layout.locate(np.arange(columns.start, columns.stop))
        source = np.where(is_gate, replay.dx_layout.columns(h, False), replay.dx_layout.columns(h, True))
        runs = np.split(source, np.flatnonzero(np.diff(source) != 1) + 1)
        return np.concatenate([inner(rows, as_slice(run)) for run in runs], axis=1)

    replay.wrap("compute", compute)


# --- scales of rows -------------------------------------------------------------------------------


@computing("row-scale-twice", "The rows are multiplied by row_scales twice.", stage="row-scale", alone=True)
def row_scale_twice(replay):
    replay.require(replay.computes and replay.scaled)
    replay.after("row_scale", lambda scale: scale * scale)
