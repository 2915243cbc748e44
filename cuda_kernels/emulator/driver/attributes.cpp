// Attributes of the device (cuDeviceGetAttribute) and how many blocks fit on a multiprocessor (cuOccupancy...).
#include "attributes.h"

#include <algorithm>

#include "modules.h"

namespace driver {

// --- what differs between capabilities ----------------------------------------------------------------

namespace {

// From NVIDIA's table of technical specifications for each compute capability, and from the cards' data sheets.
struct Model {
    int capability;
    int multiprocessors;
    int threads;            // of a multiprocessor
    int blocks;             // of a multiprocessor
    int shared_kilobytes;   // of a multiprocessor
    int shared_of_block;    // kilobytes, at most
    int clock_kilohertz;
    int memory_kilohertz;
    int bus_bits;
    int cache_megabytes;
    int double_ratio;       // of the rates of float32 and float64
};

constexpr Model MODELS[] = {
    {75, 40, 1024, 16, 64, 64, 1590000, 5001000, 256, 4, 32},  // T4
    {80, 108, 2048, 32, 164, 163, 1410000, 1512000, 5120, 40, 2},  // A100
    {86, 84, 1536, 16, 100, 99, 1740000, 7251000, 384, 6, 64},  // A40
    {89, 142, 1536, 24, 100, 99, 2490000, 9001000, 384, 96, 64},  // L40
    {90, 132, 2048, 32, 228, 227, 1980000, 2619000, 5120, 50, 2},  // H100
    {100, 148, 2048, 32, 228, 227, 1965000, 3996000, 8192, 126, 2},  // B200
    {103, 148, 2048, 32, 228, 227, 1965000, 3996000, 8192, 126, 64},  // B300: what is published equals the B200
    {120, 170, 1536, 24, 100, 99, 2407000, 14001000, 512, 96, 64},  // RTX 5090
};

}  // namespace

static const Model& model_of(const Device& device) {
    for (const Model& one : MODELS) {
        if (one.capability == device.target.number()) {
            return one;
        }
    }
    throw Refusal{CUDA_ERROR_INVALID_DEVICE, "the software GPU knows no card of " + device.target.name()};
}

int largest_shared_memory(const Device& device) { return model_of(device).shared_of_block * 1024; }

// Bytes of a block's shared memory that the system takes.
static int reserved_shared_memory(const Device& device) { return device.target.major >= 8 ? 1024 : 0; }

// --- attributes ---------------------------------------------------------------------------------------

// The last one of the newest cuda.h that is served. All numbers up to it have a meaning.
constexpr int LAST_ATTRIBUTE = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_LOCALIZED_MEMORY_SUPPORTED;

static int attribute(int which, const Device& device) {
    constexpr int kilobyte = 1024;
    const Model& card = model_of(device);
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return device.target.major;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return device.target.minor;

        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return THREADS_OF_BLOCK;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return LARGEST_BLOCK_Z;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return LARGEST_GRID_X;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return LARGEST_GRID_YZ;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return device::LANES;

        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return card.multiprocessors;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return card.threads;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return card.blocks;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return REGISTERS_OF_BLOCK;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return USUAL_SHARED_MEMORY;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return card.shared_of_block * kilobyte;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return card.shared_kilobytes * kilobyte;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return reserved_shared_memory(device);
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 * kilobyte;

        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return card.clock_kilohertz;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return card.memory_kilohertz;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return card.bus_bits;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return card.cache_megabytes * kilobyte * kilobyte;
        case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 0x7FFFFFFF;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return device.number;

        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return 1;

        case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO: return card.double_ratio;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT: return 32;
        case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT: return 512;
        case CU_DEVICE_ATTRIBUTE_NUMA_ID:
        case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: return -1;  // no node of the host's memory is near
        case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS: return 1;

        default: break;
    }
    if (which < CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK || which > LAST_ATTRIBUTE) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "attribute " + std::to_string(which) +
                                                    " of devices is not known; they are from 1 to " +
                                                    std::to_string(LAST_ATTRIBUTE)};
    }
    return 0;  // what it lacks: clusters, cooperative launches, textures, tensor maps, sharing between processes
}

// --- occupancy ----------------------------------------------------------------------------------------

static int blocks_that_fit(const Device& device, const device::Kernel& kernel, int threads, size_t dynamic_shared) {
    constexpr int warp = device::LANES;
    if (threads < 1 || threads > largest_block(kernel)) {
        return 0;
    }
    const Model& card = model_of(device);
    int rounded = (threads + warp - 1) / warp * warp;
    int blocks = std::min(card.blocks, card.threads / rounded);
    if (kernel.registers) {
        blocks = std::min(blocks, REGISTERS_OF_BLOCK / (registers_given(kernel) * rounded));
    }
    size_t shared = kernel.shared_bytes + dynamic_shared + reserved_shared_memory(device);
    if (shared) {
        blocks = std::min<int>(blocks, int(size_t(card.shared_kilobytes) * 1024 / shared));
    }
    return blocks;
}

static size_t shared_of(CUoccupancyB2DSize size_of, size_t otherwise, int threads) {
    return size_of ? size_of(threads) : otherwise;
}

// The largest block of those that fill a multiprocessor most.
static int best_block(const Device& device, const device::Kernel& kernel, CUoccupancyB2DSize size_of, size_t shared,
                      int limit) {
    int largest = largest_block(kernel);
    largest = limit > 0 ? std::min(largest, limit) : largest;
    int best = 0;
    int most = 0;
    for (int threads = largest / device::LANES * device::LANES; threads > 0; threads -= device::LANES) {
        int filled = threads * blocks_that_fit(device, kernel, threads, shared_of(size_of, shared, threads));
        if (filled > most) {
            most = filled;
            best = threads;
        }
    }
    return best;
}

}  // namespace driver

using namespace driver;

extern "C" {

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice number) {
    return free_call([&] { *value = attribute(which, device_of(number)); });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared) {
    return call([&] {
        const Device& device = device_of(require_context()->device);
        *blocks = blocks_that_fit(device, *kernel_of(*function_of(function), device), threads, shared);
    });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function, int threads,
                                                              size_t shared, unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction handle, CUoccupancyB2DSize size_of,
                                          size_t shared, int limit) {
    return call([&] {
        const Device& device = device_of(require_context()->device);
        auto kernel = kernel_of(*function_of(handle), device);
        *block = best_block(device, *kernel, size_of, shared, limit);
        size_t dynamic = shared_of(size_of, shared, *block);
        *grid = model_of(device).multiprocessors * blocks_that_fit(device, *kernel, *block, dynamic);
    });
}

}  // extern "C"
