// x [rows, in] @ w [out, in]^T + bias of a few rows or many, over weights that lie in panels: [out / PANEL, in, PANEL],
// the last one filled up with zeros. So a product reads its weights once, from the first to the last, in the order in
// which they lie; weights in bfloat16 are widened on the way, without rounding.
//
// Each sum begins with 0 and takes one fused product after the other, in the order of `in`; sums over CHUNK numbers
// each are added. It is the order of oneDNN on AVX2, so the bits are, too: cpu_kernels.py asks both before it believes it.

#pragma once

#include "cpu_rows.h"

namespace {
namespace panels {

constexpr int PANEL = 16;                 // columns that are computed at once
constexpr int64_t TILE = 6;               // rows: with 16 columns as many sums as registers of 8 numbers hold
constexpr int64_t CHUNK = 1024;           // numbers of a row whose products are one sum
constexpr int64_t DEPTH = 256;            // of them those whose part of a panel stays in the first cache: 16 KB
constexpr int64_t MANY = 96;              // rows that are computed over one reading of the weights
constexpr int64_t AHEAD = 1024;           // bytes between what is read and what is fetched

typedef float eight_t __attribute__((vector_size(32)));
typedef uint16_t halves_t __attribute__((vector_size(16)));
typedef uint32_t bits_t __attribute__((vector_size(32)));

inline eight_t load_eight(const float *from) {
    eight_t out;
    memcpy(&out, from, sizeof out);
    return out;
}
inline eight_t load_eight(const bf16 *from) {
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
        eight_t low = load_eight(panel), high = load_eight(panel + 8);
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
    for (int64_t left = (rows + TILE - 1) / TILE; left; left--) {
        int64_t some = rows / left;  // as many in each as can be: two sums alone wait for each other
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
    for (int64_t i = 0; i < count * PANEL / 8; i++) room[i] = load_eight(panel + 8 * i);
    tiles(rows, x, step, (const float *)room, count, sums);
}

// sums [rows, PANEL] of one panel, rows at most MANY
template <class W>
inline void panel_sums(int64_t rows, const float *x, int64_t step, const W *panel, int64_t in, eight_t *whole) {
    eight_t sums[2 * MANY];
    for (int64_t chunk = 0; chunk < in; chunk += CHUNK) {
        int64_t end = std::min(in, chunk + CHUNK);
        eight_t *here = chunk ? sums : whole;
        for (int64_t i = 0; i < 2 * rows; i++) here[i] = eight_t{0};
        for (int64_t k = chunk; k < end; k += DEPTH)
            part_of_panel(rows, x + k, step, panel + k * PANEL, std::min(DEPTH, end - k), here);
        for (int64_t i = 0; chunk && i < 2 * rows; i++) whole[i] += sums[i];
    }
}

}  // namespace panels

// `use(first row, rows, unit, sums)` of two panels each, as `pair_product`.
template <class Use>
inline void multiply(const float *x, const float *w, int64_t rows, int64_t in, int64_t width, const Use &use) {
    using namespace panels;
    int64_t count = (width + PANEL - 1) / PANEL;
    for (int64_t first = 0; first < rows; first += MANY) {
        int64_t some = std::min(MANY, rows - first);
        eight_t sums[2][2 * MANY];
#pragma omp for schedule(dynamic) nowait
        for (int64_t unit = 0; unit < (count + 1) / 2; unit++) {
            for (int64_t half = 0; half < std::min<int64_t>(2, count - 2 * unit); half++)
                panel_sums(some, x + first * in, in, w + (2 * unit + half) * in * PANEL, in, sums[half]);
            use(first, some, unit, Sums{(const float *)sums, PANEL, 2 * MANY * 8});
        }
    }
}

}  // namespace
