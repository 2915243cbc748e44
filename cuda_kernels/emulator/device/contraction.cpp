// mul and add in one rounding, as ptxas may make them: a product whose only use is a sum of the same stretch of code.
//
// PTX allows it where neither names a rounding: mul.f32 and add.f32, not mul.rn.f32. It knows instructions and the
// opcodes they come from; what one instruction does is instructions/arithmetic.cpp's.
#include <algorithm>
#include <map>
#include <optional>

#include "instructions/choice.h"
#include "lowering.h"

namespace device {

namespace {

struct Form {
    std::string operation, type;
    bool flush = false;

    bool fits(const Form& other) const { return type == other.type && flush == other.flush; }
};

// "mul.f32", "add.ftz.f32": nothing else may stand in the opcode.
std::optional<Form> form_of(const Statement* statement, const Instruction& instruction) {
    if (!statement || instruction.guard >= 0) return std::nullopt;
    Opcode opcode = statement->opcode;
    Form form{opcode.name(), opcode.take_last(), opcode.take("ftz")};
    bool known = form.operation == "mul" || form.operation == "add" || form.operation == "sub";
    if (!known || !opcode.unknown().empty() || (form.type != "f32" && form.type != "f64")) return std::nullopt;
    return form;
}

class Contraction {
  public:
    Contraction(Kernel& kernel, const Lowered& lowered) : code_(kernel.code), lowered_(lowered) {
        for (auto& instruction : code_)
            for (int source : instruction.sources)
                if (source >= 0) uses_[source]++;
    }

    void run() {
        for (size_t at = 0; at < code_.size(); at++) {
            bool boundary = lowered_.starts.count(int(at)) || code_[at].kind != Kind::plain;
            if (boundary) products_.clear();
            auto form = form_of(lowered_.statements[at], code_[at]);
            if (form && form->operation != "mul") try_to_fuse(at, *form);
            for (int result : code_[at].results)
                if (result >= 0) overwritten(result);
            if (form && form->operation == "mul") products_[code_[at].results[0]] = {at, *form};
        }
    }

  private:
    struct Product {
        size_t at;
        Form form;
    };

    void try_to_fuse(size_t at, const Form& sum) {
        for (int side : {0, 1}) {
            auto found = products_.find(code_[at].sources[side]);
            if (found == products_.end() || uses_[found->first] != 1 || !found->second.form.fits(sum)) continue;
            fuse(at, side, sum, found->second.at);
            return;
        }
    }

    // a*b + c, a*b - c or c - a*b
    void fuse(size_t at, int side, const Form& sum, size_t product) {
        Instruction& instruction = code_[at];
        int other = instruction.sources[1 - side];
        instruction.sources[0] = code_[product].sources[0];
        instruction.sources[1] = code_[product].sources[1];
        instruction.sources[2] = other;
        std::string form = sum.operation == "add" ? "fma" : side == 0 ? "fms" : "fnma";
        instruction.run = choose_contracted(form, sum.type, sum.flush);
        code_[product].run = do_nothing;
        code_[product].counted = false;
    }

    // A product is lost when its register or one of its factors changes.
    void overwritten(int slot) {
        products_.erase(slot);
        std::erase_if(products_, [&](auto& entry) {
            const Instruction& product = code_[entry.second.at];
            return product.sources[0] == slot || product.sources[1] == slot;
        });
    }

    std::vector<Instruction>& code_;
    const Lowered& lowered_;
    std::map<int, int> uses_;           // slot -> how often it is read
    std::map<int, Product> products_;   // slot -> the product that stands in it
};

}  // namespace

void contract(Kernel& kernel, const Lowered& lowered) { Contraction(kernel, lowered).run(); }

}  // namespace device
