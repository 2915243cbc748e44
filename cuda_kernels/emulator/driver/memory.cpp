// Memory: allocations, copies, fills, and what a pointer points to (cuMem..., cuPointer...).
//
// The device's memory is the host's, on a heap that knows every allocation. Pinned memory is read and written when a
// copy runs, other host memory when the copy is called, as a driver does.
#include "memory.h"

#include <algorithm>
#include <cstring>

#include "graphs.h"

namespace driver {

using device::Fault;
using device::heap;
using Place = Allocation::Place;

constexpr size_t TOTAL = size_t(8) << 30;

// --- allocations --------------------------------------------------------------------------------------

size_t total_memory() { return TOTAL; }

size_t used_memory(int device) {
    size_t used = 0;
    for (const auto& [address, allocation] : state().allocations) {
        bool here = allocation.device == device && !allocation.on_host();
        used += here ? allocation.size : 0;
    }
    return used;
}

static const char* label_of(Place place) {
    switch (place) {
        case Place::pinned: return "of pinned host memory";
        case Place::managed: return "of managed memory";
        case Place::registered: return "of registered host memory";
        case Place::variable: return "of a variable of a module";
        case Place::device: break;
    }
    return "";
}

static Allocation& remember(uint64_t address, size_t size, int device, Place place) {
    State& s = state();
    s.allocations_made += 1;
    Allocation allocation;
    allocation.address = address;
    allocation.size = size;
    allocation.device = device;
    allocation.place = place;
    allocation.number = s.allocations_made;
    s.allocations[address] = allocation;
    return s.allocations[address];
}

static void count_in_pool(Allocation& allocation, const std::shared_ptr<Pool>& pool) {
    if (!pool) {
        return;
    }
    allocation.pool = pool;
    pool->used += allocation.size;
    pool->high = std::max(pool->high, pool->used);
}

Allocation& allocate(size_t size, int device, Place place, const std::shared_ptr<Pool>& pool) {
    bool on_device = place == Place::device;
    bool too_much = on_device && size > TOTAL - std::min(TOTAL, used_memory(device));
    if (pool && pool->limit && pool->used + size > pool->limit) {
        throw Refusal{CUDA_ERROR_OUT_OF_MEMORY, "the pool holds at most " + std::to_string(pool->limit) + " bytes, " +
                                                    std::to_string(pool->used) + " are used; " + std::to_string(size) +
                                                    " were asked for"};
    }
    uint64_t address = too_much ? 0 : heap().allocate(size, label_of(place), on_device ? device : -1);
    if (!address) {
        throw Refusal{CUDA_ERROR_OUT_OF_MEMORY, "device " + std::to_string(device) + " has " + std::to_string(TOTAL) +
                                                    " bytes, " + std::to_string(used_memory(device)) + " are used; " +
                                                    std::to_string(size) + " were asked for"};
    }
    if (place != Place::device) {
        heap().mark_written(address, size);  // the host writes it without a call
    }
    Allocation& made = remember(address, size, device, place);
    count_in_pool(made, pool);
    return made;
}

void adopt(uint64_t address, size_t size, int device) { remember(address, size, device, Place::variable); }

void release(uint64_t address) {
    auto& allocations = state().allocations;
    auto found = allocations.find(address);
    if (found == allocations.end()) {
        throw Fault(device::FaultKind::address, "free of what is no live allocation: " + heap().describe(address, 1));
    }
    if (found->second.pool) {
        found->second.pool->used -= found->second.size;
    }
    allocations.erase(found);
    forget_accesses(address);
    heap().release(address);
}

void release_if_live(uint64_t address) {
    if (state().allocations.count(address)) {
        release(address);
    }
}

const Allocation* allocation_of(uint64_t address) { return allocation_in(address, 1); }

const Allocation* allocation_in(uint64_t address, size_t size) {
    auto& allocations = state().allocations;
    auto next = allocations.lower_bound(address + size);
    if (next == allocations.begin()) {
        return nullptr;
    }
    const Allocation& allocation = std::prev(next)->second;
    uint64_t end = allocation.address + std::max<size_t>(allocation.size, 1);
    return address < end ? &allocation : nullptr;
}

static Allocation& require_allocation(uint64_t address, const char* name) {
    auto& allocations = state().allocations;
    auto found = allocations.find(address);
    if (found == allocations.end()) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, std::string(name) + " must be the first address of live memory; got " +
                                                    heap().describe(address, 1)};
    }
    return found->second;
}

// What cuMemFree and cuMemFreeAsync may free.
static Allocation& require_device_memory(uint64_t address) {
    Allocation& allocation = require_allocation(address, "dptr");
    if (allocation.place != Place::device && allocation.place != Place::managed) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "dptr must be memory of a device; got " + hexadecimal(address) + ", " +
                                                    label_of(allocation.place)};
    }
    return allocation;
}

static Allocation& require_pinned(uint64_t address) {
    Allocation& allocation = require_allocation(address, "p");
    if (allocation.place != Place::pinned) {
        const char* place = allocation.place == Place::device ? "of device memory" : label_of(allocation.place);
        throw Refusal{CUDA_ERROR_INVALID_VALUE,
                      "p must be pinned host memory; got " + hexadecimal(address) + ", " + place};
    }
    return allocation;
}

static void require_size(size_t size) {
    if (!size) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "bytesize must be at least 1; got 0"};
    }
}

static bool on_host(uint64_t address) {
    const Allocation* allocation = allocation_of(address);
    return !allocation || allocation->on_host();
}

static bool is_pinned(uint64_t address) {
    const Allocation* allocation = allocation_of(address);
    return allocation && allocation->on_host();
}

// --- in the order of streams --------------------------------------------------------------------------

uint64_t allocate_in_stream(size_t size, const std::shared_ptr<Pool>& pool, CUstream handle) {
    auto stream = stream_of(handle);
    auto& made = allocate(std::max<size_t>(size, 1), pool->device, Place::device, pool);
    uint64_t address = made.address;
    if (stream->capture) {
        add_graph_memory(stream, address);
    }
    Task task;
    task.label = "the allocation of " + std::to_string(size) + " bytes";
    task.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    task.accesses = {{address, address + made.size, true}};
    enqueue(stream, task);
    return address;
}

void free_in_stream(uint64_t address, CUstream handle) {
    auto stream = stream_of(handle);
    Allocation& allocation = require_device_memory(address);
    size_t size = allocation.size;
    bool captured = stream->capture != nullptr;
    Task task;
    task.label = "the free of " + std::to_string(size) + " bytes";
    task.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
    task.accesses = {{address, address + size, true}};
    task.run = [address, size, captured] {
        if (captured) {  // the next launch of the graph has it again: only its contents are lost
            std::memset(reinterpret_cast<void*>(address), 0xA7, size);
            heap().forget_written(address);
        } else {
            release(address);
        }
    };
    enqueue(stream, task);
}

// --- copies and fills ---------------------------------------------------------------------------------

static void require_live(uint64_t address, size_t size, const std::string& what) {
    const device::Heap::Span* span = heap().find(address);
    if (!span || !span->live || address + size > span->end) {
        throw Fault(device::FaultKind::address, "invalid " + what + ": " + heap().describe(address, size));
    }
}

static std::string label_of_copy(size_t size, bool to_host, bool from_host) {
    const char* from = from_host ? " from the host" : "";
    const char* to = to_host ? " to the host" : "";
    return "the copy of " + std::to_string(size) + " bytes" + from + to;
}

// How a copy treats its two ends, and whether the host waits for it.
struct Ends {
    bool to_host;
    bool from_host;
    bool waits;
};

static void copy(uint64_t to, uint64_t from, size_t size, Ends ends, CUstream handle) {
    auto stream = stream_of(handle);
    if (!size) {
        return;
    }
    bool pageable_source = ends.from_host && !is_pinned(from);
    bool pageable_target = ends.to_host && !is_pinned(to);
    Task task;
    task.label = label_of_copy(size, ends.to_host, ends.from_host);
    task.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    bool captured = stream->capture != nullptr;
    task.immediate = ends.waits || (pageable_target && !captured);
    if (!pageable_target) {
        task.accesses.push_back({to, to + size, true});
    }
    if (!pageable_source) {
        task.accesses.push_back({from, from + size, false});
    }
    std::shared_ptr<std::vector<uint8_t>> snapshot;
    if (pageable_source && !captured) {  // a graph reads the source at each launch
        auto* bytes = reinterpret_cast<const uint8_t*>(from);
        snapshot = std::make_shared<std::vector<uint8_t>>(bytes, bytes + size);
    }
    task.run = [=] {
        if (!ends.to_host) {
            require_live(to, size, "copy to");
        }
        if (!ends.from_host) {
            require_live(from, size, "copy from");
        }
        const void* source = snapshot ? snapshot->data() : reinterpret_cast<const void*>(from);
        std::memmove(reinterpret_cast<void*>(to), source, size);
        if (ends.from_host || ends.to_host) {
            heap().mark_written(to, size);
        } else {
            heap().copy_written(to, from, size);
        }
    };
    enqueue(stream, task);
}

static void copy_to_device(uint64_t to, const void* from, size_t size, CUstream stream, bool waits) {
    copy(to, reinterpret_cast<uint64_t>(from), size, {false, true, waits}, stream);
}

static void copy_to_host(void* to, uint64_t from, size_t size, CUstream stream, bool waits) {
    copy(reinterpret_cast<uint64_t>(to), from, size, {true, false, waits}, stream);
}

// A copy between addresses of either kind.
static void copy_any(uint64_t to, uint64_t from, size_t size, CUstream stream, bool waits) {
    copy(to, from, size, {on_host(to), on_host(from), waits}, stream);
}

Task fill_task(uint64_t to, unsigned value, size_t element, size_t count) {
    if (to % element) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "dstDevice must be a multiple of " + std::to_string(element) +
                                                    "; got " + hexadecimal(to)};
    }
    size_t size = count * element;
    Task task;
    task.label = "the fill of " + std::to_string(size) + " bytes";
    task.type = CU_GRAPH_NODE_TYPE_MEMSET;
    task.accesses = {{to, to + size, true}};
    task.run = [=] {
        require_live(to, size, "fill of");
        for (size_t n = 0; n < count; n++) {  // the lowest bytes of a value come first
            std::memcpy(reinterpret_cast<void*>(to + n * element), &value, element);
        }
        heap().mark_written(to, size);
    };
    return task;
}

static void fill(uint64_t to, unsigned value, size_t element, size_t count, CUstream handle) {
    auto stream = stream_of(handle);
    Task task = fill_task(to, value, element, count);
    if (count) {
        enqueue(stream, task);
    }
}

// --- attributes of pointers ---------------------------------------------------------------------------

static const Allocation& described(uint64_t address) {
    const Allocation* allocation = allocation_of(address);
    if (!allocation) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "ptr must point into live memory of a device; got " +
                                                    heap().describe(address, 1)};
    }
    return *allocation;
}

template <class T>
static void put(void* out, T value) {
    std::memcpy(out, &value, sizeof value);
}

static void pointer_attribute(void* out, CUpointer_attribute which, uint64_t address) {
    const Allocation& allocation = described(address);
    const Device& owner = device_of(allocation.device);
    bool host = allocation.on_host();
    bool managed = allocation.place == Place::managed;
    switch (int(which)) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: put(out, as_handle<CUcontext>(owner.primary)); break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            put(out, unsigned(host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: put(out, CUdeviceptr(address)); break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER: put(out, host || managed ? address : uint64_t(0)); break;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: put(out, unsigned(0)); break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: put(out, allocation.number); break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: put(out, unsigned(managed)); break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: put(out, allocation.device); break;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: put(out, unsigned(0)); break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: put(out, allocation.address); break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: put(out, allocation.size); break;
        case CU_POINTER_ATTRIBUTE_MAPPED: put(out, unsigned(1)); break;
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: put(out, uint64_t(0)); break;
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: put(out, unsigned(CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE)); break;
        case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: put(out, as_handle<CUmemoryPool>(allocation.pool)); break;
        default:
            throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "attribute " + std::to_string(int(which)) +
                                                        " of pointers is not known to the software GPU"};
    }
}

// What cuPointerGetAttributes answers for a pointer that is none of the device's.
static void absent_attribute(void* out, CUpointer_attribute which) {
    switch (int(which)) {
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: put(out, int(CU_DEVICE_INVALID)); break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        case CU_POINTER_ATTRIBUTE_MAPPED: put(out, unsigned(0)); break;
        default: put(out, uint64_t(0));
    }
}

}  // namespace driver

using namespace driver;

extern "C" {

// --- allocations --------------------------------------------------------------------------------------

CUresult cuMemGetInfo_v2(size_t* left, size_t* all) {
    return call([&] {
        int device = require_context()->device;
        *all = total_memory();
        *left = total_memory() - std::min(total_memory(), used_memory(device));
    });
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
    return call([&] {
        require_size(size);
        require_safe_in_capture("cuMemAlloc");
        *address = allocate(size, require_context()->device, Place::device, nullptr).address;
    });
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* address, size_t* pitch, size_t width, size_t height, unsigned) {
    constexpr size_t row_alignment = 512;
    *pitch = (width + row_alignment - 1) / row_alignment * row_alignment;
    return cuMemAlloc_v2(address, *pitch * height);
}

CUresult cuMemAllocManaged(CUdeviceptr* address, size_t size, unsigned) {
    return call([&] {
        require_size(size);
        require_safe_in_capture("cuMemAllocManaged");
        *address = allocate(size, require_context()->device, Place::managed, nullptr).address;
    });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    return releasing_call([&] {
        if (!address) {
            return;
        }
        require_safe_in_capture("cuMemFree");
        wait_for_device(require_device_memory(address).device);  // as the driver does
        release(address);
    });
}

CUresult cuMemAllocAsync(CUdeviceptr* address, size_t size, CUstream stream) {
    return call([&] {
        auto pool = device_of(stream_of(stream)->context->device).current_pool;
        *address = allocate_in_stream(size, pool, stream);
    });
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t size, CUmemoryPool pool, CUstream stream) {
    return call([&] { *address = allocate_in_stream(size, state().pools.find(pool), stream); });
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    return releasing_call([&] {
        if (address) {
            free_in_stream(address, stream);
        }
    });
}

// --- memory of the host -------------------------------------------------------------------------------

CUresult cuMemHostAlloc(void** pointer, size_t size, unsigned flags) {
    return call([&] {
        require_size(size);
        require_safe_in_capture("cuMemHostAlloc");
        Allocation& made = allocate(size, require_context()->device, Place::pinned, nullptr);
        made.flags = flags;
        *pointer = reinterpret_cast<void*>(made.address);
    });
}

CUresult cuMemAllocHost_v2(void** pointer, size_t size) { return cuMemHostAlloc(pointer, size, 0); }

CUresult cuMemFreeHost(void* pointer) {
    return releasing_call([&] {
        uint64_t address = require_pinned(reinterpret_cast<uint64_t>(pointer)).address;
        wait_for_all(nullptr);
        release_if_live(address);
    });
}

CUresult cuMemHostRegister_v2(void* pointer, size_t size, unsigned flags) {
    return call([&] {
        require_size(size);
        auto address = reinterpret_cast<uint64_t>(pointer);
        if (allocation_in(address, size)) {
            throw Refusal{CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "p must not be registered; got " +
                                                                         hexadecimal(pointer) +
                                                                             ", some of which is"};
        }
        heap().add(address, size, label_of(Place::registered));
        remember(address, size, require_context()->device, Place::registered).flags = flags;
    });
}

CUresult cuMemHostUnregister(void* pointer) {
    return releasing_call([&] {
        auto address = reinterpret_cast<uint64_t>(pointer);
        auto found = state().allocations.find(address);
        if (found == state().allocations.end() || found->second.place != Place::registered) {
            throw Refusal{CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "p must be registered; got " + hexadecimal(pointer)};
        }
        wait_for_all(nullptr);
        state().allocations.erase(found);
        forget_accesses(address);
        heap().remove(address);
    });
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* pointer, unsigned) {
    return call([&] {
        const Allocation& allocation = described(reinterpret_cast<uint64_t>(pointer));
        if (!allocation.on_host()) {
            throw Refusal{CUDA_ERROR_INVALID_VALUE, "p must be pinned or registered; got " + hexadecimal(pointer)};
        }
        *address = reinterpret_cast<CUdeviceptr>(pointer);
    });
}

CUresult cuMemHostGetFlags(unsigned* flags, void* pointer) {
    return call([&] { *flags = described(reinterpret_cast<uint64_t>(pointer)).flags; });
}

// --- copies -------------------------------------------------------------------------------------------

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
    return call([&] { copy_to_device(to, from, size, nullptr, true); });
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
    return call([&] { copy_to_host(to, from, size, nullptr, true); });
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return call([&] { copy(to, from, size, {false, false, false}, nullptr); });
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
    return call([&] { copy_to_device(to, from, size, stream, false); });
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, CUstream stream) {
    return call([&] { copy_to_host(to, from, size, stream, false); });
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return call([&] { copy(to, from, size, {false, false, false}, stream); });
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return call([&] { copy_any(to, from, size, nullptr, true); });
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return call([&] { copy_any(to, from, size, stream, false); });
}

CUresult cuMemcpyWithAttributesAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUmemcpyAttributes*,
                                     CUstream stream) {
    return cuMemcpyAsync(to, from, size, stream);
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size) {
    return call([&] {
        context_of(to_context);
        context_of(from_context);
        copy(to, from, size, {false, false, false}, nullptr);
    });
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size,
                           CUstream stream) {
    return call([&] {
        context_of(to_context);
        context_of(from_context);
        copy(to, from, size, {false, false, false}, stream);
    });
}

// --- fills --------------------------------------------------------------------------------------------

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    return call([&] { fill(to, value, 1, count, nullptr); });
}

CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
    return call([&] { fill(to, value, 2, count, nullptr); });
}

CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
    return call([&] { fill(to, value, 4, count, nullptr); });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    return call([&] { fill(to, value, 1, count, stream); });
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    return call([&] { fill(to, value, 2, count, stream); });
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    return call([&] { fill(to, value, 4, count, stream); });
}

// --- what a pointer points to -------------------------------------------------------------------------

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr address) {
    return call([&] {
        require_output(out, "data");
        pointer_attribute(out, which, address);
    });
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* which, void** out, CUdeviceptr address) {
    return call([&] {
        for (unsigned n = 0; n < count; n++) {
            if (allocation_of(address)) {
                pointer_attribute(out[n], which[n], address);
            } else {
                absent_attribute(out[n], which[n]);
            }
        }
    });
}

CUresult cuPointerSetAttribute(const void*, CUpointer_attribute, CUdeviceptr address) {
    return call([&] { described(address); });
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* size, CUdeviceptr address) {
    return call([&] {
        const Allocation* allocation = allocation_of(address);
        if (!allocation) {
            throw Refusal{CUDA_ERROR_NOT_FOUND, "dptr must point into live memory; got " + hexadecimal(address)};
        }
        if (begin) {
            *begin = allocation->address;
        }
        if (size) {
            *size = allocation->size;
        }
    });
}

}  // extern "C"
