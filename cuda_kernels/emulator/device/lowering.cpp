// Statements -> instructions. A kernel at a time: where its variables lie, then one statement after another.
//
// A call becomes the statements of the function, with registers and local variables of their own: there is no stack,
// and lanes that diverge in a function meet again as they do elsewhere. So no function may call itself.
#include "lowering.h"

#include <cstring>
#include <optional>

#include "instructions/choice.h"

namespace device {

namespace {

// --- special registers -----------------------------------------------------------------------------------------------

unsigned lane_of(unsigned thread) { return thread % LANES; }

struct SpecialRegister {
    std::string_view name;
    bool of_block;
    uint64_t (*value)(const Block& block, unsigned thread);
};

const SpecialRegister SPECIAL[] = {
    {"%tid.x", false, [](const Block& b, unsigned t) -> uint64_t { return t % b.shape.x; }},
    {"%tid.y", false, [](const Block& b, unsigned t) -> uint64_t { return t / b.shape.x % b.shape.y; }},
    {"%tid.z", false, [](const Block& b, unsigned t) -> uint64_t { return t / (b.shape.x * b.shape.y); }},
    {"%ntid.x", false, [](const Block& b, unsigned) -> uint64_t { return b.shape.x; }},
    {"%ntid.y", false, [](const Block& b, unsigned) -> uint64_t { return b.shape.y; }},
    {"%ntid.z", false, [](const Block& b, unsigned) -> uint64_t { return b.shape.z; }},
    {"%ctaid.x", true, [](const Block& b, unsigned) -> uint64_t { return b.index.x; }},
    {"%ctaid.y", true, [](const Block& b, unsigned) -> uint64_t { return b.index.y; }},
    {"%ctaid.z", true, [](const Block& b, unsigned) -> uint64_t { return b.index.z; }},
    {"%nctaid.x", false, [](const Block& b, unsigned) -> uint64_t { return b.grid.x; }},
    {"%nctaid.y", false, [](const Block& b, unsigned) -> uint64_t { return b.grid.y; }},
    {"%nctaid.z", false, [](const Block& b, unsigned) -> uint64_t { return b.grid.z; }},
    {"%laneid", false, [](const Block&, unsigned t) -> uint64_t { return lane_of(t); }},
    {"%warpid", false, [](const Block&, unsigned t) -> uint64_t { return t / LANES; }},
    {"%nwarpid", false, [](const Block& b, unsigned) -> uint64_t { return (b.threads + LANES - 1) / LANES; }},
    {"%smid", false, [](const Block&, unsigned) -> uint64_t { return 0; }},
    {"%nsmid", false, [](const Block&, unsigned) -> uint64_t { return 1; }},
    {"%gridid", false, [](const Block&, unsigned) -> uint64_t { return 0; }},
    {"%lanemask_eq", false, [](const Block&, unsigned t) -> uint64_t { return 1u << lane_of(t); }},
    {"%lanemask_lt", false, [](const Block&, unsigned t) -> uint64_t { return (1u << lane_of(t)) - 1; }},
    {"%lanemask_le", false, [](const Block&, unsigned t) -> uint64_t { return (2u << lane_of(t)) - 1; }},
    {"%lanemask_gt", false, [](const Block&, unsigned t) -> uint64_t { return ~((2u << lane_of(t)) - 1); }},
    {"%lanemask_ge", false, [](const Block&, unsigned t) -> uint64_t { return ~((1u << lane_of(t)) - 1); }},
    {"%dynamic_smem_size", false, [](const Block& b, unsigned) -> uint64_t { return b.dynamic_shared; }},
    {"%total_smem_size", false, [](const Block& b, unsigned) -> uint64_t { return b.shared.size(); }}};

bool is_clock(std::string_view name) {
    return name == "%clock" || name == "%clock64" || name == "%clock_hi" || name == "%globaltimer" ||
           name == "%globaltimer_lo" || name == "%globaltimer_hi";
}

// Time goes on with every instruction of the kernel.
template <class T>
void run_clock(Warp& warp, const Instruction& instruction, uint32_t mask) {
    auto now = Word<T>(warp.block->kernel->counters.warp_instructions);
    auto* d = lanes<T>(warp, instruction.results[0]);
    each_lane(mask, [=](int lane) { d[lane] = now; });
}

// --- what an opcode says of its operands -----------------------------------------------------------------------------

using Names = std::set<std::string_view>;

bool writes_result(const Opcode& opcode) {
    static const Names none = {"st", "red", "cp", "stmatrix", "bra", "brx"};
    static const Names quiet = {"init", "inval", "expect_tx", "complete_tx"};
    const std::string& name = opcode.name();
    if (name == "bar" || name == "barrier") return opcode.has("red");
    if (name == "mbarrier") return !quiet.count(opcode.part(1));
    return !none.count(name);
}

// What is there for the hardware alone: its operands mean nothing here.
bool ignores_operands(const std::string& name) {
    static const Names names = {"membar",   "fence",     "nanosleep",     "pmevent", "griddepcontrol", "setmaxnreg",
                                "prefetch", "prefetchu", "applypriority", "discard", "trap",           "brkpt"};
    return names.count(name);
}

bool is_product(const std::string& name) { return name == "mul" || name == "mad"; }

// Bytes of the result, 0: as many as the register has.
int result_bytes(const Opcode& opcode) {
    static const Names words = {"popc",       "clz",   "bfind",    "setp",  "vote", "match",
                                "activemask", "testp", "isspacep", "elect", "bar",  "barrier"};
    static const Names by_second = {"cvt", "set", "slct"};
    const std::string& name = opcode.name();
    if (name == "ld" || name == "ldu" || name == "ldmatrix") return 0;
    if (name == "cvt" && opcode.has("pack")) return 4;
    if (name == "mbarrier") return opcode.part(1).starts_with("arrive") ? 8 : 4;
    if (words.count(name)) return 4;
    if (by_second.count(name)) return bytes_of(opcode.last(1));
    if (is_product(name) && opcode.has("wide")) return 2 * bytes_of(opcode.last());
    if (name == "cvta" || name == "createpolicy") return 8;
    return bytes_of(opcode.last());
}

// mbarrier.test_wait p, [barrier], token; mbarrier.pending_count n, token
bool takes_token(const Opcode& opcode) {
    const std::string& what = opcode.part(1);
    return what == "pending_count" || (what.ends_with("wait") && !opcode.has("parity"));
}

// Bytes of source `k`, counted from the first behind the result.
int source_bytes(const Opcode& opcode, int k) {
    static const Names words = {"shfl", "vote", "redux", "elect", "bar", "barrier", "nanosleep",
                                "dp4a", "dp2a", "lop3",  "prmt",  "shf", "cp",      "brx"};
    const std::string& name = opcode.name();
    int own = bytes_of(opcode.last());
    if (words.count(name)) return 4;
    if (name == "isspacep" || name == "cvta") return 8;
    if (name == "mbarrier") return takes_token(opcode) && k < 2 ? 8 : 4;
    if ((name == "shl" || name == "shr") && k == 1) return 4;
    if (name == "bfe" && k >= 1) return 4;
    if (name == "bfi" && k >= 2) return 4;
    if ((name == "selp" || name == "setp" || name == "set") && k == 2) return 4;
    if (name == "match" && k == 1) return 4;
    if (name == "slct") return k == 2 ? 4 : bytes_of(opcode.last(1));
    if (name == "cvt" && (opcode.has("pack") || k > 1)) return 4;
    if (is_product(name) && opcode.has("wide") && k == 2) return 2 * own;
    return own;
}

int aligned(int offset, int alignment) { return (offset + alignment - 1) / alignment * alignment; }

// Instructions of a kernel with all that it calls; more are a sign of functions that call each other many times.
constexpr size_t MOST_INSTRUCTIONS = size_t(1) << 22;

// Where the text stands that is lowered: in the kernel, or in a function for one of its calls.
struct Frame {
    const KernelText* text = nullptr;
    const Frame* caller = nullptr;
    int first_word = 0;                       // of its registers
    std::map<std::string, int> parameters;    // offsets: of a kernel in its parameters, of a function in local memory
    std::map<const Variable*, int> locals;    // offsets in local memory
    std::vector<size_t> branches;             // instructions whose target is a statement of the text
    std::vector<size_t> tables;               // Kernel::tables likewise
};

// What a call needs: (result, ...), name, (argument, ...)
struct Call {
    std::string name;
    std::vector<Operand> results, arguments;
};

Call call_of(const Statement& statement) {
    Call found;
    for (auto& operand : statement.operands) {
        if (operand.kind != Operand::Kind::list) {
            if (found.name.empty()) found.name = operand.name;
        } else if (found.name.empty()) {
            found.results = operand.parts;
        } else {
            found.arguments = operand.parts;
        }
    }
    return found;
}

// --- a kernel --------------------------------------------------------------------------------------------------------

class KernelLowering {
  public:
    KernelLowering(const ModuleText& module, const KernelText& text, const std::map<std::string, uint64_t>& addresses)
        : module_(module), text_(text), addresses_(addresses), kernel_(std::make_shared<Kernel>()) {
        kernel_->name = text.name;
        for (auto& variable : module.variables) module_variables_[variable.name] = &variable;
    }

    std::shared_ptr<Kernel> lower() {
        Frame frame;
        frame.text = &text_;
        place_parameters(frame);
        place_limits();
        place_shared();
        lower_text(frame);
        end_of_code();
        find_grain();
        if (options().contract) contract(*kernel_, lowered_);
        kernel_->words = aligned(words_, LANES);
        return kernel_;
    }

  private:
    [[noreturn]] void complain(const std::string& what) const {
        throw Fault(FaultKind::text,
                    "PTX, line " + std::to_string(current_->line) + ": " + what + ": " + current_->text);
    }

    // The statements of a frame, and the targets of its branches.
    void lower_text(Frame& frame) {
        frame.first_word = words_;
        words_ += frame.text->words;
        frame_ = &frame;
        std::vector<int> first;  // instruction of each statement
        for (auto& statement : frame.text->statements) {
            first.push_back(int(kernel_->code.size()));
            current_ = &statement;
            lower_statement();
            if (kernel_->code.size() > MOST_INSTRUCTIONS) complain("too many instructions, with those of all calls");
        }
        first.push_back(int(kernel_->code.size()));
        resolve_targets(frame, first);
    }

    // --- variables ---

    void place_parameters(Frame& frame) {
        int offset = 0;
        for (auto& parameter : text_.parameters) {
            offset = aligned(offset, parameter.alignment);
            kernel_->parameters.push_back({parameter.name, parameter.bytes, offset});
            frame.parameters[parameter.name] = offset;
            offset += parameter.bytes;
        }
        kernel_->parameter_bytes = offset;
    }

    void place_limits() {
        if (auto& most = text_.most_threads; !most.empty()) kernel_->most_threads = most[0] * most[1] * most[2];
        if (auto& required = text_.required_threads; !required.empty()) {
            kernel_->required = {unsigned(required[0]), unsigned(required[1]), unsigned(required[2])};
            kernel_->most_threads = required[0] * required[1] * required[2];
        }
    }

    const Variable* variable(const Scope* scope, const std::string& name) const {
        for (; scope; scope = scope->around.get()) {
            auto found = scope->variables.find(name);
            if (found != scope->variables.end()) return &found->second;
        }
        auto found = module_variables_.find(name);
        return found == module_variables_.end() ? nullptr : found->second;
    }

    // The shared variables that the kernel names, or what it calls; those without a size lie behind the others.
    void place_shared() {
        std::vector<const Variable*> dynamic;
        std::set<std::string> called;
        place_shared(text_, dynamic, called);
        for (const Variable* variable : dynamic) {
            kernel_->shared_bytes = aligned(kernel_->shared_bytes, std::max(16, variable->alignment));
            offsets_[variable] = kernel_->shared_bytes;
        }
    }

    void place_shared(const KernelText& text, std::vector<const Variable*>& dynamic, std::set<std::string>& called) {
        for (auto& statement : text.statements) {
            for (auto& operand : statement.operands) place_shared(statement, operand, dynamic);
            if (statement.opcode.name() != "call") continue;
            auto function = module_.functions.find(call_of(statement).name);
            if (function != module_.functions.end() && called.insert(function->first).second)
                place_shared(function->second, dynamic, called);
        }
    }

    void place_shared(const Statement& statement, const Operand& operand, std::vector<const Variable*>& dynamic) {
        for (auto& part : operand.parts) place_shared(statement, part, dynamic);
        const Variable* found = variable(statement.scope.get(), operand.name);
        if (!found || found->storage != Storage::shared || offsets_.count(found)) return;
        offsets_[found] = 0;
        if (found->dynamic) {
            dynamic.push_back(found);
            return;
        }
        int offset = aligned(kernel_->shared_bytes, found->alignment);
        offsets_[found] = offset;
        kernel_->shared_bytes = offset + int(found->bytes);
    }

    std::optional<uint64_t> address_of(const std::string& name) {
        auto parameter = frame_->parameters.find(name);
        if (parameter != frame_->parameters.end()) return parameter->second;
        const Variable* found = variable(current_->scope.get(), name);
        if (!found) return std::nullopt;
        if (found->storage == Storage::global) return addresses_.at(name);
        return found->storage == Storage::local ? local_offset(found) : offsets_.at(found);
    }

    int local_offset(const Variable* variable) {
        auto [found, is_new] = frame_->locals.try_emplace(variable, 0);
        if (is_new) {
            found->second = aligned(kernel_->local_bytes, std::max(variable->alignment, 1));
            kernel_->local_bytes = aligned(found->second + int(variable->bytes), 16);
        }
        return found->second;
    }

    // --- slots ---

    int new_slot(int bytes) {
        int here = words_;
        words_ += words_of(bytes);
        return here;
    }

    int constant(uint64_t value, int bytes) {
        bool wide = bytes == 8;
        auto [found, is_new] = constants_.try_emplace({value, wide}, -1);
        if (!is_new) return found->second;
        found->second = new_slot(bytes);
        kernel_->constants.push_back({found->second, wide, value});
        return found->second;
    }

    // Where what nobody wants is written.
    int sink(int bytes) {
        int& slot = bytes == 8 ? wide_sink_ : narrow_sink_;
        if (slot < 0) slot = new_slot(bytes);
        return slot;
    }

    int carry() {
        if (carry_ < 0) carry_ = new_slot(4);
        return carry_;
    }

    std::optional<Register> find_register(const std::string& name) const {
        size_t digits = name.find_last_not_of("0123456789") + 1;
        std::string_view prefix = std::string_view(name).substr(0, digits);
        for (const Scope* scope = current_->scope.get(); scope; scope = scope->around.get()) {
            auto exact = scope->registers.find(name);
            if (exact != scope->registers.end()) return placed(exact->second);
            if (digits == name.size()) continue;
            auto range = scope->ranges.find(prefix);
            if (range == scope->ranges.end()) continue;
            int number = std::atoi(name.c_str() + digits);
            auto [first, count, bytes, is_predicate] = range->second;
            if (number < count) return placed({first + number * words_of(bytes), bytes, is_predicate});
        }
        return std::nullopt;
    }

    Register placed(Register found) const {
        found.slot += frame_->first_word;
        return found;
    }

    // --- helpers: instructions that the PTX does not show ---

    Instruction& emit(const Instruction& instruction, const Statement* statement) {
        kernel_->code.push_back(instruction);
        lowered_.statements.push_back(statement);
        kernel_->code.back().origin = int(kernel_->origins.size()) - 1;
        return kernel_->code.back();
    }

    int helper(Action action, int source, int bytes) {
        Instruction instruction;
        instruction.run = action;
        instruction.counted = false;
        if (source >= 0) instruction.sources[0] = source;
        instruction.results[0] = new_slot(bytes);
        emit(instruction, nullptr);
        return instruction.results[0];
    }

    // --- operands ---

    int special(const std::string& name, int bytes) {
        if (is_clock(name)) {
            bool upper = name.ends_with("hi");
            if (upper) return constant(0, 4);
            return bytes == 8 ? helper(run_clock<u64>, -1, 8) : helper(run_clock<u32>, -1, 4);
        }
        auto [found, is_new] = specials_.try_emplace({name, bytes == 8}, -1);
        if (!is_new) return found->second;
        for (auto& known : SPECIAL) {
            if (known.name != name) continue;
            found->second = new_slot(bytes);
            kernel_->specials.push_back({found->second, bytes == 8, known.of_block, known.value});
            return found->second;
        }
        complain("unknown special register " + name);
    }

    int register_source(const Operand& operand, const Register& found, int bytes) {
        if (operand.negated) return helper(unary<u32>([](u32 p) { return ~p & 1; }), found.slot, 4);
        if (found.bytes == 8 && bytes < 8) return helper(unary<u32, u64>([](u64 a) { return u32(a); }), found.slot, 4);
        if (found.bytes < 8 && bytes == 8) complain("register " + operand.name + " has too few bits");
        return found.slot;
    }

    uint64_t bits_of_real(double value) const {
        if (current_->opcode.last() == "f64") return std::bit_cast<uint64_t>(value);
        return std::bit_cast<uint32_t>(float(value));
    }

    std::optional<uint64_t> constant_value(const Operand& operand) {
        if (operand.kind == Operand::Kind::constant)
            return operand.is_real ? bits_of_real(operand.real) : operand.number;
        if (operand.kind != Operand::Kind::name) return std::nullopt;
        if (operand.name == "WARP_SZ") return LANES;
        return std::nullopt;
    }

    int source(const Operand& operand, int bytes) {
        if (auto value = constant_value(operand)) return constant(*value, bytes);
        if (auto found = find_register(operand.name)) return register_source(operand, *found, bytes);
        if (auto address = address_of(operand.name)) return constant(*address + operand.number, bytes);
        if (operand.name[0] == '%') return special(operand.name, bytes);
        complain("unknown operand " + operand.name);
    }

    Register result(const std::string& name, int bytes) {
        if (name == "_") return {sink(bytes ? bytes : 4), bytes ? bytes : 4};
        auto found = find_register(name);
        if (!found) complain("unknown register " + name);
        return *found;
    }

    int predicate(const std::string& name) {
        auto found = find_register(name);
        if (!found) complain("unknown predicate " + name);
        return found->slot;
    }

    // [base + offset]
    void address(const Operand& operand, int which, int slot, Instruction& instruction) {
        instruction.offsets[which] = int64_t(operand.number);
        if (operand.name.empty()) return;
        if (auto found = find_register(operand.name)) {
            if (found->bytes == 4) instruction.short_addresses |= uint8_t(1 << which);
            instruction.sources[slot] = found->slot;
            return;
        }
        auto base = address_of(operand.name);
        if (!base) complain("unknown address " + operand.name);
        instruction.offsets[which] += int64_t(*base);
        if (frame_->parameters.count(operand.name)) {
            instruction.space = frame_->caller ? Space::local : Space::parameter;
            return;
        }
        const Variable* found = variable(current_->scope.get(), operand.name);
        if (found->storage == Storage::local) instruction.space = Space::local;  // arguments of a call too
        if (found->storage == Storage::shared) instruction.space = Space::shared;
    }

    // --- statements ---

    void lower_statement() {
        Origin origin;
        origin.text = current_->text;
        origin.line = current_->line;
        auto file = module_.files.find(current_->source_file);
        if (current_->source_line && file != module_.files.end())
            origin.source = file->second + ":" + std::to_string(current_->source_line);
        kernel_->origins.push_back(std::move(origin));
        const std::string& name = current_->opcode.name();
        if (name == "bra" || name == "brx") return lower_branch();
        if (name == "ret" && frame_->caller) return lower_return();
        if (name == "ret" || name == "exit") return lower_leave();
        if (name == "call") return lower_call();
        lower_instruction();
    }

    void guard(Instruction& instruction) {
        if (current_->guard.empty()) return;
        instruction.guard = predicate(current_->guard);
        instruction.guard_negated = current_->guard_negated;
    }

    // Targets are statements until the code is whole.
    void lower_branch() {
        Instruction instruction;
        guard(instruction);
        if (current_->opcode.name() == "bra") {
            instruction.kind = Kind::branch;
            instruction.target = label(current_->operands.at(0).name);
        } else {
            instruction.kind = Kind::table;
            instruction.sources[0] = source(current_->operands.at(0), 4);
            instruction.target = int(kernel_->tables.size());
            kernel_->tables.push_back(table(current_->operands.at(1).name));
        }
        auto& of_frame = instruction.kind == Kind::branch ? frame_->branches : frame_->tables;
        of_frame.push_back(instruction.kind == Kind::branch ? kernel_->code.size() : size_t(instruction.target));
        emit(instruction, current_);
    }

    // --- calls ---

    // Behind the function's last statement the caller goes on.
    void lower_return() {
        Instruction instruction;
        guard(instruction);
        instruction.kind = Kind::branch;
        instruction.target = int(frame_->text->statements.size());
        frame_->branches.push_back(kernel_->code.size());
        emit(instruction, current_);
    }

    void lower_call() {
        Call call = call_of(*current_);
        if (find_register(call.name)) complain("a call through a pointer, which this device does not make");
        if (const char* said = refusal_of(call.name)) return lower_refusal(said);
        auto function = module_.functions.find(call.name);
        if (function == module_.functions.end()) complain("a call of " + call.name + ", which has no body here");
        for (const Frame* frame = frame_; frame; frame = frame->caller)
            if (frame->text == &function->second) complain("a call of " + call.name + " from itself: no recursion");
        const KernelText& text = function->second;
        bool fits = call.results.size() == text.results.size() && call.arguments.size() == text.parameters.size();
        if (!fits) complain("a call with another number of arguments than " + call.name + " has");

        Frame frame;
        frame.text = &text;
        frame.caller = frame_;
        bind(frame, text.results, call.results);
        bind(frame, text.parameters, call.arguments);
        std::vector<int> given = slots_of(text.parameters, call.arguments);
        size_t skip = lower_call_itself();
        lower_body(frame, text, call, given);
        if (skip) set_target(kernel_->code[skip], int(kernel_->code.size()));
    }

    // The call counts as an instruction. Lanes whose guard does not hold go around: the place of their branch, 0: none.
    size_t lower_call_itself() {
        Instruction instruction;
        instruction.run = do_nothing;
        if (!current_->guard.empty()) {
            guard(instruction);
            instruction.guard_negated = !instruction.guard_negated;
            instruction.kind = Kind::branch;
        }
        emit(instruction, current_);
        return instruction.kind == Kind::branch ? kernel_->code.size() - 1 : 0;
    }

    void lower_body(Frame& frame, const KernelText& text, const Call& call, const std::vector<int>& given) {
        const Statement* caller_statement = current_;
        Frame* caller = frame_;
        int words = words_;  // where lower_text puts the registers
        for (size_t n = 0; n < given.size(); n++)
            if (given[n] >= 0) move(formal(text, text.parameters[n], words), given[n]);
        lower_text(frame);
        frame_ = caller;
        current_ = caller_statement;
        for (size_t n = 0; n < call.results.size(); n++) {
            if (!text.results[n].in_register) continue;
            Register actual = result(call.results[n].name, text.results[n].bytes);
            move(actual, formal(text, text.results[n], words).slot);
        }
    }

    Register formal(const KernelText& text, const ParameterText& parameter, int first_word) const {
        Register found = text.scope->registers.at(parameter.name);
        found.slot += first_word;
        return found;
    }

    // Arguments in .param: the function's name for what the caller declared.
    void bind(Frame& frame, const std::vector<ParameterText>& formals, const std::vector<Operand>& actuals) {
        for (size_t n = 0; n < formals.size(); n++) {
            if (formals[n].in_register) continue;
            const Variable* found = variable(current_->scope.get(), actuals[n].name);
            if (!found || found->storage != Storage::local) complain("an argument that is no .param variable");
            frame.parameters[formals[n].name] = local_offset(found);
        }
    }

    // Arguments in registers: slots, -1: in .param.
    std::vector<int> slots_of(const std::vector<ParameterText>& formals, const std::vector<Operand>& actuals) {
        std::vector<int> found;
        for (size_t n = 0; n < formals.size(); n++)
            found.push_back(formals[n].in_register ? source(actuals[n], formals[n].bytes) : -1);
        return found;
    }

    void move(const Register& to, int from) {
        Instruction instruction;
        instruction.run = to.bytes == 8 ? unary<u64>([](u64 a) { return a; }) : unary<u32>([](u32 a) { return a; });
        instruction.counted = false;
        instruction.sources[0] = from;
        instruction.results[0] = to.slot;
        emit(instruction, nullptr);
    }

    void set_target(Instruction& instruction, int target) {
        instruction.target = target;
        lowered_.starts.insert(target);
    }

    void lower_refusal(const char* said) {
        Instruction instruction;
        guard(instruction);
        instruction.run = choose_refusal(said);
        emit(instruction, current_);
    }

    void lower_leave() {
        Instruction instruction;
        guard(instruction);
        instruction.kind = Kind::leave;
        emit(instruction, current_);
    }

    // Text may end without ret, and branches may go there.
    void end_of_code() {
        kernel_->origins.push_back({"the end of the kernel", 0, ""});
        Instruction instruction;
        instruction.kind = Kind::leave;
        instruction.counted = false;
        emit(instruction, nullptr);
    }

    int label(const std::string& name) const {
        for (const Scope* scope = current_->scope.get(); scope; scope = scope->around.get()) {
            auto found = scope->labels.find(name);
            if (found != scope->labels.end()) return found->second;
        }
        complain("no label " + name);
    }

    std::vector<int> table(const std::string& name) const {
        for (const Scope* scope = current_->scope.get(); scope; scope = scope->around.get()) {
            auto found = scope->tables.find(name);
            if (found == scope->tables.end()) continue;
            std::vector<int> targets;
            for (auto& target : found->second) targets.push_back(label(target));
            return targets;
        }
        complain("no branch targets " + name);
    }

    void resolve_targets(const Frame& frame, const std::vector<int>& first) {
        for (size_t at : frame.branches) set_target(kernel_->code[at], first[kernel_->code[at].target]);
        for (size_t at : frame.tables)
            for (int& target : kernel_->tables[at]) {
                target = first[target];
                lowered_.starts.insert(target);
            }
    }

    void lower_instruction() {
        Opcode opcode = current_->opcode;
        Instruction instruction;
        Operands operands;
        if (!ignores_operands(opcode.name())) lower_operands(opcode, operands, instruction);
        guard(instruction);
        instruction.run = choose(opcode, operands, instruction);
        if (!instruction.run) complain("unknown instruction");
        if (!opcode.unknown().empty()) complain("unknown part ." + opcode.unknown() + " of an instruction");
        int widened = widen_slot(opcode, operands, instruction);
        emit(instruction, current_);
        if (widened >= 0) emit_widening(opcode, instruction, widened);
    }

    void lower_operands(const Opcode& opcode, Operands& operands, Instruction& instruction) {
        size_t first = 0;
        if (writes_result(opcode) && !current_->operands.empty()) {
            lower_result(opcode, current_->operands[0], operands, instruction);
            first = 1;
        }
        size_t end = current_->operands.size();
        if (opcode.has("L2::cache_hint")) end--;  // the policy
        if (opcode.name() == "createpolicy") return;
        int slot = 0;
        int addresses = 0;
        for (size_t k = first; k < end; k++) {
            const Operand& operand = current_->operands[k];
            int bytes = source_bytes(opcode, int(k - first));
            if (slot >= 9) complain("unknown instruction, with more operands than any that is known");
            if (operand.kind == Operand::Kind::memory) {
                if (addresses > 2) complain("unknown instruction, with more addresses than any that is known");
                address(operand, addresses++, slot, instruction);
                slot++;
                operands.constants.emplace_back();
            } else if (operand.kind == Operand::Kind::list) {
                lower_list(opcode, operand, operands, instruction, slot);
            } else {
                instruction.sources[slot++] = source(operand, bytes);
                operands.constants.push_back(constant_value(operand));
                auto found = find_register(operand.name);
                operands.last_is_predicate = found && found->is_predicate;
            }
        }
        operands.sources = slot;
        bool uses_carry =
            opcode.has("cc") || opcode.name() == "addc" || opcode.name() == "subc" || opcode.name() == "madc";
        if (!uses_carry) return;
        instruction.sources[8] = carry();
        instruction.results[7] = carry();
    }

    void lower_result(const Opcode& opcode, const Operand& operand, Operands& operands, Instruction& instruction) {
        int bytes = result_bytes(opcode);
        if (operand.kind != Operand::Kind::list) {
            Register found = result(operand.name, bytes);
            instruction.results[0] = found.slot;
            operands.result_bytes.push_back(found.bytes);
            operands.has_second = !operand.second.empty();
            if (operands.has_second) instruction.results[1] = result(operand.second, 4).slot;
            return;
        }
        operands.result_is_list = true;
        operands.elements = int(operand.parts.size());
        if (operands.elements > 8) complain("unknown instruction, with more results than any that is known");
        int each = opcode.name() == "mov" ? bytes / operands.elements : bytes_of(opcode.last());
        for (int n = 0; n < operands.elements; n++) {
            Register found = result(operand.parts[n].name, each == 8 ? 8 : 4);
            instruction.results[n] = found.slot;
            operands.result_bytes.push_back(found.bytes);
        }
    }

    void lower_list(const Opcode& opcode, const Operand& operand, Operands& operands, Instruction& instruction,
                    int& slot) {
        operands.source_is_list = true;
        operands.elements = int(operand.parts.size());
        int bytes = bytes_of(opcode.last());
        if (opcode.name() == "mov") bytes /= operands.elements;
        for (auto& part : operand.parts) {
            if (slot >= 9) complain("unknown instruction, with more operands than any that is known");
            instruction.sources[slot++] = source(part, bytes);
            operands.constants.push_back(constant_value(part));
        }
    }

    // A result that is narrower than its register goes through a slot of its own: -1, or the register's slot.
    int widen_slot(const Opcode& opcode, const Operands& operands, Instruction& instruction) {
        int bytes = result_bytes(opcode);
        if (!bytes || operands.result_bytes.empty() || operands.result_is_list) return -1;
        bool wide_register = operands.result_bytes[0] == 8;
        if (wide_register == (bytes == 8)) return -1;
        if (!wide_register) complain("the result's register has too few bits");
        int found = instruction.results[0];
        instruction.results[0] = new_slot(4);
        return found;
    }

    void emit_widening(const Opcode& opcode, const Instruction& narrow, int slot) {
        bool is_signed = opcode.last(opcode.name() == "cvt" ? 1 : 0)[0] == 's';
        Instruction instruction;
        instruction.run =
            is_signed ? unary<s64, s32>([](s32 a) { return s64(a); }) : unary<u64, u32>([](u32 a) { return u64(a); });
        instruction.counted = false;
        instruction.sources[0] = narrow.results[0];
        instruction.results[0] = slot;
        instruction.guard = narrow.guard;
        instruction.guard_negated = narrow.guard_negated;
        emit(instruction, nullptr);
    }

    // The smallest access to shared memory, in which races are looked for.
    void find_grain() {
        for (auto& instruction : kernel_->code) {
            bool memory = instruction.element_bytes &&
                          (instruction.space == Space::shared || instruction.space == Space::generic);
            if (!memory) continue;
            int elements = instruction.kind == Kind::together ? 1 : instruction.elements;
            kernel_->shared_grain = std::min(kernel_->shared_grain, instruction.element_bytes * elements);
        }
    }

    const ModuleText& module_;
    const KernelText& text_;
    const std::map<std::string, uint64_t>& addresses_;
    std::shared_ptr<Kernel> kernel_;
    const Statement* current_ = nullptr;
    Frame* frame_ = nullptr;
    Lowered lowered_;
    int words_ = 0;
    std::map<std::string, const Variable*> module_variables_;
    std::map<const Variable*, int> offsets_;  // in shared memory
    std::map<std::pair<uint64_t, bool>, int> constants_;
    std::map<std::pair<std::string, bool>, int> specials_;
    int wide_sink_ = -1;
    int narrow_sink_ = -1;
    int carry_ = -1;
};

// --- a module --------------------------------------------------------------------------------------------------------

std::map<std::string, uint64_t> allocate_globals(const ModuleText& text, Module& module) {
    std::map<std::string, uint64_t> addresses;
    for (auto& variable : text.variables) {
        if (variable.storage != Storage::global) continue;
        size_t bytes = std::max<size_t>(variable.bytes, 1);
        uint64_t address = heap().allocate(bytes, variable.name, heap().device);
        std::memset(reinterpret_cast<void*>(address), 0, bytes);
        heap().mark_written(address, bytes);
        addresses[variable.name] = address;
        module.globals[variable.name] = {address, variable.bytes};
    }
    return addresses;
}

void fill_globals(const ModuleText& text, const std::map<std::string, uint64_t>& addresses) {
    for (auto& variable : text.variables) {
        if (variable.storage != Storage::global) continue;
        uint64_t at = addresses.at(variable.name);
        uint64_t end = at + variable.bytes;
        for (auto& initial : variable.initial) {
            if (at + variable.element_bytes > end) break;
            uint64_t value = initial.number;
            if (!initial.symbol.empty()) {
                auto found = addresses.find(initial.symbol);
                if (found == addresses.end())
                    throw Fault(FaultKind::text, "PTX: " + variable.name + " starts as the unknown " + initial.symbol);
                value += found->second;
            }
            std::memcpy(reinterpret_cast<void*>(at), &value, variable.element_bytes);
            at += variable.element_bytes;
        }
    }
}

}  // namespace

static std::shared_ptr<Module> lower(const ModuleText& text) {
    auto module = std::make_shared<Module>();
    module->target = text.target;
    auto addresses = allocate_globals(text, *module);
    fill_globals(text, addresses);
    for (auto& kernel : text.kernels) module->kernels[kernel.name] = KernelLowering(text, kernel, addresses).lower();
    return module;
}

std::shared_ptr<Module> parse(const std::string& ptx) {
    ModuleText text = read(ptx);
    try {
        return lower(text);
    } catch (const std::logic_error& error) {  // of .at(): what the text refers to is not there
        throw Fault(FaultKind::text, std::string("PTX that refers to what is not there: ") + error.what());
    }
}

}  // namespace device
