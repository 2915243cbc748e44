// What a kernel did, summed over its launches. It knows nothing of how the numbers come about.
#pragma once
#include <cstdint>

namespace device {

struct Counters {
    uint64_t launches = 0;
    uint64_t blocks = 0;

    uint64_t warp_instructions = 0;    // an instruction counts once for all lanes that execute it together
    uint64_t thread_instructions = 0;  // and here once for each lane
    uint64_t divergent_branches = 0;   // branches that some lanes of a warp take and others do not

    // Sectors are the aligned 32 bytes in which global memory moves; bytes are those that the lanes asked for.
    uint64_t global_loads = 0, global_load_sectors = 0, global_load_bytes = 0;
    uint64_t global_stores = 0, global_store_sectors = 0, global_store_bytes = 0;

    // Wavefronts are the passes that shared memory needs for a request; the ideal is a request without bank conflicts.
    uint64_t shared_accesses = 0, shared_wavefronts = 0, shared_ideal = 0;

    uint64_t atomics = 0;
    uint64_t barriers = 0;
    double seconds = 0;  // on the machine that interprets
};

}  // namespace device
