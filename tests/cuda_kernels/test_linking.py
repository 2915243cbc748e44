"""What a refusal to load a kernel says: which part is too old, and what to install."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from cuda_kernels import errors, ptx_cache
from cuda_kernels.directions import direction_of
from cuda_kernels.errors import NoGPUError, explain_linking
from cuda_kernels.families.scales import TensorScales
from refops import NVFP4Scaling

launch = pytest.importorskip("cuda_kernels.launch")

PTX = ".version 9.5\n.target sm_90\n.address_size 64\n.visible .entry kernel(\n.param .u64 a\n)\n{ ret; }\n"
UNSUPPORTED = "ptxas application ptx input, line 1; fatal   : Unsupported .version 9.5; current version is '8.7'"


class FakeObject:
    """What a linker made; the driver refuses it."""

    def __init__(self, refusal):
        self.refusal = refusal

    @staticmethod
    def from_ptx(text):
        return text

    def get_kernel(self, name):
        raise RuntimeError(self.refusal)


def fake_core(refusal):
    """`cuda.core` of a device whose driver refuses every kernel."""
    return SimpleNamespace(
        Device=lambda number: SimpleNamespace(compute_capability=(9, 0)),
        ObjectCode=FakeObject,
        LinkerOptions=lambda **options: options,
        Linker=lambda code, options: SimpleNamespace(link=lambda kind: FakeObject(refusal)),
    )


@pytest.fixture
def launcher(monkeypatch):
    """A `Launcher` on `fake_core`."""
    monkeypatch.setattr(launch, "cuda_core", lambda: fake_core("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image"))
    monkeypatch.setattr(launch, "explain_missing", nullcontext)
    monkeypatch.setattr(launch.ptx_cache, "get", lambda key, target, make: PTX)
    return launch.Launcher(0)


def test_a_driver_that_refuses_a_linked_kernel_is_explained(launcher):
    said = r"a kernel for sm_90 cannot be loaded.*update the driver.*numba-cuda\[cu12\]"
    with pytest.raises(NoGPUError, match=said):
        launcher._compile(TensorScales(direction_of(NVFP4Scaling(), False)))


@pytest.fixture
def installed(monkeypatch):
    """Call installed(package, version, linker version): what NVVM and nvJitLink are said to be."""

    def say(package, version, linker):
        monkeypatch.setattr(errors, "_compiler_package", lambda: package and (package, version))
        monkeypatch.setattr(errors, "_linker_version", lambda: linker)
        monkeypatch.setattr(ptx_cache, "compiler_paths", lambda: {"nvvm": "/usr/local/cuda/nvvm/lib64/libnvvm.so"})

    return say


def refused(said):
    with pytest.raises(NoGPUError) as caught, explain_linking(PTX, "sm_90"):
        raise RuntimeError(said)
    return str(caught.value)


def test_a_linker_older_than_the_compiler_is_to_be_replaced(installed):
    installed("nvidia-nvvm", "13.5.37", (13, 2))
    assert (
        "PTX 9.5, written by nvidia-nvvm 13.5.37, is newer than what nvJitLink 13.2 reads: "
        "pip install --upgrade 'nvidia-nvjitlink>=13.5'." in refused(UNSUPPORTED)
    )


def test_of_cuda_12_the_packages_have_other_names(installed):
    installed("nvidia-cuda-nvcc-cu12", "12.9.86", (12, 4))
    message = refused(UNSUPPORTED)
    assert "written by nvidia-cuda-nvcc-cu12 12.9.86" in message and "nvJitLink 12.4" in message
    assert "pip install --upgrade 'nvidia-nvjitlink-cu12>=12.9'" in message


def test_a_linker_that_does_not_know_the_architecture_is_to_be_replaced(installed):
    installed("nvidia-cuda-nvcc-cu12", "12.9.86", (12, 4))
    message = refused("nvJitLink error log: ptxas fatal   : Value 'sm_100a' is not defined for option 'gpu-name'")
    assert "pip install --upgrade 'nvidia-nvjitlink-cu12>=12.9'" in message


def test_a_compiler_of_no_wheel_is_named_by_its_path(installed):
    installed(None, None, (12, 4))
    message = refused(UNSUPPORTED)
    assert "written by the NVVM at /usr/local/cuda/nvvm/lib64/libnvvm.so" in message
    assert "'nvidia-nvjitlink-cu12'" in message


def test_without_nvjitlink_the_driver_links_and_is_too_old(installed):
    installed("nvidia-nvvm", "13.5.37", None)
    message = refused(
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with an unsupported toolchain."
    )
    assert (
        "than what the driver (there is no nvJitLink) reads: pip install --upgrade 'nvidia-nvjitlink>=13.5'" in message
    )


def test_another_refusal_gives_no_advice(installed):
    installed("nvidia-nvvm", "13.5.37", (13, 5))
    message = refused("ERROR_PTX_COMPILE: line 12; error: Unknown symbol 'x'")
    assert "linked by nvJitLink 13.5" in message and "Unknown symbol" in message and "pip install" not in message


def test_the_installed_linker_refuses_newer_ptx_in_the_words_that_are_looked_for():
    core = pytest.importorskip("cuda.core")
    pytest.importorskip("cuda.bindings.nvjitlink")
    newer = PTX.replace("9.5", "99.0")
    said = r"PTX 99\.0, written by nvidia-.*is newer than what nvJitLink \d+\.\d+ reads"
    options, code = core.LinkerOptions(arch="sm_90"), core.ObjectCode.from_ptx(newer.encode())
    with pytest.raises(NoGPUError, match=said), explain_linking(newer, "sm_90"):
        core.Linker(code, options=options).link("cubin")


def test_the_installed_linker_refuses_an_unknown_architecture_in_the_words_that_are_looked_for():
    core = pytest.importorskip("cuda.core")
    pytest.importorskip("cuda.bindings.nvjitlink")
    options, code = core.LinkerOptions(arch="sm_999"), core.ObjectCode.from_ptx(PTX.encode())
    with pytest.raises(NoGPUError, match="is newer than what nvJitLink"), explain_linking(PTX, "sm_999"):
        core.Linker(code, options=options).link("cubin")
