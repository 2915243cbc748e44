"""Speed and memory of every operation beside all peers, in one run on the same threads (`make bench`).

Each number of threads has a process of its own, which is confined to as many CPUs before anything is imported, so that
no library can use more; the processor time of each call is recorded beside the wall clock. Rounds alternate between all
competitors, in an order that shifts with each round. A competitor that has used up its share of the time gets fewer
rounds, and one that would take too long is left out, which the results say. The bits of every competitor are compared
with those of refops. Then each competitor runs in a process that measures the peak of resident memory, call by call.

    PYTHONPATH=.:tests python tests/benchmarks/compare.py           # everything, ten to twenty minutes; writes a JSON
    PYTHONPATH=.:tests python tests/benchmarks/compare.py --short   # does all of it run, with the right bits?

`tables.py` makes tables and a plot from the JSON.
"""

import argparse
import ctypes
import datetime
import gc
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SIZES = ((1024, 1024), (4096, 4096), (8192, 4096))
SHORT = ((256, 512),)
#: Seconds for the rounds of one operation, by elements. The bits are compared up to CHECKED elements, at that size only
#: those of ours and of code that is compiled for the size.
SECONDS = {1024 * 1024: 0.4, 4096 * 4096: 1.2, 8192 * 4096: 3.0}
CHECKED = 4096 * 4096
ROUNDS = 25
#: Part of those seconds that one competitor may use before it is passed over, and seconds that a call may take.
PART, SLOWEST = 0.2, 0.8
#: Seconds from which a call that compiles nothing needs no other before it.
LONG = 0.2
COMPILED = ("torch formulas, torch.compile", "jnp formulas, jit", "jnp")
MEMORY_SIZE = (4096, 4096)
#: Ours, and what bounds everybody; everything else is a peer.
OURS, COPIES = ("refops", "cuda_kernels.host"), ("memcpy", "copy into new memory")
#: Share of equal elements, in each array, from which an operation with exp or tanh counts as having the bits of refops.
NEARLY = 0.999


# --- what runs -------------------------------------------------------------------------------------------------------


def make_inputs(m, k):
    """Name -> array of (M, K), as `Subject.inputs` names them."""
    import ml_dtypes
    import numpy as np

    import refops
    from peers.subjects import MXFP8, NVFP4

    rng = np.random.default_rng(0)
    pair, dy = (rng.standard_normal((m, n), np.float32).astype(ml_dtypes.bfloat16) for n in (2 * k, k))
    x = np.ascontiguousarray(pair[:, :k])
    return {"x": x, "pair": pair, "dy": dy, "mxfp8": refops.quantize(x, MXFP8), "nvfp4": refops.quantize(x, NVFP4)}


def fields(value):
    """The arrays of an input or a result of refops."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple):
        return [array for part in value for array in fields(part)]
    return [array for array in vars(value).values() if isinstance(array, np.ndarray)]


def copier(source, target, threads):
    """A function that copies one array into the other with this number of threads."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    if threads == 1:
        return lambda: np.copyto(target, source)
    cuts, pool = [source.size * i // threads for i in range(threads + 1)], ThreadPoolExecutor(threads)

    def copy():
        parts = itertools.pairwise(cuts)
        list(pool.map(lambda part: np.copyto(target[slice(*part)], source[slice(*part)]), parts))

    return copy


def fastest(runs):
    """The fastest of several ways to do the same."""
    return min(runs, key=lambda run: (run(), min(timed(run)[1] for _ in range(5)))[1])


def copies(size, threads):
    """The competitors that bound all others: half of the traffic read, half written."""
    import numpy as np

    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    target[:] = 0
    # Handing parts to threads takes longer than copying a small tensor does.
    memcpy = fastest([copier(source, target, n) for n in sorted({1, threads})])
    return {"memcpy": memcpy, "copy into new memory": source.copy}


def competitors(operation, tensors, peers):
    """Name -> (run, arrays of its result, subject): ours, and each offer of the peers."""
    import refops
    from cuda_kernels import host
    from peers.subjects import SUBJECTS, TIMED, read

    first = SUBJECTS[TIMED[operation][0]]
    arguments = [tensors[name] for name in first.inputs]
    found = {
        name: (lambda m=module: first.call(m, *arguments), read, first.name)
        for name, module in zip(OURS, (refops, host), strict=True)
    }
    for peer in peers:
        subject = next((s for s in TIMED[operation] if peer.offer(s)), None)  # a stand-in where it has nothing closer
        for offer in peer.offers:
            if offer.subject != subject or "bfloat16" not in offer.dtypes:
                continue
            words = [offer.variant] if offer.variant else []
            words += [subject.rsplit(", ", 1)[-1]] if subject != first.name else []
            name = f"{peer.name} ({', '.join(words)})" if words else peer.name
            prepared = [offer.prepare(x) for x in arguments]
            found[name] = (lambda o=offer, p=prepared: o.run(*p), offer.arrays, subject)
    return found


def load_peers(modules):
    """The peers, with what they print on import kept apart."""
    from peers import registry

    return registry.load(*modules)


# --- timing ----------------------------------------------------------------------------------------------------------


def timed(run):
    """(result, wall seconds, processor seconds of all threads) of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def equal_shares(subject, reference, arrays):
    """Array name -> share of its entries that have the bits of refops; None where they cannot be compared."""
    import numpy as np

    import refops
    from peers.subjects import comparable, read

    ours = read(reference)
    if set(arrays) == {"values"} and "values" not in ours:
        ours = {"values": refops.dequantize(reference)}
    if set(ours) != set(arrays) or any(ours[n].shape != arrays[n].shape for n in ours):
        return None
    shares = {}
    for name, mine in ours.items():
        fmt = subject.formats.get(name)
        shares[name] = float(np.mean(comparable(mine, fmt) == comparable(arrays[name], fmt))) if mine.size else 1.0
    return shares


def rounds_of(runs, seconds):
    """Name -> list of (wall, processor) seconds: alternating rounds, one at least, until the time is over."""
    samples, spent = {name: [] for name in runs}, dict.fromkeys(runs, 0.0)
    names, start = list(runs), time.perf_counter()
    for number in range(ROUNDS):
        if number == 1:
            start = time.perf_counter()  # what one slow competitor took is not the others' loss
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if samples[name] and spent[name] > PART * seconds:
                continue
            _, wall, cpu = timed(runs[name])
            samples[name].append((wall, cpu))
            spent[name] += wall
        if time.perf_counter() - start > seconds:
            break
    return samples


def time_operation(operation, tensors, peers, threads, earlier, check):
    """Rows of one operation at one size; `earlier` has seconds an element of each competitor at a smaller size."""
    from peers.subjects import SUBJECTS, TIMED

    subject = SUBJECTS[TIMED[operation][0]]
    elements = tensors["x"].size
    runs, rows, once = {}, [], {}
    found = competitors(operation, tensors, peers)
    reference = traffic = None
    for name, (run, read, of_subject) in found.items():
        row = {"operation": operation, "competitor": name, "subject": of_subject}
        rows.append(row)
        predicted = earlier.get((operation, name), 0.0) * elements
        if predicted > SLOWEST and name not in OURS and name not in COMPILED:  # of those the small size tells little
            row["left_out"] = f"would take {predicted:.1f} s a call, more than {SLOWEST} s"
            continue
        runs[name] = run
        compared = check and (elements < CHECKED or name in OURS or name in COMPILED)
        if predicted > LONG and not compared and name not in COMPILED and reference is not None:
            continue
        try:
            result, first, cpu = timed(run)
        except Exception as error:  # one peer's failure is not the others'; it is reported, and the exit code 1
            del runs[name]
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        row["first_call_ms"] = round(1e3 * first, 3)
        if reference is None:  # refops comes first
            inputs = [tensors[name] for name in subject.inputs]
            reference, traffic = result, sum(a.nbytes for value in (*inputs, result) for a in fields(value))
            if predicted > LONG:  # nothing is set up in it, so that its first call is as good as any
                once[name] = [(first, cpu)]
                del runs[name]
        if compared:
            row["equal_shares"] = equal_shares(subject, reference, read(result))
        del result
    del reference
    runs |= copies(traffic // 2, threads)
    for run in (runs[name] for name in COPIES):
        run()
    gc.collect()
    gc.disable()
    samples = rounds_of(runs, SECONDS.get(elements, 0.5)) | once
    gc.enable()
    rows += [{"operation": operation, "competitor": name} for name in COPIES]
    for row in rows:
        row["traffic_bytes"] = traffic
        if row["competitor"] in samples:
            add_times(row, samples[row["competitor"]])
            earlier[operation, row["competitor"]] = row["best_ms"] / 1e3 / elements
    return rows


def add_times(row, samples):
    """Best and median of the rounds, and gigabytes of ideal traffic a second."""
    import numpy as np

    wall, cpu = np.array(samples).T
    best = int(np.argmin(wall))
    row |= {
        "best_ms": round(1e3 * float(wall[best]), 4),
        "median_ms": round(1e3 * float(np.median(wall)), 4),
        "cpu_ms_of_best": round(1e3 * float(cpu[best]), 4),
        "rounds": len(samples),
        "gb_per_s": round(row["traffic_bytes"] / float(wall[best]) / 1e9, 3),
    }


def slow_calls(options, peers):
    """(operation, competitor) -> seconds an element, of peers that loop in Python, measured on a few rows."""
    few = make_inputs(32, 512)
    slow = [replace(peer, offers=[offer for offer in peer.offers if offer.rows is not None]) for peer in peers]
    found = {}
    for operation in options.operations:
        for name, (run, _, _) in competitors(operation, few, slow).items():
            if name not in OURS:
                found[operation, name] = timed(run)[1] / few["x"].size
    return found


def timing_process(options):
    """Time everything on the CPUs that this process is confined to; return rows and peers."""
    import torch

    from cuda_kernels import host

    torch.set_num_threads(options.threads)
    host.set_num_threads(options.threads)
    peers = load_peers(options.modules)
    rows, earlier = [], slow_calls(options, peers)
    for m, k in options.sizes:
        tensors = make_inputs(m, k)
        for operation in options.operations:
            check = options.check and m * k <= CHECKED
            made = time_operation(operation, tensors, peers, options.threads, earlier, check)
            rows += [{**row, "size": [m, k], "threads": options.threads} for row in made]
            say(f"{options.threads} thread(s), {m} x {k}, {operation}")
    return {
        "rows": rows,
        "peers": [{"name": peer.name, "versions": peer.packages, "absent": peer.absent} for peer in peers],
        "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }


# --- memory ----------------------------------------------------------------------------------------------------------


def resident(field):
    """VmRSS or VmHWM of this process in bytes."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def peak_of(run):
    """Bytes of resident memory that a call takes at its peak, its result included, beyond what was there before."""
    run()  # what a library sets up once
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = run()
    peak = resident("VmHWM")
    del result
    return max(0, peak - before)


def memory_process(options):
    """Competitor's rows of peak memory; one module of peers, or ours."""
    import torch

    from cuda_kernels import host

    torch.set_num_threads(options.threads)
    host.set_num_threads(options.threads)
    peers = load_peers(options.modules) if options.modules else []
    (m, k), rows = options.sizes[0], []
    tensors = make_inputs(m, k)
    for operation in options.operations:
        for name, (run, _, _) in competitors(operation, tensors, peers).items():
            if (name in OURS) == bool(options.modules) or (options.only and [operation, name] not in options.only):
                continue
            rows.append({"operation": operation, "competitor": name, "peak_bytes": peak_of(run)})
    say(f"memory: {', '.join(options.modules) or 'refops and host'}")
    return {"rows": rows}


# --- processes -------------------------------------------------------------------------------------------------------


def say(text):
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def confined(threads):
    """The environment of a process with so many threads."""
    number = str(threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    xla = "--xla_cpu_multi_thread_eigen=false" if threads == 1 else ""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {xla}".strip()
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    return {
        **os.environ,
        **dict.fromkeys(names, number),
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "TORCHINDUCTOR_COMPILE_THREADS": number,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": path,
    }


def child(kind, folder, **options):
    """Run one process of this script; return what it made, or raise with what it said."""
    out = Path(folder) / "out.json"
    request = json.dumps({"kind": kind, **options})
    environment = {**confined(options["threads"]), "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}
    command = [sys.executable, "-W", "ignore", __file__, "--child", request, "--out", str(out)]
    subprocess.run(command, env=environment, check=True)
    return json.loads(out.read_text())


def child_main(request, out):
    """Confine this process, before any library starts threads, and do what is asked for."""
    options = argparse.Namespace(**json.loads(request))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    made = {"timing": timing_process, "memory": memory_process}[options.kind](options)
    out.write_text(json.dumps(made))


# --- the whole -------------------------------------------------------------------------------------------------------


def machine():
    """What the numbers belong to."""
    model = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None
    return {
        "cpu": model.group(1).strip() if model else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory, 1) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }


def ratios(rows):
    """Add to each row how its best time compares with memcpy's, the fastest peer's, and the fastest equal peer's."""
    groups = {}
    for row in rows:
        groups.setdefault((row["operation"], *row["size"], row["threads"]), []).append(row)
    for group in groups.values():
        times = {row["competitor"]: row["best_ms"] for row in group if "best_ms" in row}
        peers = {name: t for name, t in times.items() if name not in (*OURS, *COPIES)}
        same = {row["competitor"] for row in group if row.get("equal")}
        for row in group:
            if "best_ms" not in row:
                continue
            row["to_memcpy"] = round(row["best_ms"] / times["memcpy"], 3)
            for key, of in (("best_peer", peers), ("best_equal_peer", {n: t for n, t in peers.items() if n in same})):
                if of and row["competitor"] not in COPIES:
                    fastest = min(of, key=of.get)
                    row[key], row[f"to_{key}"] = fastest, round(row["best_ms"] / of[fastest], 3)


def mark_equal(rows):
    """Say of each row whether its bits are those of refops; where not compared, what was found before holds.

    Every array has to reach the share that its subject allows: a small one does not hide behind a large one.
    """
    from peers.subjects import SUBJECTS, TIMED

    known = {}
    for row in rows:  # the first number of threads first, smaller sizes first
        key = (row["operation"], row["competitor"])
        if "equal_shares" in row:
            subject, shares = SUBJECTS[TIMED[row["operation"]][0]], row["equal_shares"]
            row["equal"] = shares is not None and all(
                share >= (1.0 if subject.is_exact(name) else NEARLY) for name, share in shares.items()
            )
            row["equal_checked_at"] = row["size"]
            known[key] = {name: row[name] for name in ("equal_shares", "equal", "equal_checked_at")}
        elif key in known:
            row |= known[key]


def run(sizes, threads, operations, modules, memory_size):
    """Run all processes and return the document."""
    from peers import registry

    start = time.perf_counter()
    document = {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": registry.versions(("refops", "numpy", "numba", "llvmlite", "torch", "jax", "jaxlib", "ml_dtypes")),
        "method": {
            "most_rounds": ROUNDS,
            "seconds_by_elements": {str(elements): seconds for elements, seconds in SECONDS.items()},
            "part_of_one_competitor": PART,
            "slowest_call_s": SLOWEST,
            "memcpy": "half of the traffic copied to memory that was written before; one thread or all, the faster",
            "torch_compile": "for the very shape or for any shape, whichever is faster for the operation and size",
            "bits": f"compared in the first process up to {CHECKED} elements; with exp or tanh {NEARLY} an array do",
            "memory": "VmHWM of a process of its own, reset before the call, less VmRSS before it; result included",
        },
    }

    with tempfile.TemporaryDirectory() as folder:
        common = {"operations": list(operations)}
        made = [
            child("timing", folder, threads=n, check=n == threads[0], sizes=sizes, modules=modules, **common)
            for n in threads
        ]
        rows = [row for part in made for row in part["rows"]]
        mark_equal(rows)
        ratios(rows)
        if memory_size:
            there = [m for m, peer in zip(modules, made[0]["peers"], strict=True) if not peer["absent"]]
            add_memory(rows, folder, memory_size, there, common)
    document |= {
        "peers": made[0]["peers"],
        "cpus_used": {n: part["cpus"] for n, part in zip(threads, made, strict=True)},
    }
    document["machine"]["load_after"] = [round(value, 2) for value in os.getloadavg()]
    document["seconds"] = round(time.perf_counter() - start)
    return document | {"rows": rows}


def add_memory(rows, folder, size, modules, common):
    """Add the peaks of one thread's calls of `size` to all rows of that size."""
    wanted = {(row["operation"], row["competitor"]) for row in rows if "best_ms" in row and row["size"] == list(size)}
    only = [list(pair) for pair in wanted]
    for part in ((), *((module,) for module in modules)):  # ours, then one peer each
        found = child("memory", folder, threads=1, sizes=[list(size)], modules=list(part), only=only, **common)["rows"]
        peaks = {(row["operation"], row["competitor"]): row["peak_bytes"] for row in found}
        for row in rows:
            peak = peaks.get((row["operation"], row["competitor"]))
            if peak is not None and row["size"] == list(size):
                row["peak_bytes"] = peak


def failures(document):
    """What must not happen: a competitor failed, or our kernels or formulas differ from the bits of refops."""
    wrong = []
    for row in document["rows"]:
        ours = row["competitor"] in OURS or row["competitor"].startswith(("torch formulas", "jnp formulas"))
        where = f"{row['competitor']}, {row['operation']}, {row['size']}"
        if row.get("failed"):
            wrong.append(f"{where}: {row['failed']}")
        if ours and row.get("equal") is False:
            wrong.append(f"{where}: {shares_in_words(row['equal_shares'])}")
    return wrong


def shares_in_words(shares):
    """What `equal_shares` found for the arrays that differ."""
    if shares is None:
        return "other arrays or shapes than those of refops"
    return ", ".join(f"{share:.4%} of {name} equal" for name, share in shares.items() if share < 1)


def slug(name):
    """A file name's part."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def main():
    """Run, write, print the short table; exit code 1 where bits are wrong or a competitor failed."""
    from peers import registry
    from peers.subjects import TIMED

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="256 x 512, one thread, no torch.compile, nothing written")
    parser.add_argument("--size", action="append", help="MxK, repeatable")
    parser.add_argument("--threads", action="append", type=int, help="repeatable; 1 and 2 by default")
    parser.add_argument("--operation", action="append", choices=TIMED, help="repeatable; all by default")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, help="the JSON; results/cpu_<model>.json of a whole run by default")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child_main(options.child, options.out)
        return 0
    sizes = [tuple(map(int, size.split("x"))) for size in options.size or ()] or (SHORT if options.short else SIZES)
    threads = options.threads or ([1] if options.short else [1, 2])
    modules = [module for module in registry.MODULES if not (options.short and module == "torch_compiled")]
    memory = None if options.short or options.no_memory or MEMORY_SIZE not in sizes else MEMORY_SIZE
    document = run(sizes, threads, options.operation or TIMED, modules, memory)
    whole = not (options.short or options.size or options.threads or options.operation or options.no_memory)
    out = options.out or (RESULTS / f"cpu_{slug(document['machine']['cpu'])}.json" if whole else None)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
        say(f"wrote {out}")
    sys.path.insert(0, str(HERE))
    import tables

    print(tables.plain(document))
    wrong = failures(document)
    for line in wrong:
        print(f"WRONG: {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
