// The two numbers of a tensor's digest (models/names.py has the formula): it is read once.

#include <cstdint>
#include <vector>

namespace {

const int64_t FEW = 1 << 17;  // words that one thread has added up before another is awake

inline uint64_t folded(uint64_t word) { return word ^ word >> 29; }

}  // namespace

extern "C" {

// `size` bytes, whose words lie in rows of `width`; inside [width] and across [1 + whole rows] are odd multipliers
void rondel_digest(const uint8_t *bytes, int64_t size, const uint64_t *inside, const uint64_t *across, int64_t width, uint64_t *out,
                   int threads) {
    const uint64_t *words = (const uint64_t *)bytes;
    int64_t whole = size / 8 / width, rest = size / 8 % width;
    std::vector<uint64_t> columns(whole ? width : rest);
    uint64_t rows = 0, last = 0, tail = 0;
#pragma omp parallel num_threads(whole * width < FEW ? 1 : threads) reduction(+ : rows)
    {
        std::vector<uint64_t> own(width);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < whole; r++) {
            const uint64_t *row = words + r * width;
            uint64_t sum = 0, *mine = own.data();
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < width; c++) sum += inside[c] * row[c], mine[c] += row[c];
            rows += across[1 + r] * folded(sum);
        }
#pragma omp critical
        for (int64_t c = 0; c < (whole ? width : 0); c++) columns[c] += own[c];
    }
    for (int64_t c = 0; c < rest; c++) last += inside[c] * words[whole * width + c], columns[c] += words[whole * width + c];
    for (int64_t i = size / 8 * 8; i < size; i++) tail |= (uint64_t)bytes[i] << 8 * (i % 8);
    out[0] = rows + across[0] * folded(last) + tail * 0x9E3779B97F4A7C15 + size;
    out[1] = 0;
    for (uint64_t c = 0; c < columns.size(); c++) out[1] += inside[c] * folded(columns[c]);
}

}
