// x [rows, in] @ w [out, in]^T of bfloat16 numbers, two of a row at a time, as AVX-512 multiplies them: an fp32 sum takes
// x₁w₁ and x₀w₀ of one pair after the other. Weights lie in panels of WIDTH outputs, [out / WIDTH, in / 2, WIDTH, 2], the
// last one filled up with zeros, so a product reads them once, in the order in which they lie.
//
// A row's sums are taken in the order of `in`, whoever is beside it, so its bits depend on nothing but the row.

#pragma once

#include "cpu_rows.h"

namespace {

constexpr int64_t WIDTH = 32;      // outputs of a panel: two registers
constexpr int64_t HALF = 16;       // outputs of a register
constexpr int64_t PAIR_TILE = 12;  // rows: with 32 outputs three quarters of all registers hold sums
constexpr int64_t PAIR_ROWS = 192;  // rows that are computed over one reading of the weights

// sums [R, WIDTH] of a panel over rows that are `step` apart, whose pairs are `stride` apart
#ifdef __AVX512BF16__
template <int R, int64_t stride = 2>
inline void pair_tile(const bf16 *x, int64_t step, const bf16 *panel, int64_t pairs, float *sums) {
    __m512 held[R][2];
    for (int r = 0; r < R; r++) held[r][0] = held[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++, panel += 2 * WIDTH) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + WIDTH);
        __builtin_prefetch((const char *)panel + 1024);
        __builtin_prefetch((const char *)panel + 1088);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, x + r * step + stride * k, sizeof pair);
            __m512bh all = (__m512bh)_mm512_set1_epi32(pair);
            held[r][0] = _mm512_dpbf16_ps(held[r][0], all, low);
            held[r][1] = _mm512_dpbf16_ps(held[r][1], all, high);
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + r * WIDTH + half * HALF, held[r][half]);
}
#else  // the same sums on a processor without such products: for tests, far from fast
template <int R, int64_t stride = 2>
inline void pair_tile(const bf16 *x, int64_t step, const bf16 *panel, int64_t pairs, float *sums) {
    for (int64_t i = 0; i < R * WIDTH; i++) sums[i] = 0;
    for (int64_t k = 0; k < pairs; k++, panel += 2 * WIDTH)
        for (int r = 0; r < R; r++) {
            float first = wide(x[r * step + stride * k]), second = wide(x[r * step + stride * k + 1]);
            for (int64_t i = 0; i < WIDTH; i++) sums[r * WIDTH + i] += second * wide(panel[2 * i + 1]);
            for (int64_t i = 0; i < WIDTH; i++) sums[r * WIDTH + i] += first * wide(panel[2 * i]);
        }
}
#endif

// the same of up to PAIR_TILE rows
inline void pair_rows(int64_t rows, const bf16 *x, int64_t step, const bf16 *panel, int64_t pairs, float *sums) {
    switch (rows) {
        case 1: pair_tile<1>(x, step, panel, pairs, sums); break;
        case 2: pair_tile<2>(x, step, panel, pairs, sums); break;
        case 3: pair_tile<3>(x, step, panel, pairs, sums); break;
        case 4: pair_tile<4>(x, step, panel, pairs, sums); break;
        case 5: pair_tile<5>(x, step, panel, pairs, sums); break;
        case 6: pair_tile<6>(x, step, panel, pairs, sums); break;
        case 7: pair_tile<7>(x, step, panel, pairs, sums); break;
        case 8: pair_tile<8>(x, step, panel, pairs, sums); break;
        case 9: pair_tile<9>(x, step, panel, pairs, sums); break;
        case 10: pair_tile<10>(x, step, panel, pairs, sums); break;
        case 11: pair_tile<11>(x, step, panel, pairs, sums); break;
        default: pair_tile<12>(x, step, panel, pairs, sums);
    }
}

// sums [rows, WIDTH] of one panel
inline void pair_panel(int64_t rows, const bf16 *x, int64_t step, const bf16 *panel, int64_t pairs, float *sums) {
    for (int64_t left = (rows + PAIR_TILE - 1) / PAIR_TILE; left; left--) {
        int64_t some = rows / left;  // as many in each as can be
        pair_rows(some, x, step, panel, pairs, sums);
        x += some * step, sums += some * WIDTH, rows -= some;
    }
}

// `use(first row, rows, panel, sums [rows, WIDTH])` of each panel, on the threads of the region that this is called in, which do not wait
// for each other at its end.
template <class Use>
inline void pair_product(const bf16 *x, const bf16 *panels, int64_t rows, int64_t in, int64_t count, const Use &use) {
    for (int64_t first = 0; first < rows; first += PAIR_ROWS) {
        int64_t some = std::min(PAIR_ROWS, rows - first);
        alignas(64) float sums[PAIR_ROWS * WIDTH];
#pragma omp for schedule(dynamic) nowait
        for (int64_t p = 0; p < count; p++) {
            pair_panel(some, x + first * in, in, panels + p * in * WIDTH, in / 2, sums);
            use(first, some, p, sums);
        }
    }
}

inline int64_t panels_of(int64_t width) { return (width + WIDTH - 1) / WIDTH; }

}  // namespace
