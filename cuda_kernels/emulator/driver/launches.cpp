// Launches: limits, arguments, and running a kernel on its device (cuLaunchKernel...).
#include "launches.h"

#include <algorithm>
#include <cstring>

#include "attributes.h"
#include "memory.h"
#include "modules.h"

namespace driver {

using device::heap;
using device::Kernel;
using device::Shape;

// --- limits -------------------------------------------------------------------------------------------

static void require_between(uint64_t value, uint64_t low, uint64_t high, const std::string& name) {
    if (value < low || value > high) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, name + " must be from " + std::to_string(low) + " to " +
                                                    std::to_string(high) + "; got " + std::to_string(value)};
    }
}

static void check_shapes(Shape grid, Shape block) {
    require_between(grid.x, 1, LARGEST_GRID_X, "gridDimX");
    require_between(grid.y, 1, LARGEST_GRID_YZ, "gridDimY");
    require_between(grid.z, 1, LARGEST_GRID_YZ, "gridDimZ");
    require_between(block.x, 1, THREADS_OF_BLOCK, "blockDimX");
    require_between(block.y, 1, THREADS_OF_BLOCK, "blockDimY");
    require_between(block.z, 1, LARGEST_BLOCK_Z, "blockDimZ");
    uint64_t threads = uint64_t(block.x) * block.y * block.z;
    require_between(threads, 1, THREADS_OF_BLOCK, "the number of threads of a block");
}

static bool same_shape(Shape one, Shape other) {
    return one.x == other.x && one.y == other.y && one.z == other.z;
}

static std::string text_of(Shape shape) {
    return "(" + std::to_string(shape.x) + ", " + std::to_string(shape.y) + ", " + std::to_string(shape.z) + ")";
}

static void check_resources(const Function& function, const Kernel& kernel, const Device& device, Shape block,
                            unsigned shared_bytes) {
    require_between(uint64_t(kernel.shared_bytes) + shared_bytes, 0, largest_shared_memory(device),
                    "shared memory of a block of " + kernel.name.substr(0, 120));
    require_between(shared_bytes, 0, largest_dynamic_shared_memory(function, kernel), "sharedMemBytes");
    int threads = int(block.x * block.y * block.z);
    if (kernel.required.x && !same_shape(block, kernel.required)) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, "a block must be " + text_of(kernel.required) +
                                                    ", as the kernel says by .reqntid; got " + text_of(block)};
    }
    if (kernel.most_threads && threads > kernel.most_threads) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE,
                      "a block must have at most " + std::to_string(kernel.most_threads) +
                          " threads, as the kernel says by .maxntid; got " + std::to_string(threads)};
    }
    if (threads > largest_block(kernel)) {
        throw Refusal{CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                      "a block must have at most " + std::to_string(largest_block(kernel)) + " threads with " +
                          std::to_string(kernel.registers) + " registers a thread; got " + std::to_string(threads)};
    }
}

// --- arguments ----------------------------------------------------------------------------------------

static void take_from_buffer(std::vector<uint8_t>& parameters, const Kernel& kernel, void** extra) {
    for (void** entry = extra; *entry != CU_LAUNCH_PARAM_END; entry += 2) {
        if (entry[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
            std::memcpy(parameters.data(), entry[1], kernel.parameter_bytes);
        }
    }
}

static std::vector<uint8_t> take_arguments(const Kernel& kernel, void** arguments, void** extra) {
    constexpr size_t slack = 8;  // a wide read of the last parameter stays inside
    std::vector<uint8_t> parameters(kernel.parameter_bytes + slack);
    if (kernel.parameters.empty()) {
        return parameters;
    }
    if (!arguments) {
        require_output(extra, "kernelParams or extra");
        take_from_buffer(parameters, kernel, extra);
        return parameters;
    }
    for (size_t n = 0; n < kernel.parameters.size(); n++) {
        const device::Parameter& parameter = kernel.parameters[n];
        if (!arguments[n]) {
            throw Refusal{CUDA_ERROR_INVALID_VALUE, "kernelParams[" + std::to_string(n) + "] must point to parameter " +
                                                        parameter.name + "; got a null pointer"};
        }
        std::memcpy(parameters.data() + parameter.offset, arguments[n], parameter.size);
    }
    return parameters;
}

// --- running ------------------------------------------------------------------------------------------

namespace {

// Opens the memory of other devices, whose access a context enabled, while one of its kernels runs.
class OpenPeers {
  public:
    explicit OpenPeers(const Context& context) {
        if (context.peers.empty()) {
            return;
        }
        for (const auto& [address, allocation] : state().allocations) {
            if (context.peers.count(allocation.device)) {
                open(address);
            }
        }
    }

    ~OpenPeers() {
        for (const auto& [span, device] : opened_) {
            span->device = device;
        }
    }

  private:
    void open(uint64_t address) {
        auto* span = const_cast<device::Heap::Span*>(heap().find(address));
        if (span && span->device >= 0) {
            opened_.emplace_back(span, span->device);
            span->device = -1;
        }
    }

    std::vector<std::pair<device::Heap::Span*, int>> opened_;
};

}  // namespace

static void remember_launched(const std::shared_ptr<Kernel>& kernel) {
    auto& known = launched_kernels();
    if (std::find(known.begin(), known.end(), kernel) == known.end()) {
        known.push_back(kernel);
    }
}

static void run_kernel(const KernelLaunch& launch, const Context& context) {
    OpenPeers opened(context);
    heap().device = context.device;
    remember_launched(launch.kernel);
    device::run(*launch.kernel, launch.grid, launch.block, launch.shared_bytes, launch.parameters);
}

Task kernel_task(const std::shared_ptr<Function>& function, Shape grid, Shape block, unsigned shared_bytes,
                 void** arguments, void** extra) {
    check_shapes(grid, block);
    auto context = require_context();
    const Device& device = device_of(context->device);
    auto kernel = kernel_of(*function, device);
    check_resources(*function, *kernel, device, block, shared_bytes);
    auto launch = std::make_shared<KernelLaunch>();
    launch->kernel = kernel;
    launch->grid = grid;
    launch->block = block;
    launch->shared_bytes = shared_bytes;
    launch->parameters = take_arguments(*kernel, arguments, extra);
    Task task;
    task.label = "kernel " + kernel->name.substr(0, 120);
    task.type = CU_GRAPH_NODE_TYPE_KERNEL;
    task.launch = launch;
    task.run = [launch, context] { run_kernel(*launch, *context); };
    return task;
}

Task kernel_task(const CUDA_KERNEL_NODE_PARAMS& given) {
    auto function = given.func ? function_of(given.func) : function_of(given.kern);
    Shape grid{given.gridDimX, given.gridDimY, given.gridDimZ};
    Shape block{given.blockDimX, given.blockDimY, given.blockDimZ};
    return kernel_task(function, grid, block, given.sharedMemBytes, given.kernelParams, given.extra);
}

static void launch(CUfunction function, Shape grid, Shape block, unsigned shared_bytes, CUstream handle,
                   void** arguments, void** extra) {
    auto stream = stream_of(handle);
    auto context = require_context();
    if (stream->context != context) {
        throw Refusal{CUDA_ERROR_INVALID_HANDLE, "hStream must be of the current context, that of device " +
                                                     std::to_string(context->device) + "; got " + stream->name};
    }
    enqueue(stream, kernel_task(function_of(function), grid, block, shared_bytes, arguments, extra));
}

static void check_launch_attributes(const CUlaunchConfig& config) {
    for (unsigned n = 0; n < config.numAttrs; n++) {
        auto which = config.attrs[n].id;
        bool cooperative = which == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && config.attrs[n].value.cooperative;
        if (cooperative || which == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "cuLaunchKernelEx: the software GPU runs no clusters and nothing "
                                                    "cooperative; got launch attribute " + std::to_string(int(which))};
        }
    }
}

}  // namespace driver

using namespace driver;

extern "C" {

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** arguments,
                        void** extra) {
    return call([&] {
        Shape grid{grid_x, grid_y, grid_z};
        Shape block{block_x, block_y, block_z};
        launch(function, grid, block, shared_bytes, stream, arguments, extra);
    });
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
    return call([&] {
        check_launch_attributes(*config);
        Shape grid{config->gridDimX, config->gridDimY, config->gridDimZ};
        Shape block{config->blockDimX, config->blockDimY, config->blockDimZ};
        launch(function, grid, block, config->sharedMemBytes, config->hStream, arguments, extra);
    });
}

}  // extern "C"
