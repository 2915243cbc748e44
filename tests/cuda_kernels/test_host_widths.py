"""How wide the vectors of compiled loops are is a question of speed alone, measured once for each kind of CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_kernels.host import widths
from cuda_kernels.host.compile import cache_directory

ROOT = Path(__file__).resolve().parents[2]
#: What a process computes whose loops have wide vectors, or narrow ones: digests of the bits.
DIGESTS = """
import hashlib, json, sys
from cuda_kernels.host import compile, widths
widths.are_faster = compile.are_faster = lambda folder: sys.argv[1] == "wide"
import ml_dtypes, numpy as np
import refops
from cuda_kernels import host
from cuda_kernels.host.calls import arrays_of
from refops import E4M3
x = (np.random.default_rng(0).standard_normal((67, 272)) * 2.0 ** np.arange(-136, 136)).astype(ml_dtypes.bfloat16)
some = np.arange(0, 65536, 80, np.uint16)[: 3 * 272].reshape(3, 272).view(x.dtype)  # NaN, inf and subnormal too
x = np.concatenate([x[:64], some])
made = {"gelu": host.activation("gelu", x.astype(np.float32))}
made["gradient"] = host.activation_grad("swiglu", np.ascontiguousarray(x[:, :136]), x)
for scaling in (refops.MXFP8Scaling(E4M3), refops.CurrentScaling(E4M3), refops.BlockScaling(E4M3, 1)):
    q, sums = host.quantize(x, scaling, columnwise=True, dbias=True)
    made |= {f"{scaling} {name}": array for name, array in arrays_of(q).items()} | {f"{scaling} sums": sums}
print(json.dumps({name: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest() for name, a in made.items()}))
"""


def digests(width, **environment):
    """What a process with such vectors prints."""
    command = [sys.executable, "-c", DIGESTS, width]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
def test_the_bits_are_the_same(tmp_path):
    """The loops of this CPU's width are those that all other tests use; the others are compiled for this one."""
    used, other = ("wide", "narrow") if widths.are_faster(cache_directory()) else ("narrow", "wide")
    kept = digests(used)
    assert len(kept) > 10 and kept == digests(other, NUMBA_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize(("ratio", "bits"), [(0.5, widths.WIDE), (2.0, widths.NARROW)])
def test_what_was_measured_is_kept(tmp_path, monkeypatch, ratio, bits):
    monkeypatch.setattr(widths, "get_host_cpu_features", lambda: {"avx512f": True})
    monkeypatch.setattr(widths, "measured", lambda: ratio)
    are_faster = widths.are_faster.__wrapped__
    assert are_faster(tmp_path) == (bits == widths.WIDE)
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == str(bits)
    monkeypatch.setattr(widths, "measured", lambda: pytest.fail("measured again"))
    assert are_faster(tmp_path) == (bits == widths.WIDE)


@pytest.mark.parametrize("kept", [b"", b"junk", b"128", b"\xff\xfe"])
def test_a_file_that_says_something_else_is_measured_again(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(widths, "get_host_cpu_features", lambda: {"avx512f": True})
    monkeypatch.setattr(widths, "measured", lambda: 0.5)
    path = tmp_path / f"bits-of-vectors-{widths.get_host_cpu_name()}"
    path.write_bytes(kept)
    assert widths.are_faster.__wrapped__(tmp_path) and path.read_text() == str(widths.WIDE)


def test_where_nothing_can_be_kept_it_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(widths, "get_host_cpu_features", lambda: {"avx512f": True})
    monkeypatch.setattr(widths, "measured", lambda: 0.5)
    (tmp_path / "file").write_text("no folder")
    assert widths.are_faster.__wrapped__(tmp_path / "file")


def test_a_cpu_without_wide_vectors_has_nothing_to_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(widths, "get_host_cpu_features", lambda: {"avx2": True})
    monkeypatch.setattr(widths, "measured", lambda: pytest.fail("measured"))
    assert not widths.are_faster.__wrapped__(tmp_path)


@pytest.mark.skipif(not widths.get_host_cpu_features().get("avx512f"), reason="no vectors of 512 bits here")
@pytest.mark.parametrize(("bits", "are_wide"), [(widths.WIDE, True), (widths.NARROW, False)])
def test_what_is_measured_has_wide_vectors_and_narrow_ones(bits, are_wide):
    with widths.vectors(bits):
        loop = widths.compiled_loop()
    assert ("zmm" in "".join(loop.inspect_asm().values())) is are_wide
