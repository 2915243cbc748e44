// Launches of kernels as tasks, for streams and for graphs.
#pragma once
#include "work.h"

namespace driver {

// The task that runs a kernel; Refusal where the device cannot run it so.
Task kernel_task(const std::shared_ptr<Function>& function, device::Shape grid, device::Shape block,
                 unsigned shared_bytes, void** arguments, void** extra);
// The same, as a node of a graph describes it.
Task kernel_task(const CUDA_KERNEL_NODE_PARAMS& given);

}  // namespace driver
