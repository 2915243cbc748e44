// What goes wrong in a kernel or in its text: an error of a kind, with a sentence. Everything in `device` throws it.
#pragma once
#include <stdexcept>
#include <string>

namespace device {

enum class FaultKind {
    execution,   // what no other kind says: a race, a barrier that nobody reaches, an endless loop
    address,     // bytes that are not the kernel's
    misaligned,  // an address that is no multiple of what is accessed
    text,        // PTX that cannot be read, or has what is not known
};

struct Fault : std::runtime_error {
    Fault(FaultKind kind, const std::string& sentence) : std::runtime_error(sentence), kind(kind) {}

    FaultKind kind;
};

}  // namespace device
