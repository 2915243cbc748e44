"""The driver's calls by ctypes, for tests of the driver alone, and kernels as PTX text."""

import ctypes

from cuda_kernels.emulator import loading

HANDLE, ADDRESS, SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
#: Codes of cuda.h.
INVALID_VALUE, NO_BINARY, INVALID_HANDLE, NOT_FOUND = 1, 209, 400, 500
ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED, NOT_SUPPORTED = 700, 709, 801
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_IMPLICIT = 900, 901, 904, 906

#: y[i] = x[i] + 1 for i below n; one block.
ADD_ONE = """
.version 8.0
.target sm_75
.address_size 64
.visible .entry add_one(.param .u64 x, .param .u64 y, .param .u32 n) {
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .f32 %f<3>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    add.f32 %f2, %f1, 0f3F800000;
    st.global.f32 [%rd5], %f2;
DONE:
    ret;
}
"""
#: Counts its launches in a variable of the module.
COUNT_LAUNCHES = """
.version 8.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 launches = 7;
.visible .entry count_launches() {
    .reg .b32 %r<2>;
    ld.global.u32 %r1, [launches];
    add.u32 %r1, %r1, 1;
    st.global.u32 [launches], %r1;
    ret;
}
"""


class CallError(Exception):
    """A call returned a code; `code` is it, the text what cuGetErrorString says."""

    def __init__(self, code, said):
        super().__init__(f"{code}: {said}")
        self.code = code


class Driver:
    """The driver's calls: `driver.cuStreamSynchronize(stream)` raises CallError for a code that is not 0."""

    def __init__(self):
        self.library = loading.driver()

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            code = function(*arguments)
            if code:
                said = ctypes.c_char_p()
                self.library.cuGetErrorString(code, ctypes.byref(said))
                raise CallError(code, said.value.decode())

        return call

    def made(self, name, *arguments, kind=HANDLE):
        """What a call writes to its first argument."""
        out = kind()
        getattr(self, name)(ctypes.byref(out), *arguments)
        return out

    def use(self, device=0):
        """Make a device's primary context current and return it."""
        self.cuInit(0)
        context = self.made("cuDevicePrimaryCtxRetain", device)
        self.cuCtxSetCurrent(context)
        return context

    def allocate(self, size):
        """Memory of the current device."""
        return self.made("cuMemAlloc_v2", SIZE(size), kind=ADDRESS)

    def stream(self):
        """A stream that does not wait for the default one."""
        return self.made("cuStreamCreate", 1)

    def event(self):
        """An event."""
        return self.made("cuEventCreate", 0)

    def library_of(self, text):
        """A library of PTX."""
        return self.made("cuLibraryLoadData", text.encode(), None, None, 0, None, None, 0)

    def kernel(self, text=ADD_ONE, name=b"add_one"):
        """A kernel of PTX."""
        return self.made("cuLibraryGetKernel", self.library_of(text), name)

    def launch(self, kernel, stream, *values):
        """One block of 32 threads."""
        pointers = (HANDLE * len(values))(*(ctypes.addressof(one) for one in values))
        self.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, pointers, None)

    def fill(self, address, values):
        """Copy floats to the device and wait."""
        data = (ctypes.c_float * len(values))(*values)
        self.cuMemcpyHtoD_v2(address, data, SIZE(ctypes.sizeof(data)))

    def floats(self, address, count):
        """Copy floats from the device, in the default stream."""
        data = (ctypes.c_float * count)()
        self.cuMemcpyDtoH_v2(data, address, SIZE(ctypes.sizeof(data)))
        return list(data)
