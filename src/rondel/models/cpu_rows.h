// Numbers of a row, a vector at a time: what the loops of cpu_kernels.cpp and cpu_layers.cpp share.
//
// Loops run over whole vectors of VECTOR numbers, the last one filled up with zeros, and sums of a row are taken in one
// order, so a row's bits depend on nothing but the row.

#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int VECTOR = 64;  // numbers that one loop without a rest computes

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

inline void narrow(float x, float &out) { out = x; }
inline void narrow(float x, bf16 &out) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

template <class T> inline float rounded(float x) {
    T out;
    narrow(x, out);
    return wide(out);
}

// N numbers, a multiple of 16, as T holds them: by one instruction where there is one, for which numbers below 1.2e-38 are 0
template <int N, class T> inline void narrow_all(const float *from, T *to) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == sizeof(bf16)) {
        for (int i = 0; i < N; i += 16) _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
        return;
    }
#endif
    for (int i = 0; i < N; i++) narrow(from[i], to[i]);
}

// the same, and back
template <class T, int N> inline void round_all(float *x) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == sizeof(bf16)) {
        for (int i = 0; i < N; i += 16) {
            __m256i bits = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
            _mm512_storeu_ps(x + i, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        }
        return;
    }
#endif
    for (int i = 0; i < N; i++) x[i] = rounded<T>(x[i]);
}

// Relative error below 2e-7; 0 below -87.3, and never above 6e37.
inline float exponential(float x) {
    float held = x < -87.3f ? -87.3f : x > 87.3f ? 87.3f : x;
    float n = std::rint(held * 1.44269504f);
    float r = std::fma(n, -0.693359375f, held);
    r = std::fma(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p, r * r, r) + 1.0f;  // NaN of a NaN
    uint32_t power = uint32_t(int32_t(n) + 127) << 23;  // 2^n
    float two;
    memcpy(&two, &power, 4);
    return x < -87.3f ? 0.0f : p * two;
}

template <class T> inline void read(const T *from, int64_t count, float *to) {
    if (count == VECTOR) {
        for (int i = 0; i < VECTOR; i++) to[i] = wide(from[i]);
        return;
    }
    for (int i = 0; i < VECTOR; i++) to[i] = 0;
    for (int i = 0; i < count; i++) to[i] = wide(from[i]);
}

template <class T> inline void write(const float *from, int64_t count, T *to) {
    if (count == VECTOR) return narrow_all<VECTOR>(from, to);
    for (int i = 0; i < count; i++) narrow(from[i], to[i]);
}

inline int64_t part(int64_t at, int64_t size) { return size - at < VECTOR ? size - at : VECTOR; }

inline int64_t whole(int64_t size) { return (size + VECTOR - 1) / VECTOR * VECTOR; }

inline float total(const float *lanes) {
    float a[32], b[16], c[8];
    for (int i = 0; i < 32; i++) a[i] = lanes[i] + lanes[i + 32];
    for (int i = 0; i < 16; i++) b[i] = a[i] + a[i + 16];
    for (int i = 0; i < 8; i++) c[i] = b[i] + b[i + 8];
    return ((c[0] + c[4]) + (c[2] + c[6])) + ((c[1] + c[5]) + (c[3] + c[7]));
}

inline float larger(float a, float b) { return a > b ? a : b; }

inline float largest(const float *lanes) {
    float a[32], b[16], c[8];
    for (int i = 0; i < 32; i++) a[i] = larger(lanes[i], lanes[i + 32]);
    for (int i = 0; i < 16; i++) b[i] = larger(a[i], a[i + 16]);
    for (int i = 0; i < 8; i++) c[i] = larger(b[i], b[i + 8]);
    return larger(larger(larger(c[0], c[4]), larger(c[2], c[6])), larger(larger(c[1], c[5]), larger(c[3], c[7])));
}

template <class T> float inverse_rms(const T *x, int64_t size, float eps) {
    float lanes[VECTOR] = {0}, v[VECTOR];
    for (int64_t at = 0; at < size; at += VECTOR) {
        read(x + at, part(at, size), v);
        for (int i = 0; i < VECTOR; i++) lanes[i] += v[i] * v[i];
    }
    return 1.0f / std::sqrt(total(lanes) / float(size) + eps);
}
// w · x̂ of one row, rounded as the norms of transformers round
template <class X, class W> inline void norm_row(const X *from, const W *w, W *out, int64_t size, float eps) {
    float r = inverse_rms(from, size, eps), v[VECTOR], s[VECTOR];
    for (int64_t at = 0; at < size; at += VECTOR) {
        int64_t n = part(at, size);
        read(from + at, n, v);
        read(w + at, n, s);
        for (int i = 0; i < VECTOR; i++) v[i] = s[i] * rounded<X>(v[i] * r);
        write(v, n, out + at);
    }
}

// dx of w · x̂, or added to what is there, and the row's share of the weight's gradient, added
template <bool adds, class X, class W>
inline void norm_row_backward(const X *from, const W *w, const W *pulled, X *dx, float *share, int64_t size, float eps) {
    float r = inverse_rms(from, size, eps), v[VECTOR], s[VECTOR], g[VECTOR], lanes[VECTOR] = {0};
    for (int64_t at = 0; at < size; at += VECTOR) {
        int64_t n = part(at, size);
        read(from + at, n, v);
        read(w + at, n, s);
        read(pulled + at, n, g);
        for (int i = 0; i < VECTOR; i++) lanes[i] += g[i] * s[i] * (v[i] * r);
    }
    float along = total(lanes) / float(size);
    for (int64_t at = 0; at < size; at += VECTOR) {
        int64_t n = part(at, size);
        float sum[VECTOR], before[VECTOR] = {0};
        read(from + at, n, v);
        read(w + at, n, s);
        read(pulled + at, n, g);
        read(share + at, n, sum);
        if (adds) read(dx + at, n, before);
        for (int i = 0; i < VECTOR; i++) {
            float normed = v[i] * r;
            sum[i] += g[i] * rounded<X>(normed);
            v[i] = r * (g[i] * s[i] - normed * along);
            if (adds) v[i] += before[i];
        }
        write(v, n, dx + at);
        write(sum, n, share + at);
    }
}

// silu(g) · u in the place of u
template <class T, int N> inline void gate_vector(const float *g, float *u) {
    float silu[N];
    for (int i = 0; i < N; i++) silu[i] = g[i] / (1.0f + exponential(-g[i]));
    round_all<T, N>(silu);
    for (int i = 0; i < N; i++) u[i] *= silu[i];
}

// one head of twice `half` numbers, turned by its position's angles
template <class T, class C> inline void rotate_head(const T *from, const C *c, const C *s, T *to, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = wide(from[i]), b = wide(from[i + half]);
        narrow(rounded<C>(a * wide(c[i])) - rounded<C>(b * wide(s[i])), to[i]);
        narrow(rounded<C>(b * wide(c[i + half])) + rounded<C>(a * wide(s[i + half])), to[i + half]);
    }
}

constexpr int LANES = 16;  // tokens of a block of a decode step, and numbers of a head that are added at once
#ifdef __AVX512F__
typedef float lanes_t __attribute__((vector_size(4 * LANES)));
typedef int32_t picks_t __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits_t __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves_t __attribute__((vector_size(2 * LANES)));

inline lanes_t load(const float *from) {
    lanes_t out;
    memcpy(&out, from, sizeof out);
    return out;
}
inline lanes_t load(const bf16 *from) {
    halves_t bits;
    memcpy(&bits, from, sizeof bits);
    return (lanes_t)(__builtin_convertvector(bits, bits_t) << 16);
}

inline void put(lanes_t x, float *to) { memcpy(to, &x, sizeof x); }
#ifdef __AVX512BF16__
inline void put(lanes_t x, bf16 *to) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
inline lanes_t round_to(lanes_t x, bf16) { return (lanes_t)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16); }
#else
inline lanes_t round_to(lanes_t x, bf16) {
    bits_t bits = (bits_t)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    return (lanes_t)((bits & 0x7fffffff) > 0x7f800000 ? bits - bits + 0x7fc00000 : rounded);
}
inline void put(lanes_t x, bf16 *to) {
    halves_t bits = __builtin_convertvector((bits_t)round_to(x, bf16{}) >> 16, halves_t);
    memcpy(to, &bits, sizeof bits);
}
#endif

// Half as many vectors, each with the sums of two over lanes that are `bit` apart: the second one's where l & bit.
template <int bit> inline void fold(lanes_t *rows) {
    picks_t kept, added;
    for (int l = 0; l < LANES; l++) kept[l] = l & bit ? LANES + l : l, added[l] = l & bit ? LANES + l - bit : l + bit;
    for (int i = 0; i < bit; i++)
        rows[i] = __builtin_shuffle(rows[i], rows[i + bit], kept) + __builtin_shuffle(rows[i], rows[i + bit], added);
}

inline void fetch(const void *, int64_t) {}  // has been measured with AVX2 alone
#else  // the same numbers in two registers: what compilers make of one vector of 16 is a loop over its lanes
typedef float half_t __attribute__((vector_size(2 * LANES)));
typedef int32_t picks_t __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits_t __attribute__((vector_size(2 * LANES)));
typedef uint16_t halves_t __attribute__((vector_size(LANES)));

struct lanes_t {
    half_t low, high;
    lanes_t &operator+=(lanes_t b) { return low += b.low, high += b.high, *this; }
};
inline lanes_t operator+(lanes_t a, lanes_t b) { return {a.low + b.low, a.high + b.high}; }
inline lanes_t operator*(lanes_t a, lanes_t b) { return {a.low * b.low, a.high * b.high}; }
inline lanes_t operator*(lanes_t a, float b) { return {a.low * b, a.high * b}; }
inline lanes_t operator*(float a, lanes_t b) { return b * a; }

inline lanes_t load(const float *from) {
    lanes_t out;
    memcpy(&out.low, from, sizeof out.low);
    memcpy(&out.high, from + LANES / 2, sizeof out.high);
    return out;
}
inline half_t widened(const bf16 *from) {
    halves_t bits;
    memcpy(&bits, from, sizeof bits);
    return (half_t)(__builtin_convertvector(bits, bits_t) << 16);
}
inline lanes_t load(const bf16 *from) { return {widened(from), widened(from + LANES / 2)}; }

inline half_t round_half(half_t x) {
    bits_t bits = (bits_t)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    return (half_t)((bits & 0x7fffffff) > 0x7f800000 ? bits - bits + 0x7fc00000 : rounded);
}
inline lanes_t round_to(lanes_t x, bf16) { return {round_half(x.low), round_half(x.high)}; }

inline void put(lanes_t x, float *to) {
    memcpy(to, &x.low, sizeof x.low);
    memcpy(to + LANES / 2, &x.high, sizeof x.high);
}
inline void put(lanes_t x, bf16 *to) {
    for (half_t half : {round_half(x.low), round_half(x.high)}) {
        halves_t bits = __builtin_convertvector((bits_t)half >> 16, halves_t);
        memcpy(to, &bits, sizeof bits);
        to += LANES / 2;
    }
}

inline void fetch(const void *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)from + at);
}

template <int bit> inline half_t folded(half_t a, half_t b) {
    if (bit == 4) return __builtin_shuffle(a, b, picks_t{0, 1, 2, 3, 12, 13, 14, 15}) + __builtin_shuffle(a, b, picks_t{4, 5, 6, 7, 8, 9, 10, 11});
    if (bit == 2) return __builtin_shuffle(a, b, picks_t{0, 1, 10, 11, 4, 5, 14, 15}) + __builtin_shuffle(a, b, picks_t{2, 3, 8, 9, 6, 7, 12, 13});
    return __builtin_shuffle(a, b, picks_t{0, 9, 2, 11, 4, 13, 6, 15}) + __builtin_shuffle(a, b, picks_t{1, 8, 3, 10, 5, 12, 7, 14});
}

// Half as many vectors, each with the sums of two over lanes that are `bit` apart: the second one's where l & bit.
template <int bit> inline void fold(lanes_t *rows) {
    for (int i = 0; i < bit; i++) {
        lanes_t a = rows[i], b = rows[i + bit];
        if (bit == 8) rows[i] = {a.low + a.high, b.high + b.low};
        else rows[i] = {folded<bit>(a.low, b.low), folded<bit>(a.high, b.high)};
    }
}
#endif
inline lanes_t round_to(lanes_t x, float) { return x; }

struct Contexts {
    const int64_t *own, *lengths, *prefix, *shared, *place;  // as in paged_layout.py: DecodeBatch; prefix may be null
    int64_t own_width, prefix_width, members;
    int64_t window, chunk;  // as in dense_attention.py: ScoreRule; 0 for none

    // The first position that the last of `count` tokens sees.
    int64_t first_seen(int64_t count) const {
        int64_t near = window && window < count ? count - window : 0;
        return chunk ? std::max(near, (count - 1) / chunk * chunk) : near;
    }
};

// Rows that are asked for, a line at a time, while others are computed.
template <class T> struct Coming {
    const T *from;
    const int64_t *slots;
    int64_t size, count, lines;
    int64_t at = 0, line = 0;  // of `count` rows

    Coming(const T *from, const int64_t *slots, int64_t first, int64_t end, int64_t size)
        : from(from), slots(slots + first), size(size), count(std::min(end - first, int64_t(LANES))), lines(size * sizeof(T) / 64) {}
    void ask(int64_t some) {
        for (; some && at < count; some--) {
            fetch((const char *)(from + slots[at] * size) + 64 * line, 64);
            if (++line == lines) line = 0, at++;
        }
    }
};

// Rows `first` to `first` + LANES of those that the slots name; zeros behind the last of `count`.
template <class T>
inline void read_block(const T *from, const int64_t *slots, int64_t first, int64_t count, int64_t size, lanes_t *block) {
    int64_t parts = size / LANES, end = std::min(count - first, int64_t(LANES));
    for (int64_t t = 0; t < end; t++)
        for (int64_t i = 0; i < parts; i++) block[t * parts + i] = load(from + slots[first + t] * size + i * LANES);
    for (int64_t i = end * parts; i < LANES * parts; i++) block[i] = lanes_t{0};
}

// scores [repeats, blocks · LANES] -> weights in the same place, of the first `count` of each row
template <class T> inline void weigh_scores(float *scores, int64_t count, int64_t blocks, int64_t repeats) {
    for (int64_t r = 0; r < repeats; r++) {
        float *own = scores + r * blocks * LANES, most = -INFINITY, top[LANES], lanes[LANES] = {0}, all = 0;
        for (int64_t t = count; t < blocks * LANES; t++) own[t] = -INFINITY;
        for (int i = 0; i < LANES; i++) top[i] = -INFINITY;
        for (int64_t t = 0; t < blocks * LANES; t += LANES)
            for (int i = 0; i < LANES; i++) top[i] = larger(own[t + i], top[i]);
        for (int i = 0; i < LANES; i++) most = larger(top[i], most);
        for (int64_t t = 0; t < blocks * LANES; t += LANES)
            for (int i = 0; i < LANES; i++) {
                own[t + i] = exponential(own[t + i] - most);
                lanes[i] += own[t + i];
            }
        for (int i = 0; i < LANES; i++) all += lanes[i];
        float inverse = 1.0f / all;
        for (int64_t t = 0; t < blocks * LANES; t++) own[t] = rounded<T>(own[t] * inverse);
    }
}

// One request and key head: `repeats` queries over the tokens they see, 16 at a time, always from the first one on.
template <class T>
void decode_one(const T *q, const T *keys, const T *values, T *out, const int64_t *slots, int64_t count,
                int64_t repeats, int64_t size, float scale, lanes_t *room) {
    int64_t parts = size / LANES, blocks = (count + LANES - 1) / LANES;
    lanes_t *query = room, *sums = query + repeats * parts, *block = sums + repeats * parts;
    lanes_t *scores = block + LANES * parts;  // [repeats, blocks]
    for (int64_t i = 0; i < repeats * parts; i++) query[i] = load(q + i * LANES), sums[i] = lanes_t{0};
    for (int64_t b = 0; b < blocks; b++) {
        read_block(keys, slots, b * LANES, count, size, block);
        bool last = b + 1 == blocks;  // what comes then are values
        Coming<T> next(last ? values : keys, slots, last ? 0 : (b + 1) * LANES, count, size);
        int64_t some = (next.lines + repeats - 1) / repeats;  // for each row
        for (int64_t r = 0; r < repeats; r++) {
            lanes_t rows[LANES];
            for (int64_t t = 0; t < LANES; t++) {
                next.ask(some);
                lanes_t sum = query[r * parts] * block[t * parts];
                for (int64_t i = 1; i < parts; i++) sum += query[r * parts + i] * block[t * parts + i];
                rows[t] = sum;
            }
            fold<8>(rows);
            fold<4>(rows);
            fold<2>(rows);
            fold<1>(rows);
            scores[r * blocks + b] = rows[0] * scale;
        }
    }
    weigh_scores<T>((float *)scores, count, blocks, repeats);
    for (int64_t b = 0; b < blocks; b++) {
        read_block(values, slots, b * LANES, count, size, block);
        Coming<T> next(values, slots, (b + 1) * LANES, count, size);
        int64_t some = (LANES * next.lines + repeats * parts - 1) / (repeats * parts);
        for (int64_t r = 0; r < repeats; r++) {
            const float *weights = (const float *)(scores + r * blocks + b);
            for (int64_t i = 0; i < parts; i++) {
                next.ask(some);
                lanes_t sum = sums[r * parts + i];
                for (int64_t t = 0; t < LANES; t++) sum += weights[t] * block[t * parts + i];
                sums[r * parts + i] = sum;
            }
        }
    }
    const float *found = (const float *)sums;
    for (int64_t i = 0; i < repeats * size; i++) narrow(found[i], out[i]);
}

#ifdef __AVX512BF16__
constexpr int64_t PAIRS = 2 * LANES;  // numbers of a register

inline __m512bh load_pairs(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }

// out [R, P registers] of R queries: weights [R, steps] in bfloat16 over values, two tokens at a time
template <int P, int R>
inline void weigh_values(const bf16 *values, const int64_t *slots, int64_t count, const float *weights, int64_t step, bf16 *out) {
    constexpr int64_t size = P * PAIRS;
    __m512 low[R][P], high[R][P];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < P; i++) low[r][i] = high[r][i] = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t += 2) {
        const bf16 *first = values + slots[t] * size, *second = values + slots[std::min(t + 1, count - 1)] * size;
        __m512bh both[R];
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, weights + r * step + t / LANES * LANES + t % LANES / 2, sizeof pair);
            both[r] = (__m512bh)_mm512_set1_epi32(pair);
        }
        for (int i = 0; i < P; i++) {
            __m512i a = _mm512_loadu_si512(first + i * PAIRS), c = _mm512_loadu_si512(second + i * PAIRS);
            __m512bh near = (__m512bh)_mm512_unpacklo_epi16(a, c), far = (__m512bh)_mm512_unpackhi_epi16(a, c);
            for (int r = 0; r < R; r++) low[r][i] = _mm512_dpbf16_ps(low[r][i], both[r], near);
            for (int r = 0; r < R; r++) high[r][i] = _mm512_dpbf16_ps(high[r][i], both[r], far);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < P; i++) {  // by quarters of a register: four numbers of `low`, four of `high`
            float a[LANES], c[LANES];
            _mm512_storeu_ps(a, low[r][i]), _mm512_storeu_ps(c, high[r][i]);
            for (int64_t l = 0; l < LANES; l++) {
                int64_t at = r * size + i * PAIRS + l / 4 * 8 + l % 4;
                narrow(a[l], out[at]), narrow(c[l], out[at + 4]);
            }
        }
}

// `decode_one` by products of pairs: of two numbers of a head for a score, of two tokens for a sum of values.
template <int P>
inline void decode_pairs(const bf16 *q, const bf16 *keys, const bf16 *values, bf16 *out, const int64_t *slots,
                         int64_t count, int64_t repeats, float scale, float *scores) {
    constexpr int64_t size = P * PAIRS;
    int64_t blocks = (count + LANES - 1) / LANES, step = blocks * LANES;
    for (int64_t b = 0; b < blocks; b++) {
        const bf16 *rows[LANES];
        for (int64_t t = 0; t < LANES; t++) rows[t] = keys + slots[std::min(b * LANES + t, count - 1)] * size;
        for (int64_t t = (b + 1) * LANES; t < std::min(count, (b + 2) * LANES); t++)
            for (int i = 0; i < P; i++) __builtin_prefetch(keys + slots[t] * size + i * PAIRS);
        for (int64_t r = 0; r < repeats; r++) {
            __m512bh asked[P];
            for (int i = 0; i < P; i++) asked[i] = load_pairs(q + r * size + i * PAIRS);
            lanes_t sums[LANES];
            for (int t = 0; t < LANES; t++) {
                __m512 sum = _mm512_setzero_ps();
                for (int i = 0; i < P; i++) sum = _mm512_dpbf16_ps(sum, load_pairs(rows[t] + i * PAIRS), asked[i]);
                sums[t] = (lanes_t)sum;
            }
            fold<8>(sums);
            fold<4>(sums);
            fold<2>(sums);
            fold<1>(sums);
            _mm512_storeu_ps(scores + r * step + b * LANES, _mm512_mul_ps((__m512)sums[0], _mm512_set1_ps(scale)));
        }
    }
    weigh_scores<bf16>(scores, count, blocks, repeats);
    for (int64_t at = 0; at < repeats * blocks; at++)  // rounded weights as they are, two of them a pair
        _mm256_storeu_si256((__m256i *)(scores + at * LANES), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(scores + at * LANES)));
    for (int64_t r = 0; r < repeats;) {
        const float *weights = scores + r * step;
        bf16 *to = out + r * size;
        switch (P <= 2 ? std::min<int64_t>(repeats - r, 3) : 1) {
            case 3: weigh_values<P, 3>(values, slots, count, weights, step, to), r += 3; break;
            case 2: weigh_values<P, 2>(values, slots, count, weights, step, to), r += 2; break;
            default: weigh_values<P, 1>(values, slots, count, weights, step, to), r += 1;
        }
    }
}
#endif

// Numbers that `decode_job` needs beside slots.
inline int64_t decode_room(int64_t repeats, int64_t size, int64_t count) {
    return 2 * repeats * size + LANES * size + repeats * (count + LANES) + LANES;
}

// Request `row` and key head `head` of queries [rows, heads · repeats, size] over pools [heads, pages, size]; rows of `out`
// are `step` numbers apart.
template <class T>
inline void decode_job(const T *q, const T *keys, const T *values, T *out, int64_t step, const Contexts &at, int64_t row, int64_t head,
                       int64_t heads, int64_t repeats, int64_t size, int64_t pages, float scale,
                       std::vector<float> &room, std::vector<int64_t> &slots) {
    int64_t family = at.prefix ? at.place[row] / at.members : 0;
    int64_t above = at.prefix ? at.shared[family] : 0, all = above + at.lengths[row], from = at.first_seen(all);
    int64_t count = all - from;
    slots.resize(count);
    for (int64_t t = from; t < all; t++)
        slots[t - from] = t < above ? at.prefix[family * at.prefix_width + t] : at.own[row * at.own_width + t - above];
    room.resize(decode_room(repeats, size, count));
    lanes_t *aligned = (lanes_t *)(((uintptr_t)room.data() + sizeof(lanes_t) - 1) / sizeof(lanes_t) * sizeof(lanes_t));
    int64_t first = (row * heads + head) * repeats * size;
    out += row * step + head * repeats * size;
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == sizeof(bf16)) {
        const bf16 *asked = q + first, *k = keys + head * pages * size, *v = values + head * pages * size;
        float *scores = (float *)aligned;
        if (size == PAIRS) return decode_pairs<1>(asked, k, v, out, slots.data(), count, repeats, scale, scores);
        if (size == 2 * PAIRS) return decode_pairs<2>(asked, k, v, out, slots.data(), count, repeats, scale, scores);
        if (size == 3 * PAIRS) return decode_pairs<3>(asked, k, v, out, slots.data(), count, repeats, scale, scores);
        if (size == 4 * PAIRS) return decode_pairs<4>(asked, k, v, out, slots.data(), count, repeats, scale, scores);
    }
#endif
    decode_one(q + first, keys + head * pages * size, values + head * pages * size, out, slots.data(), count,
               repeats, size, scale, aligned);
}

}  // namespace
