// Products with weights in panels (cpu_panels.h, cpu_pairs.h), and how weights get into them.

#include "cpu_pairs.h"
#include "cpu_panels.h"

namespace {

using namespace panels;

template <class W>
void product(const float *x, const W *panels, const float *bias, float *out, int64_t rows, int64_t in, int64_t width,
             int threads) {
    int64_t count = (width + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(threads)
    for (int64_t first = 0; first < rows; first += MANY) {
        int64_t some = std::min(MANY, rows - first);
        eight_t sums[2 * MANY];
#pragma omp for schedule(static) nowait
        for (int64_t p = 0; p < count; p++) {
            panel_sums(some, x + first * in, in, panels + p * in * PANEL, in, sums);
            int64_t columns = std::min<int64_t>(PANEL, width - p * PANEL);
            for (int64_t r = 0; r < some; r++) {
                const float *own = (const float *)(sums + 2 * r);
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

void rondel_product(int code, const float *x, const void *panels, const float *bias, float *out, int64_t rows,
                    int64_t in, int64_t width, int threads) {
    if (code) product(x, (const bf16 *)panels, bias, out, rows, in, width, threads);
    else product(x, (const float *)panels, bias, out, rows, in, width, threads);
}

}
