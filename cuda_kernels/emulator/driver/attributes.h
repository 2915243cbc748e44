// What a device of a compute capability offers.
#pragma once
#include "state.h"

namespace driver {

// Limits of every device.
constexpr int THREADS_OF_BLOCK = 1024;
constexpr int LARGEST_BLOCK_Z = 64;
constexpr int LARGEST_GRID_X = 0x7FFFFFFF;
constexpr int LARGEST_GRID_YZ = 65535;
constexpr int REGISTERS_OF_BLOCK = 65536;
constexpr int USUAL_SHARED_MEMORY = 48 * 1024;  // bytes of a block that does not ask for more

// Bytes of shared memory that a block may have at most, where it asks for more than is usual.
int largest_shared_memory(const Device& device);

}  // namespace driver
