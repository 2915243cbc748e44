// Memory pools (cuMemPool..., cuDeviceGetMemPool...): whose they are and how much of each is used. What is freed goes
// back to the heap at once.
#include <cstring>

#include "memory.h"

namespace driver {

static std::shared_ptr<Pool> pool_of(CUmemoryPool handle) { return state().pools.find(handle); }

static std::shared_ptr<Pool> make_pool(const CUmemPoolProps& wanted) {
    auto pool = std::make_shared<Pool>();
    bool on_device = wanted.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    pool->device = on_device ? device_of(wanted.location.id).number : 0;
    pool->limit = wanted.maxSize;
    pool->access[pool->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    state().pools.add(pool);
    return pool;
}

// Whether an attribute is a number of bytes; the others are flags.
static bool is_count(CUmemPool_attribute which) {
    switch (int(which)) {
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH: return true;
        default: return false;
    }
}

static uint64_t count_of(const Pool& pool, CUmemPool_attribute which) {
    switch (int(which)) {
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: return pool.threshold;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH: return pool.high;
        default: return pool.used;
    }
}

static void set_count(Pool& pool, CUmemPool_attribute which, uint64_t value) {
    if (which == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        pool.threshold = value;
    } else if (value == 0) {
        pool.high = pool.used;  // a mark is set back
    } else {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "a high-water mark must be set to 0; got " + std::to_string(value)};
    }
}

static std::shared_ptr<Pool> pool_at(const CUmemLocation* location) {
    bool on_device = location && location->type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (!on_device) {
        throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "location must be a device: the software GPU has pools there only"};
    }
    return device_of(location->id).current_pool;
}

}  // namespace driver

using namespace driver;

extern "C" {

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
    return call([&] { *pool = as_handle<CUmemoryPool>(device_of(device).default_pool); });
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
    return call([&] { *pool = as_handle<CUmemoryPool>(device_of(device).current_pool); });
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    return call([&] { device_of(device).current_pool = pool_of(pool); });
}

CUresult cuMemGetMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType) {
    return call([&] { *pool = as_handle<CUmemoryPool>(pool_at(location)); });
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType) {
    return call([&] {
        pool_at(location);
        *pool = as_handle<CUmemoryPool>(device_of(location->id).default_pool);
    });
}

CUresult cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType, CUmemoryPool pool) {
    return call([&] {
        pool_at(location);
        device_of(location->id).current_pool = pool_of(pool);
    });
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* wanted) {
    return call([&] {
        require_output(wanted, "poolProps");
        *pool = as_handle<CUmemoryPool>(make_pool(*wanted));
    });
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    return releasing_call([&] {
        auto pool = pool_of(handle);
        if (pool->is_default) {
            throw Refusal{CUDA_ERROR_INVALID_VALUE, "pool must not be a device's default pool"};
        }
        for (Device& device : state().devices) {
            if (device.current_pool == pool) {
                device.current_pool = device.default_pool;
            }
        }
        state().pools.remove(*pool);
    });
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void* value) {
    return call([&] {
        auto pool = pool_of(handle);
        require_output(value, "value");
        if (is_count(which)) {
            set_count(*pool, which, *static_cast<cuuint64_t*>(value));
        } else {
            pool->settings[which] = *static_cast<int*>(value);
        }
    });
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void* value) {
    return call([&] {
        auto pool = pool_of(handle);
        require_output(value, "value");
        if (is_count(which)) {
            *static_cast<cuuint64_t*>(value) = count_of(*pool, which);
            return;
        }
        auto found = pool->settings.find(which);
        *static_cast<int*>(value) = found == pool->settings.end() ? 1 : found->second;
    });
}

CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* wanted, size_t count) {
    return call([&] {
        auto pool = pool_of(handle);
        for (size_t n = 0; n < count; n++) {
            pool->access[device_of(wanted[n].location.id).number] = wanted[n].flags;
        }
    });
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle, CUmemLocation* location) {
    return call([&] {
        auto pool = pool_of(handle);
        auto found = pool->access.find(location->id);
        *flags = found == pool->access.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : CUmemAccess_flags(found->second);
    });
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
    return call([&] { pool_of(pool); });
}

}  // extern "C"
