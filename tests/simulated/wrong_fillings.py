"""Wrong fillings of the puzzles' holes, as learners write them, and what the checker must say of each."""

# add_bias
GUARD = "if i < rows * columns:\n    "
# mxfp8
CODES = "np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte)))"
SCALES = "if i % 32 == 0:\n    scales[i // 32] = np.uint8(byte)"
FIRST_OF_BLOCK = "if i % 32 == 0:\n    "
# block_amax
LARGER = "largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, d))"
STEPS = "for d in (16, 8, 4, 2, 1):\n    "
WHOLE_BLOCK = "for k in range(i // 32 * 32, min(i // 32 * 32 + 32, count)):\n    "
READ = "largest = maximum(largest, magnitude(x[k]))"
# transpose
BARRIER = "cuda.syncthreads()"
TURNED = "row, column = row0 + tx, column0 + ty + k\n"
AS_READ = "row, column = row0 + ty + k, column0 + tx\n"
INSIDE = "if row < rows and column < columns:\n    "
PLACE = "y[column * rows + row] = "
TILE = "np.uint8(tile[tx, ty + k])"
# dbias
MEET = "partial[ty, tx] = total\ncuda.syncthreads()\n"
FIRST_ROW = "if ty == 0 and column < columns:\n    "
OTHERS = "for k in range(1, 8):\n        "
ADD = "total = total + partial[k, tx]"
STORE = "\n    sums[column] = total"
ADD_ROW = "total = total + casts.widen_bf16(dy[row * columns + column])"
#: name of a puzzle -> {the cause that the verdict must name, and no other: [what goes into the holes, ...]}.
CAUSES = {
    "add_bias": {
        "The bias is read at i % rows; it has a number for each column, so it is i % columns.": [
            (f"{GUARD}y[i] = x[i] + bias[i % rows]",),
        ],
        "The bias is read at i // rows; it has a number for each column, and the column is i % columns.": [
            (f"{GUARD}y[i] = x[i] + bias[i // rows]",),
        ],
        "Each element gets the bias of its row's number: the column is i % columns.": [
            (f"{GUARD}y[i] = x[i] + bias[i // columns]",),
        ],
        "The bias is read at i, but it has only `columns` numbers: each row begins again, i % columns.": [
            (f"{GUARD}y[i] = x[i] + bias[i]",),
            (f"{GUARD}y[i] = x[i] + bias[cuda.threadIdx.x]",),
        ],
        "Every element gets the same bias: the column is i % columns.": [
            (f"{GUARD}y[i] = x[i] + bias[cuda.blockIdx.x]",),
            (f"{GUARD}y[i] = x[i] + bias[0]",),
        ],
        "x is read at i * columns; i is the element's number already, x[i].": [
            (f"{GUARD}y[i] = x[i * columns] + bias[i % columns]",),
        ],
        "x is multiplied by the bias; the rule adds it.": [
            (f"{GUARD}y[i] = x[i] * bias[i % columns]",),
        ],
        "The bias is subtracted.": [
            (f"{GUARD}y[i] = x[i] - bias[i % columns]",),
        ],
        "The bias is stored alone: x is not added.": [
            (f"{GUARD}y[i] = bias[i % columns]",),
        ],
        "The bias is not added.": [
            (f"{GUARD}y[i] = x[i]",),
        ],
        "The number of the column is added, not the bias of that column.": [
            (f"{GUARD}y[i] = x[i] + i % columns",),
        ],
        ("i // rows and i % rows are taken as row and column: a row has `columns` elements, so divide by columns."): [
            (
                (
                    f"row, column = i // rows, i % rows\n{GUARD}y[row * columns + column] = x[row * columns + "
                    "column] + bias[column]"
                ),
            ),
        ],
        ("The sums are right, but stored at column * rows + row: y lies like x, at row * columns + column."): [
            (
                (
                    "row, column = i // columns, i % columns\nif row < rows:\n    y[column * rows + row] = x[row * "
                    "columns + column] + bias[column]"
                ),
            ),
        ],
        "A row begins at row * rows here; it has `columns` elements, so it begins at row * columns.": [
            (
                (
                    "row, column = i // columns, i % columns\nif row < rows:\n    y[row * rows + column] = x[row * "
                    "rows + column] + bias[column]"
                ),
            ),
        ],
    },
    "widen_bf16": {
        "The bits were read as a whole number and that was converted.": [
            ("x[i]",),
            ("F(x[i])",),
            ("np.float32(x[i])",),
        ],
        "The bits are in the lower half: they must move up by 16.": [
            ("as_f32(x[i])",),
            ("as_f32(np.uint32(x[i]))",),
        ],
        "All bits are gone: a uint16 shifted by 16 is 0. Make it a uint32 first.": [
            ("as_f32(x[i] << 16)",),
            ("as_f32(np.uint32(x[i] << 16))",),
            ("as_f32(np.uint32(x[i]) >> U32(16))",),
            ("as_f32(np.uint16(x[i]) << U16(16))",),
        ],
        "The bits are moved up by 15; the upper half begins at bit 16.": [
            ("as_f32(np.uint32(x[i]) << U32(15))",),
        ],
        "The bits are moved up by 17; the upper half begins at bit 16.": [
            ("as_f32(np.uint32(x[i]) << U32(17))",),
        ],
        "The bits are moved up by 8; the upper half begins at bit 16.": [
            ("as_f32(np.uint32(x[i]) << U32(8))",),
        ],
        "The bits are moved up by 23; the upper half begins at bit 16.": [
            ("as_f32(np.uint32(x[i]) << U32(23))",),
        ],
        ("The bits are in their place, but the whole number that they are was converted: as_f32 is missing."): [
            ("np.uint32(x[i]) << U32(16)",),
        ],
        "Every thread reads x[0]; its element is x[i].": [
            ("as_f32(np.uint32(x[0]) << U32(16))",),
        ],
        "x is read at threadIdx.x, which begins again in each block; i counts on.": [
            ("as_f32(np.uint32(x[cuda.threadIdx.x]) << U32(16))",),
        ],
        "x is read one element too far: x[i + 1].": [
            ("as_f32(np.uint32(x[i + 1]) << U32(16))",),
        ],
        "x is read one element too early: x[i - 1].": [
            ("as_f32(np.uint32(x[i - 1]) << U32(16))",),
        ],
        "x is read at 2 * i: an index counts elements, not bytes.": [
            ("as_f32(np.uint32(x[2 * i]) << U32(16))",),
        ],
        "as_u32 gives the bits of a float32. Here the bits are known: as_f32 makes the float32.": [
            ("as_u32(x[i])",),
        ],
        "as_u32 makes a float32 of x[i] first, and as_f32 is missing: np.uint32(x[i]) keeps the bits.": [
            ("as_u32(x[i]) << U32(16)",),
        ],
        "as_u32 makes a float32 of x[i] first, with other bits: np.uint32(x[i]) keeps the bits.": [
            ("as_f32(as_u32(x[i]) << U32(16))",),
        ],
        "The bits were read as float16.": [
            ("x[i].view(np.float16)",),
        ],
        "casts.narrow_bf16 makes a bfloat16; here is one already.": [
            ("casts.narrow_bf16(x[i])",),
            ("casts.narrow_bf16(F(x[i]))",),
        ],
        "The bits are moved up by 4; the upper half begins at bit 16.": [
            ("as_f32(np.uint32(x[i]) * 16)",),
        ],
    },
    "swiglu": {
        (
            "gate-order: The row is taken as [gate | act]: the activation is applied to the second half "
            "of x, where TE applies it to the first."
        ): [
            ("x[row * 2 * columns + columns + column]", "x[row * 2 * columns + column]"),
        ],
        (
            "input-shifted: Gate of x is read 1 column away from where it belongs: column n gets what column n - 1 "
            "should get."
        ): [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + columns + column - 1]"),
        ],
        "gate is read 2 * columns behind act, a whole row of x further: it begins `columns` behind act.": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + 2 * columns + column]"),
            ("x[row * 2 * columns + column]", "x[(row + 1) * 2 * columns + column]"),
        ],
        ("act and gate are read at 2 * column and 2 * column + 1, as if they alternated: a row is [act | gate]."): [
            ("x[row * 2 * columns + 2 * column]", "x[row * 2 * columns + 2 * column + 1]"),
            ("x[2 * i]", "x[2 * i + 1]"),
        ],
        "gate is read at 2 * column + 1, as if it alternated with act: it begins `columns` behind act.": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + 2 * column + 1]"),
        ],
        "A row of x has 2 * columns elements: act and gate of row r start at r * 2 * columns.": [
            ("x[i]", "x[i + columns]"),
            ("x[row * columns + column]", "x[row * columns + columns + column]"),
        ],
        (
            "gate is read rows * columns behind act, as if all of act came before all of gate: each row "
            "is [act | gate]."
        ): [
            ("x[i]", "x[i + rows * columns]"),
        ],
        "gate is read at 2 * i: twice the index is not `columns` further.": [
            ("x[i]", "x[2 * i]"),
        ],
        ("act is right, but gate is read at row * columns + columns + column: a row of x has 2 * columns elements."): [
            ("x[row * 2 * columns + column]", "x[row * columns + columns + column]"),
        ],
        "gate is right, but act is read at row * columns + column: a row of x has 2 * columns elements.": [
            ("x[row * columns + column]", "x[row * 2 * columns + columns + column]"),
        ],
        "gate is read columns // 2 behind act: `columns` is the length of act alone.": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + columns // 2 + column]"),
        ],
        "gate is read `rows` behind act: it begins `columns` behind it.": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + rows + column]"),
        ],
        "gate is the right neighbour of act here: it begins `columns` behind act.": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + column + 1]"),
        ],
        "Every element reads the first gate of its row: `+ column` is missing.": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + columns]"),
        ],
        "Every element reads the first act and gate of its row: `+ column` is missing.": [
            ("x[row * 2 * columns]", "x[row * 2 * columns + columns]"),
        ],
        "Every element reads the first act of its row: `+ column` is missing.": [
            ("x[row * 2 * columns]", "x[row * 2 * columns + columns + column]"),
        ],
        "act is read twice, and gate never: gate begins `columns` behind act.": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + column]"),
        ],
        "gate is read twice, and act never: act begins at row * 2 * columns.": [
            ("x[row * 2 * columns + columns + column]", "x[row * 2 * columns + columns + column]"),
        ],
        "Row and column are exchanged: the index is row * 2 * columns + column.": [
            ("x[column * 2 * rows + row]", "x[column * 2 * rows + rows + row]"),
        ],
        "Every row reads the first row of x: row * 2 * columns is missing.": [
            ("x[column]", "x[columns + column]"),
        ],
        "A row of x begins at row * 2 * rows here; it has 2 * columns elements.": [
            ("x[row * 2 * rows + column]", "x[row * 2 * rows + columns + column]"),
        ],
        "i % rows is taken as column: a row has `columns` elements, so it is i % columns.": [
            ("x[row * 2 * columns + i % rows]", "x[row * 2 * columns + columns + i % rows]"),
        ],
    },
    "block_amax": {
        "Each thread still knows its own element only.": [
            ("",),
            (f"{STEPS}maximum(largest, cuda.shfl_xor_sync(WARP, largest, d))",),
            (
                (
                    f"{STEPS}other = cuda.shfl_xor_sync(WARP, largest, d)\n    if other > largest:\n        other = "
                    "largest"
                ),
            ),
        ],
        "The steps of the distances 8, 4, 2 and 1 are missing.": [
            (f"for d in (16,):\n    {LARGER}",),
        ],
        "The steps of the distances 4, 2 and 1 are missing.": [
            (f"for d in (16, 8):\n    {LARGER}",),
        ],
        "The steps of the distances 2 and 1 are missing.": [
            (f"for d in (16, 8, 4):\n    {LARGER}",),
        ],
        "The step of distance 1 is missing.": [
            (f"for d in (16, 8, 4, 2):\n    {LARGER}",),
            (f"for d in (16, 16, 8, 4, 2):\n    {LARGER}",),
            (f"for d in (2, 4, 8, 16):\n    {LARGER}",),
        ],
        "The step of distance 16 is missing.": [
            (f"for d in (8, 4, 2, 1):\n    {LARGER}",),
            (f"for d in range(16):\n    {LARGER}",),
        ],
        "The steps of the distances 16, 8, 4 and 2 are missing.": [
            (f"for d in (1,):\n    {LARGER}",),
        ],
        "The steps of the distances 16 and 8 are missing.": [
            (f"for d in range(5):\n    {LARGER}",),
            (f"for d in range(1, 6):\n    {LARGER}",),
            (f"for d in (1, 2, 3, 4, 5):\n    {LARGER}",),
            (f"for d in (5, 4, 3, 2, 1):\n    {LARGER}",),
        ],
        "What comes from another thread replaces `largest`: the larger of the two must stay.": [
            (f"{STEPS}largest = cuda.shfl_xor_sync(WARP, largest, d)",),
        ],
        "The shuffled values are added; the rule asks for the larger of two.": [
            (f"{STEPS}largest = largest + cuda.shfl_xor_sync(WARP, largest, d)",),
        ],
        "The smaller of two is kept; the rule asks for the larger.": [
            (
                (
                    f"{STEPS}largest = select(largest < cuda.shfl_xor_sync(WARP, largest, d), largest, "
                    "cuda.shfl_xor_sync(WARP, largest, d))"
                ),
            ),
            (f"{STEPS}largest = min(largest, cuda.shfl_xor_sync(WARP, largest, d))",),
        ],
        ("Each step fetches an element of x with its sign: shuffle `largest`, what the other knows by then."): [
            (f"{STEPS}largest = maximum(largest, cuda.shfl_xor_sync(WARP, x[i], d))",),
            (f"{STEPS}largest = maximum(largest, x[i ^ d])",),
            (f"{STEPS}largest = maximum(largest, cuda.shfl_xor_sync(WARP, x[i] if i < count else F(0), d))",),
        ],
        "Each step fetches an element of x: shuffle `largest`, what the other knows by then.": [
            (f"{STEPS}largest = maximum(largest, cuda.shfl_xor_sync(WARP, magnitude(x[i]), d))",),
            (f"{STEPS}largest = maximum(largest, magnitude(x[i ^ d]))",),
        ],
        "The sign still counts: magnitudes are compared.": [
            ("for d in range(32):\n    largest = maximum(largest, x[i // 32 * 32 + d])",),
        ],
    },
    "scale_byte": {
        "The exponent is rounded down: it takes one more unless the mantissa is zero.": [
            ("bits >> U32(23)",),
            ("np.uint32(bits + U32(1)) >> U32(23)",),
        ],
        "A mantissa of zero needs no more: that power of two is the scale itself.": [
            ("(bits >> U32(23)) + U32(1)",),
        ],
        "The exponent is rounded to the nearest power of two; the rule rounds it up.": [
            ("np.uint32(bits + U32(0x400000)) >> U32(23)",),
            ("np.uint32(bits + U32(0x3FFFFF)) >> U32(23)",),
        ],
        "The exponent is rounded down, and 127 is taken off: E8M0 has the bias of float32.": [
            ("(bits >> U32(23)) - U32(127)",),
        ],
        "127 is added: E8M0 has the bias of float32, so the exponent field is the byte.": [
            ("(np.uint32(bits + U32(0x7FFFFF)) >> U32(23)) + U32(127)",),
        ],
        "The exponent is rounded down, and 127 is added: E8M0 has the bias of float32.": [
            ("(bits >> U32(23)) + U32(127)",),
        ],
        "The bits are rounded up, but moved down by 22; the exponent field begins at bit 23.": [
            ("np.uint32(bits + U32(0x7FFFFF)) >> U32(22)",),
        ],
        "The bits are rounded up, but moved down by 24; the exponent field begins at bit 23.": [
            ("np.uint32(bits + U32(0x7FFFFF)) >> U32(24)",),
        ],
        "Every byte is cut to 254, so `byte` was larger: it is bits 23 to 30, moved down by 23. (-bits of an unsigned "
        "number is 2^32 - bits.)": [
            ("-(-bits // 2**23)",),
            ("bits & U32(0x7F800000)",),
            ("bits >> U32(16)",),
            ("bits",),
        ],
        "The mantissa itself is added; what is added is one, if any bit of it is set.": [
            ("(bits >> U32(23)) + (bits & U32(0x7FFFFF))",),
        ],
        "One more is taken where the mantissa is zero, and must be where it is not.": [
            ("select(bits & U32(0x7FFFFF) == U32(0), (bits >> U32(23)) + U32(1), bits >> U32(23))",),
        ],
        "The byte is that of the reciprocal, 254 - byte.": [
            ("U32(254) - (np.uint32(bits + U32(0x7FFFFF)) >> U32(23))",),
        ],
        (
            "scale-floor: The scale bytes follow the OCP floor rule, 2^(floor(log2 amax) - 8), where TE has "
            "the round-up rule, amax / max rounded up to a power of two."
        ): [
            ("(as_u32(amax[i]) >> U32(23)) - U32(8)",),
        ],
        "This is the exponent of amax; `bits` holds amax / 448.": [
            ("as_u32(amax[i]) >> U32(23)",),
        ],
        "This is the exponent of amax, rounded up; `bits` holds amax / 448.": [
            ("np.uint32(as_u32(amax[i]) + U32(0x7FFFFF)) >> U32(23)",),
        ],
        (
            "scale-even: The scale bytes follow the OCP even rule (amax rounded to the format's mantissa "
            "first), where TE has the round-up rule, amax / max rounded up to a power of two."
        ): [
            ("(np.uint32(as_u32(amax[i]) + U32(0x80000)) >> U32(23)) - U32(8)",),
        ],
        "A mantissa of 1 adds nothing; what is added is one, if any of its 23 bits is set.": [
            ("(bits + U32(0x7FFFFE)) >> U32(23)",),
            ("np.uint32(bits + U32(0x7FFFFE)) >> U32(23)",),
            ("select((bits & U32(0x7FFFFF)) > U32(1), (bits >> U32(23)) + U32(1), bits >> U32(23))",),
        ],
        "127 is missing: the byte is the exponent plus 127, E8M0's bias.": [
            ("np.ceil(np.log2(amax[i] * INVERSE_448))",),
        ],
        (
            "log2 of a float32 is rounded: just above a power of two it gives that power's exponent, and `ceil` "
            "leaves it. The bits are exact."
        ): [
            ("np.ceil(np.log2(amax[i] * INVERSE_448)) + F(127)",),
            ("np.ceil(np.log2(as_f32(bits))) + 127",),
        ],
        "Every byte is 0: no bit of the exponent is in it.": [
            ("U32(0)",),
            ("(bits >> U32(23)) & U32(0xFF) + U32(1)",),
        ],
        "The number amax / 448 is stored; the byte is its exponent, bits 23 to 30.": [
            ("amax[i] * INVERSE_448",),
        ],
        "The mantissa is stored, bits 0 to 22; the byte is the exponent, bits 23 to 30.": [
            ("bits & U32(0x7FFFFF)",),
        ],
        "The byte is one too large.": [
            ("np.uint32(bits + U32(0xFFFFFF)) >> U32(23)",),
            ("(np.uint32(bits + U32(0x7FFFFF)) >> U32(23)) + U32(1)",),
        ],
        "The bits are moved down by 24; the exponent field begins at bit 23.": [
            ("bits >> U32(24)",),
            ("bits >> U32(23) + U32(1)",),
        ],
        "The lowest bit of the mantissa is added; what is added is one, if any of its 23 bits is set.": [
            ("(bits >> U32(23)) + (bits & U32(1))",),
        ],
        "127 is taken off: E8M0 has the bias of float32, so the exponent field is the byte.": [
            ("(bits >> U32(23)) - U32(127) + select(bits & U32(0x7FFFFF) != U32(0), U32(1), U32(0))",),
            ("np.uint32(np.uint32(bits + U32(0x7FFFFF)) >> U32(23)) - U32(127)",),
        ],
        "The byte is one too small.": [
            ("(np.uint32(bits + U32(0x7FFFFF)) >> U32(23)) - U32(1)",),
        ],
        "The exponent is taken from 127: the byte is the exponent field itself.": [
            ("U32(127) - (bits >> U32(23))",),
        ],
    },
    "mxfp8": {
        "The elements are multiplied by the scale, 2^(byte - 127); the multiplier is 2^(127 - byte).": [
            ("np.uint8(casts.e4m3(value * casts.e8m0_value(byte)))", SCALES),
            ("casts.e4m3(value / casts.e8m0_multiplier(byte))", SCALES),
        ],
        "The elements are cast as they are, without 2^(127 - byte).": [
            ("np.uint8(casts.e4m3(value))", SCALES),
        ],
        "The numbers are stored without a cast: casts.e4m3 makes a code of each.": [
            ("np.uint8(value * casts.e8m0_multiplier(byte))", SCALES),
        ],
        "The codes are FP8 E5M2's; the rule asks for E4M3.": [
            ("np.uint8(casts.e5m2(value * casts.e8m0_multiplier(byte)))", SCALES),
        ],
        "The codes are FP4 E2M1's; the rule asks for FP8 E4M3.": [
            ("np.uint8(casts.e2m1(value * casts.e8m0_multiplier(byte)))", SCALES),
        ],
        ("The elements are multiplied by the byte itself; 2^(127 - byte) is casts.e8m0_multiplier(byte)."): [
            ("np.uint8(casts.e4m3(value * byte))", SCALES),
        ],
        (
            "The elements are divided by the byte itself; the multiplier is 2^(127 - byte), "
            "casts.e8m0_multiplier(byte)."
        ): [
            ("np.uint8(casts.e4m3(value / byte))", SCALES),
        ],
        "The elements are divided by 448; the multiplier is 2^(127 - byte).": [
            ("np.uint8(casts.e4m3(value * INVERSE_448))", SCALES),
        ],
        "The code is multiplied: an element is multiplied first, then cast.": [
            ("np.uint8(casts.e4m3(value) * casts.e8m0_multiplier(byte))", SCALES),
        ],
        ("The elements are divided by amax / 448; the scale is a power of two, and divided by it they fit its byte."): [
            ("casts.e4m3(value / (amax_of_warp(value) * INVERSE_448))", SCALES),
        ],
        "The elements are multiplied by the block's amax; the multiplier is 2^(127 - byte).": [
            ("casts.e4m3(value * amax_of_warp(value))", SCALES),
        ],
        "The multiplier is stored as scale; the byte is what belongs there.": [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32] = np.uint8(casts.e8m0_multiplier(byte))"),
        ],
        "The scale is stored as a number, not as the byte that stands for it.": [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32] = casts.e8m0_value(byte)"),
        ],
        "127 is taken off the stored scale: the byte is stored as it is.": [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32] = np.uint8(byte - 127)"),
        ],
        "The stored scale is that of the reciprocal, 254 - byte.": [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32] = np.uint8(254 - byte)"),
        ],
        ("scale-off-by-one: Each scale byte is one too high, though the data are cast with the right one."): [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32] = np.uint8(byte + 1)"),
        ],
        (
            "stale-scale: The stored scales are 1 (0x7F) whatever the amax is, though the data are cast with the right "
            "ones: the one that they begin with, which was not replaced."
        ): [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32] = np.uint8(127)"),
        ],
        "The code of the block's first element is stored as scale.": [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32] = codes[i]"),
        ],
        "The scale's byte stands where the codes belong.": [
            ("byte", SCALES),
        ],
        ("scale-off-by-one: Each scale byte is one too high for the cast, though the right one is stored."): [
            ("np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte + 1)))", SCALES),
        ],
        "scale-off-by-one: Each scale byte is one too low for the cast, though the right one is stored.": [
            ("np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte - 1)))", SCALES),
        ],
        (
            "The byte is unsigned: 127 - byte wraps around where the byte is larger than 127. 2^(127 - byte) is "
            "casts.e8m0_multiplier(byte)."
        ): [
            ("casts.e4m3(value * 2.0 ** (127 - byte))", SCALES),
        ],
        (
            "The byte is unsigned: byte - 127 wraps around where the byte is smaller than 127. 2^(127 - byte) is "
            "casts.e8m0_multiplier(byte)."
        ): [
            ("casts.e4m3(value / 2.0 ** (byte - 127))", SCALES),
        ],
        "casts.e8m0_multiplier takes the byte as it is: the multiplier here is 2^byte.": [
            ("np.uint8(casts.e4m3(value * casts.e8m0_multiplier(127 - byte)))", SCALES),
        ],
        "sign-lost: The sign bits are missing: the codes are those of magnitudes.": [
            ("np.uint8(casts.e4m3(magnitude(value) * casts.e8m0_multiplier(byte)))", SCALES),
        ],
    },
    "pack_fp4": {
        "The first code is in the upper half, the second in the lower: it is the other way round.": [
            ("np.uint8(second | first << U32(4))",),
        ],
        "The second code must move up by four bits.": [
            ("np.uint8(first | second)",),
            ("first | second",),
        ],
        "The second code must move up by four bits; here it is added to the first.": [
            ("np.uint8(first + second)",),
        ],
        "Both codes moved up by four bits: + binds tighter than <<, | does not.": [
            ("np.uint8(first + second << U32(4))",),
        ],
        "Both codes moved up by four bits; only the second must.": [
            ("np.uint8((first | second) << U32(4))",),
            ("np.uint8(first << U32(4) | second << U32(4))",),
        ],
        "The codes are multiplied; joined by | they stand beside each other.": [
            ("np.uint8(first * second)",),
        ],
        "Every byte is 0: no bit of either code is in it. (& keeps only bits that both sides have.)": [
            ("np.uint8(first & second << U32(4))",),
            ("np.uint8(0)",),
        ],
        "The byte holds the first code alone, in its place; the second is missing.": [
            ("np.uint8(first | second << U32(8))",),
            ("np.uint8(first | second >> U32(4))",),
            ("np.uint8(first)",),
        ],
        "The first code is moved up by 0 bits and the second by 3: it must be 0 and 4.": [
            ("np.uint8(first | second << U32(3))",),
        ],
        "The first code is moved up by 0 bits and the second by 2: it must be 0 and 4.": [
            ("np.uint8(first | second << U32(2))",),
        ],
        "The first code is moved up by 0 bits and the second by 5: it must be 0 and 4.": [
            ("np.uint8(first | second << U32(5))",),
        ],
        "The byte holds the second code alone, in the first's place.": [
            ("np.uint8(second)",),
            ("np.uint8(first << U32(8) | second)",),
        ],
        "The byte holds the first code alone, in the second's place.": [
            ("np.uint8(first << U32(4))",),
            ("np.uint8(first << U32(4) | second >> U32(4))",),
        ],
        "The byte holds the second code alone, in its place; the first is missing.": [
            ("np.uint8(second << U32(4))",),
        ],
        "The first code is in both halves.": [
            ("np.uint8(first | first << U32(4))",),
        ],
        "The second code is in both halves.": [
            ("np.uint8(second | second << U32(4))",),
        ],
        "The second code is multiplied by 4; to move up by four bits is to multiply by 16.": [
            ("np.uint8(first + second * 4)",),
        ],
        "The second code is multiplied by 10; to move up by four bits is to multiply by 16.": [
            ("np.uint8(first + second * 10)",),
        ],
        "The first code is moved up by 4 + second: + binds tighter than <<, | does not.": [
            ("np.uint8(first << U32(4) + second)",),
        ],
        "The second code is moved up by 4 + first: + binds tighter than <<, | does not.": [
            ("np.uint8(second << U32(4) + first)",),
        ],
        "The second code is multiplied by 2; to move up by four bits is to multiply by 16.": [
            ("np.uint8(first + second * 2)",),
        ],
        "The second code must move up by four bits; here ^ joins what lies in the same place.": [
            ("np.uint8(first ^ second)",),
        ],
        "The first code is moved up by 0 bits and the second by 1: it must be 0 and 4.": [
            ("np.uint8(first | second << U32(1))",),
        ],
        "`and` chooses one of the two; | joins their bits.": [
            ("np.uint8(first and second << U32(4))",),
        ],
        "`or` chooses one of the two; | joins their bits.": [
            ("np.uint8(first or second << U32(4))",),
        ],
        "The first code is moved up by 2 bits and the second by 0: it must be 0 and 4.": [
            ("np.uint8(first << U32(2) | second)",),
        ],
    },
    "transpose": {
        (
            "The tiles are in their places, but not turned: what is read at [a, b] of the tile is stored "
            "there at [a, b] too."
        ): [
            ("33", BARRIER, f"{TURNED}{INSIDE}{PLACE}np.uint8(tile[ty + k, tx])"),
            ("33", BARRIER, f"{AS_READ}{INSIDE}{PLACE}{TILE}"),
            (
                "33",
                BARRIER,
                (
                    "row, column = column0 + ty + k, row0 + tx\nif row < columns and column < rows:\n    y[row * "
                    "rows + column] = np.uint8(tile[ty + k, tx])"
                ),
            ),
        ],
        "The tile is read without k: four times at the same place.": [
            ("33", BARRIER, f"{TURNED}{INSIDE}{PLACE}np.uint8(tile[tx, ty])"),
        ],
        "The codes are copied, not transposed.": [
            ("33", BARRIER, f"{TURNED}{INSIDE}y[row * columns + column] = {TILE}"),
            ("33", BARRIER, f"{TURNED}{INSIDE}y[row * rows + column] = {TILE}"),
            ("33", BARRIER, f"{AS_READ}{INSIDE}y[row * columns + column] = np.uint8(tile[ty + k, tx])"),
            ("33", BARRIER, f"{AS_READ}{INSIDE}y[row * rows + column] = np.uint8(tile[ty + k, tx])"),
        ],
        "Each tile is turned, but none has moved: row0 and column0 must change places as well.": [
            ("33", BARRIER, f"{AS_READ}{INSIDE}y[row * columns + column] = {TILE}"),
            ("33", BARRIER, f"{AS_READ}{INSIDE}y[row * rows + column] = {TILE}"),
            ("33", BARRIER, f"row, column = column0 + tx, row0 + ty + k\n{INSIDE}{PLACE}{TILE}"),
            ("33", BARRIER, f"row, column = column0 + tx, row0 + ty + k\n{INSIDE}{PLACE}{TILE}"),
        ],
    },
    "dbias": {
        ("The part of the thread with ty == 0 is counted twice: it is in `total` and in `partial[0, tx]`."): [
            (f"{MEET}{FIRST_ROW}for k in range(8):\n        {ADD}{STORE}",),
        ],
        (
            "The part of ty == 0 is counted twice, that of ty == 7 is missing: it is in `total` already, "
            "so k runs from 1 to 7."
        ): [
            (f"{MEET}{FIRST_ROW}for k in range(7):\n        {ADD}{STORE}",),
        ],
        "The partial sums of the threads with ty == 7 are missing.": [
            (f"{MEET}{FIRST_ROW}for k in range(1, 7):\n        {ADD}{STORE}",),
        ],
        "The partial sums of the threads with ty == 1 are missing.": [
            (f"{MEET}{FIRST_ROW}for k in range(2, 8):\n        {ADD}{STORE}",),
        ],
        ("Only the rows of the threads with ty == 7 are counted: each partial sum replaces the one before."): [
            (f"{MEET}{FIRST_ROW}{OTHERS}total = partial[k, tx]{STORE}",),
        ],
        (
            "A thread adds its own part again and again: `partial[ty, tx]` is its own, `partial[k, tx]` "
            "that of another."
        ): [
            (f"{MEET}{FIRST_ROW}{OTHERS}total = total + partial[ty, tx]{STORE}",),
        ],
        "What is added comes from row 0 of `partial`: its first index is k, whose part is added.": [
            (f"{MEET}{FIRST_ROW}{OTHERS}total = total + partial[ty, k]{STORE}",),
        ],
        "The sums run along the rows.": [
            (
                f"total = F(0)\n{FIRST_ROW}for k in range(columns):\n"
                f"        total = total + casts.widen_bf16(dy[column % rows * columns + k]){STORE}",
            ),
        ],
        "The largest partial sum is kept; the rule adds them.": [
            (f"{MEET}{FIRST_ROW}{OTHERS}total = maximum(total, partial[k, tx]){STORE}",),
        ],
        "What is added comes from column 0 of `partial`: its second index is the column, tx.": [
            (f"{MEET}{FIRST_ROW}{OTHERS}total = total + partial[k, ty]{STORE}",),
        ],
        (
            "The part of ty == 7 is counted twice, that of ty == 0 is missing: the thread with ty == 7 "
            "adds the others, k from 0 to 6."
        ): [
            (f"{MEET}if ty == 7 and column < columns:\n    {OTHERS}{ADD}{STORE}",),
        ],
        "Only the rows of the threads with ty == 0 are counted: the other partial sums are missing.": [
            (f"{MEET}{FIRST_ROW}{OTHERS}{ADD}\n    sums[column] = partial[0, tx]",),
            (f"{FIRST_ROW}sums[column] = total",),
            (f"{MEET}if column < columns:\n    sums[column] = partial[0, tx]",),
        ],
    },
}
#: The same of wrong answers whose run shows by itself what is wrong: a line of the verdict, and no cause is named.
SHOWN = {
    "add_bias": {
        "Each thread that has no element does this: the guard is missing.": [
            ("y[i] = x[i] + bias[i % columns]",),
        ],
        ("Only the thread behind the last element does this, number 300: the guard lets one too many through."): [
            ("if i <= rows * columns:\n    y[i] = x[i] + bias[i % columns]",),
        ],
        "The element of this thread is y[0, 0], which needs x[0] and bias[0].": [
            (f"{GUARD}y[i] = x[i] + bias[columns]",),
        ],
        "y[0, 0] needs x[0] and bias[0]; thread 0 of block 0 reads x[0] and bias[1].": [
            (f"{GUARD}y[i] = x[i] + bias[(i + 1) % columns]",),
        ],
        "Just the first 8 are written, as many as `rows`; the guard must let 256 through.": [
            ("if i < rows:\n    y[i] = x[i] + bias[i % columns]",),
        ],
        "Just the first 32 are written, as many as `columns`; the guard must let 256 through.": [
            ("if i < columns:\n    y[i] = x[i] + bias[i % columns]",),
        ],
        "216 of 256 threads store nothing, the first of them thread 40 of block 0.": [
            ("if i < rows + columns:\n    y[i] = x[i] + bias[i % columns]",),
        ],
        "Just the last element is not written: one thread too few gets through the guard.": [
            ("if i < rows * columns - 1:\n    y[i] = x[i] + bias[i % columns]",),
        ],
        "No thread stores in y.": [
            ("if i >= rows * columns:\n    y[i] = x[i] + bias[i % columns]",),
            (f"{GUARD}y = x[i] + bias[i % columns]",),
            (f"{GUARD}return x[i] + bias[i % columns]",),
        ],
        "TypeError: x is an input and must stay as it is": [
            ("x[i] = x[i] + bias[i % columns]",),
        ],
        "Line N reads y[0], an output, before any thread has stored it: it is not zero.": [
            (f"{GUARD}y[i] += x[i] + bias[i % columns]",),
        ],
    },
    "swiglu": {
        "y[0, 1] needs x[1] and x[65]; thread 1 of block 0 reads x[4] and x[68].": [
            ("x[column * rows + row]", "x[column * rows + row + columns]"),
        ],
        "TypeError: x is flat, its index one integer: row * columns + column; got (0, 0)": [
            ("x[row, column]", "x[row, column + columns]"),
        ],
        "y[0, 0] needs x[0] and x[64]; thread 0 of block 0 reads x[0] and x[63].": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + columns - 1 - column]"),
        ],
        "The element of this thread is y[3, 0], which needs x[384] and x[448].": [
            ("x[row * 2 * columns + column]", "x[row * 2 * columns + columns + i]"),
        ],
        "Every element of y is 0.": [
            ("row * 2 * columns + column", "row * 2 * columns + columns + column"),
        ],
    },
    "absolute": {
        "the result is right, but one load of x touches 16 sectors where 2 would do": [
            ("8 * cuda.threadIdx.x + k",),
        ],
        "Thread 0 of block 0 stores 1 of the 8 elements that are its part.": [
            ("cuda.threadIdx.x",),
            ("k * cuda.blockDim.x * cuda.threadIdx.x",),
        ],
        "y[0] is stored by two threads: thread 0 of block 0 and thread 1 of block 0.": [
            ("k * 64",),
            ("k",),
            ("k * 64 + cuda.threadIdx.x // 2",),
        ],
        "y[8] is stored by two threads: thread 0 of block 0 and thread 8 of block 0.": [
            ("k * 8 + cuda.threadIdx.x",),
        ],
        "y[32] is stored by two threads: thread 0 of block 0 and thread 32 of block 0.": [
            ("k * 32 + cuda.threadIdx.x",),
        ],
        "y[1] is stored by two threads: thread 0 of block 0 and thread 1 of block 0.": [
            ("k + cuda.threadIdx.x",),
        ],
        "Thread 63 of block 1 stores 7 of the 8 elements that are its part.": [
            ("k * 64 + cuda.threadIdx.x + 1",),
        ],
        "104 of 128 threads store nothing, the first of them thread 16 of block 0.": [
            ("64 * cuda.threadIdx.x + k",),
        ],
        "64 of 128 threads store nothing, the first of them thread 0 of block 1.": [
            ("first + k * 64 + cuda.threadIdx.x",),
        ],
        "Thread 57 of block 1 stores 7 of the 8 elements that are its part.": [
            ("k * 65 + cuda.threadIdx.x",),
        ],
        "the result is right, but one load of x touches 4 sectors where 2 would do": [
            ("2 * cuda.threadIdx.x + k % 2 + k // 2 * 128",),
        ],
        "Thread 0 of block 1 stores 1 of the 8 elements that are its part.": [
            ("k * 512 + cuda.threadIdx.x",),
        ],
        "Thread 0 of block 1 stores 2 of the 8 elements that are its part.": [
            ("k * 256 + cuda.threadIdx.x",),
        ],
        "Thread 56 of block 1 stores 1 of the 8 elements that are its part.": [
            ("k * 64 + cuda.threadIdx.x * 8",),
        ],
        "Thread 0 of block 1 stores 7 of the 8 elements that are its part.": [
            ("k * 64 + 64 * cuda.blockIdx.x + cuda.threadIdx.x",),
        ],
    },
    "block_amax": {
        "the result is right, but two threads load x[1]: thread 1 of block 0 and thread 0 of block 0": [
            (f"{FIRST_OF_BLOCK}{WHOLE_BLOCK}    {READ}",),
            (f"largest = F(0)\n{FIRST_OF_BLOCK}{WHOLE_BLOCK}    {READ}",),
        ],
        "the result is right, but two threads load x[0]: thread 0 of block 0 and thread 1 of block 0": [
            (f"{WHOLE_BLOCK}{READ}",),
        ],
        "ValueError: a shuffle's distance must be below 32, the threads of a warp; got 32": [
            (f"for d in (32, 16, 8, 4, 2):\n    {LARGER}",),
        ],
        (
            "A shuffle stands outside every `if`: threads without an element take part too, with a value "
            "that changes nothing."
        ): [
            (f"{STEPS}if i % 32 < d:\n        {LARGER}",),
            (f"{STEPS}if i < count:\n        {LARGER}",),
        ],
        "x[225], the element of this thread, belongs to amax[7].": [
            ("for d in range(32):\n    largest = maximum(largest, magnitude(x[i + d]))",),
        ],
    },
    "scale_byte": {
        "scale[0, 0]: got 0x57 (9.09495e-13), acceptable 0x7b (0.0625)   [block amax 15.1749315]": [
            ("casts.e4m3(amax[i])",),
        ],
        "scale[0, 0]: got 0xfe (1.70141e+38), acceptable 0x7b (0.0625)   [block amax 15.1749315]": [
            ("casts.e8m0_multiplier(bits)",),
        ],
    },
    "mxfp8": {
        "No thread stores in scales.": [
            (CODES, ""),
        ],
        "x[8], the element of this thread, belongs to scales[0].": [
            (CODES, "scales[i] = np.uint8(byte)"),
            (CODES, "if i < 32:\n    scales[i] = np.uint8(byte)"),
            (CODES, "if i // 32 == 0:\n    scales[i % 32] = np.uint8(byte)"),
        ],
        "Each element is stored by one thread.": [
            (CODES, "scales[i // 32] = np.uint8(byte)"),
        ],
        "Only thread 0 of block 0 stores in scales.": [
            (CODES, "if i == 0:\n    scales[i // 32] = np.uint8(byte)"),
            (CODES, "if cuda.threadIdx.x == 0:\n    scales[i // 32] = np.uint8(byte)"),
        ],
        "x[32], the element of this thread, belongs to scales[1].": [
            (CODES, f"{FIRST_OF_BLOCK}scales[i] = np.uint8(byte)"),
        ],
        "x[128], the element of this thread, belongs to scales[4].": [
            (CODES, "if i % 16 == 0:\n    scales[i // 16] = np.uint8(byte)"),
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 16] = np.uint8(byte)"),
        ],
        "scales[0] is stored by two threads: thread 0 of block 0 and thread 32 of block 0.": [
            (CODES, f"{FIRST_OF_BLOCK}scales[i % 32] = np.uint8(byte)"),
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 64] = np.uint8(byte)"),
        ],
        (
            "A shuffle stands outside every `if`: threads without an element take part too, with a value "
            "that changes nothing."
        ): [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32] = np.uint8(amax_of_warp(value))"),
        ],
        "x[224], the element of this thread, belongs to scales[7].": [
            (CODES, f"{FIRST_OF_BLOCK}scales[i // 32 + 1] = np.uint8(byte)"),
        ],
        "x[1], the element of this thread, belongs to scales[0].": [
            (CODES, "if i % 32 == 1:\n    scales[i // 32 - 1] = np.uint8(byte)"),
        ],
        "scales[0] is stored by two threads: thread 0 of block 0 and thread 1 of block 0.": [
            (CODES, "scales[0] = np.uint8(byte)"),
        ],
    },
    "transpose": {
        "the result is right, but 32 threads of a warp meet in one bank": [
            ("32", BARRIER, f"{TURNED}{INSIDE}{PLACE}{TILE}"),
            ("64", BARRIER, f"{TURNED}{INSIDE}{PLACE}{TILE}"),
        ],
        "One index for each number of the shape, in the right order, each below it; or is the shape too small?": [
            ("16", BARRIER, f"{TURNED}{INSIDE}{PLACE}{TILE}"),
            ("31", BARRIER, f"{TURNED}{INSIDE}{PLACE}{TILE}"),
            ("8", BARRIER, f"{TURNED}{INSIDE}{PLACE}{TILE}"),
        ],
        "the result is right, but 2 threads of a warp meet in one bank": [
            ("34", BARRIER, f"{TURNED}{INSIDE}{PLACE}{TILE}"),
        ],
        "Line N reads tile[0, 8] before any thread has written it: is a barrier missing?": [
            ("33", "", f"{TURNED}{INSIDE}{PLACE}{TILE}"),
        ],
        "A barrier stands outside every `if` that only some threads of the block enter.": [
            ("33", f"if row0 + ty < rows:\n    {BARRIER}", f"{TURNED}{INSIDE}{PLACE}{TILE}"),
        ],
        "Right where every thread has an element: is the guard missing, or does it let too many through?": [
            ("33", BARRIER, f"{TURNED}{PLACE}{TILE}"),
            ("33", BARRIER, f"{TURNED}if row < rows:\n    {PLACE}{TILE}"),
            ("33", BARRIER, f"{TURNED}if row <= rows and column <= columns:\n    {PLACE}{TILE}"),
        ],
        "512 of 768 threads store nothing, the first of them thread 0 of block (0, 1).": [
            ("33", BARRIER, f"{TURNED}if row < columns and column < rows:\n    {PLACE}{TILE}"),
            ("33", BARRIER, f"row, column = column0 + ty + k, row0 + tx\n{INSIDE}y[row * rows + column] = {TILE}"),
        ],
        "y[32] is stored by two threads: thread (0, 1) of block 0 and thread 0 of block (0, 1).": [
            ("33", BARRIER, f"{TURNED}{INSIDE}y[column * columns + row] = {TILE}"),
            (
                "33",
                BARRIER,
                (
                    "row, column = column0 + ty + k, row0 + tx\nif row < columns and column < rows:\n    y[row * "
                    f"columns + column] = {TILE}"
                ),
            ),
        ],
        "the result is right, but one store of y touches 32 sectors where 1 would do": [
            ("33", BARRIER, f"{AS_READ}{INSIDE}{PLACE}np.uint8(tile[ty + k, tx])"),
            ("33", BARRIER, f"{AS_READ}{INSIDE}{PLACE}np.uint8(x[row * columns + column])"),
        ],
        "Thread 0 of block 0 stores 1 of the 4 elements that are its part.": [
            ("33", BARRIER, f"row, column = row0 + tx, column0 + ty\n{INSIDE}{PLACE}{TILE}"),
            ("33", BARRIER, f"row, column = row0 + tx, column0 + ty\n{INSIDE}{PLACE}np.uint8(tile[tx, ty])"),
        ],
        "y[8] is stored by two threads: thread 0 of block 0 and thread 8 of block 0.": [
            ("33", BARRIER, f"row, column = row0 + tx + k, column0 + ty\n{INSIDE}{PLACE}{TILE}"),
        ],
        "Thread (0, 7) of block 1 stores 3 of the 4 elements that are its part.": [
            ("33", BARRIER, f"{TURNED}if row < rows and column < columns - 1:\n    {PLACE}{TILE}"),
        ],
        "the result is right, but one load of x touches 32 sectors where 1 would do": [
            ("33", BARRIER, f"{TURNED}{INSIDE}{PLACE}np.uint8(x[row * columns + column])"),
        ],
        "No thread stores in y.": [
            ("33", BARRIER, ""),
        ],
        "y[0] is stored by two threads: thread 0 of block 0 and thread 0 of block 1.": [
            ("33", BARRIER, f"row, column = tx, ty + k\n{INSIDE}{PLACE}{TILE}"),
        ],
    },
    "dbias": {
        "the result is right, but two threads load dy[96]: thread 0 of block 0 and thread (0, 1) of block 0": [
            (f"{FIRST_ROW}for row in range(1, rows):\n        if row % 8:\n            {ADD_ROW}{STORE}",),
            (f"{FIRST_ROW}total = F(0)\n    for row in range(rows):\n        {ADD_ROW}{STORE}",),
        ],
        "Line N reads partial[1, 0] before any thread has written it: is a barrier missing?": [
            (f"partial[ty, tx] = total\n{FIRST_ROW}{OTHERS}{ADD}{STORE}",),
        ],
        (
            "Line N reads partial[1, 0] before any thread has written it; part of what this line reads "
            "is never written."
        ): [
            (f"{FIRST_ROW}{OTHERS}{ADD}{STORE}",),
            (f"cuda.syncthreads()\n{FIRST_ROW}{OTHERS}{ADD}{STORE}",),
            (f"partial[0, tx] = total\ncuda.syncthreads()\n{FIRST_ROW}{OTHERS}{ADD}{STORE}",),
            (f"partial[ty, ty] = total\ncuda.syncthreads()\n{FIRST_ROW}{OTHERS}{ADD}{STORE}",),
        ],
        "One index for each number of the shape, in the right order, each below it; or is the shape too small?": [
            (f"{MEET}{FIRST_ROW}for k in range(1, 9):\n        {ADD}{STORE}",),
            (f"{MEET}{FIRST_ROW}for k in range(9):\n        {ADD}{STORE}",),
            (f"{MEET}{FIRST_ROW}for k in range(rows):\n        {ADD}{STORE}",),
            (f"{MEET}{FIRST_ROW}for k in range(32):\n        {ADD}{STORE}",),
            (f"{MEET}{FIRST_ROW}for k in range(0, rows, 8):\n        {ADD}{STORE}",),
            (f"{MEET}{FIRST_ROW}{OTHERS}total = total + partial[tx, k]{STORE}",),
            (f"partial[tx, ty] = total\ncuda.syncthreads()\n{FIRST_ROW}{OTHERS}{ADD}{STORE}",),
        ],
        "Each thread that has no element does this: the guard is missing.": [
            (f"{MEET}if ty == 0:\n    {OTHERS}{ADD}{STORE}",),
        ],
        "sums[0] is stored by two threads: thread 0 of block 0 and thread (0, 1) of block 0.": [
            (f"{MEET}if column < columns:\n    {OTHERS}{ADD}{STORE}",),
            (f"{MEET}if tx == 0 and column < columns:\n    {OTHERS}{ADD}{STORE}",),
            (f"if column < columns:{STORE}",),
            (f"{MEET}for k in range(1, 8):\n    {ADD}\nif column < columns:{STORE}",),
        ],
        ("Only the thread behind the last element does this, number 40: the guard lets one too many through."): [
            (f"{MEET}if ty == 0 and column <= columns:\n    {OTHERS}{ADD}{STORE}",),
        ],
        "Just the first 64 are written, as many as `rows`; the guard must let 96 through.": [
            (f"{MEET}if ty == 0 and column < rows:\n    {OTHERS}{ADD}{STORE}",),
        ],
        "sums[0] is stored by two threads: thread 0 of block 0 and thread 0 of block 1.": [
            (f"{MEET}{FIRST_ROW}{OTHERS}{ADD}\n    sums[tx] = total",),
        ],
        "sums[0] is stored by two threads: thread 0 of block 0 and thread 1 of block 0.": [
            (f"{MEET}{FIRST_ROW}{OTHERS}{ADD}\n    sums[ty] = total",),
        ],
        "Line N reads sums[0], an output, before any thread has stored it: it is not zero.": [
            (f"{MEET}{FIRST_ROW}{OTHERS}{ADD}\n    sums[column] += total",),
            ("if column < columns:\n    sums[column] = sums[column] + total",),
            ("if column < columns:\n    cuda.atomic.add(sums, column, total)",),
        ],
        "sums[56] is stored by two threads: thread 0 of block 0 and thread 1 of block 0.": [
            (f"{MEET}{FIRST_ROW}{OTHERS}{ADD}\n    sums[row] = total",),
        ],
        (
            "Line N reads partial[0, 0] before any thread has written it; each thread reads there what "
            "it writes itself, but later."
        ): [
            (f"partial[ty, tx] = partial[ty, tx] + total\ncuda.syncthreads()\n{FIRST_ROW}{OTHERS}{ADD}{STORE}",),
        ],
        "A barrier stands outside every `if` that only some threads of the block enter.": [
            (f"partial[ty, tx] = total\nif ty == 0:\n    cuda.syncthreads()\n{FIRST_ROW}{OTHERS}{ADD}{STORE}",),
        ],
    },
}
