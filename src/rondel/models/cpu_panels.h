// How panels of cpu_tiles.h are filled from matrices as they lie: rows of a weight, rows or pairs of them, columns of a
// gradient.

#pragma once

#include "cpu_tiles.h"

namespace {

#ifdef __AVX512BF16__
// `put(column, words)` of sixteen rows of sixteen words
template <class Put> inline void turn_words(__m512i *a, const Put &put) {
    __m512i b[HALF];
    for (int i = 0; i < HALF; i += 2)
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    for (int i = 0; i < HALF; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {  // a[4 q + i]: words i, 4 + i, 8 + i, 12 + i of four rows
        __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        __m512i next = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88), last = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        put(i, _mm512_shuffle_i32x4(low, next, 0x88));
        put(4 + i, _mm512_shuffle_i32x4(high, last, 0x88));
        put(8 + i, _mm512_shuffle_i32x4(low, next, 0xdd));
        put(12 + i, _mm512_shuffle_i32x4(high, last, 0xdd));
    }
}

// WIDTH pairs of one row and the next, of which `count` are there, and the second only if `both`
inline void join_rows(const bf16 *first, const bf16 *second, int64_t count, bool both, __m512i &low_half, __m512i &high_half) {
    __mmask32 some = count >= WIDTH ? ~0u : (1u << count) - 1;
    __m512i a = _mm512_maskz_loadu_epi16(some, first), b = _mm512_maskz_loadu_epi16(both ? some : 0, both ? second : first);
    __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);  // by quarters of a register
    low_half = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
    high_half = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high);
}
#endif

// sixteen outputs of a weight, [outputs, in] -> `half` of a panel
template <class T> inline void put_outputs(const T *weight, int64_t in, int64_t count, T *panel) {
    constexpr int64_t J = JOINED<T>;
    int64_t k = 0;
#ifdef __AVX512BF16__
    for (; count == HALF && k + J * HALF <= in; k += J * HALF) {
        __m512i a[HALF];
        for (int i = 0; i < HALF; i++) a[i] = _mm512_loadu_si512(weight + i * in + k);
        turn_words(a, [&](int i, __m512i words) { _mm512_storeu_si512(panel + (k / J + i) * J * WIDTH, words); });
    }
#elif defined(__AVX2__)
    constexpr int E = 8;  // words of a register
    for (; count == HALF && k + J * E <= in; k += J * E)
        for (int64_t at = 0; at < HALF; at += E) {
            __m256 a[E], b[E];
            for (int i = 0; i < E; i++) a[i] = _mm256_loadu_ps((const float *)(weight + (at + i) * in + k));
            for (int i = 0; i < E; i += 2) b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
            for (int i = 0; i < E; i += 4)
                for (int j = 0; j < 2; j++) {
                    a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
                    a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
                }
            for (int i = 0; i < 4; i++) {  // a[4 q + i]: words i and 4 + i of four outputs
                float *to = (float *)(panel + (k / J + i) * J * WIDTH) + at;
                _mm256_storeu_ps(to, _mm256_permute2f128_ps(a[i], a[4 + i], 0x20));
                _mm256_storeu_ps(to + 4 * WIDTH, _mm256_permute2f128_ps(a[i], a[4 + i], 0x31));
            }
        }
#endif
    for (; k < in; k += J)
        for (int64_t i = 0; i < HALF; i++) {
            T *to = panel + k * WIDTH + J * i;
            if (i < count) memcpy(to, weight + i * in + k, 4);
            else memset((void *)to, 0, 4);
        }
}

// `count` numbers of each of `rows` rows that are `step` apart -> a panel, filled up with 0s
inline void put_rows(const float *from, int64_t step, int64_t rows, int64_t count, float *panel) {
    for (int64_t t = 0; t < rows; t++, from += step, panel += WIDTH) {
        int64_t some = std::min(WIDTH, count);
        if (some == WIDTH) {
            memcpy(panel, from, WIDTH * sizeof(float));
            continue;
        }
        for (int64_t i = 0; i < WIDTH; i++) panel[i] = i < some ? from[i] : 0;
    }
}

// the same, whose pairs are two rows
inline void put_rows(const bf16 *from, int64_t step, int64_t rows, int64_t count, bf16 *panel) {
    for (int64_t t = 0; t < rows; t += 2, panel += 2 * WIDTH) {
        const bf16 *first = from + t * step, *second = first + step;
        bool both = t + 1 < rows;
#ifdef __AVX512BF16__
        __m512i low, high;
        join_rows(first, second, count, both, low, high);
        _mm512_storeu_si512(panel, low);
        _mm512_storeu_si512(panel + WIDTH, high);
#else
#ifdef __AVX2__
        if (count >= WIDTH && both) {
            for (int64_t half = 0; half < WIDTH; half += HALF) {
                __m256i a = _mm256_loadu_si256((const __m256i *)(first + half)), b = _mm256_loadu_si256((const __m256i *)(second + half));
                __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);  // by halves of a register
                _mm256_storeu_si256((__m256i *)(panel + 2 * half), _mm256_permute2x128_si256(low, high, 0x20));
                _mm256_storeu_si256((__m256i *)(panel + 2 * half + HALF), _mm256_permute2x128_si256(low, high, 0x31));
            }
            continue;
        }
#endif
        for (int64_t i = 0; i < WIDTH; i++) {
            panel[2 * i] = i < count ? first[i] : bf16{0};
            panel[2 * i + 1] = i < count && both ? second[i] : bf16{0};
        }
#endif
    }
}

template <class T> inline int64_t tiles_of(int64_t width) { return (width + TILE<T> - 1) / TILE<T>; }

// words that hold one column of `rows` rows
template <class T> inline int64_t words_of(int64_t rows) { return (rows + JOINED<T> - 1) / JOINED<T>; }

// the same of a tile's column
template <class T> inline int64_t column_words(int64_t rows) {
#ifdef RONDEL_AMX
    if (sizeof(T) == sizeof(bf16)) return (words_of<T>(rows) + DEEP - 1) / DEEP * DEEP;
#endif
    return words_of<T>(rows);
}

// `count` numbers of each of `rows` rows -> a panel of whole columns
template <class T> inline void put_columns(const T *from, int64_t step, int64_t rows, int64_t count, T *panel) {
    put_rows(from, step, rows, count, panel);
    int64_t filled = words_of<T>(rows), all = column_words<T>(rows);
    if (all > filled) memset((void *)(panel + filled * JOINED<T> * WIDTH), 0, (all - filled) * JOINED<T> * WIDTH * sizeof(T));
}

// numbers that `put_tiles` writes
template <class T> inline int64_t tile_room(int64_t rows, int64_t width) {
    return tiles_of<T>(width) * TILE<T> * column_words<T>(rows) * JOINED<T>;
}

// words `from` to `end` of the columns of grad [rows, step], of which `width` -> [tiles, words_of(rows), TILE, JOINED],
// filled up with zeros; for AMX [tiles, column_words(rows) / DEEP, TILE, DEEP, JOINED], and `from` is a multiple of DEEP
inline void put_tiles(const float *grad, int64_t step, int64_t rows, int64_t width, int64_t from, int64_t end, float *to) {
    for (int64_t tile = 0; tile < tiles_of<float>(width); tile++)
        for (int64_t k = from; k < end; k++) {
            const float *first = grad + k * step + tile * TILE<float>;
            float *own = to + (tile * rows + k) * TILE<float>;
            int64_t count = std::min(TILE<float>, width - tile * TILE<float>);
            for (int64_t i = 0; i < TILE<float>; i++) own[i] = i < count ? first[i] : 0;
        }
}

#ifdef RONDEL_AMX
inline void put_tiles(const bf16 *grad, int64_t step, int64_t rows, int64_t width, int64_t from, int64_t end, bf16 *to) {
    constexpr int64_t BLOCK = TILE<bf16> * 2 * DEEP;
    int64_t blocks = column_words<bf16>(rows) / DEEP;
    for (int64_t tile = 0; tile < tiles_of<bf16>(width); tile++)
        for (int64_t block = from / DEEP; block * DEEP < end; block++) {
            __m512i low[DEEP], high[DEEP];
            for (int64_t i = 0; i < DEEP; i++) {
                int64_t row = 2 * (block * DEEP + i);
                const bf16 *first = grad + row * step + tile * WIDTH;
                if (row < rows) join_rows(first, first + step, width - tile * WIDTH, row + 1 < rows, low[i], high[i]);
                else low[i] = high[i] = _mm512_setzero_si512();
            }
            bf16 *own = to + (tile * blocks + block) * BLOCK;
            turn_words(low, [&](int i, __m512i words) { _mm512_storeu_si512(own + i * 2 * DEEP, words); });
            turn_words(high, [&](int i, __m512i words) { _mm512_storeu_si512(own + (HALF + i) * 2 * DEEP, words); });
        }
}
#else
inline void put_tiles(const bf16 *grad, int64_t step, int64_t rows, int64_t width, int64_t from, int64_t end, bf16 *to) {
    int64_t pairs = (rows + 1) / 2;
    for (int64_t tile = 0; tile < tiles_of<bf16>(width); tile++)
        for (int64_t k = from; k < end; k++) {
            const bf16 *first = grad + 2 * k * step + tile * TILE<bf16>, *second = first + step;
            bf16 *own = to + (tile * pairs + k) * 2 * TILE<bf16>;
            int64_t count = std::min(TILE<bf16>, width - tile * TILE<bf16>);
            bool both = 2 * k + 1 < rows;
#ifdef __AVX512BF16__
            __mmask16 some = (1u << count) - 1;
            __m256i a = _mm256_maskz_loadu_epi16(some, first);
            __m256i b = _mm256_maskz_loadu_epi16(both ? some : 0, both ? second : first);
            __m512i low = _mm512_cvtepu16_epi32(a), high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
            _mm512_mask_storeu_epi32(own, 0x0fff, _mm512_or_si512(low, high));
#else
#ifdef __AVX2__
            if (count == TILE<bf16> && both) {
                __m128i a = _mm_loadu_si128((const __m128i *)first), b = _mm_loadu_si128((const __m128i *)second);
                _mm_storeu_si128((__m128i *)own, _mm_unpacklo_epi16(a, b));
                _mm_storeu_si128((__m128i *)(own + 8), _mm_unpackhi_epi16(a, b));
                a = _mm_loadl_epi64((const __m128i *)(first + 8)), b = _mm_loadl_epi64((const __m128i *)(second + 8));
                _mm_storeu_si128((__m128i *)(own + 16), _mm_unpacklo_epi16(a, b));
                continue;
            }
#endif
            for (int64_t i = 0; i < TILE<bf16>; i++) {
                own[2 * i] = i < count ? first[i] : bf16{0};
                own[2 * i + 1] = i < count && both ? second[i] : bf16{0};
            }
#endif
        }
}
#endif

template <class T> inline T *aligned_room(std::vector<T> &room, int64_t count) {
    room.resize(count + 2 * WIDTH);
    return (T *)(((uintptr_t)room.data() + 63) / 64 * 64);
}

}  // namespace
