// x [rows, in] @ w [out, in]^T of bfloat16 or float32 numbers, JOINED of a row at a time: AVX-512 multiplies two bfloat16
// numbers at once, and an fp32 sum takes x₁w₁ and x₀w₀ of a pair one after the other; AVX2 multiplies them as fp32 numbers, in the
// same order. AMX has registers that hold sixteen rows of 64 bytes: of bfloat16 it sums the first and the second numbers of sixteen
// pairs, and adds both to the fp32 sum. Weights lie in panels of WIDTH outputs, [out / WIDTH, in / JOINED, WIDTH, JOINED], the last one filled up with zeros,
// so a product reads them once, in the order in which they lie.
//
// Rows whose distance is a multiple of 4 KB lie in the same sets of a first cache and drive each other out: 64 rows of 2,048 numbers
// of bfloat16 were multiplied at 346 GFLOP/s for 390. So who makes rooms keeps their rows apart (`row_room` in cpu_kernels.py).
//
// A row's sums are taken in the order of `in`, whoever is beside it, so its bits depend on nothing but the row.

#pragma once

#include "cpu_rows.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define RONDEL_AMX
#endif

namespace {

template <class T> constexpr int64_t JOINED = sizeof(int32_t) / sizeof(T);  // numbers that are multiplied at once: a word
constexpr int64_t WIDTH = 32;  // outputs of a panel: two registers of AVX-512
constexpr int64_t HALF = 16;   // outputs of one
constexpr int64_t IN_VECTORS = 12;  // rows: with 32 outputs three quarters of AVX-512's registers hold sums
template <class T> constexpr int64_t TILE = IN_VECTORS;  // rows that are multiplied together
#ifdef RONDEL_AMX
template <> constexpr int64_t TILE<bf16> = 32;   // four registers of eight hold sums
#endif
constexpr int64_t AHEAD = 1024;  // bytes of a panel that are asked for before they are multiplied
constexpr int64_t FEW = 16;    // rows that wait for memory
constexpr int64_t MOST = 192;  // rows that are computed over one reading of the weights

// sums [R, WIDTH] of a panel over rows that are `step` numbers apart, whose words are `stride` words apart
#ifdef __AVX512BF16__
inline __m512 add_products(__m512 sum, __m512i x, __m512i w, bf16) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
inline __m512 add_products(__m512 sum, __m512i x, __m512i w, float) { return _mm512_fmadd_ps((__m512)x, (__m512)w, sum); }

template <class T, int R, int64_t stride = 1>
inline void tile_sums(const T *x, int64_t step, const T *panel, int64_t words, float *sums) {
    constexpr int64_t J = JOINED<T>;
    __m512 held[R][2];
    for (int r = 0; r < R; r++) held[r][0] = held[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < words; k++, panel += J * WIDTH) {
        __m512i low = _mm512_loadu_si512(panel), high = _mm512_loadu_si512(panel + J * HALF);
        if (R > 4) {  // fewer rows only wait for memory, whose own prefetching is the better one then
            __builtin_prefetch((const char *)panel + AHEAD);
            __builtin_prefetch((const char *)panel + AHEAD + 64);
        }
        for (int r = 0; r < R; r++) {
            int32_t word;
            memcpy(&word, x + r * step + J * stride * k, sizeof word);
            __m512i all = _mm512_set1_epi32(word);
            held[r][0] = add_products(held[r][0], all, low, T());
            held[r][1] = add_products(held[r][1], all, high, T());
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + r * WIDTH + half * HALF, held[r][half]);
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int64_t EIGHT = 8;   // numbers of a register, of which there are sixteen
constexpr int64_t DEPTH = 64;  // words of a panel that stay in a first cache while all rows of a tile take them: 8 KB

// Of each word one number, those that are multiplied first being the odd ones: in bfloat16 the upper halves of words, as fp32 numbers.
template <class T> __attribute__((always_inline)) inline __m256 numbers_of(__m256i words, int64_t odd) {
    if constexpr (sizeof(T) == sizeof(float)) return _mm256_castsi256_ps(words);
    else return _mm256_castsi256_ps(odd ? _mm256_and_si256(words, _mm256_set1_epi32(int32_t(0xffff0000))) : _mm256_slli_epi32(words, 16));
}

// R rows by O outputs, whose sums stay in registers: written to `sums`, or added to them
template <bool adds, bool asks, class T, int R, int O, int64_t stride>
__attribute__((noinline)) void some_sums(const T *x, int64_t step, const T *panel, int64_t words, float *sums) {
    constexpr int64_t N = O / EIGHT, J = JOINED<T>;
    __m256 held[R][N];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) held[r][i] = adds ? _mm256_loadu_ps(sums + r * WIDTH + i * EIGHT) : _mm256_setzero_ps();
    for (int64_t k = 0; k < words; k++, panel += J * WIDTH) {
        if (asks) __builtin_prefetch((const char *)panel + AHEAD);
        for (int64_t j = J - 1; j >= 0; j--) {
            __m256 own[N];
            for (int i = 0; i < N; i++) own[i] = numbers_of<T>(_mm256_loadu_si256((const __m256i *)(panel + J * i * EIGHT)), j);
            for (int r = 0; r < R; r++) {
                int32_t word;
                memcpy(&word, x + r * step + J * stride * k, sizeof word);
                __m256 all = numbers_of<T>(_mm256_set1_epi32(word), j);
                for (int i = 0; i < N; i++) held[r][i] = _mm256_fmadd_ps(all, own[i], held[r][i]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) _mm256_storeu_ps(sums + r * WIDTH + i * EIGHT, held[r][i]);
}

// Few rows take all outputs at once, more take half of them: so many sums that none waits for another, and no more than there are
// registers. In bfloat16 four of those hold numbers of the panel.
template <bool adds, class T, int R, int64_t stride>
__attribute__((always_inline)) inline void deep_sums(const T *x, int64_t step, const T *panel, int64_t words, float *sums) {
    constexpr int64_t J = JOINED<T>;
    constexpr int FIRST = J > 1 ? std::min(R, 4) : R <= 6 ? R : R <= 9 ? 6 : R / 2;
    if constexpr (R <= (J > 1 ? 2 : 3)) some_sums<adds, false, T, R, WIDTH, stride>(x, step, panel, words, sums);
    else
        for (int64_t at = 0; at < WIDTH; at += HALF) some_sums<adds, true, T, FIRST, HALF, stride>(x, step, panel + J * at, words, sums + at);
    if constexpr (R > FIRST) deep_sums<adds, T, R - FIRST, stride>(x + FIRST * step, step, panel, words, sums + FIRST * WIDTH);
}

template <class T, int R, int64_t stride = 1>
inline void tile_sums(const T *x, int64_t step, const T *panel, int64_t words, float *sums) {
    constexpr int64_t J = JOINED<T>;
    deep_sums<false, T, R, stride>(x, step, panel, std::min(DEPTH, words), sums);
    for (int64_t k = DEPTH; k < words; k += DEPTH)
        deep_sums<true, T, R, stride>(x + J * stride * k, step, panel + J * k * WIDTH, std::min(DEPTH, words - k), sums);
}
#else
// one number after the other, for tests: far from fast
template <class T, int R, int64_t stride = 1>
inline void tile_sums(const T *x, int64_t step, const T *panel, int64_t words, float *sums) {
    constexpr int64_t J = JOINED<T>;
    for (int64_t i = 0; i < R * WIDTH; i++) sums[i] = 0;
    for (int64_t k = 0; k < words; k++, panel += J * WIDTH)
        for (int r = 0; r < R; r++)
            for (int64_t j = J - 1; j >= 0; j--) {
                float one = wide(x[r * step + J * stride * k + j]);
                for (int64_t i = 0; i < WIDTH; i++) sums[r * WIDTH + i] += one * wide(panel[J * i + j]);
            }
}
#endif

#ifdef RONDEL_AMX
constexpr int64_t DEEP = 16;  // words of a register's row

// Eight registers: 0 to 3 are sums, of the first sixteen rows and those behind them; 4 and 5 rows; 6 and 7 a panel's outputs.
struct alignas(64) RegisterShapes {
    uint8_t palette = 1, start = 0, unused[14] = {0};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {0};
};

thread_local int64_t shaped = 0;  // for how many rows this thread's registers have their shapes

inline void shape_registers(int64_t rows) {
    if (rows == shaped) return;
    RegisterShapes all;
    all.rows[0] = all.rows[1] = all.rows[4] = uint8_t(std::min(rows, HALF));
    all.rows[2] = all.rows[3] = all.rows[5] = uint8_t(rows > HALF ? rows - HALF : HALF);
    all.rows[6] = all.rows[7] = HALF;
    _tile_loadconfig(&all);
    shaped = rows;
}

template <bool more> inline void add_block(const bf16 *x, int64_t step, const bf16 *panel, int64_t ahead) {
    _tile_loadd(6, panel, 4 * WIDTH);
    _tile_loadd(7, panel + WIDTH, 4 * WIDTH);
    if (ahead)
        for (int64_t i = 0; i < 2 * DEEP; i++) __builtin_prefetch(panel + ahead + i * WIDTH);
    _tile_loadd(4, x, 2 * step);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!more) return;
    _tile_loadd(5, x + HALF * step, 2 * step);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// sums [rows, WIDTH] of x, whose rows are `step` numbers apart, where a block of DEEP words lies `deeper` numbers behind the last one.
// Numbers that lie `ahead` of those of the panel are asked for, unless it is 0.
template <bool more>
inline void register_sums(int64_t rows, const bf16 *x, int64_t step, int64_t deeper, const bf16 *panel, int64_t words, float *sums, int64_t ahead = 0) {
    shape_registers(rows);
    asm volatile("" ::: "memory");  // the instructions read what was written before: not every compiler knows
    _tile_zero(0);
    _tile_zero(1);
    if (more) {
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t k = 0;
    for (; k + DEEP <= words; k += DEEP, x += deeper, panel += 2 * DEEP * WIDTH) add_block<more>(x, step, panel, ahead);
    if (k < words) {  // the last words, with zeros behind them
        alignas(64) bf16 own[TILE<bf16> * 2 * DEEP], some[2 * DEEP * WIDTH];
        memset((void *)own, 0, sizeof own), memset((void *)some, 0, sizeof some);
        for (int64_t r = 0; r < rows; r++) memcpy(own + r * 2 * DEEP, x + r * step, (words - k) * 2 * sizeof(bf16));
        memcpy(some, panel, (words - k) * 2 * WIDTH * sizeof(bf16));
        asm volatile("" ::: "memory");
        add_block<more>(own, 2 * DEEP, some, 0);
    }
    _tile_stored(0, sums, 4 * WIDTH);
    _tile_stored(1, sums + HALF, 4 * WIDTH);
    if (more) {
        _tile_stored(2, sums + HALF * WIDTH, 4 * WIDTH);
        _tile_stored(3, sums + HALF * WIDTH + HALF, 4 * WIDTH);
    }
    asm volatile("" ::: "memory");
}
#endif

// A thread's registers while it multiplies: who came before has shaped them otherwise, and who comes next, too. Whole ones would be
// saved each time the thread is put aside.
struct Registers {
#ifdef RONDEL_AMX
    Registers() { shaped = 0; }
    ~Registers() {
        if (shaped) _tile_release();
        shaped = 0;
    }
#else
    ~Registers() {}
#endif
};

// Rows of which blocks that threads share are multiples, but the last one.
template <class T> constexpr int64_t WHOLE_ROWS = TILE<T> > HALF ? TILE<T> : 1;

// Rows of the next tile, of `rows` that `left` tiles share: as many in each as can be, and with AVX2 as many as it takes at once.
template <class T> inline int64_t tile_rows(int64_t rows, int64_t left) {
#ifdef __AVX512BF16__
    return WHOLE_ROWS<T> > 1 ? std::min(rows, TILE<T>) : rows / left;
#else
    constexpr int64_t UNIT = JOINED<T> > 1 ? 4 : 1;
    return std::min(rows, (rows / left + UNIT - 1) / UNIT * UNIT);
#endif
}

// the same of up to TILE rows
template <class T> inline void row_sums(int64_t rows, const T *x, int64_t step, const T *panel, int64_t words, float *sums, int64_t ahead = 0) {
#ifdef RONDEL_AMX
    if constexpr (sizeof(T) == sizeof(bf16)) {
        if (rows > HALF) register_sums<true>(rows, x, step, 2 * DEEP, panel, words, sums, ahead);
        else register_sums<false>(rows, x, step, 2 * DEEP, panel, words, sums, ahead);
        return;
    }
#endif
    switch (rows) {
        case 1: tile_sums<T, 1>(x, step, panel, words, sums); break;
        case 2: tile_sums<T, 2>(x, step, panel, words, sums); break;
        case 3: tile_sums<T, 3>(x, step, panel, words, sums); break;
        case 4: tile_sums<T, 4>(x, step, panel, words, sums); break;
        case 5: tile_sums<T, 5>(x, step, panel, words, sums); break;
        case 6: tile_sums<T, 6>(x, step, panel, words, sums); break;
        case 7: tile_sums<T, 7>(x, step, panel, words, sums); break;
        case 8: tile_sums<T, 8>(x, step, panel, words, sums); break;
        case 9: tile_sums<T, 9>(x, step, panel, words, sums); break;
        case 10: tile_sums<T, 10>(x, step, panel, words, sums); break;
        case 11: tile_sums<T, 11>(x, step, panel, words, sums); break;
        default: tile_sums<T, IN_VECTORS>(x, step, panel, words, sums);
    }
}

// sums [TILE, WIDTH] over columns that lie in a tile of `put_tiles`, of its words from `from` on
template <class T> inline void column_sums(const T *tile, int64_t from, const T *panel, int64_t words, float *sums) {
    constexpr int64_t J = JOINED<T>;
    const T *x = tile + from * J * TILE<T>;
#ifdef RONDEL_AMX
    if constexpr (sizeof(T) == sizeof(bf16)) return register_sums<true>(TILE<T>, x, J * DEEP, J * DEEP * TILE<T>, panel + from * J * WIDTH, words, sums);
#endif
    if constexpr (TILE<T> == IN_VECTORS) tile_sums<T, IN_VECTORS, IN_VECTORS>(x, J, panel + from * J * WIDTH, words, sums);
}

// sums [rows, WIDTH] of one panel
template <class T> inline void panel_sums(int64_t rows, const T *x, int64_t step, const T *panel, int64_t words, float *sums) {
    constexpr int64_t FIRST = 8192 / sizeof(T);
    bool first = true;
    for (int64_t left = (rows + TILE<T> - 1) / TILE<T>; left; left--) {
        int64_t some = tile_rows<T>(rows, left);
        row_sums(some, x, step, panel, words, sums, first ? FIRST : 0);
        first = false;
        x += some * step, sums += some * WIDTH, rows -= some;
    }
}

// `use(first row, rows, panel, sums [rows, WIDTH])` of each panel, on the threads of the region that this is called in, which do not wait
// for each other at its end; rows of x are `step` numbers apart. Few rows wait for memory, which is faster where a thread reads long runs
// of panels: its share of what is left, again and again. Many rows compute, and a neighbour on the same cores then holds up AT_ONCE
// panels: as many as have results in one line of memory.
template <int64_t AT_ONCE = 1, class T, class Use>
inline void panel_product(const T *x, int64_t step, const T *panels, int64_t rows, int64_t in, int64_t count, const Use &use) {
    for (int64_t first = 0; first < rows; first += MOST) {
        int64_t some = std::min(MOST, rows - first);
        alignas(64) float sums[MOST * WIDTH];
        auto compute = [&](int64_t p) {
            panel_sums(some, x + first * step, step, panels + p * in * WIDTH, in / JOINED<T>, sums);
            use(first, some, p, sums);
        };
        if (rows <= FEW) {
#pragma omp for schedule(guided) nowait
            for (int64_t p = 0; p < count; p++) compute(p);
        } else {
#pragma omp for schedule(dynamic, AT_ONCE) nowait
            for (int64_t p = 0; p < count; p++) compute(p);
        }
    }
}

inline int64_t panels_of(int64_t width) { return (width + WIDTH - 1) / WIDTH; }

}  // namespace
