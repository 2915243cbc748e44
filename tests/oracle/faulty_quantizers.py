"""Quantizing kernels as people write them, in NumPy: right, or with one fault. They share no arithmetic with `refops`.

`run` gives what a kernel writes for a matrix: for each direction codes (M, K), one scale a block, the amax.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

import refops

F = np.float32
FLT_MAX = np.finfo(F).max
LEAST_NORMAL = F(2.0**-126)
#: Elements that the kernels load at once: those of a line that fill no such vector are its tail.
VECTOR = 8
#: Rows and columns that the kernels for an amax of the tensor walk at once.
TILE = (16, 64)


@dataclass
class Kernel:
    """Faults, all absent in the right kernel.

    Attributes:
        flushes_inputs: float32 subnormals count as zero when they are read (FTZ).
        flushes_results: a subnormal float32 product or quotient becomes zero (FTZ).
        ties_away: the cast rounds ties away from zero.
        flushes_codes: the cast has no subnormals of the element format.
        signed_amax: the amax is the largest value, not the largest magnitude.
        loses_tail: the amax leaves out what fills no whole vector (blocks) or tile (tensors).
        rounds_scales_up: an E8M0 byte is the exponent of amax / max plus 1, also where that is a power of two.
        flushes_scales: the cast of block scales to a small float has no subnormals of that format.
        rounds_scales_twice: block scales are rounded to bfloat16 before they are cast to a small float.
    """

    flushes_inputs: bool = False
    flushes_results: bool = False
    ties_away: bool = False
    flushes_codes: bool = False
    signed_amax: bool = False
    loses_tail: bool = False
    rounds_scales_up: bool = False
    flushes_scales: bool = False
    rounds_scales_twice: bool = False

    def run(self, x, scaling, random_bits, dtype=None, amax_values=None):
        """direction -> (codes (M, K), scales [outer, block], amax) of a (M, K) tensor.

        Args:
            x: what is cast.
            random_bits: direction -> uint8 [outer, inner] of stochastic rounding, or None.
            dtype: of the unquantized tensor, where `x` is not stored in it.
            amax_values: float32 (M, K), whose largest one is the amax of the tensor, where that is not x.
        """
        dtype, found = np.dtype(dtype or x.dtype), {}
        with np.errstate(all="ignore"):
            for direction in ("rowwise", "columnwise"):
                v, largest = x.astype(F), x if amax_values is None else amax_values
                if direction == "columnwise":
                    if getattr(scaling, "rht", False):
                        v = largest = hadamard_columns(v, scaling.sign_mask, dtype)
                    v, largest = np.ascontiguousarray(v.T), largest.T
                self._amax_values, bits = self._read(largest.astype(F)), random_bits.get(direction)
                codes, scales, amax = self._quantize(self._read(v), scaling, dtype, bits, direction)
                found[direction] = codes.T if direction == "columnwise" else codes, scales, amax
        return found

    # --- pieces -----------------------------------------------------------------------------------

    def _read(self, v):
        return np.where(np.abs(v) < LEAST_NORMAL, np.copysign(F(0), v), v) if self.flushes_inputs else v

    def _result(self, v):
        return np.where(np.abs(v) < LEAST_NORMAL, np.copysign(F(0), v), v) if self.flushes_results else v

    def _largest(self, v, axis):
        return np.fmax.reduce(v if self.signed_amax else np.abs(v), axis=axis, initial=F(0))

    def _block_amax(self, v, edge, size):
        if self.loses_tail:
            whole = v.shape[1] // VECTOR * VECTOR
            v = np.where(np.arange(v.shape[1]) < whole, v, F(0))
        return self._largest(blocked(v, edge, size), (1, 3))

    def _tensor_amax(self, columnwise):
        """(1, 1): of the same tiles of the tensor whatever the direction."""
        v = self._amax_values
        if self.loses_tail:
            tile = TILE[::-1] if columnwise else TILE
            v = v[: v.shape[0] // tile[0] * tile[0], : v.shape[1] // tile[1] * tile[1]]
        return self._largest(v, None).reshape(1, 1)

    def _row_amax(self):
        v = self._amax_values
        whole = v.shape[1] // VECTOR * VECTOR if self.loses_tail else v.shape[1]
        return self._largest(v[:, :whole], 1)[:, None]

    def _cast(self, v, fmt, bits=None):
        """Saturating cast, float32 -> uint8: significands are integers times the least step of their binade."""
        nan = np.isnan(v)
        limit, mantissa = float(fmt.max), fmt.mantissa_bits
        a = np.minimum(np.where(nan, limit, np.abs(v)).astype(np.float64), limit)
        if fmt.name == "int8":
            least, mantissa = 0, 6
        else:
            least = 1 - fmt.bias

        def exponent_of(a):
            exponent = np.maximum(np.where(a == 0, least, np.frexp(a)[1] - 1), least)
            return np.zeros_like(exponent) if fmt.name == "int8" else exponent

        exponent = exponent_of(a)
        if bits is not None:  # the sum is a float32 number
            a = np.minimum((a + np.ldexp(bits / 256, exponent - mantissa)).astype(F).astype(np.float64), limit)
            exponent = exponent_of(a)
        steps = np.ldexp(a, mantissa - exponent)
        rounded = np.floor(steps + 0.5) if self.ties_away else np.rint(steps)
        steps = rounded if bits is None else np.floor(steps)
        if fmt.name == "int8":
            steps = np.where(nan, 0, np.minimum(steps, 127))
            return np.where(np.signbit(v), -steps, steps).astype(np.int8).view(np.uint8)
        codes = np.minimum(steps + (exponent - least) * 2**mantissa, fmt.largest_code).astype(np.uint8)
        if self.flushes_codes:
            codes = np.where(codes < 2**mantissa, 0, codes).astype(np.uint8)
        signed = codes | (np.signbit(v).astype(np.uint8) << (fmt.bits - 1)) if fmt.signed else codes
        return np.where(nan, np.uint8(fmt.code_of_nan), signed)

    # --- scalings ---------------------------------------------------------------------------------

    def _quantize(self, v, scaling, dtype, bits, direction):
        columnwise = direction == "columnwise"
        if isinstance(scaling, refops.DelayedScaling):
            amax = self._tensor_amax(columnwise)
            scale = np.full((1, 1), scaling.scale, F)
            return self._cast(self._result(v * scale), scaling.fmt), F(1) / scale, amax
        if isinstance(scaling, refops.CurrentScaling):
            amax = self._tensor_amax(columnwise)
            scale = self._float_scale(amax, scaling, FLT_MAX)
            return self._cast(self._result(v * scale), scaling.fmt), self._result(F(1) / scale), amax
        edge, size = scaling.layout.block
        if isinstance(scaling, refops.NVFP4Scaling):
            return self._nvfp4(v, scaling, bits, columnwise, edge, size)
        maxima = self._block_amax(v, edge, size)
        if scaling.layout.scale_format is None:
            limit = {"float32": FLT_MAX, "float16": F(65504), "bfloat16": F(2.0**127 * (2 - 2.0**-7))}[dtype.name]
            scale = self._float_scale(maxima, scaling, limit)
            scales = self._result(F(1) / scale)
        else:
            rounding = getattr(scaling, "scale_rounding", "up")
            if rounding == "up":
                scales = up_to_power_of_two(self._result(maxima * (F(1) / scaling.fmt.max)), self.rounds_scales_up)
            else:
                scales = floor_byte(maxima, scaling.fmt)
            scale = self._result(np.ldexp(F(1), 127 - scales.astype(np.int32)).astype(F))
        scaled = self._result(blocked(v, edge, size) * scale[:, None, :, None])
        return unblocked(self._cast(scaled, scaling.fmt), v.shape), scales, None

    def _float_scale(self, amax, scaling, limit):
        scale = scaling.fmt.max / amax
        scale = np.where(np.isinf(scale), limit, scale)
        if scaling.power_2_scale:
            scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(F)
        return np.where((amax == 0) | np.isinf(amax), F(1), self._result(scale))

    def _nvfp4(self, v, scaling, bits, columnwise, edge, size):
        wide = scaling.scale_format.name == "ue5m3"
        top = 114688 if wide else scaling.e4m3_max
        amax, s_enc = None, np.ones((1, 1), F)
        if scaling.tensor_level:
            amax = self._row_amax() if scaling.row_scaled else self._tensor_amax(columnwise)
            s_enc = np.fmin(F(6 * top) / amax, FLT_MAX)
            s_enc = np.where((amax == 0) | (s_enc == 0), F(1), s_enc)
        s_dec = self._result(F(1) / s_enc)
        blocks, maxima = blocked(v, edge, size), self._block_amax(v, edge, size)
        random = None if bits is None else blocked(bits, edge, size)

        def attempt(wanted):
            if self.rounds_scales_twice:
                wanted = wanted.astype(ml_dtypes.bfloat16).astype(F)
            code = Kernel(flushes_codes=self.flushes_scales)._cast(wanted, scaling.scale_format)
            value = scaling.scale_format.values[code]
            scale = np.fmin(F(1) / self._result(value * s_dec), FLT_MAX)
            codes = self._cast(self._result(blocks * scale[:, None, :, None]), refops.E2M1, random)
            return codes, code, value

        if scaling.four_over_six is None:
            wanted = self._result(maxima * self._result(s_enc * (F(1) / F(6))))
            codes, scales, _ = attempt(wanted)
        else:
            base, tried = self._result(self._result(maxima / F(6)) * s_enc), []
            for factor in (1, 1.5):
                codes, scales, value = attempt(base * F(factor))
                restored = refops.E2M1.values[codes] * value[:, None, :, None] * amax[:, None, :, None] / F(6 * top)
                errors, total = np.abs(restored - blocks), F(0)
                for j in range(size):
                    total = total + errors[:, 0, :, j]
                tried.append((codes, scales, total))
            four = tried[1][2] < tried[0][2]
            codes = np.where(four[:, None, :, None], tried[1][0], tried[0][0])
            scales = np.where(four, tried[1][1], tried[0][1])
        return unblocked(codes, v.shape), scales, amax


# --- helpers ----------------------------------------------------------------------------------------------------------


def blocked(v, rows, columns):
    """(R, C) -> zero-padded (R / rows, rows, C / columns, columns)."""
    r, c = -(-v.shape[0] // rows), -(-v.shape[1] // columns)
    padded = np.zeros((r * rows, c * columns), v.dtype)
    padded[: v.shape[0], : v.shape[1]] = v
    return padded.reshape(r, rows, c, columns)


def unblocked(blocks, shape):
    """Undo `blocked`."""
    r, rows, c, columns = blocks.shape
    return np.ascontiguousarray(blocks.reshape(r * rows, c * columns)[: shape[0], : shape[1]])


def up_to_power_of_two(v, always=False):
    """E8M0 byte of a float32 >= 0, rounded up, powers of two too if `always`; at most 254."""
    fraction, exponent = np.frexp(np.where(np.isinf(v), F(1), v).astype(np.float64))
    byte = np.clip(exponent - 1 + ((fraction > 0.5) | always) + 127, 0, 254)
    return np.where(v == 0, 0, np.where(np.isinf(v), 254, byte)).astype(np.uint8)


def floor_byte(amax, fmt):
    """127 + floor(log2 amax) - floor(log2 max), at least 0 and at most 254."""
    _, exponent = np.frexp(np.where(np.isinf(amax), F(1), amax).astype(np.float64))
    byte = np.clip(exponent - 1 - int(np.floor(np.log2(fmt.max))) + 127, 0, 254)
    return np.where(amax == 0, 0, np.where(np.isinf(amax), 254, byte)).astype(np.uint8)


def hadamard_columns(v, mask, dtype):
    """Groups of 16 rows times the signs of the mask, through the Hadamard matrix / 4, rounded to `dtype`."""
    i = np.arange(16)
    signs = np.where((mask >> i) & 1, -1.0, 1.0)
    parity = np.array([[bin(a & b).count("1") % 2 for b in i] for a in i])
    matrix = np.where(parity, -0.25, 0.25) * signs
    groups, total = v.astype(np.float64).reshape(-1, 16, v.shape[1]), 0.0
    for j in range(16):
        total = total + matrix[:, j][:, None] * groups[:, j][:, None, :]
    info = ml_dtypes.finfo(dtype)
    step = np.maximum(np.frexp(total)[1] - 1, info.minexp) - info.nmant  # exponent of the last place: one rounding
    rounded = np.where(np.isfinite(total), np.ldexp(np.rint(np.ldexp(total, -step)), step), total)
    return rounded.reshape(v.shape).astype(dtype).astype(F)
