"""PTX on disk is used again only if nothing that can change it has changed."""

import os
from importlib import metadata

import pytest

from cuda_kernels import ptx_cache


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """name -> path of a compiler's files that numba-cuda is said to find."""
    cuda_paths = pytest.importorskip("numba.cuda.cuda_paths")
    paths = {}
    for name, size in (("nvvm", 3_000_000), ("libdevice", 400_000)):
        paths[name] = tmp_path / name
        paths[name].write_bytes(bytes(range(256)) * (size // 256))
    found = {name: cuda_paths._env_path_tuple("CUDA_HOME", str(path)) for name, path in paths.items()}
    monkeypatch.setattr(cuda_paths, "get_cuda_paths", lambda: found)
    return paths


def fresh_digest():
    ptx_cache.digest.cache_clear()
    try:
        return ptx_cache.digest()
    finally:
        ptx_cache.digest.cache_clear()


@pytest.mark.parametrize("name", ["nvvm", "libdevice"])
def test_another_compiler_is_another_folder(compiler, name):
    """Wherever it lies: a wheel of CUDA 12 or 13, CUDA_HOME, the system."""
    before, path = fresh_digest(), compiler[name]
    content = path.read_bytes()
    path.write_bytes(content + b"0")
    assert fresh_digest() != before
    path.write_bytes(content[:-1] + b"0")  # of the same size
    assert fresh_digest() != before
    path.write_bytes(b"0" + content[1:])
    assert fresh_digest() != before
    path.write_bytes(content)
    assert fresh_digest() == before


def test_the_same_compiler_at_another_place_and_time_is_the_same(compiler, monkeypatch, tmp_path):
    """A machine that installs the same wheels uses what another one compiled."""
    from numba.cuda import cuda_paths

    before = fresh_digest()
    copy = tmp_path / "copy"
    copy.write_bytes(compiler["nvvm"].read_bytes())
    os.utime(copy, (1, 1))
    found = cuda_paths.get_cuda_paths()
    moved = {**found, "nvvm": cuda_paths._env_path_tuple("System", str(copy))}
    monkeypatch.setattr(cuda_paths, "get_cuda_paths", lambda: moved)
    assert fresh_digest() == before


@pytest.mark.parametrize("package", ptx_cache.PACKAGES)
def test_another_version_of_what_feeds_the_compiler_is_another_folder(compiler, monkeypatch, package):
    before, version = fresh_digest(), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == package else version(name))
    assert fresh_digest() != before


def test_without_a_compiler_there_is_a_folder_all_the_same(monkeypatch):
    cuda_paths = pytest.importorskip("numba.cuda.cuda_paths")

    def missing():
        raise RuntimeError("no nvvm here")

    monkeypatch.setattr(cuda_paths, "get_cuda_paths", missing)
    assert ptx_cache.compiler_paths() == {} and len(fresh_digest()) == 24


def test_a_file_that_the_system_searches_for_is_known_by_its_name():
    assert ptx_cache.file_identity("libnvvm.so") == "libnvvm.so"


def test_the_installed_compiler_is_found():
    pytest.importorskip("cuda.pathfinder")
    paths = ptx_cache.compiler_paths()
    assert set(paths) == {"nvvm", "libdevice"} and all(map(os.path.exists, paths.values()))


def test_the_version_of_ptx_is_read():
    assert ptx_cache.version_of("//\n// comment\n\n.version 9.5\n.target sm_90\n") == "9.5"
    assert ptx_cache.version_of("nothing") == ""
