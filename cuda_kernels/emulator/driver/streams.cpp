// Streams, events and functions of the host in streams (cuStream..., cuEvent..., cuLaunchHostFunc).
#include <chrono>

#include "graphs.h"
#include "work.h"

namespace driver {

static double seconds_now() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
}

// --- streams ------------------------------------------------------------------------------------------

static void destroy_stream(CUstream handle) {
    auto stream = state().streams.find(handle);
    if (stream->capture) {
        stream->capture->invalid = stream->name + " was destroyed";
    }
    state().streams.remove(*stream);
    give_back_lane(stream->lane, stream->last, stream->blocking);  // its work goes on
    for (uint64_t lane : stream->branch_lanes) {
        give_back_lane(lane, stream->last, stream->blocking);
    }
}

static void synchronize(const std::shared_ptr<Stream>& stream) {
    require_not_capturing(stream, "cuStreamSynchronize");
    for (const Step& step : predecessors_of(stream)) {
        bool own = step == stream->last;
        bool legacy = stream->context->legacy == stream;
        if (own || legacy) {
            wait_for(step);
        }
    }
    require_unbroken(*stream->context);
}

static bool is_finished(const std::shared_ptr<Stream>& stream) {
    require_not_capturing(stream, "cuStreamQuery");
    bool done = is_done(stream->last);
    require_unbroken(*stream->context);
    return done;
}

static Refusal not_ready(const std::string& what) {
    return {CUDA_ERROR_NOT_READY, what + " has work that is not done"};
}

// Work that does nothing but stand in the order of a stream.
static Task marker(const std::string& label) {
    Task task;
    task.label = label;
    return task;
}

// --- events -------------------------------------------------------------------------------------------

static std::shared_ptr<Event> make_event(unsigned flags) {
    auto event = std::make_shared<Event>();
    event->context = require_context();
    event->flags = flags;
    state().events.add(event);
    return event;
}

static void require_same_context(const Event& event, const Stream& stream) {
    if (event.context != stream.context) {
        throw Refusal{CUDA_ERROR_INVALID_HANDLE, "hEvent must be of the context of hStream; it is of device " +
                                                     std::to_string(event.context->device) + ", the stream of device " +
                                                     std::to_string(stream.context->device)};
    }
}

static void record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream) {
    require_same_context(*event, *stream);
    if (stream->capture) {
        event->capture = stream->capture;
        event->frontier = stream->frontier;
        return;
    }
    event->capture = nullptr;
    event->frontier.clear();
    Task task = marker("the record of an event");
    task.run = [event] { event->seconds = seconds_now(); };
    enqueue(stream, task);
    event->last = stream->last;
    event->recorded = true;
}

static void wait_in_stream(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event) {
    if (event->capture && stream->context->legacy == stream) {
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the default stream must not join a capture"};
    }
    if (stream->capture || event->capture) {
        capture_wait(stream, event);
        return;
    }
    std::vector<Step> before = predecessors_of(stream);
    if (event->last) {
        before.push_back(event->last);
    }
    stream->last = enqueue_after(stream, stream->lane, marker("the wait for an event"), before);
}

static void require_uncaptured(const Event& event, const char* call) {
    if (event.capture) {
        throw Refusal{CUDA_ERROR_CAPTURED_EVENT, std::string(call) + " must not be called on an event that a capture "
                                                                     "recorded"};
    }
}

static void require_times(const Event& start, const Event& end) {
    for (const Event* event : {&start, &end}) {
        if (event->flags & CU_EVENT_DISABLE_TIMING || !event->recorded) {
            throw Refusal{CUDA_ERROR_INVALID_HANDLE, "both events must be recorded, and made without "
                                                     "CU_EVENT_DISABLE_TIMING, for a time between them"};
        }
        if (!event->last->done) {
            throw Refusal{CUDA_ERROR_NOT_READY, "both events must be passed for a time between them"};
        }
    }
}

// --- functions of the host ----------------------------------------------------------------------------

static void enqueue_host_function(CUstream handle, std::function<void()> function) {
    Task task = marker("a function of the host");
    task.type = CU_GRAPH_NODE_TYPE_HOST;
    task.run = std::move(function);
    enqueue(stream_of(handle), task);
}

}  // namespace driver

using namespace driver;

extern "C" {

// --- streams ------------------------------------------------------------------------------------------

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
    return call([&] {
        bool blocking = !(flags & CU_STREAM_NON_BLOCKING);
        *stream = as_handle<CUstream>(make_stream(require_context(), blocking, priority));
    });
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuStreamDestroy_v2(CUstream stream) {
    return releasing_call([&] { destroy_stream(stream); });
}

CUresult cuStreamSynchronize(CUstream stream) {
    return call([&] { synchronize(stream_of(stream)); });
}

CUresult cuStreamQuery(CUstream handle) {
    return call([&] {
        auto stream = stream_of(handle);
        if (!is_finished(stream)) {
            throw not_ready(stream->name);
        }
    });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    return call([&] { wait_in_stream(stream_of(stream), event_of(event)); });
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
    return call([&] { *context = as_handle<CUcontext>(stream_of(stream)->context); });
}

// From CUDA 12.5 on.
CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
    if (green) {
        *green = nullptr;
    }
    return cuStreamGetCtx(stream, context);
}

CUresult cuStreamGetDevice(CUstream stream, CUdevice* device) {
    return call([&] { *device = stream_of(stream)->context->device; });
}

CUresult cuStreamGetFlags(CUstream stream, unsigned* flags) {
    return call([&] { *flags = stream_of(stream)->blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING; });
}

CUresult cuStreamGetPriority(CUstream stream, int* priority) {
    return call([&] { *priority = stream_of(stream)->priority; });
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* number) {
    return call([&] {
        auto stream = stream_of(handle);
        bool legacy = stream->context->legacy == stream;
        *number = legacy ? stream->context->handle : stream->handle;
    });
}

// --- events -------------------------------------------------------------------------------------------

CUresult cuEventCreate(CUevent* event, unsigned flags) {
    return call([&] { *event = as_handle<CUevent>(make_event(flags)); });
}

CUresult cuEventDestroy_v2(CUevent handle) {
    return releasing_call([&] {
        auto event = state().events.find(handle);
        state().events.remove(*event);
    });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    return call([&] { record(event_of(event), stream_of(stream)); });
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned) { return cuEventRecord(event, stream); }

CUresult cuEventQuery(CUevent handle) {
    return call([&] {
        auto event = event_of(handle);
        require_uncaptured(*event, "cuEventQuery");
        if (!is_done(event->last)) {
            throw not_ready("the stream of event " + hexadecimal(handle));
        }
    });
}

CUresult cuEventSynchronize(CUevent handle) {
    return call([&] {
        auto event = event_of(handle);
        require_uncaptured(*event, "cuEventSynchronize");
        wait_for(event->last);
        require_unbroken(*event->context);
    });
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    return call([&] {
        auto first = event_of(start);
        auto second = event_of(end);
        require_times(*first, *second);
        *milliseconds = float((second->seconds - first->seconds) * 1000);
    });
}

// --- functions of the host ----------------------------------------------------------------------------

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    return call([&] { enqueue_host_function(stream, [=] { function(data); }); });
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void* data, unsigned) {
    return call([&] {
        require_not_capturing(stream_of(stream), "cuStreamAddCallback");
        enqueue_host_function(stream, [=] { callback(stream, CUDA_SUCCESS, data); });
    });
}

}  // extern "C"
