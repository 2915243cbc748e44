"""Put the software GPU in front of the real driver, and ask it for faults and reports.

`load` loads libcuda.so.1 and the linker's shim of `build` into this process before anything looks for the real ones:
numba.cuda, cuda.core and cuda.bindings find what is loaded already. Whatever runs above them runs unchanged. A child
process loads for itself: `python -m cuda_kernels.emulator SCRIPT` does so in front of any script.

NVIDIA's runtime (libcudart, which `cuda.core.Device.sync` and CUDA builds of torch use) does not run on it: it asks a
driver for tables that nobody documents.
"""

import ctypes
import json
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuda_kernels.emulator import build, exceptions
from cuda_kernels.emulator.settings import BEHAVIOUR, Settings, targets_with

#: dlopen's flag for "only if it is there already".
RTLD_NOLOAD = 0x4
#: Package -> the linker that lies in its folder `lib`: that of CUDA 13's wheels, that of CUDA 12's.
LINKER_PACKAGES = ("nvidia.cu13", "nvidia.nvjitlink")

_loaded: dict[str, Any] = {}
#: The driver keeps the text of an answer until the next question: one thread at a time asks and reads.
_asking = threading.RLock()


@dataclass(frozen=True)
class Unordered:
    """Two pieces of work that use the same bytes in no order: one uses a result before its stream has finished.

    Attributes:
        first, second: what was done: a kernel, a copy, a fill, an allocation, a free.
        first_stream, second_stream: where.
        address, bytes: what both use.
        allocation: where that lies.
    """

    first: str
    first_stream: str
    second: str
    second_stream: str
    address: int
    bytes: int
    allocation: str


# --- loading ----------------------------------------------------------------------------------------


def load(settings: Settings | None = None) -> None:
    """Load the software GPU, or change how it behaves if it is loaded already.

    Args:
        settings: what it is and how it runs; `Settings()` if not given.

    Raises:
        RuntimeError: a driver or a linker is in this process already, or the software GPU was initialised with other
            devices. CompilerMissingError: it cannot be compiled here. ImportError: the wheel of the linker is missing.
    """
    settings = settings or Settings()
    if "driver" not in _loaded:
        linker = find_linker()
        require_early(linker)
        _load_libraries(build.libraries(), linker)
        _let_numba_look_again()
    _apply(settings)


def find_linker() -> Path:
    """Return the real nvJitLink of the installed wheels.

    Raises:
        ImportError: there is none.
    """
    for package in LINKER_PACKAGES:
        folder = build.wheel_folder(package)
        found = sorted((folder / "lib").glob("libnvJitLink.so.*")) if folder else []
        if found:
            return found[0]
    raise ImportError("the software GPU links with nvJitLink: pip install nvidia-nvjitlink (nvidia-nvjitlink-cu12)")


def require_early(linker: Path) -> None:
    """Raise RuntimeError if a part of CUDA was loaded before: it would go on using what it found."""
    for name in (build.DRIVER_LIBRARY, linker.name):
        if _is_loaded(name):
            raise RuntimeError(
                f"the software GPU must be loaded before CUDA is used; this process has {name} already: load it first, "
                "in a new process"
            )
    numba = _numba_driver()
    if numba is not None and numba.is_initialized and not numba.initialization_error:
        raise RuntimeError(
            "the software GPU must be loaded before numba.cuda finds a driver, which it has done: load it first, in a "
            "new process"
        )


def _numba_driver():
    """What numba.cuda knows of the driver; None before it is imported."""
    return getattr(sys.modules.get("numba.cuda.cudadrv.driver"), "driver", None)


def _let_numba_look_again():
    """Have numba.cuda, which looks for a driver when it is imported, do so once more if it has found none."""
    numba = _numba_driver()
    if numba is not None and numba.initialization_error:
        type(numba)()  # the only one of its class, which begins anew


def _is_loaded(name):
    with suppress(OSError):
        ctypes.CDLL(name, mode=RTLD_NOLOAD)
        return True
    return False


def _load_libraries(folder, linker):
    """Load the libraries: whoever opens one of these names from now on gets them."""
    shim = ctypes.CDLL(str(folder / linker.name))
    if shim.emulator_link_with(str(linker).encode()):
        raise RuntimeError(f"the linker cannot be loaded: {linker}")
    library = ctypes.CDLL(str(folder / build.DRIVER_LIBRARY))
    for name in ("fault", "counters", "unordered", "refusal"):
        getattr(library, f"emulator_{name}").restype = ctypes.c_char_p
    for name in ("pending", "allocations"):
        getattr(library, f"emulator_{name}").restype = ctypes.c_size_t
    _loaded.update(linker=shim, driver=library)
    exceptions.show_sentences(lambda: _answer("refusal"))


def _apply(settings):
    library = driver()
    before = _loaded.get("settings")
    if before is None or before.capabilities != settings.capabilities:
        flat = [number for capability in settings.capabilities for number in capability]
        if library.emulator_devices((ctypes.c_int * len(flat))(*flat), len(settings.targets)):
            raise RuntimeError(
                f"targets must stay as they are once CUDA is used, {before.targets} in this process; got "
                f"{settings.targets}"
            )
    for name in BEHAVIOUR:
        if library.emulator_set(name.encode(), ctypes.c_ulonglong(getattr(settings, name))):
            raise RuntimeError(f"the software GPU has no option {name}")
    _loaded["settings"] = settings


def is_loaded() -> bool:
    """Whether the software GPU is in this process."""
    return "driver" in _loaded


def settings() -> Settings:
    """Return the settings as they are now."""
    driver()
    return _loaded["settings"]


def device_for(target: str) -> int:
    """Return the number of the first device of a target; loads the software GPU if nobody has.

    Raises:
        ValueError: no device is of this target. What `load` raises.
    """
    if not is_loaded():
        load(Settings(targets=targets_with(target)))
    return settings().device_of(target)


def driver() -> ctypes.CDLL:
    """Return the driver's library.

    Raises:
        RuntimeError: it is not loaded.
    """
    if "driver" not in _loaded:
        raise RuntimeError("the software GPU is not loaded: call load() first, before CUDA is used")
    return _loaded["driver"]


# --- asking -----------------------------------------------------------------------------------------


def behaviour(**changes: Any) -> Settings:
    """Change how it runs from now on, and return the previous settings.

    Args:
        changes: attributes of `Settings`; `targets` only where CUDA was not used yet.
    """
    before = settings()
    load(replace(before, **changes))
    return before


def _answer(name):
    """The text of an answer of the driver."""
    with _asking:
        return getattr(driver(), f"emulator_{name}")().decode(errors="replace")


def fault() -> str:
    """Return what went wrong in the last kernel, copy or fill that failed; "" if nothing did."""
    return _answer("fault")


def reset() -> None:
    """Forget the faults that make every later call on their devices fail, and the work that nobody waited for."""
    driver().emulator_reset()


def pending() -> int:
    """Return how many pieces of work nobody has waited for yet."""
    return driver().emulator_pending()


def allocations() -> int:
    """Return how many allocations are alive."""
    return driver().emulator_allocations()


def unordered() -> list[Unordered]:
    """Return the pairs of work that use the same bytes in no order, in the order in which they were found."""
    return [Unordered(**one) for one in json.loads(_answer("unordered"))]


def counted() -> list[dict[str, Any]]:
    """Return the counts of every kernel as the driver gives them; `counting.counters` makes sense of them."""
    return json.loads(_answer("counters"))


def forget() -> None:
    """Forget all counts and all pairs of `unordered`."""
    driver().emulator_forget_counters()
    driver().emulator_forget_unordered()
