// What stands between a cubin and the PTX that linker.cpp puts behind it, with its terminating zero.
#pragma once

constexpr char MARK[] = "EMULATOR-PTX:";
