// A kernel as it runs: instructions whose operands are slots, and what stands in slots before the first instruction.
//
// A slot holds a register for the 32 lanes of a warp: 32 words of 4 bytes, or of 8 bytes where the register has 64
// bits. A slot's number is the place of its first word in a warp's registers. This file knows nothing of PTX's text.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "counters.h"

namespace device {

constexpr int LANES = 32;
constexpr uint32_t EVERY = 0xFFFFFFFFu;  // a mask of all lanes

// Generic addresses of the other memories; no host allocation lies there.
constexpr uint64_t SHARED_WINDOW = 0x7100000000000000ull;
constexpr uint64_t LOCAL_WINDOW = 0x7200000000000000ull;
constexpr uint64_t PARAMETER_WINDOW = 0x7300000000000000ull;
constexpr uint64_t WINDOW_BYTES = 1ull << 32;

struct Warp;
struct Block;
struct Instruction;
using Action = void (*)(Warp&, const Instruction&, uint32_t mask);

// How a warp treats an instruction.
enum class Kind : uint8_t {
    plain,     // the lanes that are here execute it
    branch,    // goes to `target`
    table,     // goes to an entry of a table of targets
    leave,     // ends lanes
    barrier,   // waits for other warps
    arrive,    // counts at a barrier and goes on
    together,  // waits for the lanes that its mask names
};

enum class Space : uint8_t { generic, global, shared, local, parameter };

enum class Rounding : uint8_t { nearest_even, nearest_away, zero, down, up, stochastic };

// How a conversion treats what does not fit.
struct Cast {
    Rounding rounding = Rounding::nearest_even;
    bool to_integer = false;  // .rni and the like: the result is integral
    bool flush = false;       // .ftz
    bool saturate = false;    // .sat
    bool finite = false;      // .satfinite
    bool relu = false;
};

struct Instruction {
    Instruction() {
        std::fill(std::begin(results), std::end(results), -1);
        std::fill(std::begin(sources), std::end(sources), -1);
    }

    Action run = nullptr;
    Action inner = nullptr;       // what `run` calls where it only sets a rounding mode
    uint64_t executed = 0;        // by warps
    int64_t offsets[3] = {0, 0, 0};  // of the addresses, in the order of the operands
    uint64_t immediate = 0;       // a number that is no operand: a table of lop3, a function of atom
    int results[8];               // slots, -1: none
    int sources[9];
    int guard = -1;    // slot of the predicate
    int target = -1;   // of a branch: an instruction; of a table: which
    int members = -1;  // slot of the mask of lanes that take part
    int origin = 0;    // which statement it comes from: Kernel::origins
    Kind kind = Kind::plain;
    Space space = Space::generic;
    uint8_t element_bytes = 0;     // of a memory access
    uint8_t elements = 1;          // of a vector
    uint8_t short_addresses = 0;   // bit n: address n is a 32-bit register
    bool guard_negated = false;
    bool counted = true;           // false: a helper that the PTX does not show
    bool strong = false;           // an atomic or volatile access: two of them are no race
    bool aligned = false;          // of a barrier: all lanes of a warp must be there
    Cast cast;
};

// Where an instruction stands in the text.
struct Origin {
    std::string text;
    int line = 0;        // of the PTX
    std::string source;  // "file.cu:12", where .loc says so
};

struct Shape {
    unsigned x, y, z;
};

struct Parameter {
    std::string name;
    int size, offset;
};

struct Kernel {
    struct Constant {
        int slot;
        bool wide;
        uint64_t value;
    };
    struct Special {
        int slot;
        bool wide;
        bool of_block;  // differs from block to block
        uint64_t (*value)(const Block& block, unsigned thread);
    };

    std::string name;
    std::vector<Parameter> parameters;
    std::vector<Instruction> code;
    std::vector<Origin> origins;
    std::vector<std::vector<int>> tables;  // targets of brx.idx
    std::vector<Constant> constants;
    std::vector<Special> specials;
    int words = 0;  // of a warp's registers
    int parameter_bytes = 0;
    int shared_bytes = 0;
    int local_bytes = 0;
    int shared_grain = 4;  // no access to shared memory is smaller: what races are looked for in
    int registers = 0;     // as the linked code needs them, 0: unknown
    int most_threads = 0;  // of a block, as the text says; 0: it does not
    Shape required = {0, 0, 0};  // the one shape of a block that the text allows; zeros: any
    Counters counters;
};

struct Module {
    std::map<std::string, std::shared_ptr<Kernel>> kernels;
    std::map<std::string, std::pair<uint64_t, size_t>> globals;  // name -> address, bytes
    std::string target;                                          // "sm_90"
};

}  // namespace device
