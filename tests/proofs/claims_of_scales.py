"""Scales: what an amax becomes by each declared rule, and what an element becomes under a scale."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import z3
from claims import Claim, one_more, traced, with_wrong_constant
from definitions import (
    FORMATS,
    INFINITE,
    decoded,
    float_of_bits,
    no_scale_from,
    overflow_from,
    power_below,
    scale_byte,
    scaled_and_encoded,
    values_of,
)
from solvers import Query
from terms import COMPILED, CONTRACTED, NUMPY, Term, constant, variable

import refops
from cuda_kernels import casts
from cuda_kernels.scale_rules import RuleWords
from refops import formats
from refops.scalings import NAMED
from refops.scalings.arithmetic import REFERENCE
from refops.scalings.declaration import LARGEST_FINITE, Numbers
from refops.scalings.rules import E8M0_ROUNDINGS

#: Place -> the vocabulary of rules there and what operators give.
VOCABULARIES = {
    "NumPy": (REFERENCE, NUMPY),
    "CPU": (RuleWords(None), COMPILED),
    "sm_80": (RuleWords((8, 0)), CONTRACTED),
    "sm_90": (RuleWords((9, 0)), CONTRACTED),
    "sm_100a": (RuleWords((10, 0, "a")), CONTRACTED),
}


def different(rule_of, *without):
    """The vocabularies in which a rule is another function: text of the places -> (words, what operators give).

    `simt.device` names functions by their content.
    """
    found: dict[Any, list[str]] = {}
    for place, (words, rule) in VOCABULARIES.items():
        if place not in without:
            name = place if words is REFERENCE else rule_of(words).__qualname__
            found.setdefault((name, rule), []).append(place)
    return {" ".join(places): VOCABULARIES[places[0]] for places in found.values()}


#: Element formats of scalings with E8M0 scales -> such a scaling.
MX = {
    "e4m3": refops.MXFP8Scaling(refops.E4M3),
    "e5m2": refops.MXFP8Scaling(refops.E5M2),
    "e3m2": refops.MXFP8Scaling(refops.E3M2),
    "e2m3": refops.MXFP8Scaling(refops.E2M3),
    "e2m1": refops.MXFP4Scaling(),
    "int8": refops.MXINT8Scaling(),
}


def amax_variable(name="amax"):
    """(an amax, what is known of it): no sign, no NaN, maybe infinite."""
    amax = variable(name, np.float32)
    return amax, z3.ULE(amax.bits, INFINITE)


def tensor_with(amax):
    """A tensor, of one block or more, of which the first has that amax and the others zero."""
    x = np.zeros((32, 128), np.float32)
    x[0, 0] = amax
    return x


# --- an amax as a power of two ----------------------------------------------------------------------


def scale_byte_claim(rounding, name):
    """The E8M0 byte of an amax."""
    scaling = replace(MX[name], scale_rounding=rounding)

    def asked(words, rule):
        def query(seeded):
            amax, known = amax_variable()
            wrong = {"up": {"inverse": one_more}, "floor": {"emax": one_more}}.get(rounding, {"added": one_more})
            code = traced(
                scaling.scale_code(words), amax, np.float32(0), None, rule=rule, fault=wrong if seeded else None
            )
            return Query({"amax": amax}, code, scale_byte(amax, name, rounding), [known])

        return query

    def reference(part, amax):
        return [refops.quantize(tensor_with(amax), scaling).rowwise_scale_inv[0, 0]]

    queries = {text: asked(*how) for text, how in different(scaling.scale_code).items()}
    return Claim(
        f"E8M0 scale of {name.upper()}, {rounding}: NumPy = CPU = GPU = definition", "all amaxes", queries, reference
    )


# --- an amax as a float32 ---------------------------------------------------------------------------


def float_scale_claim(fmt, power_2):
    """What elements are multiplied by, of the amax of a block: `BlockScaling`."""
    scaling, name = refops.BlockScaling(fmt, 1, power_2_scale=power_2), fmt.name

    def asked(words, rule):
        def query(seeded):
            amax, known = amax_variable()
            largest, limit = np.finfo(np.float32).max, np.float32(float(FORMATS[name].largest))
            wrong = {"limit": one_more, "bits_for_one": one_more} if seeded else None
            numbers = Numbers(constant(np.float32(0)), constant(largest))
            function = scaling.block_scale(words)
            _, multiplier = traced(function, amax, np.float32(0), numbers, rule=rule, fault=wrong)
            expected = power_below(amax, name) if power_2 else at_most_largest(limit / amax)
            usable = z3.And(amax.bits != 0, amax.bits != INFINITE)
            one = z3.BitVecVal(0x3F800000, 32)
            expected = Term(np.float32, bits=z3.If(usable, expected.bits, one))
            return Query({"amax": amax}, multiplier, expected, [known])

        return query

    def reference(part, amax):
        """Of the rule itself: what is stored is rounded again."""
        numbers = scaling.numbers(np.dtype(np.float32))
        return list(scaling.block_scale(REFERENCE)(np.full(1, amax), np.float32(0), numbers)[1])

    queries = {text: asked(*how) for text, how in different(scaling.block_scale).items()}
    what = "the largest power of two that is no more" if power_2 else "rounded once"
    text = f"{fmt!r} scale, {FORMATS[name].largest} / amax, {what}: NumPy = CPU = GPU = definition"
    return Claim(text, "all amaxes", queries, reference)


def at_most_largest(x):
    """A float, the largest finite one for infinity."""
    infinite = x.bits == INFINITE
    return Term(np.float32, bits=z3.If(infinite, z3.BitVecVal(0x7F7FFFFF, 32), x.bits))


# --- the rules of each scaling ----------------------------------------------------------------------


class Part(NamedTuple):
    """A rule of a scaling.

    Attributes:
        name: in words. rule: f(scaling, words).
        inputs: name -> NumPy type. arranged: f(inputs, scaling) -> the rule's arguments; terms or arrays.
    """

    name: str
    rule: Callable[..., Any]
    inputs: dict[str, type]
    arranged: Callable[..., tuple[Any, ...]]


def block_arguments(given, scaling):
    """Of `block_scale` and candidates."""
    of_tensor = (given["encode"], given["decode"]) if scaling.layout.two_level else np.float32(0)
    return given["amax"], of_tensor, Numbers(given["epsilon"], given["largest"])


def error_arguments(given, scaling):
    """Of an error: values of codes."""
    element, scale = (
        valued(given[one], fmt) for one, fmt in (("code", scaling.fmt), ("scale", scaling.layout.scale_format))
    )
    return element, scale, given["amax"], given["x"]


def valued(code, fmt):
    """The value of a code."""
    return decoded(code, fmt.name) if isinstance(code, Term) else values_of(fmt.name)[code]


F32, U8 = np.float32, np.uint8
BLOCK = {"amax": F32, "encode": F32, "decode": F32, "epsilon": F32, "largest": F32}
TENSOR_SCALE = Part(
    "scale of the tensor", lambda s, words: s.tensor_scale(words), {"amax": F32}, lambda g, s: (g["amax"],)
)
BLOCK_SCALE = Part("stored scale and multiplier", lambda s, words: s.block_scale(words), BLOCK, block_arguments)
#: Of coded scales `block_scale` is these two, one after the other.
SCALE_CODE = Part("code of the scale", lambda s, words: s.scale_code(words), BLOCK, block_arguments)
MULTIPLIER = Part(
    "multiplier",
    lambda s, words: s.multiplier(words),
    {"scale": U8, "encode": F32, "decode": F32},
    lambda g, s: (g["scale"], (g["encode"], g["decode"]) if s.layout.two_level else np.float32(0)),
)
CANDIDATES = [
    Part(f"candidate {k + 1}", lambda s, words, k=k: s.choice(words).candidates[k], BLOCK, block_arguments)
    for k in (0, 1)
]
DECODE_FACTOR = Part(
    "factor of values",
    lambda s, words: s.decode_factor(words),
    {"stored": U8, "amax": F32},
    lambda g, s: (g["stored"], g["amax"]),
)
ERROR = Part(
    "error", lambda s, words: s.choice(words).error, {"code": U8, "scale": U8, "amax": F32, "x": F32}, error_arguments
)


def parts_of(scaling):
    """The rules that a scaling has."""
    if scaling.layout.scale_format is None:
        return {BLOCK_SCALE.name: BLOCK_SCALE}  # which is its own factor
    parts = [SCALE_CODE, MULTIPLIER, DECODE_FACTOR]
    if scaling.layout.two_level:
        parts.append(TENSOR_SCALE)
    if scaling.choice(REFERENCE) is not None:
        parts += [*CANDIDATES, ERROR]
    return {part.name: part for part in parts}


#: Decoders, each of which `claims_of_casts` proves to be the definition.
PROVED_DECODERS = {
    decoder: lambda code, name=name: decoded(code, name)
    for decoders in (casts.DECODERS, casts.CPU_DECODERS, {"e4m3": casts.decode_e4m3_instructions})
    for name, decoder in decoders.items()
}
#: What can be wrong in a rule, on a CPU or GPU.
WRONG = dict.fromkeys(
    ("inverse", "emax", "added", "limit", "bits_for_one", "top", "down", "shift", "ONE", 23), one_more
)


def named_alike():
    """The rows of `NAMED` that find a scale by a rule: lists of names whose rules are the same functions."""
    found: dict[Any, list[str]] = {}
    for name, row in NAMED.items():
        if row.scaling.given is None:
            words = VOCABULARIES["CPU"][0]
            rules = [part.rule(row.scaling, words).__qualname__ for part in parts_of(row.scaling).values()]
            found.setdefault((type(row.scaling), *rules), []).append(name)
    return found.values()


def rules_claim(names):
    """Every rule of rows of `NAMED` that share them: the kernels' numbers are NumPy's."""
    scaling = NAMED[names[0]].scaling
    parts = parts_of(scaling)

    def asked(part, words, rule):
        def query(seeded):
            inputs = {one: variable(one, kind) for one, kind in part.inputs.items()}
            given, unknown = part.arranged(inputs, scaling), () if seeded else unknown_in(part, scaling)
            how = {"uninterpreted": unknown, "replaced": PROVED_DECODERS if unknown else None}
            expected = traced(part.rule(scaling, REFERENCE), *given, rule=NUMPY, uninterpreted=unknown)
            kernels, wrong = part.rule(scaling, words), WRONG if seeded else None
            got = traced(kernels, *map(in_register, given), rule=rule, fault=wrong, **how)
            if part in CANDIDATES:  # whose second number is `MULTIPLIER` of the first
                got, expected = got[0], expected[0]
            return Query(inputs, got, expected, known_of(inputs, scaling))

        return query

    def reference(text, **given):
        part = parts[text.partition(", ")[0]]
        arrays = part.arranged({one: np.full(1, value) for one, value in given.items()}, scaling)
        found = part.rule(scaling, REFERENCE)(*arrays)
        found = found if isinstance(found, tuple) else (found,)
        return [np.asarray(one).reshape(-1)[0] for one in (found[:1] if part in CANDIDATES else found)]

    queries = {
        f"{part.name}, {text}": asked(part, *how)
        for part in parts.values()
        for text, how in different(partial(part.rule, scaling), "NumPy").items()
    }
    return Claim(f"rules of {', '.join(names)}: CPU = GPU = NumPy", "all amaxes, scales, codes", queries, reference)


def known_of(inputs, scaling):
    """Amaxes have no sign and are no NaN; scales of a tensor are positive and finite; codes are not NaN's."""
    known = {
        "amax": lambda bits: z3.ULE(bits, INFINITE),
        "encode": lambda bits: z3.And(bits != 0, z3.ULT(bits, INFINITE)),
        "decode": lambda bits: z3.And(bits != 0, z3.ULT(bits, INFINITE)),
        "epsilon": lambda bits: z3.ULT(bits, INFINITE),
        "largest": lambda bits: z3.Or([bits == int(one.view(np.uint32)) for one in LARGEST_FINITE.values()]),
        "code": lambda bits: z3.ULT(bits, 1 << scaling.fmt.bits),
        "scale": lambda bits: z3.Not(z3.fpIsNaN(decoded(Term(U8, bits), scaling.layout.scale_format.name).node)),
    }
    return [known[name](term.bits) for name, term in inputs.items() if name in known]


def unknown_in(part, scaling):
    """The operations that both sides have alike. A power of two is found by a quotient in NumPy alone."""
    if scaling.power_2_scale:
        return ()
    return ("product", "quotient", "difference") if part is ERROR else ("product", "quotient")


def in_register(value):
    """A code as kernels hold it, in 32 bits."""
    return value.astype(np.uint32) if isinstance(value, Term) and value.dtype == U8 else value


# --- an element under a scale -----------------------------------------------------------------------


def scaled_claim(name):
    """The code of x under each scale byte: the value nearest to the exact x / 2^(byte - 127)."""
    scaling = MX[name]

    def asked(words, rule):
        def query(seeded):
            x, byte = variable("x", F32), variable("byte", U8)
            wrong = {"odd": one_more} if seeded and words is not REFERENCE else None
            multiplier = traced(scaling.multiplier(words), in_place(byte, words), np.float32(0), rule=rule)
            product = x * multiplier
            if words is REFERENCE:
                fmt = with_wrong_constant(scaling.fmt) if seeded else scaling.fmt
                got = traced(formats.encode_tile, product, fmt, rule=rule)
            else:
                got = traced(casts.ENCODERS[name], product, rule=rule, fault=wrong)
            return Query({"x": x, "byte": byte}, got, scaled_and_encoded(x, byte, name), [z3.ULE(byte.node, 254)])

        return query

    def reference(part, x, byte):
        """Of exact arithmetic: float64 holds every product."""
        exact = np.float64(x) * 2.0 ** (127 - int(byte))
        return [formats.encode_by_definition(np.full(1, exact), scaling.fmt, True, "nearest_even")[0]]

    queries = {text: asked(*VOCABULARIES[text]) for text in ("NumPy", "CPU", "sm_80")}
    return Claim(
        f"{name.upper()} of x under an E8M0 scale: NumPy = CPU = GPU = definition",
        "all float32 x, all 255 bytes",
        queries,
        reference,
    )


def in_place(byte, words):
    """A scale byte as NumPy or a kernel holds it."""
    return byte if words is REFERENCE else byte.astype(np.uint32)


def saturation_claim(name, beyond=False):
    """With "up" the largest element of a block is not clamped: its product is rounded to at most the largest value.

    `beyond` asks about the amaxes for which E8M0 has no scale that is large enough.
    """
    scaling, end = replace(MX[name], scale_rounding="up"), no_scale_from(name)

    def query(seeded):
        amax, known = amax_variable()
        wrong = {"inverse": lambda value: value / np.float32(2)} if seeded else None
        code = traced(scaling.scale_code(REFERENCE), amax, np.float32(0), None, rule=NUMPY, fault=wrong)
        product = amax * traced(scaling.multiplier(REFERENCE), code, np.float32(0), rule=NUMPY)
        holds = Term(bool, z3.ULT(product.bits, overflow_from(name)))
        where = [z3.UGE(amax.bits, end), z3.ULT(amax.bits, INFINITE)] if beyond else [z3.ULT(amax.bits, end)]
        return Query({"amax": amax}, holds, constant(np.bool_(True)), [known, *where])

    def reference(part, amax):
        byte = refops.quantize(tensor_with(amax), scaling).rowwise_scale_inv[0, 0]
        return [np.bool_(np.float64(amax) * 2.0 ** (127 - int(byte)) < float_of_bits(overflow_from(name)))]

    domain = f"amaxes {'from' if beyond else 'below'} {float_of_bits(end):.3g}"
    return Claim(f"MX, {name.upper()}, scales rounded up: nothing saturates", domain, {"NumPy": query}, reference)


#: Has a counterexample: see docs/guide/proofs.md.
BROKEN = [saturation_claim("int8", beyond=True)]
CLAIMS = [
    *(float_scale_claim(fmt, power_2) for fmt in (refops.E4M3, refops.E5M2) for power_2 in (False, True)),
    *map(scaled_claim, MX),
    *map(saturation_claim, MX),
    *map(rules_claim, named_alike()),
    *(
        scale_byte_claim(rounding, name)
        for name in MX
        for rounding in E8M0_ROUNDINGS
        if name != "int8" or rounding in ("up", "floor")
    ),
]
