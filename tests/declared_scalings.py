"""Scalings that no package knows, each declared as `refops.scalings` says: what a new file of that folder would hold.

Their layouts are those of no scaling that `refops` has.

`declared()` is a context in which they are known.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

import refops
from arrays import assert_same_bits, assert_same_quantized
from refops import E4M3, E5M2, Block64Scaling, MXFP4Scaling, NVFP4Scaling, scalings
from refops.formats import E8M0
from refops.scalings.declaration import Layout, Path
from refops.scalings.rules import E8M0Scaling, Float32Scaling


@dataclass(frozen=True)
class Squares64(Float32Scaling):
    """E4M3 with a float32 scale for 64 x 64 elements."""

    power_2_scale: bool = False
    title, block_size, fmt = "squares of 64", 64, E4M3
    layout = Layout(block=(64, 64), padding=(1, 4), scale_order="fixed")


@dataclass(frozen=True)
class Of128(E8M0Scaling):
    """E5M2 with an E8M0 scale for 1 x 128 or 128 x 128 elements; nothing is transposed, activations are fused."""

    two_d: bool = False
    scale_rounding: str = "up"
    title, block_size, fmt, gate_multiple = "powers of two for 128", 128, E5M2, 128
    path = Path("FULLY_FUSED", casts_rounded=True, amax_rounded=True, dbias_rounded=False)

    @property
    def layout(self):
        return Layout(
            block=(128, 128) if self.two_d else (1, 128),
            scale_format=E8M0,
            repeated=self.two_d,
            scales_inner_first=(False, True),
            padding=(128, 4),
            columnwise_transposed=False,
            scale_order="gemm",
        )


@dataclass(frozen=True)
class Of8(E8M0Scaling):
    """E4M3 with an E8M0 scale for 8 elements: no kernel has blocks that are so small."""

    scale_rounding: str = "up"
    title, block_size, fmt = "powers of two for 8", 8, E4M3
    layout = Layout(block=(1, 8), scale_format=E8M0, padding=(128, 4), scale_order="gemm")


@dataclass(frozen=True)
class Along(NVFP4Scaling):
    """NVFP4 whose columnwise copy lies along the rows: packed codes, scales of two levels, blocks of 16."""

    title = "NVFP4, nothing transposed"

    @property
    def layout(self):
        return replace(super().layout, columnwise_transposed=False)


WITHOUT_KERNELS = Of8()
#: What the CPU makes and no GPU.
WITHOUT_GPU_KERNELS = (Along(stochastic_rounding=True), Along(rht=True), Along(four_over_six="mae"))
DECLARED = {"64 2d": Squares64(power_2_scale=True), "128": Of128(), "128 2d": Of128(two_d=True)}
#: These, and scalings of the product whose layouts TE does not have.
CHECKED = {
    **DECLARED,
    "mxfp4": MXFP4Scaling(scale_rounding="even"),
    "mxfp4 2d": MXFP4Scaling(two_d=True, scale_rounding="even"),
    "64": Block64Scaling(E4M3, power_2_scale=False),
    "nvfp4 along": Along(),
}


#: (M, K) of a tensor for each: ragged where the layout allows that.
SHAPES = {name: (144, 176) if scaling.layout.packed == 2 else (131, 139) for name, scaling in CHECKED.items()}


@contextmanager
def declared():
    """A context in which they are scalings like any other."""
    before = scalings.SCALINGS
    scalings.SCALINGS = (*before, Squares64, Of128, Of8, Along)
    try:
        yield
    finally:
        scalings.SCALINGS = before


def check_declared(kernels, name, dtype, shape):
    """Every call that quantizes, of a module with the calls of `refops`, gives the reference's bits; both directions.

    The activations are reglu and relu, whose values need no rounding, and sums are of small multiples of 1/4.
    """
    scaling, (m, k) = CHECKED[name], shape
    x = (np.random.default_rng(m).integers(-16, 17, (m, 2 * k)) / 4).astype(dtype) * (np.arange(m) % 5 + 1)[:, None]
    x, dy = x.astype(dtype), x[:, :k].astype(dtype)
    swizzles = scaling.layout.scale_order == "gemm"
    with declared():
        for rowwise, columnwise in ((True, False), (False, True), (True, True)):
            made = {"rowwise": rowwise, "columnwise": columnwise}
            expected = refops.quantize(dy, scaling, **made)
            q, sums = kernels.quantize(dy, scaling, dbias=True, swizzled_scales=swizzles, **made)
            _same(q, expected.swizzled() if swizzles else expected)
            _same_bits(sums, refops.quantize(dy, scaling, dbias=True, **made)[1])
            _same_bits(kernels.dequantize(kernels.quantize(dy, scaling, **made)), refops.dequantize(expected))
            if k % scaling.gate_multiple == 0:
                got = kernels.activation_quantize("reglu", x, scaling, **made)
                _same(got, refops.activation_quantize("reglu", x, scaling, **made))
            got = kernels.activation_grad_quantize("relu", dy, dy[::-1], scaling, dbias=True, **made)
            expected = refops.activation_grad_quantize("relu", dy, dy[::-1], scaling, dbias=True, **made)
            _same(got[0], expected[0])
            _same_bits(got[1], expected[1])


def _same(got, expected):
    assert_same_quantized(got.to_host() if hasattr(got, "to_host") else got, expected)


def _same_bits(got, expected):
    assert_same_bits(np.asarray(got), expected, "")
