// The two halves of a dense decoder's layer around its attention, forward and backward, in bfloat16 or float32 over a
// residual stream in fp32: norm and the products of q, k and v; then the output product, sum, norm, gate and up, silu(g) · u, the
// down product, sum. Each is one call and one team of threads. Weights are taken as they lie: a thread puts 32 outputs of
// them into a panel of its own (cpu_tiles.h) and multiplies it with some hundred rows. Gradients of weights are added to
// fp32 sums where they are computed, never rounded. layer_halves.py calls this; it rounds where the modules do.

#ifdef _OPENMP
#include <omp.h>
#else  // torch brings another pool: one thread
inline int omp_get_num_threads() { return 1; }
inline int omp_get_thread_num() { return 0; }
#endif

#include <atomic>

#include "cpu_panels.h"

namespace {

constexpr int64_t MOST_ROWS = 640;  // that are multiplied with one panel
constexpr int64_t LEAST_ROWS = 96;  // for which a panel is worth filling
constexpr int64_t OWN_ROWS = 192;   // for which one is, so that a thread reads and writes the same rows again and again
constexpr int64_t LEAST_TILES = 8;  // of outputs of a weight's gradient for which one is
constexpr int64_t JOBS = 8;         // for each thread, if there can be as many: the last ones are not waited for long
template <class T> constexpr int64_t CHAIN = 256 * JOINED<T>;  // words of a column whose products are one sum
constexpr int64_t NORM_ROWS = 64;   // of a norm whose share of the weight's gradient is summed one after the other

template <class T> struct Product {  // addresses; 0 for what is not there
    const T *weight;  // [width, in]
    const float *bias;
    T *out;             // [rows, width], or the gradient of it
    float *total;       // [width, in], to which the weight's gradient is added
    int64_t width;
    int64_t fresh;      // whether nothing is in `total` yet
};

template <class T> struct Half {  // as layer_halves.py hands it over
    int64_t rows, width, inner, attended_width, count;  // count: products of the front half
    int64_t step, attended_step, inner_step, joined_step;  // from row to row: of `normed` and `dnormed`, and the others
    const float *stream;    // [rows, width]: what the half reads
    const T *norm;       // [width]
    T *normed;           // room [rows, width]
    const T *attended;   // [rows, attended_width]
    float *middle;          // [rows, width]: the stream behind attention
    T *inner_room;       // [rows, inner]
    float *out;             // [rows, width]: the stream behind the layer
    const float *dout;      // its gradient; in the front half that of the stream from behind, or 0
    T *joined;           // room: gradients beside each other
    T *tiles;            // room for `put_gradient`
    T *dnormed;          // room [rows, width]
    T *dattended;        // [rows, attended_width]
    float *dstream;         // [rows, width]
    float *shares;          // room [blocks, width]
    float *norm_total;      // [width], to which the gradient of `norm` is added, or 0
    int64_t norm_fresh;     // whether nothing is in it yet
};

// -- products --------------------------------------------------------------------------------------------

inline int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// into how many parts, at most `most`, the work with each of `count` panels is cut, so that all threads have jobs
inline int64_t shares_of(int64_t count, int64_t most) {
    return std::max<int64_t>(1, std::min(most, parts_of(JOBS * omp_get_num_threads(), count)));
}

// of rows: each fills the panel for itself
inline int64_t blocks_of(int64_t rows, int64_t count) {
    int64_t threads = omp_get_num_threads(), own = rows >= threads * OWN_ROWS ? threads : 1;
    return std::max({own, parts_of(rows, MOST_ROWS), shares_of(count, parts_of(rows, LEAST_ROWS))});
}

// the first row of a block
template <class T> inline int64_t begin_of(int64_t block, int64_t blocks, int64_t rows) {
    return std::min(rows, block * parts_of(rows, WHOLE_ROWS<T>) / blocks * WHOLE_ROWS<T>);
}

struct alignas(64) Taken {  // panels of a block of rows that are computed or under way
    std::atomic<int64_t> count{0};
};

// What a thread of a half has for itself, and how far the products are that all threads share.
template <class T> struct Worker {
    std::vector<Taken> &taken;  // for each product those of its blocks, in the order in which they are computed
    int64_t blocks;             // of a product, at most
    int64_t products = 0;       // that this thread has come to
    std::vector<T> room;
};

constexpr int64_t PRODUCTS = 4;  // of a half, at most
inline int64_t most_blocks(int64_t rows, int threads) { return std::max<int64_t>(threads, parts_of(rows, LEAST_ROWS)); }

// `use(first row, rows, panel, sums [rows, WIDTH])` of x [rows, in], whose rows are `step` numbers apart, and `count` panels, which
// `put(panel, to)` fills, on the threads of the region, which do not wait for each other at its end. A thread begins with the rows that
// it has had before, which are in its own caches: those of another core are three to nine times as far. AT_ONCE panels' results share
// lines of memory, so one thread computes them.
template <int64_t AT_ONCE = 1, class T, class Put, class Use>
inline void multiply(const T *x, int64_t step, int64_t rows, int64_t in, int64_t count, Worker<T> &worker, const Put &put, const Use &use) {
    int64_t blocks = blocks_of(rows, count), home = omp_get_thread_num() * blocks / omp_get_num_threads();
    Taken *taken = worker.taken.data() + worker.products++ * worker.blocks;
    T *panel = aligned_room(worker.room, in * WIDTH);
    for (int64_t b = home; b < home + blocks; b++) {
        int64_t block = b % blocks, begin = begin_of<T>(block, blocks, rows), end = begin_of<T>(block + 1, blocks, rows);
        for (int64_t from; (from = taken[block].count.fetch_add(AT_ONCE, std::memory_order_relaxed)) < count;)
            for (int64_t p = from; p < std::min(count, from + AT_ONCE); p++) {
                alignas(64) float sums[TILE<T> * WIDTH];
                put(p, panel);
                for (int64_t first = begin, left = tiles_of<T>(end - begin), some; left; left--, first += some) {
                    some = tile_rows<T>(end - first, left);
                    row_sums(some, x + first * step, step, panel, in / JOINED<T>, sums);
                    use(first, some, p, sums);
                }
            }
    }
}

// grad [rows, step], of which `width` columns -> tiles (`put_tiles`)
template <class T> inline void put_gradient(const T *grad, int64_t step, int64_t rows, int64_t width, T *to) {
    int64_t words = column_words<T>(rows);
    constexpr int64_t SOME = 16;  // words: their rows stay near while all tiles take their share
#pragma omp for schedule(static)
    for (int64_t from = 0; from < words; from += SOME) put_tiles(grad, step, rows, width, from, std::min(words, from + SOME), to);
}

// total [width, in] += gradᵀ x, or = where nothing is in it yet (`fresh`), for a gradient from `put_gradient` and x [rows, in], `step`
// numbers apart; ends without waiting
template <class T>
inline void add_weight_gradient(const T *grad, const T *x, int64_t step, int64_t rows, int64_t width, int64_t in, float *total,
                                bool fresh, std::vector<T> &room) {
    int64_t words = column_words<T>(rows), tiles = tiles_of<T>(width), count = panels_of(in);
    int64_t chunks = shares_of(count, parts_of(tiles, LEAST_TILES));
    T *panel = aligned_room(room, words * JOINED<T> * WIDTH);
#pragma omp for schedule(dynamic) nowait
    for (int64_t job = 0; job < chunks * count; job++) {
        int64_t p = job % count, columns = std::min(WIDTH, in - p * WIDTH), chunk = job / count;
        put_columns(x + p * WIDTH, step, rows, columns, panel);
        for (int64_t tile = chunk * tiles / chunks; tile < (chunk + 1) * tiles / chunks; tile++) {
            alignas(64) float sums[TILE<T> * WIDTH], more[TILE<T> * WIDTH];
            int64_t outputs = std::min(TILE<T>, width - tile * TILE<T>);
            float *first = total + tile * TILE<T> * in + p * WIDTH;
            for (int64_t r = 0; r < outputs; r++)  // from memory while the sums are taken: their rows are far apart
                for (int64_t i = 0; i < columns; i += HALF) __builtin_prefetch(first + r * in + i, 1);
            const T *own = grad + tile * words * JOINED<T> * TILE<T>;
            column_sums(own, 0, panel, std::min(words, CHAIN<T>), sums);
            for (int64_t k = CHAIN<T>; k < words; k += CHAIN<T>) {
                column_sums(own, k, panel, std::min(words - k, CHAIN<T>), more);
                for (int64_t i = 0; i < TILE<T> * WIDTH; i++) sums[i] += more[i];
            }
            for (int64_t r = 0; r < outputs; r++) {
                float *to = first + r * in;
                if (fresh) memcpy(to, sums + r * WIDTH, columns * sizeof(float));
                else if (columns == WIDTH)
                    for (int64_t i = 0; i < WIDTH; i += HALF) put(load(to + i) + load(sums + r * WIDTH + i), to + i);
                else
                    for (int64_t i = 0; i < columns; i++) to[i] += sums[r * WIDTH + i];
            }
        }
    }
}

// `use(row, column, sums, columns)` of each row of a tile
template <class Use> inline void each_row(int64_t first, int64_t some, int64_t p, int64_t width, const float *sums, const Use &use) {
    for (int64_t r = 0; r < some; r++) use(first + r, p * WIDTH, sums + r * WIDTH, std::min(WIDTH, width - p * WIDTH));
}

template <class T> inline void put_product(const Product<T> &one, int64_t in, int64_t p, T *panel) {
    for (int64_t half = 0; half < 2; half++) {
        int64_t at = p * WIDTH + half * HALF, count = std::max<int64_t>(0, std::min(HALF, one.width - at));
        put_outputs(one.weight + (count ? at * in : 0), in, count, panel + half * HALF * JOINED<T>);
    }
}

// out = x Wᵀ + b to `use(row, column, numbers, columns)`
template <class T, class Use>
inline void product(const T *x, int64_t step, int64_t rows, int64_t in, const Product<T> &one, Worker<T> &worker, const Use &use) {
    multiply(x, step, rows, in, panels_of(one.width), worker, [&](int64_t p, T *panel) { put_product(one, in, p, panel); },
             [&](int64_t first, int64_t some, int64_t p, float *sums) {
        each_row(first, some, p, one.width, sums, [&](int64_t row, int64_t at, const float *own, int64_t columns) {
            alignas(64) float out[WIDTH];
            if (one.bias) {
                for (int64_t i = 0; i < WIDTH; i++) out[i] = i < columns ? own[i] + one.bias[at + i] : own[i];
                own = out;
            }
            use(row, at, own, columns);
        });
    });
}

// dx [rows, in] = sum of grad W over products whose gradients lie beside each other in grad [rows, sum of widths], `step` numbers apart
template <class T, class Use>
inline void input_gradient(const T *grad, int64_t step, int64_t rows, int64_t in, const Product<T> *products, int64_t count, Worker<T> &worker, const Use &use) {
    int64_t all = 0;
    for (int64_t i = 0; i < count; i++) all += products[i].width;
    multiply(grad, step, rows, all, panels_of(in), worker, [&](int64_t p, T *panel) {
        for (int64_t i = 0; i < count; panel += products[i].width * WIDTH, i++)
            put_rows(products[i].weight + p * WIDTH, in, products[i].width, std::min(WIDTH, in - p * WIDTH), panel);
    }, [&](int64_t first, int64_t some, int64_t p, const float *sums) { each_row(first, some, p, in, sums, use); });
}

template <class T> inline void store(const float *from, int64_t count, T *to) {
    if (count == WIDTH)
        for (int64_t i = 0; i < WIDTH; i += HALF) put(load(from + i), to + i);
    else
        for (int64_t i = 0; i < count; i++) narrow(from[i], to[i]);
}

template <class T>
inline void norm_rows(const float *stream, const Half<T> &n, float eps) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < n.rows; row++) norm_row(stream + row * n.width, n.norm, n.normed + row * n.step, n.width, eps);
}

// dstream += the gradient through a norm of x [rows, width], and that of its weight: a share of each NORM_ROWS rows, then their sum
template <class T>
inline void norm_gradient(const float *x, const Half<T> &n, float eps) {
    int64_t blocks = parts_of(n.rows, NORM_ROWS);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        memset(n.shares + b * n.width, 0, n.width * sizeof(float));
        for (int64_t row = b * NORM_ROWS; row < std::min(n.rows, (b + 1) * NORM_ROWS); row++) {
            int64_t at = row * n.width;
            norm_row_backward<true>(x + at, n.norm, n.dnormed + row * n.step, n.dstream + at, n.shares + b * n.width, n.width, eps);
        }
    }
    if (!n.norm_total) return;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n.width; i++) {
        float sum = 0;
        for (int64_t b = 0; b < blocks; b++) sum += n.shares[b * n.width + i];
        n.norm_total[i] = n.norm_fresh ? sum : n.norm_total[i] + sum;
    }
}

// gate and up of one part of a row, the gradient of silu(g) · u -> theirs, and silu(g) · u again in the place of `y`
template <class T> inline void gate_row(const T *gate, const T *up, int64_t count, float *y, T *dgate, T *dup) {
    float g[WIDTH], u[WIDTH], dg[WIDTH], du[WIDTH];
    if (count == WIDTH) {
        for (int64_t i = 0; i < WIDTH; i++) g[i] = wide(gate[i]);
        for (int64_t i = 0; i < WIDTH; i++) u[i] = wide(up[i]);
    } else
        for (int64_t i = 0; i < WIDTH; i++) g[i] = i < count ? wide(gate[i]) : 0, u[i] = i < count ? wide(up[i]) : 0;
    float pulled[WIDTH], silu[WIDTH], shares[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) {
        float below = 1.0f + exponential(-g[i]);
        shares[i] = 1.0f / below, silu[i] = g[i] / below, pulled[i] = y[i] * u[i];
    }
    round_all<T, WIDTH>(silu);
    round_all<T, WIDTH>(pulled);
    for (int64_t i = 0; i < WIDTH; i++) {
        dg[i] = pulled[i] * shares[i] * (1.0f + g[i] * (1.0f - shares[i]));
        du[i] = y[i] * silu[i];
        y[i] = silu[i] * u[i];
    }
    store(dg, count, dgate);
    store(du, count, dup);
}

// -- the halves -------------------------------------------------------------------------------------------

template <class T> void front_forward(const Half<T> &n, const Product<T> *products, float eps, Worker<T> &worker) {
    norm_rows(n.stream, n, eps);
    for (int64_t i = 0; i < n.count; i++) {
        const Product<T> &one = products[i];
        product(n.normed, n.step, n.rows, n.width, one, worker, [&](int64_t row, int64_t at, const float *out, int64_t columns) {
            store(out, columns, one.out + row * one.width + at);
        });
    }
}

// weights' gradients of products of one input [rows, in], whose gradients lie beside each other; rows of both are as far apart as said
template <class T>
void weight_gradients(const Half<T> &n, const T *joined, int64_t step, const T *x, int64_t x_step, int64_t in, const Product<T> *products, int64_t count, std::vector<T> &room) {
    int64_t at = 0;
    T *to = n.tiles;
    for (int64_t i = 0; i < count; at += products[i].width, i++)
        if (products[i].total) {
            put_gradient(joined + at, step, n.rows, products[i].width, to);
            to += tile_room<T>(n.rows, products[i].width);
        }
    to = n.tiles;
    for (int64_t i = 0; i < count; i++)
        if (products[i].total) {
            add_weight_gradient(to, x, x_step, n.rows, products[i].width, in, products[i].total, products[i].fresh, room);
            to += tile_room<T>(n.rows, products[i].width);
        }
#pragma omp barrier
}

template <class T> void front_backward(const Half<T> &n, const Product<T> *products, float eps, Worker<T> &worker) {
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n.rows; row++) {
        T *to = n.joined + row * n.joined_step;
        for (int64_t i = 0; i < n.count; to += products[i].width, i++)
            memcpy(to, products[i].out + row * products[i].width, products[i].width * sizeof(T));
        if (n.dout) memcpy(n.dstream + row * n.width, n.dout + row * n.width, n.width * sizeof(float));
        else memset(n.dstream + row * n.width, 0, n.width * sizeof(float));
    }
    norm_rows(n.stream, n, eps);
    weight_gradients(n, n.joined, n.joined_step, n.normed, n.step, n.width, products, n.count, worker.room);
    input_gradient(n.joined, n.joined_step, n.rows, n.width, products, n.count, worker, [&](int64_t row, int64_t at, const float *own, int64_t columns) {
        store(own, columns, n.dnormed + row * n.step + at);
    });
#pragma omp barrier
    norm_gradient(n.stream, n, eps);
}

enum { OUT, GATE, UP, DOWN };

// to[...] = from[...] + out, rounded
template <class T> inline void add_part(const float *from, const float *out, int64_t count, float *to) {
    if (count == WIDTH)
        for (int64_t i = 0; i < WIDTH; i += HALF) put(load(from + i) + round_to(load(out + i), T()), to + i);
    else
        for (int64_t i = 0; i < count; i++) to[i] = from[i] + rounded<T>(out[i]);
}

// gate, up and silu(g) · u of the stream behind attention, those of them for which there is room
template <class T> void gated_forward(const Half<T> &n, const Product<T> *products, float eps, Worker<T> &worker) {
    norm_rows(n.middle, n, eps);
    const Product<T> &gate = products[GATE], &up = products[UP];
    multiply<2>(n.normed, n.step, n.rows, n.width, n.inner / HALF, worker, [&](int64_t p, T *panel) {
        put_outputs(gate.weight + p * HALF * n.width, n.width, HALF, panel);
        put_outputs(up.weight + p * HALF * n.width, n.width, HALF, panel + JOINED<T> * HALF);
    }, [&](int64_t first, int64_t some, int64_t p, const float *sums) {
        constexpr int64_t AT_ONCE = VECTOR / HALF;  // rows of a vector
        for (int64_t r = 0; r < some; r += AT_ONCE) {
            int64_t count = std::min(AT_ONCE, some - r);
            float g[VECTOR] = {0}, u[VECTOR] = {0};
            T narrow_g[VECTOR], narrow_u[VECTOR], out[VECTOR];
            for (int64_t i = 0; i < count; i++) {
                put(load(sums + (r + i) * WIDTH), g + i * HALF);
                put(load(sums + (r + i) * WIDTH + HALF), u + i * HALF);
            }
            narrow_all<VECTOR>(g, narrow_g), narrow_all<VECTOR>(u, narrow_u);
            round_all<T, VECTOR>(g), round_all<T, VECTOR>(u);
            gate_vector<T, VECTOR>(g, u);
            narrow_all<VECTOR>(u, out);
            for (int64_t i = 0; i < count; i++) {
                int64_t row = first + r + i, at = row * n.inner + p * HALF;
                if (gate.out) memcpy(gate.out + at, narrow_g + i * HALF, HALF * sizeof(T));
                if (up.out) memcpy(up.out + at, narrow_u + i * HALF, HALF * sizeof(T));
                if (n.inner_room) memcpy(n.inner_room + row * n.inner_step + p * HALF, out + i * HALF, HALF * sizeof(T));
            }
        }
    });
#pragma omp barrier
}

template <class T> void back_forward(const Half<T> &n, const Product<T> *products, float eps, Worker<T> &worker) {
    product(n.attended, n.attended_step, n.rows, n.attended_width, products[OUT], worker, [&](int64_t row, int64_t at, const float *out, int64_t columns) {
        add_part<T>(n.stream + row * n.width + at, out, columns, n.middle + row * n.width + at);
    });
#pragma omp barrier
    gated_forward(n, products, eps, worker);
    product(n.inner_room, n.inner_step, n.rows, n.inner, products[DOWN], worker, [&](int64_t row, int64_t at, const float *out, int64_t columns) {
        add_part<T>(n.middle + row * n.width + at, out, columns, n.out + row * n.width + at);
    });
}

template <class T> void back_backward(const Half<T> &n, const Product<T> *products, float eps, Worker<T> &worker) {
    T *narrowed = n.dnormed;  // of a gradient of the stream, until that of the norm is there
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < n.rows; row++)
        for (int64_t i = 0; i < n.width; i++) narrow(n.dout[row * n.width + i], narrowed[row * n.step + i]), n.dstream[row * n.width + i] = n.dout[row * n.width + i];
    norm_rows(n.middle, n, eps);
    const T *gate = products[GATE].out, *up = products[UP].out;
    input_gradient(narrowed, n.step, n.rows, n.inner, products + DOWN, 1, worker, [&](int64_t row, int64_t at, const float *own, int64_t columns) {
        float y[WIDTH];
        memcpy(y, own, sizeof y);
        round_all<T, WIDTH>(y);
        int64_t from = row * n.inner + at, to = row * n.joined_step + at;
        gate_row(gate + from, up + from, columns, y, n.joined + to, n.joined + to + n.inner);
        store(y, columns, n.inner_room + row * n.inner_step + at);
    });
#pragma omp barrier
    weight_gradients(n, narrowed, n.step, n.inner_room, n.inner_step, n.inner, products + DOWN, 1, worker.room);
    weight_gradients(n, n.joined, n.joined_step, n.normed, n.step, n.width, products + GATE, 2, worker.room);
    input_gradient(n.joined, n.joined_step, n.rows, n.width, products + GATE, 2, worker, [&](int64_t row, int64_t at, const float *own, int64_t columns) {
        store(own, columns, n.dnormed + row * n.step + at);
    });
#pragma omp barrier
    norm_gradient(n.middle, n, eps);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < n.rows; row++)
        for (int64_t i = 0; i < n.width; i++) narrow(n.dstream[row * n.width + i], narrowed[row * n.step + i]);
    weight_gradients(n, narrowed, n.step, n.attended, n.attended_step, n.attended_width, products + OUT, 1, worker.room);
    input_gradient(narrowed, n.step, n.rows, n.attended_width, products + OUT, 1, worker, [&](int64_t row, int64_t at, const float *own, int64_t columns) {
        store(own, columns, n.dattended + row * n.attended_width + at);
    });
}

template <class T>
void add_whole_gradient(const T *grad, int64_t step, const T *x, int64_t rows, int64_t width, int64_t in, float *total, bool fresh, T *tiles) {
    std::vector<T> room;
    Registers own;
    put_gradient(grad, step, rows, width, tiles);
    add_weight_gradient(tiles, x, in, rows, width, in, total, fresh, room);
}

template <class T> void run_half(int kind, const Half<T> &n, const Product<T> *products, float eps, int threads) {
    int64_t blocks = most_blocks(n.rows, threads);
    std::vector<Taken> taken(PRODUCTS * blocks);
#pragma omp parallel num_threads(threads)
    {
        Registers own;
        Worker<T> worker{taken, blocks};
        if (kind == 0) front_forward(n, products, eps, worker);
        if (kind == 1) front_backward(n, products, eps, worker);
        if (kind == 2) back_forward(n, products, eps, worker);
        if (kind == 3) back_backward(n, products, eps, worker);
        if (kind == 4) gated_forward(n, products, eps, worker);
    }
}

}  // namespace

extern "C" {

// numbers of the room for `put_gradient`
int64_t rondel_tile_room(int code, int64_t rows, int64_t width) { return code ? tile_room<bf16>(rows, width) : tile_room<float>(rows, width); }

// total [width, in] += gradᵀ x, or = where nothing is in it yet, for grad [rows, step], of which `width` columns, and x [rows, in]; `tiles`: room for
// `put_gradient`; code: 0 float32, 1 bfloat16
void rondel_add_weight_gradient(int code, const void *grad, int64_t step, const void *x, int64_t rows, int64_t width, int64_t in,
                                float *total, int fresh, void *tiles, int threads) {
#pragma omp parallel num_threads(threads)
    {
        if (code) add_whole_gradient((const bf16 *)grad, step, (const bf16 *)x, rows, width, in, total, fresh, (bf16 *)tiles);
        else add_whole_gradient((const float *)grad, step, (const float *)x, rows, width, in, total, fresh, (float *)tiles);
    }
}

// code: 0 float32, 1 bfloat16; kind: 0 and 1 the front half forward and backward, 2 and 3 the back half, 4 gate and up
// of it once more
void rondel_layer_half(int code, int kind, const void *half, const void *products, float eps, int threads) {
    if (code) run_half(kind, *(const Half<bf16> *)half, (const Product<bf16> *)products, eps, threads);
    else run_half(kind, *(const Half<float> *)half, (const Product<float> *)products, eps, threads);
}

}
