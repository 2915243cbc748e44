"""`cuda_kernels.host` in its process: threads, forks, the cache on disk, memory; seeded faults in a copy of it."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from host_cases import ALL_SCALINGS, BF16, E4M3, MXFP8, F, tensor

import refops
from arrays import assert_same_quantized, same_bits
from cuda_kernels import host
from cuda_kernels.host import arrays, calls, threads
from cuda_kernels.host import compile as compiling
from refops import oracle
from tiers import SWEEP, sampled

ROOT = Path(__file__).parents[2]


# --- threads ----------------------------------------------------------------------------------------


@pytest.fixture
def restored():
    """The number of threads as it was, after the test."""
    before = host.get_num_threads()
    yield before
    host.set_num_threads(before)


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also where the shell that started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def everything(x, dy, scales):
    """Results of calls that are shared among threads in different ways, as bytes."""
    q, dbias = host.activation_grad_quantize("silu", dy, x, MXFP8, columnwise=True, dbias=True)
    current = host.quantize(x, ALL_SCALINGS["current"])
    results = [q.rowwise_data, q.columnwise_data, q.columnwise_scale_inv, dbias, current.rowwise_data, host.amax(x)]
    results += host.activation_grad("silu", dy, x, dbias=True) + host.scaled_activation_grad("srelu", dy, x, scales)
    results += [host.hadamard_transform(x), host.encode(x, E4M3), host.dequantize(q)]
    return b"".join(result.tobytes() for result in results)


def test_no_result_depends_on_the_number_of_threads(restored):
    x, dy, scales = tensor((700, 160)), tensor((700, 160), seed=1), tensor((700,), F, seed=2)
    host.set_num_threads(1)
    want = everything(x, dy, scales)
    for n in (2, 3, 16):
        host.set_num_threads(n)
        assert host.get_num_threads() == n
        assert everything(x, dy, scales) == want, n
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises((TypeError, ValueError), match="n must"):
            host.set_num_threads(wrong)


def test_different_calls_may_overlap_and_the_number_of_threads_may_change_meanwhile(restored):
    inputs = [
        (tensor((300 + 64 * i, 160)), tensor((300 + 64 * i, 160), seed=1), np.ones(300 + 64 * i, F)) for i in range(3)
    ]
    want, wrong, stop = [everything(*one) for one in inputs], [], threading.Event()

    def call(i):
        try:
            wrong.extend(i for _ in range(8) if everything(*inputs[i]) != want[i])
        except BaseException as error:
            wrong.append(error)

    def disturb():
        n = 0
        while not stop.is_set():
            n += 1
            host.set_num_threads(1 + n % 4)
            time.sleep(0.01)

    workers, other = [threading.Thread(target=call, args=(i,)) for i in range(3)], threading.Thread(target=disturb)
    for thread in (*workers, other):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    other.join()
    assert not wrong


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_an_exception_in_any_range_reaches_the_caller_after_all_ranges_ended(restored, failing):
    host.set_num_threads(4)
    ended = []

    def work(first, last):
        if first == failing:
            raise ValueError(f"range {first}")
        time.sleep(0.02)
        ended.append(first)

    with pytest.raises(ValueError, match=f"range {failing}"):
        threads.share(work, 4)
    assert sorted([*ended, failing]) == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["done", "recorded", "repeated", "of a plan that is forgotten"])
def test_a_thread_that_an_interrupt_leaves_behind_keeps_its_arrays(restored, interruptible, quick_collections, way):
    """What it reads and fills is given by addresses alone."""
    host.set_num_threads(2)
    caller, begun, end, ended = threading.get_ident(), threading.Event(), threading.Event(), threading.Event()

    def function(words, first, last):
        if threading.get_ident() == caller:
            begun.wait(10)
            return
        if not begun.is_set():
            begun.set()
            time.sleep(0.2)  # the caller does the other ranges and waits
            signal.pthread_kill(caller, signal.SIGINT)
            end.wait(10)
            ended.set()

    def interrupted():
        array = np.zeros(8, F)
        with pytest.raises(KeyboardInterrupt):
            if way == "repeated":
                calls.Loop(function, np.zeros(1, np.uint64), (), 8, False).run([array], [0])
            elif way == "of a plan that is forgotten":
                loop = calls.Loop(function, np.zeros(1, np.uint64), (), 8, False)
                calls.Plan((), (loop,), (array,), lambda arrays: None).run(calls.Call((), [], []))
            else:
                doing = calls.Doing() if way == "done" else calls.Recording(calls.Call((), [], []))
                doing.loop(function, [0], [(0, array)], 8, False)
        return weakref.ref(array)

    kept = interrupted()
    gc.collect()
    assert kept() is not None and not ended.is_set()
    end.set()
    assert ended.wait(10)
    for _ in range(100):
        if kept() is None:
            return
        time.sleep(0.02)
    pytest.fail("the array is kept although the range has ended")


def test_a_thread_that_comes_too_late_keeps_no_array(restored):
    """Work for a thread that is busy stays in its queue after the caller has done all of it."""
    host.set_num_threads(2)
    begun, end, array = threading.Event(), threading.Event(), np.zeros(8, F)

    def busy(first, last):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            end.wait(10)
        else:
            begun.wait(10)

    caller = threading.Thread(target=threads.share, args=(busy, 8))
    threads.share(lambda first, last: None, 8)  # there is a thread
    caller.start()
    assert begun.wait(10)
    calls.run_shared(lambda words, first, last: None, None, [array], 8, False)
    kept = weakref.ref(array)
    del array
    gc.collect()
    assert kept() is None
    end.set()
    caller.join()


def test_flushed_subnormals_are_refused(restored):
    torch = pytest.importorskip("torch")
    host.set_num_threads(2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        for shape in ((3, 5), (700, 160)):
            with pytest.raises(RuntimeError, match="subnormals are flushed"):
                host.quantize(np.ones(shape, F), MXFP8)
    finally:
        torch.set_flush_denormal(False)
        host.set_num_threads(2)  # threads that were started meanwhile flush too
    x = np.full((700, 160), 1e-42, F)
    assert_same_quantized(host.quantize(x, MXFP8), refops.quantize(x, MXFP8))


# --- processes --------------------------------------------------------------------------------------


def python(code, *, folder=ROOT, **environment):
    """Run code in a process of its own with the package of `folder`; return what it wrote to (stdout, stderr)."""
    path = os.pathsep.join(map(str, (folder, ROOT / "tests" / "cuda_kernels", ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("statement", ["import cuda_kernels.host", "from cuda_kernels import host"])
def test_what_to_install_without_numba(statement):
    code = f"import sys\nsys.modules['numba'] = None\ntry: {statement}\nexcept ImportError as error: print(error)"
    assert "cuda_kernels needs Numba: pip install '.[host]'" in python(code)[0]


FORK = """
import os, sys, numpy as np, refops
from cuda_kernels import host
host.set_num_threads(3)
x, scaling = np.random.default_rng(0).standard_normal((700, 160), np.float32), refops.MXFP8Scaling(refops.E4M3)
want = host.quantize(x, scaling).rowwise_data.tobytes()
child = os.fork()
same = host.quantize(x, scaling).rowwise_data.tobytes() == want
if child == 0:
    sys.exit(7 if same else 1)  # the usual way, with everything that runs at exit
_, status = os.waitpid(child, 0)
assert same and os.waitstatus_to_exitcode(status) == 7, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own():
    python(FORK)


FORK_WHILE_COMPILING = """
import os, threading, time
from numba import types
from cuda_kernels.host.compile import compiled

def compile_some():
    for i in range(4):
        compiled(f"sum-{i}", lambda a, i=i: a[i:].sum() + a.max(), types.float64(types.float64[::1]))

thread, children = threading.Thread(target=compile_some), 0
thread.start()
while thread.is_alive():
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        compiled("one", lambda a: a + 1, types.int64(types.int64))
        os._exit(7)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, 9)
        os._exit(1)
    assert os.waitstatus_to_exitcode(done[1]) == 7
    children += 1
assert children
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_forked_while_a_thread_compiles_can_compile(tmp_path):
    python(FORK_WHILE_COMPILING, NUMBA_CACHE_DIR=str(tmp_path))


INTERRUPT = """
import os, random, signal, threading, time, numpy as np, refops
from cuda_kernels import host

host.set_num_threads(3)
x, scaling = np.random.default_rng(0).standard_normal((256, 256), np.float32), refops.MXFP8Scaling(refops.E4M3)
want = host.quantize(x, scaling).rowwise_data.tobytes()
progress = [time.monotonic()]

def watch():
    while time.monotonic() - progress[0] < 20:
        time.sleep(0.1)
    os._exit(1)  # a call hangs

threading.Thread(target=watch, daemon=True).start()
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
random.seed(0)
interrupts, end = 0, time.monotonic() + 2
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.001))
        while True:
            host.quantize(x, scaling)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        interrupts += 1
    progress[0] = time.monotonic()
    if interrupts % 100 == 0:
        assert host.quantize(x, scaling).rowwise_data.tobytes() == want
assert interrupts > 100, interrupts
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
def test_interrupts_at_any_moment_leave_later_calls_working():
    """With `ThreadPoolExecutor` one in a few hundred left a lock behind, and a later call waited for ever."""
    python(INTERRUPT)


MEMORY = """
import numpy as np, ml_dtypes, refops
from cuda_kernels import host

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10

scaling, bf16 = refops.MXFP8Scaling(refops.E4M3), ml_dtypes.bfloat16
x = np.empty((8192, 4096), bf16)
x.view(np.uint16)[:] = 0x3FC0
small = x[:512]
q, _ = host.quantize(small, scaling, columnwise=True, dbias=True)
host.dequantize(q, dtype=bf16), host.activation("silu", small)
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak
before = status("VmRSS")
q, _ = host.quantize(x, scaling, columnwise=True, dbias=True)
y, z = host.dequantize(q, dtype=bf16), host.activation("silu", x)
grown = status("VmHWM") - before
outputs = sum(a.nbytes for a in (q.rowwise_data, q.columnwise_data, q.rowwise_scale_inv, q.columnwise_scale_inv, y, z))
assert outputs * 0.9 < grown < outputs + (8 << 20), (grown, outputs)
"""


@pytest.mark.full
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be read here")
def test_memory_besides_outputs_does_not_grow_with_the_tensor():
    python(MEMORY)


PRODUCT_MEMORY = """
import numpy as np, refops
from cuda_kernels.host import products
from refops.products import unit

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10

def multiply(a, b):
    return products.matmul(a, b, unit("hopper", refops.E4M3), a_format=refops.E4M3, b_format=refops.E4M3, promotion=128)

a, b = np.ones((24, 1 << 20), np.float32), np.ones((1 << 20, 24), np.float32)
multiply(a[:, : 1 << 13], b[: 1 << 13].T)
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak
before = status("VmRSS")
multiply(a, b.T)
grown = status("VmHWM") - before
assert grown < 8 << 20, grown
"""


@pytest.mark.full
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be read here")
def test_products_take_no_memory_besides_results_and_panels():
    """A copy of either operand would be 96 MiB, the products of one result 4."""
    python(PRODUCT_MEMORY)


# --- the cache on disk ------------------------------------------------------------------------------

CACHED = """
import logging, numpy as np, refops, cuda_kernels, sys
from cuda_kernels import host
assert cuda_kernels.__file__.startswith(sys.path[1] or sys.path[0]), (cuda_kernels.__file__, sys.path)
if len(sys.argv) > 1:
    logging.getLogger("cuda_kernels").setLevel("WARNING")
print(host.encode(np.linspace(-9, 9, 999, dtype=np.float32), refops.E4M3).tobytes().hex())
"""


def copied(folder):
    """A copy of the package in `folder`; returns its folder."""
    shutil.copytree(ROOT / "cuda_kernels", folder / "cuda_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "cuda_kernels"


def edit(path, text, becomes):
    """Change one place in a file."""
    source = path.read_text()
    assert text in source, f"{path.name} says it otherwise by now: {text}"
    path.write_text(source.replace(text, becomes, 1))


@pytest.mark.full
def test_machine_code_is_kept_until_a_source_changes(tmp_path):
    package, cache = copied(tmp_path), tmp_path / "cache"
    old = cache / "cuda_kernels" / "host-old"
    old.mkdir(parents=True)
    os.utime(old, (time.time() - 31 * 86400,) * 2)

    def start():
        return python(CACHED, folder=tmp_path, NUMBA_CACHE_DIR=str(cache))

    want, said = start()
    assert [line.split()[:2] for line in said.splitlines()] == [["cuda_kernels:", "compiling"]]
    assert len(said) < 100 and not old.exists()
    assert start() == (want, "")
    for file in cache.rglob("*.nbc"):
        file.write_bytes(file.read_bytes()[:100])  # as a crash would leave it
    assert start() == (want, said)
    assert start() == (want, "")
    edit(package / "casts.py", "m + odd + np.uint32(", "m + np.uint32(")
    other, again = start()
    assert other != want and again == said, "a loop follows the scalar functions that it inlines"
    assert start() == (other, "")


LOADED = """
import sys, numpy as np, refops
from cuda_kernels import host
x, E4M3 = np.random.default_rng(0).standard_normal((64, 64), np.float32), refops.E4M3
scalings = refops.MXFP8Scaling(E4M3), refops.NVFP4Scaling()
host.amax(x)
for i in sys.argv[1]:
    mine, reference = host.quantize(x, scalings[int(i)]), refops.quantize(x, scalings[int(i)])
    assert (mine.rowwise_data == reference.rowwise_data).all(), i
    assert (mine.rowwise_scale_inv == reference.rowwise_scale_inv).all(), i
"""


@pytest.mark.full
def test_machine_code_that_several_processes_kept_works_together(tmp_path):
    """Loops compiled in separate processes have inner functions like each other's; no loop may call another's."""
    for order in ("", "0", "1", "01", "10"):
        python(f"import sys; sys.argv.append({order!r})\n{LOADED}", NUMBA_CACHE_DIR=str(tmp_path))


@pytest.mark.full
def test_a_cache_that_cannot_be_written_and_a_program_that_wants_no_messages(tmp_path):
    (tmp_path / "file").write_text("")
    quiet = "import sys; sys.argv.append('quiet')\n" + CACHED
    for _ in range(2):
        said, errors = python(quiet, NUMBA_CACHE_DIR=str(tmp_path / "file" / "below"))
        assert len(said) == 2 * 999 + 1 and errors == ""
    assert os.listdir(tmp_path) == ["file"]


def test_the_cache_s_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiling.cache_directory() == tmp_path / "cuda_kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert compiling.cache_directory() == tmp_path / "home" / ".cache" / "cuda_kernels"
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "given"))
    assert compiling.cache_directory() == tmp_path / "given" / "cuda_kernels"


# --- seeded faults ----------------------------------------------------------------------------------


def check(x, scaling, **options):
    """`quantize` and `dequantize` have the reference's bits; a probe of faults."""
    mine, reference = (
        host.quantize(x, scaling, dbias=True, **options),
        refops.quantize(x, scaling, dbias=True, **options),
    )
    assert_same_quantized(mine[0], reference[0])
    assert same_bits(mine[1], reference[1]), "dbias"
    assert same_bits(host.dequantize(reference[0]), refops.dequantize(reference[0])), "dequantize"


def ordinary(shape):
    """Heavy-tailed values, none of them special."""
    return np.random.default_rng(0).standard_t(3, shape).astype(BF16)


def judge(op, inputs, *arguments, scaling=None, **options):
    """A call lies in the oracle's enclosure; a probe of faults."""
    name = op.removeprefix("scaled_")
    function = (
        host.scaled_activation if name != op else host.activation if scaling is None else host.activation_quantize
    )
    mine = function(name, *inputs.values(), *([scaling] if scaling else []), **options)
    mine = mine if scaling is None else {"rowwise_data": mine.rowwise_data, "rowwise_scale_inv": mine.rowwise_scale_inv}
    oracle.check(op, inputs, mine, scaling=scaling, params=options, diagnose=False).raise_for_mismatch()


#: name -> a probe.
PROBES = {
    "mxfp8": "check(tensor((300, 72)), MXFP8)",
    "wide": "check(tensor((9, 8224)), MXFP8)",
    "sums": "check(tensor((300, 72), F), MXFP8)",
    "current": "check(tensor((35, 4700), F), ALL_SCALINGS['current'])",
    "nvfp4": "check(ordinary((256, 1024)), ALL_SCALINGS['nvfp4-1x16'])",
    "stochastic": "check(ordinary((32, 64)), ALL_SCALINGS['nvfp4-sr'], columnwise=True)",
    "fused": "judge('silu', {'x': tensor((64, 64))}, scaling=MXFP8)",
    "scaled": "judge('scaled_swiglu', {'x': tensor((3, 8256)), 'row_scales': np.ones(3, F)}, glu_interleave_size=96)",
    "threads": "threads.set_num_threads(3); check(tensor((700, 160)), MXFP8)",
}
#: file, text, what it becomes, the probe that finds it
FAULTS = (
    ("casts.py", "m + odd + np.uint32(", "m + odd + U32(1) - np.uint32(", "mxfp8"),
    ("directions.py", "return as_f32(first), as_f32(second)", "return as_f32(second), as_f32(first)", "nvfp4"),
    ("directions.py", "U64(index(out.scale_stride, outer, block))", "U64(index(out.scale_stride, outer, 0))", "mxfp8"),
    ("host/casting.py", "scales[2 * i + 1] = rule(amaxes", "scales[2 * i + 1] = rule(F(2) * amaxes", "nvfp4"),
    ("host/casting.py", "r // outers, first + b)", "r // outers, b)", "wide"),
    ("host/stages.py", "bits > INFINITE", "bits > MAGNITUDE", "current"),
    ("host/stages.py", "row // PIECE_ROWS * out.inner + column", "column", "sums"),
    ("host/backend.py", "m * (k // PHILOX_BYTES) if columnwise else 0", "0", "stochastic"),
    ("host/backend.py", "if job.path.casts_rounded:", "if False:", "fused"),
    ("host/values.py", "return start, start + g, min", "return start, start + 2 * g, min", "scaled"),
    ("host/dequantize.py", "pair & U32(15)", "pair >> U32(4)", "nvfp4"),
    ("host/threads.py", "range(pieces + 1)", "range(pieces)", "threads"),
)


def probe(folder, cache, *names):
    """Run probes on the copy in `folder`, compiled anew without LLVM's optimizations, to save time."""
    code = "; ".join(
        ["from test_host_process import *", f"assert {str(folder)!r} in host.__file__", *map(PROBES.get, names)]
    )
    python(code, folder=folder, NUMBA_CACHE_DIR=str(cache), NUMBA_OPT="0")


SAMPLED_FAULTS = sampled(("file", "text", "becomes", "name"), FAULTS, 12, ids=[f"{f[0]}-{f[3]}" for f in FAULTS])
#: Probes of the faults that `make test-all` looks for.
IN_ALL = sorted({case.values[3] for case in SAMPLED_FAULTS.args[1] if tuple(case.marks) != SWEEP})


@pytest.mark.full
@pytest.mark.parametrize(
    "names", [IN_ALL, pytest.param([name for name in PROBES if name not in IN_ALL], marks=SWEEP)], ids=" ".join
)
def test_a_copy_without_a_fault_passes(tmp_path, names):
    copied(tmp_path)
    probe(tmp_path, tmp_path, *names)


@pytest.mark.full
@SAMPLED_FAULTS
def test_a_fault_is_found(tmp_path, file, text, becomes, name):
    edit(copied(tmp_path) / file, text, becomes)
    with pytest.raises(AssertionError, match=r"AssertionError|MismatchError"):
        probe(tmp_path, tmp_path, name)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, "bfloat16"])
def test_the_address_of_an_array_is_what_numpy_says(dtype):
    made = np.zeros((6, 8), arrays.DTYPES.get(dtype, dtype))
    for array in (made, made[2:], made[:, 3:], made.T, made[:0], np.array(1), np.asfortranarray(made)):
        assert arrays.address_of_array(array) == array.__array_interface__["data"][0]
