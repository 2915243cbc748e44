// The device's memory: allocations with red zones behind them, and what was written in them.
//
// An allocation is host memory, and its address on the device is the host's. What is freed is kept back for a while,
// so that a late access is found. It knows nothing of kernels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "fault.h"

namespace device {

// Which bytes of a piece of memory were written: one bit for each. A shadow that was never started says "all".
class Shadow {
  public:
    void start(size_t bytes);  // from here on nothing is written
    void stop();               // from here on everything is
    bool started() const { return !words_.empty(); }
    void mark(size_t begin, size_t count);
    bool covers(size_t begin, size_t count) const;
    void copy(size_t begin, const Shadow& from, size_t from_begin, size_t count);
    uint64_t& word(size_t number) { return words_[number]; }  // of 64 bytes' bits

  private:
    bool is_set(size_t at) const { return words_[at / 64] >> (at % 64) & 1; }

    std::vector<uint64_t> words_;
};

// Bytes of global memory that a kernel used.
struct TouchedRange {
    uint64_t begin, end;
    bool written;
};

// Bytes that a kernel used in one way: a bit for each of the allocation, set between two places.
class Touched {
  public:
    void mark(size_t begin, size_t count, size_t size);
    void take(uint64_t base, bool written, std::vector<TouchedRange>& found);  // adds the ranges, and forgets them

  private:
    Shadow bits_;
    size_t first_ = ~size_t(0), last_ = 0;  // words
};

class Heap {
  public:
    struct Span {
        uint64_t begin, end;
        bool live;
        std::string label;
        int device;  // -1: every device may use it
        bool added = false;  // the host's own memory, which is not freed here
        Shadow written = {};
        Touched read_bytes = {}, written_bytes = {};  // by the kernel that runs
        bool is_touched = false;
    };

    // The address of new memory, 512-byte aligned; 0: the host has none left.
    uint64_t allocate(size_t size, const std::string& label = "", int device = -1);
    // Throws a Fault for an address that `allocate` did not give, or that was released.
    void release(uint64_t address);
    // Let kernels use memory that the host allocated itself.
    void add(uint64_t address, size_t size, const std::string& label);
    // Forgets what `add` added; its bytes stay as they are. Throws a Fault for any other address.
    void remove(uint64_t address);

    // The span that starts at or below an address, live or freed; nullptr: none does.
    const Span* find(uint64_t address) const;
    // May the running kernel's device use these bytes?
    bool holds(uint64_t address, size_t size) const;
    std::string describe(uint64_t address, size_t size) const;
    // What `describe` calls the allocation that an address lies in.
    void label(uint64_t address, const std::string& text);

    // For Options::uninitialised. Copies and fills that the host makes must be marked by who makes them.
    void mark_written(uint64_t address, size_t size);
    void copy_written(uint64_t to, uint64_t from, size_t size);
    bool is_written(uint64_t address, size_t size) const;
    // The contents of an allocation are lost: nobody wrote it.
    void forget_written(uint64_t address);

    // What a kernel used since it was last asked, merged, in the order of addresses.
    void note_touched(uint64_t address, size_t size, bool written);
    std::vector<TouchedRange> take_touched();

    int device = 0;  // whose kernel runs

  private:
    Span* mutable_span(uint64_t address) const;
    bool permits(const Span& span, uint64_t address, size_t size) const;
    void forget_oldest();

    mutable std::map<uint64_t, Span> spans_;
    std::deque<uint64_t> quarantine_;
    size_t kept_ = 0;
    std::set<uint64_t> touched_;    // allocations
    mutable Span* last_ = nullptr;  // where the last access was: most lie there again
};

Heap& heap();

}  // namespace device
