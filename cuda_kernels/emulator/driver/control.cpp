// What Python asks of this library besides CUDA's calls: settings, faults, counters, reports (emulator_...).
//
// Counters and reports are JSON, the rest plain text. A text lives until the next call of the same function.
#include <iomanip>
#include <sstream>

#include "modules.h"
#include "work.h"

namespace driver {

using device::Counters;
using device::Kernel;
using device::options;

static std::string quoted(const std::string& text) {
    std::ostringstream out;
    out << '"';
    for (char letter : text) {
        auto code = static_cast<unsigned char>(letter);
        if (letter == '"' || letter == '\\') {
            out << '\\' << letter;
        } else if (code < 0x20) {
            out << "\\u" << std::hex << std::setw(4) << std::setfill('0') << int(code) << std::dec;
        } else {
            out << letter;
        }
    }
    out << '"';
    return out.str();
}

// Fields of a JSON object.
class Fields {
  public:
    template <class T>
    Fields& number(const char* name, T value) {
        begin(name);
        text_ << std::setprecision(9) << value;
        return *this;
    }

    Fields& text(const char* name, const std::string& value) {
        begin(name);
        text_ << quoted(value);
        return *this;
    }

    std::string object() const { return "{" + text_.str() + "}"; }

  private:
    void begin(const char* name) {
        text_ << (empty_ ? "" : ", ") << quoted(name) << ": ";
        empty_ = false;
    }

    std::ostringstream text_;
    bool empty_ = true;
};

static std::string list_of(const std::vector<std::string>& objects) {
    std::string text = "[";
    for (const std::string& object : objects) {
        text += text.size() == 1 ? "\n" : ",\n";
        text += object;
    }
    return text + "\n]";
}

static std::string counters_of(const Kernel& kernel) {
    const Counters& c = kernel.counters;
    Fields fields;
    fields.text("kernel", kernel.name);
    fields.number("registers", kernel.registers).number("shared", kernel.shared_bytes);
    fields.number("local", kernel.local_bytes);
    fields.number("launches", c.launches).number("blocks", c.blocks);
    fields.number("warp_instructions", c.warp_instructions).number("thread_instructions", c.thread_instructions);
    fields.number("divergent_branches", c.divergent_branches);
    fields.number("barriers", c.barriers).number("atomics", c.atomics);
    fields.number("global_loads", c.global_loads).number("global_load_sectors", c.global_load_sectors);
    fields.number("global_load_bytes", c.global_load_bytes);
    fields.number("global_stores", c.global_stores).number("global_store_sectors", c.global_store_sectors);
    fields.number("global_store_bytes", c.global_store_bytes);
    fields.number("shared_accesses", c.shared_accesses).number("shared_wavefronts", c.shared_wavefronts);
    fields.number("shared_ideal", c.shared_ideal).number("seconds", c.seconds);
    return fields.object();
}

static std::string every_counter() {
    std::vector<std::string> objects;
    for (const auto& kernel : launched_kernels()) {
        objects.push_back(counters_of(*kernel));
    }
    return list_of(objects);
}

static std::string every_report() {
    std::vector<std::string> objects;
    for (const Unordered& one : unordered_work()) {
        Fields fields;
        fields.text("first", one.first).text("first_stream", one.first_stream);
        fields.text("second", one.second).text("second_stream", one.second_stream);
        fields.number("address", one.address).number("bytes", one.bytes);
        fields.text("allocation", one.allocation);
        objects.push_back(fields.object());
    }
    return list_of(objects);
}

}  // namespace driver

using namespace driver;

extern "C" {

// Before cuInit: which devices there are, as major and minor of each one's compute capability. Returns 0, or 1 where it
// is too late.
int emulator_devices(const int* capabilities, int count) {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    if (state().initialized) {
        return 1;
    }
    state().targets.clear();
    for (int n = 0; n < count; n++) {
        state().targets.push_back({capabilities[2 * n], capabilities[2 * n + 1]});
    }
    return 0;
}

// Sets an option by its name; all work is done before. Returns 0, or 1 for a name that there is not.
int emulator_set(const char* name, unsigned long long value) {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    wait_for_all(nullptr);
    device::Options& o = options();
    const std::string wanted = name;
    if (wanted == "deferred") o.deferred = value;
    else if (wanted == "backward") o.backward = value;
    else if (wanted == "contract") o.contract = value;
    else if (wanted == "perturb") o.perturb = int(value);
    else if (wanted == "uninitialised") o.uninitialised = value;
    else if (wanted == "longest") o.longest = value;
    else return 1;
    return 0;
}

// What went wrong in the last kernel, copy or fill that failed, in whatever context; "" for nothing.
const char* emulator_fault() {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    static std::string text;
    text = state().fault;
    return text.c_str();
}

// The last refusal of a call in this thread, as "CUDA_ERROR_INVALID_VALUE: sentence"; "" for none.
const char* emulator_refusal() {
    static thread_local std::string text;
    const Refusal& refusal = last_refusal();
    const char* name = refusal.code == CUDA_SUCCESS ? nullptr : name_of_error(refusal.code);
    text = name ? std::string(name) + ": " + refusal.sentence : "";
    return text.c_str();
}

// Lets faults call the allocation that an address lies in by a name.
void emulator_label(uint64_t address, const char* text) {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    device::heap().label(address, text);
}

// Forgets the faults of all contexts, and the work that was not done.
void emulator_reset() {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    for (const auto& context : state().contexts.all()) {
        context->broken = CUDA_SUCCESS;
        context->fault.clear();
    }
    state().fault.clear();
    forget_work();
}

// Tells the order of work that somebody else uses memory in a stream, as an operation of a library that does its work
// without this driver. Returns a code, as a call of the driver does.
CUresult emulator_use(CUstream handle, const char* label, CUdeviceptr address, size_t size, int written) {
    return call([&] {
        Task task;
        task.label = label;
        task.accesses = {{address, address + size, written != 0}};
        enqueue(stream_of(handle), task);
    });
}

// How many pieces of work nobody waited for yet.
size_t emulator_pending() {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    return pending_work();
}

// One object for every kernel that was launched.
const char* emulator_counters() {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    static std::string text;
    text = every_counter();
    return text.c_str();
}

// Forgets all counts.
void emulator_forget_counters() {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    for (const auto& kernel : launched_kernels()) {
        kernel->counters = {};
    }
    launched_kernels().clear();
}

// One object for every two pieces of work that use the same bytes in no order.
const char* emulator_unordered() {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    static std::string text;
    text = every_report();
    return text.c_str();
}

void emulator_forget_unordered() {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    forget_unordered_work();
}

// Live allocations of all devices, pinned memory and variables of modules included: what a leak shows in.
size_t emulator_allocations() {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    return state().allocations.size();
}

}  // extern "C"
