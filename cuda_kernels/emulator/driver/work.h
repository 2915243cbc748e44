// Work in streams: what waits for what, when it is done, and which memory it touches.
//
// Work is done at once (eager), or when somebody waits for it (deferred): then a missing dependence gives wrong bits.
// In both cases every piece of work has a clock, a number for each lane that says how much of that lane is finished
// before it starts. A stream is a lane; so is a branch of a graph. Two pieces of work are in order if the clock of one
// reaches the other. Where two touch the same bytes, one of them writes, and they are in no order, a report says so:
// work was used before its stream finished. That holds for eager work too: a GPU would have done both at once.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "state.h"

namespace driver {

using Clock = std::map<uint64_t, uint64_t>;  // lane -> how many pieces of its work are finished

// Bytes that a piece of work reads or writes.
struct Access {
    uint64_t begin;
    uint64_t end;
    bool written;
};

// Arguments of a kernel, as graphs show and change them.
struct KernelLaunch {
    std::shared_ptr<device::Kernel> kernel;
    device::Shape grid;
    device::Shape block;
    unsigned shared_bytes;
    std::vector<uint8_t> parameters;
};

// Something to do, in a stream or as a node of a graph. `run` may be called several times, by launches of a graph.
struct Task {
    std::string label;  // as a report calls it
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    std::function<void()> run;  // throws device::Fault; empty: nothing to do
    std::vector<Access> accesses;          // those of a kernel are known when it has run
    bool immediate = false;                // done before the call returns, deferred or not
    std::shared_ptr<KernelLaunch> launch;  // of a kernel
};

// A task that was put into a stream.
struct Work {
    Task task;
    std::string stream;  // its name
    std::shared_ptr<Context> context;
    std::vector<Step> before;
    uint64_t lane = 0;
    uint64_t number = 0;  // in its lane
    Clock clock;
    bool done = false;
    int asked = 0;  // how often somebody asked whether it is done
};

// --- lanes --------------------------------------------------------------------------------------------

// A lane that no other stream uses.
uint64_t take_lane();
// Gives the lane of a destroyed stream back; it is used again once the host knows that its last work is finished.
void give_back_lane(uint64_t lane, const Step& last, bool blocking);

// --- doing work ---------------------------------------------------------------------------------------

// Puts a task into a stream, or into the graph that the stream records.
void enqueue(const std::shared_ptr<Stream>& stream, Task task);
// Puts a task behind given work, in a lane of the stream; `enqueue` without the stream's own order. For graphs.
Step enqueue_after(const std::shared_ptr<Stream>& stream, uint64_t lane, Task task, std::vector<Step> before);
// The work that new work of a stream must wait for: its own last, and that of streams which it waits for implicitly.
std::vector<Step> predecessors_of(const std::shared_ptr<Stream>& stream);

// Does a piece of work, after everything that it waits for.
void finish(const Step& step);
// The same, and the host knows from then on that it is finished: later work comes after it.
void wait_for(const Step& step);
// Waits for all work of a context, null for every context.
void wait_for_all(const std::shared_ptr<Context>& context);
// Waits for all work of a device's contexts.
void wait_for_device(int device);
// Whether a piece of work is done. Deferred work that is asked about very often is done, or a loop would never end.
bool is_done(const Step& step);
// How many pieces of work nobody has waited for.
size_t pending_work();
// Forgets all that is not done, and all accesses.
void forget_work();

// --- order --------------------------------------------------------------------------------------------

// Enters an access of a piece of work; reports it where other work uses the same bytes in no order with it.
void enter_access(const Step& step, const Access& access);
// Forgets the accesses of an allocation that is freed.
void forget_accesses(uint64_t allocation);

// Two pieces of work that use the same bytes, in no order.
struct Unordered {
    std::string first;
    std::string first_stream;
    std::string second;
    std::string second_stream;
    uint64_t address;  // of the first byte that both use
    uint64_t bytes;
    std::string allocation;
};

const std::vector<Unordered>& unordered_work();
void forget_unordered_work();

}  // namespace driver
