// One token a row from its logits, as generate/engine/builtin/sampler.py draws it where nothing of the distribution is cut:
// two readings of the logits, and of one block a third.

#include "cpu_rows.h"

namespace {

constexpr int64_t BLOCK = 256;  // of the vocabulary, as there

// exp((z - top) / temperature) of `count` logits of a block; what lies behind them weighs 0. -> their sum
float block_weights(const float *z, int64_t count, float top, float temperature, float *p) {
    float sums[VECTOR] = {0};
    for (int64_t at = 0; at < BLOCK; at += VECTOR) {
        int64_t n = std::max<int64_t>(0, std::min<int64_t>(VECTOR, count - at));
        read(z + (n ? at : 0), n, p + at);
        for (int64_t i = n; i < VECTOR; i++) p[at + i] = -INFINITY;
        for (int i = 0; i < VECTOR; i++) p[at + i] = exponential((p[at + i] - top) / temperature);
        for (int i = 0; i < VECTOR; i++) sums[i] += p[at + i];
    }
    return total(sums);
}

// temperature 0: the first of the largest, with its probability at temperature 1
void draw_row(const float *z, int64_t size, float temperature, double u, double &token, double &logprob, double &mass) {
    float most[VECTOR], p[BLOCK];
    for (int i = 0; i < VECTOR; i++) most[i] = -INFINITY;
    int64_t full = size / VECTOR * VECTOR, blocks = (size + BLOCK - 1) / BLOCK;
    for (int64_t at = 0; at < full; at += VECTOR)
        for (int i = 0; i < VECTOR; i++) most[i] = larger(z[at + i], most[i]);
    for (int64_t at = full; at < size; at++) most[0] = larger(z[at], most[0]);
    float top = largest(most), warm = temperature == 0.0f ? 1.0f : temperature;
    std::vector<double> own(blocks), upto(blocks);
    mass = 0;
    for (int64_t b = 0; b < blocks; b++) {
        own[b] = block_weights(z + b * BLOCK, std::min(BLOCK, size - b * BLOCK), top, warm, p);
        upto[b] = mass += own[b];
    }
    if (temperature == 0.0f) {
        int64_t first = 0;
        while (first < size - 1 && z[first] != top) first++;
        token = first, logprob = std::min(0.0, -std::log(mass));
        return;
    }
    double aim = u * mass;
    int64_t block = 0;
    while (block < blocks - 1 && !(upto[block] > aim)) block++;
    while (block > 0 && own[block] == 0) block--;  // rounding never reaches what lies behind the last weight
    double share = std::min(1.0, std::max(0.0, (aim - (upto[block] - own[block])) / own[block])), whole = 0, sum = 0;
    block_weights(z + block * BLOCK, std::min(BLOCK, size - block * BLOCK), top, warm, p);
    for (int i = 0; i < BLOCK; i++) whole += p[i];
    double goal = std::min(share * whole, std::nextafter(whole, 0.0));
    int64_t within = 0;
    while (within < BLOCK - 1 && !((sum += p[within]) > goal)) within++;
    token = std::min(block * BLOCK + within, size - 1);
    logprob = std::min(0.0, std::log(p[within] / mass));
}

}  // namespace

extern "C" {

// logits [rows, size]; temperatures and uniforms [rows]; out [3, rows]: tokens, log-probabilities, masses
void rondel_draw(const float *logits, const float *temperatures, const double *uniforms, double *out, int64_t rows, int64_t size,
                 int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        draw_row(logits + r * size, size, temperatures[r], uniforms[r], out[r], out[rows + r], out[2 * rows + r]);
}

}
