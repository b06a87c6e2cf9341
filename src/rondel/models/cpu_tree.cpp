// Attention of packed training in bfloat16 or float32, over a tree of segments as they lie: each sees its ancestors whole and itself
// causally, within a window. Forward keeps the logarithm of each row's sum and no scores; backward computes these again.
// Products by tiles (cpu_tiles.h), scores and their gradients in fp32, weights rounded where torch rounds them.
//
// A job is a segment and a key head, with the query heads of it as its rows. Backward it is a family of segments: who
// shares keys adds to their gradients one after the other, in a fixed order.

#include "cpu_panels.h"

namespace {

constexpr int64_t AT_ONCE = 96;  // whole tiles of 12 and of 32 rows, whose weights are held for the gradients of keys and values

template <class T> struct Tree {  // as tree_loops.py hands it over
    int64_t heads, shared, size, window, families;
    const int64_t *segments;  // [S, 4]: start, length, tokens above, where their places begin
    const int64_t *above;     // places of tokens above
    const int64_t *members;   // segments, family by family
    const int64_t *first;     // [families + 1] in `members`
    const T *q, *k, *v;       // [T, heads, size], [T, shared, size]
    T *out;
    float *log_sums;          // [T, heads]
    const T *dout;
    T *dq;
    float *dk_sums, *dv_sums; // room [T, shared, size]
    T *dk, *dv;               // [T, shared, size]
};

template <class T> struct Job {
    int64_t start, length, depth, repeats, rows, count, blocks;
    const int64_t *above;
    std::vector<int64_t> places;                    // of keys
    std::vector<T> queries, keys, values, pulls; // [rows or count, size]
    std::vector<T> key_panels, value_panels, key_rows, value_rows, tiles, panel;
    std::vector<T> weights, changes;             // [rows at once, step()]
    std::vector<float> scores, pulled;              // [TILE, whole(blocks * WIDTH)]

    int64_t width() const { return blocks * WIDTH; }
    int64_t step() const { return width() + (width() * sizeof(T) % 1024 ? 0 : WIDTH); }  // of weights: see cpu_tiles.h
    int64_t position(int64_t row) const { return depth + row / repeats; }
};

template <class T> inline void open_job(const Tree<T> &n, int64_t segment, int64_t head, bool backward, Job<T> &job) {
    const int64_t *own = n.segments + 4 * segment;
    job.start = own[0], job.length = own[1], job.depth = own[2], job.above = n.above + own[3];
    job.repeats = n.heads / n.shared, job.rows = job.length * job.repeats, job.count = job.depth + job.length;
    job.blocks = (job.count + WIDTH - 1) / WIDTH;
    job.places.resize(job.count);
    for (int64_t i = 0; i < job.count; i++) job.places[i] = i < job.depth ? job.above[i] : job.start + i - job.depth;
    int64_t size = n.size, many = job.repeats * size;
    job.queries.resize(job.rows * size);
    for (int64_t t = 0; t < job.length; t++)
        memcpy(job.queries.data() + t * many, n.q + ((job.start + t) * n.heads + head * job.repeats) * size, many * sizeof(T));
    job.keys.resize(job.count * size), job.values.resize(job.count * size);
    for (int64_t i = 0; i < job.count; i++) {
        int64_t at = (job.places[i] * n.shared + head) * size;
        memcpy(job.keys.data() + i * size, n.k + at, size * sizeof(T));
        memcpy(job.values.data() + i * size, n.v + at, size * sizeof(T));
    }
    if (backward) {
        job.pulls.resize(job.rows * size);
        for (int64_t t = 0; t < job.length; t++)
            memcpy(job.pulls.data() + t * many, n.dout + ((job.start + t) * n.heads + head * job.repeats) * size, many * sizeof(T));
    }
    job.scores.resize(TILE<T> * whole(job.width())), job.pulled.resize(TILE<T> * whole(job.width()));
    job.weights.resize(AT_ONCE * job.step()), job.changes.resize(AT_ONCE * job.step());
}

// [count, size] -> panels of 32 rows each, for products over `size`
template <class T> inline const T *panels_of_rows(const std::vector<T> &from, int64_t count, int64_t size, std::vector<T> &room) {
    int64_t blocks = (count + WIDTH - 1) / WIDTH;
    T *to = aligned_room(room, blocks * WIDTH * size);
    for (int64_t half = 0; half < 2 * blocks; half++) {
        int64_t some = std::max<int64_t>(0, std::min(HALF, count - half * HALF));
        put_outputs(from.data() + (some ? half * HALF * size : 0), size, some, to + half / 2 * WIDTH * size + half % 2 * HALF * JOINED<T>);
    }
    return to;
}

// [count, size] -> panels of 32 numbers each, for products over the rows, `width` of them with zeros behind the last
template <class T> inline const T *panels_over_rows(const T *from, int64_t count, int64_t width, int64_t size, std::vector<T> &room) {
    T *to = aligned_room(room, width * size);
    for (int64_t at = 0; at < size; at += WIDTH) {
        put_rows(from + at, size, count, WIDTH, to + at * width);
        int64_t filled = words_of<T>(count) * JOINED<T>;
        memset((void *)(to + at * width + filled * WIDTH), 0, (width - filled) * WIDTH * sizeof(T));
    }
    return to;
}

// Blocks of keys that the last of these rows sees.
template <class T> inline int64_t seen_blocks(const Job<T> &job, int64_t last) { return job.position(last) / WIDTH + 1; }

// sums [some, blocks * WIDTH] of rows over panels of keys or values
template <class T> inline void multiply_rows(const T *x, int64_t some, int64_t size, const T *panels, int64_t blocks, int64_t step, float *out) {
    alignas(64) float sums[TILE<T> * WIDTH];
    for (int64_t p = 0; p < blocks; p++) {
        row_sums(some, x, size, panels + p * WIDTH * size, size / JOINED<T>, sums);
        for (int64_t r = 0; r < some; r++) memcpy(out + r * step + p * WIDTH, sums + r * WIDTH, WIDTH * sizeof(float));
    }
}

// scaled scores of one row, -inf where it does not look, up to whole(...) of what its tile sees
template <class T> inline void mask_row(const Tree<T> &n, const Job<T> &job, int64_t row, int64_t blocks, float scale, float *own) {
    int64_t at = job.position(row), from = n.window && at >= n.window ? at - n.window + 1 : 0;
    for (int64_t i = 0; i < blocks * WIDTH; i++) own[i] *= scale;
    for (int64_t i = 0; i < from; i++) own[i] = -INFINITY;
    for (int64_t i = at + 1; i < whole(blocks * WIDTH); i++) own[i] = -INFINITY;
}

// scores of a row -> weights, rounded; -> the logarithm of their sum
template <class T> inline float weigh_row(float *own, int64_t count, T *weights) {
    float top[VECTOR], sums[VECTOR] = {0};
    for (int i = 0; i < VECTOR; i++) top[i] = -INFINITY;
    for (int64_t at = 0; at < whole(count); at += VECTOR)
        for (int i = 0; i < VECTOR; i++) top[i] = larger(own[at + i], top[i]);
    float most = largest(top);
    for (int64_t at = 0; at < whole(count); at += VECTOR)
        for (int i = 0; i < VECTOR; i++) {
            own[at + i] = exponential(own[at + i] - most);
            sums[i] += own[at + i];
        }
    float all = total(sums), inverse = 1.0f / all;
    for (int64_t i = 0; i < count; i++) narrow(own[i] * inverse, weights[i]);
    return most + std::log(all);
}

template <class T> void attend(const Tree<T> &n, int64_t segment, int64_t head, float scale, Job<T> &job) {
    open_job(n, segment, head, false, job);
    const T *keys = panels_of_rows(job.keys, job.count, n.size, job.key_panels);
    const T *values = panels_over_rows(job.values.data(), job.count, job.width(), n.size, job.value_rows);
    int64_t step = whole(job.width());
    alignas(64) float sums[TILE<T> * WIDTH];
    for (int64_t first = 0; first < job.rows; first += TILE<T>) {
        int64_t some = std::min(TILE<T>, job.rows - first), blocks = seen_blocks(job, first + some - 1);
        multiply_rows(job.queries.data() + first * n.size, some, n.size, keys, blocks, step, job.scores.data());
        for (int64_t r = 0; r < some; r++) {
            int64_t row = first + r, at = (job.start + row / job.repeats) * n.heads + head * job.repeats + row % job.repeats;
            mask_row(n, job, row, blocks, scale, job.scores.data() + r * step);
            n.log_sums[at] = weigh_row(job.scores.data() + r * step, blocks * WIDTH, job.weights.data() + r * job.step());
        }
        for (int64_t at = 0; at < n.size; at += WIDTH) {
            row_sums(some, job.weights.data(), job.step(), values + at * job.width(), blocks * WIDTH / JOINED<T>, sums);
            for (int64_t r = 0; r < some; r++) {
                int64_t row = first + r;
                T *to = n.out + ((job.start + row / job.repeats) * n.heads + head * job.repeats + row % job.repeats) * n.size + at;
                for (int64_t i = 0; i < WIDTH; i++) narrow(sums[r * WIDTH + i], to[i]);
            }
        }
    }
}

// total[place of a key] += weightsᵀ x, for weights [rows, width] and x [rows, size]
template <class T> inline void add_to_keys(const Tree<T> &n, Job<T> &job, int64_t head, const T *weights, const T *x, int64_t rows, int64_t seen, float *to) {
    int64_t words = column_words<T>(rows), count = std::min(job.count, seen);
    T *tiles = aligned_room(job.tiles, tile_room<T>(rows, count));
    put_tiles(weights, job.step(), rows, count, 0, words, tiles);
    const T *panels = panels_over_rows(x, rows, JOINED<T> * words, n.size, job.panel);
    alignas(64) float sums[TILE<T> * WIDTH];
    for (int64_t at = 0; at < n.size; at += WIDTH)
        for (int64_t tile = 0; tile < tiles_of<T>(count); tile++) {
            column_sums(tiles + tile * words * JOINED<T> * TILE<T>, 0, panels + at * JOINED<T> * words, words, sums);
            for (int64_t r = 0; r < std::min(TILE<T>, count - tile * TILE<T>); r++) {
                float *own = to + (job.places[tile * TILE<T> + r] * n.shared + head) * n.size + at;
                for (int64_t i = 0; i < WIDTH; i++) own[i] += sums[r * WIDTH + i];
            }
        }
}

template <class T> void attend_backward(const Tree<T> &n, int64_t segment, int64_t head, float scale, Job<T> &job) {
    open_job(n, segment, head, true, job);
    const T *keys = panels_of_rows(job.keys, job.count, n.size, job.key_panels);
    const T *values = panels_of_rows(job.values, job.count, n.size, job.value_panels);
    const T *key_rows = panels_over_rows(job.keys.data(), job.count, job.width(), n.size, job.key_rows);
    int64_t step = whole(job.width());
    alignas(64) float sums[TILE<T> * WIDTH];
    for (int64_t begin = 0; begin < job.rows; begin += AT_ONCE) {
        int64_t rows = std::min(AT_ONCE, job.rows - begin), seen = seen_blocks(job, begin + rows - 1) * WIDTH;
        for (int64_t first = 0; first < rows; first += TILE<T>) {
            int64_t some = std::min(TILE<T>, rows - first), blocks = seen_blocks(job, begin + first + some - 1);
            multiply_rows(job.queries.data() + (begin + first) * n.size, some, n.size, keys, blocks, step, job.scores.data());
            multiply_rows(job.pulls.data() + (begin + first) * n.size, some, n.size, values, blocks, step, job.pulled.data());
            for (int64_t r = 0; r < some; r++) {
                int64_t row = begin + first + r;
                float *own = job.scores.data() + r * step, *pulled = job.pulled.data() + r * step, lanes[VECTOR] = {0};
                T *weights = job.weights.data() + (first + r) * job.step(), *changes = job.changes.data() + (first + r) * job.step();
                float log_sum = n.log_sums[(job.start + row / job.repeats) * n.heads + head * job.repeats + row % job.repeats];
                mask_row(n, job, row, blocks, scale, own);
                for (int64_t i = blocks * WIDTH; i < whole(blocks * WIDTH); i++) pulled[i] = 0;
                for (int64_t at = 0; at < whole(blocks * WIDTH); at += VECTOR)
                    for (int i = 0; i < VECTOR; i++) own[at + i] = rounded<T>(exponential(own[at + i] - log_sum));
                for (int64_t at = 0; at < whole(blocks * WIDTH); at += VECTOR)
                    for (int i = 0; i < VECTOR; i++) lanes[i] += own[at + i] * pulled[at + i];
                float along = total(lanes);
                for (int64_t i = 0; i < blocks * WIDTH; i++) narrow(own[i], weights[i]);
                for (int64_t i = 0; i < blocks * WIDTH; i++) narrow(scale * own[i] * (pulled[i] - along), changes[i]);
                for (int64_t i = blocks * WIDTH; i < seen; i++) weights[i] = changes[i] = T{0};
            }
            for (int64_t at = 0; at < n.size; at += WIDTH) {
                row_sums(some, job.changes.data() + first * job.step(), job.step(), key_rows + at * job.width(), blocks * WIDTH / JOINED<T>, sums);
                for (int64_t r = 0; r < some; r++) {
                    int64_t row = begin + first + r;
                    T *to = n.dq + ((job.start + row / job.repeats) * n.heads + head * job.repeats + row % job.repeats) * n.size + at;
                    for (int64_t i = 0; i < WIDTH; i++) narrow(sums[r * WIDTH + i], to[i]);
                }
            }
        }
        add_to_keys(n, job, head, job.changes.data(), job.queries.data() + begin * n.size, rows, seen, n.dk_sums);
        add_to_keys(n, job, head, job.weights.data(), job.pulls.data() + begin * n.size, rows, seen, n.dv_sums);
    }
}

// A key head's gradients of a family's keys, all of whose tokens are its own: zeros, segment by segment, then rounded.
template <class T> void attend_family_backward(const Tree<T> &n, int64_t family, int64_t head, float scale, Job<T> &job) {
    auto each_key = [&](auto use) {
        for (int64_t i = n.first[family]; i < n.first[family + 1]; i++) {
            const int64_t *own = n.segments + 4 * n.members[i];
            for (int64_t t = own[0]; t < own[0] + own[1]; t++) use((t * n.shared + head) * n.size);
        }
    };
    each_key([&](int64_t at) { memset(n.dk_sums + at, 0, n.size * sizeof(float)), memset(n.dv_sums + at, 0, n.size * sizeof(float)); });
    for (int64_t i = n.first[family]; i < n.first[family + 1]; i++) attend_backward(n, n.members[i], head, scale, job);
    each_key([&](int64_t at) {
        for (int64_t i = at; i < at + n.size; i += WIDTH) narrow_all<WIDTH>(n.dk_sums + i, n.dk + i), narrow_all<WIDTH>(n.dv_sums + i, n.dv + i);
    });
}

template <class T> void run_tree(bool backward, const Tree<T> &n, float scale, int threads) {
    int64_t segments = n.first[n.families];
#pragma omp parallel num_threads(threads)
    {
        Job<T> job;
        Registers own;
        if (backward) {
#pragma omp for schedule(dynamic)
            for (int64_t one = 0; one < n.families * n.shared; one++) attend_family_backward(n, one / n.shared, one % n.shared, scale, job);
        } else {
#pragma omp for schedule(dynamic)
            for (int64_t one = 0; one < segments * n.shared; one++) attend(n, n.members[one / n.shared], one % n.shared, scale, job);
        }
    }
}

}  // namespace

extern "C" {

// code: 0 float32, 1 bfloat16
void rondel_tree(int code, int backward, const void *tree, float scale, int threads) {
    if (code) run_tree(backward, *(const Tree<bf16> *)tree, scale, threads);
    else run_tree(backward, *(const Tree<float> *)tree, scale, threads);
}

}
