"""What is compared with other implementations: casts, quantized tensors, activations, and the arrays that each yields.

A subject is run by any module with the calls of refops (`refops` itself, `cuda_kernels.host`). Its result is read as
named arrays without padding, FP4 codes one per byte, so that a peer's arrays compare element by element.
"""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

import refops

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Subject:
    """One operation with its settings.

    Attributes:
        name: unique.
        family: what the name is a variant of: rows of one family stand together in tables.
        inputs: names of the arrays it reads: "x" (M, K), "pair" (M, 2 K), "dy" (M, K), or "mxfp8" and "nvfp4",
            quantized tensors of (M, K).
        call: function of a module with the calls of refops and the inputs.
        formats: array name -> `FloatFormat` of its codes, None for floats.
        exact: whether casts and scales alone make the result; else a last bit of float32 may be anyone's.
        exact_arrays: arrays that casts and scales alone make, where others are not exact.
    """

    name: str
    family: str
    inputs: tuple[str, ...]
    call: object = field(repr=False)
    formats: dict = field(repr=False)
    exact: bool = True
    exact_arrays: tuple[str, ...] = ()

    def is_exact(self, name):
        """Whether all bits of the array `name` are determined."""
        return self.exact or name in self.exact_arrays

    def arrays(self, module, *inputs):
        """Run it with `module` and return name -> array."""
        return read(self.call(module, *inputs))

    def values(self, module, *inputs):
        """Run it with `module` and return what the result decodes to, float32."""
        return module.dequantize(self.call(module, *inputs))


def read(result):
    """Return name -> array of a result of refops: codes and scales of each direction, values, dbias."""
    if isinstance(result, tuple):
        quantized, dbias = result
        return {**read(quantized), "dbias": dbias}
    if not hasattr(result, "rowwise_data"):
        return {"codes" if result.dtype == np.uint8 else "values": result}
    arrays = {}
    for direction in ("rowwise", "columnwise"):
        data = getattr(result, f"{direction}_data")
        if data is not None:
            if result.scaling.layout.packed == 2:
                data = refops.unpack_fp4(data)
            arrays[f"{direction} codes"] = data
            arrays[f"{direction} scales"] = _scales(result, direction == "columnwise")
    return arrays


def _scales(q, columnwise):
    """Decode scales of one direction without padding; float32 ones [outer, block] wherever they are stored."""
    layout = q.scaling.layout
    stored = q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv
    if layout.block is None:
        return stored
    outer, blocks = layout.scale_counts(q.matrix_shape, columnwise)
    valid = layout.scales_by_outer(stored, columnwise)[:outer, :blocks]
    return valid.T if layout.scale_format is not None and layout.scales_inner_first[columnwise] else valid


def comparable(array, fmt):
    """Bits of an array, those of all NaN alike: unsigned integers of the same shape."""
    array = np.ascontiguousarray(array)
    if fmt is not None:
        return np.where(np.isnan(fmt.values[array]), np.uint16(0xFFFF), array.astype(np.uint16))
    bits = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)
    nan = bits.dtype.type(0x7FFF if array.dtype.itemsize == 2 else 0x7FC00000)
    return np.where(np.isnan(array.astype(np.float32)), nan, bits)


def _cast(fmt, saturate=True, rounding="nearest_even"):
    return lambda m, x: m.encode(x, fmt, saturate=saturate, rounding=rounding)


def _casts():
    for fmt in (refops.E4M3, refops.E5M2):
        for saturate in (True, False):
            name = f"{fmt!r} cast, {'saturating' if saturate else 'not saturating'}"
            yield Subject(name, "casts", ("x",), _cast(fmt, saturate), {"codes": fmt})
    for fmt in (refops.E2M1, refops.E3M2, refops.E2M3):
        yield Subject(f"{fmt!r} cast", "casts", ("x",), _cast(fmt), {"codes": fmt})
    for rounding, saturate, words in (
        ("up", True, "up"),
        ("toward_zero", True, "toward zero"),
        ("nearest_away", False, "to nearest"),
    ):
        call = _cast(refops.E8M0, saturate, rounding)
        yield Subject(f"E8M0 cast, {words}", "casts", ("x",), call, {"codes": refops.E8M0})
    yield Subject("UE5M3 cast", "casts", ("x",), _cast(refops.UE5M3), {"codes": refops.UE5M3})


#: What each setting of the scalings is called.
RULES = {"up": "TE's rule", "floor": "floor rule", "even": "even rule", "ceil_ocp": "ceil_ocp rule"}


def _scalings():
    """(name, family, scaling)."""
    yield "FP8 current E4M3", "FP8 per tensor", refops.CurrentScaling(refops.E4M3)
    for dim, blocks in ((1, "1x128"), (2, "128x128")):
        yield f"FP8 {blocks} E4M3", "FP8 blocks", refops.BlockScaling(refops.E4M3, dim)
        scaling = refops.BlockScaling(refops.E4M3, dim, power_2_scale=False)
        yield f"FP8 {blocks} E4M3, any scale", "FP8 blocks", scaling
    for fmt in (refops.E4M3, refops.E5M2, refops.E3M2, refops.E2M3):
        for rule, words in RULES.items():
            name = f"{'MXFP8' if fmt.bits == 8 else 'MXFP6'} {fmt!r}, {words}"
            yield name, "MX", refops.MXFP8Scaling(fmt, scale_rounding=rule)
    for size in (32, 16):
        for rule, words in RULES.items():
            name = f"MXFP4{'' if size == 32 else ' 1x16'}, {words}"
            yield name, "MX", refops.MXFP4Scaling(scale_rounding=rule, block_size=size)
    for dim, size in ((1, 128), (2, 128), (1, 64)):
        scaling = refops.E8M0BlockScaling(refops.E4M3, dim, block_size=size)
        yield f"FP8 {size if dim == 2 else 1}x{size} E4M3, E8M0 scales", "FP8 blocks", scaling
    for rule in ("floor", "up"):
        yield f"MXINT8, {RULES[rule]}", "MX", refops.MXINT8Scaling(rule)
    yield "NVFP4 1x16", "NVFP4", refops.NVFP4Scaling()
    yield "NVFP4 16x16", "NVFP4", refops.NVFP4Scaling(two_d=True)
    for level, words in ((True, "two levels"), (False, "one level")):
        scaling = refops.NVFP4Scaling(scale_format=refops.UE5M3, tensor_level=level)
        yield f"NVFP4 1x16 UE5M3, {words}", "NVFP4", scaling


def _scale_format(scaling):
    return scaling.layout.scale_format


def _formats(scaling, *directions):
    return {
        f"{direction} {what}": fmt
        for direction in directions
        for what, fmt in (("codes", scaling.fmt), ("scales", _scale_format(scaling)))
    }


def _quantized():
    for name, family, scaling in _scalings():
        yield Subject(name, family, ("x",), lambda m, x, s=scaling: m.quantize(x, s), _formats(scaling, "rowwise"))


MXFP8, NVFP4 = refops.MXFP8Scaling(refops.E4M3), refops.NVFP4Scaling()
RHT = refops.NVFP4Scaling(rht=True)


def _other_operations():
    """What is timed besides: other directions, back to floats, activations alone and fused."""
    both = ("rowwise", "columnwise")
    yield Subject(
        "MXFP8 columnwise",
        "MX",
        ("x",),
        lambda m, x: m.quantize(x, MXFP8, rowwise=False, columnwise=True),
        _formats(MXFP8, "columnwise"),
    )
    yield Subject(
        "MXFP8 both directions",
        "MX",
        ("x",),
        lambda m, x: m.quantize(x, MXFP8, columnwise=True),
        _formats(MXFP8, *both),
    )
    yield Subject(
        "NVFP4 1x16 both directions, RHT",
        "NVFP4",
        ("x",),
        lambda m, x: m.quantize(x, RHT, columnwise=True),
        _formats(RHT, *both),
        exact=False,
        exact_arrays=("rowwise codes", "rowwise scales"),
    )
    yield Subject("dequantize MXFP8", "MX", ("mxfp8",), lambda m, q: m.dequantize(q, dtype=BFLOAT16), {"values": None})
    yield Subject(
        "dequantize NVFP4", "NVFP4", ("nvfp4",), lambda m, q: m.dequantize(q, dtype=BFLOAT16), {"values": None}
    )
    yield Subject("gelu", "activations", ("x",), lambda m, x: m.activation("gelu", x), {"values": None}, exact=False)
    yield Subject(
        "swiglu", "activations", ("pair",), lambda m, x: m.activation("swiglu", x), {"values": None}, exact=False
    )
    for name, scaling in (("MXFP8", MXFP8), ("NVFP4", NVFP4)):
        yield Subject(
            f"swiglu -> {name}",
            "fused",
            ("pair",),
            lambda m, x, s=scaling: m.activation_quantize("swiglu", x, s),
            _formats(scaling, "rowwise"),
            exact=False,
        )
    yield Subject(
        "dswiglu -> MXFP8, dbias",
        "fused",
        ("dy", "pair"),
        lambda m, dy, x: m.activation_grad_quantize("swiglu", dy, x, MXFP8, dbias=True),
        {**_formats(MXFP8, "rowwise"), "dbias": None},
        exact=False,
    )


#: Name -> subject.
SUBJECTS = {s.name: s for s in (*_casts(), *_quantized(), *_other_operations())}

#: Name of the operation in tables of speed -> its subject, and other subjects that stand in for it where a peer offers
#: those alone: the same amount of work, but other bits.
TIMED = {
    "encode E4M3": ("E4M3 cast, saturating",),
    "FP8 current": ("FP8 current E4M3",),
    "FP8 1x128": ("FP8 1x128 E4M3", "FP8 1x128 E4M3, any scale"),
    "FP8 128x128": ("FP8 128x128 E4M3", "FP8 128x128 E4M3, any scale"),
    "MXFP8 rowwise": ("MXFP8 E4M3, TE's rule", "MXFP8 E4M3, floor rule"),
    "MXFP8 columnwise": ("MXFP8 columnwise",),
    "MXFP8 both directions": ("MXFP8 both directions",),
    "NVFP4 1x16": ("NVFP4 1x16",),
    "NVFP4 16x16": ("NVFP4 16x16",),
    "NVFP4 both directions, RHT": ("NVFP4 1x16 both directions, RHT",),
    "dequantize MXFP8": ("dequantize MXFP8",),
    "dequantize NVFP4": ("dequantize NVFP4",),
    "gelu": ("gelu",),
    "swiglu": ("swiglu",),
    "swiglu -> MXFP8": ("swiglu -> MXFP8",),
    "swiglu -> NVFP4": ("swiglu -> NVFP4",),
    "dswiglu -> MXFP8, dbias": ("dswiglu -> MXFP8, dbias",),
}
