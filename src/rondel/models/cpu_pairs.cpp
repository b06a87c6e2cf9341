// Products of pairs by themselves, and how weights get into their panels (cpu_pairs.h).

#include "cpu_pairs.h"

extern "C" {

// rows `first`, `first` + `stride`, ... of the panels' outputs in units of HALF: joined gate and up lie in turns
void rondel_pack_pairs(const void *weight, void *panels, int64_t in, int64_t width, int64_t first, int64_t stride,
                       int threads) {
    const uint16_t *from = (const uint16_t *)weight;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t unit = 0; unit < (width + HALF - 1) / HALF; unit++) {
        int64_t at = first + unit * stride, columns = std::min(HALF, width - unit * HALF);
        uint16_t *to = (uint16_t *)panels + at / 2 * in * WIDTH + at % 2 * WIDTH;
        for (int64_t k = 0; k < in / 2; k++)
            for (int64_t i = 0; i < columns; i++) memcpy(to + k * 2 * WIDTH + 2 * i, from + (unit * HALF + i) * in + 2 * k, 4);
    }
}

void rondel_pair_product(const void *x, const void *panels, const float *bias, float *out, int64_t rows, int64_t in,
                         int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
    pair_product((const bf16 *)x, (const bf16 *)panels, rows, in, panels_of(width), [&](int64_t first, int64_t some, int64_t p, const float *sums) {
        int64_t columns = std::min(WIDTH, width - p * WIDTH);
        for (int64_t r = 0; r < some; r++) {
            float *to = out + (first + r) * width + p * WIDTH;
            for (int64_t i = 0; bias && i < columns; i++) to[i] = sums[r * WIDTH + i] + bias[p * WIDTH + i];
            if (!bias) memcpy(to, sums + r * WIDTH, columns * sizeof(float));
        }
    });
}

}
