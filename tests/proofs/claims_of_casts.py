"""Casts: codes of numbers, alone and side by side, and numbers of codes; what GPUs without the instruction run."""

import ml_dtypes
import numpy as np
import z3
from claims import Claim, one_more, traced, with_wrong_constant
from definitions import FORMATS, decoded, encoded, narrowed, stochastic, widened
from solvers import Query
from terms import COMPILED, CONTRACTED, NUMPY, Term, constant, variable

import refops
from cuda_kernels import casts, vectors
from cuda_kernels.operands import ELEMENT_FORMATS
from refops import formats
from refops.rounding import ROUNDING_MODES, stored
from refops.scalings.arithmetic import REFERENCE

#: Targets whose casts differ: a CPU; GPUs without the instructions, with min.xorsign.abs, with casts to FP8, with all.
TARGETS = (None, (8, 0), (8, 6), (9, 0), (10, 0, "a"))
#: Numbers in a register or two.
EIGHT = "abcdefgh"


def of_targets(make):
    """Targets with the same function together: text of them -> (function, rules of their arithmetic)."""
    found = {}
    for target in TARGETS:
        found.setdefault(make(target), []).append(target)
    return {
        " ".join("CPU" if one is None else f"sm_{one[0]}{one[1]}{''.join(one[2:])}" for one in those): (
            function,
            tuple(dict.fromkeys(COMPILED if one is None else CONTRACTED for one in those)),
        )
        for function, those in found.items()
    }


# --- one number -------------------------------------------------------------------------------------


def encode_claim(name):
    """`refops.encode` in every rounding, saturating or not."""

    def asked(rounding, saturate):
        def query(seeded):
            x, fmt = variable("x", np.float32), refops.FORMATS[name]
            fmt = with_wrong_constant(fmt) if seeded else fmt
            got = traced(formats.encode_tile, x, fmt, saturate=saturate, rounding=rounding, rule=NUMPY)
            return Query({"x": x}, got, encoded(x, name, rounding, saturate))

        return query

    def reference(part, x):
        rounding, _, overflow = part.partition(", ")
        return [refops.encode(x, refops.FORMATS[name], rounding=rounding, saturate=not overflow)[()]]

    queries = {
        rounding + ("" if saturate else ", overflow not saturated"): asked(rounding, saturate)
        for rounding in ROUNDING_MODES
        for saturate in (True, False)
    }
    text = f"refops.encode, {name.upper()}: {len(ROUNDING_MODES)} roundings, saturating or not = definition"
    return Claim(text, "all float32 x", queries, reference)


def encoder_claim(name):
    """The kernels' encoder, as NumPy, the CPU's compiler and a GPU's compiler compute it."""

    def asked(rule):
        def query(seeded):
            x = variable("x", np.float32)
            fault = {"odd": one_more} if seeded else None
            return Query({"x": x}, traced(casts.ENCODERS[name], x, rule=rule, fault=fault), encoded(x, name))

        return query

    queries, text = {rule: asked(rule) for rule in (NUMPY, COMPILED, CONTRACTED)}, f"kernels' encoder, {name.upper()}"
    return Claim(f"{text} = definition", "all float32 x", queries, lambda part, x: [code_of(name, x)], quick=True)


def code_of(name, x):
    """What `refops` makes of a number."""
    return refops.encode(x, refops.FORMATS[name])[()]


def stochastic_claim():
    """E2M1 with eight random bits: `refops`, the kernels' function and the one of five instructions."""

    def queried(function, rule, fault, *more):
        def query(seeded):
            x, r = variable("x", np.float32), variable("random", np.uint8)
            got = function(x, r, rule, fault if seeded else None, *more)
            return Query({"x": x, "random": r}, got, stochastic(x, r, "e2m1"), [not_negative_nan(x)])

        return query

    def of_refops(x, r, rule, fault):
        fmt = with_wrong_constant(formats.E2M1) if fault else formats.E2M1
        return traced(formats.encode_tile, x, fmt, rounding="stochastic", random_bits=r, rule=rule)

    def of_eight(x, r, rule, fault, function):
        """The first of eight, whose byte is the lowest of a word."""
        zero, word = constant(np.float32(0)), r.astype(np.uint32)
        words = traced(function, (x, *[zero] * 7), word, constant(np.uint32(0)), rule=rule, fault=fault)
        return words & np.uint32(15)

    queries = {"refops": queried(of_refops, NUMPY, True)}
    for target in ((8, 0), (8, 6)):
        for rule in (COMPILED, CONTRACTED):
            fault = {"SIX": one_more} if target == (8, 6) else {"TWO": one_more}
            function = casts.stochastic_eights_for(target)
            queries[f"sm_{target[0]}{target[1]}, {rule}"] = queried(of_eight, rule, fault, function)

    def reference(part, x, random):
        bits = np.full(1, random, np.uint8)
        return [refops.encode(np.full(1, x), refops.E2M1, rounding="stochastic", random_bits=bits)[0]]

    domain = "all float32 x but NaN with a sign, 256 random bytes"
    return Claim("stochastic E2M1: refops = kernels = definition", domain, queries, reference)


def not_negative_nan(x):
    """GPU arithmetic makes positive NaN alone, and additions of floats rely on it."""
    return z3.ULE(x.bits, 0xFF800000)


# --- side by side -----------------------------------------------------------------------------------


def several_claim(name, text, names, width, function_of, given):
    """Several numbers by what belongs to each target: instructions' meanings, or what stands for them.

    What NumPy makes of single numbers is `encoder_claim`'s.

    Args:
        names: of the numbers. width: bits of a code as it is stored.
        function_of: f(target). given: f(numbers) -> the function's arguments.
    """
    functions = of_targets(function_of)

    def asked(function, rule):
        def query(seeded):
            x = {one: variable(one, np.float32) for one in names}
            fault = {"shift": one_more, "SIX": one_more} if seeded else None
            got = fields(traced(function, *given(tuple(x.values())), rule=rule, fault=fault), width)
            expected = tuple(encoded(one, name) for one in x.values())
            return Query(x, got[: len(names)], expected, list(map(not_negative_nan, x.values())))

        return query

    def reference(part, **x):
        return [code_of(name, one) for one in x.values()]

    queries = {
        f"{targets}, {rule}": asked(function, rule)
        for targets, (function, rules) in functions.items()
        for rule in rules
    }
    domain = f"all 2^{32 * len(names)} of {len(names)} float32 but NaN with a sign"
    return Claim(f"kernels' {text}: CPU = every GPU = definition", domain, queries, reference)


def fields(words, width):
    """The codes in a word or a tuple of words, the first in the lowest bits, as uint8."""
    words = words if isinstance(words, tuple) else (words,)
    return tuple(
        Term(np.uint16, z3.ZeroExt(16 - width, z3.Extract(i + width - 1, i, word.node))).astype(np.uint8).simplified()
        for word in words
        for i in range(0, word.node.size(), width)
    )


def pair_claim(name):
    """Two numbers."""
    width = 4 if name == "e2m1" else 8
    return several_claim(
        name, f"pair of {name.upper()}", "ab", width, lambda target: casts.pairs_for(name, target), list
    )


def words_claim(name, packed):
    """Eight numbers as a kernel stores them, their codes in memory order."""
    text, width = (", two per byte", 4) if packed else (", one per byte", 8)
    function_of = lambda target: vectors.make_words_of_codes(name, packed, target)  # noqa: E731
    return several_claim(name, f"eight {name.upper()}{text}", EIGHT, width, function_of, lambda v: (v,))


# --- numbers of codes -------------------------------------------------------------------------------


def decoder_claim(name):
    """`refops.decode`, and the decoders of GPU and CPU."""
    bits = FORMATS[name].bits
    wrong = {23: one_more} if name == "e8m0" else {"shift": one_more}

    def of_refops(code, fault):
        fmt = refops.FORMATS[name]
        return traced(REFERENCE.decode(with_wrong_constant(fmt) if fault else fmt), code, rule=NUMPY)

    def asked(decode, dtype, rule):
        def query(seeded):
            code, fault = variable("code", dtype), wrong if seeded else None
            got = of_refops(code, fault) if decode is None else traced(decode, code, rule=rule, fault=fault)
            return Query({"code": code}, got, decoded(code, name), [z3.ULE(code.node, (1 << bits) - 1)])

        return query

    queries = {"refops": asked(None, np.uint8, NUMPY)}
    for place, decoders in (("GPU", casts.DECODERS), ("CPU", casts.CPU_DECODERS)):
        queries |= {f"{place}, {rule}": asked(decoders[name], np.uint32, rule) for rule in (NUMPY, COMPILED)}

    def reference(part, code):
        return [refops.decode(np.uint8(code), refops.FORMATS[name])[()]]

    return Claim(f"values of {name.upper()}: refops = CPU = GPU = definition", "all codes", queries, reference)


def eight_values_claim(name):
    """Eight values of the words that hold their codes."""
    functions = of_targets(lambda target: vectors.make_decode(name, target))
    width = 4 if name == "e2m1" else 8
    names = ("word",) if name == "e2m1" else ("low", "high")

    def asked(function, rule):
        def query(seeded):
            words = [variable(one, np.uint32) for one in names]
            got = traced(function, words[0], words[-1], rule=rule, fault={"shift": one_more} if seeded else None)
            codes, largest = fields(tuple(words), width), (1 << FORMATS[name].bits) - 1
            where = [z3.ULE(code.node, largest) for code in codes]
            return Query(dict(zip(names, words, strict=True)), got, tuple(decoded(one, name) for one in codes), where)

        return query

    def reference(part, **words):
        stored = np.array([words[one] for one in names], "<u4").view(np.uint8)
        return list(refops.decode(refops.unpack_fp4(stored) if width == 4 else stored, refops.FORMATS[name]))

    queries = {
        f"{targets}, {rule}": asked(function, rule)
        for targets, (function, rules) in functions.items()
        for rule in rules
    }
    text = f"kernels read eight {name.upper()}: CPU = every GPU = definition"
    return Claim(text, "all words of codes", queries, reference)


# --- 16-bit floats ----------------------------------------------------------------------------------


def half_claim(name):
    """float32 as a 16-bit float, and back."""
    storage, dtype = casts.STORAGES[name], np.dtype(getattr(ml_dtypes, name, name))

    def narrow(rule):
        def query(seeded):
            x, wrong = variable("x", np.float32), {"odd": one_more} if name == "float16" else {0x7FFF: one_more}
            got = traced(storage.narrow, x, rule=rule, fault=wrong if seeded else None)
            return Query({"x": x}, got, narrowed(x, name))

        return query

    def widen(rule):
        def query(seeded):
            half, wrong = variable("half", np.uint16), {"shift": one_more} if name == "float16" else {16: one_more}
            got = traced(storage.widen, half, rule=rule, fault=wrong if seeded else None)
            return Query({"half": half}, got, widened(half, name))

        return query

    def reference(part, x=None, half=None):
        if x is None:
            return [half.view(dtype).astype(np.float32)]
        return [stored(np.full(1, x), dtype).view(np.uint16)[0]]

    queries = {f"narrow, {rule}": narrow(rule) for rule in (NUMPY, COMPILED, CONTRACTED)}
    queries |= {f"widen, {rule}": widen(rule) for rule in (NUMPY, COMPILED)}
    return Claim(f"float32 as {name} and back = IEEE 754", "all float32, all 16-bit patterns", queries, reference)


CLAIMS = [
    *map(encode_claim, refops.FORMATS),
    *map(encoder_claim, casts.ENCODERS),
    stochastic_claim(),
    *map(pair_claim, casts.ENCODERS),
    *(words_claim(fmt.name, False) for fmt in ELEMENT_FORMATS),
    words_claim("e2m1", True),
    *map(decoder_claim, refops.FORMATS),
    *(eight_values_claim(fmt.name) for fmt in ELEMENT_FORMATS),
    half_claim("bfloat16"),
    half_claim("float16"),
]
