// Products of pairs of bfloat16 numbers by themselves, and how weights get into their panels (cpu_tiles.h).

#include "cpu_panels.h"

namespace {

// WIDTH numbers of a result that is larger than any cache: its lines are not read before they are written
inline void put_past_cache(const float *from, float *to) {
#ifdef __AVX512BF16__
    if ((uintptr_t)to % 64 == 0) {
        for (int64_t half = 0; half < 2; half++) _mm512_stream_ps(to + half * HALF, _mm512_loadu_ps(from + half * HALF));
        return;
    }
#endif
    memcpy(to, from, WIDTH * sizeof(float));
}

}  // namespace

extern "C" {

// whether bfloat16 is multiplied by AMX
int rondel_has_amx() {
#ifdef RONDEL_AMX
    return 1;
#else
    return 0;
#endif
}

// rows `first`, `first` + `stride`, ... of the panels' outputs in units of HALF: joined gate and up lie in turns. `words`: of a
// row, 32 bits each
void rondel_pack_words(const void *weight, void *panels, int64_t words, int64_t width, int64_t first, int64_t stride,
                       int threads) {
    const float *from = (const float *)weight;  // words are moved, never computed with
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t unit = 0; unit < (width + HALF - 1) / HALF; unit++) {
        int64_t at = first + unit * stride, columns = std::min(HALF, width - unit * HALF);
        put_outputs(from + unit * HALF * words, words, columns, (float *)panels + at / 2 * words * WIDTH + at % 2 * HALF);
    }
}

// x: rows `step` numbers apart
void rondel_pair_product(const void *x, int64_t step, const void *panels, const float *bias, float *out, int64_t rows, int64_t in,
                         int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Registers own;
        panel_product((const bf16 *)x, step, (const bf16 *)panels, rows, in, panels_of(width), [&](int64_t first, int64_t some, int64_t p, const float *sums) {
            int64_t columns = std::min(WIDTH, width - p * WIDTH);
            for (int64_t r = 0; r < some; r++) {
                float *to = out + (first + r) * width + p * WIDTH;
                if (!bias && columns == WIDTH) put_past_cache(sums + r * WIDTH, to);
                else
                    for (int64_t i = 0; i < columns; i++) to[i] = sums[r * WIDTH + i] + (bias ? bias[p * WIDTH + i] : 0.0f);
            }
        });
#ifdef __AVX512BF16__
        _mm_sfence();  // who reads them sees them
#endif
    }
}

}
