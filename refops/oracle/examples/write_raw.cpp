// SwiGLU -> MXFP8 (E4M3) of raw bfloat16 rows [act | gate]: x.bin -> codes q.bin and scale bytes s.bin (rows x H / 32).
//   write_raw x.bin ROWS H q.bin s.bin
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

static uint32_t bits_of(float v) { uint32_t b; std::memcpy(&b, &v, 4); return b; }
static float from_bits(uint32_t b) { float v; std::memcpy(&v, &b, 4); return v; }
static float widen(uint16_t bf16) { return from_bits(uint32_t(bf16) << 16); }
static float round_bf16(float v) { return from_bits((bits_of(v) + 0x7FFF + (bits_of(v) >> 16 & 1)) & 0xFFFF0000u); }
static uint8_t encode_e4m3(float v) {  // saturating, to nearest, ties to even
    const float magnitude = std::isnan(v) ? 480 : std::fmin(std::fabs(v), 448.0f);  // NaN is where 480 would be
    const int e = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
    return uint8_t((std::signbit(v) << 7) | ((e + 6) * 8 + int(std::nearbyint(std::ldexp(magnitude, 3 - e)))));
}

int main(int argc, char** argv) {
    if (argc != 6) return 2;
    const size_t rows = std::atoi(argv[2]), h = std::atoi(argv[3]);
    std::vector<uint16_t> x(rows * 2 * h);
    if (!std::ifstream(argv[1], std::ios::binary).read(reinterpret_cast<char*>(x.data()), x.size() * 2)) return 2;
    std::ofstream q(argv[4], std::ios::binary), s(argv[5], std::ios::binary);
    for (size_t block = 0; block < rows * h / 32; block++) {
        const uint16_t* act = &x[block / (h / 32) * 2 * h + block % (h / 32) * 32];
        float y[32], amax = 0;
        for (int i = 0; i < 32; i++) {  // rounded to bfloat16 before the amax, as TE's fused kernel does
            y[i] = round_bf16(widen(act[i]) / (1 + std::exp(-widen(act[i]))) * widen(act[h + i]));
            amax = std::fmax(amax, std::fabs(y[i]));
        }
        const uint32_t b = bits_of(amax * (1 / 448.0f));  // the scale is this, rounded up to a power of two
        const bool up = (b & 0x7FFFFF) > (b >> 23 ? 0u : 0x400000u);
        const uint8_t scale = uint8_t((b >> 23) + up - (b >> 23 == 255));  // an infinite amax: 254
        s.put(char(scale));
        for (float v : y) q.put(char(encode_e4m3(std::ldexp(v, 127 - scale))));
    }
}
