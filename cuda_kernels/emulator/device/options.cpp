// The settings that hold for every device; whoever drives them sets them.
#include "device.h"

namespace device {

Options& options() {
    static Options it;
    return it;
}

}  // namespace device
