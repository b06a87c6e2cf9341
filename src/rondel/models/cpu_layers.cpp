// Layers of a dense decoder over the engine's cache in bfloat16 or float32, each in one piece, from the residual stream in fp32 to
// the residual stream: norm, joined product of q, k and v, rotary embedding, cache, attention of a decode step, product,
// sum, norm, joined product of gate and up with silu(g) · u behind it, product, sum. One team of threads computes them
// all, the norm behind the last layer too, so what lies between two operations is a barrier. packed_layers.py calls this; it rounds where the modules do.

#include "cpu_tiles.h"

namespace {

constexpr int64_t LONGEST = 512;  // numbers of a head

struct Sizes {  // as packed_layers.py hands them over
    int64_t rows, width, heads, shared, size, inner, pages;
    int64_t normed_step, attended_step, inner_step;  // from row to row of a room
};

template <class T> struct LayerParts {  // addresses; 0 where a layer has no such part
    const T *norm, *qkv;
    const float *qkv_bias;
    const T *q_norm, *k_norm, *out;
    const float *out_bias;
    const T *next_norm, *gate_up, *down;
    T *keys, *values;
    int64_t window;
};

template <class T> struct Rooms {  // what lies between two operations: [rows, ...]
    T *normed, *qkv, *q, *attended, *inner;
};

// `use(row, output, sums)` of HALF outputs at a time, of all rows of a panel; widths are multiples of HALF
template <class Use> inline void each_half(int64_t first, int64_t some, int64_t panel, int64_t width, const float *sums, const Use &use) {
    for (int64_t r = 0; r < some; r++)
        for (int64_t half = 0; half < 2 && panel * WIDTH + half * HALF < width; half++)
            use(first + r, panel * WIDTH + half * HALF, sums + r * WIDTH + half * HALF);
}

inline lanes_t with_bias(const float *sums, const float *bias) { return bias ? load(sums) + load(bias) : load(sums); }

template <class T> void norm_rows(const float *stream, const T *weight, T *out, int64_t step, const Sizes &n, float eps) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < n.rows; row++) norm_row(stream + row * n.width, weight, out + row * step, n.width, eps);
}

// Up to attention: queries, and the new keys and values in the cache.
template <class T>
void layer_front(const LayerParts<T> &layer, const Sizes &n, float *stream, const float *cosine, const float *sine,
                 const int64_t *write, const Rooms<T> &room, float eps) {
    int64_t width = (n.heads + 2 * n.shared) * n.size, half = n.size / 2;
    norm_rows(stream, layer.norm, room.normed, n.normed_step, n, eps);
    panel_product(room.normed, n.normed_step, layer.qkv, n.rows, n.width, panels_of(width), [&](int64_t first, int64_t some, int64_t p, const float *sums) {
        each_half(first, some, p, width, sums, [&](int64_t row, int64_t at, const float *own) {
            put(with_bias(own, layer.qkv_bias ? layer.qkv_bias + at : nullptr), room.qkv + row * width + at);
        });
    });
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t row = 0; row < n.rows; row++) {
        const float *c = cosine + row * n.size, *s = sine + row * n.size;
        T normed[LONGEST];
        for (int64_t h = 0; h < n.heads + n.shared; h++) {
            const T *from = room.qkv + row * width + h * n.size;
            const T *weight = h < n.heads ? layer.q_norm : layer.k_norm;
            if (weight) {
                norm_row(from, weight, normed, n.size, eps);
                from = normed;
            }
            T *to = h < n.heads ? room.q + (row * n.heads + h) * n.size
                                   : layer.keys + ((h - n.heads) * n.pages + write[row]) * n.size;
            rotate_head(from, c, s, to, half);
        }
        const T *v = room.qkv + row * width + (n.heads + n.shared) * n.size;
        for (int64_t h = 0; h < n.shared; h++)
            memcpy(layer.values + (h * n.pages + write[row]) * n.size, v + h * n.size, n.size * sizeof(T));
    }
}

// From what was attended to the end of the layer.
template <class T> void layer_back(const LayerParts<T> &layer, const Sizes &n, float *stream, const Rooms<T> &room, float eps) {
    auto add = [&](const float *bias) {  // to the stream, rounded as the module's branch is
        return [&n, stream, bias](int64_t first, int64_t some, int64_t p, const float *sums) {
            each_half(first, some, p, n.width, sums, [&](int64_t row, int64_t at, const float *own) {
                float *to = stream + row * n.width + at;
                put(load(to) + round_to(with_bias(own, bias ? bias + at : nullptr), T()), to);
            });
        };
    };
    panel_product(room.attended, n.attended_step, layer.out, n.rows, n.heads * n.size, panels_of(n.width), add(layer.out_bias));
#pragma omp barrier
    norm_rows(stream, layer.next_norm, room.normed, n.normed_step, n, eps);
    panel_product<2>(room.normed, n.normed_step, layer.gate_up, n.rows, n.width, n.inner / HALF, [&](int64_t first, int64_t some, int64_t p, const float *sums) {
        constexpr int64_t AT_ONCE = VECTOR / HALF;  // rows of a vector
        for (int64_t r = 0; r < some; r += AT_ONCE) {
            int64_t count = std::min(AT_ONCE, some - r);
            float gate[VECTOR] = {0}, up[VECTOR] = {0};
            for (int64_t i = 0; i < count; i++) {
                put(load(sums + (r + i) * WIDTH), gate + i * HALF);
                put(load(sums + (r + i) * WIDTH + HALF), up + i * HALF);
            }
            round_all<T, VECTOR>(gate), round_all<T, VECTOR>(up);
            gate_vector<T, VECTOR>(gate, up);
            T out[VECTOR];
            narrow_all<VECTOR>(up, out);
            for (int64_t i = 0; i < count; i++)
                memcpy(room.inner + (first + r + i) * n.inner_step + p * HALF, out + i * HALF, HALF * sizeof(T));
        }
    });
#pragma omp barrier
    panel_product(room.inner, n.inner_step, layer.down, n.rows, n.inner, panels_of(n.width), add(nullptr));
#pragma omp barrier
}

// One pass, as packed_layers.py hands it over: sizes, addresses and counts.
template <class T> struct Pass {
    Sizes n;
    float *stream;
    const float *cosine, *sine;
    const int64_t *write;
    Rooms<T> room;
    const T *last_norm;
    T *hidden;
    int64_t decoding;
    Contexts at;  // without a window, which is a layer's
};

// parts: 1 up to attention, 2 attention of the last `decoding` rows, 4 from it on; 8 the norm behind all layers
template <class T>
void run_layers(const LayerParts<T> *layers, int64_t count, int parts, const Pass<T> &pass, float eps, float scale, int threads) {
    const Sizes &n = pass.n;
    const Rooms<T> &room = pass.room;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> numbers;
        std::vector<int64_t> slots;
        Registers own;
        for (int64_t l = 0; l < count; l++) {
            const LayerParts<T> &layer = layers[l];
            if (parts & 1) layer_front(layer, n, pass.stream, pass.cosine, pass.sine, pass.write, room, eps);
            if (parts & 2) {
                Contexts seen = pass.at;
                seen.window = layer.window;
                int64_t first = n.rows - pass.decoding, from = first * n.heads * n.size;
                int64_t jobs = pass.decoding * n.shared, some = std::clamp<int64_t>(jobs / (2 * threads), 1, 8);
#pragma omp for schedule(dynamic, some)  // siblings one after the other: what they share is still near
                for (int64_t job = 0; job < jobs; job++)
                    decode_job(room.q + from, (const T *)layer.keys, (const T *)layer.values, room.attended + first * n.attended_step, n.attended_step,
                               seen, job % pass.decoding, job / pass.decoding, n.shared, n.heads / n.shared, n.size,
                               n.pages, scale, numbers, slots);
            }
            if (parts & 4) layer_back(layer, n, pass.stream, room, eps);
        }
        if (parts & 8) norm_rows(pass.stream, pass.last_norm, pass.hidden, n.width, n, eps);
    }
}

}  // namespace

extern "C" {

// code: 0 float32, 1 bfloat16
void rondel_layers(int code, const void *layers, int64_t count, int parts, const void *pass, float eps, float scale, int threads) {
    if (code)
        run_layers((const LayerParts<bf16> *)layers, count, parts, *(const Pass<bf16> *)pass, eps, scale, threads);
    else
        run_layers((const LayerParts<float> *)layers, count, parts, *(const Pass<float> *)pass, eps, scale, threads);
}

}
