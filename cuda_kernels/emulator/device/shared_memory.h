// A block's shared memory: its bytes, who used them since threads last met, and conflicts of banks.
//
// A race is two accesses to the same bytes by two threads, one of them a write, where nothing between them made the
// threads meet: a barrier for threads of different warps, a barrier, __syncwarp or a shuffle for lanes of one warp.
// (CUDA promises an order of memory only for barriers and __syncwarp; that a shuffle counts here is lenient.)
#pragma once
#include <cstdint>
#include <vector>

#include "counters.h"
#include "kernel.h"
#include "memory.h"

namespace device {

struct Warp;

// Who has met whom, of up to 32 members: the warps of a block, or the lanes of a warp. A clock of rounds that advances
// whenever somebody meets; an access of a round lies before everything that follows a later meeting.
class Meetings {
  public:
    void everybody();                 // all have met
    void some(uint32_t members);      // these have met, and pass on whom they met before
    void some(uint32_t givers, uint32_t takers);  // takers know all that givers did; givers learn nothing
    uint32_t round() const { return round_; }

    // Does what `earlier` did in `round` lie before what `later` does now?
    bool ordered(int earlier, uint32_t round, int later) const {
        return round < everybody_ || (partial_ && round < known_[later][earlier]);
    }

  private:
    uint32_t round_ = 0;
    uint32_t everybody_ = 0;
    bool partial_ = false;        // some have met without the others since everybody did
    uint32_t known_[32][32] = {}; // [who][of whom]: what of whom lies before this round is known
};

class SharedMemory {
  public:
    void start_launch(size_t bytes, int grain, bool check_written);
    void start_block();

    size_t size() const { return bytes_.size(); }
    uint8_t* at(uint64_t offset) { return bytes_.data() + offset; }

    // An instruction begins: lanes that it lets write the same bytes may write the same value.
    void begin_instruction() { serial_++; }
    // Throw a Fault for a race and for bytes that nobody wrote.
    void note_read(const Warp& warp, const Instruction& instruction, int lane, uint64_t offset, int bytes);
    void note_write(const Warp& warp, const Instruction& instruction, int lane, uint64_t offset, int bytes,
                    const void* value);

    Meetings warps;

  private:
    static constexpr uint8_t NOBODY = 255;

    // The last users of a grain. Rounds are those of the block's warps, turns those of a warp's lanes.
    struct Users {
        uint32_t write_round = 0, write_turn = 0;
        uint32_t read_round = 0, read_turn = 0;
        uint32_t reading_warps = 0;   // in read_round
        uint32_t reading_lanes = 0;   // of warp `reader`, in read_turn
        uint32_t serial = 0;          // of the instruction that wrote
        uint8_t writer = NOBODY, writing_lane = 0;
        uint8_t reader = NOBODY;
        bool strong = false;          // the write was atomic
    };

    bool races_with_write(const Users& users, const Warp& warp, const Instruction& instruction, int lane) const;
    int racing_reader(const Users& users, const Warp& warp, int lane) const;  // a thread, -1: none
    void remember_read(Users& users, const Warp& warp, int lane) const;
    void remember_write(Users& users, const Warp& warp, const Instruction& instruction, int lane) const;

    std::vector<uint8_t> bytes_;
    std::vector<Users> users_;
    Shadow written_;
    bool check_written_ = false;
    int grain_shift_ = 0;
    uint32_t serial_ = 0;
};

// Wavefronts of one request: lanes of a mask at offsets of shared memory, so many bytes each.
void count_wavefronts(Counters& counters, uint32_t mask, const uint64_t* offsets, int bytes);

}  // namespace device
