// Stream capture (cuStreamBeginCapture and the like) and graphs (cuGraph...).
#include "graphs.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>

#include "launches.h"
#include "memory.h"

namespace driver {

using Nodes = std::vector<std::shared_ptr<Node>>;

// --- capturing ----------------------------------------------------------------------------------------

// All captures that were begun; never destroyed, as the state of the driver.
static std::vector<std::weak_ptr<Capture>>& captures() {
    static auto* it = new std::vector<std::weak_ptr<Capture>>;
    return *it;
}

static uint64_t captures_made = 0;
static thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static std::vector<std::shared_ptr<Capture>> active_captures() {
    std::vector<std::shared_ptr<Capture>> active;
    std::erase_if(captures(), [](const auto& one) { return one.expired(); });
    for (const auto& one : captures()) {
        active.push_back(one.lock());
    }
    return active;
}

static void invalidate(Capture& capture, const std::string& why) {
    if (capture.invalid.empty()) {
        capture.invalid = why;
    }
}

static void require_valid(const Capture& capture) {
    if (!capture.invalid.empty()) {
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture is invalid since " + capture.invalid};
    }
}

// A new node of a graph, behind others.
static std::shared_ptr<Node> add_node(const std::shared_ptr<Graph>& graph, Task task, Nodes before) {
    auto node = std::make_shared<Node>();
    node->task = std::move(task);
    node->before = std::move(before);
    graph->nodes.push_back(node);
    state().nodes.add(node);
    return node;
}

void capture_task(const std::shared_ptr<Stream>& stream, Task task) {
    Capture& capture = *stream->capture;
    require_valid(capture);
    if (task.immediate) {
        std::string what = task.label + ", which the host would wait for";
        invalidate(capture, what);
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, stream->name + " captures, which does not allow " + what};
    }
    stream->frontier = {add_node(capture.graph, std::move(task), stream->frontier)};
}

static void take_part(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Capture>& capture) {
    stream->capture = capture;
    stream->frontier.clear();
    capture->streams.push_back(stream);
}

void capture_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event) {
    if (!event->capture) {
        invalidate(*stream->capture, "a wait for an event that was recorded outside of it");
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                      stream->name + " captures; an event that it waits for must be recorded in the same capture"};
    }
    if (!stream->capture) {
        require_valid(*event->capture);
        take_part(stream, event->capture);
    }
    if (stream->capture != event->capture) {
        invalidate(*stream->capture, "a wait for an event of another capture");
        invalidate(*event->capture, "a wait of another capture for its event");
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_MERGE, "an event must not join two captures"};
    }
    for (const auto& node : event->frontier) {
        bool known = std::find(stream->frontier.begin(), stream->frontier.end(), node) != stream->frontier.end();
        if (!known) {
            stream->frontier.push_back(node);
        }
    }
}

void require_not_capturing(const std::shared_ptr<Stream>& stream, const char* call) {
    if (stream->capture) {
        invalidate(*stream->capture, std::string(call) + " was called on its stream");
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                      std::string(call) + " must not be called on " + stream->name + ", which captures"};
    }
    require_no_implicit_capture(stream);
}

void require_no_implicit_capture(const std::shared_ptr<Stream>& stream) {
    if (stream->context->legacy != stream) {
        return;
    }
    for (const auto& other : state().streams.all()) {
        if (other->context == stream->context && other->blocking && other->capture) {
            invalidate(*other->capture, "work in the default stream, which waits for it");
            throw Refusal{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                          "the default stream must not be used while " + other->name +
                              " captures, for which it would wait"};
        }
    }
}

void require_no_capture(const std::shared_ptr<Context>& context, const char* call) {
    for (const auto& stream : state().streams.all()) {
        if (stream->capture && (!context || stream->context == context)) {
            invalidate(*stream->capture, std::string(call) + " was called");
            throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                          std::string(call) + " must not be called while " + stream->name + " captures"};
        }
    }
}

void require_safe_in_capture(const char* call) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) {
        return;
    }
    for (const auto& capture : active_captures()) {
        bool mine = capture->thread == std::this_thread::get_id();
        bool global = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        bool strict = capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool others_count = thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if ((mine && strict) || (!mine && global && others_count)) {
            invalidate(*capture, std::string(call) + " was called");
            throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                          std::string(call) + " must not be called while a stream captures in this mode"};
        }
    }
}

// Whether a node is one of others or before one of them.
static bool is_joined(const std::shared_ptr<Node>& node, const Nodes& ends) {
    std::set<Node*> seen;
    Nodes stack = ends;
    while (!stack.empty()) {
        auto one = stack.back();
        stack.pop_back();
        if (one == node) {
            return true;
        }
        if (seen.insert(one.get()).second) {
            stack.insert(stack.end(), one->before.begin(), one->before.end());
        }
    }
    return false;
}

// Which stream's work the origin of a capture never waits for; null where all is joined.
static std::shared_ptr<Stream> unjoined_stream(const Capture& capture, const Stream& origin) {
    for (const auto& one : capture.streams) {
        auto stream = one.lock();
        if (!stream) {
            continue;
        }
        for (const auto& node : stream->frontier) {
            if (!is_joined(node, origin.frontier)) {
                return stream;
            }
        }
    }
    return nullptr;
}

static void end_capture(const std::shared_ptr<Capture>& capture) {
    for (const auto& one : capture->streams) {
        if (auto stream = one.lock()) {
            stream->capture = nullptr;
            stream->frontier.clear();
        }
    }
    for (const auto& event : state().events.all()) {
        if (event->capture == capture) {
            event->capture = nullptr;
            event->frontier.clear();
        }
    }
}

static void begin_capture(CUstream handle, CUstreamCaptureMode mode, const std::shared_ptr<Graph>& graph,
                          Nodes before) {
    auto stream = stream_of(handle);
    if (stream->context->legacy == stream) {
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream cannot capture: take another stream"};
    }
    if (stream->capture) {
        throw Refusal{CUDA_ERROR_ILLEGAL_STATE, stream->name + " captures already"};
    }
    auto capture = std::make_shared<Capture>();
    captures_made += 1;
    capture->number = captures_made;
    capture->graph = graph;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    take_part(stream, capture);
    stream->frontier = std::move(before);
    captures().push_back(capture);
}

static void release_graph(const Graph& graph);

static std::shared_ptr<Graph> finish_capture(CUstream handle) {
    auto stream = stream_of(handle);
    auto capture = stream->capture;
    if (!capture) {
        throw Refusal{CUDA_ERROR_ILLEGAL_STATE, stream->name + " captures nothing: cuStreamBeginCapture comes first"};
    }
    if (capture->origin.lock() != stream) {
        invalidate(*capture, "cuStreamEndCapture was called on another stream than it began on");
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "a capture must end on the stream that it began on"};
    }
    bool relaxed = capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!relaxed && capture->thread != std::this_thread::get_id()) {
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "a capture must end in the thread that began it"};
    }
    auto left = unjoined_stream(*capture, *stream);
    std::string left_name = left ? left->name : "";
    std::string invalid = capture->invalid;
    end_capture(capture);
    if (!invalid.empty() || !left_name.empty()) {
        state().graphs.remove(*capture->graph);
        release_graph(*capture->graph);
    }
    if (!invalid.empty()) {
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture is invalid since " + invalid};
    }
    if (!left_name.empty()) {
        throw Refusal{CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                      left_name + " has captured work that the first stream never waits for"};
    }
    return capture->graph;
}

static CUstreamCaptureStatus capture_status(const Stream& stream) {
    if (!stream.capture) {
        return CU_STREAM_CAPTURE_STATUS_NONE;
    }
    return stream.capture->invalid.empty() ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

// The stream that a question about captures names. A question makes no capture invalid.
static std::shared_ptr<Stream> queried_stream(CUstream handle) {
    auto stream = stream_of(handle);
    bool legacy = stream->context->legacy == stream;
    for (const auto& other : state().streams.all()) {
        bool waited_for = legacy && other->context == stream->context && other->blocking;
        if (waited_for && other->capture) {
            throw Refusal{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, other->name + " captures, for which the default stream "
                                                              "would wait"};
        }
    }
    return stream;
}

// Dependencies as an array of handles that lives until the next question of this thread.
static std::vector<CUgraphNode>& handles_of(const Nodes& nodes) {
    static thread_local std::vector<CUgraphNode> handles;
    handles.clear();
    for (const auto& node : nodes) {
        handles.push_back(as_handle<CUgraphNode>(node));
    }
    return handles;
}

// --- graphs -------------------------------------------------------------------------------------------

GraphMemory::~GraphMemory() {
    for (uint64_t address : addresses) {
        release_if_live(address);
    }
}

void add_graph_memory(const std::shared_ptr<Stream>& stream, uint64_t address) {
    stream->capture->graph->memory->addresses.push_back(address);
}

static std::shared_ptr<Graph> graph_of(CUgraph handle) { return state().graphs.find(handle); }

static std::shared_ptr<Node> node_of(CUgraphNode handle) { return state().nodes.find(handle); }

static std::shared_ptr<Executable> executable_of(CUgraphExec handle) { return state().executables.find(handle); }

static Nodes nodes_of(const CUgraphNode* handles, size_t count) {
    Nodes found;
    for (size_t n = 0; n < count; n++) {
        found.push_back(node_of(handles[n]));
    }
    return found;
}

static std::shared_ptr<Graph> make_graph() {
    auto graph = std::make_shared<Graph>();
    state().graphs.add(graph);
    return graph;
}

// Nodes so that each comes after those that it follows; Refusal where they form a circle.
static Nodes sorted(const Nodes& nodes) {
    Nodes ordered;
    std::set<Node*> placed;
    while (ordered.size() < nodes.size()) {
        size_t size = ordered.size();
        for (const auto& node : nodes) {
            bool ready = std::all_of(node->before.begin(), node->before.end(),
                                     [&](const auto& one) { return placed.count(one.get()); });
            if (ready && placed.insert(node.get()).second) {
                ordered.push_back(node);
            }
        }
        if (ordered.size() == size) {
            throw Refusal{CUDA_ERROR_INVALID_VALUE, "the dependencies of a graph must not form a circle"};
        }
    }
    return ordered;
}

// Copies nodes into a graph; `roots` is what the copies of nodes without predecessors follow.
static Nodes copy_nodes(const Nodes& nodes, const std::shared_ptr<Graph>& into, const Nodes& roots) {
    std::map<Node*, std::shared_ptr<Node>> copies;
    Nodes made;
    for (const auto& node : sorted(nodes)) {
        Nodes before;
        for (const auto& one : node->before) {
            before.push_back(copies[one.get()]);
        }
        if (before.empty()) {
            before = roots;
        }
        auto copy = add_node(into, node->task, before);
        copies[node.get()] = copy;
        made.push_back(copy);
    }
    return made;
}

// The nodes that nothing follows.
static Nodes ends_of(const Nodes& nodes) {
    std::set<Node*> followed;
    for (const auto& node : nodes) {
        for (const auto& one : node->before) {
            followed.insert(one.get());
        }
    }
    Nodes ends;
    for (const auto& node : nodes) {
        if (!followed.count(node.get())) {
            ends.push_back(node);
        }
    }
    return ends;
}

static std::shared_ptr<Executable> instantiate(const std::shared_ptr<Graph>& graph, uint64_t flags) {
    auto made = std::make_shared<Executable>();
    made->flags = flags;
    made->graph = std::make_shared<Graph>();
    made->graph->memory = graph->memory;
    made->graph->objects = graph->objects;
    for (auto& [object, count] : made->graph->objects) {
        object->references += count;
    }
    Nodes order = sorted(graph->nodes);
    copy_nodes(order, made->graph, {});
    for (size_t n = 0; n < order.size(); n++) {
        made->places[order[n]->handle] = n;
    }
    state().executables.add(made);
    return made;
}

// The lane of a branch of a graph that is launched in a stream; the first branch has the stream's own.
static uint64_t branch_lane(Stream& stream, size_t branch) {
    if (branch == 0) {
        return stream.lane;
    }
    while (stream.branch_lanes.size() < branch) {
        stream.branch_lanes.push_back(take_lane());
    }
    return stream.branch_lanes[branch - 1];
}

// Puts every node of an executable graph behind the stream's work: a node that alone follows another goes on in its
// lane, others get one of their own, so that branches are in no order with each other.
static void launch_graph(const std::shared_ptr<Executable>& executable, const std::shared_ptr<Stream>& stream) {
    std::vector<Step> start = predecessors_of(stream);
    if (executable->last) {
        start.push_back(executable->last);
    }
    std::map<Node*, Step> steps;
    std::map<Node*, size_t> branches;
    std::set<Node*> continued;
    std::vector<Step> all;
    size_t branches_made = 0;
    for (const auto& node : executable->graph->nodes) {
        std::vector<Step> before;
        std::optional<size_t> branch;
        for (const auto& one : node->before) {
            before.push_back(steps[one.get()]);
            if (!branch && continued.insert(one.get()).second) {
                branch = branches[one.get()];
            }
        }
        if (!branch) {
            branch = branches_made;
            branches_made += 1;
        }
        if (before.empty()) {
            before = start;
        }
        branches[node.get()] = *branch;
        steps[node.get()] = enqueue_after(stream, branch_lane(*stream, *branch), node->task, before);
        all.push_back(steps[node.get()]);
    }
    all.insert(all.end(), start.begin(), start.end());
    Task end;
    end.label = "the end of a graph";
    stream->last = enqueue_after(stream, stream->lane, end, all);
    executable->last = stream->last;
}

static void capture_graph(const std::shared_ptr<Executable>& executable, const std::shared_ptr<Stream>& stream) {
    require_valid(*stream->capture);
    Nodes copies = copy_nodes(executable->graph->nodes, stream->capture->graph, stream->frontier);
    if (!copies.empty()) {
        stream->frontier = ends_of(copies);
    }
}

static void release_object(const std::shared_ptr<UserObject>& object, unsigned count) {
    object->references -= std::min(count, object->references);
    if (!object->references) {
        state().objects.remove(*object);
        object->destroy(object->pointer);
    }
}

static void release_graph(const Graph& graph) {
    for (const auto& node : graph.nodes) {
        state().nodes.remove(*node);
    }
    for (const auto& [object, count] : graph.objects) {
        release_object(object, count);
    }
}

// Whether two graphs differ in their tasks at most; the place of the first difference, or the count where equal.
static size_t first_difference(const Nodes& one, const Nodes& other) {
    auto place_of = [](const Nodes& nodes, const std::shared_ptr<Node>& node) {
        return std::find(nodes.begin(), nodes.end(), node) - nodes.begin();
    };
    size_t common = std::min(one.size(), other.size());
    for (size_t n = 0; n < common; n++) {
        bool same = one[n]->task.type == other[n]->task.type && one[n]->before.size() == other[n]->before.size();
        for (size_t k = 0; same && k < one[n]->before.size(); k++) {
            same = place_of(one, one[n]->before[k]) == place_of(other, other[n]->before[k]);
        }
        if (!same) {
            return n;
        }
    }
    return common;
}

static bool update(Executable& executable, const std::shared_ptr<Graph>& graph, CUgraphExecUpdateResultInfo* info) {
    Nodes order = sorted(graph->nodes);
    Nodes& mine = executable.graph->nodes;
    size_t place = first_difference(mine, order);
    std::memset(info, 0, sizeof *info);
    if (place < mine.size() || mine.size() != order.size()) {
        info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        info->errorNode = place < order.size() ? as_handle<CUgraphNode>(order[place]) : nullptr;
        return false;
    }
    executable.places.clear();
    for (size_t n = 0; n < order.size(); n++) {
        mine[n]->task = order[n]->task;
        executable.places[order[n]->handle] = n;
    }
    executable.graph->memory = graph->memory;
    info->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
    return true;
}

// Fills the caller's array as the driver's queries do: the count alone where there is no array.
static void list_nodes(const Nodes& found, CUgraphNode* out, size_t* count) {
    require_output(count, "count");
    if (out) {
        for (size_t n = 0; n < *count; n++) {
            out[n] = n < found.size() ? as_handle<CUgraphNode>(found[n]) : nullptr;
        }
    }
    *count = out ? std::min(*count, found.size()) : found.size();
}

static void add_dependencies(const CUgraphNode* from, const CUgraphNode* to, size_t count) {
    for (size_t n = 0; n < count; n++) {
        node_of(to[n])->before.push_back(node_of(from[n]));
    }
}

static void list_edges(const Graph& graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, size_t* count) {
    require_output(count, "numEdges");
    size_t found = 0;
    for (const auto& node : graph.nodes) {
        for (const auto& one : node->before) {
            if (from && to && found < *count) {
                from[found] = as_handle<CUgraphNode>(one);
                to[found] = as_handle<CUgraphNode>(node);
                if (data) {
                    data[found] = {};
                }
            }
            found += 1;
        }
    }
    *count = found;
}

static const char* type_name(CUgraphNodeType type) {
    switch (type) {
        case CU_GRAPH_NODE_TYPE_KERNEL: return "kernel";
        case CU_GRAPH_NODE_TYPE_MEMCPY: return "copy";
        case CU_GRAPH_NODE_TYPE_MEMSET: return "fill";
        case CU_GRAPH_NODE_TYPE_HOST: return "host function";
        case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return "allocation";
        case CU_GRAPH_NODE_TYPE_MEM_FREE: return "free";
        default: return "nothing";
    }
}

static void write_dot(const Graph& graph, const char* path) {
    std::ofstream out(path);
    out << "digraph captured {\n";
    for (const auto& node : graph.nodes) {
        std::string label = std::string(type_name(node->task.type)) + ": " + node->task.label;
        out << "  n" << node->handle << " [label=\"" << label << "\"];\n";
        for (const auto& one : node->before) {
            out << "  n" << one->handle << " -> n" << node->handle << ";\n";
        }
    }
    out << "}\n";
    if (!out) {
        throw Refusal{CUDA_ERROR_OPERATING_SYSTEM,
                      "path must name a file that can be written; got " + std::string(path)};
    }
}

}  // namespace driver

using namespace driver;

extern "C" {

// --- capture ------------------------------------------------------------------------------------------

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return call([&] { begin_capture(stream, mode, make_graph(), {}); });
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* dependencies,
                                     const CUgraphEdgeData*, size_t count, CUstreamCaptureMode mode) {
    return call([&] { begin_capture(stream, mode, graph_of(graph), nodes_of(dependencies, count)); });
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    return call([&] {
        if (graph) {
            *graph = nullptr;
        }
        auto made = finish_capture(stream);
        if (graph) {
            *graph = as_handle<CUgraph>(made);
        }
    });
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    return call([&] { *status = capture_status(*queried_stream(stream)); });
}

// Of CUDA 12.3 and later; `cuStreamGetCaptureInfo` of cuda.h.
CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* number, CUgraph* graph,
                                const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
    return call([&] {
        auto stream = queried_stream(handle);
        *status = capture_status(*stream);
        if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
            return;
        }
        if (number) {
            *number = stream->capture->number;
        }
        if (graph) {
            *graph = as_handle<CUgraph>(stream->capture->graph);
        }
        auto& handles = handles_of(stream->frontier);
        if (dependencies) {
            *dependencies = handles.data();
        }
        if (edges) {
            *edges = nullptr;
        }
        if (count) {
            *count = handles.size();
        }
    });
}

// Of CUDA 11.3 to 12.2.
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* number, CUgraph* graph,
                                   const CUgraphNode** dependencies, size_t* count) {
    return cuStreamGetCaptureInfo_v3(stream, status, number, graph, dependencies, nullptr, count);
}

// Before CUDA 11.3.
CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* number) {
    return cuStreamGetCaptureInfo_v3(stream, status, number, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode* dependencies, const CUgraphEdgeData*,
                                           size_t count, unsigned flags) {
    return call([&] {
        auto stream = stream_of(handle);
        if (!stream->capture) {
            throw Refusal{CUDA_ERROR_ILLEGAL_STATE, stream->name + " captures nothing"};
        }
        Nodes given = nodes_of(dependencies, count);
        if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) {
            stream->frontier.clear();
        }
        stream->frontier.insert(stream->frontier.end(), given.begin(), given.end());
    });
}

// Before CUDA 12.3.
CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* dependencies, size_t count,
                                              unsigned flags) {
    return cuStreamUpdateCaptureDependencies_v2(stream, dependencies, nullptr, count, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    return call([&] { std::swap(*mode, thread_mode); });
}

// --- graphs -------------------------------------------------------------------------------------------

CUresult cuGraphCreate(CUgraph* graph, unsigned) {
    return call([&] { *graph = as_handle<CUgraph>(make_graph()); });
}

CUresult cuGraphDestroy(CUgraph handle) {
    return releasing_call([&] {
        auto graph = graph_of(handle);
        state().graphs.remove(*graph);
        release_graph(*graph);
    });
}

CUresult cuGraphClone(CUgraph* clone, CUgraph original) {
    return call([&] {
        auto graph = graph_of(original);
        auto made = make_graph();
        made->memory = graph->memory;
        copy_nodes(graph->nodes, made, {});
        *clone = as_handle<CUgraph>(made);
    });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long flags) {
    return call([&] { *executable = as_handle<CUgraphExec>(instantiate(graph_of(graph), flags)); });
}

// From CUDA 12 on `cuGraphInstantiate` is the call with flags; `cuGraphInstantiate_v2` is that of CUDA 11.
CUresult cuGraphInstantiate_v2(CUgraphExec* executable, CUgraph graph, CUgraphNode* error_node, char*, size_t) {
    if (error_node) {
        *error_node = nullptr;
    }
    return cuGraphInstantiateWithFlags(executable, graph, 0);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* executable, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* given) {
    return call([&] {
        given->hErrNode_out = nullptr;
        given->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
        *executable = as_handle<CUgraphExec>(instantiate(graph_of(graph), given->flags));
        given->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    });
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
    return releasing_call([&] {
        auto executable = executable_of(handle);
        finish(executable->last);  // the driver keeps what runs; here it is done before
        state().executables.remove(*executable);
        release_graph(*executable->graph);
    });
}

CUresult cuGraphExecGetFlags(CUgraphExec executable, cuuint64_t* flags) {
    return call([&] { *flags = executable_of(executable)->flags; });
}

CUresult cuGraphExecUpdate_v2(CUgraphExec executable, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
    return call([&] {
        require_output(info, "resultInfo");
        if (!update(*executable_of(executable), graph_of(graph), info)) {
            throw Refusal{CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
                          "an executable graph can be updated from a graph with the same nodes and edges only"};
        }
    });
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    return call([&] {
        auto target = stream_of(stream);
        if (target->capture) {
            capture_graph(executable_of(executable), target);
            return;
        }
        require_no_implicit_capture(target);
        launch_graph(executable_of(executable), target);
    });
}

CUresult cuGraphUpload(CUgraphExec executable, CUstream stream) {
    return call([&] {
        executable_of(executable);
        stream_of(stream);
    });
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    return call([&] { list_nodes(graph_of(graph)->nodes, nodes, count); });
}

CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    return call([&] {
        Nodes roots;
        for (const auto& node : graph_of(graph)->nodes) {
            if (node->before.empty()) {
                roots.push_back(node);
            }
        }
        list_nodes(roots, nodes, count);
    });
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, size_t* count) {
    return call([&] { list_edges(*graph_of(graph), from, to, data, count); });
}

// Before CUDA 12.3.
CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, size_t* count) {
    return cuGraphGetEdges_v2(graph, from, to, nullptr, count);
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
    return call([&] { *type = node_of(node)->task.type; });
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* found, CUgraphEdgeData*, size_t* count) {
    return call([&] { list_nodes(node_of(node)->before, found, count); });
}

// Before CUDA 12.3.
CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* found, size_t* count) {
    return cuGraphNodeGetDependencies_v2(node, found, nullptr, count);
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData*, size_t count) {
    return call([&] {
        graph_of(graph);
        add_dependencies(from, to, count);
    });
}

// Before CUDA 12.3.
CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
    return cuGraphAddDependencies_v2(graph, from, to, nullptr, count);
}

CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count) {
    return call([&] {
        Task nothing;
        nothing.label = "an empty node";
        *node = as_handle<CUgraphNode>(add_node(graph_of(graph), nothing, nodes_of(dependencies, count)));
    });
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS* given) {
    return call([&] {
        Task task = kernel_task(*given);
        *node = as_handle<CUgraphNode>(add_node(graph_of(graph), task, nodes_of(dependencies, count)));
    });
}

CUresult cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS* given, CUcontext context) {
    return call([&] {
        context_of(context);
        if (given->height > 1) {
            throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "cuGraphAddMemsetNode: the software GPU fills one row; got " +
                                                        std::to_string(given->height) + " rows"};
        }
        Task task = fill_task(given->dst, given->value, given->elementSize, given->width);
        *node = as_handle<CUgraphNode>(add_node(graph_of(graph), task, nodes_of(dependencies, count)));
    });
}

CUresult cuGraphAddHostNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                            const CUDA_HOST_NODE_PARAMS* given) {
    return call([&] {
        Task task;
        task.label = "a function of the host";
        task.type = CU_GRAPH_NODE_TYPE_HOST;
        task.run = [function = given->fn, data = given->userData] { function(data); };
        *node = as_handle<CUgraphNode>(add_node(graph_of(graph), task, nodes_of(dependencies, count)));
    });
}

// The nodes of the other graph become nodes of this one; the node that is given back follows them all.
CUresult cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                  CUgraph child) {
    return call([&] {
        auto into = graph_of(graph);
        Nodes before = nodes_of(dependencies, count);
        Nodes copies = copy_nodes(graph_of(child)->nodes, into, before);
        Task end;
        end.label = "the end of a graph in a graph";
        *node = as_handle<CUgraphNode>(add_node(into, end, copies.empty() ? before : ends_of(copies)));
    });
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec handle, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* given) {
    return call([&] {
        auto executable = executable_of(handle);
        auto place = executable->places.find(node_of(node)->handle);
        if (place == executable->places.end()) {
            throw Refusal{CUDA_ERROR_INVALID_VALUE, "node must be of the graph that was instantiated; got " +
                                                        hexadecimal(node)};
        }
        executable->graph->nodes[place->second]->task = kernel_task(*given);
    });
}

CUresult cuGraphDebugDotPrint(CUgraph graph, const char* path, unsigned) {
    return call([&] { write_dot(*graph_of(graph), path); });
}

// --- what graphs keep alive ---------------------------------------------------------------------------

CUresult cuUserObjectCreate(CUuserObject* object, void* pointer, CUhostFn destroy, unsigned references, unsigned) {
    return call([&] {
        auto made = std::make_shared<UserObject>();
        made->pointer = pointer;
        made->destroy = destroy;
        made->references = references;
        state().objects.add(made);
        *object = as_handle<CUuserObject>(made);
    });
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned count) {
    return call([&] { state().objects.find(object)->references += count; });
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned count) {
    return releasing_call([&] { release_object(state().objects.find(object), count); });
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
    return call([&] {
        auto kept = state().objects.find(object);
        if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) {
            kept->references += count;
        }
        auto& objects = graph_of(graph)->objects;
        auto held = std::find_if(objects.begin(), objects.end(), [&](const auto& one) { return one.first == kept; });
        if (held == objects.end()) {
            objects.emplace_back(kept, count);
        } else {
            held->second += count;
        }
    });
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count) {
    return releasing_call([&] {
        auto kept = state().objects.find(object);
        auto& objects = graph_of(graph)->objects;
        auto held = std::find_if(objects.begin(), objects.end(), [&](const auto& one) { return one.first == kept; });
        if (held == objects.end() || held->second < count) {
            throw Refusal{CUDA_ERROR_INVALID_VALUE,
                          "count must be at most what the graph holds; got " + std::to_string(count)};
        }
        held->second -= count;
        if (held->second == 0) {
            objects.erase(held);
        }
        release_object(kept, count);
    });
}

}  // extern "C"
