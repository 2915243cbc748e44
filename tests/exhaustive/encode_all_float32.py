"""Encode all 2^32 float32 values in every format and compare with ml_dtypes.

    python tests/exhaustive/encode_all_float32.py                      # everything (`make exhaustive`)
    python tests/exhaustive/encode_all_float32.py --fraction 1/1024    # one value in 1024, spread over the whole range

ml_dtypes rounds to nearest even but does not saturate, so it gets clipped values; NaN compares as a class. The last
line is the verdict; the exit code is 1 on any difference.
"""

import sys

import ml_dtypes
import numpy as np
from patterns import compare_all

import refops

#: Format -> ml_dtypes' type of the same values.
PEERS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
}


def compare(name, x):
    """Return (counts, bit pattern of the first difference or None) of refops.encode and ml_dtypes on `x`."""
    fmt, peer = refops.FORMATS[name], PEERS[name]
    limit = np.float32(ml_dtypes.finfo(peer).max)
    nan = np.isnan(x)
    with np.errstate(invalid="ignore"):  # signalling NaN
        theirs = np.clip(x, -limit, limit).astype(peer).view(np.uint8)
    if nan.any():
        canonical = np.uint8(fmt.largest_code if fmt.nan_code is None else fmt.nan_code)
        theirs = np.where(nan, canonical, theirs)
    different = np.flatnonzero(refops.encode(x, fmt) != theirs)
    return {"differences": len(different)}, int(x.view(np.uint32)[different[0]]) if len(different) else None


def main(arguments=None):
    """Run the comparison; return the exit code."""
    values, formats, counts, seconds = compare_all(arguments, __doc__.splitlines()[0], "formats", tuple(PEERS), compare)
    differences = counts["differences"]
    print(f"{values:,} values x {formats} formats: {differences:,} differences in {seconds:.0f} s")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
