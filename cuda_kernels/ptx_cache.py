"""PTX on disk: a kernel is translated once for each compute capability, not once in each process.

Files lie under NUMBA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache, in a folder named by a digest of the sources that become
code, of the versions of Numba and of the compiler's own files: a change of one of them is never missed. Where writing
fails, nothing is kept.
"""

import hashlib
import os
import re
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import refops

#: Package -> files and folders that nothing on disk depends on, neither code nor what was counted in it.
UNCOMPILED = {
    "cuda_kernels": {"__main__.py", "emulator", "puzzles"},
    "refops": {
        "__main__.py",
        "checkpoints.py",
        "cli.py",
        "commands",
        "conformance.py",
        "display",
        "explain.py",
        "files.py",
        "golden",
        "oracle",
        "replacing.py",
        "report.py",
        "selfcheck.py",
        "survey.py",
    },
}


@lru_cache(maxsize=1)
def sources():
    """Digest of the sources of this package and of refops, whose formats and settings become constants in the code."""
    state = hashlib.sha256()
    for package in (Path(__file__).parent, Path(refops.__file__).parent):
        for path in sorted(package.rglob("*.py")):
            inside = path.relative_to(package)
            if inside.parts[0] not in UNCOMPILED[package.name]:
                state.update(str(inside).encode())
                state.update(path.read_bytes())
    return state.hexdigest()


#: Packages that turn Python into what NVVM reads.
PACKAGES = ("numba", "numba-cuda", "llvmlite", "numpy")
#: What turns that into PTX, as numba-cuda calls it: the compiler and the library of functions that it links.
COMPILER_FILES = ("nvvm", "libdevice")
#: A compiler's file is known by its size and by so many pages of it: all of its 70 MB would take a tenth of a second.
PAGES, PAGE = 64, 4096


@lru_cache(maxsize=1)
def digest():
    """Digest of the sources and of everything installed that can change the PTX."""
    state = hashlib.sha256(sources().encode())
    for text in (*package_versions(), *compiler_files()):
        state.update(f"{text}\n".encode())
    return state.hexdigest()[:24]


def package_versions():
    """ "name version" of each of `PACKAGES` that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"


def compiler_paths():
    """name -> path of each of `COMPILER_FILES` that numba-cuda finds: in a wheel of CUDA 12 or 13, in a conda
    environment, under CUDA_HOME or in the system."""
    try:
        from numba.cuda.cuda_paths import get_cuda_paths

        found = get_cuda_paths()
    except Exception:  # no numba-cuda, or no CUDA that it can find: each says so in its own way
        return {}
    return {name: found[name].info for name in COMPILER_FILES if name in found and found[name].info}


def compiler_files():
    """ "name identity" of each of `compiler_paths`.

    Packages' names would not do: CUDA 12 and CUDA 13 have others, and CUDA_HOME has none.
    """
    for name, path in compiler_paths().items():
        yield f"{name} {file_identity(path)}"


def file_identity(path):
    """A file's identity, independent of its place and date: its size and a digest of pages spread over it.

    Where it cannot be read, that is a name for the system's own search, the name.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            state = hashlib.sha256()
            for place in range(PAGES):
                file.seek(max(0, size - PAGE) * place // (PAGES - 1))
                state.update(file.read(PAGE))
    except OSError:
        return str(path)
    return f"{size} {state.hexdigest()}"


def folder():
    """Where the files lie."""
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cuda_kernels" / digest()


def get(key, target, make):
    """Return the PTX for a key (whose repr identifies it) and a target, made by `make` if it is not on disk."""
    name = hashlib.sha256(f"{key!r} {target!r}".encode()).hexdigest()[:32]
    path = folder() / f"{name}.ptx"
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_text()
        if text:  # an empty file is one that something broke
            return text
    text = make()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False)  # noqa: SIM115  closed below
        try:
            with file:
                file.write(text)
            os.replace(file.name, path)  # at once: another process never reads half a file
        finally:
            Path(file.name).unlink(missing_ok=True)
    return text


def entry_name(text):
    """The name of the kernel in PTX."""
    return re.search(r"\.visible \.entry (\w+)\(", text).group(1)


def version_of(text):
    """The version of PTX that a text is written in, such as "9.0"; "" where it has none."""
    found = re.search(r"^\s*\.version\s+([\d.]+)", text, re.MULTILINE)
    return found[1] if found else ""
