"""The mutants against blunt oracles: a check that looks away somewhere misses at least one of them.

Each blunt oracle is the real one with a piece replaced. The mutants named with it are those that it then misses; with
the piece in place all are found (test_mutants.py). So the library can tell a sharp oracle from a blunt one.
"""

import numpy as np
from mutants import MUTANTS
from mutants.outcome import outcome

from refops.oracle import enclosure, interval, quantized_verdict, scale_rules, verdict
from refops.oracle.enclosure import Bounds
from tiers import sampled

BLUNT = {}


def blunt(*missed):
    """Decorator: the function patches the oracle; `missed` are the mutants that get past it then."""

    def add(patch):
        BLUNT[patch.__name__.replace("_", "-")] = (patch, missed)
        return patch

    return add


def missed_by(names):
    """Those of the mutants that the oracle as it stands accepts."""
    return [name for name in names if not outcome(name, diagnose=False).detected]


@blunt("one-float32-value-64-ulp-off")
def ulp_times_a_thousand(monkeypatch):
    right = interval.ulp_of
    for module in (interval, enclosure):
        monkeypatch.setattr(module, "ulp_of", lambda true: 1000 * right(true))


@blunt("one-code-of-a-million", "mx-truncated", "one-nibble-of-a-million")
def codes_not_checked_where_the_scale_is_right(monkeypatch):
    right = quantized_verdict.QuantizedJudge._judge_blocks

    def judge(self, names, *arguments):
        scale = self.judge.tallies.get(names["scale_inv"])
        before = scale.count if scale else 0
        codes = self.judge.tallies.get(names["data"])
        saved = (codes.wrong.copy(), codes.count) if codes else None
        right(self, names, *arguments)
        if scale and codes and scale.count == before:
            codes.wrong[...], codes.count = saved

    monkeypatch.setattr(quantized_verdict.QuantizedJudge, "_judge_blocks", judge)


@blunt("columnwise-scales-unwritten", "mx-columnwise-scales-transposed", "rht-left-out")
def columnwise_never_checked(monkeypatch):
    right = quantized_verdict.QuantizedJudge._work_of

    def judge(self, direction):
        return right(self, direction) if direction == "rowwise" else None

    monkeypatch.setattr(quantized_verdict.QuantizedJudge, "_work_of", judge)


@blunt("relu-keeps-nan", "clamp-keeps-nan", "one-infinity-not-saturated", "e4m3-overflows-to-nan")
def nan_always_accepted(monkeypatch):
    contain, inside = Bounds.contain, enclosure.codes_inside

    def codes_inside(codes, lowest, highest, nan, fmt):
        is_nan = np.isnan(fmt.values[codes & np.uint8(len(fmt.values) - 1)])
        return inside(codes, lowest, highest, nan, fmt) | is_nan

    monkeypatch.setattr(Bounds, "contain", lambda self, values: contain(self, values) | np.isnan(values))
    monkeypatch.setattr(enclosure, "codes_inside", codes_inside)


@blunt("one-nan-not-written", "nan-written-as-zero", "mx-nan-written-as-zero")
def nan_may_become_anything(monkeypatch):
    inside = enclosure.codes_inside

    def codes_inside(codes, lowest, highest, nan, fmt):
        return inside(codes, lowest, highest, nan, fmt) | nan

    monkeypatch.setattr(enclosure, "codes_inside", codes_inside)


@blunt("dbias-sums-dy", "dbias-without-the-tail", "mx-dbias-sums-rounded", "drow-scales-scaled")
def sums_never_checked(monkeypatch):
    monkeypatch.setattr(verdict.Judge, "judge_sums", lambda self, name, source, axis: None)


@blunt("dbias-sums-before-rounding")
def sums_with_the_error_of_half_precision(monkeypatch):
    monkeypatch.setattr(enclosure, "NEAREST", 2.0**-12)


@blunt("swiglu-delayed-amax-rounded", "amax-not-reset")
def amax_never_checked(monkeypatch):
    right = verdict.Judge.judge_numbers

    def judge(self, name, *arguments):
        if not name.startswith("amax_"):
            right(self, name, *arguments)

    monkeypatch.setattr(verdict.Judge, "judge_numbers", judge)


@blunt("mx-floor", "mx-even", "mx-ceil-of-float-log2")
def scales_never_checked(monkeypatch):
    monkeypatch.setattr(quantized_verdict.QuantizedJudge, "_record_scales", lambda self, *arguments: None)


@blunt("mx-floor", "swiglu-mx-floor")
def scale_bytes_off_by_one_accepted(monkeypatch):
    def right(self, written):
        lowest, highest = (self.to_runs(end).astype(int) for end in self.range)
        return (lowest - 1 <= written) & (written <= highest + 1)

    monkeypatch.setattr(scale_rules.ScaleRule, "right", right)


@blunt("magnitudes-cast", "nv-magnitudes", "negative-zero-lost", "one-column-without-signs")
def signs_not_compared(monkeypatch):
    monkeypatch.setattr(
        enclosure, "code_order", lambda codes, fmt: (codes & (len(fmt.values) - 1 >> 1)).astype(np.int16)
    )


@blunt("one-code-of-a-million", "one-nibble-of-a-million", "gelu-delayed-unfused", "cast-through-bfloat16")
def neighbouring_codes_accepted(monkeypatch):
    inside, order = enclosure.codes_inside, enclosure.code_order

    def codes_inside(codes, lowest, highest, nan, fmt):
        near = np.abs(order(codes & np.uint8(len(fmt.values) - 1), fmt) - order(lowest, fmt)) <= 1
        return inside(codes, lowest, highest, nan, fmt) | near

    monkeypatch.setattr(enclosure, "codes_inside", codes_inside)


@blunt("every-eighth-byte-unwritten")
def last_rows_of_a_quantized_tensor_not_visited(monkeypatch):
    cut_tiles(monkeypatch, quantized_verdict, rows=16, columns=0)


@blunt("grid-stride-loop-without-tail")
def last_rows_of_a_value_tensor_not_visited(monkeypatch):
    cut_tiles(monkeypatch, verdict, rows=16, columns=0)


@blunt("last-partial-block-skipped", "padding-read-as-data")
def partial_blocks_not_visited(monkeypatch):
    cut_tiles(monkeypatch, quantized_verdict, rows=0, columns=8)


def cut_tiles(monkeypatch, module, rows, columns):
    """Let a module's loop end `rows` rows and `columns` columns early."""
    right = module.tile_slices
    monkeypatch.setattr(module, "tile_slices", lambda shape: right((shape[0] - rows, shape[1] - columns)))


@blunt("maximum-always-six", "maximum-always-four", "choice-by-absolute-error", "one-block-chose-the-worse")
def four_over_six_choice_not_checked(monkeypatch):
    def right(self, written):
        inside = [(self.to_runs(low) <= written) & (written <= self.to_runs(high)) for low, high in self.candidates]
        return inside[0] | inside[1]

    monkeypatch.setattr(scale_rules.ChosenScales, "right", right)


@blunt("swiglu-mx-unrounded", "swiglu-current-unrounded")
def rounding_before_the_cast_optional(monkeypatch):
    def read(self, rows, columns):
        wide = self._source.read(rows, columns)
        stored = wide.rounded(self.dtype)
        return Bounds(np.fmin(wide.lo, stored.lo), np.fmax(wide.hi, stored.hi), wide.nan)

    monkeypatch.setattr(enclosure.RoundedBounds, "read", read)


@blunt("sr-with-its-own-generator", "one-row-reuses-random-bits")
def random_bits_not_compared(monkeypatch):
    monkeypatch.setattr(quantized_verdict.QuantizedJudge, "_random_bits", lambda self, *arguments: "any")


@blunt("history-stays", "history-rolls-the-other-way", "one-history-entry-lost-a-bit")
def history_not_compared(monkeypatch):
    right = verdict.Judge.judge_exact
    monkeypatch.setattr(
        verdict.Judge, "judge_exact", lambda self, name: None if name == "amax_history" else right(self, name)
    )


@blunt("one-stale-block-scale", "mx-bias-128", "mx-gemm-order", "nv-scales-packed")
def a_tile_with_right_codes_is_taken_as_right(monkeypatch):
    def is_reference(self, codes, scales):
        return codes[0] is not None and np.array_equal(*codes)

    monkeypatch.setattr(quantized_verdict.QuantizedJudge, "_tile_is_reference", is_reference)


@blunt("block-output-truncated", "one-bit-of-a-million-values", "swiglu-rounded-silu")
def a_relative_tolerance_of_one_percent(monkeypatch):
    contain = Bounds.contain

    def tolerant(self, values):
        lo, hi = np.minimum(self.lo * 0.99, self.lo * 1.01), np.maximum(self.hi * 0.99, self.hi * 1.01)
        return contain(Bounds(lo, hi, self.nan), values)

    monkeypatch.setattr(Bounds, "contain", tolerant)


@sampled("name", BLUNT, 2, in_all=1)
def test_a_blunt_oracle_misses_mutants(name, monkeypatch):
    patch, expected = BLUNT[name]
    assert set(expected) <= set(MUTANTS)
    patch(monkeypatch)
    missed = missed_by(expected)
    assert missed == list(expected), f"{sorted(set(expected) - set(missed))} found all the same"


def test_there_are_enough_blunt_oracles():
    assert len(BLUNT) >= 10
