"""TE's formulas as a user of an array library would write them, once for torch and jax.numpy.

An array library is given as an object with the few functions that differ (`torch_eager.TorchArrays`,
`jnp_formulas.JaxArrays`). The formulas are for tensors without NaN and infinity, with an amax of the tensor that is
neither zero nor extreme, and with dimensions that the blocks divide; they are kept by the benchmarks, which compare
their bits with those of refops.
"""

import numpy as np

from refops.scalings import TE_SIGN_MASK

F = np.float32
FLT_MAX = float(np.finfo(F).max)
ONE_448TH, ONE_SIXTH, ONE_2688TH = (float(F(1) / F(n)) for n in (448, 6, 2688))
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
#: Between neighbours of E2M1, and whether the midpoint itself goes up: to the even code.
E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def hadamard_matrix():
    """The 16 x 16 transform: signs times Walsh-Hadamard, over 4."""
    i = np.arange(16)
    parity = np.array([[bin(a & b).count("1") for b in i] for a in i])
    signs = np.where((TE_SIGN_MASK >> i) & 1, -1.0, 1.0)
    return (signs[:, None] * (-1.0) ** parity / 4).astype(F)


def formulas(a):
    """Return name of a subject -> function of the library's arrays to a tuple, in the order of `Subject.formats`.

    Args:
        a: the array library.
    """

    transform = a.array(hadamard_matrix())  # here, where no compiler traces
    e2m1_values = a.array(np.array([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], F))

    def divide(number, v):
        """A rounded quotient: in torch `number / v` is a reciprocal times the number."""
        return a.constant(number) / v

    def tensor_scale(number, amax):
        """The quotient for a whole tensor, one number that no compiler may merge into a later division."""
        return a.barrier(divide(number, amax))

    def e4m3(v):
        return a.to_e4m3(a.clip(v, -448.0, 448.0))

    def encode(x):
        return (e4m3(a.f32(x)),)

    def current(x):
        scale = tensor_scale(448.0, a.f32(a.amax(x, (0, 1))))
        return e4m3(a.f32(x) * scale), divide(1.0, scale).reshape(1)

    def block_scale(amax, power_2):
        scale = divide(448.0, a.where(amax == 0, a.constant(1.0), amax))
        if power_2:
            scale = a.from_bits(a.bits(scale) & -0x800000)
        return a.where(amax == 0, a.constant(1.0), scale)

    def blocks_1x128(x, power_2=True):
        m, k = x.shape
        values = a.f32(x).reshape(m, k // 128, 128)
        scale = block_scale(a.amax(values, 2), power_2)
        return e4m3(values * scale[..., None]).reshape(m, k), divide(1.0, scale)

    def blocks_128x128(x, power_2=True):
        m, k = x.shape
        values = a.f32(x).reshape(m // 128, 128, k // 128, 128)
        scale = block_scale(a.amax(values, (1, 3)), power_2)
        return e4m3(values * scale[:, None, :, None]).reshape(m, k), divide(1.0, scale)

    def mxfp8(values, axis):
        """Blocks of 32 along `axis` of values that are cut into blocks there."""
        scale = (a.bits(a.amax(values, axis) * ONE_448TH) + 0x7FFFFF) >> 23
        factor = a.from_bits((254 - scale) << 23)
        factor = factor[..., None] if axis == 2 else factor[:, None, :]
        return e4m3(values * factor), a.u8(scale)

    def mxfp8_rowwise(x):
        m, k = x.shape
        codes, scale = mxfp8(a.f32(x).reshape(m, k // 32, 32), 2)
        return codes.reshape(m, k), scale

    def mxfp8_columnwise(x):
        m, k = x.shape
        codes, scale = mxfp8(a.f32(x).reshape(m // 32, 32, k), 1)
        return codes.reshape(m, k), scale

    def mxfp8_both(x):
        return *mxfp8_rowwise(x), *mxfp8_columnwise(x)

    def e2m1(v):
        """Codes, two per byte."""
        magnitude, codes = abs(v), a.u8(a.signbit(v)) * 8
        for midpoint, up in E2M1_STEPS:
            codes = codes + a.u8(magnitude >= midpoint if up else magnitude > midpoint)
        codes = codes.reshape(codes.shape[0], -1)
        return codes[:, ::2] | (codes[:, 1::2] << 4)

    def nvfp4_scale(block_amax, tensor_amax):
        """Scale bytes, and what elements are multiplied by."""
        encode = tensor_scale(2688.0, tensor_amax)
        scale = a.to_e4m3(a.clip(block_amax * (encode * ONE_SIXTH), 0.0, 448.0))
        factor = divide(1.0, a.from_e4m3(scale) * divide(1.0, encode))
        return scale, a.clip(factor, 0.0, FLT_MAX)

    def nvfp4(x, tensor_amax=None):
        m, k = x.shape
        values = a.f32(x).reshape(m, k // 16, 16)
        amax = a.amax(values, 2)
        scale, factor = nvfp4_scale(amax, a.amax(amax, (0, 1)) if tensor_amax is None else tensor_amax)
        return e2m1((values * factor[..., None]).reshape(m, k)), scale

    def nvfp4_16x16(x):
        m, k = x.shape
        values = a.f32(x).reshape(m // 16, 16, k // 16, 16)
        amax = a.amax(values, (1, 3))
        scale, factor = nvfp4_scale(amax, a.amax(amax, (0, 1)))
        return e2m1((values * factor[:, None, :, None]).reshape(m, k)), a.repeat_rows(scale, 16)

    def nvfp4_both_rht(x):
        m, k = x.shape
        groups = a.f32(x.T.reshape(k * m // 16, 16))
        transformed = a.like(a.matmul(groups, transform), x).reshape(k, m)
        return *nvfp4(x), *nvfp4(transformed)

    def dequantize_mxfp8(codes, scale):
        m, k = codes.shape
        values = a.from_e4m3(codes).reshape(m, k // 32, 32) * a.from_bits(a.i32(scale) << 23)[..., None]
        return (a.bf16(values.reshape(m, k)),)

    def dequantize_nvfp4(packed, scale, amax):
        m, half = packed.shape
        codes = a.stack((packed & 15, packed >> 4)).reshape(m, half // 8, 16)
        values = a.take(e2m1_values, codes)
        factor = (a.from_e4m3(scale) * amax) * ONE_2688TH
        return (a.bf16((values * factor[..., None]).reshape(m, 2 * half)),)

    def gelu(x):
        return (a.like(a.gelu(a.f32(x)), x),)

    def halves(x):
        k = x.shape[1] // 2
        return a.f32(x[:, :k]), a.f32(x[:, k:])

    def swiglu_float32(x):
        act, gate = halves(x)
        return act * a.sigmoid(act) * gate

    def swiglu(x):
        return (a.like(swiglu_float32(x), x),)

    def swiglu_mxfp8(x):
        """TE rounds the product to the input's dtype before the cast."""
        return mxfp8_rowwise(*swiglu(x))

    def swiglu_nvfp4(x):
        """The amax of the tensor comes from the product before it is rounded."""
        product = swiglu_float32(x)
        return nvfp4(a.like(product, x), a.amax(product, (0, 1)))

    def dswiglu_mxfp8_dbias(dy, x):
        """The bias gradient sums what is not rounded."""
        act, gate = halves(x)
        dy = a.f32(dy)
        s = a.sigmoid(act)
        gradient = a.concatenate((dy * (act * s * (1 - s) + s) * gate, dy * (act * s)))
        return *mxfp8_rowwise(a.like(gradient, x)), a.like(a.sum_rows(gradient), x)

    return {
        "E4M3 cast, saturating": encode,
        "FP8 current E4M3": current,
        "FP8 1x128 E4M3": blocks_1x128,
        "FP8 128x128 E4M3": blocks_128x128,
        "FP8 1x128 E4M3, any scale": lambda x: blocks_1x128(x, False),
        "FP8 128x128 E4M3, any scale": lambda x: blocks_128x128(x, False),
        "MXFP8 E4M3, TE's rule": mxfp8_rowwise,
        "MXFP8 columnwise": mxfp8_columnwise,
        "MXFP8 both directions": mxfp8_both,
        "NVFP4 1x16": nvfp4,
        "NVFP4 16x16": nvfp4_16x16,
        "NVFP4 1x16 both directions, RHT": nvfp4_both_rht,
        "dequantize MXFP8": dequantize_mxfp8,
        "dequantize NVFP4": dequantize_nvfp4,
        "gelu": gelu,
        "swiglu": swiglu,
        "swiglu -> MXFP8": swiglu_mxfp8,
        "swiglu -> NVFP4": swiglu_nvfp4,
        "dswiglu -> MXFP8, dbias": dswiglu_mxfp8_dbias,
    }


def named_arrays(subject, arrays):
    """Name -> array of a formula's tuple of NumPy arrays, FP4 codes unpacked."""
    import refops

    named = {}
    for (name, fmt), array in zip(subject.formats.items(), arrays, strict=True):
        if fmt is refops.E2M1 and name.endswith("codes"):
            array = refops.unpack_fp4(np.ascontiguousarray(array))
        named[name] = array
    return named


def parts(x):
    """The arrays that a formula takes for one input of a subject: the fields of a quantized tensor, or the array."""
    if isinstance(x, np.ndarray):
        return (x,)
    m, k = x.matrix_shape
    size = 32 if x.amax_rowwise is None else 16
    fields = (x.rowwise_data, np.ascontiguousarray(x.rowwise_scale_inv[:m, : k // size]))
    return fields if x.amax_rowwise is None else (*fields, x.amax_rowwise)
