// Races in shared memory, and its banks.
#include "shared_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "warp.h"

namespace device {

// --- meetings --------------------------------------------------------------------------------------------------------

void Meetings::everybody() {
    round_++;
    everybody_ = round_;
    partial_ = false;
}

void Meetings::some(uint32_t members) { some(members, members); }

void Meetings::some(uint32_t givers, uint32_t takers) {
    if (!partial_) {
        for (auto& row : known_) std::fill(std::begin(row), std::end(row), everybody_);
        partial_ = true;
    }
    round_++;
    uint32_t learnt[32] = {};
    for (uint32_t rest = givers; rest; rest &= rest - 1) {
        int giver = std::countr_zero(rest);
        for (int of = 0; of < 32; of++) learnt[of] = std::max(learnt[of], known_[giver][of]);
        learnt[giver] = round_;
    }
    for (uint32_t rest = takers; rest; rest &= rest - 1) {
        auto& known = known_[std::countr_zero(rest)];
        for (int of = 0; of < 32; of++) known[of] = std::max(known[of], learnt[of]);
    }
}

// --- bytes -----------------------------------------------------------------------------------------------------------

void SharedMemory::start_launch(size_t bytes, int grain, bool check_written) {
    bytes_.resize(bytes);
    grain_shift_ = std::countr_zero(unsigned(grain));
    users_.assign((bytes >> grain_shift_) + 1, Users{});
    check_written_ = check_written;
}

void SharedMemory::start_block() {
    std::fill(bytes_.begin(), bytes_.end(), uint8_t(0xA5));  // what nobody wrote shows
    if (check_written_) written_.start(bytes_.size());
    warps.everybody();
}

// --- races -----------------------------------------------------------------------------------------------------------

static std::string thread_name(int warp, int lane) { return "thread " + std::to_string(warp * LANES + lane); }

static std::string race(uint64_t offset, const std::string& other, const char* did, bool same_warp) {
    return "race in shared memory at byte " + std::to_string(offset) + " with " + other + ", which " + did +
           (same_warp ? "; no barrier or __syncwarp between" : "; no barrier between");
}

bool SharedMemory::races_with_write(const Users& users, const Warp& warp, const Instruction& instruction,
                                    int lane) const {
    if (users.writer == NOBODY || (users.strong && instruction.strong)) return false;
    if (users.writer != warp.number) return !warps.ordered(users.writer, users.write_round, warp.number);
    if (users.writing_lane == lane) return false;
    return !warp.lanes.ordered(users.writing_lane, users.write_turn, lane);
}

int SharedMemory::racing_reader(const Users& users, const Warp& warp, int lane) const {
    for (uint32_t rest = users.reading_warps & ~(1u << warp.number); rest; rest &= rest - 1) {
        int other = std::countr_zero(rest);
        if (!warps.ordered(other, users.read_round, warp.number)) return other * LANES;
    }
    if (users.reader != warp.number) return -1;
    for (uint32_t rest = users.reading_lanes & ~(1u << lane); rest; rest &= rest - 1) {
        int other = std::countr_zero(rest);
        if (!warp.lanes.ordered(other, users.read_turn, lane)) return warp.number * LANES + other;
    }
    return -1;
}

// Readers of an earlier round are forgotten: between two partial barriers a race with them may go unseen.
void SharedMemory::remember_read(Users& users, const Warp& warp, int lane) const {
    if (users.read_round != warps.round()) {
        users.read_round = warps.round();
        users.reading_warps = 0;
    }
    users.reading_warps |= 1u << warp.number;
    if (users.reader != warp.number || users.read_turn != warp.lanes.round()) {
        users.reader = uint8_t(warp.number);
        users.read_turn = warp.lanes.round();
        users.reading_lanes = 0;
    }
    users.reading_lanes |= 1u << lane;
}

void SharedMemory::remember_write(Users& users, const Warp& warp, const Instruction& instruction, int lane) const {
    users.writer = uint8_t(warp.number);
    users.writing_lane = uint8_t(lane);
    users.write_round = warps.round();
    users.write_turn = warp.lanes.round();
    users.serial = serial_;
    users.strong = instruction.strong;
}

void SharedMemory::note_read(const Warp& warp, const Instruction& instruction, int lane, uint64_t offset, int bytes) {
    if (check_written_ && !written_.covers(offset, bytes))
        fail(warp, instruction, lane, "read of shared memory that nobody wrote, at byte " + std::to_string(offset));
    uint64_t end = (offset + bytes - 1) >> grain_shift_;
    for (uint64_t at = offset >> grain_shift_; at <= end; at++) {
        Users& users = users_[at];
        if (races_with_write(users, warp, instruction, lane))
            fail(warp, instruction, lane,
                 race(at << grain_shift_, thread_name(users.writer, users.writing_lane), "wrote it",
                      users.writer == warp.number));
        if (!instruction.strong) remember_read(users, warp, lane);
    }
}

void SharedMemory::note_write(const Warp& warp, const Instruction& instruction, int lane, uint64_t offset, int bytes,
                              const void* value) {
    if (check_written_) written_.mark(offset, bytes);
    uint64_t end = (offset + bytes - 1) >> grain_shift_;
    for (uint64_t at = offset >> grain_shift_; at <= end; at++) {
        Users& users = users_[at];
        bool same_instruction = users.writer == warp.number && users.serial == serial_;
        if (same_instruction && users.writing_lane != lane && !instruction.strong) {
            if (!value || std::memcmp(bytes_.data() + offset, value, bytes))
                fail(warp, instruction, lane,
                     "race in shared memory at byte " + std::to_string(at << grain_shift_) + ": " +
                         thread_name(warp.number, users.writing_lane) +
                         " writes another value there in the same instruction");
        } else if (races_with_write(users, warp, instruction, lane)) {
            fail(warp, instruction, lane,
                 race(at << grain_shift_, thread_name(users.writer, users.writing_lane), "wrote it",
                      users.writer == warp.number));
        }
        int reader = racing_reader(users, warp, lane);
        if (reader >= 0) {
            bool same_warp = reader / LANES == warp.number;
            std::string who = same_warp ? "thread " + std::to_string(reader) : "warp " + std::to_string(reader / LANES);
            fail(warp, instruction, lane, race(at << grain_shift_, who, "read it", same_warp));
        }
        remember_write(users, warp, instruction, lane);
    }
}

// --- banks -----------------------------------------------------------------------------------------------------------

namespace {

constexpr int BANKS = 32;
constexpr int BANK_BYTES = 4;

// The words that a wavefront after another has to bring from each bank.
class Banks {
  public:
    void add(uint32_t word) {
        int bank = word % BANKS;
        int known = std::min(used_[bank], DEPTH);
        for (int n = 0; n < known; n++)
            if (words_[bank][n] == word) return;
        if (used_[bank] < DEPTH) words_[bank][used_[bank]] = word;
        used_[bank]++;
        worst_ = std::max(worst_, used_[bank]);
    }

    int wavefronts() const { return worst_; }

  private:
    static constexpr int DEPTH = BANKS;

    uint32_t words_[BANKS][DEPTH];
    int used_[BANKS] = {};
    int worst_ = 0;
};

}  // namespace

// Lanes with 8 bytes are served in two halves, with 16 in four quarters.
void count_wavefronts(Counters& counters, uint32_t mask, const uint64_t* offsets, int bytes) {
    int together = std::min(LANES, LANES * BANK_BYTES / std::max(bytes, BANK_BYTES));
    int words = std::max(1, bytes / BANK_BYTES);
    counters.shared_accesses += mask != 0;
    for (int first = 0; first < LANES; first += together) {
        Banks banks;
        for (int lane = first; lane < first + together; lane++) {
            if (!(mask >> lane & 1)) continue;
            for (int n = 0; n < words; n++) banks.add(uint32_t(offsets[lane] / BANK_BYTES) + n);
        }
        if (!banks.wavefronts()) continue;
        counters.shared_wavefronts += banks.wavefronts();
        counters.shared_ideal++;
    }
}

}  // namespace device
