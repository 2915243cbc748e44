// A libnvJitLink in front of the real one: it links with it, and puts the PTX behind the cubin, where the driver of the
// software GPU finds it.
//
// It has the functions of CUDA 12 and CUDA 13, which are the same; the library is built under the name of the one that
// it stands for (libnvJitLink.so.12 or .13), whose path emulator_link_with is given. One PTX file is put behind as it
// was given. Of LTO-IR the PTX is made by a second link, with -ptx.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "mark.h"

// Values of nvJitLink.h, whose macros would rename the functions.
constexpr int SUCCESS = 0;
constexpr int INTERNAL_ERROR = 6;
constexpr int PTX = 2;
constexpr int LTO_IR = 3;

namespace {

struct Input {
    int type;
    std::string data;
    std::string name;
};

// What a caller links: everything that a second link needs.
struct Job {
    std::vector<std::string> options;
    std::vector<Input> inputs;
    std::string text;  // the PTX, once it is linked
};

}  // namespace

// --- the real library ---------------------------------------------------------------------------------

static void* real_library = nullptr;

// Calls a function of the real library by its name.
template <class... Arguments>
static int call_real(const char* name, Arguments... arguments) {
    void* address = real_library ? dlsym(real_library, name) : nullptr;
    if (!address) {
        return INTERNAL_ERROR;
    }
    return reinterpret_cast<int (*)(Arguments...)>(address)(arguments...);
}

// --- jobs ---------------------------------------------------------------------------------------------

static std::mutex& job_lock() {
    static auto* it = new std::mutex;
    return *it;
}

static std::map<void*, Job>& jobs() {
    static auto* it = new std::map<void*, Job>;
    return *it;
}

static Job job_of(void* handle) {
    std::lock_guard<std::mutex> locked(job_lock());
    return jobs()[handle];
}

static void remember_input(void* handle, Input input) {
    std::lock_guard<std::mutex> locked(job_lock());
    jobs()[handle].inputs.push_back(std::move(input));
}

// --- the PTX of a job ---------------------------------------------------------------------------------

static bool has_lto_ir(const Job& job) {
    for (const Input& input : job.inputs) {
        if (input.type == LTO_IR) {
            return true;
        }
    }
    return false;
}

static int add_inputs(void* handle, const Job& job) {
    for (const Input& input : job.inputs) {
        const void* data = input.data.data();
        int code = call_real("nvJitLinkAddData", handle, input.type, data, input.data.size(), input.name.c_str());
        if (code != SUCCESS) {
            return code;
        }
    }
    return SUCCESS;
}

static std::string linked_text(void* handle) {
    size_t size = 0;
    if (call_real("nvJitLinkGetLinkedPtxSize", handle, &size) != SUCCESS) {
        return "";
    }
    std::string text(size, '\0');
    if (call_real("nvJitLinkGetLinkedPtx", handle, text.data()) != SUCCESS) {
        return "";
    }
    while (!text.empty() && text.back() == '\0') {
        text.pop_back();
    }
    return text;
}

// The PTX that a second link makes of LTO-IR, "" where it fails.
static std::string text_by_linking(const Job& job) {
    std::vector<const char*> options;
    for (const std::string& option : job.options) {
        options.push_back(option.c_str());
    }
    options.push_back("-ptx");
    void* handle = nullptr;
    if (call_real("nvJitLinkCreate", &handle, uint32_t(options.size()), options.data()) != SUCCESS) {
        return "";
    }
    std::string text;
    bool linked = add_inputs(handle, job) == SUCCESS && call_real("nvJitLinkComplete", handle) == SUCCESS;
    if (linked) {
        text = linked_text(handle);
    }
    call_real("nvJitLinkDestroy", &handle);
    return text;
}

// The PTX of a job, "" where it is not known: several PTX files, or a cubin among the inputs.
static std::string text_of(const Job& job) {
    if (has_lto_ir(job)) {
        return text_by_linking(job);
    }
    bool one_text = job.inputs.size() == 1 && job.inputs[0].type == PTX;
    return one_text ? job.inputs[0].data : "";
}

// --- the library's functions --------------------------------------------------------------------------

extern "C" {

// Before everything else: where the real library is. Returns 0, or 1 where it cannot be loaded.
int emulator_link_with(const char* path) {
    real_library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return real_library ? 0 : 1;
}

int nvJitLinkCreate(void** handle, uint32_t count, const char** options) {
    int code = call_real("nvJitLinkCreate", handle, count, options);
    if (code == SUCCESS) {
        Job job;
        job.options.assign(options, options + count);
        std::lock_guard<std::mutex> locked(job_lock());
        jobs()[*handle] = job;
    }
    return code;
}

int nvJitLinkDestroy(void** handle) {
    {
        std::lock_guard<std::mutex> locked(job_lock());
        jobs().erase(*handle);
    }
    return call_real("nvJitLinkDestroy", handle);
}

int nvJitLinkAddData(void* handle, int type, const void* data, size_t size, const char* name) {
    auto* bytes = static_cast<const char*>(data);
    size_t length = type == PTX ? strnlen(bytes, size) : size;
    remember_input(handle, {type, std::string(bytes, length), name ? name : ""});
    return call_real("nvJitLinkAddData", handle, type, data, size, name);
}

int nvJitLinkAddFile(void* handle, int type, const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    remember_input(handle, {type, data, path});
    return call_real("nvJitLinkAddFile", handle, type, path);
}

int nvJitLinkComplete(void* handle) {
    int code = call_real("nvJitLinkComplete", handle);
    if (code == SUCCESS) {
        std::string text = text_of(job_of(handle));
        std::lock_guard<std::mutex> locked(job_lock());
        jobs()[handle].text = text;
    }
    return code;
}

int nvJitLinkGetLinkedCubinSize(void* handle, size_t* size) {
    int code = call_real("nvJitLinkGetLinkedCubinSize", handle, size);
    std::string text = job_of(handle).text;
    if (code == SUCCESS && !text.empty()) {
        *size += sizeof MARK + text.size() + 1;
    }
    return code;
}

int nvJitLinkGetLinkedCubin(void* handle, void* cubin) {
    size_t size = 0;
    int code = call_real("nvJitLinkGetLinkedCubinSize", handle, &size);
    if (code == SUCCESS) {
        code = call_real("nvJitLinkGetLinkedCubin", handle, cubin);
    }
    std::string text = job_of(handle).text;
    if (code == SUCCESS && !text.empty()) {
        char* end = static_cast<char*>(cubin) + size;
        std::memcpy(end, MARK, sizeof MARK);
        std::memcpy(end + sizeof MARK, text.c_str(), text.size() + 1);
    }
    return code;
}

int nvJitLinkGetLinkedPtxSize(void* handle, size_t* size) {
    return call_real("nvJitLinkGetLinkedPtxSize", handle, size);
}

int nvJitLinkGetLinkedPtx(void* handle, char* text) { return call_real("nvJitLinkGetLinkedPtx", handle, text); }

int nvJitLinkGetLinkedLTOIRSize(void* handle, size_t* size) {
    return call_real("nvJitLinkGetLinkedLTOIRSize", handle, size);
}

int nvJitLinkGetLinkedLTOIR(void* handle, void* code) { return call_real("nvJitLinkGetLinkedLTOIR", handle, code); }

int nvJitLinkGetErrorLogSize(void* handle, size_t* size) { return call_real("nvJitLinkGetErrorLogSize", handle, size); }

int nvJitLinkGetErrorLog(void* handle, char* text) { return call_real("nvJitLinkGetErrorLog", handle, text); }

int nvJitLinkGetInfoLogSize(void* handle, size_t* size) { return call_real("nvJitLinkGetInfoLogSize", handle, size); }

int nvJitLinkGetInfoLog(void* handle, char* text) { return call_real("nvJitLinkGetInfoLog", handle, text); }

int nvJitLinkVersion(unsigned* major, unsigned* minor) { return call_real("nvJitLinkVersion", major, minor); }

}  // extern "C"
