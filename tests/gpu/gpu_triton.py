"""swiglu -> MXFP8 rowwise in Triton, to compare with; imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def _swiglu_mxfp8(x, codes, scales, width, blocks: tl.constexpr):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * blocks * 32
    column = first + tl.arange(0, blocks)[:, None] * 32 + tl.arange(0, 32)[None, :]
    act = tl.load(x + row * 2 * width + column).to(tl.float32)
    gate = tl.load(x + row * 2 * width + width + column).to(tl.float32)
    y = (act / (1.0 + tl.exp(-act)) * gate).to(tl.bfloat16).to(tl.float32)
    amax = tl.max(tl.abs(y), axis=1)
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    code = tl.minimum((bits + 0x7FFFFF) >> 23, 254)
    factor = ((254 - code) << 23).to(tl.float32, bitcast=True)
    tl.store(codes + row * width + column, (y * factor[:, None]).to(tl.float8e4nv))
    tl.store(scales + row * (width // 32) + first // 32 + tl.arange(0, blocks), code.to(tl.uint8))


def swiglu_mxfp8(x, codes, scales):
    """Fill codes (M, H) and scales (M, H/32) from x (M, 2H), H a multiple of 1024."""
    rows, width = codes.shape
    _swiglu_mxfp8[(rows, width // 1024)](x, codes, scales, width, blocks=32, num_warps=4)
