// PTX as text: statements with their operands, scopes with their registers and labels, variables.
//
// It knows the grammar, not what an opcode means: lowering.h makes instructions of it.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace device {

// Bytes of a value of a type, "u16" or "e4m3x2"; 0: no type. A predicate has 4, as its slot has.
int bytes_of(std::string_view type);

// "cvt.rn.satfinite.e4m3x2.f32" in parts. Whoever understands a part takes it; what nobody took is unknown.
class Opcode {
  public:
    Opcode() = default;
    explicit Opcode(std::string_view text);

    const std::string& name() const { return parts_.at(0); }
    bool has(std::string_view part) const;
    bool take(std::string_view part);  // true: it is there, and understood from here on
    void take_all(std::initializer_list<std::string_view> parts);
    const std::string& take_last(int before = 0);  // the last part but `before`, "" where there is none
    const std::string& last(int before = 0) const;
    const std::string& part(size_t number) const;  // 0: the name; "" where there is none
    std::string unknown() const;  // the first part that nobody took, "": none

  private:
    std::vector<std::string> parts_;
    uint32_t taken_ = 1;  // a bit for each part; the name is known to who chose by it
};

struct Operand {
    enum class Kind { name, constant, memory, list };
    Kind kind = Kind::name;
    std::string name;           // of a register, symbol or label; the base of an address; "": none
    uint64_t number = 0;        // a constant; the offset of an address or of a symbol
    double real = 0;            // a constant in decimal, 1.5
    bool is_real = false;
    bool negated = false;       // !p
    std::string second;         // the predicate in d|p
    std::vector<Operand> parts; // of {a, b} or (a, b)
};

struct Register {
    int slot, bytes;
    bool is_predicate = false;
};

enum class Storage { global, shared, local };

struct Initial {
    uint64_t number = 0;
    std::string symbol;  // its address is added
};

struct Variable {
    Storage storage = Storage::global;
    std::string name;
    int alignment = 1;
    int element_bytes = 0;
    size_t bytes = 0;
    bool dynamic = false;  // name[]: what the launch adds to shared memory
    std::vector<Initial> initial;
};

// {...}: names that hold inside. "%r<100>" declares a hundred registers at once.
struct Scope {
    struct Range {
        int first_slot, count, bytes;
        bool is_predicate;
    };

    std::shared_ptr<Scope> around;
    std::map<std::string, Register, std::less<>> registers;
    std::map<std::string, Range, std::less<>> ranges;
    std::map<std::string, int, std::less<>> labels;  // name -> statement
    std::map<std::string, std::vector<std::string>, std::less<>> tables;  // .branchtargets
    std::map<std::string, Variable, std::less<>> variables;
};

struct Statement {
    Opcode opcode;
    std::string guard;
    bool guard_negated = false;
    std::vector<Operand> operands;
    std::shared_ptr<Scope> scope;
    std::string text;
    int line = 0;             // of the PTX
    int source_file = 0;      // of the last .loc, 0: none
    int source_line = 0;
};

struct ParameterText {
    std::string name;
    int bytes, alignment;
    bool in_register = false;  // .reg, which functions alone may have
};

// A kernel, or a function that kernels call.
struct KernelText {
    std::string name;
    std::vector<ParameterText> results;  // of a function
    std::vector<ParameterText> parameters;
    std::vector<Statement> statements;
    std::shared_ptr<Scope> scope;  // of the parameters that are registers
    int words = 0;                 // of the registers that are declared
    std::vector<int> most_threads;      // of .maxntid
    std::vector<int> required_threads;  // of .reqntid
};

struct ModuleText {
    std::string target;
    std::vector<Variable> variables;
    std::vector<KernelText> kernels;
    std::map<std::string, KernelText, std::less<>> functions;  // those that have a body
    std::map<int, std::string> files;  // of .file
};

// The words that a register of so many bytes takes for a warp.
inline int words_of(int bytes) { return bytes == 8 ? 64 : 32; }

ModuleText read(const std::string& ptx);  // throws a Fault with the line

}  // namespace device
