// The software device as its driver sees it: settings, memory, code, launches. No other header is for the driver.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "counters.h"
#include "fault.h"
#include "kernel.h"
#include "memory.h"

namespace device {

// Each has the name of an attribute of Python's Settings.
struct Options {
    bool contract = false;       // fuse what PTX allows to be fused: mul.f32 and add.f32 without a rounding
    int perturb = 0;             // a seed; approximate instructions err within their documented bounds
    bool backward = false;       // order of blocks and of warps
    bool deferred = false;       // the driver does work when somebody waits for it, not before
    bool uninitialised = false;  // a read of bytes that nobody wrote is a fault; holds for what is allocated afterwards
    uint64_t longest = uint64_t(1) << 28;  // instructions of a warp in one block; more are an endless loop
};

Options& options();

// Throws a Fault that names what it does not know.
std::shared_ptr<Module> parse(const std::string& ptx);

// What the last `run` read or wrote in global memory, merged, in the order of addresses; and forgets it.
std::vector<TouchedRange> touched_ranges();

// Throws a Fault that names the instruction, the thread and the line.
void run(Kernel& kernel, Shape grid, Shape block, unsigned dynamic_shared, const std::vector<uint8_t>& parameters);

}  // namespace device
