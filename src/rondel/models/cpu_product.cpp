// x [rows, in] @ w [out, in]^T + bias of a few rows or many, over weights that lie in panels: [out / PANEL, in, PANEL],
// the last one filled up with zeros. So a product reads its weights once, from the first to the last, in the order in
// which they lie; weights in bfloat16 are widened on the way, without rounding.
//
// Each sum begins with 0 and takes one fused product after the other, in the order of `in`; sums over CHUNK numbers
// each are added. It is the order of oneDNN on AVX2, so the bits are, too: cpu_kernels.py asks both before it believes it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int PANEL = 16;                 // columns that are computed at once
constexpr int64_t TILE = 6;               // rows: with 16 columns as many sums as registers of 8 numbers hold
constexpr int64_t CHUNK = 1024;           // numbers of a row whose products are one sum
constexpr int64_t DEPTH = 256;            // of them those whose part of a panel stays in the first cache: 16 KB
constexpr int64_t MANY = 96;              // rows that are computed over one reading of the weights
constexpr int64_t AT_ONCE = 8;            // panels: of two threads one is always slower, where others use the machine
constexpr int64_t AHEAD = 1024;           // bytes between what is read and what is fetched

typedef float eight_t __attribute__((vector_size(32)));
typedef uint16_t halves_t __attribute__((vector_size(16)));
typedef uint32_t bits_t __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

inline eight_t load(const float *from) {
    eight_t out;
    memcpy(&out, from, sizeof out);
    return out;
}
inline eight_t load(const bf16 *from) {
    halves_t bits;
    memcpy(&bits, from, sizeof bits);
    return (eight_t)(__builtin_convertvector(bits, bits_t) << 16);
}

inline eight_t fused(eight_t a, eight_t b, eight_t c) {  // a · b + c, rounded once
#ifdef __FMA__
    return __builtin_ia32_vfmaddps256(a, b, c);
#else
    for (int i = 0; i < 8; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

// R rows of x times `count` rows of a panel, added to sums [R, 2]
template <int R, class W> void tile(const float *x, int64_t step, const W *panel, int64_t count, eight_t *sums) {
    eight_t held[R][2];
    memcpy(held, sums, sizeof held);
    for (int64_t k = 0; k < count; k++, panel += PANEL) {
        eight_t low = load(panel), high = load(panel + 8);
        __builtin_prefetch((const char *)panel + AHEAD);
        for (int r = 0; r < R; r++) {
            float one = x[r * step + k];
            eight_t all = {one, one, one, one, one, one, one, one};
            held[r][0] = fused(all, low, held[r][0]);
            held[r][1] = fused(all, high, held[r][1]);
        }
    }
    memcpy(sums, held, sizeof held);
}

template <class W> void tiles(int64_t rows, const float *x, int64_t step, const W *panel, int64_t count, eight_t *sums) {
    while (rows) {
        int64_t some = std::min(rows, TILE);  // seven and eight rows take 0.84 to 0.91 of the time of two tiles of four
        switch (some) {
            case 1: tile<1>(x, step, panel, count, sums); break;
            case 2: tile<2>(x, step, panel, count, sums); break;
            case 3: tile<3>(x, step, panel, count, sums); break;
            case 4: tile<4>(x, step, panel, count, sums); break;
            case 5: tile<5>(x, step, panel, count, sums); break;
            default: tile<6>(x, step, panel, count, sums);
        }
        x += some * step, sums += 2 * some, rows -= some;
    }
}

// The same; a part of a panel that several tiles read is widened once.
inline void part_of_panel(int64_t rows, const float *x, int64_t step, const float *panel, int64_t count, eight_t *sums) {
    tiles(rows, x, step, panel, count, sums);
}
inline void part_of_panel(int64_t rows, const float *x, int64_t step, const bf16 *panel, int64_t count, eight_t *sums) {
    if (rows <= 2 * TILE) return tiles(rows, x, step, panel, count, sums);
    eight_t room[DEPTH * PANEL / 8];
    for (int64_t i = 0; i < count * PANEL / 8; i++) room[i] = load(panel + 8 * i);
    tiles(rows, x, step, (const float *)room, count, sums);
}

template <class W>
void product(const float *x, int64_t step, const W *panels, const float *bias, float *out, int64_t rows, int64_t in, int64_t width,
             int threads) {
    int64_t count = (width + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(threads)
    for (int64_t first = 0; first < rows; first += MANY) {
        int64_t some = std::min(MANY, rows - first);
        eight_t whole[2 * MANY], sums[2 * MANY];
#pragma omp for schedule(dynamic, AT_ONCE) nowait
        for (int64_t p = 0; p < count; p++) {
            const W *panel = panels + p * in * PANEL;
            for (int64_t chunk = 0; chunk < in; chunk += CHUNK) {
                int64_t end = std::min(in, chunk + CHUNK);
                eight_t *here = chunk ? sums : whole;
                for (int64_t i = 0; i < 2 * some; i++) here[i] = eight_t{0};
                for (int64_t k = chunk; k < end; k += DEPTH)
                    part_of_panel(some, x + first * step + k, step, panel + k * PANEL, std::min(DEPTH, end - k), here);
                for (int64_t i = 0; chunk && i < 2 * some; i++) whole[i] += sums[i];
            }
            int64_t columns = std::min<int64_t>(PANEL, width - p * PANEL);
            for (int64_t r = 0; r < some; r++) {
                const float *own = (const float *)(whole + 2 * r);
                float *to = out + (first + r) * width + p * PANEL;
                for (int64_t i = 0; i < columns; i++) to[i] = bias ? own[i] + bias[p * PANEL + i] : own[i];
            }
        }
    }
}

template <class W> void pack(const W *weight, W *panels, int64_t in, int64_t width, int threads) {
    constexpr int64_t LINE = 64 / sizeof(W);  // of numbers that are read together
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < width; first += PANEL) {
        int64_t columns = std::min<int64_t>(PANEL, width - first);
        for (int64_t at = 0; at < in; at += LINE) {
            W room[LINE * PANEL] = {};
            int64_t count = std::min(LINE, in - at);
            for (int64_t i = 0; i < columns; i++) {
                const W *from = weight + (first + i) * in + at;
                for (int64_t k = 0; k < count; k++) room[k * PANEL + i] = from[k];
            }
            memcpy(panels + first * in + at * PANEL, room, count * PANEL * sizeof(W));
        }
    }
}

}  // namespace

extern "C" {

void rondel_pack(int code, const void *weight, void *panels, int64_t in, int64_t width, int threads) {
    if (code) pack((const bf16 *)weight, (bf16 *)panels, in, width, threads);
    else pack((const float *)weight, (float *)panels, in, width, threads);
}

// rows of x are `step` numbers apart: see cpu_tiles.h
void rondel_product(int code, const float *x, int64_t step, const void *panels, const float *bias, float *out, int64_t rows,
                    int64_t in, int64_t width, int threads) {
    if (code) product(x, step, (const bf16 *)panels, bias, out, rows, in, width, threads);
    else product(x, step, (const float *)panels, bias, out, rows, in, width, threads);
}

}
