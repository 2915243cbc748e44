// Running a kernel: blocks one after another, the warps of a block in turns, the lanes of a warp in groups.
//
// A warp runs until its lanes wait at a barrier or have ended, or its turn is over; then the next warp runs. Lanes that
// took different ways form groups; the group at the lowest instruction runs, until it meets another. It knows no
// instruction but those that change where lanes stand: branches, barriers, ends, and waiting for the lanes that a mask
// names. A turn ends at a branch backward, after many instructions or because the lanes wait for what others do.
#include <algorithm>
#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <cxxabi.h>
#include <memory>
#include <sstream>

#include "warp.h"

namespace device {

// The Python function of a kernel that Numba compiled, as Python spells it: its PTX need not say which line it is of.
// Numba tags the names of its functions with a version, "[abi:v1]"; another kernel keeps the name that PTX has.
static std::string name_of(const Kernel& kernel) {
    std::unique_ptr<char, void (*)(void*)> made(
        abi::__cxa_demangle(kernel.name.c_str(), nullptr, nullptr, nullptr), std::free);
    std::string name = made ? made.get() : "";
    size_t end = name.find("[abi:v");
    if (end == std::string::npos) return kernel.name.substr(0, 120);
    name.resize(end);
    const std::pair<std::string, std::string> spellings[] = {{"_3clocals_3e", "<locals>"}, {"::", "."}};
    for (auto& [text, python] : spellings)
        for (size_t at; (at = name.find(text)) != std::string::npos;) name.replace(at, text.size(), python);
    return name;
}

void fail(const Warp& warp, const Instruction& instruction, int lane, const std::string& what, FaultKind kind) {
    const Block& block = *warp.block;
    const Origin& origin = block.kernel->origins.at(instruction.origin);
    std::ostringstream text;
    text << what << "; block (" << block.index.x << ", " << block.index.y << ", " << block.index.z << "), thread "
         << warp.number * LANES + lane << ": " << origin.text << ", line " << origin.line << " of the PTX";
    if (!origin.source.empty()) text << ", " << origin.source;
    text << ", in " << name_of(*block.kernel);
    throw Fault(kind, text.str());
}

namespace {

// --- one warp --------------------------------------------------------------------------------------------------------

void merge(std::vector<Group>& groups) {
    for (size_t a = 0; a < groups.size(); a++)
        for (size_t b = a + 1; b < groups.size();) {
            bool both_wait = groups[a].state == Group::State::waiting && groups[b].state == Group::State::waiting;
            bool neither = groups[a].state != Group::State::waiting && groups[b].state != Group::State::waiting;
            if (groups[a].pc != groups[b].pc || !(both_wait || neither)) {
                b++;
                continue;
            }
            groups[a].mask |= groups[b].mask;
            if (groups[a].state == Group::State::stalled) groups[a].state = Group::State::ready;
            groups.erase(groups.begin() + b);
        }
}

constexpr uint64_t INSTRUCTIONS_OF_TURN = 1 << 16;
constexpr unsigned PATIENCE = 16;  // turns after which other lanes of the warp come first: these may wait for them

class WarpRunner {
  public:
    explicit WarpRunner(Warp& warp)
        : warp_(warp), code_(warp.block->kernel->code), counters_(warp.block->kernel->counters), groups_(warp.groups) {}

    // Until the lanes wait at barriers of the block or have all ended, or for one turn.
    void run() {
        warp_.gives_way = false;
        warp_.waits_in_vain = false;
        uint64_t start = counters_.warp_instructions;
        turn_end_ = start + INSTRUCTIONS_OF_TURN;
        is_over_ = false;
        while (!is_over_ && choose_group()) advance();
        warp_.instructions += counters_.warp_instructions - start;
        if (is_over_) check_length();
    }

  private:
    void check_length() {
        if (!warp_.gives_way) warp_.turns++;
        if (warp_.instructions < options().longest) return;
        std::string executed = std::to_string(warp_.instructions) + " instructions of this block";
        fail(warp_, code_[last_branch_], std::countr_zero(mask_), "an endless loop: the warp executed " + executed);
    }

    // The ready group at the lowest instruction; of a warp that used up many turns, one after another. False: none is.
    int best_group() const {
        std::vector<int> ready;
        for (size_t n = 0; n < groups_.size(); n++)
            if (groups_[n].state == Group::State::ready) ready.push_back(int(n));
        if (ready.empty()) return -1;
        if (warp_.turns >= PATIENCE) return ready[warp_.turns / PATIENCE % ready.size()];
        auto lower = [&](int a, int b) { return groups_[a].pc < groups_[b].pc; };
        return *std::min_element(ready.begin(), ready.end(), lower);
    }

    // False: no group is ready.
    bool choose_group() {
        if (groups_.size() > 1) merge(groups_);
        int best = groups_.size() == 1 && groups_[0].state == Group::State::ready ? 0 : best_group();
        if (best < 0) {
            complain_of_stalled();
            return false;
        }
        at_ = best;
        pc_ = groups_[best].pc;
        mask_ = groups_[best].mask;
        limit_ = INT32_MAX;
        for (size_t n = 0; n < groups_.size(); n++)
            if (int(n) != best && groups_[n].state != Group::State::waiting) limit_ = std::min(limit_, groups_[n].pc);
        return true;
    }

    void complain_of_stalled() {
        for (auto& group : groups_)
            if (group.state == Group::State::stalled)
                fail(warp_, code_[group.pc], std::countr_zero(group.mask), "lanes that the mask names never arrive");
    }

    // The chosen group goes on until it meets another, splits, waits or ends.
    void advance() {
        do {
            Instruction& instruction = code_[pc_];
            uint32_t active = guarded(instruction);
            instruction.executed += instruction.counted;
            counters_.warp_instructions += instruction.counted;
            counters_.thread_instructions += instruction.counted ? std::popcount(active) : 0;
            if (instruction.kind == Kind::plain) {
                if (active) instruction.run(warp_, instruction, active);
                pc_++;
            } else if (!step(instruction, active)) {
                return;
            }
        } while (pc_ < limit_);
        groups_[at_].pc = pc_;
        groups_[at_].mask = mask_;
    }

    uint32_t guarded(const Instruction& instruction) const {
        if (instruction.guard < 0) return mask_;
        const uint32_t* predicate = warp_.registers + instruction.guard;
        uint32_t held = 0;
        for (int lane = 0; lane < LANES; lane++) held |= uint32_t(predicate[lane] & 1) << lane;
        return mask_ & (instruction.guard_negated ? ~held : held);
    }

    // What changes where lanes stand. False: another group has to be chosen.
    bool step(Instruction& instruction, uint32_t active) {
        if (!active) {
            pc_++;
            return true;
        }
        switch (instruction.kind) {
            case Kind::branch: return branch(instruction, active);
            case Kind::table: return branch_by_table(instruction, active);
            case Kind::leave: return leave(active);
            case Kind::barrier: return wait_at_barrier(instruction, active);
            case Kind::arrive: return arrive(instruction, active);
            case Kind::together: return run_together(instruction, active);
            case Kind::plain: break;
        }
        return true;
    }

    bool branch(const Instruction& instruction, uint32_t active) {
        bool backward = instruction.target <= pc_;
        if (backward && (warp_.gives_way || counters_.warp_instructions >= turn_end_)) {
            is_over_ = true;
            last_branch_ = pc_;
        }
        if (active == mask_) {
            pc_ = instruction.target;
            if (!is_over_) return true;
            groups_[at_].pc = pc_;
            groups_[at_].mask = mask_;
            return false;
        }
        counters_.divergent_branches++;
        split(active, {Group::State::ready, instruction.target, active});
        return false;
    }

    // The lanes that are not `leaving` go on behind the instruction.
    void split(uint32_t leaving, const Group& group) {
        groups_[at_].pc = pc_ + 1;
        groups_[at_].mask = mask_ & ~leaving;
        groups_.push_back(group);
    }

    bool branch_by_table(const Instruction& instruction, uint32_t active) {
        const auto& targets = warp_.block->kernel->tables[instruction.target];
        const uint32_t* index = warp_.registers + instruction.sources[0];
        groups_[at_].pc = pc_ + 1;
        groups_[at_].mask = mask_ & ~active;
        bool diverges = groups_[at_].mask != 0;
        for (uint32_t rest = active; rest;) {
            int lane = std::countr_zero(rest);
            uint32_t same = 0;
            for (int other = lane; other < LANES; other++)
                same |= uint32_t((rest >> other & 1) && index[other] == index[lane]) << other;
            if (index[lane] >= targets.size()) fail(warp_, instruction, lane, "a branch beyond its table");
            groups_.push_back({Group::State::ready, targets[index[lane]], same});
            rest &= ~same;
            diverges |= rest != 0;
        }
        counters_.divergent_branches += diverges;
        std::erase_if(groups_, [](const Group& group) { return !group.mask; });
        return false;
    }

    bool leave(uint32_t active) {
        warp_.live &= ~active;
        if (active == mask_) {
            groups_.erase(groups_.begin() + at_);
            return false;
        }
        mask_ &= ~active;
        pc_++;
        return true;
    }

    // --- barriers of the block ---

    int operand(const Instruction& instruction, int which, uint32_t active, int otherwise) const {
        int slot = instruction.sources[which];
        return slot < 0 ? otherwise : int(warp_.registers[slot + std::countr_zero(active)]);
    }

    int barrier_of(const Instruction& instruction, uint32_t active) const {
        int barrier = operand(instruction, 0, active, 0);
        if (barrier < 0 || barrier > 15)
            fail(warp_, instruction, std::countr_zero(active),
                 "there are barriers 0 to 15, not " + std::to_string(barrier));
        return barrier;
    }

    int expected_at(const Instruction& instruction, uint32_t active) const {
        int expected = operand(instruction, 1, active, 0);
        if (expected % LANES)
            fail(warp_, instruction, std::countr_zero(active),
                 "a barrier's threads are whole warps, not " + std::to_string(expected));
        return expected;
    }

    bool wait_at_barrier(const Instruction& instruction, uint32_t active) {
        Group waiting{Group::State::waiting, pc_, active, barrier_of(instruction, active),
                      expected_at(instruction, active)};
        if (active == mask_) groups_[at_] = waiting;
        else split(active, waiting);
        return false;
    }

    // Lenient: what the warp does between its arrival and the release counts as done before it.
    bool arrive(const Instruction& instruction, uint32_t active) {
        Block& block = *warp_.block;
        Barrier& barrier = block.barriers[barrier_of(instruction, active)];
        barrier.arrived += LANES;
        barrier.warps |= 1u << warp_.number;
        pc_++;
        return true;
    }

    // --- lanes together ---

    uint32_t named_by(const Instruction& instruction, int lane) const {
        return instruction.members < 0 ? warp_.live : warp_.registers[instruction.members + lane];
    }

    void check_named(const Instruction& instruction, int lane, uint32_t named) const {
        if (!(named >> lane & 1)) fail(warp_, instruction, lane, "the mask does not name the lane itself");
        bool is_whole = warp_.block->threads >= (warp_.number + 1) * LANES;
        if ((named & ~warp_.live) && is_whole) fail(warp_, instruction, lane, "the mask names lanes that have ended");
    }

    // Once for each mask that lanes name, when all lanes of every mask are here.
    bool run_together(Instruction& instruction, uint32_t active) {
        for (uint32_t rest = active; rest;) {
            int lane = std::countr_zero(rest);
            uint32_t named = named_by(instruction, lane);
            check_named(instruction, lane, named);
            uint32_t members = named & warp_.live;
            if (members & ~active) return stall(instruction, active);
            rest &= ~members;
        }
        for (uint32_t rest = active; rest;) {
            uint32_t members = named_by(instruction, std::countr_zero(rest)) & warp_.live;
            rest &= ~members;
            meet(members);
            instruction.run(warp_, instruction, members);
        }
        pc_++;
        return true;
    }

    void meet(uint32_t members) {
        if (members == warp_.live) warp_.lanes.everybody();
        else warp_.lanes.some(members);
    }

    bool stall(Instruction& instruction, uint32_t active) {
        instruction.executed -= instruction.counted;
        counters_.warp_instructions -= instruction.counted;
        counters_.thread_instructions -= instruction.counted ? std::popcount(active) : 0;
        Group stalled{Group::State::stalled, pc_, mask_};
        groups_[at_] = stalled;
        return false;
    }

    Warp& warp_;
    std::vector<Instruction>& code_;
    Counters& counters_;
    std::vector<Group>& groups_;
    int at_ = 0;         // the group that runs
    int pc_ = 0;         // where it stands
    uint32_t mask_ = 0;  // its lanes
    int limit_ = 0;      // the next instruction at which another group stands
    uint64_t turn_end_ = 0;  // in executed instructions
    bool is_over_ = false;   // the turn
    int last_branch_ = 0;    // at which it ended
};

// --- a block ---------------------------------------------------------------------------------------------------------

void fill_special(Warp& warp, const Kernel::Special& special) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t value = special.value(*warp.block, unsigned(warp.number * LANES + lane));
        if (special.wide) lanes<uint64_t>(warp, special.slot)[lane] = value;
        else warp.registers[special.slot + lane] = uint32_t(value);
    }
}

class BlockRunner {
  public:
    BlockRunner(Kernel& kernel, Block& block, std::vector<Warp>& crew) : kernel_(kernel), block_(block), crew_(crew) {}

    void run(Shape index) {
        start(index);
        while (true) {
            for (size_t n = 0; n < crew_.size(); n++) {
                Warp& warp = crew_[options().backward ? crew_.size() - 1 - n : n];
                if (warp.live) WarpRunner(warp).run();
            }
            if (!anybody_waits()) return;
            bool released = release_barriers();
            if (!released && !is_anybody_ready()) complain_of_barriers();
            check_progress(released);
        }
    }

  private:
    void start(Shape index) {
        block_.index = index;
        block_.shared.start_block();
        block_.barriers.fill({});
        block_.memory_barriers.clear();
        block_.bulk_copies.clear();
        phases_ = block_.phases;
        idle_rounds_ = 0;
        for (auto& warp : crew_) start(warp);
    }

    void start(Warp& warp) {
        int here = std::min(LANES, block_.threads - warp.number * LANES);
        warp.live = here == LANES ? EVERY : (1u << here) - 1;
        warp.groups.assign(1, {Group::State::ready, 0, warp.live});
        std::fill(warp.local.begin(), warp.local.end(), uint8_t(0xA5));
        if (block_.check_written) warp.local_written.start(warp.local.size());
        warp.lanes.everybody();
        warp.copies.clear();  // those that nobody waited for have no effect
        warp.instructions = 0;
        warp.turns = 0;
        for (auto& special : kernel_.specials)
            if (special.of_block) fill_special(warp, special);
    }

    bool anybody_waits() const {
        return std::any_of(crew_.begin(), crew_.end(), [](const Warp& warp) { return !warp.groups.empty(); });
    }

    template <class F>
    bool any_ready(F f) const {
        for (auto& warp : crew_)
            for (auto& group : warp.groups)
                if (group.state == Group::State::ready && f(warp)) return true;
        return false;
    }

    bool is_anybody_ready() const {
        return any_ready([](const Warp&) { return true; });
    }

    // Every warp asks mbarriers whose phases go on: nothing can end them any more.
    void check_progress(bool released) {
        bool working = any_ready([](const Warp& warp) { return !warp.waits_in_vain; });
        bool in_vain = any_ready([](const Warp& warp) { return warp.waits_in_vain; });
        bool changed = released || working || block_.phases != phases_;
        phases_ = block_.phases;
        idle_rounds_ = changed || !in_vain ? 0 : idle_rounds_ + 1;
        if (idle_rounds_ < MOST_IDLE_ROUNDS) return;
        for (auto& warp : crew_)
            for (auto& group : warp.groups)
                if (group.state == Group::State::ready)
                    fail(warp, kernel_.code[group.pc], std::countr_zero(group.mask),
                         "threads wait at an mbarrier whose phase nobody ends");
    }

    // --- barriers ---

    struct Waiting {
        int threads = 0;
        int whole_warps = 0;   // threads, if every warp that is here had 32
        uint32_t warps = 0;
        int expected = 0;      // 0: all
    };

    Waiting waiting_at(int barrier) const {
        Waiting found;
        for (auto& warp : crew_) {
            uint32_t mask = 0;
            for (auto& group : warp.groups) {
                if (group.state != Group::State::waiting || group.barrier != barrier) continue;
                mask |= group.mask;
                found.expected = std::max(found.expected, group.expected);
            }
            if (!mask) continue;
            found.threads += std::popcount(mask);
            found.whole_warps += mask == warp.live ? LANES : 0;
            found.warps |= 1u << warp.number;
        }
        return found;
    }

    bool release_barriers() {
        bool any = false;
        for (int barrier = 0; barrier < 16; barrier++) {
            Waiting waiting = waiting_at(barrier);
            if (!waiting.threads) continue;
            int arrived = waiting.whole_warps + block_.barriers[barrier].arrived;
            bool whole = waiting.expected ? arrived == waiting.expected : waiting.threads == block_.threads;
            if (waiting.expected && arrived > waiting.expected)
                complain("more threads come to a barrier than it expects");
            if (!whole) continue;
            release(barrier, waiting);
            any = true;
        }
        return any;
    }

    void release(int barrier, const Waiting& waiting) {
        check_aligned(barrier);
        kernel_.counters.barriers++;
        meet(waiting.warps | block_.barriers[barrier].warps, waiting.warps);
        block_.barriers[barrier] = {};
        reduce(barrier);
        for (auto& warp : crew_)
            for (auto& group : warp.groups) {
                if (group.state != Group::State::waiting || group.barrier != barrier) continue;
                group.state = Group::State::ready;
                group.pc++;
                if (group.mask == warp.live) warp.lanes.everybody();
                else warp.lanes.some(group.mask);
            }
    }

    void meet(uint32_t givers, uint32_t takers) {
        bool everybody = std::popcount(takers) == int(crew_.size());
        if (everybody) block_.shared.warps.everybody();
        else block_.shared.warps.some(givers, takers);
    }

    void check_aligned(int barrier) const {
        for (auto& warp : crew_)
            for (auto& group : warp.groups) {
                const Instruction& instruction = kernel_.code[group.pc];
                bool here = group.state == Group::State::waiting && group.barrier == barrier;
                if (here && instruction.aligned && group.mask != warp.live)
                    fail(warp, instruction, std::countr_zero(group.mask),
                         "threads of a warp wait at different barriers");
            }
    }

    // bar.red: what the threads brought along, for all of them.
    void reduce(int barrier) {
        uint32_t count = 0;
        uint32_t threads = 0;
        each_waiting(barrier, [&](Warp& warp, const Instruction& instruction, int lane) {
            threads++;
            if (instruction.immediate) count += warp.registers[instruction.sources[2] + lane] & 1;
        });
        each_waiting(barrier, [&](Warp& warp, const Instruction& instruction, int lane) {
            if (!instruction.immediate) return;
            uint32_t found[] = {0, count, count == threads, count != 0};
            warp.registers[instruction.results[0] + lane] = found[instruction.immediate];
        });
    }

    template <class F>
    void each_waiting(int barrier, F f) {
        for (auto& warp : crew_)
            for (auto& group : warp.groups)
                if (group.state == Group::State::waiting && group.barrier == barrier)
                    each_set_lane(group.mask, [&](int lane) { f(warp, kernel_.code[group.pc], lane); });
    }

    // --- what is wrong ---

    [[noreturn]] void complain(const std::string& what) const {
        for (auto& warp : crew_)
            for (auto& group : warp.groups) fail(warp, kernel_.code[group.pc], std::countr_zero(group.mask), what);
        throw Fault(FaultKind::execution, what);
    }

    [[noreturn]] void complain_of_barriers() const {
        for (int barrier = 0; barrier < 16; barrier++)
            if (waiting_at(barrier).threads) check_aligned(barrier);
        int live = 0;
        for (auto& warp : crew_) live += std::popcount(warp.live);
        if (live != block_.threads) complain("threads ended before a barrier that others wait at");
        complain("threads wait at different barriers");
    }

    static constexpr int MOST_IDLE_ROUNDS = 1000;

    Kernel& kernel_;
    Block& block_;
    std::vector<Warp>& crew_;
    uint64_t phases_ = 0;  // of mbarriers that ended, before this round
    int idle_rounds_ = 0;
};

// --- a launch --------------------------------------------------------------------------------------------------------

constexpr size_t REGISTER_ALIGNMENT = 128;

// Registers of all warps, each slot at a place where vectors begin.
class RegisterFile {
  public:
    RegisterFile(size_t words, int warps) : words_(words), memory_(words * warps + REGISTER_ALIGNMENT / 4) {}

    uint32_t* of_warp(int number) {
        auto address = reinterpret_cast<uintptr_t>(memory_.data());
        uintptr_t first = (address + REGISTER_ALIGNMENT - 1) & ~(REGISTER_ALIGNMENT - 1);
        return reinterpret_cast<uint32_t*>(first) + words_ * number;
    }

  private:
    size_t words_;
    std::vector<uint32_t> memory_;
};

// Rounding to nearest and subnormals, whatever the caller's thread has.
class FloatingEnvironment {
  public:
    FloatingEnvironment() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~FloatingEnvironment() { std::fesetenv(&before_); }

  private:
    std::fenv_t before_;
};

void fill_constants(Warp& warp, const Kernel& kernel) {
    for (auto& constant : kernel.constants)
        for (int lane = 0; lane < LANES; lane++) {
            if (constant.wide) lanes<uint64_t>(warp, constant.slot)[lane] = constant.value;
            else warp.registers[constant.slot + lane] = uint32_t(constant.value);
        }
}

Shape index_of(uint64_t block, Shape grid) {
    return {unsigned(block % grid.x), unsigned(block / grid.x % grid.y), unsigned(block / (uint64_t(grid.x) * grid.y))};
}

void run_blocks(Kernel& kernel, Block& block, std::vector<Warp>& crew) {
    BlockRunner runner(kernel, block, crew);
    for (auto& warp : crew)
        for (auto& special : kernel.specials) fill_special(warp, special);
    uint64_t blocks = uint64_t(block.grid.x) * block.grid.y * block.grid.z;
    kernel.counters.launches++;
    kernel.counters.blocks += blocks;
    for (uint64_t n = 0; n < blocks; n++) runner.run(index_of(options().backward ? blocks - 1 - n : n, block.grid));
}

}  // namespace

std::vector<TouchedRange> touched_ranges() { return heap().take_touched(); }

void run(Kernel& kernel, Shape grid, Shape shape, unsigned dynamic_shared, const std::vector<uint8_t>& parameters) {
    auto start = std::chrono::steady_clock::now();
    FloatingEnvironment environment;
    Block block;
    block.kernel = &kernel;
    block.parameters = parameters.data();
    block.grid = grid;
    block.shape = shape;
    block.threads = int(shape.x * shape.y * shape.z);
    block.dynamic_shared = dynamic_shared;
    block.perturb = options().perturb;
    block.check_written = options().uninitialised;
    heap().take_touched();  // what a kernel used that failed
    block.shared.start_launch(size_t(kernel.shared_bytes) + dynamic_shared, kernel.shared_grain, block.check_written);
    int warps = (block.threads + LANES - 1) / LANES;
    RegisterFile registers(kernel.words, warps);
    std::vector<Warp> crew(warps);
    for (int n = 0; n < warps; n++) {
        crew[n].block = &block;
        crew[n].number = n;
        crew[n].registers = registers.of_warp(n);
        crew[n].local.resize(size_t(kernel.local_bytes) * LANES);
        fill_constants(crew[n], kernel);
    }
    run_blocks(kernel, block, crew);
    kernel.counters.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace device
