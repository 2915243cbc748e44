// Reads one array of a golden file: writes its raw bytes to stdout, or compares them with a dump.
//   read_golden GOLDEN.safetensors input.x > x.bin
//   read_golden GOLDEN.safetensors output.rowwise_data q.bin     (exit code 1: they differ)
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

static std::string read_file(const char* path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

int main(int argc, char** argv) {
    if (argc < 3) return std::fprintf(stderr, "usage: read_golden GOLDEN ARRAY [DUMP]\n"), 2;
    // safetensors: 8 bytes length of a JSON text, the text, the arrays. "data_offsets" count from the end of the text.
    const std::string file = read_file(argv[1]);
    uint64_t length = 0;
    if (file.size() >= 8) std::memcpy(&length, file.data(), 8);  // little-endian
    const std::string json = file.size() > 8 ? file.substr(8, length) : "";
    const size_t entry = json.find("\"" + std::string(argv[2]) + "\":{");
    unsigned long long begin, end;
    if (entry == std::string::npos || std::sscanf(json.c_str() + json.find("\"data_offsets\":[", entry),
                                                  "\"data_offsets\":[%llu,%llu]", &begin, &end) != 2)
        return std::fprintf(stderr, "no array %s in %s\n", argv[2], argv[1]), 2;
    const std::string array = file.substr(8 + length + begin, end - begin);
    if (argc == 3) return std::fwrite(array.data(), 1, array.size(), stdout) == array.size() ? 0 : 2;
    const std::string dump = read_file(argv[3]);
    if (dump.size() != array.size())
        return std::fprintf(stderr, "%zu bytes, expected %zu\n", dump.size(), array.size()), 2;
    size_t differing = 0;
    for (size_t i = 0; i < array.size(); i++) differing += dump[i] != array[i];
    std::printf("%s: %zu of %zu bytes differ\n", argv[2], differing, array.size());
    return differing != 0;
}
