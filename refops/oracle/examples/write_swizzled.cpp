// MXFP8 (E4M3) of a raw bfloat16 matrix, both copies, scale bytes in the order that GEMMs read: x.bin -> codes q.bin
// and scales s.bin with blocks along K (rowwise), codes cq.bin and scales cs.bin with blocks along M (columnwise).
//   write_swizzled x.bin M K q.bin s.bin cq.bin cs.bin
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

static uint32_t bits_of(float v) { uint32_t b; std::memcpy(&b, &v, 4); return b; }
static float widen(uint16_t bf16) { float v; const uint32_t b = bf16 << 16; std::memcpy(&v, &b, 4); return v; }
static uint8_t encode_e4m3(float v) {  // saturating, to nearest, ties to even
    const float magnitude = std::isnan(v) ? 480 : std::fmin(std::fabs(v), 448.0f);  // NaN is where 480 would be
    const int e = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
    return uint8_t((std::signbit(v) << 7) | ((e + 6) * 8 + int(std::nearbyint(std::ldexp(magnitude, 3 - e)))));
}
static void write(const char* path, const std::vector<uint8_t>& bytes) {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

int main(int argc, char** argv) {
    if (argc != 8) return 2;
    const size_t m = std::atoi(argv[2]), k = std::atoi(argv[3]);
    std::vector<uint16_t> x(m * k);
    if (!std::ifstream(argv[1], std::ios::binary).read(reinterpret_cast<char*>(x.data()), x.size() * 2)) return 2;
    for (const bool columnwise : {false, true}) {
        const size_t outer = columnwise ? k : m, inner = columnwise ? m : k;  // blocks lie along the inner dimension
        const size_t tiles = (inner + 127) / 128;                             // of 128 x 4 scales, along the blocks
        std::vector<uint8_t> codes(m * k), scales((outer + 127) / 128 * tiles * 512);  // padding is 0
        for (size_t i = 0; i < outer; i++) for (size_t j = 0; j < inner; j += 32) {
            const size_t length = std::fmin(32, inner - j), step = columnwise ? k : 1;
            const size_t first = columnwise ? j * k + i : i * k + j;
            float amax = 0;
            for (size_t n = 0; n < length; n++) amax = std::fmax(amax, std::fabs(widen(x[first + n * step])));
            const uint32_t b = bits_of(amax * (1 / 448.0f));  // the scale is this, rounded up to a power of two
            const uint8_t scale = uint8_t((b >> 23) + ((b & 0x7FFFFF) > (b >> 23 ? 0u : 0x400000u)) - (b >> 23 == 255));
            scales[(i / 128 * tiles + j / 128) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j / 32 % 4] = scale;
            for (size_t n = 0; n < length; n++)
                codes[first + n * step] = encode_e4m3(std::ldexp(widen(x[first + n * step]), 127 - scale));
        }
        write(argv[4 + 2 * columnwise], codes);
        write(argv[5 + 2 * columnwise], scales);
    }
}
