// Loaded code: libraries (modules) and the kernels in them.
#pragma once
#include "state.h"

namespace driver {

struct Function {
    static constexpr Kind kind = Kind::function;
    uint64_t handle = 0;
    std::string name;
    std::weak_ptr<Library> library;
    int dynamic_shared_limit = -1;  // what the caller asked for; -1: nothing
    int carveout = -1;              // percent of the multiprocessor's memory that is to be shared; has no effect here
};

// Code, which becomes a module on every device where it is used: each has variables of its own.
struct Library {
    static constexpr Kind kind = Kind::library;
    uint64_t handle = 0;
    std::string text;                      // PTX
    int architecture = 0;                  // of the cubin in front of the PTX, as 90; 0: there is none
    std::map<std::string, int> registers;  // of kernels, as the cubin tells
    std::map<int, std::shared_ptr<device::Module>> modules;  // by the device's number
    std::vector<std::shared_ptr<Function>> functions;
};

std::shared_ptr<Library> library_of(const void* handle);
std::shared_ptr<Function> function_of(const void* handle);
// A kernel as it is on a device; Refusal where its library is unloaded or the device cannot run its code.
std::shared_ptr<device::Kernel> kernel_of(const Function& function, const Device& device);
// Forgets what the libraries have on a device, whose memory is gone: they are loaded there again where they are used.
void forget_modules_of(int device);
// Every kernel that was launched, also those whose library is unloaded.
std::vector<std::shared_ptr<device::Kernel>>& launched_kernels();
// Registers of a kernel as they are handed out to a thread, 0 where they are not known.
int registers_given(const device::Kernel& kernel);
// Bytes of dynamic shared memory that a launch of a function may ask for.
int largest_dynamic_shared_memory(const Function& function, const device::Kernel& kernel);
// The largest block that a kernel's registers leave room for and that its text allows.
int largest_block(const device::Kernel& kernel);

}  // namespace driver
