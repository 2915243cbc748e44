// Handles, the state of the driver, and the current context of a thread.
#include "state.h"

#include <algorithm>
#include <sstream>

#include "graphs.h"
#include "modules.h"
#include "work.h"

namespace driver {

std::string hexadecimal(uint64_t number) {
    std::ostringstream text;
    text << "0x" << std::hex << number;
    return text.str();
}

std::string hexadecimal(const void* pointer) { return hexadecimal(reinterpret_cast<uint64_t>(pointer)); }

// --- handles ------------------------------------------------------------------------------------------

const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::context: return "context";
        case Kind::stream: return "stream";
        case Kind::event: return "event";
        case Kind::pool: return "memory pool";
        case Kind::library: return "module or library";
        case Kind::function: return "function or kernel";
        case Kind::graph: return "graph";
        case Kind::node: return "graph node";
        case Kind::executable: return "executable graph";
        case Kind::object: return "user object";
        case Kind::none: break;
    }
    return "object";
}

Kind kind_of(uint64_t handle) {
    constexpr uint64_t kinds = 15;
    uint64_t upper = handle >> KIND_SHIFT;
    if ((upper & ~kinds) != HANDLE_MARK >> KIND_SHIFT) {
        return Kind::none;
    }
    uint64_t number = upper & kinds;
    return number <= uint64_t(Kind::object) ? Kind(number) : Kind::none;
}

std::string about_wrong_handle(Kind wanted, uint64_t handle, uint64_t given_out) {
    std::string name = name_of(wanted);
    if (!handle) {
        return name + " must be a handle; got 0";
    }
    Kind kind = kind_of(handle);
    uint64_t number = handle & ((uint64_t(1) << KIND_SHIFT) - 1);
    if (kind == wanted && number <= given_out) {
        return name + " " + hexadecimal(handle) + " was destroyed; a handle must not be used after that";
    }
    if (kind != Kind::none && kind != wanted) {
        return "a " + name + " was expected; got " + hexadecimal(handle) + ", a handle of kind: " + name_of(kind);
    }
    return name + " must be a handle that this driver gave out; got " + hexadecimal(handle);
}

// --- state --------------------------------------------------------------------------------------------

State& state() {
    static State* it = new State;  // never destroyed: threads and finalizers may end later than statics
    return *it;
}

std::recursive_mutex& driver_lock() {
    static auto* it = new std::recursive_mutex;
    return *it;
}

static thread_local Refusal newest_refusal = {CUDA_SUCCESS, ""};

CUresult refused(const Refusal& refusal) {
    newest_refusal = refusal;
    return refusal.code;
}

const Refusal& last_refusal() { return newest_refusal; }

std::string sentence_of(CUresult code) {
    return code == newest_refusal.code ? newest_refusal.sentence : "";
}

CUresult code_of(const device::Fault& fault) {
    switch (fault.kind) {
        case device::FaultKind::address: return CUDA_ERROR_ILLEGAL_ADDRESS;
        case device::FaultKind::misaligned: return CUDA_ERROR_MISALIGNED_ADDRESS;
        case device::FaultKind::text: return CUDA_ERROR_INVALID_PTX;
        case device::FaultKind::execution: break;
    }
    return CUDA_ERROR_LAUNCH_FAILED;
}

void require_initialized() {
    if (!state().initialized) {
        throw Refusal{CUDA_ERROR_NOT_INITIALIZED, "cuInit must be called before everything else"};
    }
}

void require_unbroken(const Context& context) {
    if (context.broken != CUDA_SUCCESS) {
        throw Refusal{context.broken, context.fault};
    }
}

void require_unbroken_current() {
    bool alive = current_handle() && state().contexts.is_alive(current_handle());
    if (alive) {
        require_unbroken(*current_context());
    }
}

void require_output(const void* pointer, const char* name) {
    if (!pointer) {
        throw Refusal{CUDA_ERROR_INVALID_VALUE, std::string(name) + " must point to memory; got a null pointer"};
    }
}

// --- contexts -----------------------------------------------------------------------------------------

// Handles and not contexts: what is current may have been destroyed, which a use of it must find out.
static std::vector<CUcontext>& current_handles() {
    static thread_local std::vector<CUcontext> handles(1, nullptr);
    return handles;
}

CUcontext current_handle() { return current_handles().back(); }

void set_current(CUcontext handle) { current_handles().back() = handle; }

void push_current(CUcontext handle) { current_handles().push_back(handle); }

CUcontext pop_current() {
    auto& handles = current_handles();
    CUcontext popped = handles.back();
    handles.pop_back();
    if (handles.empty()) {
        handles.push_back(nullptr);
    }
    return popped;
}

std::shared_ptr<Context> context_of(CUcontext handle) {
    bool gone = kind_of(reinterpret_cast<uint64_t>(handle)) == Kind::context;
    return state().contexts.find(handle, gone ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT);
}

std::shared_ptr<Context> current_context() {
    CUcontext handle = current_handle();
    return handle ? context_of(handle) : nullptr;
}

std::shared_ptr<Context> require_context() {
    auto context = current_context();
    if (!context) {
        throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "this thread has no current context: call cuCtxSetCurrent first"};
    }
    return context;
}

std::shared_ptr<Context> context_or_current(CUcontext handle) {
    return handle ? context_of(handle) : require_context();
}

Device& device_of(CUdevice number) {
    auto& devices = state().devices;
    if (number < 0 || number >= int(devices.size())) {
        throw Refusal{CUDA_ERROR_INVALID_DEVICE, "device must be from 0 to " + std::to_string(int(devices.size()) - 1) +
                                                     "; got " + std::to_string(number)};
    }
    return devices[number];
}

// --- streams and events -------------------------------------------------------------------------------

std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context, bool blocking, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->context = context;
    stream->blocking = blocking;
    stream->priority = priority;
    stream->lane = take_lane();
    state().streams.add(stream);
    stream->name = "stream " + hexadecimal(stream->handle) + " of device " + std::to_string(context->device);
    return stream;
}

// The default stream of this thread, in a context.
static std::shared_ptr<Stream> stream_of_thread(const std::shared_ptr<Context>& context) {
    static thread_local std::map<uint64_t, std::shared_ptr<Stream>> streams;
    auto& stream = streams[context->handle];
    if (!stream || !state().streams.is_alive(as_handle<CUstream>(stream))) {  // none yet, or gone with a reset
        stream = make_stream(context, true, 0);
        stream->name = "a thread's default " + stream->name;
    }
    return stream;
}

std::shared_ptr<Stream> stream_of(CUstream handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) {
        return require_context()->legacy;
    }
    if (handle == CU_STREAM_PER_THREAD) {
        return stream_of_thread(require_context());
    }
    auto stream = state().streams.find(handle);
    require_unbroken(*context_of(as_handle<CUcontext>(stream->context)));
    return stream;
}

std::shared_ptr<Event> event_of(CUevent handle) {
    auto event = state().events.find(handle);
    require_unbroken(*context_of(as_handle<CUcontext>(event->context)));
    return event;
}

}  // namespace driver
