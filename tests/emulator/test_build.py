"""How the libraries are compiled and kept: compilers, folders, several processes, what is missing."""

import ctypes
import faulthandler
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_kernels.emulator import build

ROOT = Path(__file__).resolve().parents[2]
OWN_HEADER = build.ROOT / "driver" / "cuda_interface.h"
#: Prints the folder of the libraries, where it is after the call.
BUILD = "from cuda_kernels.emulator import build; print(build.libraries())"
#: A compiler that copies what the tests' own process compiled: builds of it take no time.
FAKE_COMPILER = """#!{python}
import shutil, sys, time
arguments = sys.argv[1:]
if "--version" in arguments:
    print("a compiler for tests")
elif "-c" in arguments:
    open(arguments[arguments.index("-o") + 1], "w").write("object")
else:
    time.sleep({seconds})
    target = arguments[arguments.index("-o") + 1]
    shutil.copy("{libraries}/" + target.rsplit("/", 1)[1], target)
"""


@pytest.fixture
def fake_compiler(tmp_path):
    """Return make(seconds), which writes a compiler that needs so long to link, and returns its command."""

    def make(seconds=0.0):
        path = tmp_path / "compiler"
        path.write_text(FAKE_COMPILER.format(python=sys.executable, libraries=build.libraries(), seconds=seconds))
        path.chmod(0o755)
        return str(path)

    return make


def run(folder, code=BUILD, **environment):
    """Start Python with a cache in a folder; the process, whose output is text."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "NUMBA_CACHE_DIR")}
    given = {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=kept | given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process):
    """(exit code, output, errors)."""
    output, errors = process.communicate(timeout=250)
    return process.returncode, output.strip(), errors


# --- folders ----------------------------------------------------------------------------------------


def test_built_once_and_found_again(tmp_path, fake_compiler):
    compiler = fake_compiler()
    code, folder, errors = finished(run(tmp_path / "cache", CXX=compiler))
    assert code == 0, errors
    assert Path(folder).parent == tmp_path / "cache" / "cuda_kernels"
    assert "compiling the software GPU for this machine, once" in errors
    assert sorted(os.listdir(folder)) == sorted([*build.LIBRARIES, build.CONTENTS])
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name]
    assert finished(run(tmp_path / "cache", CXX=compiler)) == (0, folder, "")


@pytest.mark.parametrize("what", ["machine", "compiler"])
def test_libraries_of_another_machine_or_compiler_are_others(monkeypatch, what):
    """Machines that share a home folder must not load each other's."""
    here = build.digest()
    if what == "machine":
        flags = build.processor_flags()
        monkeypatch.setattr(build, "processor_flags", lambda: flags)
        monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    else:
        monkeypatch.setattr(build, "find_compiler", lambda: build.Compiler(("g++",), "g++ 99.0"))
    assert build.digest() != here


def test_several_processes_may_build_at_once(tmp_path, fake_compiler):
    compiler = fake_compiler(0.3)
    started = [run(tmp_path / "cache", CXX=compiler) for _ in range(4)]
    results = [finished(process) for process in started]
    assert [code for code, _, _ in results] == [0] * 4, results
    (folder,) = {folder for _, folder, _ in results}
    assert build.is_complete(Path(folder))
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name]


@pytest.mark.parametrize("damage", ["file removed", "file cut off", "contents removed", "empty"])
def test_damaged_folder_is_built_again(tmp_path, fake_compiler, damage):
    compiler = fake_compiler()
    folder = Path(finished(run(tmp_path / "cache", CXX=compiler))[1])
    if damage == "file removed":
        (folder / build.DRIVER_LIBRARY).unlink()
    elif damage == "file cut off":
        os.truncate(folder / build.LINKER_LIBRARIES[0], 100)
    elif damage == "contents removed":
        (folder / build.CONTENTS).unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    assert not build.is_complete(folder)
    code, found, errors = finished(run(tmp_path / "cache", CXX=compiler))
    assert (code, found) == (0, str(folder)), errors
    assert build.is_complete(folder)


def test_folder_of_temporary_files_where_the_cache_cannot_be_written(tmp_path, fake_compiler):
    (tmp_path / "cache").write_text("a file, in which no folder can be made")
    (tmp_path / "temporary").mkdir()
    environment = {"CXX": fake_compiler(), "TMPDIR": str(tmp_path / "temporary")}
    code, folder, errors = finished(run(tmp_path / "cache", **environment))
    assert code == 0, errors
    assert Path(folder).parent == tmp_path / "temporary" / f"cuda_kernels-{os.getuid()}"
    assert finished(run(tmp_path / "cache", **environment)) == (0, folder, "")


def test_folder_that_others_can_write_is_not_trusted(tmp_path, fake_compiler):
    (tmp_path / "cache").write_text("a file, in which no folder can be made")
    shared = tmp_path / "temporary" / f"cuda_kernels-{os.getuid()}"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    code, _, errors = finished(run(tmp_path / "cache", CXX=fake_compiler(), TMPDIR=str(tmp_path / "temporary")))
    assert code == 1
    assert re.search(r"OSError: the software GPU needs a folder .* that can be written; .*cuda_kernels: .*; .*", errors)


def test_old_folders_are_removed(tmp_path, fake_compiler):
    cache = tmp_path / "cache" / "cuda_kernels"
    old, young = cache / "emulator-old", cache / "emulator-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    assert finished(run(tmp_path / "cache", CXX=fake_compiler()))[0] == 0
    assert not old.exists()
    assert young.exists()


# --- compilers --------------------------------------------------------------------------------------

#: Hides the wheel ziglang from a process.
WITHOUT_ZIG = "import sys; sys.modules['ziglang'] = None\n"


def test_machine_without_a_compiler_gets_one_sentence(tmp_path):
    (tmp_path / "nothing").mkdir()
    code, _, errors = finished(run(tmp_path / "cache", WITHOUT_ZIG + BUILD, PATH=str(tmp_path / "nothing")))
    assert code == 1
    assert errors.splitlines()[-1] == (
        "cuda_kernels.emulator.build.CompilerMissingError: the software GPU is compiled once and needs a C++ compiler: "
        "install g++ or clang++, or pip install ziglang"
    )


def test_compiler_that_does_not_start(tmp_path):
    code, _, errors = finished(run(tmp_path / "cache", CXX="no-such-compiler"))
    assert code == 1
    assert "CXX must be the command of a C++ compiler; got 'no-such-compiler', which does not start" in errors


def test_compiler_that_refuses_the_sources(tmp_path):
    path = tmp_path / "compiler"
    path.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.h:1: error: no concepts here' >&2\nexit 1\n")
    path.chmod(0o755)
    code, _, errors = finished(run(tmp_path / "cache", CXX=str(path)))
    assert code == 1
    assert re.search(
        r"CompilerMissingError: .*compiler cannot compile \S+ of the software GPU: x.h:1: error: no", errors
    )
    assert not list((tmp_path / "cache" / "cuda_kernels").iterdir())


#: Adds one to floats in a kernel of PTX, through the library that is built here.
USE = """
import numpy as np
from cuda_kernels.emulator import load
load()
from driver import ADD_ONE, Driver
import ctypes
driver = Driver()
driver.use(0)
x = driver.allocate(128)
driver.fill(x, [1.0] * 32)
driver.launch(driver.kernel(), None, x, x, ctypes.c_int(32))
assert driver.floats(x, 32) == [2.0] * 32
raise RuntimeError("and exceptions work")
"""


#: zig compiles its own C++ library first, in some minutes of two cores: it runs where this variable is set.
EVERY_COMPILER = "EVERY_COMPILER"


def compilers():
    """The compilers of this machine, as parameters, but for the one that this session's libraries are made with."""
    for name in ("g++", "clang++"):
        if shutil.which(name) and build.find_compiler().command != (shutil.which(name),):
            yield pytest.param(name, id=name)
    if build.wheel_folder("ziglang"):
        asked = pytest.mark.skipif(not os.environ.get(EVERY_COMPILER), reason=f"{EVERY_COMPILER} is not set: minutes")
        yield pytest.param(f"{sys.executable} -m ziglang c++", id="ziglang", marks=asked)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiler", [*compilers()])
def test_library_of_every_other_compiler_works(tmp_path, compiler):
    faulthandler.cancel_dump_traceback_later()  # this test waits longer than the limit of setup.cfg; it has its own
    tests = os.pathsep.join((str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    zig = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or str(Path(caches) / "zig")  # holds its C++ library, once compiled
    process = run(tmp_path / "cache", USE, CXX=compiler, PYTHONPATH=tests, ZIG_GLOBAL_CACHE_DIR=zig)
    _, errors = process.communicate(timeout=850)
    assert errors.splitlines()[-1] == "RuntimeError: and exceptions work", errors


# --- the interface ----------------------------------------------------------------------------------


def headers():
    """The folders of cuda.h in the installed wheels."""
    for package, folder in (("nvidia.cu13", "include"), ("nvidia.cuda_runtime", "include")):
        found = build.wheel_folder(package)
        if found and (found / folder / "cuda.h").exists():
            yield pytest.param(found / folder, id=package)


def declared():
    """(constants, structures) of the driver's own header: {name: value}, [name]."""
    text = OWN_HEADER.read_text()
    constants = dict(re.findall(r"\b(CU[A-Z_0-9]+) = (-?\d+)", text)) | dict(re.findall(r"X\((\w+), (\d+)\)", text))
    del constants["CUDA_VERSION"]  # the newest, whatever the wheels are
    return constants, re.findall(r"^struct (\w+) \{", text, re.MULTILINE)


def sizes_of(structures, folder):
    """{name: bytes} of structures of the driver's own header."""
    lines = [f'    std::printf("{name} %zu\\n", sizeof({name}));' for name in structures]
    text = f'#include "{OWN_HEADER}"\n#include <cstdio>\nint main() {{\n' + "\n".join(lines) + "\n}\n"
    (folder / "sizes.cpp").write_text(text)
    program = str(folder / "sizes")
    subprocess.run(["g++", "-std=c++20", str(folder / "sizes.cpp"), "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in printed.splitlines())


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("folder", [*headers()])
def test_own_header_says_what_cuda_h_says(tmp_path, folder):
    constants, structures = declared()
    assert len(constants) > 150
    theirs = (folder / "cuda.h").read_text()
    newer = [name for name in constants if not re.search(rf"\b{name}\b", theirs)]
    assert len(newer) < 40, newer  # codes and attributes that only the newer of the two has
    checks = [f"static_assert(int({name}) == {constants[name]});" for name in constants if name not in newer]
    checks += [f"static_assert(sizeof({name}) == {size});" for name, size in sizes_of(structures, tmp_path).items()]
    (tmp_path / "checks.cpp").write_text("#include <cuda.h>\n" + "\n".join(checks))
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{folder}", str(tmp_path / "checks.cpp")]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:2000]


def test_library_shows_the_drivers_functions_alone():
    if not shutil.which("nm"):
        pytest.skip("no nm")
    for name in build.LIBRARIES:
        command = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", str(build.libraries() / name)]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert len(symbols) > 10
        assert [one for one in symbols if not one.startswith(("cu", "emulator_", "nvJitLink"))] == []


def test_loaded_library_is_the_one_that_others_find():
    found = ctypes.CDLL("libcuda.so.1")
    assert found.emulator_pending() == 0
