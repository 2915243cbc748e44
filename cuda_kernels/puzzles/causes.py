"""The results of the usual wrong kernels: a wrong answer has the cause whose effect it shows, bit for bit.

`ANSWERS` holds what such a kernel stores, computed in NumPy from the same input; `READS` which elements each of its
threads reads, for kernels whose holes are indices. Nothing here is a guess: an answer that no row gives has no cause
here, and `evidence` says what the run itself shows.
"""

import numpy as np

import refops
from cuda_kernels.puzzles import holes

F = np.float32


# --- add_bias ---------------------------------------------------------------------------------------


def reads_of_add_bias(place, of_bias):
    """Index causes of `add_bias`: functions of (i, rows, columns) for the place in x and the one in bias."""

    def reads(i, rows, columns):
        return {"x": [place(i, rows, columns)], "bias": [of_bias(i, rows, columns)]}

    return reads


def own(i, rows, columns):
    """A thread's own number as index."""
    return i


# --- widen_bf16 -------------------------------------------------------------------------------------


def moved_up(distance):
    """`widen_bf16` where the bits move up so far."""
    return lambda x: (x.view(np.uint16).astype(np.uint32) << np.uint32(distance)).view(F)


# --- swiglu -----------------------------------------------------------------------------------------


def reads_of_swiglu(act, gate):
    """Index causes of `swiglu`: functions of (row, column, rows, columns) for act and gate."""

    def reads(i, rows, columns):
        where = i // columns, i % columns, rows, columns
        return {"x": [act(*where), gate(*where)]}

    return reads


def act_place(row, column, rows, columns):
    return row * 2 * columns + column


def gate_place(row, column, rows, columns):
    return row * 2 * columns + columns + column


# --- block_amax -------------------------------------------------------------------------------------


#: How far away the threads are that a thread of a warp asks, step by step.
DISTANCES = (16, 8, 4, 2, 1)


def in_blocks(x):
    """(blocks, 32), the last one filled up with zeros."""
    return np.pad(x, (0, -len(x) % 32)).reshape(-1, 32)


def shuffled(distances, merge):
    """What the first thread of each warp holds after shuffles by these distances, each merged by `merge`."""

    def answer(x):
        known = in_blocks(np.abs(x))
        for distance in distances:
            known = merge(known, known[:, np.arange(32) ^ distance])
        return known[:, 0]

    return answer


def own_elements_shuffled(prepare):
    """`block_amax` where every step fetches an element, not what the other thread knows."""
    return lambda x: np.maximum(np.abs(x[::32]), prepare(in_blocks(x))[:, DISTANCES].max(axis=1))


def missing_steps():
    """Sentence -> answer, for every choice of missing steps that leaves some."""
    for number in range(1, 31):  # its bits are the missing distances
        missing = [distance for distance in DISTANCES if number & distance]
        taken = [distance for distance in DISTANCES if not number & distance]
        if len(missing) == 1:
            sentence = f"The step of distance {missing[0]} is missing."
        else:
            sentence = f"The steps of the distances {listed(missing)} are missing."
        yield sentence, shuffled(taken, np.maximum)


# --- scale_byte -------------------------------------------------------------------------------------


def byte_by(rule):
    """`scale_byte` with a function (bits, exponent, mantissa) -> byte in its hole, all of them uint32."""

    def answer(amax):
        bits = (amax * holes.INVERSE_448).view(np.uint32)
        byte = rule(bits, bits >> np.uint32(23), bits & np.uint32(0x7FFFFF)).astype(np.uint32)
        return np.where(bits <= 0x400000, 0, np.minimum(byte, 254)).astype(np.uint8)

    return answer


def number_by(rule):
    """`scale_byte` with a function of amax / 448 in its hole whose result is a float32."""

    def answer(amax):
        ratio = amax * holes.INVERSE_448
        bytes_ = stored(np.where(rule(ratio) > F(254), F(254), rule(ratio)))
        return np.where(ratio.view(np.uint32) <= 0x400000, 0, bytes_).astype(np.uint8)

    return answer


def exponent_by_log2(ratio):
    """ceil(log2(amax / 448)), in float32."""
    return np.ceil(np.log2(ratio))


def rounded_up(bits, exponent, mantissa):
    return exponent + (mantissa != 0)


def exponent_of_amax(amax, more):
    """`scale_byte` where the exponent field is amax's, the ends as given."""
    byte = (amax.view(np.uint32) + np.uint32(more)) >> np.uint32(23)
    return np.where((amax * holes.INVERSE_448).view(np.uint32) <= 0x400000, 0, np.minimum(byte, 254)).astype(np.uint8)


# --- mxfp8 ------------------------------------------------------------------------------------------


def codes_by(rule):
    """`mxfp8` with a function (value, byte) -> code for its first hole, the second one right."""

    def answer(x):
        scales = holes.mxfp8_spec(x)[1]
        return stored(rule(x.astype(F), np.repeat(scales, 32, axis=1))), scales

    return answer


def scales_by(rule):
    """`mxfp8` with a function (byte, first code of the block) -> scale for its second hole, the first one right."""

    def answer(x):
        codes, scales = holes.mxfp8_spec(x)
        return codes, stored(rule(scales, codes[:, ::32]))

    return answer


def amax_of_blocks(value):
    return np.repeat(np.abs(value).reshape(-1, 32).max(axis=1), 32).reshape(value.shape)


def e4m3(values):
    return refops.encode(values.astype(F), refops.E4M3)


def power(byte, sign):
    """2^(sign (byte - 127)), float32."""
    return np.ldexp(F(1), sign * (byte.astype(np.int32) - 127))


def unsigned_power(a, b):
    """2^(a - b) where a - b is unsigned and wraps around, float64."""
    return np.exp2((np.uint32(a) - np.uint32(b)).astype(np.float64))


def stored(values):
    """Numbers as an array of bytes keeps them; each one by itself, since NumPy's conversions of arrays may differ."""
    kept = np.empty(values.shape, np.uint8)
    for place in np.ndindex(values.shape):
        kept[place] = np.uint8(values[place] if values.dtype.kind == "f" else int(values[place]) & 0xFF)
    return kept


# --- pack_fp4 ---------------------------------------------------------------------------------------


def byte_of(rule):
    """`pack_fp4` with a function (first, second) -> byte in its hole."""

    def answer(x, multiplier):
        codes = holes.pack_fp4_spec(x, multiplier).astype(np.uint32)
        return (rule(codes & 15, codes >> 4) & 0xFF).astype(np.uint8)

    return answer


def moved_codes():
    """Sentence -> answer, for every pair of distances that the codes may move up by."""
    for first in range(8):
        for second in range(8):
            if (first, second) not in ((0, 4), (0, 0), (4, 4), (4, 0)):  # right, or named otherwise
                sentence = f"The first code is moved up by {first} bits and the second by {second}: it must be 0 and 4."
                yield sentence, byte_of(lambda a, b, first=first, second=second: a << first | b << second)


# --- transpose --------------------------------------------------------------------------------------


def in_tiles(x):
    """(rows of tiles, columns of tiles, 32, 32), filled up with zeros."""
    padded = np.pad(x, [(0, -size % 32) for size in x.shape])
    return padded.reshape(len(padded) // 32, 32, -1, 32).swapaxes(1, 2)


def as_matrix(tiles, rows, columns):
    """The matrix of tiles, without what fills it up."""
    return tiles.swapaxes(1, 2).reshape(tiles.shape[0] * 32, -1)[:rows, :columns]


def moved_not_turned(x):
    """`transpose` where a tile goes to its place as it is."""
    return as_matrix(in_tiles(x).swapaxes(0, 1), *x.shape[::-1])


def turned_not_moved(x):
    """`transpose` where each tile is turned where it is."""
    return as_matrix(in_tiles(x).swapaxes(2, 3), *x.shape).reshape(x.shape[::-1])


def read_without_k(x):
    """`transpose` where a thread reads the same place of the tile four times."""
    tiles = in_tiles(x).swapaxes(0, 1).swapaxes(2, 3)
    return as_matrix(tiles[:, :, np.arange(32) % 8], *x.shape[::-1])


# --- dbias ------------------------------------------------------------------------------------------


def counted(*times):
    """`dbias` where the partial sums of ty = 0, 1, ... 7 are counted so often."""
    return lambda dy: sum(n * part for n, part in zip(times, partial_sums(dy), strict=True))


def partial_sums(dy):
    return np.stack([dy[ty::8].astype(F).sum(axis=0) for ty in range(8)])


def of_first_column(dy):
    """`dbias` where `partial[k, ty]` stands for `partial[k, tx]`: of the others, those of the strip's first column."""
    parts = partial_sums(dy)
    return parts[0] + parts[1:].sum(axis=0)[np.arange(dy.shape[1]) // 32 * 32]


def of_first_row(dy):
    """`dbias` where `partial[ty, k]` stands for `partial[k, tx]`: the others are those of ty == 0, columns 1 to 7."""
    mine = partial_sums(dy)[0]
    padded = np.pad(mine, (0, -len(mine) % 32)).reshape(-1, 32)
    return mine + padded[:, 1:8].sum(axis=1)[np.arange(len(mine)) // 32]


def missing_parts():
    """Sentence -> answer, for each thread but the first whose partial sum may be missing."""
    for ty in range(1, 8):
        times = [1] * 8
        times[ty] = 0
        yield f"The partial sums of the threads with ty == {ty} are missing.", counted(*times)


def listed(words):
    """[16, 8, 1] -> "16, 8 and 1"."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


# --- the tables -------------------------------------------------------------------------------------

#: name of a puzzle -> {what a wrong answer means: function of the case's arrays that gives it}.
ANSWERS = {
    "add_bias": {
        "The bias is not added.": lambda x, bias: x,
        "The bias is stored alone: x is not added.": lambda x, bias: np.broadcast_to(bias, x.shape),
        "The bias is subtracted.": lambda x, bias: x - bias,
        "x is multiplied by the bias; the rule adds it.": lambda x, bias: x * bias,
        "The number of the column is added, not the bias of that column.": lambda x, bias: (
            x + np.arange(x.shape[1], dtype=F)
        ),
        "The sums are right, but stored at column * rows + row: y lies like x, at row * columns + column.": (
            lambda x, bias: (x + bias).T.reshape(x.shape)
        ),
    },
    "widen_bf16": {
        "The bits were read as a whole number and that was converted.": lambda x: x.view(np.uint16).astype(F),
        "The bits are in their place, but the whole number that they are was converted: as_f32 is missing.": lambda x: (
            x.view(np.uint16).astype(np.uint32) << np.uint32(16)
        ).astype(F),
        "as_u32 gives the bits of a float32. Here the bits are known: as_f32 makes the float32.": lambda x: (
            x.view(np.uint16).astype(F).view(np.uint32).astype(F)
        ),
        "as_u32 makes a float32 of x[i] first, with other bits: np.uint32(x[i]) keeps the bits.": lambda x: (
            x.view(np.uint16).astype(F).view(np.uint32) << np.uint32(16)
        ).view(F),
        "as_u32 makes a float32 of x[i] first, and as_f32 is missing: np.uint32(x[i]) keeps the bits.": lambda x: (
            x.view(np.uint16).astype(F).view(np.uint32) << np.uint32(16)
        ).astype(F),
        "casts.narrow_bf16 makes a bfloat16; here is one already.": lambda x: (
            x.view(np.uint16).astype(x.dtype).view(np.uint16).astype(F)
        ),
        "All bits are gone: a uint16 shifted by 16 is 0. Make it a uint32 first.": lambda x: np.zeros(x.shape, F),
        "The bits are in the lower half: they must move up by 16.": moved_up(0),
        **{
            f"The bits are moved up by {distance}; the upper half begins at bit 16.": moved_up(distance)
            for distance in range(1, 32)
            if distance != 16
        },
        "The bits were read as float16.": lambda x: x.view(np.float16).astype(F),
    },
    "block_amax": {
        "The shuffled values are added; the rule asks for the larger of two.": shuffled(DISTANCES, np.add),
        "The smaller of two is kept; the rule asks for the larger.": shuffled(DISTANCES, np.minimum),
        "What comes from another thread replaces `largest`: the larger of the two must stay.": shuffled(
            DISTANCES, lambda mine, other: other
        ),
        "The sign still counts: magnitudes are compared.": lambda x: in_blocks(x).max(axis=1),
        "Each step fetches an element of x: shuffle `largest`, what the other knows by then.": (
            own_elements_shuffled(np.abs)
        ),
        "Each step fetches an element of x with its sign: shuffle `largest`, what the other knows by then.": (
            own_elements_shuffled(np.positive)
        ),
        **dict(missing_steps()),
        "Each thread still knows its own element only.": lambda x: np.abs(x[::32]),
    },
    "scale_byte": {
        "The exponent is rounded down: it takes one more unless the mantissa is zero.": byte_by(lambda b, e, m: e),
        "A mantissa of zero needs no more: that power of two is the scale itself.": byte_by(lambda b, e, m: e + 1),
        "One more is taken where the mantissa is zero, and must be where it is not.": byte_by(
            lambda b, e, m: e + (m == 0)
        ),
        "The byte is one too large.": byte_by(lambda b, e, m: rounded_up(b, e, m) + 1),
        "The byte is one too small.": byte_by(lambda b, e, m: rounded_up(b, e, m) - 1),
        "The exponent is rounded to the nearest power of two; the rule rounds it up.": byte_by(
            lambda b, e, m: b + np.uint32(0x400000) >> np.uint32(23)
        ),
        "127 is taken off: E8M0 has the bias of float32, so the exponent field is the byte.": byte_by(
            lambda b, e, m: rounded_up(b, e, m) - np.uint32(127)
        ),
        "The exponent is rounded down, and 127 is taken off: E8M0 has the bias of float32.": byte_by(
            lambda b, e, m: e - np.uint32(127)
        ),
        "127 is added: E8M0 has the bias of float32, so the exponent field is the byte.": byte_by(
            lambda b, e, m: rounded_up(b, e, m) + np.uint32(127)
        ),
        "The exponent is rounded down, and 127 is added: E8M0 has the bias of float32.": byte_by(
            lambda b, e, m: e + np.uint32(127)
        ),
        "127 is missing: the byte is the exponent plus 127, E8M0's bias.": number_by(exponent_by_log2),
        "log2 of a float32 is rounded: just above a power of two it gives that power's exponent, and `ceil` leaves it. "
        "The bits are exact.": number_by(lambda ratio: exponent_by_log2(ratio) + F(127)),
        "The number amax / 448 is stored; the byte is its exponent, bits 23 to 30.": number_by(lambda ratio: ratio),
        "The mantissa is stored, bits 0 to 22; the byte is the exponent, bits 23 to 30.": byte_by(lambda b, e, m: m),
        "A mantissa of 1 adds nothing; what is added is one, if any of its 23 bits is set.": byte_by(
            lambda b, e, m: e + (m > 1)
        ),
        "The byte is that of the reciprocal, 254 - byte.": byte_by(lambda b, e, m: 254 - rounded_up(b, e, m)),
        "The exponent is taken from 127: the byte is the exponent field itself.": byte_by(
            lambda b, e, m: np.uint32(127) - e
        ),
        "The mantissa itself is added; what is added is one, if any bit of it is set.": byte_by(lambda b, e, m: e + m),
        "The lowest bit of the mantissa is added; what is added is one, if any of its 23 bits is set.": byte_by(
            lambda b, e, m: e + (m & 1)
        ),
        "This is the exponent of amax; `bits` holds amax / 448.": lambda amax: exponent_of_amax(amax, 0),
        "This is the exponent of amax, rounded up; `bits` holds amax / 448.": lambda amax: exponent_of_amax(
            amax, 0x7FFFFF
        ),
        "Every byte is cut to 254, so `byte` was larger: it is bits 23 to 30, moved down by 23. (-bits of an unsigned "
        "number is 2^32 - bits.)": byte_by(lambda b, e, m: np.full(b.shape, 254)),
        "Every byte is 0: no bit of the exponent is in it.": byte_by(lambda b, e, m: 0 * e),
        **{
            f"The bits are moved down by {distance}; the exponent field begins at bit 23.": byte_by(
                lambda b, e, m, distance=distance: b >> np.uint32(distance)
            )
            for distance in (22, 24)
        },
        **{
            f"The bits are rounded up, but moved down by {distance}; the exponent field begins at bit 23.": byte_by(
                lambda b, e, m, distance=distance: b + np.uint32(0x7FFFFF) >> np.uint32(distance)
            )
            for distance in (22, 24)
        },
    },
    "mxfp8": {
        "The elements are cast as they are, without 2^(127 - byte).": codes_by(lambda value, byte: e4m3(value)),
        "The numbers are stored without a cast: casts.e4m3 makes a code of each.": codes_by(
            lambda value, byte: value * power(byte, -1)
        ),
        "The elements are multiplied by the scale, 2^(byte - 127); the multiplier is 2^(127 - byte).": (
            codes_by(lambda value, byte: e4m3(value * power(byte, 1)))
        ),
        "The elements are multiplied by the byte itself; 2^(127 - byte) is casts.e8m0_multiplier(byte).": codes_by(
            lambda value, byte: e4m3(value * byte.astype(F))
        ),
        "The elements are divided by the byte itself; the multiplier is 2^(127 - byte), casts.e8m0_multiplier(byte).": (
            codes_by(lambda value, byte: e4m3(value / byte.astype(F)))
        ),
        "The elements are divided by 448; the multiplier is 2^(127 - byte).": codes_by(
            lambda value, byte: e4m3(value * holes.INVERSE_448)
        ),
        "The byte is unsigned: 127 - byte wraps around where the byte is larger than 127. 2^(127 - byte) is "
        "casts.e8m0_multiplier(byte).": codes_by(lambda value, byte: e4m3(value * unsigned_power(127, byte))),
        "The byte is unsigned: byte - 127 wraps around where the byte is smaller than 127. 2^(127 - byte) is "
        "casts.e8m0_multiplier(byte).": codes_by(lambda value, byte: e4m3(value / unsigned_power(byte, 127))),
        "casts.e8m0_multiplier takes the byte as it is: the multiplier here is 2^byte.": codes_by(
            lambda value, byte: e4m3(value * np.ldexp(F(1), byte.astype(np.int32)))
        ),
        "The elements are multiplied by the block's amax; the multiplier is 2^(127 - byte).": codes_by(
            lambda value, byte: e4m3(value * amax_of_blocks(value))
        ),
        "The elements are divided by amax / 448; the scale is a power of two, and divided by it they fit its byte.": (
            codes_by(lambda value, byte: e4m3(value / (amax_of_blocks(value) * holes.INVERSE_448)))
        ),
        "The code is multiplied: an element is multiplied first, then cast.": codes_by(
            lambda value, byte: e4m3(value).astype(F) * power(byte, -1)
        ),
        "The codes are FP4 E2M1's; the rule asks for FP8 E4M3.": codes_by(
            lambda value, byte: refops.encode(value * power(byte, -1), refops.E2M1)
        ),
        "The codes are FP8 E5M2's; the rule asks for E4M3.": codes_by(
            lambda value, byte: refops.encode(value * power(byte, -1), refops.E5M2)
        ),
        "The scale's byte stands where the codes belong.": codes_by(lambda value, byte: byte),
        "The multiplier is stored as scale; the byte is what belongs there.": scales_by(
            lambda byte, code: power(byte, -1)
        ),
        "The scale is stored as a number, not as the byte that stands for it.": scales_by(
            lambda byte, code: power(byte, 1)
        ),
        "127 is taken off the stored scale: the byte is stored as it is.": scales_by(
            lambda byte, code: byte.astype(np.int32) - 127
        ),
        "The stored scale is that of the reciprocal, 254 - byte.": scales_by(lambda byte, code: 254 - byte),
        "The code of the block's first element is stored as scale.": scales_by(lambda byte, code: code),
    },
    "pack_fp4": {
        "The second code must move up by four bits.": byte_of(lambda a, b: a | b),
        "The second code must move up by four bits; here it is added to the first.": byte_of(lambda a, b: a + b),
        "The second code must move up by four bits; here ^ joins what lies in the same place.": byte_of(
            lambda a, b: a ^ b
        ),
        "Both codes moved up by four bits: + binds tighter than <<, | does not.": byte_of(lambda a, b: a + b << 4),
        "The first code is moved up by 4 + second: + binds tighter than <<, | does not.": byte_of(
            lambda a, b: a << 4 + b
        ),
        "The second code is moved up by 4 + first: + binds tighter than <<, | does not.": byte_of(
            lambda a, b: b << 4 + a
        ),
        "Both codes moved up by four bits; only the second must.": byte_of(lambda a, b: (a | b) << 4),
        "The first code is in the upper half, the second in the lower: it is the other way round.": byte_of(
            lambda a, b: b | a << 4
        ),
        "The byte holds the first code alone, in its place; the second is missing.": byte_of(lambda a, b: a),
        "The byte holds the first code alone, in the second's place.": byte_of(lambda a, b: a << 4),
        "The byte holds the second code alone, in its place; the first is missing.": byte_of(lambda a, b: b << 4),
        "The byte holds the second code alone, in the first's place.": byte_of(lambda a, b: b),
        "The first code is in both halves.": byte_of(lambda a, b: a | a << 4),
        "The second code is in both halves.": byte_of(lambda a, b: b | b << 4),
        "The codes are multiplied; joined by | they stand beside each other.": byte_of(lambda a, b: a * b),
        "Every byte is 0: no bit of either code is in it. (& keeps only bits that both sides have.)": byte_of(
            lambda a, b: 0 * a
        ),
        "`and` chooses one of the two; | joins their bits.": byte_of(lambda a, b: np.where(a == 0, 0, b << 4)),
        "`or` chooses one of the two; | joins their bits.": byte_of(lambda a, b: np.where(a == 0, b << 4, a)),
        **{
            f"The second code is multiplied by {factor}; to move up by four bits is to multiply by 16.": byte_of(
                lambda a, b, factor=factor: a + b * factor
            )
            for factor in range(2, 16)
        },
        **dict(moved_codes()),
    },
    "transpose": {
        "The codes are copied, not transposed.": lambda x: x.reshape(x.shape[::-1]),
        "The tiles are in their places, but not turned: what is read at [a, b] of the tile is stored there at "
        "[a, b] too.": moved_not_turned,
        "Each tile is turned, but none has moved: row0 and column0 must change places as well.": turned_not_moved,
        "The tile is read without k: four times at the same place.": read_without_k,
    },
    "dbias": {
        "Only the rows of the threads with ty == 0 are counted: the other partial sums are missing.": counted(
            1, 0, 0, 0, 0, 0, 0, 0
        ),
        "Only the rows of the threads with ty == 7 are counted: each partial sum replaces the one before.": counted(
            0, 0, 0, 0, 0, 0, 0, 1
        ),
        "The part of the thread with ty == 0 is counted twice: it is in `total` and in `partial[0, tx]`.": counted(
            2, 1, 1, 1, 1, 1, 1, 1
        ),
        "The part of ty == 0 is counted twice, that of ty == 7 is missing: it is in `total` already, so k runs from 1 "
        "to 7.": counted(2, 1, 1, 1, 1, 1, 1, 0),
        "The part of ty == 7 is counted twice, that of ty == 0 is missing: the thread with ty == 7 adds the others, "
        "k from 0 to 6.": counted(0, 1, 1, 1, 1, 1, 1, 2),
        **dict(missing_parts()),
        "A thread adds its own part again and again: `partial[ty, tx]` is its own, `partial[k, tx]` that of another.": (
            counted(8, 0, 0, 0, 0, 0, 0, 0)
        ),
        "What is added comes from column 0 of `partial`: its second index is the column, tx.": of_first_column,
        "What is added comes from row 0 of `partial`: its first index is k, whose part is added.": of_first_row,
        "The largest partial sum is kept; the rule adds them.": lambda dy: partial_sums(dy).max(axis=0),
        "The sums run along the rows.": lambda dy: np.resize(dy.astype(F).sum(axis=1), dy.shape[1]),
    },
}


#: name of a puzzle whose holes are indices to read at, one thread for each element -> {what the wrong index means:
#: function of i, the number of the thread and its element, and of the sizes -> {array: [indices, ...]}}. "": right.
READS = {
    "add_bias": {
        "": reads_of_add_bias(own, lambda i, rows, columns: i % columns),
        "The bias is read at i % rows; it has a number for each column, so it is i % columns.": reads_of_add_bias(
            own, lambda i, rows, columns: i % rows
        ),
        "Each element gets the bias of its row's number: the column is i % columns.": reads_of_add_bias(
            own, lambda i, rows, columns: i // columns
        ),
        "The bias is read at i // rows; it has a number for each column, and the column is i % columns.": (
            reads_of_add_bias(own, lambda i, rows, columns: i // rows)
        ),
        "The bias is read at i, but it has only `columns` numbers: each row begins again, i % columns.": (
            reads_of_add_bias(own, own)
        ),
        "Every element gets the same bias: the column is i % columns.": reads_of_add_bias(
            own, lambda i, rows, columns: 0 * i
        ),
        "i // rows and i % rows are taken as row and column: a row has `columns` elements, so divide by columns.": (
            reads_of_add_bias(
                lambda i, rows, columns: i // rows * columns + i % rows, lambda i, rows, columns: i % rows
            )
        ),
        "A row begins at row * rows here; it has `columns` elements, so it begins at row * columns.": (
            reads_of_add_bias(
                lambda i, rows, columns: i // columns * rows + i % columns, lambda i, rows, columns: i % columns
            )
        ),
        "x is read at i * columns; i is the element's number already, x[i].": reads_of_add_bias(
            lambda i, rows, columns: i * columns, lambda i, rows, columns: i % columns
        ),
    },
    "widen_bf16": {
        "": lambda i, count: {"x": [i]},
        "Every thread reads x[0]; its element is x[i].": lambda i, count: {"x": [0 * i]},
        "x is read at threadIdx.x, which begins again in each block; i counts on.": lambda i, count: {"x": [i % 256]},
        "x is read at 2 * i: an index counts elements, not bytes.": lambda i, count: {"x": [2 * i]},
        "x is read one element too far: x[i + 1].": lambda i, count: {"x": [i + 1]},
        "x is read one element too early: x[i - 1].": lambda i, count: {"x": [i - 1]},
    },
    "swiglu": {
        "": reads_of_swiglu(act_place, gate_place),
        "gate is read 2 * columns behind act, a whole row of x further: it begins `columns` behind act.": (
            reads_of_swiglu(act_place, lambda r, c, rows, columns: r * 2 * columns + 2 * columns + c)
        ),
        "act and gate are read at 2 * column and 2 * column + 1, as if they alternated: a row is [act | gate].": (
            reads_of_swiglu(
                lambda r, c, rows, columns: r * 2 * columns + 2 * c,
                lambda r, c, rows, columns: r * 2 * columns + 2 * c + 1,
            )
        ),
        "gate is read at 2 * column + 1, as if it alternated with act: it begins `columns` behind act.": (
            reads_of_swiglu(act_place, lambda r, c, rows, columns: r * 2 * columns + 2 * c + 1)
        ),
        "gate is read at 2 * i: twice the index is not `columns` further.": reads_of_swiglu(
            lambda r, c, rows, columns: r * columns + c, lambda r, c, rows, columns: 2 * (r * columns + c)
        ),
        "gate is read rows * columns behind act, as if all of act came before all of gate: each row is [act | gate].": (
            reads_of_swiglu(
                lambda r, c, rows, columns: r * columns + c,
                lambda r, c, rows, columns: rows * columns + r * columns + c,
            )
        ),
        "A row of x has 2 * columns elements: act and gate of row r start at r * 2 * columns.": reads_of_swiglu(
            lambda r, c, rows, columns: r * columns + c, lambda r, c, rows, columns: r * columns + columns + c
        ),
        "gate is right, but act is read at row * columns + column: a row of x has 2 * columns elements.": (
            reads_of_swiglu(lambda r, c, rows, columns: r * columns + c, gate_place)
        ),
        "act is right, but gate is read at row * columns + columns + column: a row of x has 2 * columns elements.": (
            reads_of_swiglu(act_place, lambda r, c, rows, columns: r * columns + columns + c)
        ),
        "Every row reads the first row of x: row * 2 * columns is missing.": reads_of_swiglu(
            lambda r, c, rows, columns: c, lambda r, c, rows, columns: columns + c
        ),
        "A row of x begins at row * 2 * rows here; it has 2 * columns elements.": reads_of_swiglu(
            lambda r, c, rows, columns: r * 2 * rows + c, lambda r, c, rows, columns: r * 2 * rows + columns + c
        ),
        "Every element reads the first gate of its row: `+ column` is missing.": reads_of_swiglu(
            act_place, lambda r, c, rows, columns: r * 2 * columns + columns
        ),
        "Every element reads the first act of its row: `+ column` is missing.": reads_of_swiglu(
            lambda r, c, rows, columns: r * 2 * columns, gate_place
        ),
        "Every element reads the first act and gate of its row: `+ column` is missing.": reads_of_swiglu(
            lambda r, c, rows, columns: r * 2 * columns, lambda r, c, rows, columns: r * 2 * columns + columns
        ),
        "act is read twice, and gate never: gate begins `columns` behind act.": reads_of_swiglu(act_place, act_place),
        "gate is read twice, and act never: act begins at row * 2 * columns.": reads_of_swiglu(gate_place, gate_place),
        "gate is read `rows` behind act: it begins `columns` behind it.": reads_of_swiglu(
            act_place, lambda r, c, rows, columns: r * 2 * columns + rows + c
        ),
        "gate is read columns // 2 behind act: `columns` is the length of act alone.": reads_of_swiglu(
            act_place, lambda r, c, rows, columns: r * 2 * columns + columns // 2 + c
        ),
        "gate is the right neighbour of act here: it begins `columns` behind act.": reads_of_swiglu(
            act_place, lambda r, c, rows, columns: r * 2 * columns + c + 1
        ),
        "i % rows is taken as column: a row has `columns` elements, so it is i % columns.": reads_of_swiglu(
            lambda r, c, rows, columns: r * 2 * columns + (r * columns + c) % rows,
            lambda r, c, rows, columns: r * 2 * columns + columns + (r * columns + c) % rows,
        ),
        "Row and column are exchanged: the index is row * 2 * columns + column.": reads_of_swiglu(
            lambda r, c, rows, columns: c * 2 * rows + r, lambda r, c, rows, columns: c * 2 * rows + rows + r
        ),
    },
}
