// What the driver remembers between calls: devices, contexts, and every handle that it gave out.
//
// A handle is a number that is never given out twice, with the kind of its object in the upper bits. So a stream, a
// context or an event that is used after it was destroyed is refused with a sentence that says so, and so is a handle
// of another kind. An entry point is the body of `call`: it throws `Refusal` where it refuses.
#pragma once
#include "cuda_interface.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "device.h"

namespace driver {

// Why a call does nothing: the code that it returns, and the sentence that cuGetErrorString adds to the code.
struct Refusal {
    CUresult code;
    std::string sentence;
};

// "0x7f0010" of a pointer or a number.
std::string hexadecimal(uint64_t number);
std::string hexadecimal(const void* pointer);

// --- handles ------------------------------------------------------------------------------------------

enum class Kind : uint8_t { none, context, stream, event, pool, library, function, graph, node, executable, object };

const char* name_of(Kind kind);

// How many bits of a handle lie below its kind, and what marks the handles of this driver.
constexpr int KIND_SHIFT = 36;
constexpr uint64_t HANDLE_MARK = 0x5AULL << 40;
constexpr uint64_t HANDLE_STEP = 16;

// The kind of a handle's object, Kind::none for what is no handle of this driver.
Kind kind_of(uint64_t handle);

// The sentence about a handle that is not alive: destroyed, of another kind, or never given out.
std::string about_wrong_handle(Kind wanted, uint64_t handle, uint64_t given_out);

// The live objects of one kind. T has `static constexpr Kind kind` and `uint64_t handle`.
template <class T>
class Handles {
  public:
    // Keeps an object and gives it a handle that no other object had.
    void add(const std::shared_ptr<T>& object) {
        given_out_ += 1;
        object->handle = HANDLE_MARK | uint64_t(T::kind) << KIND_SHIFT | given_out_ * HANDLE_STEP;
        live_[object->handle] = object;
    }

    // Makes an object live under the handle that it had before.
    void restore(const std::shared_ptr<T>& object) { live_[object->handle] = object; }

    // The object of a handle; Refusal where it is not alive.
    std::shared_ptr<T> find(const void* handle, CUresult otherwise = CUDA_ERROR_INVALID_HANDLE) const {
        auto number = reinterpret_cast<uint64_t>(handle);
        auto found = live_.find(number);
        if (found == live_.end()) {
            throw Refusal{otherwise, about_wrong_handle(T::kind, number, HANDLE_STEP * given_out_)};
        }
        return found->second;
    }

    bool is_alive(const void* handle) const { return live_.count(reinterpret_cast<uint64_t>(handle)) != 0; }

    // Forgets an object: whoever uses its handle from here on is refused.
    void remove(const T& object) { live_.erase(object.handle); }

    std::vector<std::shared_ptr<T>> all() const {
        std::vector<std::shared_ptr<T>> found;
        for (const auto& [handle, object] : live_) {
            found.push_back(object);
        }
        return found;
    }

  private:
    std::map<uint64_t, std::shared_ptr<T>> live_;
    uint64_t given_out_ = 0;
};

// What the C interface calls a handle, of an object; null for none.
template <class Handle, class T>
Handle as_handle(const std::shared_ptr<T>& object) {
    return object ? reinterpret_cast<Handle>(object->handle) : Handle{};
}

// --- objects ------------------------------------------------------------------------------------------

struct Work;     // work.h
struct Capture;  // graphs.h
struct Node;     // graphs.h
struct Graph;    // graphs.h
struct Executable;
struct UserObject;
struct Library;   // modules.h
struct Function;  // modules.h
struct Stream;
using Step = std::shared_ptr<Work>;

struct Context {
    static constexpr Kind kind = Kind::context;
    uint64_t handle = 0;
    int device = 0;
    bool primary = false;
    unsigned flags = 0;
    std::map<int, size_t> limits;
    std::set<int> peers;             // devices whose memory its kernels may use
    std::shared_ptr<Stream> legacy;  // the default stream, of handle 0
    CUresult broken = CUDA_SUCCESS;  // the code of a fault, which every later call on the context returns
    std::string fault;               // its sentence
};

struct Stream {
    static constexpr Kind kind = Kind::stream;
    uint64_t handle = 0;
    std::shared_ptr<Context> context;
    std::string name;      // as a report calls it
    bool blocking = true;  // whether it waits for the default stream, and that for it
    int priority = 0;
    Step last;                             // what was put into it last
    uint64_t lane = 0;                     // see work.h
    std::vector<uint64_t> branch_lanes;    // of graphs that were launched in it
    std::shared_ptr<Capture> capture;      // what records its work instead of doing it
    std::vector<std::shared_ptr<Node>> frontier;  // the nodes that the next captured work follows
};

struct Event {
    static constexpr Kind kind = Kind::event;
    uint64_t handle = 0;
    std::shared_ptr<Context> context;
    unsigned flags = 0;
    Step last;
    bool recorded = false;
    double seconds = 0;  // when it was passed, for the elapsed time
    std::shared_ptr<Capture> capture;
    std::vector<std::shared_ptr<Node>> frontier;
};

struct Pool {
    static constexpr Kind kind = Kind::pool;
    uint64_t handle = 0;
    int device = 0;
    bool is_default = false;
    size_t limit = 0;  // 0: none
    size_t used = 0;
    size_t high = 0;
    uint64_t threshold = 0;
    std::map<int, int> settings;       // attributes that only are remembered
    std::map<int, int> access;         // device -> CUmemAccess_flags
};

// Memory that a call gave out, besides what the heap knows of it.
struct Allocation {
    enum class Place { device, variable, pinned, managed, registered };
    uint64_t address = 0;
    size_t size = 0;
    int device = 0;
    Place place = Place::device;
    uint64_t number = 0;  // unique
    unsigned flags = 0;
    std::shared_ptr<Pool> pool;
    bool on_host() const { return place == Place::pinned || place == Place::registered; }
};

// What a device is: "sm_90". A letter behind the number is of code, not of a device.
struct Target {
    int major = 9;
    int minor = 0;
    int number() const { return 10 * major + minor; }
    std::string name() const { return "sm_" + std::to_string(number()); }
};

struct Device {
    int number = 0;
    Target target;
    std::shared_ptr<Context> primary;   // null while there is none: nobody retained it, or it was reset since
    uint64_t primary_handle = 0;        // of every primary context that the device has, one after another
    int retained = 0;                   // by those who have not released it; a reset does not change that
    unsigned flags = 0;
    std::shared_ptr<Pool> default_pool;
    std::shared_ptr<Pool> current_pool;
};

struct State {
    bool initialized = false;
    std::vector<Target> targets;  // of the devices that there will be
    std::vector<Device> devices;
    Handles<Context> contexts;
    Handles<Stream> streams;
    Handles<Event> events;
    Handles<Pool> pools;
    Handles<Library> libraries;
    Handles<Function> functions;
    Handles<Graph> graphs;
    Handles<Node> nodes;
    Handles<Executable> executables;
    Handles<UserObject> objects;
    std::map<uint64_t, Allocation> allocations;
    uint64_t allocations_made = 0;
    std::string fault;  // the sentence of the last fault in any context
};

State& state();

// --- calls --------------------------------------------------------------------------------------------

std::recursive_mutex& driver_lock();

// Remembers what cuGetErrorString says of a code in this thread, and returns the code.
CUresult refused(const Refusal& refusal);
// This thread's last refusal; CUDA_SUCCESS before the first.
const Refusal& last_refusal();
// Its sentence, "" where it had another code.
std::string sentence_of(CUresult code);
// "CUDA_ERROR_INVALID_VALUE", null for what is no code.
const char* name_of_error(CUresult code);
// Refusal before cuInit.
void require_initialized();
// Refusal where a kernel, a copy or a fill failed in a context.
void require_unbroken(const Context& context);
// The same of this thread's current context, where it has one.
void require_unbroken_current();

// The code of a fault in a kernel, a copy or a fill, or in code that is loaded.
CUresult code_of(const device::Fault& fault);

// Turns whatever a body throws into the code that an entry point returns.
template <class Body>
CUresult guarded(const Body& body) {
    std::lock_guard<std::recursive_mutex> locked(driver_lock());
    try {
        body();
        return CUDA_SUCCESS;
    } catch (const Refusal& refusal) {
        return refused(refusal);
    } catch (const device::Fault& fault) {
        return refused({code_of(fault), fault.what()});
    } catch (const std::bad_alloc&) {
        return refused({CUDA_ERROR_OUT_OF_MEMORY, "the host has no memory left"});
    } catch (const std::exception& error) {  // nothing may leave a C function
        return refused({CUDA_ERROR_UNKNOWN, std::string("the software GPU failed: ") + error.what()});
    }
}

// The body of an entry point that works in a context: one call at a time; refused before cuInit and after a fault.
template <class Body>
CUresult call(const Body& body) {
    return guarded([&] {
        require_initialized();
        require_unbroken_current();
        body();
        require_unbroken_current();
    });
}

// The body of an entry point that depends on no context, or chooses one.
template <class Body>
CUresult free_call(const Body& body) {
    return guarded([&] {
        require_initialized();
        body();
    });
}

// The body of an entry point that gives something back: it works after a fault too.
template <class Body>
CUresult releasing_call(const Body& body) {
    return guarded([&] {
        require_initialized();
        body();
        require_unbroken_current();
    });
}

// Refusal where a pointer that a call writes to is null.
void require_output(const void* pointer, const char* name);

// --- contexts -----------------------------------------------------------------------------------------

// The current context of this thread, null for none.
std::shared_ptr<Context> current_context();
// The same; Refusal where there is none, or where it was destroyed.
std::shared_ptr<Context> require_context();
std::shared_ptr<Context> context_of(CUcontext handle);
// A context that a call names, the current one for null.
std::shared_ptr<Context> context_or_current(CUcontext handle);
Device& device_of(CUdevice number);
void set_current(CUcontext handle);
void push_current(CUcontext handle);
CUcontext pop_current();
CUcontext current_handle();

// --- streams and events -------------------------------------------------------------------------------

// The stream of a handle: 0 and 1 are the default stream of the current context, 2 that of this thread.
std::shared_ptr<Stream> stream_of(CUstream handle);
std::shared_ptr<Event> event_of(CUevent handle);
std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context, bool blocking, int priority);

}  // namespace driver
