// What stands between the products of a transformer on a CPU, each in one pass over its numbers.
//
// Numbers are float32 (code 0) or bfloat16 (code 1); all sums are in float32. A number's bits do not depend on where it
// lies or on the number of threads: rows are computed as in cpu_rows.h, and sums over rows in blocks of a fixed size.
// Roundings are those of the modules of transformers. cpu_kernels.py has the formulas and calls these.

#include "cpu_rows.h"

namespace {

template <class X, class W>
void norm_forward(const X *x, const W *w, W *out, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * size, w, out + row * size, size, eps);
}

template <class X, class W>
void norm_backward(const X *x, const W *w, const W *grad, X *dx, float *dw, int64_t rows, int64_t size, float eps,
                   int64_t block, int threads) {
    int64_t blocks = (rows + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 16384)
    for (int64_t b = 0; b < blocks; b++) {
        float *partial = dw + b * size;
        for (int64_t row = b * block; row < rows && row < (b + 1) * block; row++)
            norm_row_backward<false>(x + row * size, w, grad + row * size, dx + row * size, partial, size, eps);
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
            gate_vector<T, VECTOR>(g, u);
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
                rotate_head(from, c, s, to, half);
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

// dz [V] of one row of z; `out` may be where z is
template <class T>
void logit_gradient(const float *z, int64_t target, float top, float log_total, float own, float away, float pull, T *out,
                    int64_t size, float warmth, float scale) {
    float v[VECTOR];
    volatile float chosen = z[target] * warmth - top - log_total;  // read before it is written over as another type
    for (int64_t at = 0; at < size; at += VECTOR) {
        int64_t n = part(at, size);
        read(z + at, n, v);
        for (int i = 0; i < VECTOR; i++) {
            float logp = v[i] * warmth - top - log_total, p = exponential(logp);
            v[i] = p == 0.0f ? 0.0f : -scale * p * (away + pull * (logp + own));
        }
        write(v, n, out + at);
    }
    float p = exponential(chosen);
    narrow(scale * (away - (p == 0.0f ? 0.0f : p * (away + pull * (chosen + own)))), out[target]);
}

// dz of g · logprob + h · entropy, times `scale`; h may be null. `out` is where z is: rows of bfloat16 are as many at a time
// as went before them, and take the place of those that nobody reads any more
template <class T>
void logprob_backward(const float *z, const int64_t *target, const float *top, const float *log_total,
                      const float *entropy, const float *g, const float *h, T *out, int64_t rows, int64_t size,
                      float warmth, float scale, int threads) {
    for (int64_t first = 0, count; first < rows; first += count) {
        count = std::min(sizeof(T) < sizeof(float) ? std::max<int64_t>(first, 1) : rows, rows - first);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t row = first; row < first + count; row++)
            logit_gradient(z + row * size, target[row], top[row], log_total[row], entropy[row], g[row], h ? h[row] : 0.0f,
                           out + row * size, size, warmth, scale);
    }
}

template <class T>
void decode(const T *q, const T *keys, const T *values, T *out, Contexts at, int64_t rows, int64_t heads,
            int64_t repeats, int64_t size, int64_t pages, float scale, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> room;
        std::vector<int64_t> slots;
#pragma omp for schedule(static)
        for (int64_t job = 0; job < rows * heads; job++)
            decode_job(q, keys, values, out, heads * repeats * size, at, job / heads, job % heads, heads, repeats, size, pages, scale, room, slots);
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

// A weight below 1.2e-38 keeps its bits, too: the instruction of `narrow_all` takes it for 0, and nothing would join it again.
static inline void round_weights(const float *from, int64_t count, bf16 *to) {
    if (count == VECTOR)
        for (int i = 0; i < VECTOR; i++) narrow(from[i], to[i]);
    else
        for (int64_t i = 0; i < count; i++) narrow(from[i], to[i]);
}

// held = from, rounded; -> how many of them have other bits than before
int64_t rondel_round(const float *from, void *held, int64_t count, int threads) {
    bf16 *to = (bf16 *)held;
    int64_t changed = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : changed) if (count > 16384)
    for (int64_t first = 0; first < count; first += VECTOR) {
        bf16 fresh[VECTOR];
        int64_t some = std::min<int64_t>(VECTOR, count - first), differ = 0;
        round_weights(from + first, some, fresh);
        if (some == VECTOR)
            for (int i = 0; i < VECTOR; i++) differ += fresh[i].bits != to[first + i].bits;
        else
            for (int64_t i = 0; i < some; i++) differ += fresh[i].bits != to[first + i].bits;
        memcpy(to + first, fresh, some * sizeof(bf16));
        changed += differ;
    }
    return changed;
}

// held = whole, rounded; low = the bits of a number - those of its copy. -> counts: of copies with other bits than before,
// and of numbers where that difference is 2^15, of which 16 bits say -2^15: `ties` has the places of the first `room`
void rondel_split(const float *whole, void *held, int16_t *low, int64_t *ties, int64_t *counts, int64_t room,
                  int64_t count, int threads) {
    bf16 *copies = (bf16 *)held;
    int64_t changed = 0, found = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : changed) if (count > 16384)
    for (int64_t first = 0; first < count; first += VECTOR) {
        int some = (int)std::min<int64_t>(VECTOR, count - first), above = 0, differ = 0;
        bf16 fresh[VECTOR];
        uint32_t bits[VECTOR];
        int32_t more[VECTOR];
        round_weights(whole + first, some, fresh);
        memcpy(bits, whole + first, some * sizeof(float));
        for (int i = 0; i < some; i++) {
            more[i] = (int32_t)(bits[i] - ((uint32_t)fresh[i].bits << 16));
            low[first + i] = (int16_t)more[i];
            above += more[i] == 32768;
            differ += fresh[i].bits != copies[first + i].bits;
        }
        memcpy(copies + first, fresh, some * sizeof(bf16));
        changed += differ;
        if (above)
#pragma omp critical
            for (int i = 0; i < some; i++)
                if (more[i] == 32768) {
                    if (found < room) ties[found] = first + i;
                    found++;
                }
    }
    counts[0] = changed, counts[1] = found;
}

void rondel_unsplit(const void *held, const int16_t *low, float *whole, int64_t count, int threads) {
    const bf16 *copies = (const bf16 *)held;
#pragma omp parallel for simd num_threads(threads) schedule(static) if (count > 16384)
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = ((uint32_t)copies[i].bits << 16) + (uint32_t)(int32_t)low[i];
        memcpy(whole + i, &bits, sizeof bits);
    }
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
