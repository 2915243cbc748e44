// Work in streams: doing it in order, eager or deferred, and finding pieces that are in no order.
#include "work.h"

#include <algorithm>
#include <cstdio>

#include "graphs.h"

namespace driver {

using device::Fault;
using device::heap;
using device::options;

// --- what is kept -------------------------------------------------------------------------------------

namespace {

// An access of a piece of work that later work is compared with.
struct Entry {
    Step step;
    Access access;
};

// The lane of a stream that was destroyed, whose work goes on.
struct Returned {
    uint64_t lane;
    Step last;
    bool blocking;
};

// After how many questions deferred work is done without anybody waiting for it.
constexpr int PATIENCE = 100;
// How many reports are kept, and how many accesses of one allocation.
constexpr size_t LARGEST_REPORT = 1000;
constexpr size_t LARGEST_HISTORY = 256;

// Everything that is remembered of work. Never destroyed: threads and finalizers may end later than statics.
struct Ledger {
    std::map<uint64_t, uint64_t> given;  // lane -> how many pieces of work it had
    std::vector<Returned> returned_lanes;
    uint64_t lanes_made = 0;
    Clock host_clock;  // what the host knows to be finished
    std::vector<Step> pending;
    std::map<uint64_t, std::vector<Entry>> histories;  // begin of an allocation -> its accesses
    std::vector<Unordered> reports;
};

Ledger& ledger() {
    static auto* it = new Ledger;
    return *it;
}

}  // namespace

// --- clocks and lanes ---------------------------------------------------------------------------------

static void advance(Clock& clock, const Clock& other) {
    for (const auto& [lane, number] : other) {
        uint64_t& mine = clock[lane];
        mine = std::max(mine, number);
    }
}

static bool reaches(const Clock& clock, const Work& work) {
    auto found = clock.find(work.lane);
    return found != clock.end() && found->second >= work.number;
}

static bool in_order(const Work& one, const Work& other) {
    return reaches(one.clock, other) || reaches(other.clock, one);
}

static bool known_to_host(const Work& work) { return reaches(ledger().host_clock, work); }

uint64_t take_lane() {
    for (size_t n = 0; n < ledger().returned_lanes.size(); n++) {
        Returned returned = ledger().returned_lanes[n];
        if (!returned.last || known_to_host(*returned.last)) {
            ledger().returned_lanes.erase(ledger().returned_lanes.begin() + n);
            return returned.lane;
        }
    }
    ledger().lanes_made += 1;
    return ledger().lanes_made;
}

void give_back_lane(uint64_t lane, const Step& last, bool blocking) {
    ledger().returned_lanes.push_back({lane, last, blocking});
}

// --- reports ------------------------------------------------------------------------------------------

static bool overlap(const Access& one, const Access& other) { return one.begin < other.end && other.begin < one.end; }

static bool is_known(const Unordered& report) {
    return std::any_of(ledger().reports.begin(), ledger().reports.end(), [&](const Unordered& one) {
        return one.first == report.first && one.second == report.second && one.first_stream == report.first_stream &&
               one.second_stream == report.second_stream && one.allocation == report.allocation;
    });
}

static void report_unordered(const Entry& earlier, const Step& step, const Access& access) {
    Unordered report;
    report.first = earlier.step->task.label;
    report.first_stream = earlier.step->stream;
    report.second = step->task.label;
    report.second_stream = step->stream;
    report.address = std::max(earlier.access.begin, access.begin);
    report.bytes = std::min(earlier.access.end, access.end) - report.address;
    report.allocation = heap().describe(report.address, report.bytes);
    if (ledger().reports.size() >= LARGEST_REPORT || is_known(report)) {
        return;
    }
    std::fprintf(stderr, "software GPU: unordered work: %s in %s and %s in %s use %s, with no event or wait between\n",
                 report.first.c_str(), report.first_stream.c_str(), report.second.c_str(),
                 report.second_stream.c_str(), report.allocation.c_str());
    ledger().reports.push_back(report);
}

// Drops what no later work can be in disorder with: the host waited for it, and nothing older is still to be done.
static void shorten(std::vector<Entry>& history) {
    if (!ledger().pending.empty() && history.size() < LARGEST_HISTORY) {
        return;
    }
    std::erase_if(history, [](const Entry& entry) { return known_to_host(*entry.step); });
    if (history.size() >= LARGEST_HISTORY) {
        history.erase(history.begin(), history.begin() + history.size() / 2);
    }
}

void enter_access(const Step& step, const Access& access) {
    const device::Heap::Span* span = heap().find(access.begin);
    if (!span || access.begin >= access.end) {
        return;
    }
    auto& history = ledger().histories[span->begin];
    shorten(history);
    bool repeated = false;
    for (Entry& entry : history) {
        const Work& other = *entry.step;
        if (&other == step.get()) {
            continue;
        }
        bool conflict = overlap(entry.access, access) && (entry.access.written || access.written);
        if (conflict && !in_order(other, *step)) {
            report_unordered(entry, step, access);
        }
        bool same = entry.access.begin == access.begin && entry.access.end == access.end;
        if (same && entry.access.written == access.written && other.lane == step->lane && other.number < step->number) {
            entry.step = step;  // the later one of a lane stands for both
            repeated = true;
        }
    }
    if (!repeated) {
        history.push_back({step, access});
    }
}

void forget_accesses(uint64_t allocation) { ledger().histories.erase(allocation); }

const std::vector<Unordered>& unordered_work() { return ledger().reports; }

void forget_unordered_work() { ledger().reports.clear(); }

// --- doing work ---------------------------------------------------------------------------------------

static void break_context(Context& context, CUresult code, const std::string& sentence) {
    context.broken = code;
    context.fault = sentence;
    state().fault = sentence;
}

// Runs the task of one piece of work, whose predecessors are done; after a fault nothing runs any more.
static void run_task(const Step& step) {
    step->done = true;
    step->before.clear();
    Context& context = *step->context;
    if (context.broken != CUDA_SUCCESS || !step->task.run) {
        step->task.run = nullptr;
        return;
    }
    try {
        heap().device = context.device;
        step->task.run();
        if (step->task.launch) {
            for (const device::TouchedRange& range : device::touched_ranges()) {
                enter_access(step, {range.begin, range.end, range.written});
            }
        }
    } catch (const Fault& fault) {
        break_context(context, code_of(fault), fault.what());
    } catch (const std::exception& error) {  // work is also done where nobody waits for a code
        break_context(context, CUDA_ERROR_LAUNCH_FAILED, "the software GPU failed: " + std::string(error.what()));
    }
    step->task.run = nullptr;
}

void finish(const Step& step) {
    std::vector<Step> stack{step};
    while (!stack.empty()) {
        Step one = stack.back();
        if (!one || one->done) {
            stack.pop_back();
            continue;
        }
        size_t size = stack.size();
        for (const Step& earlier : one->before) {
            if (earlier && !earlier->done) {
                stack.push_back(earlier);
            }
        }
        if (stack.size() == size) {
            stack.pop_back();
            run_task(one);
        }
    }
}

void wait_for(const Step& step) {
    if (!step) {
        return;
    }
    finish(step);
    advance(ledger().host_clock, step->clock);
}

static void drop_done() {
    std::erase_if(ledger().pending, [](const Step& step) { return step->done; });
}

void wait_for_all(const std::shared_ptr<Context>& context) {
    std::vector<Step> steps = ledger().pending;
    if (options().backward) {
        std::reverse(steps.begin(), steps.end());  // what is in no order may as well run so
    }
    for (const Step& step : steps) {
        if (!context || step->context == context) {
            wait_for(step);
        }
    }
    for (const auto& one : state().contexts.all()) {
        if (!context || one == context) {
            wait_for(one->legacy->last);
        }
    }
    for (const auto& stream : state().streams.all()) {
        if (!context || stream->context == context) {
            wait_for(stream->last);
        }
    }
    for (const Returned& returned : ledger().returned_lanes) {
        if (returned.last && (!context || returned.last->context == context)) {
            wait_for(returned.last);
        }
    }
    drop_done();
}

void wait_for_device(int device) {
    for (const auto& context : state().contexts.all()) {
        if (context->device == device) {
            wait_for_all(context);
        }
    }
}

bool is_done(const Step& step) {
    if (!step) {
        return true;
    }
    step->asked += 1;
    if (!step->done && step->asked > PATIENCE) {
        finish(step);
    }
    if (step->done) {
        wait_for(step);  // the host knows it now
    }
    return step->done;
}

size_t pending_work() {
    const auto& pending = ledger().pending;
    return std::count_if(pending.begin(), pending.end(), [](const Step& step) { return !step->done; });
}

void forget_work() {
    for (const Step& step : ledger().pending) {
        step->done = true;
        step->before.clear();
        step->task.run = nullptr;
    }
    ledger().pending.clear();
    ledger().histories.clear();
}

// --- putting work into streams ------------------------------------------------------------------------

static bool is_legacy(const Stream& stream) { return stream.context->legacy.get() == &stream; }

std::vector<Step> predecessors_of(const std::shared_ptr<Stream>& stream) {
    std::vector<Step> before{stream->last};
    if (is_legacy(*stream)) {
        for (const auto& other : state().streams.all()) {
            if (other->context == stream->context && other->blocking) {
                before.push_back(other->last);
            }
        }
        for (const Returned& returned : ledger().returned_lanes) {
            bool same = returned.last && returned.last->context == stream->context;
            if (same && returned.blocking) {
                before.push_back(returned.last);
            }
        }
    } else if (stream->blocking) {
        before.push_back(stream->context->legacy->last);
    }
    std::erase(before, nullptr);
    return before;
}

Step enqueue_after(const std::shared_ptr<Stream>& stream, uint64_t lane, Task task, std::vector<Step> before) {
    auto step = std::make_shared<Work>();
    step->stream = stream->name;
    step->context = stream->context;
    step->lane = lane;
    ledger().given[lane] += 1;
    step->number = ledger().given[lane];
    step->clock = ledger().host_clock;
    for (const Step& earlier : before) {
        advance(step->clock, earlier->clock);
    }
    step->clock[lane] = step->number;
    step->before = std::move(before);
    std::erase_if(step->before, [](const Step& earlier) { return earlier->done; });
    step->task = std::move(task);
    for (const Access& access : step->task.accesses) {
        enter_access(step, access);
    }
    if (options().deferred && !step->task.immediate) {
        drop_done();
        ledger().pending.push_back(step);
    } else {
        finish(step);
    }
    return step;
}

void enqueue(const std::shared_ptr<Stream>& stream, Task task) {
    if (stream->capture) {
        capture_task(stream, std::move(task));
        return;
    }
    require_no_implicit_capture(stream);
    bool immediate = task.immediate;
    stream->last = enqueue_after(stream, stream->lane, std::move(task), predecessors_of(stream));
    if (immediate) {
        wait_for(stream->last);
    }
    require_unbroken(*stream->context);
}

}  // namespace driver
