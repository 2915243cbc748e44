"""Compile the software GPU: libcuda.so.1 from `device` and `driver`, and the linkers in front of the real ones.

`libraries()` is all that others use: the folder with the finished libraries. It lies in the folder of the project's
other caches (NUMBA_CACHE_DIR, else XDG_CACHE_HOME, else ~/.cache), or where that cannot be written in a folder of this
user among the temporary ones, named by a digest of the sources and of the flags. It is filled under another name and
then moved, so that several processes may build at once: the first one wins, and nobody sees half a folder. A folder
that lost a file is built again. Folders of other sources that nobody used for 30 days are removed.

A compiler is $CXX, or else g++, c++ or clang++, or that of the wheel ziglang. Nothing of NVIDIA's is needed.
"""

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cuda_kernels.messages import announced

#: The folder that holds the folders `device` and `driver`.
ROOT = Path(__file__).resolve().parent
LINKER_SOURCE = "linker.cpp"
DRIVER_LIBRARY = "libcuda.so.1"
#: Names that the linker of CUDA 12 and of CUDA 13 is loaded by.
LINKER_LIBRARIES = ("libnvJitLink.so.12", "libnvJitLink.so.13")
LIBRARIES = (DRIVER_LIBRARY, *LINKER_LIBRARIES)
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++20", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-frounding-math", "-fno-sanitize=all")
#: Kernels run in what is optimised most; the rest takes longer to compile than to run.
FAST, PLAIN = "-O2", "-O1"
#: Files of `device` that run once for a module.
ONCE_FOR_A_MODULE = ("contraction.cpp", "lowering.cpp", "reader.cpp")
#: What x86 processors have since about 2013, by its name in /proc/cpuinfo: eight lanes in an instruction, fused
#: operations, conversions of float16.
PROCESSOR_FLAGS = {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"}
#: The symbols that the libraries export. A C++ runtime that is linked into them stays inside.
EXPORTS = "{ global: cu*; emulator_*; nvJitLink*; local: *; };\n"
#: File in the folder of the libraries that holds the size of each.
CONTENTS = "contents.json"
#: Days that libraries of other sources are kept.
KEPT_DAYS = 30
#: Seconds after which one compilation is given up.
LONGEST = 600


class CompilerMissingError(RuntimeError):
    """There is no C++ compiler, or none that can compile the software GPU."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: what starts it, without arguments.
        version: what it says of itself.
    """

    command: tuple[str, ...]
    version: str


# --- what it is built with --------------------------------------------------------------------------


def find_compiler() -> Compiler:
    """Return the first compiler that answers.

    Raises:
        CompilerMissingError: there is none, or CXX is set and does not name one.
    """
    given = os.environ.get("CXX")
    for command in (tuple(given.split()),) if given else _candidates():
        version = _version_of(command)
        if version is not None:
            return Compiler(command, version)
    if given:
        raise CompilerMissingError(f"CXX must be the command of a C++ compiler; got {given!r}, which does not start")
    raise CompilerMissingError(
        "the software GPU is compiled once and needs a C++ compiler: install g++ or clang++, or pip install ziglang"
    )


def _candidates():
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            yield (path,)
    if importlib.util.find_spec("ziglang"):
        yield (sys.executable, "-m", "ziglang", "c++")


def _version_of(command):
    """The version that a compiler reports; None if it does not start."""
    try:
        asked = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout if asked.returncode == 0 else None


@lru_cache(maxsize=1)
def processor_flags() -> tuple[str, ...]:
    """Return the compiler's flags for this machine's processor: all of `PROCESSOR_FLAGS` or none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        has = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
        if set(PROCESSOR_FLAGS) <= set(has):
            return tuple(PROCESSOR_FLAGS.values())
    return ()


def wheel_folder(package: str) -> Path | None:
    """Return the folder of an installed package, or None."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


# --- sources ----------------------------------------------------------------------------------------


def sources() -> list[Path]:
    """Return the files that become the driver's library, in a fixed order."""
    return [path for folder in ("device", "driver") for path in sorted((ROOT / folder).rglob("*.cpp"))]


def _units(folder):
    """[(file to compile, level)]. The files of `driver` are compiled as one: their headers take longer than they do."""
    device = [path for path in sources() if path.is_relative_to(ROOT / "device")]
    units = [(path, PLAIN if path.name in ONCE_FOR_A_MODULE else FAST) for path in device]
    driver = folder / "driver.cpp"
    driver.write_text("".join(f'#include "{path}"\n' for path in sources() if path not in device))
    return [*units, (driver, PLAIN)]


def digest() -> str:
    """Return the digest of what the libraries depend on: sources, flags, the kind of machine and the compiler."""
    try:
        compiler = find_compiler().version
    except CompilerMissingError:
        compiler = ""
    made_with = (FLAGS, FAST, PLAIN, processor_flags(), EXPORTS, os.environ.get("CXX"), platform.machine(), compiler)
    state = hashlib.sha256(repr(made_with).encode())
    headers = [path for folder in ("device", "driver") for path in sorted((ROOT / folder).rglob("*.h"))]
    for path in (*sources(), *headers, ROOT / LINKER_SOURCE):
        state.update(str(path.relative_to(ROOT)).encode())
        state.update(path.read_bytes())
    return state.hexdigest()[:24]


# --- the cache --------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Return the folder of the project's caches."""
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cuda_kernels"


def temporary_directory() -> Path:
    """Return the folder for this user's libraries where the caches cannot be written."""
    return Path(tempfile.gettempdir()) / f"cuda_kernels-{os.getuid()}"


def libraries() -> Path:
    """Return the folder with the finished libraries, compiled first where they are not there yet.

    Raises:
        CompilerMissingError: nothing to compile with, or the compiler refuses the sources.
        OSError: neither folder can be written.
    """
    name = f"emulator-{digest()}"
    folders = [base / name for base in (cache_directory(), temporary_directory())]
    for folder in folders:
        if is_complete(folder) and _are_ours(folder, folder.parent):
            with suppress(OSError):
                os.utime(folder)  # a folder that cannot be written is no less good
            return folder
    errors = []
    for folder in folders:
        try:
            _build_into(folder)
        except OSError as error:
            errors.append(f"{folder.parent}: {error.strerror or error}")
            continue
        _remove_old_folders(folder)
        return folder
    raise OSError(f"the software GPU needs a folder for its libraries that can be written; {'; '.join(errors)}")


def is_complete(folder: Path) -> bool:
    """Whether a folder holds every library, each as long as it was when it was linked."""
    try:
        sizes = json.loads((folder / CONTENTS).read_text())
        return set(sizes) == set(LIBRARIES) and all((folder / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, ValueError):
        return False


def _are_ours(*folders):
    """Whether nobody else could have put libraries there: they are loaded as code from a temporary folder."""
    for path in folders:
        found = path.stat()
        written_by_others = stat.S_IMODE(found.st_mode) & stat.S_IWOTH
        if found.st_uid not in (0, os.getuid()) or written_by_others:
            return False
    return True


def _build_into(folder):
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _are_ours(folder.parent):
        raise PermissionError(f"{folder.parent} can be written by others")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as made:
        finished = Path(made, "libraries")
        finished.mkdir()
        with announced("the software GPU", "this machine"):
            _compile(Path(made), finished)
        sizes = {name: (finished / name).stat().st_size for name in LIBRARIES}
        (finished / CONTENTS).write_text(json.dumps(sizes))
        _move(finished, folder, Path(made, "incomplete"))


def _move(finished, folder, aside):
    """Rename the finished folder. Another process with the same sources may be faster; incomplete ones are removed."""
    for _ in range(3):
        with suppress(OSError):
            os.rename(finished, folder)
            return
        if is_complete(folder):
            return
        with suppress(OSError):
            os.rename(folder, aside)
    raise OSError(f"{folder} can be neither replaced nor used")


def _remove_old_folders(folder):
    for other in folder.parent.glob("emulator-*"):
        with suppress(OSError):  # another process removes them too
            unused = time.time() - other.stat().st_mtime
            if other != folder and unused > KEPT_DAYS * 86400:
                shutil.rmtree(other, ignore_errors=True)


# --- compiling --------------------------------------------------------------------------------------


def _compile(objects, finished):
    """Compile every source, several at a time, and link the libraries into `finished`."""
    compiler = find_compiler()
    units = [*_units(objects), (ROOT / LINKER_SOURCE, PLAIN)]
    targets = [objects / f"{number}.o" for number in range(len(units))]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        started = [
            pool.submit(_compile_one, compiler, path, level, target)
            for (path, level), target in reversed([*zip(units, targets, strict=True)])  # the driver takes longest
        ]
        for one in started:
            one.result()
    exports = objects / "exports"
    exports.write_text(EXPORTS)
    *driver, linker = map(str, targets)
    _link(compiler, finished / DRIVER_LIBRARY, [*driver, "-ldl"], exports)
    for name in LINKER_LIBRARIES:
        _link(compiler, finished / name, [linker, "-ldl"], exports)


def _compile_one(compiler, source, level, target):
    folders = (f"-I{ROOT / 'device'}", f"-I{ROOT / 'driver'}")
    flags = (*FLAGS, level, *processor_flags(), *folders)
    _run([*compiler.command, *flags, "-c", str(source), "-o", str(target)], source.name)


def _link(compiler, target, objects, exports):
    """Link with -Bsymbolic: calls between entry points stay inside, whatever else the process has loaded."""
    options = ["-shared", f"-Wl,-soname,{target.name}", "-Wl,-Bsymbolic", f"-Wl,--version-script={exports}"]
    _run([*compiler.command, *options, "-o", str(target), *objects], target.name)


def _run(command, name):
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise CompilerMissingError(f"{command[0]} took more than {LONGEST} s for {name} of the software GPU") from None
    if made.returncode:
        errors = [line for line in made.stderr.splitlines() if "error" in line] or made.stderr.splitlines()[-1:]
        said = errors[0] if errors else f"exit code {made.returncode}"
        raise CompilerMissingError(f"{' '.join(command[:1])} cannot compile {name} of the software GPU: {said}")
