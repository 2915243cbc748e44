"""Every case of `tests/gpu` on the software GPU, both ways; as a script, a sample of them in any environment.

    python tests/emulator/gate.py --target sm_90 --every 24

prints JSON: how many cases ran, the failures, the versions of PTX on disk, and the compiler and linkers in the process.
"""

import argparse
import json
import sys
import traceback
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import gpu_check  # which finds the folders of the tests

#: Seed of every case's numbers.
SEED = 17
PARTS = ("quantize", "activations", "calls", "units")


def both_ways(target, part, name, function):
    """Run a case once in order, and once late and backwards; raise where a result is wrong.

    The second time, a read of bytes that nobody wrote is a fault. Where bits are asked for, that time moves approximate
    instructions within their bounds, too: no bit may rest on them.
    """
    import gpu_cases

    with gpu_cases.Emulated(target) as device:
        function(device, np.random.default_rng([SEED, len(name)]))
    late = {"deferred": True, "backward": True, "uninitialised": True, "perturb": SEED if part == "quantize" else 0}
    with gpu_cases.Emulated(target, **late) as device:
        function(device, np.random.default_rng([SEED, len(name)]))


def sample(every):
    """[(part, name, function)]: each `every`-th case of the parts that quantize and activate, and all of "units"."""
    return [(part, *case) for part in PARTS for case in gpu_check.cases_of(part)[:: every if part != "units" else 1]]


def run_sample(target, every):
    """Run the sample on a target; {"cases": how many, "failures": {name: traceback}}."""
    cases, failures = sample(every), {}
    for part, name, function in cases:
        try:
            both_ways(target, part, name, function)
        except Exception:
            failures[f"{part} {name}"] = traceback.format_exc()[-1500:]
    return {"cases": len(cases), "failures": failures}


def what_compiled():
    """{"ptx": versions of the PTX on disk, "libraries": paths of the NVVM and of the nvJitLink in this process}."""
    from cuda_kernels import ptx_cache

    versions = {ptx_cache.version_of(path.read_text()) for path in ptx_cache.folder().glob("*.ptx")}
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = [path for path in loaded if Path(path).name.startswith(("libnvvm.", "libnvJitLink."))]
    return {"ptx": sorted(versions), "libraries": sorted(libraries)}


def main():
    """Print what was found; the exit code is 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--every", type=int, default=24, help="each so many-th case")
    options = parser.parse_args()
    from cuda_kernels.emulator import load

    load()  # before anything looks for CUDA
    found = run_sample(options.target, options.every)
    print(json.dumps(found | what_compiled(), indent=1))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
