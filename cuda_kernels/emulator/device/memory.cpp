// Allocations with red zones, a quarantine for what was freed, and one bit for each byte that was written.
#include "memory.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "device.h"

namespace device {

namespace {

constexpr size_t RED_ZONE = 512;
constexpr size_t QUARANTINE_BYTES = size_t(1) << 28;
constexpr int NEVER_WRITTEN = 0xA5;  // what nobody wrote shows
constexpr int FREED = 0xA7;
constexpr uint64_t NULL_PAGE = 4096;                // a null pointer with an offset
constexpr uint64_t FAR_AWAY = uint64_t(1) << 24;    // an address is not said to be behind what ends so far below

}  // namespace

Heap& heap() {
    static Heap* it = new Heap;  // never destroyed: threads may end later than statics
    return *it;
}

// --- shadows ---------------------------------------------------------------------------------------------------------

void Shadow::start(size_t bytes) { words_.assign((bytes + 63) / 64 + 1, 0); }

void Shadow::stop() { words_.clear(); }

void Shadow::mark(size_t begin, size_t count) {
    if (!started()) return;
    size_t end = begin + count;
    while (begin < end) {
        size_t offset = begin % 64;
        size_t here = std::min(end - begin, 64 - offset);
        uint64_t bits = here == 64 ? ~uint64_t(0) : (uint64_t(1) << here) - 1;
        words_[begin / 64] |= bits << offset;
        begin += here;
    }
}

bool Shadow::covers(size_t begin, size_t count) const {
    if (!started()) return true;
    for (size_t at = begin; at < begin + count; at++)
        if (!is_set(at)) return false;
    return true;
}

void Shadow::copy(size_t begin, const Shadow& from, size_t from_begin, size_t count) {
    if (!started()) return;
    if (!from.started()) return mark(begin, count);
    std::vector<bool> bits(count);  // the two may overlap
    for (size_t n = 0; n < count; n++) bits[n] = from.is_set(from_begin + n);
    for (size_t n = 0; n < count; n++) {
        size_t at = begin + n;
        uint64_t bit = uint64_t(1) << (at % 64);
        words_[at / 64] = bits[n] ? words_[at / 64] | bit : words_[at / 64] & ~bit;
    }
}

// --- what a kernel used ----------------------------------------------------------------------------------------------

void Touched::mark(size_t begin, size_t count, size_t size) {
    if (!bits_.started()) bits_.start(size);
    first_ = std::min(first_, begin / 64);
    last_ = std::max(last_, (begin + count - 1) / 64);
    bits_.mark(begin, count);
}

void Touched::take(uint64_t base, bool written, std::vector<TouchedRange>& found) {
    size_t mine = found.size();
    auto add = [&](uint64_t begin, uint64_t end) {
        if (found.size() > mine && found.back().end == begin) found.back().end = end;
        else found.push_back({begin, end, written});
    };
    for (size_t n = first_; n <= last_ && first_ != ~size_t(0); n++) {
        uint64_t rest = bits_.word(n);
        bits_.word(n) = 0;
        while (rest) {
            int begin = std::countr_zero(rest);
            int length = std::countr_one(rest >> begin);
            add(base + n * 64 + begin, base + n * 64 + begin + length);
            if (begin + length == 64) break;
            rest = rest >> (begin + length) << (begin + length);
        }
    }
    first_ = ~size_t(0);
    last_ = 0;
}

void Heap::note_touched(uint64_t address, size_t size, bool written) {
    Span* span = last_ && permits(*last_, address, size) ? last_ : mutable_span(address);
    if (!span || !size || !permits(*span, address, size)) return;
    if (!span->is_touched) touched_.insert(span->begin);
    span->is_touched = true;
    Touched& bytes = written ? span->written_bytes : span->read_bytes;
    bytes.mark(address - span->begin, size, span->end - span->begin);
}

std::vector<TouchedRange> Heap::take_touched() {
    std::vector<TouchedRange> found;
    for (uint64_t begin : touched_) {
        auto span = spans_.find(begin);
        if (span == spans_.end()) continue;
        span->second.read_bytes.take(begin, false, found);
        span->second.written_bytes.take(begin, true, found);
        span->second.is_touched = false;
    }
    touched_.clear();
    return found;
}

// --- allocations -----------------------------------------------------------------------------------------------------

uint64_t Heap::allocate(size_t size, const std::string& label, int device) {
    size_t whole = (size + RED_ZONE - 1) / RED_ZONE * RED_ZONE + RED_ZONE;
    void* memory = std::aligned_alloc(RED_ZONE, whole);
    if (!memory) return 0;
    std::memset(memory, NEVER_WRITTEN, whole);
    auto begin = reinterpret_cast<uint64_t>(memory);
    Span& span = spans_[begin];
    span = {begin, begin + size, true, label, device};
    if (options().uninitialised) span.written.start(size);
    last_ = nullptr;
    return begin;
}

void Heap::add(uint64_t address, size_t size, const std::string& label) {
    spans_[address] = {address, address + size, true, label, -1, true};
    last_ = nullptr;
}

void Heap::remove(uint64_t address) {
    auto found = spans_.find(address);
    if (found == spans_.end() || !found->second.added) throw Fault(FaultKind::address, "removal of what was not added");
    touched_.erase(address);
    spans_.erase(found);
    last_ = nullptr;
}

void Heap::release(uint64_t address) {
    auto found = spans_.find(address);
    if (found == spans_.end() || !found->second.live || found->second.added)
        throw Fault(FaultKind::address, "free of what is no live allocation");
    Span& span = found->second;
    size_t size = span.end - span.begin;
    span.live = false;
    span.written.stop();
    last_ = nullptr;
    kept_ += size;
    std::memset(reinterpret_cast<void*>(address), FREED, size);
    quarantine_.push_back(address);
    while (kept_ > QUARANTINE_BYTES && !quarantine_.empty()) forget_oldest();
}

void Heap::forget_oldest() {
    uint64_t oldest = quarantine_.front();
    quarantine_.pop_front();
    kept_ -= spans_[oldest].end - oldest;
    spans_.erase(oldest);
    std::free(reinterpret_cast<void*>(oldest));
}

// --- questions -------------------------------------------------------------------------------------------------------

Heap::Span* Heap::mutable_span(uint64_t address) const {
    auto next = spans_.upper_bound(address);
    return next == spans_.begin() ? nullptr : &std::prev(next)->second;
}

const Heap::Span* Heap::find(uint64_t address) const { return mutable_span(address); }

bool Heap::permits(const Span& span, uint64_t address, size_t size) const {
    bool inside = address >= span.begin && address <= span.end && size <= span.end - address;
    return span.live && inside && (span.device < 0 || span.device == device);
}

bool Heap::holds(uint64_t address, size_t size) const {
    if (last_ && permits(*last_, address, size)) return true;
    Span* span = mutable_span(address);
    if (!span || !permits(*span, address, size)) return false;
    last_ = span;
    return true;
}

std::string Heap::describe(uint64_t address, size_t size) const {
    std::ostringstream text;
    const Span* span = find(address);
    auto next = spans_.upper_bound(address);
    text << size << " bytes";
    if (!span || span->label.empty()) text << " at 0x" << std::hex << address << std::dec;
    if (address < NULL_PAGE) {
        text << ", a null pointer";
        return text.str();
    }
    bool before = next != spans_.end() && next->first - address <= RED_ZONE;  // nearer than what lies below
    if (before && (!span || address - span->begin >= span->end - span->begin + RED_ZONE)) {
        span = &next->second;
        text << ", " << span->begin - address << " bytes before ";
    } else if (!span || address - span->begin > span->end - span->begin + FAR_AWAY) {
        text << ", in no allocation";
        return text.str();
    } else if (address >= span->end) {
        text << ", " << address - span->end << " bytes behind the end of ";
    } else {
        text << ", " << address - span->begin << " bytes into ";
    }
    const char* freed = span->live ? "" : "freed ";
    if (span->label.empty()) text << (span->live ? "an " : "a ") << freed << "allocation of ";
    else text << freed << span->label << ", ";
    text << span->end - span->begin << " bytes";
    if (span->device >= 0) text << " of device " << span->device;
    return text.str();
}

void Heap::label(uint64_t address, const std::string& text) {
    Span* span = mutable_span(address);
    if (span && span->live) span->label = text;
}

// --- what was written ------------------------------------------------------------------------------------------------

void Heap::mark_written(uint64_t address, size_t size) {
    Span* span = last_ && permits(*last_, address, size) ? last_ : mutable_span(address);
    if (span && span->live && address - span->begin + size <= span->end - span->begin)
        span->written.mark(address - span->begin, size);
}

void Heap::copy_written(uint64_t to, uint64_t from, size_t size) {
    Span* target = mutable_span(to);
    Span* source = mutable_span(from);
    if (!target || !source) return;
    target->written.copy(to - target->begin, source->written, from - source->begin, size);
}

void Heap::forget_written(uint64_t address) {
    Span* span = mutable_span(address);
    if (span && span->written.started()) span->written.start(span->end - span->begin);
}

bool Heap::is_written(uint64_t address, size_t size) const {
    const Span* span = last_ && permits(*last_, address, size) ? last_ : find(address);
    return !span || span->written.covers(address - span->begin, size);
}

}  // namespace device
