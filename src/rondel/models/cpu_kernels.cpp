// What stands between the products of a transformer on a CPU, each in one pass over its numbers.
//
// Numbers are float32 (code 0) or bfloat16 (code 1); all sums are in float32. A number's bits do not depend on where it
// lies or on the number of threads: loops run over whole vectors of VECTOR numbers, the last one filled up with zeros,
// sums of a row are taken in one order, and sums over rows in blocks of a fixed size.
// Roundings are those of the modules of transformers. cpu_kernels.py has the formulas and calls these.

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
    if (count == VECTOR) {
        for (int i = 0; i < VECTOR; i++) narrow(from[i], to[i]);
        return;
    }
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

template <class X, class W>
void norm_forward(const X *x, const W *w, W *out, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const X *from = x + row * size;
        float r = inverse_rms(from, size, eps), v[VECTOR], s[VECTOR];
        for (int64_t at = 0; at < size; at += VECTOR) {
            int64_t n = part(at, size);
            read(from + at, n, v);
            read(w + at, n, s);
            for (int i = 0; i < VECTOR; i++) v[i] = s[i] * rounded<X>(v[i] * r);
            write(v, n, out + row * size + at);
        }
    }
}

template <class X, class W>
void norm_backward(const X *x, const W *w, const W *grad, X *dx, float *dw, int64_t rows, int64_t size, float eps,
                   int64_t block, int threads) {
    int64_t blocks = (rows + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 16384)
    for (int64_t b = 0; b < blocks; b++) {
        float *partial = dw + b * size;
        for (int64_t row = b * block; row < rows && row < (b + 1) * block; row++) {
            const X *from = x + row * size;
            const W *pulled = grad + row * size;
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
                float sum[VECTOR];
                read(from + at, n, v);
                read(w + at, n, s);
                read(pulled + at, n, g);
                read(partial + at, n, sum);
                for (int i = 0; i < VECTOR; i++) {
                    float normed = v[i] * r;
                    sum[i] += g[i] * rounded<X>(normed);
                    v[i] = r * (g[i] * s[i] - normed * along);
                }
                write(v, n, dx + row * size + at);
                write(sum, n, partial + at);
            }
        }
    }
}

template <class T>
void gate_forward(const T *gate, const T *up, T *out, int64_t rows, int64_t size, int64_t gate_step, int64_t up_step,
                  int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < size; at += VECTOR) {
            int64_t n = part(at, size);
            float g[VECTOR], u[VECTOR];
            read(gate + row * gate_step + at, n, g);
            read(up + row * up_step + at, n, u);
            for (int i = 0; i < VECTOR; i++) u[i] *= rounded<T>(g[i] / (1.0f + exponential(-g[i])));
            write(u, n, out + row * size + at);
        }
}

template <class T>
void gate_backward(const T *gate, const T *up, const T *grad, T *dgate, T *dup, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 16384)
    for (int64_t at = 0; at < count; at += VECTOR) {
        int64_t n = part(at, count);
        float g[VECTOR], u[VECTOR], y[VECTOR];
        read(gate + at, n, g);
        read(up + at, n, u);
        read(grad + at, n, y);
        for (int i = 0; i < VECTOR; i++) {
            float share = 1.0f / (1.0f + exponential(-g[i]));
            float pulled = rounded<T>(y[i] * u[i]);
            u[i] = y[i] * rounded<T>(g[i] * share);
            g[i] = pulled * share * (1.0f + g[i] * (1.0f - share));
        }
        write(g, n, dgate + at);
        write(u, n, dup + at);
    }
}

template <class T, class C>
void rotate(const T *x, const C *cosine, const C *sine, T *out, int64_t tokens, int64_t heads, int64_t size,
            int64_t token_step, int64_t head_step, int back, int threads) {
    int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * heads * size > 16384)
    for (int64_t t = 0; t < tokens; t++) {
        const C *c = cosine + t * size, *s = sine + t * size;
        for (int64_t h = 0; h < heads; h++) {
            const T *from = x + t * token_step + h * head_step;
            T *to = out + (t * heads + h) * size;
            if (back)
                for (int64_t i = 0; i < half; i++) {
                    float a = wide(from[i]), b = wide(from[i + half]);
                    narrow(rounded<C>(a * wide(c[i])) + rounded<C>(b * wide(s[i + half])), to[i]);
                    narrow(rounded<C>(b * wide(c[i + half])) - rounded<C>(a * wide(s[i])), to[i + half]);
                }
            else
                for (int64_t i = 0; i < half; i++) {
                    float a = wide(from[i]), b = wide(from[i + half]);
                    narrow(rounded<C>(a * wide(c[i])) - rounded<C>(b * wide(s[i])), to[i]);
                    narrow(rounded<C>(b * wide(c[i + half])) + rounded<C>(a * wide(s[i + half])), to[i + half]);
                }
        }
    }
}

// scores [rows, size] -> weights in the same place; row r is masked by row (r / many) * length + r % length of `seen`
template <class T>
void softmax(T *scores, const uint8_t *seen, float scale, int64_t rows, int64_t size, int64_t length, int64_t many,
             int threads) {
#pragma omp parallel num_threads(threads) if (rows * size > 16384)
    {
        std::vector<float> held(whole(size), -INFINITY);
        float *v = held.data();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            T *own = scores + row * size;
            const uint8_t *mask = seen + ((many ? row / many : 0) * length + row % length) * size;
            float top[VECTOR], sums[VECTOR] = {0};
            for (int64_t i = 0; i < size; i++) v[i] = mask[i] ? wide(own[i]) * scale : -INFINITY;
            for (int64_t i = size; i < whole(size); i++) v[i] = -INFINITY;
            for (int i = 0; i < VECTOR; i++) top[i] = -INFINITY;
            for (int64_t at = 0; at < size; at += VECTOR)
                for (int i = 0; i < VECTOR; i++) top[i] = larger(v[at + i], top[i]);
            float most = largest(top);
            for (int64_t at = 0; at < size; at += VECTOR)
                for (int i = 0; i < VECTOR; i++) {
                    v[at + i] = exponential(v[at + i] - most);
                    sums[i] += v[at + i];
                }
            float inverse = 1.0f / total(sums);
            for (int64_t i = 0; i < size; i++) narrow(v[i] * inverse, own[i]);
        }
    }
}

// gradient of the weights [rows, size] -> that of the scores, in the same place
template <class T>
void softmax_backward(const T *weights, T *grad, float scale, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const T *w = weights + row * size;
        T *g = grad + row * size;
        float lanes[VECTOR] = {0}, a[VECTOR], b[VECTOR];
        for (int64_t at = 0; at < size; at += VECTOR) {
            read(w + at, part(at, size), a);
            read(g + at, part(at, size), b);
            for (int i = 0; i < VECTOR; i++) lanes[i] += a[i] * b[i];
        }
        float along = total(lanes);
        for (int64_t at = 0; at < size; at += VECTOR) {
            int64_t n = part(at, size);
            read(w + at, n, a);
            read(g + at, n, b);
            for (int i = 0; i < VECTOR; i++) b[i] = scale * a[i] * (b[i] - along);
            write(b, n, g + at);
        }
    }
}

// logits z [rows, size], of which z · warmth are those that were drawn from
void logprob_forward(const float *z, const int64_t *target, float *logprob, float *entropy, float *top, float *log_total,
                     int64_t rows, int64_t size, float warmth, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *own = z + row * size;
        float most[VECTOR], sums[VECTOR] = {0}, means[VECTOR] = {0}, v[VECTOR], e[VECTOR];
        for (int i = 0; i < VECTOR; i++) most[i] = -INFINITY;
        int64_t full = size / VECTOR * VECTOR;
        for (int64_t at = 0; at < full; at += VECTOR)
            for (int i = 0; i < VECTOR; i++) most[i] = larger(own[at + i], most[i]);
        for (int64_t at = full; at < size; at++) most[0] = larger(own[at], most[0]);
        float peak = largest(most) * warmth;
        for (int64_t at = 0; at < size; at += VECTOR) {
            int64_t n = part(at, size);
            read(own + at, n, v);
            for (int64_t i = n; i < VECTOR; i++) v[i] = -INFINITY;
            for (int i = 0; i < VECTOR; i++) v[i] = v[i] * warmth - peak;
            for (int i = 0; i < VECTOR; i++) e[i] = exponential(v[i]);
            for (int i = 0; i < VECTOR; i++) sums[i] += e[i];
            for (int i = 0; i < VECTOR; i++) means[i] += (v[i] < -200.0f ? -200.0f : v[i]) * e[i];  // 0, not -inf · 0
        }
        float all = total(sums);
        top[row] = peak;
        log_total[row] = std::log(all);
        entropy[row] = log_total[row] - total(means) / all;
        logprob[row] = own[target[row]] * warmth - peak - log_total[row];
    }
}

// dz of g · logprob + h · entropy, times `scale`; h may be null. `out` may be z
template <class T>
void logprob_backward(const float *z, const int64_t *target, const float *top, const float *log_total,
                      const float *entropy, const float *g, const float *h, T *out, int64_t rows, int64_t size,
                      float warmth, float scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float pull = h ? h[row] : 0.0f, away = g[row], own = entropy[row], v[VECTOR];
        float chosen = z[row * size + target[row]] * warmth - top[row] - log_total[row];
        for (int64_t at = 0; at < size; at += VECTOR) {
            int64_t n = part(at, size);
            read(z + row * size + at, n, v);
            for (int i = 0; i < VECTOR; i++) {
                float logp = v[i] * warmth - top[row] - log_total[row], p = exponential(logp);
                v[i] = p == 0.0f ? 0.0f : -scale * p * (away + pull * (logp + own));
            }
            write(v, n, out + row * size + at);
        }
        float p = exponential(chosen);
        narrow(scale * (away - (p == 0.0f ? 0.0f : p * (away + pull * (chosen + own)))), out[row * size + target[row]]);
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

// Rows `first` to `first` + LANES of those that the slots name; zeros behind the last of `count`.
template <class T>
inline void read_block(const T *from, const int64_t *slots, int64_t first, int64_t count, int64_t size, lanes_t *block) {
    int64_t parts = size / LANES, end = std::min(count - first, int64_t(LANES));
    for (int64_t t = first + LANES; t < std::min(count, first + 2 * LANES); t++) fetch(from + slots[t] * size, size * sizeof(T));
    for (int64_t t = 0; t < end; t++)
        for (int64_t i = 0; i < parts; i++) block[t * parts + i] = load(from + slots[first + t] * size + i * LANES);
    for (int64_t i = end * parts; i < LANES * parts; i++) block[i] = lanes_t{0};
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
        for (int64_t r = 0; r < repeats; r++) {
            lanes_t rows[LANES];
            for (int64_t t = 0; t < LANES; t++) {
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
    for (int64_t r = 0; r < repeats; r++) {
        float *own = (float *)(scores + r * blocks), most = -INFINITY, lanes[LANES] = {0}, all = 0;
        for (int64_t t = 0; t < count; t++) most = larger(own[t], most);
        for (int64_t t = count; t < blocks * LANES; t++) own[t] = -INFINITY;
        for (int64_t t = 0; t < blocks * LANES; t += LANES)
            for (int i = 0; i < LANES; i++) {
                own[t + i] = exponential(own[t + i] - most);
                lanes[i] += own[t + i];
            }
        for (int i = 0; i < LANES; i++) all += lanes[i];
        float inverse = 1.0f / all;
        for (int64_t t = 0; t < blocks * LANES; t++) own[t] = rounded<T>(own[t] * inverse);
    }
    for (int64_t b = 0; b < blocks; b++) {
        read_block(values, slots, b * LANES, count, size, block);
        for (int64_t r = 0; r < repeats; r++) {
            const float *weights = (const float *)(scores + r * blocks + b);
            for (int64_t i = 0; i < parts; i++) {
                lanes_t sum = sums[r * parts + i];
                for (int64_t t = 0; t < LANES; t++) sum += weights[t] * block[t * parts + i];
                sums[r * parts + i] = sum;
            }
        }
    }
    const float *found = (const float *)sums;
    for (int64_t i = 0; i < repeats * size; i++) narrow(found[i], out[i]);
}

template <class T>
void decode(const T *q, const T *keys, const T *values, T *out, Contexts at, int64_t rows, int64_t heads,
            int64_t repeats, int64_t size, int64_t pages, float scale, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> room;
        std::vector<int64_t> slots;
#pragma omp for schedule(static)
        for (int64_t job = 0; job < rows * heads; job++) {
            int64_t row = job / heads, head = job % heads, family = at.prefix ? at.place[row] / at.members : 0;
            int64_t above = at.prefix ? at.shared[family] : 0, all = above + at.lengths[row], from = at.first_seen(all);
            int64_t count = all - from;
            slots.resize(count);
            for (int64_t t = from; t < all; t++)
                slots[t - from] = t < above ? at.prefix[family * at.prefix_width + t] : at.own[row * at.own_width + t - above];
            room.resize(2 * repeats * size + LANES * size + repeats * (count + LANES) + LANES);
            lanes_t *aligned = (lanes_t *)(((uintptr_t)room.data() + sizeof(lanes_t) - 1) / sizeof(lanes_t) * sizeof(lanes_t));
            int64_t first = (row * heads + head) * repeats * size;
            decode_one(q + first, keys + head * pages * size, values + head * pages * size, out + first, slots.data(),
                       count, repeats, size, scale, aligned);
        }
    }
}

}  // namespace

extern "C" {

void rondel_norm_forward(const void *x, int x_code, const void *w, int w_code, void *out, int64_t rows, int64_t size,
                         float eps, int threads) {
    if (x_code && w_code) norm_forward((const bf16 *)x, (const bf16 *)w, (bf16 *)out, rows, size, eps, threads);
    else if (w_code) norm_forward((const float *)x, (const bf16 *)w, (bf16 *)out, rows, size, eps, threads);
    else norm_forward((const float *)x, (const float *)w, (float *)out, rows, size, eps, threads);
}

void rondel_norm_backward(const void *x, int x_code, const void *w, int w_code, const void *grad, void *dx, float *dw,
                          int64_t rows, int64_t size, float eps, int64_t block, int threads) {
    if (x_code && w_code)
        norm_backward((const bf16 *)x, (const bf16 *)w, (const bf16 *)grad, (bf16 *)dx, dw, rows, size, eps, block, threads);
    else if (w_code)
        norm_backward((const float *)x, (const bf16 *)w, (const bf16 *)grad, (float *)dx, dw, rows, size, eps, block, threads);
    else
        norm_backward((const float *)x, (const float *)w, (const float *)grad, (float *)dx, dw, rows, size, eps, block, threads);
}

void rondel_gate_forward(int code, const void *gate, const void *up, void *out, int64_t rows, int64_t size,
                         int64_t gate_step, int64_t up_step, int threads) {
    if (code) gate_forward((const bf16 *)gate, (const bf16 *)up, (bf16 *)out, rows, size, gate_step, up_step, threads);
    else gate_forward((const float *)gate, (const float *)up, (float *)out, rows, size, gate_step, up_step, threads);
}

void rondel_gate_backward(int code, const void *gate, const void *up, const void *grad, void *dgate, void *dup,
                          int64_t count, int threads) {
    if (code) gate_backward((const bf16 *)gate, (const bf16 *)up, (const bf16 *)grad, (bf16 *)dgate, (bf16 *)dup, count, threads);
    else gate_backward((const float *)gate, (const float *)up, (const float *)grad, (float *)dgate, (float *)dup, count, threads);
}

void rondel_rotate(const void *x, int code, const void *c, const void *s, int angle_code, void *out, int64_t tokens,
                   int64_t heads, int64_t size, int64_t token_step, int64_t head_step, int back, int threads) {
    if (code && angle_code)
        rotate((const bf16 *)x, (const bf16 *)c, (const bf16 *)s, (bf16 *)out, tokens, heads, size, token_step, head_step, back, threads);
    else if (code)
        rotate((const bf16 *)x, (const float *)c, (const float *)s, (bf16 *)out, tokens, heads, size, token_step, head_step, back, threads);
    else
        rotate((const float *)x, (const float *)c, (const float *)s, (float *)out, tokens, heads, size, token_step, head_step, back, threads);
}

void rondel_softmax(int code, void *scores, const uint8_t *seen, float scale, int64_t rows, int64_t size,
                    int64_t length, int64_t many, int threads) {
    if (code) softmax((bf16 *)scores, seen, scale, rows, size, length, many, threads);
    else softmax((float *)scores, seen, scale, rows, size, length, many, threads);
}

void rondel_softmax_backward(int code, const void *weights, void *grad, float scale, int64_t rows, int64_t size,
                             int threads) {
    if (code) softmax_backward((const bf16 *)weights, (bf16 *)grad, scale, rows, size, threads);
    else softmax_backward((const float *)weights, (float *)grad, scale, rows, size, threads);
}

void rondel_add(float *sum, const void *more, int64_t count, int threads) {
    const bf16 *from = (const bf16 *)more;
#pragma omp parallel for simd num_threads(threads) schedule(static) if (count > 16384)
    for (int64_t i = 0; i < count; i++) sum[i] += wide(from[i]);
}

void rondel_join(const void *high, const void *low, float *out, int64_t count, int threads) {
    const bf16 *a = (const bf16 *)high, *b = (const bf16 *)low;
#pragma omp parallel for simd num_threads(threads) schedule(static) if (count > 16384)
    for (int64_t i = 0; i < count; i++) out[i] = wide(a[i]) + wide(b[i]);
}

void rondel_logprob_forward(const float *z, const int64_t *target, float *logprob, float *entropy, float *top,
                            float *log_total, int64_t rows, int64_t size, float warmth, int threads) {
    logprob_forward(z, target, logprob, entropy, top, log_total, rows, size, warmth, threads);
}

void rondel_logprob_backward(int code, const float *z, const int64_t *target, const float *top, const float *log_total,
                             const float *entropy, const float *g, const float *h, void *out, int64_t rows,
                             int64_t size, float warmth, float scale, int threads) {
    if (code) logprob_backward(z, target, top, log_total, entropy, g, h, (bf16 *)out, rows, size, warmth, scale, threads);
    else logprob_backward(z, target, top, log_total, entropy, g, h, (float *)out, rows, size, warmth, scale, threads);
}

void rondel_decode(int code, const void *q, const void *keys, const void *values, void *out, const int64_t *own,
                   const int64_t *lengths, const int64_t *prefix, const int64_t *shared, const int64_t *place,
                   int64_t own_width, int64_t prefix_width, int64_t members, int64_t window, int64_t chunk,
                   int64_t rows, int64_t heads, int64_t repeats, int64_t size, int64_t pages, float scale, int threads) {
    Contexts at{own, lengths, prefix, shared, place, own_width, prefix_width, members, window, chunk};
    if (code) decode((const bf16 *)q, (const bf16 *)keys, (const bf16 *)values, (bf16 *)out, at, rows, heads, repeats, size, pages, scale, threads);
    else decode((const float *)q, (const float *)keys, (const float *)values, (float *)out, at, rows, heads, repeats, size, pages, scale, threads);
}

}
