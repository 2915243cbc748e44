"""The amaxes of a golden tensor that holds probes (`refops.golden.probes`): that of the tensor, and those of blocks.

Their scales are powers of two where the rule has such scales, so that a product can be a tie.
"""

import ml_dtypes
import numpy as np

from refops.golden.edges import LEAST_LOSS, binade
from refops.golden.preimages import preimage_of
from refops.quantization.quantize import amax_by_outer
from refops.rounding import stored
from refops.scalings.arithmetic import REFERENCE
from refops.survey import as_matrix

F = np.float32
#: Mantissas that an amax may have.
MANTISSAS = 1 + np.arange(32) / 32
#: Float32's least normal number is 2^-126. An amax of fmt.max * 2^-127 gives a float32 scale of 2^-127, one below
#: fmt.max * 2^-126 a product with 1 / fmt.max that is subnormal before it becomes a scale code.
TINY = -127


class Amaxes:
    """The amaxes of a result.

    Args:
        case: with the random inputs.
        kind: a `refops.golden.inputs.Kind`.

    Attributes:
        random: the result of the random inputs, float32 (M, K).
        largest: the largest element that the tensor gets, signed.
        of_tensor: float32: the amax that it gives.
    """

    def __init__(self, case, kind):
        self.case, self.scaling, self.kind = case, case.scaling, kind
        self.dtype, self.layout, self.fmt = case.inputs["x"].dtype, case.scaling.layout, case.scaling.fmt
        self.random = as_matrix(case.source)
        self._numbers = self.scaling.numbers(self.dtype)
        self._is_tiny = kind.largest == "tiny" and self.dtype != np.float16
        self.largest, self.of_tensor = self._largest_element()
        self._tensor_scale = F(0)
        if self.layout.two_level:
            by_outer = amax_by_outer(self.layout, self.of_tensor.reshape(1), slice(None))
            self._tensor_scale = self.scaling.tensor_scale(REFERENCE)(by_outer)

    def signed(self, amax, *, exact=False):
        """-amax where the operation has such a result, else amax; None where `exact` and it has neither."""
        if self.case.operation.kind == "quantize" or np.isinf(amax):
            return -amax
        preimage = preimage_of(self.case)
        for signed in (-amax, amax):
            index, found = preimage.find(np.float64(signed))
            if found and (not exact or preimage.results[index] == signed):
                return signed
        return None if exact else amax

    def scales_of(self, amaxes):
        """(scales as stored, multipliers) that blocks of these amaxes have, for a float32 array."""
        scales = self.scaling.block_scale(REFERENCE)(amaxes[None], self._tensor_scale, self._numbers)
        return tuple(np.broadcast_to(one, (1, amaxes.size))[0] for one in scales)

    # --- of the tensor ----------------------------------------------------------------------------

    def _largest_element(self):
        """(result, amax): the largest element of the tensor, and the amax that it gives, float32."""
        amax = self._tensor_amax()
        has_roundings = self.case.operation.kind != "quantize" and self.dtype != F
        is_lossy = self.kind.largest_is_rounded and has_roundings and np.isfinite(amax)
        found = self._lossy_element() if is_lossy else None
        if found is None:
            return self.signed(np.float64(amax)), amax
        return found, self._amaxes_of(np.array([found]))[0]

    def _amaxes_of(self, results):
        """float32: magnitudes of which the reference takes the amax of the tensor."""
        amaxes = np.abs(results).astype(F)
        return stored(amaxes, self.dtype).astype(F) if self.scaling.path.amax_rounded else amaxes

    def _lossy_element(self):
        """A result that rounding changes much: a large one, negative if it can be; None where there is none."""
        if self.layout.amax is None:
            return None
        unrounded = preimage_of(self.case).unrounded
        rounded = stored(unrounded, self.dtype).astype(F)
        most = 4 * np.fmax.reduce(np.abs(self.random), axis=None, initial=0.25)
        loss = np.abs(unrounded - rounded) / np.abs(rounded)
        unrounded, loss = (a[(loss > LEAST_LOSS) & (np.abs(rounded) <= most)] for a in (unrounded, loss))
        for sign, share in ((-1, 0.25), (1, 0)):
            size = sign * unrounded
            if size.size and size.max() > max(0, share * np.abs(unrounded).max()):
                large = size > size.max() / 2
                scales = self._scales_of_tensors(self._amaxes_of(unrounded[large]))
                best = np.lexsort((loss[large], _is_power_of_two(scales)))[-1]
                return float(unrounded[large][best])
        return None

    def _tensor_amax(self):
        """float32: what the largest element of the tensor becomes; infinity where the tensor has one.

        A probe is infinite in a cast alone: an activation has the infinities of its random inputs, a clamped one none.
        """
        magnitudes = np.abs(self.random)
        is_cast = self.case.operation.kind == "quantize"
        if np.isinf(magnitudes).any() or (is_cast and self.kind.largest == "infinite"):
            return F(np.inf)
        if self.kind.largest == "finite":
            most = F(ml_dtypes.finfo(self.dtype).max)
            reached = most if is_cast else np.abs(preimage_of(self.case).results).max()
            return reached if reached < most / 2 else most
        if self._is_tiny:
            near = most = np.ldexp(float(self.scaling.top if self.layout.two_level else self.fmt.max), TINY)
        else:
            near = 2.0 * np.fmax.reduce(magnitudes, axis=None, initial=0.25)
            most = 2 * near
        for exponent in range(binade(most), binade(most) - 12, -1):
            for amax in np.ldexp(MANTISSAS[::-1], exponent).astype(F):
                if amax <= most and _is_power_of_two(self._scale_of_tensor(amax)) and self._reaches(amax):
                    return amax
        return F(near)

    def _reaches(self, amax):
        """Whether some input gives exactly this result, or its negative."""
        if self.case.operation.kind == "quantize":
            return amax.astype(self.dtype) == amax
        return self.signed(amax, exact=True) is not None

    def _scale_of_tensor(self, amax):
        return self._scales_of_tensors(amax.reshape(1))[0]

    def _scales_of_tensors(self, amaxes):
        """What the amax of a tensor alone decides, for an array: the multiplier, or the first level of two."""
        if self.layout.block is None:
            scales = self.scaling.block_scale(REFERENCE)(amaxes[None], F(0), self._numbers)[1]
        elif self.layout.two_level:
            scales = self.scaling.tensor_scale(REFERENCE)(amaxes[None])[0]
        else:
            scales = F(1)
        return np.broadcast_to(np.ravel(scales), amaxes.shape)

    # --- of blocks --------------------------------------------------------------------------------

    def magnitudes(self):
        """The kind's magnitudes that differ under the scaling: one scale of a tensor has one."""
        if self.layout.block is None:
            return ("usual", "zero")
        if not self.layout.two_level:
            return self.kind.magnitudes
        beyond = ("huge", "subnormal", "infinite") if np.isfinite(self.of_tensor) else ("huge", "subnormal")
        return tuple(dict.fromkeys("usual" if m in beyond else m for m in self.kind.magnitudes))

    def of_block(self, magnitude):
        """(amax of a block, multiplier of its elements), float64, of a magnitude but "zero"."""
        if self.layout.block is None:
            return float(self.of_tensor), float(self._scale_of_tensor(self.of_tensor))
        if magnitude == "infinite":
            return np.inf, float(self.scales_of(F([np.inf]))[1][0])
        amaxes = np.ldexp(MANTISSAS, self._exponent(magnitude)).astype(F)
        _, multipliers = self.scales_of(amaxes)
        largest = amaxes * multipliers
        fits = largest <= (self.fmt.max if self.layout.scale_format is None else 0.95 * self.fmt.max)
        best = np.lexsort((largest, fits, _is_power_of_two(multipliers)))[-1]
        return float(amaxes[best]), float(multipliers[best])

    def _exponent(self, magnitude):
        """The exponent of the amax of a block."""
        info, top = ml_dtypes.finfo(self.dtype), binade(self.fmt.max)
        has_level = self.layout.two_level and np.isfinite(self.of_tensor)
        if has_level and magnitude == "usual" and not self._is_tiny:
            return binade(self.of_tensor) - 2
        finite, above = np.abs(self.random[np.isfinite(self.random)]), 0
        if self.kind.largest == "above":
            above = min(binade(finite.max(initial=1)) + 1, int(info.maxexp) - 3)
        coded = self.layout.scale_format is not None and not has_level
        least = TINY + coded if self.dtype != np.float16 else int(info.minexp)
        return {
            "usual": max(top - 2, 6, above),
            "tiny": min(top + least, int(info.maxexp) - 2),
            "subnormal": int(info.minexp) - 2,
            "huge": int(info.maxexp) - 1,
        }["tiny" if has_level and self._is_tiny else magnitude]


def _is_power_of_two(x):
    return np.frexp(x)[0] == 0.5
