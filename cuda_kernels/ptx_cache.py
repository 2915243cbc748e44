"""PTX on disk: a kernel is translated once for each compute capability, not once in each process.

Files lie under NUMBA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache, in a folder named by a digest of the sources that become
code and of the compilers' versions: an edit of one of them is never missed. Where writing fails, nothing is kept.
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
    "cuda_kernels": {"__main__.py", "puzzles"},
    "refops": {
        "__main__.py",
        "cli.py",
        "commands",
        "conformance",
        "display",
        "explain.py",
        "files.py",
        "golden",
        "oracle",
        "replacing.py",
        "report.py",
        "selfcheck",
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


@lru_cache(maxsize=1)
def digest():
    """Digest of the sources and of the versions of Numba, numba-cuda and NVVM."""
    from importlib.metadata import PackageNotFoundError, version

    state = hashlib.sha256(sources().encode())
    for package in ("numba", "numba-cuda", "llvmlite", "numpy", "nvidia-nvvm"):
        with suppress(PackageNotFoundError):
            state.update(f"{package}{version(package)}".encode())
    return state.hexdigest()[:24]


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
