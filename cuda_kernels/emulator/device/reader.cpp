// PTX text -> statements. One pass: characters to tokens, tokens to declarations and statements.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <stdexcept>

#include "fault.h"
#include "ptx.h"

namespace device {

namespace {

struct Token {
    std::string_view text;
    int line;
};

const Token END{"<end>", 0};

// --- characters to tokens --------------------------------------------------------------------------------------------

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)); }

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }

bool is_name_part(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

class Scanner {
  public:
    explicit Scanner(std::string_view text) : text_(text) {}

    std::vector<Token> tokens() {
        std::vector<Token> found;
        for (skip_blank(); at_ < text_.size(); skip_blank()) {
            size_t start = at_;
            int line = line_;
            pass_token();
            found.push_back({text_.substr(start, at_ - start), line});
        }
        return found;
    }

  private:
    bool starts(std::string_view what) const { return text_.substr(at_, what.size()) == what; }

    void skip_blank() {
        while (at_ < text_.size()) {
            if (is_space(text_[at_])) pass(at_ + 1);
            else if (starts("//")) pass(std::min(text_.find('\n', at_), text_.size()));
            else if (starts("/*")) pass(after("*/", at_ + 2));
            else return;
        }
    }

    void pass_token() {
        if (text_[at_] == '"') return pass(after("\"", at_ + 1));
        size_t start = at_;
        while (at_ < text_.size() && (is_name_part(text_[at_]) || starts("::"))) at_ += starts("::") ? 2 : 1;
        if (at_ == start) at_++;
    }

    size_t after(std::string_view end, size_t from) const {
        size_t found = text_.find(end, from);
        return found == std::string_view::npos ? text_.size() : found + end.size();
    }

    void pass(size_t to) {
        line_ += int(std::count(text_.begin() + at_, text_.begin() + to, '\n'));
        at_ = to;
    }

    std::string_view text_;
    size_t at_ = 0;
    int line_ = 1;
};

// --- numbers ---------------------------------------------------------------------------------------------------------

bool is_number(std::string_view token) { return is_digit(token[0]); }

// 0f3F800000 and 0d3FF0000000000000 are the bits of a float.
bool is_float_bits(std::string_view token) {
    return token.size() > 2 && token[0] == '0' && (std::tolower(token[1]) == 'f' || std::tolower(token[1]) == 'd');
}

bool is_decimal_real(std::string_view token) {
    return is_number(token) && !is_float_bits(token) && token.find('.') != std::string_view::npos;
}

// All digits of a text as a number.
uint64_t digits_of(const std::string& digits, int base) {
    size_t end = 0;
    uint64_t value = std::stoull(digits, &end, base);
    if (end != digits.size()) throw std::invalid_argument(digits);
    return value;
}

uint64_t float_bits(const std::string& token, bool negative) {
    uint64_t bits = digits_of(token.substr(2), 16);
    uint64_t sign = std::tolower(token[1]) == 'f' ? 1ull << 31 : 1ull << 63;
    return negative ? bits ^ sign : bits;
}

uint64_t number_of(std::string_view token, bool negative) {
    std::string digits(token);
    if (is_float_bits(token)) return float_bits(digits, negative);
    while (digits.back() == 'U' || digits.back() == 'u') digits.pop_back();
    bool binary = digits.size() > 2 && digits[0] == '0' && std::tolower(digits[1]) == 'b';
    uint64_t value = binary ? digits_of(digits.substr(2), 2) : digits_of(digits, 0);
    return negative ? -value : value;
}

// The text of a statement in one line.
std::string one_line(const char* begin, const char* end) {
    std::string found;
    for (const char* c = begin; c < end; c++) {
        bool blank = is_space(*c);
        if (blank && (found.empty() || found.back() == ' ')) continue;
        found += blank ? ' ' : *c;
    }
    return found;
}

// --- tokens to statements --------------------------------------------------------------------------------------------

class Reader {
  public:
    explicit Reader(const std::string& text) : tokens_(Scanner(text).tokens()) {}

    int line() const { return at_ ? tokens_[at_ - 1].line : 1; }

    ModuleText read() {
        while (at_ < tokens_.size()) top_level();
        return std::move(module_);
    }

  private:
    const Token& token(size_t ahead = 0) const { return at_ + ahead < tokens_.size() ? tokens_[at_ + ahead] : END; }

    std::string_view peek() const { return token().text; }

    std::string_view next() {
        if (at_ >= tokens_.size()) throw Fault(FaultKind::text, "PTX ends early");
        return tokens_[at_++].text;
    }

    [[noreturn]] void complain(const std::string& what) const {
        throw Fault(FaultKind::text, "PTX, line " + std::to_string(token().line) + ": " + what);
    }

    bool take(std::string_view wanted) {
        if (peek() != wanted) return false;
        at_++;
        return true;
    }

    void expect(std::string_view wanted) {
        if (take(wanted)) return;
        complain("expected " + std::string(wanted) + ", got " + std::string(peek()));
    }

    int integer() { return int(number_of(next(), false)); }

    void skip_to(std::string_view end) {
        while (next() != end) {
        }
    }

    // --- outside of functions ---

    void top_level() {
        int line = token().line;
        std::string_view what = next();
        if (what == ".version" || what == ".address_size") next();
        else if (what == ".target") target();
        else if (what == ".visible" || what == ".weak" || what == ".common" || what == ".extern") return;
        else if (what == ".entry") entry();
        else if (what == ".func") function();
        else if (what == ".global" || what == ".const") module_.variables.push_back(variable(Storage::global));
        else if (what == ".shared") module_.variables.push_back(variable(Storage::shared));
        else if (what == ".file") file();
        else if (what == ".section") skip_braces();
        else if (what == ".pragma" || what == ".alias") skip_to(";");
        else
            throw Fault(FaultKind::text,
                        "PTX, line " + std::to_string(line) + ": unknown at the top level: " + std::string(what));
    }

    void target() {
        module_.target = next();
        while (take(",")) next();
    }

    // .file 1 "name.cu" [, time, size]
    void file() {
        int number = integer();
        std::string_view quoted = next();
        module_.files[number] = quoted.substr(1, quoted.size() - 2);
        while (take(",")) next();
    }

    // .func (.param .b32 result) name (.param .b64 given) { ... }
    void function() {
        begin_code();
        if (take("(")) parameters(kernel_.results);
        kernel_.name = next();
        if (take("(")) parameters(kernel_.parameters);
        if (body()) module_.functions[kernel_.name] = std::move(kernel_);
    }

    void skip_braces() {
        skip_to("{");
        for (int depth = 1; depth > 0;) {
            std::string_view text = next();
            depth += text == "{" ? 1 : text == "}" ? -1 : 0;
        }
    }

    // .align 8 .b8 name[16] = {1, 2};
    Variable variable(Storage storage) {
        Variable found;
        found.storage = storage;
        found.name = declared(found.element_bytes, found.alignment);
        size_t count = 1;
        while (take("[")) {
            if (take("]")) {
                found.dynamic = true;
                continue;
            }
            count *= number_of(next(), false);
            expect("]");
        }
        found.bytes = found.dynamic ? 0 : count * found.element_bytes;
        if (take("=")) initial(found);
        expect(";");
        return found;
    }

    // The name that a declaration ends with; its type and alignment come before.
    std::string declared(int& bytes, int& alignment) {
        while (true) {
            std::string_view text = next();
            bool of_pointer =
                text == ".ptr" || text == ".const" || text == ".global" || text == ".shared" || text == ".local";
            if (of_pointer) continue;  // .param .u64 .ptr .global .align 16 name: where a pointer points to
            if (text == ".align") {
                alignment = integer();
            } else if (text == ".attribute") {
                skip_to(")");
            } else if (text[0] == '.') {
                bytes = bytes_of(text.substr(1));
                if (!bytes) complain("unknown type " + std::string(text));
                alignment = std::max(alignment, bytes);
            } else {
                return std::string(text);
            }
        }
    }

    // Rows of a matrix stand one after another.
    void initial(Variable& variable) {
        if (!take("{")) {
            variable.initial.push_back(initial_value());
            return;
        }
        while (!take("}")) {
            initial(variable);
            take(",");
        }
    }

    Initial initial_value() {
        bool negative = take("-");
        std::string_view text = next();
        if (is_number(text)) return {number_of(text, negative), ""};
        if (text != "generic") return {addend(), std::string(text)};
        expect("(");
        Initial found{0, std::string(next())};
        expect(")");
        found.number = addend();
        return found;
    }

    // + 4 or - 4 behind a name
    uint64_t addend() {
        if (take("-")) return number_of(next(), true);
        if (!take("+")) return 0;
        bool negative = take("-");
        return number_of(next(), negative);
    }

    // --- kernels and functions ---

    void entry() {
        begin_code();
        kernel_.name = next();
        if (take("(")) parameters(kernel_.parameters);
        if (body()) module_.kernels.push_back(std::move(kernel_));
    }

    void begin_code() {
        kernel_ = {};
        scope_ = std::make_shared<Scope>();
        kernel_.scope = scope_;
        source_file_ = 0;
        source_line_ = 0;
    }

    // x[, y[, z]]
    std::vector<int> sizes() {
        std::vector<int> found{integer()};
        while (take(",")) found.push_back(integer());
        found.resize(3, 1);
        return found;
    }

    // False: there is none, the text only declares the name.
    bool body() {
        while (peek() != "{" && peek() != ";") {
            if (take(".maxntid")) kernel_.most_threads = sizes();
            else if (take(".reqntid")) kernel_.required_threads = sizes();
            else next();  // .minnctapersm and the like change no result
        }
        if (take(";")) return false;
        next();
        for (int depth = 1; depth > 0;) {
            if (take("{")) {
                depth++;
                scope_ = std::make_shared<Scope>(Scope{scope_, {}, {}, {}, {}, {}});
            } else if (take("}")) {
                depth--;
                scope_ = scope_->around;
            } else {
                statement();
            }
        }
        return true;
    }

    void parameters(std::vector<ParameterText>& found) {
        while (!take(")")) {
            take(",");
            ParameterText one{"", 0, 1};
            one.in_register = take(".reg");
            if (!one.in_register) expect(".param");
            bool is_predicate = peek() == ".pred";
            one.name = declared(one.bytes, one.alignment);
            if (take("[")) {
                one.bytes *= take("]") ? 0 : integer();
                if (one.bytes) expect("]");
            }
            if (one.in_register) declare_register(one.name, one.bytes, is_predicate);
            found.push_back(one);
        }
    }

    void declare_register(const std::string& name, int bytes, bool is_predicate) {
        scope_->registers[name] = {kernel_.words, bytes, is_predicate};
        kernel_.words += words_of(bytes);
    }

    void statement() {
        if (take(".reg")) return registers();
        if (take(".shared")) return scoped(Storage::shared);
        if (take(".local") || take(".param")) return scoped(Storage::local);  // .param: arguments of a call
        if (take(".loc")) return location();
        if (take(".file")) return file();
        if (take(".section")) return skip_braces();
        if (peek() == ".pragma") return skip_to(";");
        if (token(1).text == ":") return label();
        instruction();
    }

    void scoped(Storage storage) {
        Variable found = variable(storage);
        scope_->variables[found.name] = found;
    }

    // .loc 1 23 5 [, function_name NAME [+ 4], inlined_at 1 40 3]
    void location() {
        source_file_ = integer();
        source_line_ = integer();
        integer();
        while (take(",")) {
            if (take("function_name")) {
                next();
                addend();
            } else if (take("inlined_at")) {
                integer();
                integer();
                integer();
            }
        }
    }

    void label() {
        std::string name(next());
        next();
        if (take(".callprototype") || take(".calltargets")) return skip_to(";");  // of calls through pointers
        if (!take(".branchtargets")) {
            scope_->labels[name] = int(kernel_.statements.size());
            return;
        }
        auto& targets = scope_->tables[name];
        do {
            targets.emplace_back(next());
        } while (take(","));
        expect(";");
    }

    // .reg .b32 %r<100>, x;
    void registers() {
        std::string_view type = next().substr(1);
        int bytes = bytes_of(type);
        if (!bytes) complain("no registers of type ." + std::string(type) + " are known");
        do {
            std::string name(next());
            if (take("<")) {
                int count = integer();
                expect(">");
                scope_->ranges[name] = {kernel_.words, count, bytes, type == "pred"};
                kernel_.words += count * words_of(bytes);
            } else {
                declare_register(name, bytes, type == "pred");
            }
        } while (take(","));
        expect(";");
    }

    void instruction() {
        Statement found;
        const Token& first = token();
        if (take("@")) {
            found.guard_negated = take("!");
            found.guard = next();
        }
        found.opcode = Opcode(next());
        while (peek() != ";") {
            found.operands.push_back(operand());
            take(",");
        }
        found.text = one_line(first.text.data(), peek().data());
        next();
        found.scope = scope_;
        found.line = first.line;
        found.source_file = source_file_;
        found.source_line = source_line_;
        kernel_.statements.push_back(std::move(found));
    }

    // --- operands ---

    Operand operand() {
        if (take("{")) return list("}");
        if (take("(")) return list(")");
        if (take("[")) return address();
        Operand found;
        found.negated = take("!");
        bool negative = take("-");
        std::string_view text = next();
        if (is_decimal_real(text)) {
            found.kind = Operand::Kind::constant;
            found.is_real = true;
            found.real = std::strtod(std::string(text).c_str(), nullptr) * (negative ? -1 : 1);
        } else if (is_number(text)) {
            found.kind = Operand::Kind::constant;
            found.number = number_of(text, negative);
        } else {
            found.name = text;
            if (take("|")) found.second = next();
            found.number = addend();
        }
        return found;
    }

    Operand list(std::string_view end) {
        Operand found;
        found.kind = Operand::Kind::list;
        while (!take(end)) {
            found.parts.push_back(operand());
            take(",");
        }
        return found;
    }

    Operand address() {
        Operand found;
        found.kind = Operand::Kind::memory;
        if (is_number(peek())) found.number = number_of(next(), false);
        else found.name = next();
        found.number += addend();
        expect("]");
        return found;
    }

    std::vector<Token> tokens_;
    size_t at_ = 0;
    ModuleText module_;
    KernelText kernel_;
    std::shared_ptr<Scope> scope_;
    int source_file_ = 0;
    int source_line_ = 0;
};

}  // namespace

ModuleText read(const std::string& ptx) {
    Reader reader(ptx);
    try {
        return reader.read();
    } catch (const std::logic_error& e) {  // of std::stoull
        throw Fault(FaultKind::text, "PTX, line " + std::to_string(reader.line()) + ": not a number: " + e.what());
    }
}

// --- opcodes and types -----------------------------------------------------------------------------------------------

Opcode::Opcode(std::string_view text) {
    parts_.emplace_back();
    for (char c : text) {
        if (c == '.') parts_.emplace_back();
        else parts_.back() += c;
    }
}

bool Opcode::has(std::string_view part) const {
    return std::find(parts_.begin() + 1, parts_.end(), part) != parts_.end();
}

bool Opcode::take(std::string_view part) {
    for (size_t n = 1; n < parts_.size(); n++) {
        if (parts_[n] != part) continue;
        taken_ |= 1u << n;
        return true;
    }
    return false;
}

void Opcode::take_all(std::initializer_list<std::string_view> parts) {
    for (std::string_view part : parts) take(part);
}

const std::string& Opcode::last(int before) const {
    size_t behind = size_t(before) + 1;
    return part(behind < parts_.size() ? parts_.size() - behind : parts_.size());
}

const std::string& Opcode::part(size_t number) const {
    static const std::string none;
    return number < parts_.size() ? parts_[number] : none;
}

const std::string& Opcode::take_last(int before) {
    int at = int(parts_.size()) - 1 - before;
    if (at > 0) taken_ |= 1u << at;
    return last(before);
}

std::string Opcode::unknown() const {
    for (size_t n = 1; n < parts_.size(); n++)
        if (!(taken_ >> n & 1)) return parts_[n];
    return "";
}

int bytes_of(std::string_view type) {
    static const std::map<std::string_view, int> known = {
        {"pred", 4},    {"b8", 1},      {"u8", 1},      {"s8", 1},      {"b16", 2},     {"u16", 2},    {"s16", 2},
        {"f16", 2},     {"bf16", 2},    {"b32", 4},     {"u32", 4},     {"s32", 4},     {"f32", 4},    {"tf32", 4},
        {"f16x2", 4},   {"bf16x2", 4},  {"u16x2", 4},   {"s16x2", 4},   {"b64", 8},     {"u64", 8},    {"s64", 8},
        {"f64", 8},     {"f32x2", 8},   {"e2m1x2", 1},  {"e4m3x2", 2},  {"e5m2x2", 2},  {"e2m3x2", 2}, {"e3m2x2", 2},
        {"ue8m0x2", 2}, {"e2m1x4", 2},  {"e4m3x4", 4},  {"e5m2x4", 4},  {"e2m3x4", 4},  {"e3m2x4", 4}};
    auto found = known.find(type);
    return found == known.end() ? 0 : found->second;
}

}  // namespace device
