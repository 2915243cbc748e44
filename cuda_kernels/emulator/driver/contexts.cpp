// The driver, its devices and their contexts (cuInit, cuDevice..., cuCtx...).
//
// A device's primary context exists while somebody retains it. When the last one releases it, or a call resets it,
// its streams, events, memory and the variables of its modules go with it, and its handle is refused until somebody
// retains it again: the handle stays the same, so whoever kept it goes on then.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "graphs.h"
#include "memory.h"
#include "modules.h"
#include "work.h"

namespace driver {

// --- making and destroying ----------------------------------------------------------------------------

static Device make_device(int number) {
    Device made;
    made.number = number;
    made.target = state().targets[number];
    made.default_pool = std::make_shared<Pool>();
    made.default_pool->device = number;
    made.default_pool->is_default = true;
    made.default_pool->access[number] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    state().pools.add(made.default_pool);
    made.current_pool = made.default_pool;
    return made;
}

static void initialize() {
    State& s = state();
    if (s.initialized) {
        return;
    }
    s.initialized = true;
    if (s.targets.empty()) {
        s.targets.emplace_back();
    }
    for (int number = 0; number < int(s.targets.size()); number++) {
        s.devices.push_back(make_device(number));
    }
}

static std::shared_ptr<Context> make_context(int device, bool primary, unsigned flags) {
    auto context = std::make_shared<Context>();
    context->device = device;
    context->primary = primary;
    context->flags = flags;
    uint64_t& handle = state().devices[device].primary_handle;
    if (primary && handle) {
        context->handle = handle;
        state().contexts.restore(context);
    } else {
        state().contexts.add(context);
        handle = primary ? context->handle : handle;
    }
    auto legacy = std::make_shared<Stream>();
    legacy->context = context;
    legacy->name = "the default stream of device " + std::to_string(device);
    legacy->lane = take_lane();
    context->legacy = legacy;
    return context;
}

static void free_memory_of(int device) {
    std::vector<uint64_t> addresses;
    for (const auto& [address, allocation] : state().allocations) {
        bool registered = allocation.place == Allocation::Place::registered;
        if (allocation.device == device && !registered) {
            addresses.push_back(address);
        }
    }
    for (uint64_t address : addresses) {
        release(address);
    }
}

// Ends a context with all that belongs to it: its handle and theirs are refused from then on.
static void destroy_context(const std::shared_ptr<Context>& context) {
    wait_for_all(context);
    State& s = state();
    for (const auto& stream : s.streams.all()) {
        if (stream->context == context) {
            s.streams.remove(*stream);
            give_back_lane(stream->lane, stream->last, stream->blocking);
        }
    }
    for (const auto& event : s.events.all()) {
        if (event->context == context) {
            s.events.remove(*event);
        }
    }
    if (context->primary) {  // memory belongs to a device here; of several contexts the primary one owns it
        free_memory_of(context->device);
        forget_modules_of(context->device);
    }
    s.contexts.remove(*context);
    give_back_lane(context->legacy->lane, context->legacy->last, false);
    context->legacy = nullptr;  // they refer to each other
}

static std::shared_ptr<Context> retain_primary(Device& device) {
    if (!device.primary) {
        device.primary = make_context(device.number, true, device.flags);
    }
    device.retained += 1;
    return device.primary;
}

static void reset_primary(Device& device) {
    if (device.primary) {
        destroy_context(device.primary);
        device.primary = nullptr;
    }
}

// --- values -------------------------------------------------------------------------------------------

static size_t default_limit(CUlimit limit) {
    switch (int(limit)) {
        case CU_LIMIT_STACK_SIZE: return 1024;
        case CU_LIMIT_PRINTF_FIFO_SIZE: return size_t(1) << 20;
        case CU_LIMIT_MALLOC_HEAP_SIZE: return size_t(8) << 20;
        default: return 0;
    }
}

static void require_peers(const Context& mine, const Context& other) {
    if (mine.device == other.device) {
        throw Refusal{CUDA_ERROR_INVALID_DEVICE, "peerContext must be of another device; got one of device " +
                                                     std::to_string(other.device) + ", as the current one"};
    }
}

}  // namespace driver

using namespace driver;

extern "C" {

// --- the driver and its devices -----------------------------------------------------------------------

CUresult cuInit(unsigned) {
    return guarded([] { initialize(); });
}

CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
    return free_call([&] { *count = int(state().devices.size()); });
}

CUresult cuDeviceGet(CUdevice* device, int number) {
    return free_call([&] { *device = device_of(number).number; });
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
    return free_call([&] {
        std::snprintf(name, size, "Software GPU %s", device_of(device).target.name().c_str());
    });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    return free_call([&] { std::memset(uuid, 0x11 + device_of(device).number, sizeof *uuid); });
}

CUresult cuDeviceTotalMem_v2(size_t* size, CUdevice device) {
    return free_call([&] {
        device_of(device);
        *size = total_memory();
    });
}

CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
    return free_call([&] { std::snprintf(text, size, "0000:%02x:00.0", device_of(device).number); });
}

CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* text) {
    return free_call([&] {
        unsigned domain = 0;
        unsigned bus = 0;
        if (std::sscanf(text, "%x:%x", &domain, &bus) != 2 || domain) {
            throw Refusal{CUDA_ERROR_INVALID_VALUE, "pciBusId must be like 0000:00:00.0; got " + std::string(text)};
        }
        *device = device_of(int(bus)).number;
    });
}

// --- peers --------------------------------------------------------------------------------------------

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    return free_call([&] { *can = device_of(device).number != device_of(peer).number; });
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute which, CUdevice from, CUdevice to) {
    return free_call([&] {
        bool other = device_of(from).number != device_of(to).number;
        *value = other && which == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
    });
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
    return call([&] {
        auto mine = require_context();
        auto other = context_of(peer);
        require_peers(*mine, *other);
        if (!mine->peers.insert(other->device).second) {
            std::string name = "the memory of device " + std::to_string(other->device);
            throw Refusal{CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, name + " is open already"};
        }
    });
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    return call([&] {
        auto mine = require_context();
        auto other = context_of(peer);
        if (!mine->peers.erase(other->device)) {
            throw Refusal{CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "the memory of device " + std::to_string(other->device) +
                                                                  " was not opened by cuCtxEnablePeerAccess"};
        }
    });
}

// --- primary contexts ---------------------------------------------------------------------------------

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return free_call([&] { *context = as_handle<CUcontext>(retain_primary(device_of(device))); });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice number) {
    return free_call([&] {
        Device& device = device_of(number);
        if (!device.retained) {
            throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "the primary context of device " + std::to_string(number) +
                                                          " must be retained before it is released"};
        }
        device.retained -= 1;
        if (!device.retained) {
            reset_primary(device);
        }
    });
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice number) {
    return free_call([&] { reset_primary(device_of(number)); });
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice number, unsigned flags) {
    return free_call([&] { device_of(number).flags = flags; });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice number, unsigned* flags, int* active) {
    return free_call([&] {
        *flags = device_of(number).flags;
        *active = device_of(number).primary != nullptr;
    });
}

// --- other contexts -----------------------------------------------------------------------------------

// Before CUDA 11.4; later calls add parameters that the software GPU has no use for.
CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
    return free_call([&] {
        auto made = make_context(device_of(device).number, false, flags);
        *context = as_handle<CUcontext>(made);
        push_current(*context);
    });
}

// Of CUDA 11.4 to 12.4.
CUresult cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam*, int, unsigned flags, CUdevice device) {
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams*, unsigned flags, CUdevice device) {
    return cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
    return free_call([&] {
        auto context = context_of(handle);
        if (context->primary) {
            throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "a primary context must be released, not destroyed"};
        }
        destroy_context(context);
        if (current_handle() == handle) {
            pop_current();
        }
    });
}

// --- the current context ------------------------------------------------------------------------------

CUresult cuCtxGetCurrent(CUcontext* context) {
    return free_call([&] {
        *context = current_handle();
    });
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return free_call([&] {
        if (context) {
            context_of(context);
        }
        set_current(context);
    });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    return free_call([&] {
        context_of(context);
        push_current(context);
    });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    return free_call([&] {
        CUcontext popped = pop_current();
        if (context) {
            *context = popped;
        }
    });
}

CUresult cuCtxGetDevice(CUdevice* device) {
    return free_call([&] {
        *device = require_context()->device;
    });
}

// From CUDA 13 on.
CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext context) {
    return free_call([&] {
        *device = context_or_current(context)->device;
    });
}

CUresult cuCtxGetFlags(unsigned* flags) {
    return call([&] { *flags = require_context()->flags; });
}

CUresult cuCtxSetFlags(unsigned flags) {
    return call([&] { require_context()->flags = flags; });
}

CUresult cuCtxGetId(CUcontext context, unsigned long long* number) {
    return call([&] { *number = context_or_current(context)->handle; });
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned* version) {
    return call([&] {
        context_or_current(context);
        *version = CUDA_VERSION;
    });
}

CUresult cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
    return call([&] {
        if (lowest) {
            *lowest = 0;
        }
        if (highest) {
            *highest = -5;
        }
    });
}

CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
    return call([&] {
        auto context = require_context();
        auto found = context->limits.find(limit);
        *value = found == context->limits.end() ? default_limit(limit) : found->second;
    });
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    return call([&] { require_context()->limits[limit] = value; });
}

CUresult cuCtxGetCacheConfig(CUfunc_cache* config) {
    return call([&] { *config = CU_FUNC_CACHE_PREFER_NONE; });
}

CUresult cuCtxSetCacheConfig(CUfunc_cache) {
    return call([] {});
}

CUresult cuCtxResetPersistingL2Cache() {
    return call([] {});
}

// From CUDA 13 on.
CUresult cuCtxSynchronize_v2(CUcontext handle) {
    return call([&] {
        auto context = context_or_current(handle);
        require_unbroken(*context);
        require_no_capture(context, "cuCtxSynchronize");
        wait_for_all(context);
        require_unbroken(*context);
    });
}

CUresult cuCtxSynchronize() {
    return cuCtxSynchronize_v2(nullptr);
}

CUresult cuProfilerStart() {
    return call([] {});
}

CUresult cuProfilerStop() {
    return call([] {});
}

}  // extern "C"
