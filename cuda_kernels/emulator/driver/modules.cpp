// Code: PTX, or a cubin with PTX behind it, becomes a library with kernels (cuLibrary..., cuModule..., cuKernel...).
//
// The linker in front of the real one (linker.cpp) puts the PTX that a cubin was made of behind it, after a mark. Of
// the cubin itself only the number of registers of each kernel is read.
#include "modules.h"

#include <elf.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "attributes.h"
#include "graphs.h"
#include "mark.h"
#include "memory.h"

namespace driver {

using device::Kernel;

// --- ELF ----------------------------------------------------------------------------------------------

namespace {

// A cubin: an ELF file in memory.
class Cubin {
  public:
    explicit Cubin(const uint8_t* image) : image_(image) {
        header_ = reinterpret_cast<const Elf64_Ehdr*>(image);
        sections_ = reinterpret_cast<const Elf64_Shdr*>(image + header_->e_shoff);
    }

    static bool is_one(const uint8_t* image) { return std::memcmp(image, ELFMAG, SELFMAG) == 0; }

    // Where the file ends.
    size_t size() const {
        size_t sections_end = header_->e_shoff + size_t(header_->e_shnum) * header_->e_shentsize;
        size_t segments_end = header_->e_phoff + size_t(header_->e_phnum) * header_->e_phentsize;
        size_t end = std::max(sections_end, segments_end);
        for (int n = 0; n < header_->e_shnum; n++) {
            if (sections_[n].sh_type != SHT_NOBITS) {
                end = std::max<size_t>(end, sections_[n].sh_offset + sections_[n].sh_size);
            }
        }
        return end;
    }

    // The architecture that it was made for, as 90. Where its number stands changed with version 8 of the format.
    int architecture() const {
        constexpr int first_with_new_place = 8;
        bool new_place = header_->e_ident[EI_ABIVERSION] >= first_with_new_place;
        return int(new_place ? header_->e_flags >> 8 & 0xFF : header_->e_flags & 0xFF);
    }

    // Registers of each kernel, by its name: from the section .nv.info.
    std::map<std::string, int> registers() const {
        std::map<std::string, int> found;
        const Elf64_Shdr* symbols = section_of_type(SHT_SYMTAB);
        for (int n = 0; symbols && n < header_->e_shnum; n++) {
            if (name_of_section(n) == ".nv.info") {
                read_attributes(sections_[n], *symbols, found);
            }
        }
        return found;
    }

  private:
    const Elf64_Shdr* section_of_type(unsigned type) const {
        for (int n = 0; n < header_->e_shnum; n++) {
            if (sections_[n].sh_type == type) {
                return &sections_[n];
            }
        }
        return nullptr;
    }

    std::string text_at(const Elf64_Shdr& strings, size_t offset) const {
        return reinterpret_cast<const char*>(image_ + strings.sh_offset + offset);
    }

    std::string name_of_section(int n) const { return text_at(sections_[header_->e_shstrndx], sections_[n].sh_name); }

    std::string name_of_symbol(const Elf64_Shdr& symbols, uint32_t number) const {
        auto* table = reinterpret_cast<const Elf64_Sym*>(image_ + symbols.sh_offset);
        return text_at(sections_[symbols.sh_link], table[number].st_name);
    }

    // A section of attributes: form, attribute, two bytes of size or value, and for form 4 as many bytes as said.
    void read_attributes(const Elf64_Shdr& section, const Elf64_Shdr& symbols,
                         std::map<std::string, int>& found) const {
        constexpr uint8_t with_data = 4;
        constexpr uint8_t register_count = 0x2F;  // data: symbol, count
        const uint8_t* at = image_ + section.sh_offset;
        const uint8_t* end = at + section.sh_size;
        while (at + 4 <= end) {
            uint8_t form = at[0];
            uint8_t attribute = at[1];
            uint16_t size;
            std::memcpy(&size, at + 2, sizeof size);
            if (form == with_data && attribute == register_count && size == 8) {
                uint32_t symbol;
                uint32_t count;
                std::memcpy(&symbol, at + 4, sizeof symbol);
                std::memcpy(&count, at + 8, sizeof count);
                found[name_of_symbol(symbols, symbol)] = int(count);
            }
            at += form == with_data ? 4 + size : 4;
        }
    }

    const uint8_t* image_;
    const Elf64_Ehdr* header_;
    const Elf64_Shdr* sections_;
};

}  // namespace

// --- loading ------------------------------------------------------------------------------------------

// Whether PTX for a target ("sm_90", "sm_100a", "sm_100f") runs on a device: for no newer one than the device is; code
// with the features of one architecture on that alone, and of one family in that alone.
static bool fits(const std::string& target, const Target& device) {
    int number = std::atoi(target.c_str() + std::strlen("sm_"));
    bool exact = target.back() == 'a';
    bool family = target.back() == 'f';
    if (exact) {
        return number == device.number();
    }
    if (family) {
        return number / 10 == device.major && number <= device.number();
    }
    return number <= device.number();
}

// A cubin runs on its own generation only, and there on no older device.
static bool fits(int architecture, const Target& device) {
    return architecture / 10 == device.major && architecture <= device.number();
}

[[noreturn]] static void refuse_code(CUresult code, const std::string& sentence) {
    std::fprintf(stderr, "software GPU: %s\n", sentence.c_str());
    throw Refusal{code, sentence};
}

static bool looks_like_ptx(const char* text) {
    while (std::isspace(static_cast<unsigned char>(*text))) {
        text += 1;
    }
    return *text == '.' || *text == '/';
}

// Reads an image: PTX, or a cubin with PTX behind it.
static void read_image(const uint8_t* image, Library& library) {
    auto* text = reinterpret_cast<const char*>(image);
    if (!Cubin::is_one(image)) {
        if (!looks_like_ptx(text)) {
            refuse_code(CUDA_ERROR_INVALID_IMAGE, "code must be PTX or a cubin that the software GPU's linker made");
        }
        library.text = text;
        return;
    }
    Cubin cubin(image);
    const char* behind = text + cubin.size();
    if (std::strncmp(behind, MARK, sizeof MARK) != 0) {  // it ends where they differ: a cubin may lie at the end
        refuse_code(CUDA_ERROR_NO_BINARY_FOR_GPU,
                    "a cubin has no PTX behind it: load the software GPU before anything links, or pass PTX");
    }
    library.registers = cubin.registers();
    library.architecture = cubin.architecture();
    library.text = behind + sizeof MARK;
}

// The module of a library on a device, made where it is not there yet.
static std::shared_ptr<device::Module> module_on(Library& library, const Device& device) {
    auto found = library.modules.find(device.number);
    if (found != library.modules.end()) {
        return found->second;
    }
    std::string mine = device.target.name() + ", which device " + std::to_string(device.number) + " is";
    if (library.architecture && !fits(library.architecture, device.target)) {
        refuse_code(CUDA_ERROR_NO_BINARY_FOR_GPU, "a cubin must be for " + mine + "; got one for sm_" +
                                                      std::to_string(library.architecture));
    }
    device::heap().device = device.number;  // whose its variables are
    std::shared_ptr<device::Module> made;
    try {
        made = device::parse(library.text);
    } catch (const device::Fault& fault) {
        refuse_code(code_of(fault), fault.what());
    }
    for (const auto& [name, place] : made->globals) {
        adopt(place.first, place.second, device.number);
    }
    if (!fits(made->target, device.target)) {
        for (const auto& [name, place] : made->globals) {
            release(place.first);
        }
        refuse_code(CUDA_ERROR_NO_BINARY_FOR_GPU, "code must be for " + mine + "; got code for " + made->target);
    }
    for (const auto& [name, kernel] : made->kernels) {
        auto known = library.registers.find(name);
        kernel->registers = known == library.registers.end() ? kernel->registers : known->second;
    }
    library.modules[device.number] = made;
    return made;
}

static void make_function(const std::shared_ptr<Library>& library, const std::string& name) {
    auto function = std::make_shared<Function>();
    function->name = name;
    function->library = library;
    library->functions.push_back(function);
    state().functions.add(function);
}

static const Device& current_device() {
    auto context = current_context();
    return device_of(context ? context->device : 0);
}

static std::shared_ptr<Library> load(const void* code) {
    require_output(code, "code");
    auto library = std::make_shared<Library>();
    read_image(static_cast<const uint8_t*>(code), *library);
    for (const auto& [name, kernel] : module_on(*library, current_device())->kernels) {
        make_function(library, name);
    }
    state().libraries.add(library);
    return library;
}

static std::shared_ptr<Library> load_file(const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::string code((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!file && code.empty()) {
        throw Refusal{CUDA_ERROR_FILE_NOT_FOUND,
                      "fileName must name a file that can be read; got " + std::string(path)};
    }
    return load(code.c_str());
}

static void unload(const void* handle) {
    auto library = library_of(handle);
    wait_for_all(nullptr);
    for (const auto& function : library->functions) {
        state().functions.remove(*function);
    }
    for (const auto& [number, module] : library->modules) {
        for (const auto& [name, place] : module->globals) {
            release_if_live(place.first);
        }
    }
    state().libraries.remove(*library);
}

void forget_modules_of(int device) {
    for (const auto& library : state().libraries.all()) {
        library->modules.erase(device);
    }
}

// --- finding ------------------------------------------------------------------------------------------

std::shared_ptr<Library> library_of(const void* handle) { return state().libraries.find(handle); }

std::shared_ptr<Function> function_of(const void* handle) { return state().functions.find(handle); }

std::shared_ptr<Kernel> kernel_of(const Function& function, const Device& device) {
    auto library = function.library.lock();
    if (!library) {
        throw Refusal{CUDA_ERROR_INVALID_HANDLE, "the library of " + function.name + " was unloaded"};
    }
    return module_on(*library, device)->kernels.at(function.name);
}

static std::shared_ptr<Function> function_named(const void* library, const char* name) {
    for (const auto& function : library_of(library)->functions) {
        if (function->name == name) {
            return function;
        }
    }
    throw Refusal{CUDA_ERROR_NOT_FOUND, "name must be a kernel of the library; got " + std::string(name)};
}

static void find_variable(CUdeviceptr* address, size_t* size, const void* library, const char* name) {
    const auto& globals = module_on(*library_of(library), current_device())->globals;
    auto found = globals.find(name);
    if (found == globals.end()) {
        throw Refusal{CUDA_ERROR_NOT_FOUND, "name must be a variable of the library; got " + std::string(name)};
    }
    if (address) {
        *address = found->second.first;
    }
    if (size) {
        *size = found->second.second;
    }
}

template <class Handle>
static void list_functions(Handle* out, unsigned count, const void* library) {
    const auto& functions = library_of(library)->functions;
    for (unsigned n = 0; n < count && n < functions.size(); n++) {
        out[n] = as_handle<Handle>(functions[n]);
    }
}

static void parameter_info(const void* function, size_t number, size_t* offset, size_t* size) {
    const auto& parameters = kernel_of(*function_of(function), current_device())->parameters;
    if (number >= parameters.size()) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "paramIndex must be below " + std::to_string(parameters.size()) +
                                                    "; got " + std::to_string(number)};
    }
    *offset = parameters[number].offset;
    if (size) {
        *size = parameters[number].size;
    }
}

std::vector<std::shared_ptr<Kernel>>& launched_kernels() {
    static auto* it = new std::vector<std::shared_ptr<Kernel>>;
    return *it;
}

// --- attributes of kernels ----------------------------------------------------------------------------

int registers_given(const Kernel& kernel) {
    constexpr int unit = 8;
    return (kernel.registers + unit - 1) / unit * unit;
}

int largest_block(const Kernel& kernel) {
    constexpr int warp = device::LANES;
    int largest = kernel.most_threads ? std::min(THREADS_OF_BLOCK, kernel.most_threads) : THREADS_OF_BLOCK;
    if (!kernel.registers) {
        return largest;
    }
    return std::min(largest, REGISTERS_OF_BLOCK / registers_given(kernel) / warp * warp);
}

int largest_dynamic_shared_memory(const Function& function, const Kernel& kernel) {
    bool asked = function.dynamic_shared_limit >= 0;
    return asked ? function.dynamic_shared_limit : std::max(0, USUAL_SHARED_MEMORY - kernel.shared_bytes);
}

[[noreturn]] static void refuse_attribute(int which, const std::string& rule) {
    throw Refusal{CUDA_ERROR_INVALID_VALUE, "attribute " + std::to_string(which) + " of functions " + rule};
}

static int attribute(const Function& function, CUfunction_attribute which, const Device& device) {
    const Kernel& kernel = *kernel_of(function, device);
    switch (int(which)) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return largest_block(kernel);
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: return kernel.shared_bytes;
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: return kernel.local_bytes;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: return kernel.registers;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return device.target.number();
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return largest_dynamic_shared_memory(function, kernel);
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: return function.carveout;
        case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:  // constants lie in global memory here
        case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
        case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:  // and what clusters and updates by the device need
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        case CU_FUNC_ATTRIBUTE_DEVICE_NODE_UPDATE_SUPPORTED:
        case CU_FUNC_ATTRIBUTE_SHARED_MEMORY_MODE: return 0;
        default: refuse_attribute(which, "is not known");
    }
}

static void require_value(int value, int low, int high) {
    if (value < low || value > high) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "value must be from " + std::to_string(low) + " to " +
                                                    std::to_string(high) + "; got " + std::to_string(value)};
    }
}

static void set_attribute(const void* handle, CUfunction_attribute which, int value, const Device& device) {
    auto function = function_of(handle);
    int number = attribute(*function, which, device);  // Refusal where there is no such attribute
    switch (int(which)) {
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            require_value(value, 0, largest_shared_memory(device) - kernel_of(*function, device)->shared_bytes);
            function->dynamic_shared_limit = value;
            break;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            require_value(value, -1, 100);
            function->carveout = value;
            break;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
            if (value != number) {
                throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "the software GPU runs no clusters; got attribute " +
                                                            std::to_string(int(which)) + " of functions"};
            }
            break;
        default: refuse_attribute(which, "cannot be set");
    }
}

}  // namespace driver

using namespace driver;

extern "C" {

// --- libraries and modules, which are the same here ---------------------------------------------------

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                           void**, unsigned) {
    return call([&] { *library = as_handle<CUlibrary>(load(code)); });
}

CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* path, CUjit_option*, void**, unsigned, CUlibraryOption*,
                               void**, unsigned) {
    return call([&] { *library = as_handle<CUlibrary>(load_file(path)); });
}

CUresult cuLibraryUnload(CUlibrary library) {
    return releasing_call([&] { unload(library); });
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    return call([&] { *kernel = as_handle<CUkernel>(function_named(library, name)); });
}

CUresult cuLibraryGetModule(CUmodule* module, CUlibrary library) {
    return call([&] { *module = as_handle<CUmodule>(library_of(library)); });
}

CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary library) {
    return call([&] { *count = unsigned(library_of(library)->functions.size()); });
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned count, CUlibrary library) {
    return call([&] { list_functions(kernels, count, library); });
}

CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* size, CUlibrary library, const char* name) {
    return call([&] { find_variable(address, size, library, name); });
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
    return call([&] { *module = as_handle<CUmodule>(load_file(path)); });
}

CUresult cuModuleLoadData(CUmodule* module, const void* code) {
    return call([&] { *module = as_handle<CUmodule>(load(code)); });
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* code, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(module, code);
}

CUresult cuModuleUnload(CUmodule module) {
    return releasing_call([&] { unload(module); });
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    return call([&] { *function = as_handle<CUfunction>(function_named(module, name)); });
}

CUresult cuModuleGetFunctionCount(unsigned* count, CUmodule module) {
    return call([&] { *count = unsigned(library_of(module)->functions.size()); });
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned count, CUmodule module) {
    return call([&] { list_functions(functions, count, module); });
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* size, CUmodule module, const char* name) {
    return call([&] { find_variable(address, size, module, name); });
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
    *mode = CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

// --- kernels and functions, which are the same here ---------------------------------------------------

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    return call([&] { *function = as_handle<CUfunction>(function_of(kernel)); });
}

CUresult cuKernelGetName(const char** name, CUkernel kernel) {
    return call([&] { *name = function_of(kernel)->name.c_str(); });
}

CUresult cuFuncGetName(const char** name, CUfunction function) {
    return call([&] { *name = function_of(function)->name.c_str(); });
}

CUresult cuKernelGetLibrary(CUlibrary* library, CUkernel kernel) {
    return call([&] { *library = as_handle<CUlibrary>(function_of(kernel)->library.lock()); });
}

CUresult cuFuncGetModule(CUmodule* module, CUfunction function) {
    return call([&] { *module = as_handle<CUmodule>(function_of(function)->library.lock()); });
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t number, size_t* offset, size_t* size) {
    return call([&] { parameter_info(kernel, number, offset, size); });
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t number, size_t* offset, size_t* size) {
    return call([&] { parameter_info(function, number, offset, size); });
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
    return call([&] { *value = attribute(*function_of(function), which, current_device()); });
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute which, CUkernel kernel, CUdevice device) {
    return call([&] { *value = attribute(*function_of(kernel), which, device_of(device)); });
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    return call([&] { set_attribute(function, which, value, current_device()); });
}

CUresult cuKernelSetAttribute(CUfunction_attribute which, int value, CUkernel kernel, CUdevice device) {
    return call([&] { set_attribute(kernel, which, value, device_of(device)); });
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache) {
    return call([&] { function_of(function); });
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache, CUdevice) {
    return call([&] { function_of(kernel); });
}

CUresult cuFuncLoad(CUfunction function) {
    return call([&] { function_of(function); });
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState* loaded, CUfunction function) {
    return call([&] {
        function_of(function);
        *loaded = CU_FUNCTION_LOADING_STATE_LOADED;
    });
}

}  // extern "C"
