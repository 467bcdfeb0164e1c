/* A model's forward, in parts and as a whole, and drawing the next token; float32, rows in order of memory.
   Compiled for one model: HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, EPS and SCALING are given, and
   ROWS, how many rows go through a layer together. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = HEADS / KV_HEADS, HALF = HEAD_DIM / 2, FOUND = HEADS * HEAD_DIM };
enum { ROW = (HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH = 2 * KV_HEADS * HEAD_DIM }; /* of qkv, of a slot in the pool */
enum { SHARE = 64 };                                                              /* tokens of the vocabulary summed first */

/* Matrices are [in, out]; those a model does not have are null. */
typedef struct {
    const float *norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *down;
} Layer;

/* What lies around the layers: embedding [vocab, HIDDEN], turns [positions, 2 * HEAD_DIM], head [vocab, HIDDEN]. */
typedef struct {
    const float *embedding, *turns, *norm, *head, *head_bias;
} Model;

/* The matrix product that torch itself calls, with the arguments of BLAS. */
typedef void Sgemm(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                   const int *, const float *, const int *, const float *, float *, const int *);

/* y [rows, out] = x [rows, in], whose rows lie `stride` apart, times w [in, out]; added to y if `keep` is 1. */
static void product(Sgemm *sgemm, const float *x, int stride, const float *w, float *y, int rows, int in, int out,
                    float keep) {
    const float one = 1;
    sgemm("N", "N", &out, &rows, &in, &one, w, &out, x, &stride, &keep, y, &out);
}

/* e^x to 2 units in the last place, of the kind a compiler turns into vectors. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345191e-3f;
    p = p * r + 4.16657959e-2f;
    p = p * r + 1.66666655e-1f;
    p = p * r + 5.00000012e-1f;
    union { float value; int32_t bits; } power = {p * r * r + r + 1.0f};
    power.bits += (int32_t)n * (1 << 23);
    return power.value;
}

static inline void norm(const float *x, const float *weight, float *out, int dim) {
    float sum = 0;
    for (int j = 0; j < dim; j++) sum += x[j] * x[j];
    float scale = 1.0f / sqrtf(sum / dim + EPS);
    for (int j = 0; j < dim; j++) out[j] = x[j] * scale * weight[j];
}

void norm_rows(const float *x, const float *weight, float *out, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) norm(x + row * HIDDEN, weight, out + row * HIDDEN, HIDDEN);
}

static inline void rotate(float *x, const float *cos, const float *sin) {
    for (int j = 0; j < HALF; j++) {
        float low = x[j], high = x[HALF + j];
        x[j] = low * cos[j] + high * sin[j];
        x[HALF + j] = high * cos[HALF + j] + low * sin[HALF + j];
    }
}

/* From hidden [rows, HIDDEN] to rotated qkv [rows, ROW]; keys and values are stored in the pool's slots as well. */
void begin(Sgemm *sgemm, const Layer *layer, const float *hidden, const float *turns, const int64_t *slots, float *pool,
           float *qkv, int64_t rows) {
    static _Thread_local float normed[ROWS * HIDDEN];
    for (int64_t first = 0; first < rows; first += ROWS) {
        int count = rows - first < ROWS ? rows - first : ROWS;
        for (int i = 0; i < count; i++, hidden += HIDDEN) norm(hidden, layer->norm, normed + i * HIDDEN, HIDDEN);
        product(sgemm, normed, HIDDEN, layer->qkv, qkv, count, HIDDEN, ROW, 0);
        for (int i = 0; i < count; i++, qkv += ROW, turns += 2 * HEAD_DIM, slots++) {
            if (layer->qkv_bias)
                for (int j = 0; j < ROW; j++) qkv[j] += layer->qkv_bias[j];
            for (int head = 0; head < HEADS + KV_HEADS; head++) {
                const float *weight = head < HEADS ? layer->q_norm : layer->k_norm;
                if (weight) norm(qkv + head * HEAD_DIM, weight, qkv + head * HEAD_DIM, HEAD_DIM);
                rotate(qkv + head * HEAD_DIM, turns, turns + HEAD_DIM);
            }
            float *slot = pool + *slots * WIDTH;
            for (int j = 0; j < WIDTH; j++) slot[j] = qkv[FOUND + j];
        }
    }
}

/* What follows attention: its projection and the MLP, both added to hidden [rows, HIDDEN]. */
void finish(Sgemm *sgemm, const Layer *layer, const float *found, float *hidden, int64_t rows) {
    static _Thread_local float normed[ROWS * HIDDEN], gate_up[ROWS * 2 * INNER];
    for (int64_t first = 0; first < rows; first += ROWS, found += ROWS * FOUND, hidden += ROWS * HIDDEN) {
        int count = rows - first < ROWS ? rows - first : ROWS;
        product(sgemm, found, FOUND, layer->out, hidden, count, FOUND, HIDDEN, 1);
        for (int i = 0; i < count; i++) {
            if (layer->out_bias)
                for (int j = 0; j < HIDDEN; j++) hidden[i * HIDDEN + j] += layer->out_bias[j];
            norm(hidden + i * HIDDEN, layer->mlp_norm, normed + i * HIDDEN, HIDDEN);
        }
        product(sgemm, normed, HIDDEN, layer->gate_up, gate_up, count, HIDDEN, 2 * INNER, 0);
        for (int i = 0; i < count; i++) {
            float *restrict gate = gate_up + i * 2 * INNER, *restrict up = gate + INNER;
            for (int j = 0; j < INNER; j++) gate[j] = gate[j] / (1.0f + exponential(-gate[j])) * up[j];
        }
        product(sgemm, gate_up, 2 * INNER, layer->down, hidden, count, INNER, HIDDEN, 1);
    }
}

/* The queries of a tile against their sequences' blocks, read where they lie: `blocks` is [sequences, most], `places`
   says which of the [sequences, queries] each row is, and is null where all of them are rows. */
void attend(const float *restrict qkv, const float *restrict pool, const int64_t *restrict blocks, int64_t most,
            int64_t block_size, const int64_t *restrict positions, const int64_t *places, int64_t queries,
            float *restrict out, int64_t rows) {
    int64_t room = most * block_size;
    float *restrict scores = malloc(HEADS * room * sizeof(float));
    for (int64_t row = 0; row < rows; row++, qkv += ROW, out += FOUND) {
        int64_t place = places ? places[row] : row, keys = positions[place] + 1;
        const int64_t *own = blocks + place / queries * most;
        for (int64_t first = 0; first < keys; first += block_size) {
            int64_t count = keys - first < block_size ? keys - first : block_size;
            for (int head = 0; head < HEADS; head++) {
                const float *key = pool + own[first / block_size] * block_size * WIDTH + head / GROUP * HEAD_DIM;
                const float *query = qkv + head * HEAD_DIM;
                float *score = scores + head * room + first;
                for (int64_t t = 0; t < count; t++, key += WIDTH) {
                    float sum = 0;
                    for (int j = 0; j < HEAD_DIM; j++) sum += query[j] * key[j];
                    score[t] = sum * SCALING;
                }
            }
        }
        for (int head = 0; head < HEADS; head++) {
            float *score = scores + head * room, peak = score[0], total = 0, sum[HEAD_DIM] = {0};
            for (int64_t t = 1; t < keys; t++) peak = score[t] > peak ? score[t] : peak;
            for (int64_t t = 0; t < keys; t++) total += score[t] = exponential(score[t] - peak);
            for (int64_t first = 0; first < keys; first += block_size) {
                const float *value = pool + own[first / block_size] * block_size * WIDTH + (KV_HEADS + head / GROUP) * HEAD_DIM;
                int64_t count = keys - first < block_size ? keys - first : block_size;
                for (int64_t t = 0; t < count; t++, value += WIDTH)
                    for (int j = 0; j < HEAD_DIM; j++) sum[j] += score[first + t] * value[j];
            }
            for (int j = 0; j < HEAD_DIM; j++) out[head * HEAD_DIM + j] = sum[j] / total;
        }
    }
    free(scores);
}

static inline void copy(float *to, const float *from, int64_t count) { memmove(to, from, count * sizeof(float)); }

/* A whole step, from tokens to logits [wanted, vocab], those of the rows in `picked`; of the others only keys and values
   are wanted. Its queries are one tile, as in `attend`. */
void forward(Sgemm *sgemm, const Model *model, const Layer *const *layers, int64_t depth, int64_t vocab,
             float *const *pools, const int64_t *ids, const int64_t *positions, const int64_t *slots,
             const int64_t *blocks, int64_t most, int64_t block_size, const int64_t *queried, const int64_t *places,
             int64_t queries, int64_t rows, const int64_t *picked, int64_t wanted, float *logits) {
    float *memory = malloc(rows * (HIDDEN + 2 * HEAD_DIM + ROW + FOUND) * sizeof(float));
    float *hidden = memory, *turns = hidden + rows * HIDDEN, *qkv = turns + rows * 2 * HEAD_DIM, *found = qkv + rows * ROW;
    for (int64_t row = 0; row < rows; row++) {
        copy(hidden + row * HIDDEN, model->embedding + ids[row] * HIDDEN, HIDDEN);
        copy(turns + row * 2 * HEAD_DIM, model->turns + positions[row] * 2 * HEAD_DIM, 2 * HEAD_DIM);
    }
    for (int64_t i = 0; i < depth; i++) {
        begin(sgemm, layers[i], hidden, turns, slots, pools[i], qkv, rows);
        attend(qkv, pools[i], blocks, most, block_size, queried, places, queries, found, rows);
        if (i < depth - 1) finish(sgemm, layers[i], found, hidden, rows);
    }
    for (int64_t row = 0; row < wanted; row++) { /* in order, so none is overwritten before it is read */
        copy(hidden + row * HIDDEN, hidden + picked[row] * HIDDEN, HIDDEN);
        copy(found + row * FOUND, found + picked[row] * FOUND, FOUND);
    }
    finish(sgemm, layers[depth - 1], found, hidden, wanted);
    norm_rows(hidden, model->norm, hidden, wanted);
    const int count = wanted, in = HIDDEN, out = vocab;
    const float one = 1, none = 0;
    sgemm("T", "N", &out, &count, &in, &one, model->head, &in, hidden, &in, &none, logits, &out);
    for (int64_t row = 0; row < wanted && model->head_bias; row++)
        for (int64_t j = 0; j < vocab; j++) logits[row * vocab + j] += model->head_bias[j];
    free(memory);
}

/* The first of `count` running sums that is above `aim`, or with which the last is reached; *below is the one before. */
static int64_t invert(const float *parts, int64_t count, double aim, double *below) {
    double all = *below, sum = *below;
    for (int64_t i = 0; i < count; i++) all += parts[i];
    for (int64_t i = 0;; i++) {
        *below = sum, sum += parts[i];
        if (sum > aim || sum >= all || i == count - 1) return i; /* the last for logits that are no numbers */
    }
}

static uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
    value = (value ^ value >> 27) * 0x94D049BB133111EB;
    return value ^ value >> 31;
}

/* A token for each row of logits [rows, vocab] and its logprob. `chance` is [2, rows], seeds and positions. The engine's
   sampler does the same, and says why. */
void draw(const float *logits, int64_t rows, int64_t vocab, const float *temperatures, const uint64_t *chance,
          int64_t *tokens, float *logprobs) {
    int64_t shares = (vocab + SHARE - 1) / SHARE;
    float *weights = malloc((vocab + shares) * sizeof(float)), *sums = weights + vocab;
    for (int64_t row = 0; row < rows; row++, logits += vocab) {
        float peak = logits[0], scale = 1 / temperatures[row];
        for (int64_t j = 1; j < vocab; j++) peak = logits[j] > peak ? logits[j] : peak;
        for (int64_t j = 0; j < vocab; j++) weights[j] = exponential((logits[j] - peak) * scale);
        double total = 0, below = 0;
        for (int64_t share = 0; share < shares; share++) {
            int64_t stop = share < shares - 1 ? (share + 1) * SHARE : vocab;
            float sum = 0;
            for (int64_t j = share * SHARE; j < stop; j++) sum += weights[j];
            total += sums[share] = sum;
        }
        uint64_t noise = mix(mix(chance[row]) + chance[rows + row] * 0x9E3779B97F4A7C15) >> 11;
        double aim = noise * 0x1p-53 * total;
        int64_t share = invert(sums, shares, aim, &below), first = share * SHARE;
        int64_t count = share < shares - 1 ? SHARE : vocab - first;
        tokens[row] = first + invert(weights + first, count, aim, &below);
        logprobs[row] = (logits[tokens[row]] - peak) * scale - logf(total);
    }
    free(weights);
}
