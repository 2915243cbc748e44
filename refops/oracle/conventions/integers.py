"""Conventions of integer elements: how a sign is coded, the least integer, the implied power of two."""

import numpy as np

from refops.oracle.conventions.registry import computing
from refops.oracle.conventions.scales import require_coded_scales, require_scaling


def _require_integers(replay):
    """The element format; NotApplicable unless it is one of integers."""
    if not replay.dequantizes:
        require_scaling(replay)
    replay.require(replay.fmt.twos_complement)
    return replay.fmt


@computing(
    "least-integer-used",
    "Values that round to {least:g} of the scale get the code {code:#x}, which is left unused for symmetry.",
    stage="saturation",
)
def least_integer_used(replay):
    fmt = _require_integers(replay)
    replay.require(not replay.dequantizes)
    code = replay.facts["code"] = fmt.largest_code + 1
    replay.facts["least"] = fmt.values[code]
    beyond = (fmt.grid[-1] - fmt.values[code]) / 2  # the middle, whose even neighbour is the least integer

    def encode(inner, values, bits):
        return np.where(-values >= beyond, np.uint8(code), inner(values, bits))

    replay.wrap("encode", encode)


@computing(
    "implied-scale-missing",
    "The elements lack the format's implied 2^-{digits}: {what}.",
    stage=lambda choice: "stored" if choice == "bytes" else "cast",
    choices=("bytes", "codes"),
)
def implied_scale_missing(replay, choice):
    fmt = _require_integers(replay)
    replay.require(fmt.fraction_bits > 0)
    digits = replay.facts["digits"] = fmt.fraction_bits
    if replay.dequantizes:
        replay.require(choice == "codes")
        replay.facts["what"] = "codes are read as integers"
        replay.after("decode", lambda values: values * np.float32(2.0**digits))
    elif choice == "codes":
        replay.facts["what"] = f"codes are x / scale as integers, not 2^{digits} times that"
        replay.wrap("encode", lambda inner, values, bits: inner(values * np.float32(2.0**-digits), bits))
    else:
        require_coded_scales(replay)
        replay.facts["what"] = f"the scale bytes are {digits} too low, so that codes times scales are the values"
        replay.after("stored_scale", lambda code: np.maximum(code.astype(int) - digits, 0).astype(np.uint8))


@computing(
    "other-sign-code",
    "The codes are {what}, not two's complement.",
    stage="sign",
    choices=("sign and magnitude", "offset by half of the range"),
)
def other_sign_code(replay, choice):
    fmt = _require_integers(replay)
    replay.facts["what"] = choice
    top, codes = np.uint8(fmt.largest_code + 1), np.arange(len(fmt.values)).astype(np.uint8)
    if choice != "sign and magnitude":
        table = codes ^ top
    elif replay.dequantizes:
        table = fmt.signed_code(codes & ~top, codes >= top)
    else:
        table = np.where(codes > top, fmt.magnitude_code(codes) | top, codes)
    if replay.dequantizes:
        replay.wrap("decode", lambda inner, codes: inner(table[codes]))
    else:
        replay.after("encode", lambda codes: table[codes])
