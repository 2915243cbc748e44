"""`refops check` of a kernel that is given as code: right, wrong by a convention, stopped at a fault, or bad use."""

import json
import re
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cuda_kernels.emulator import programs
from refops import commands

X = np.random.default_rng(0).standard_normal((128, 512)).astype(ml_dtypes.bfloat16)
#: A warp quantizes a block of 32 to MXFP8 and shares its scale byte.
CUDA = """
#include <cuda_bf16.h>
#include <cuda_fp8.h>

template <int OFFSET>
__global__ void quantize(const __nv_bfloat16* x, unsigned char* codes, unsigned char* scales, int blocks) {
    int block = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (block >= blocks) return;
    float value = __bfloat162float(x[32 * block + lane]);
    float amax = fabsf(value);
    for (int distance = 16; distance > 0; distance /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffff, amax, distance));
    int byte = RULE;
    codes[32 * block + lane] = __nv_cvt_float_to_fp8(ldexpf(value, 127 - byte), __NV_SATFINITE, __NV_E4M3);
    if (lane == 0) scales[block + OFFSET] = byte;
}
"""
UP = "__nv_cvt_float_to_e8m0(amax * (1 / 448.0f), __NV_SATFINITE, cudaRoundPosInf)"
FLOOR = "max(ilogbf(amax) - 8 + 127, 0)"
LAUNCH = ["--grid", "256", "--block", "256", "--argument", "x"]
ARGUMENTS = ["--argument", "data", "--argument", "rowwise_scale_inv", "--argument", "2048"]


@pytest.fixture
def check(run, tmp_path):
    """Call `refops check` of quantize -> MXFP8 on a kernel's file, with more words."""
    X.tofile(tmp_path / "x.bin")
    question = ["check", "--op", "quantize", "--scaling", "mxfp8", "--input", f"{tmp_path}/x.bin@bfloat16:128x512"]

    def call(source, *words, name="kernel.cu", entry="quantize<0>"):
        path = tmp_path / name
        path.write_text(source)
        option = "--ptx" if name.endswith(".ptx") else "--cuda"
        return run(*question, option, path, "--entry", entry, *words)

    return call


def test_a_right_kernel(check):
    code, out, err = check(CUDA.replace("RULE", UP), *LAUNCH, *ARGUMENTS)
    assert (code, err) == (0, "")
    assert out.startswith("RIGHT") and "quantize<0>: 256 blocks, " in out
    assert "loads 2.0 sectors a request (100% of their bytes used)" in out


def test_a_kernel_in_ptx(check):
    ptx, mangled = programs.compile_cuda(CUDA.replace("RULE", UP), "quantize<0>", "sm_90")
    assert check(ptx, *LAUNCH, *ARGUMENTS, name="kernel.ptx", entry=mangled)[0] == 0


def test_what_to_install_without_nvrtc(check, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    code, _, said = check(CUDA.replace("RULE", UP), *LAUNCH, *ARGUMENTS)
    assert code == 2 and "CUDA C++ needs NVRTC" in said and "pip install '.[emulator]'" in said


def test_a_wrong_convention_is_named(check):
    code, out, _ = check(CUDA.replace("RULE", FLOOR), *LAUNCH, *ARGUMENTS)
    assert code == 1 and out.startswith("WRONG") and "scale-floor" in out


def test_a_kernel_is_stopped_where_it_does_wrong(check):
    code, out, _ = check(CUDA.replace("RULE", UP), *LAUNCH, *ARGUMENTS, entry="quantize<1>")
    assert code == 1
    assert re.match(r"WRONG: the kernel failed: .*invalid write of 1 bytes", out)
    line = 1 + CUDA.splitlines().index("    if (lane == 0) scales[block + OFFSET] = byte;")
    assert f"kernel.cu:{line}" in out and "rowwise_scale_inv" in out and "st.global" in out


def test_a_fault_in_json(check):
    code, out, _ = check(CUDA.replace("RULE", UP), *LAUNCH, *ARGUMENTS, "--json", entry="quantize<1>")
    document = json.loads(out)
    assert code == 1 and document["ok"] is False and "invalid write" in document["fault"]
    code, out, _ = check(CUDA.replace("RULE", UP), *LAUNCH, *ARGUMENTS, "--json")
    assert code == 0 and json.loads(out)["ran"].startswith("quantize<0>")


def test_what_nobody_wrote_shows(check):
    """A kernel that stops half way: the other half is wrong; one that reads its own output first is stopped."""
    code, out, _ = check(CUDA.replace("RULE", UP), *LAUNCH, *ARGUMENTS[:-1], "1024")
    assert code == 1 and "in 1,024 of 2,048 blocks" in out and "hold 0xa5: were they written?" in out
    reads = CUDA.replace("RULE", UP).replace("int byte =", "int byte = scales[block] +")
    code, out, _ = check(reads, *LAUNCH, *ARGUMENTS)
    assert code == 1 and "nobody wrote" in out
    zeroed = [*ARGUMENTS[:2], "--argument", "rowwise_scale_inv=0", *ARGUMENTS[4:]]
    assert check(reads, *LAUNCH, *zeroed)[0] == 0


#: The second launch of current scaling: the first one found the amax.
CURRENT = """
#include <cuda_bf16.h>
#include <cuda_fp8.h>

__global__ void cast(const __nv_bfloat16* x, const float* amax, unsigned char* codes, float* scale_inv) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float scale = 448.0f / *amax;
    codes[i] = __nv_cvt_float_to_fp8(__bfloat162float(x[i]) * scale, __NV_SATFINITE, __NV_E4M3);
    if (i == 0) *scale_inv = 1.0f / scale;
}
"""


@pytest.fixture
def check_current(run, tmp_path):
    """Call `refops check` of `CURRENT`, which reads an amax from a file."""
    X.tofile(tmp_path / "x.bin")
    (tmp_path / "cast.cu").write_text(CURRENT)

    def call(initial):
        words = ["check", "--op", "quantize", "--scaling", "current", "--input", f"{tmp_path}/x.bin@bfloat16:128x512"]
        words += ["--cuda", tmp_path / "cast.cu", "--entry", "cast", "--grid", "256", "--block", "256"]
        words += ["--argument", "x", "--argument", f"amax={initial}", "--argument", "data", "--argument", "scale"]
        return run(*words)

    return call


@pytest.mark.parametrize("suffix", ["a.npy", "a.bin", "a.safetensors", "a.npz:found", "a.bin@float32:1x1"])
def test_an_amax_that_an_earlier_launch_found(check_current, tmp_path, suffix):
    amax = np.abs(X.astype(np.float32)).max().reshape(1)
    for value, wanted in ((amax, 0), (2 * amax, 1)):
        np.save(tmp_path / "a.npy", value)
        np.savez(tmp_path / "a.npz", found=value, other=value)
        value.tofile(tmp_path / "a.bin")
        save_file({"amax_rowwise": value, "other": value}, tmp_path / "a.safetensors")
        code, out, err = check_current(tmp_path / suffix)
        assert (code, err) == (wanted, "") and "amax_rowwise: " in out


def test_what_an_amax_may_not_be(check_current, tmp_path):
    np.save(tmp_path / "two.npy", np.ones(2, np.float32))
    np.save(tmp_path / "int.npy", np.ones(1, np.int32))
    np.ones(3, np.uint8).tofile(tmp_path / "three.bin")
    np.savez(tmp_path / "many.npz", a=np.ones(1), b=np.ones(1))
    for initial, said in (
        ("672", "amax=0 for zeros at first, or amax=FILE for the elements of a file; got 'amax=672', and there is no"),
        (tmp_path / "none.npy", "and there is no such file"),
        (tmp_path / "two.npy", "--argument amax must hold float32 of shape (1,); got float32 of shape (2,) in "),
        (tmp_path / "int.npy", "--argument amax must hold float32 of shape (1,); got int32 of shape (1,) in "),
        (tmp_path / "three.bin", "--argument amax must hold 4 bytes (float32 1); got 3 bytes in "),
        (tmp_path / "many.npz", "--argument amax must name one of a, b after :; got "),
    ):
        code, out, err = check_current(initial)
        assert (code, out, err.count("\n")) == (2, "", 1) and said in err, err


def test_a_kernel_that_changes_its_input_is_told(check):
    changes = CUDA.replace("RULE", UP).replace("const __nv_bfloat16* x", "__nv_bfloat16* x")
    changes = changes.replace("if (lane == 0)", "x[32 * block + lane] = 0;\n    if (lane == 0)")
    code, out, _ = check(changes, *LAUNCH, *ARGUMENTS)
    assert code == 0 and out.endswith("note: the kernel changed its input x\n")


def test_an_activation_on_another_target(run, tmp_path):
    X.tofile(tmp_path / "x.bin")
    source = """
    __global__ void relu(const unsigned short* x, unsigned short* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = x[i] >> 15 ? 0 : x[i];
    }"""
    (tmp_path / "relu.cu").write_text(source)
    words = ["check", "--op", "relu", "--input", f"{tmp_path}/x.bin@bfloat16:128x512", "--cuda", tmp_path / "relu.cu"]
    words += ["--entry", "relu", "--grid", "256", "--block", "256", "--target", "sm_100a"]
    words += ["--argument", "x", "--argument", "y", "--argument", X.size]
    assert run(*words)[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (LAUNCH, "--argument must give at least one output, rowwise_data, rowwise_scale_inv, "),
        ([*LAUNCH, "--argument", "data"], "--argument must be one for each of 4 parameters; got 2"),
        ([*LAUNCH, *ARGUMENTS, "--argument", "data"], "--argument must give rowwise_data once; got it 2 times"),
        ([*LAUNCH, "--argument", "nothing"], "--argument must be a number or one of x, rowwise_data, "),
        (
            [*LAUNCH, "--argument", "data=7"],
            "--argument data must be data, data=0 for zeros at first, or data=FILE for the elements of a file; "
            "got 'data=7', and there is no such file",
        ),
        ([*LAUNCH, *ARGUMENTS[:4], "--argument", "scale"], "--argument must give rowwise_scale_inv once; got it 2"),
        (
            [*LAUNCH, *ARGUMENTS[:-1], "x"],
            "--argument 'x' must be a number of 4 bytes, as the parameter is; got an array",
        ),
        ([*LAUNCH, *ARGUMENTS[:-1], "1.5"], "--argument '1.5' must be an integer, as the parameter is; got 1.5"),
        ([*LAUNCH, *ARGUMENTS, "--target", "sm_70"], "--target must be one of "),
        (LAUNCH[:2], "--block is needed with --ptx and --cuda; got none"),
        ([*LAUNCH, *ARGUMENTS, "--data", "q.bin"], "--data must not be given with a kernel, which writes the outputs"),
        ([*LAUNCH, *ARGUMENTS, "--ptx", "kernel.ptx"], "give either --ptx or --cuda; got both"),
    ],
)
def test_bad_use(check, words, said):
    code, out, err = check(CUDA.replace("RULE", UP), *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize(("words", "said"), [(["--shared", "1000000"], "1000000"), (["--block", "2048"], "2048")])
def test_a_launch_that_the_target_refuses(check, words, said):
    code, out, _ = check(CUDA.replace("RULE", UP), *LAUNCH, *ARGUMENTS, *words)
    assert code == 1 and out.startswith("WRONG: the kernel failed: CUDA_ERROR_INVALID_VALUE") and said in out


def test_a_kernel_that_never_ends_is_stopped(check):
    loop = "while (lane < 64 && *(volatile int*)x != 1) {}\n    if (lane == 0)"
    endless = CUDA.replace("RULE", UP).replace("if (lane == 0)", loop)
    code, out, _ = check(endless, *LAUNCH, *ARGUMENTS, "--longest", "100000")
    assert code == 1 and "endless" in out and "kernel.cu:16" in out


def test_source_that_does_not_compile(check):
    code, _, err = check(CUDA.replace("RULE", "amax.x"), *LAUNCH, *ARGUMENTS)
    assert code == 2 and "kernel.cu(14): error" in err and err.count("\n") == 1
    assert "^" not in err
    assert check("int x;", *LAUNCH, *ARGUMENTS, name="kernel.ptx")[0] == 2


@pytest.mark.parametrize("entry", ["other", "quantize", "quantize<x>", "plain<0>", "comment", "0"])
def test_an_entry_that_is_no_kernel_is_refused_with_those_that_are(check, entry):
    more = """
    // __global__ void comment() {}
    extern "C" __global__ void __launch_bounds__(256) plain(const float* x) {}
    template <typename T> __device__ T twice(T x) { return 2 * x; }
    static __global__ void
    last() {}"""
    code, out, err = check(CUDA.replace("RULE", UP) + more, *LAUNCH, *ARGUMENTS, entry=entry)
    said = f"--entry must be a kernel of the source, quantize<...>, plain, last; got {entry!r}\n"
    assert (code, out) == (2, "") and err.endswith(said)


def test_options_of_a_kernel_need_one(run, tmp_path):
    X.tofile(tmp_path / "x.bin")
    words = ["check", "--op", "relu", "--input", f"{tmp_path}/x.bin@bfloat16:128x512", "--output", "y=y.bin"]
    code, _, err = run(*words, "--grid", "3")
    assert code == 2 and "--grid needs a kernel, --ptx or --cuda; got neither" in err


def test_without_a_runner(check, monkeypatch):
    monkeypatch.setattr(commands.kernel, "entry_points", lambda group: ())
    code, _, err = check(CUDA.replace("RULE", UP), *LAUNCH, *ARGUMENTS)
    assert code == 2 and "need a package that runs kernels" in err


def test_headers_that_kernels_include():
    """The C++ library's as far as libcu++ has them, CUDA's own, cub's blocks."""
    names = ["cuda_runtime.h", "stdint.h", *programs.LIBRARY_HEADERS, "cuda_fp16.h", "cub/block/block_reduce.cuh"]
    source = "".join(f"#include <{name}>\n" for name in names)
    source += """
    template <typename T> __global__ void sums(T* y, uint32_t n) {
        using Reduce = cub::BlockReduce<float, 128>;
        __shared__ typename Reduce::TempStorage storage;
        float sum = Reduce(storage).Sum(threadIdx.x);
        if (threadIdx.x < n) y[threadIdx.x] = std::is_same<T, float>::value ? T(sum) : std::numeric_limits<T>::max();
    }"""
    ran = programs.run(source, "sums<float>", 1, 128, [programs.Unwritten((1,), np.float32), 1])
    assert ran.arrays[0][0] == sum(range(128)) and ran.counters.barriers > 0
    ran = programs.run(source, "sums<std::uint8_t>", 1, 128, [programs.Unwritten((1,), np.uint8), 1])
    assert ran.arrays[0][0] == 255


@pytest.mark.parametrize(("name", "word"), [("cfloat", "FLT_MAX"), ("climits", "INT_MAX"), ("cstddef", "size_t(1)")])
def test_a_header_that_is_included_alone(name, word):
    source = f"#include <{name}>\n__global__ void store(double* y) {{ *y = {word}; }}"
    ran = programs.run(source, "store", 1, 1, [programs.Unwritten((1,), np.float64)])
    values = {"cfloat": np.finfo(np.float32).max, "climits": 2**31 - 1, "cstddef": 1}
    assert ran.arrays[0][0] == values[name]


def test_run_gives_arrays_back():
    """The library call: scratch memory, null, NumPy scalars; the caller's arrays stay as they are."""
    source = """
    __global__ void scale(const float* x, float* y, float* missing, double factor, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = missing ? 0 : float(x[i] * factor);
    }"""
    x = np.arange(100, dtype=np.float32)
    for factor in (1.5, np.float64(1.5)):
        ran = programs.run(
            source, "scale", 1, 128, [x, programs.Unwritten(x.shape, x.dtype), None, factor, np.int32(x.size)]
        )
        np.testing.assert_array_equal(ran.arrays[1], 1.5 * x)
    assert ran.counters.launches == 1 and ran.entry == "scale" and ".entry" in ran.ptx
    with pytest.raises(ValueError, match=r"arguments\[4\] must have 4 bytes"):
        programs.run(source, "scale", 1, 128, [x, x, None, 1.5, np.int64(x.size)])
    with pytest.raises(programs.DeviceError, match="nobody wrote"):
        programs.run(source, "scale", 1, 128, [programs.Unwritten(x.shape, x.dtype), x, None, 1.5, x.size])


def test_a_golden_file_brings_inputs_and_settings(run, tmp_path):
    words = ["golden", "--op", "quantize", "--scaling", "mxfp8", "--shape", "64x128", "--dtype", "bfloat16"]
    run(*words, "--out", tmp_path)
    (golden,) = tmp_path.glob("quantize*.safetensors")
    for rule, wanted in ((UP, 0), (FLOOR, 1)):
        (tmp_path / "kernel.cu").write_text(CUDA.replace("RULE", rule))
        words = [
            "check",
            "--golden",
            golden,
            "--cuda",
            tmp_path / "kernel.cu",
            "--entry",
            "quantize<0>",
            "--grid",
            "32",
        ]
        words += ["--block", "256", "--argument", "x", "--argument", "data", "--argument", "scale", "--argument", "256"]
        assert run(*words)[0] == wanted
