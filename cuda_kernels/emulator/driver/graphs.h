// Stream capture and graphs: what a capturing stream was asked to do, kept as nodes with their order, to be done by
// every launch.
#pragma once
#include <thread>

#include "work.h"

namespace driver {

// A node: a task, and the nodes that it follows.
struct Node {
    static constexpr Kind kind = Kind::node;
    uint64_t handle = 0;
    Task task;
    std::vector<std::shared_ptr<Node>> before;
};

// A pointer that a graph keeps alive for its user; `destroy` is called when nobody refers to it any more.
struct UserObject {
    static constexpr Kind kind = Kind::object;
    uint64_t handle = 0;
    void* pointer = nullptr;
    CUhostFn destroy = nullptr;
    unsigned references = 0;
};

// Memory that was allocated while a stream captured. It lives as long as a graph or an executable graph that uses it,
// unless a call frees it before.
struct GraphMemory {
    std::vector<uint64_t> addresses;
    ~GraphMemory();
};

struct Graph {
    static constexpr Kind kind = Kind::graph;
    uint64_t handle = 0;
    std::vector<std::shared_ptr<Node>> nodes;
    std::shared_ptr<GraphMemory> memory = std::make_shared<GraphMemory>();
    std::vector<std::pair<std::shared_ptr<UserObject>, unsigned>> objects;
};

// A graph as it was when it was instantiated; nodes in an order in which they may be done.
struct Executable {
    static constexpr Kind kind = Kind::executable;
    uint64_t handle = 0;
    uint64_t flags = 0;
    std::shared_ptr<Graph> graph;  // a copy
    Step last;                     // its launches are done one after another
    std::map<uint64_t, size_t> places;  // handle of an original node -> its place
};

// What one cuStreamBeginCapture began.
struct Capture {
    uint64_t number = 0;
    std::shared_ptr<Graph> graph;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    std::thread::id thread;
    std::weak_ptr<Stream> origin;
    std::vector<std::weak_ptr<Stream>> streams;  // all that take part
    std::string invalid;                         // why it cannot be ended well; "" while it can
};

// Puts a task into the graph that a stream captures.
void capture_task(const std::shared_ptr<Stream>& stream, Task task);
// Refusal where a call waits for, or orders behind, a stream that captures; the capture is invalid from then on.
void require_no_implicit_capture(const std::shared_ptr<Stream>& stream);
void require_not_capturing(const std::shared_ptr<Stream>& stream, const char* call);
void require_no_capture(const std::shared_ptr<Context>& context, const char* call);
// Refusal where a call is unsafe while this thread, or any other, captures globally.
void require_safe_in_capture(const char* call);
// Gives memory to the graph that a stream captures.
void add_graph_memory(const std::shared_ptr<Stream>& stream, uint64_t address);
// Orders a capturing stream, or one that joins a capture, behind what an event recorded there.
void capture_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event);

}  // namespace driver
