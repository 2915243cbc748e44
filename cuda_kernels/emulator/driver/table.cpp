// How a caller finds the entry points (cuGetProcAddress), and what errors are called (cuGetErrorName).
//
// A function whose parameters changed has several versions: the caller says for which CUDA version it was built, and
// gets the newest that is not newer. What is not here is not found, and the caller says which function it misses.
#include <dlfcn.h>

#include "state.h"

namespace driver {

namespace {

// From which CUDA version on a function has a form, and the symbol of that form.
struct Form {
    int since;
    const char* symbol;
};

}  // namespace

// Functions whose parameters changed, oldest form first; since when is said by cudaTypedefs.h.
static const std::map<std::string, std::vector<Form>>& changed_functions() {
    static const std::map<std::string, std::vector<Form>> functions = {
        {"cuGetProcAddress", {{0, "cuGetProcAddress"}, {12000, "cuGetProcAddress_v2"}}},
        {"cuCtxCreate", {{0, "cuCtxCreate_v2"}, {11040, "cuCtxCreate_v3"}, {12050, "cuCtxCreate_v4"}}},
        {"cuCtxGetDevice", {{0, "cuCtxGetDevice"}, {13000, "cuCtxGetDevice_v2"}}},
        {"cuCtxSynchronize", {{0, "cuCtxSynchronize"}, {13000, "cuCtxSynchronize_v2"}}},
        {"cuStreamGetCtx", {{0, "cuStreamGetCtx"}, {12050, "cuStreamGetCtx_v2"}}},
        {"cuStreamGetCaptureInfo",
         {{0, "cuStreamGetCaptureInfo"}, {11030, "cuStreamGetCaptureInfo_v2"}, {12030, "cuStreamGetCaptureInfo_v3"}}},
        {"cuStreamUpdateCaptureDependencies",
         {{0, "cuStreamUpdateCaptureDependencies"}, {12030, "cuStreamUpdateCaptureDependencies_v2"}}},
        {"cuGraphInstantiate", {{0, "cuGraphInstantiate_v2"}, {12000, "cuGraphInstantiateWithFlags"}}},
        {"cuGraphGetEdges", {{0, "cuGraphGetEdges"}, {12030, "cuGraphGetEdges_v2"}}},
        {"cuGraphNodeGetDependencies",
         {{0, "cuGraphNodeGetDependencies"}, {12030, "cuGraphNodeGetDependencies_v2"}}},
        {"cuGraphAddDependencies", {{0, "cuGraphAddDependencies"}, {12030, "cuGraphAddDependencies_v2"}}},
    };
    return functions;
}

// An exported function of this library, null for none.
static void* exported(const std::string& symbol) {
    static void* library = [] {
        Dl_info here;
        return dladdr(reinterpret_cast<void*>(&driver_lock), &here) ? dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD)
                                                                    : nullptr;
    }();
    return library ? dlsym(library, symbol.c_str()) : nullptr;
}

// The newest form of a function that is not newer than the caller's CUDA version. Where only the newest form is here,
// whose symbol has a number behind the name, a caller of any version gets it: its parameters did not change.
static void* entry_of(const std::string& name, int cuda_version) {
    auto changed = changed_functions().find(name);
    if (changed != changed_functions().end()) {
        const char* newest = nullptr;
        for (const Form& form : changed->second) {
            newest = form.since <= cuda_version ? form.symbol : newest;
        }
        return newest ? exported(newest) : nullptr;
    }
    for (const char* number : {"", "_v2", "_v3", "_v4"}) {
        if (void* found = exported(name + number)) {
            return found;
        }
    }
    return nullptr;
}

// --- errors -------------------------------------------------------------------------------------------

const char* name_of_error(CUresult code) {
#define CUDA_RESULT(name, value) case name: return #name;
    switch (code) { CUDA_RESULTS(CUDA_RESULT) }
#undef CUDA_RESULT
    return nullptr;
}

}  // namespace driver

using namespace driver;

extern "C" {

CUresult cuGetErrorName(CUresult code, const char** text) {
    *text = name_of_error(code);
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
    static thread_local std::string said;
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    const char* name = name_of_error(code);
    std::string sentence = sentence_of(code);
    said = name ? name : "error " + std::to_string(int(code));
    said += sentence.empty() ? "" : ": " + sentence;
    *text = said.c_str();
    return CUDA_SUCCESS;
}

// Tables that NVIDIA's own libraries ask for and that nobody documents.
CUresult cuGetExportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_FOUND; }

CUresult cuGetProcAddress_v2(const char* name, void** function, int cuda_version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
    if (!name || !function) {
        return refused({CUDA_ERROR_INVALID_VALUE, "symbol and pfn must not be null"});
    }
    *function = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? nullptr : entry_of(name, cuda_version);
    if (status) {
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    if (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
        return refused({CUDA_ERROR_NOT_FOUND, "the software GPU has no " + std::string(name) +
                                                  " of CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM: pass the " +
                                                  "thread's stream, 2, to each call"});
    }
    if (!*function) {
        return refused({CUDA_ERROR_NOT_FOUND, "the software GPU has no " + std::string(name) + " for CUDA " +
                                                  std::to_string(cuda_version)});
    }
    return CUDA_SUCCESS;
}

// Before CUDA 12.
CUresult cuGetProcAddress(const char* name, void** function, int cuda_version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, cuda_version, flags, nullptr);
}

}  // extern "C"
