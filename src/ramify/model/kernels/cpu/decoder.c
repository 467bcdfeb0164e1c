/* The forward of a Llama-like decoder, whole and in parts, and sampling of the next token. All arrays are contiguous
   float32. The file is compiled for one model: HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, EPS and SCALING are defined on
   the command line, so are ADAPTER_RANK and ADAPTER_SCALING, and ROWS_PER_CHUNK, the number of rows that go through a layer together. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS_PER_KV_HEAD = HEADS / KV_HEADS, HALF = HEAD_DIM / 2, ATTN_WIDTH = HEADS * HEAD_DIM };
enum { QKV_WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM, SLOT_WIDTH = 2 * KV_HEADS * HEAD_DIM };
enum { VOCAB_CHUNK = 64 }; /* tokens per partial sum of the cumulative distribution */

/* The adapters beside a product: down [in, rank], up [rank, out]; both are null if the product has none. */
typedef struct {
    const float *down, *up;
    int64_t rank;
} AdapterWeights;

/* One layer; matrices are [in, out], and a tensor that the model does not have is null. The field order is that of
   LayerWeights in Python. */
typedef struct {
    const float *norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *down;
    const AdapterWeights *qkv_adapter, *out_adapter, *gate_up_adapter, *down_adapter;
} LayerWeights;

/* The tensors outside the layers: embedding and head [vocab, HIDDEN], rope_table [positions, 2 * HEAD_DIM]. The field
   order is that of DecoderWeights in Python. */
typedef struct {
    const float *embedding, *rope_table, *norm, *head, *head_bias;
} DecoderWeights;

/* BLAS sgemm, taken from the library that torch has loaded. */
typedef void Sgemm(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                   const int *, const float *, const int *, const float *, float *, const int *);

/* y [rows, out] = x [rows, in] @ w [in, out] + beta * y. Rows of x are `stride` numbers apart. */
static void matmul(Sgemm *sgemm, const float *x, int stride, const float *w, float *y, int rows, int in, int out,
                   float beta) {
    const float one = 1;
    sgemm("N", "N", &out, &rows, &in, &one, w, &out, x, &stride, &beta, y, &out);
}

/* y [rows, out] += ADAPTER_SCALING * x [rows, in] @ adapter->down @ adapter->up, if there is an adapter. */
static void add_adapter(Sgemm *sgemm, const AdapterWeights *adapter, const float *x, int stride, float *y, int rows,
                        int in, int out) {
    static _Thread_local float low_rank[ROWS_PER_CHUNK * (ADAPTER_RANK + 1)];
    if (!adapter) return;
    const float one = 1, scaling = ADAPTER_SCALING;
    const int rank = adapter->rank;
    matmul(sgemm, x, stride, adapter->down, low_rank, rows, in, rank, 0);
    sgemm("N", "N", &out, &rows, &rank, &scaling, adapter->up, &out, low_rank, &rank, &one, y, &out);
}

/* e^x within 2 units in the last place, written so that the compiler can vectorize it. */
static inline float fast_exp(float x) {
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

/* Compute the rotated qkv [rows, QKV_WIDTH] of hidden [rows, HIDDEN], and store keys and values in the pool's slots. */
void project_qkv(Sgemm *sgemm, const LayerWeights *layer, const float *hidden, const float *rope, const int64_t *slots,
                 float *pool, float *qkv, int64_t rows) {
    static _Thread_local float normed[ROWS_PER_CHUNK * HIDDEN];
    for (int64_t first = 0; first < rows; first += ROWS_PER_CHUNK) {
        int count = rows - first < ROWS_PER_CHUNK ? rows - first : ROWS_PER_CHUNK;
        for (int i = 0; i < count; i++, hidden += HIDDEN) norm(hidden, layer->norm, normed + i * HIDDEN, HIDDEN);
        matmul(sgemm, normed, HIDDEN, layer->qkv, qkv, count, HIDDEN, QKV_WIDTH, 0);
        add_adapter(sgemm, layer->qkv_adapter, normed, HIDDEN, qkv, count, HIDDEN, QKV_WIDTH);
        for (int i = 0; i < count; i++, qkv += QKV_WIDTH, rope += 2 * HEAD_DIM, slots++) {
            if (layer->qkv_bias)
                for (int j = 0; j < QKV_WIDTH; j++) qkv[j] += layer->qkv_bias[j];
            for (int head = 0; head < HEADS + KV_HEADS; head++) {
                const float *weight = head < HEADS ? layer->q_norm : layer->k_norm;
                if (weight) norm(qkv + head * HEAD_DIM, weight, qkv + head * HEAD_DIM, HEAD_DIM);
                rotate(qkv + head * HEAD_DIM, rope, rope + HEAD_DIM);
            }
            float *slot = pool + *slots * SLOT_WIDTH;
            for (int j = 0; j < SLOT_WIDTH; j++) slot[j] = qkv[ATTN_WIDTH + j];
        }
    }
}

/* Add the output projection of attention, then the MLP, to hidden [rows, HIDDEN]. */
void project_out_and_mlp(Sgemm *sgemm, const LayerWeights *layer, const float *attn_out, float *hidden, int64_t rows) {
    static _Thread_local float normed[ROWS_PER_CHUNK * HIDDEN], gate_up[ROWS_PER_CHUNK * 2 * INNER];
    for (int64_t first = 0; first < rows; first += ROWS_PER_CHUNK) {
        int count = rows - first < ROWS_PER_CHUNK ? rows - first : ROWS_PER_CHUNK;
        matmul(sgemm, attn_out, ATTN_WIDTH, layer->out, hidden, count, ATTN_WIDTH, HIDDEN, 1);
        add_adapter(sgemm, layer->out_adapter, attn_out, ATTN_WIDTH, hidden, count, ATTN_WIDTH, HIDDEN);
        for (int i = 0; i < count; i++) {
            if (layer->out_bias)
                for (int j = 0; j < HIDDEN; j++) hidden[i * HIDDEN + j] += layer->out_bias[j];
            norm(hidden + i * HIDDEN, layer->mlp_norm, normed + i * HIDDEN, HIDDEN);
        }
        matmul(sgemm, normed, HIDDEN, layer->gate_up, gate_up, count, HIDDEN, 2 * INNER, 0);
        add_adapter(sgemm, layer->gate_up_adapter, normed, HIDDEN, gate_up, count, HIDDEN, 2 * INNER);
        for (int i = 0; i < count; i++) {
            float *restrict gate = gate_up + i * 2 * INNER, *restrict up = gate + INNER;
            for (int j = 0; j < INNER; j++) gate[j] = gate[j] / (1.0f + fast_exp(-gate[j])) * up[j];
        }
        matmul(sgemm, gate_up, 2 * INNER, layer->down, hidden, count, INNER, HIDDEN, 1);
        add_adapter(sgemm, layer->down_adapter, gate_up, 2 * INNER, hidden, count, INNER, HIDDEN);
        attn_out += ROWS_PER_CHUNK * ATTN_WIDTH, hidden += ROWS_PER_CHUNK * HIDDEN;
    }
}

/* GOMP_parallel: runs `work` on `threads` threads of torch's own pool and waits for all of them. */
typedef void Parallel(void (*work)(void *), void *, unsigned threads, unsigned flags);

/* The attention of a tile: `blocks` is [sequences, blocks_per_sequence]. `query_of_row` maps each row to its index in
   [sequences, queries_per_sequence]; it is null if every query is a row. */
typedef struct {
    const float *qkv, *pool;
    const int64_t *blocks;
    int64_t blocks_per_sequence, block_size;
    const int64_t *positions, *query_of_row;
    int64_t queries_per_sequence;
    float *out;
    int64_t shares_per_row, num_shares, next_share; /* a share is all heads of a row, or those of one KV head */
} Attention;

/* Attend from the queries of a share to the blocks of their sequence, read in place. */
static inline void attend_share(const Attention *attention, int64_t share, float *restrict scores, int64_t max_keys) {
    int64_t row = share / attention->shares_per_row, kv_heads = KV_HEADS / attention->shares_per_row;
    int first_kv_head = share % attention->shares_per_row * kv_heads;
    int first_head = first_kv_head * HEADS_PER_KV_HEAD, last_head = first_head + kv_heads * HEADS_PER_KV_HEAD;
    const float *restrict qkv = attention->qkv + row * QKV_WIDTH, *restrict pool = attention->pool;
    float *restrict out = attention->out + row * ATTN_WIDTH;
    int64_t query_index = attention->query_of_row ? attention->query_of_row[row] : row;
    int64_t block_size = attention->block_size, keys = attention->positions[query_index] + 1;
    int64_t sequence = query_index / attention->queries_per_sequence;
    const int64_t *block_table = attention->blocks + sequence * attention->blocks_per_sequence;
    for (int64_t first = 0; first < keys; first += block_size) {
        int64_t count = keys - first < block_size ? keys - first : block_size;
        const float *key = pool + block_table[first / block_size] * block_size * SLOT_WIDTH;
        for (int64_t t = 0; t < count; t++, key += SLOT_WIDTH) {
            const float *value = key + (KV_HEADS + first_kv_head) * HEAD_DIM; /* read below, with the scores */
            for (int j = 0; j < kv_heads * HEAD_DIM; j += 16) __builtin_prefetch(value + j);
            for (int head = first_head; head < last_head; head++) {
                const float *head_key = key + head / HEADS_PER_KV_HEAD * HEAD_DIM, *query = qkv + head * HEAD_DIM;
                float sum = 0;
                for (int j = 0; j < HEAD_DIM; j++) sum += query[j] * head_key[j];
                scores[head * max_keys + first + t] = sum * SCALING;
            }
        }
    }
    for (int head = first_head; head < last_head; head++) {
        float *score = scores + head * max_keys, max_score = score[0], total = 0, sum[HEAD_DIM] = {0};
        for (int64_t t = 1; t < keys; t++) max_score = score[t] > max_score ? score[t] : max_score;
        for (int64_t t = 0; t < keys; t++) total += score[t] = fast_exp(score[t] - max_score);
        for (int64_t first = 0; first < keys; first += block_size) {
            const float *block = pool + block_table[first / block_size] * block_size * SLOT_WIDTH;
            const float *value = block + (KV_HEADS + head / HEADS_PER_KV_HEAD) * HEAD_DIM;
            int64_t count = keys - first < block_size ? keys - first : block_size;
            for (int64_t t = 0; t < count; t++, value += SLOT_WIDTH)
                for (int j = 0; j < HEAD_DIM; j++) sum[j] += score[first + t] * value[j];
        }
        for (int j = 0; j < HEAD_DIM; j++) out[head * HEAD_DIM + j] = sum[j] / total;
    }
}

/* Take shares until none is left: fewer threads may run than were requested. */
static void attend_shares(void *argument) {
    Attention *attention = argument;
    int64_t max_keys = attention->blocks_per_sequence * attention->block_size;
    float *scores = malloc(HEADS * max_keys * sizeof(float));
    for (int64_t share; (share = __atomic_fetch_add(&attention->next_share, 1, __ATOMIC_RELAXED)) <
                        attention->num_shares;)
        attend_share(attention, share, scores, max_keys);
    free(scores);
}

/* Attend from all rows of a tile, on `threads` threads. The other arguments are the fields of `Attention`. */
void attend(Parallel *parallel, int64_t threads, const float *qkv, const float *pool, const int64_t *blocks,
            int64_t blocks_per_sequence, int64_t block_size, const int64_t *positions, const int64_t *query_of_row,
            int64_t queries_per_sequence, float *out, int64_t rows) {
    int64_t shares_per_row = rows < threads ? KV_HEADS : 1, num_shares = rows * shares_per_row;
    Attention attention = {qkv, pool, blocks, blocks_per_sequence, block_size, positions, query_of_row,
                           queries_per_sequence, out, shares_per_row, num_shares, 0};
    if (threads > 1 && num_shares > 1)
        parallel(attend_shares, &attention, threads, 0);
    else
        attend_shares(&attention);
}

static inline void copy(float *to, const float *from, int64_t count) { memmove(to, from, count * sizeof(float)); }

/* One step, from token ids to logits [num_logits, vocab] of the rows in `logit_rows`, which ascend; the other rows only
   write keys and values. The queries are one tile, as in `attend`. */
void forward(Sgemm *sgemm, Parallel *parallel, int64_t threads, const DecoderWeights *model,
             const LayerWeights *const *layers, int64_t num_layers, int64_t vocab, float *const *pools,
             const int64_t *ids, const int64_t *positions, const int64_t *slots, const int64_t *blocks,
             int64_t blocks_per_sequence, int64_t block_size, const int64_t *query_positions,
             const int64_t *query_of_row, int64_t queries_per_sequence, int64_t rows, const int64_t *logit_rows,
             int64_t num_logits, float *logits) {
    float *memory = malloc(rows * (HIDDEN + 2 * HEAD_DIM + QKV_WIDTH + ATTN_WIDTH) * sizeof(float));
    float *hidden = memory, *rope = hidden + rows * HIDDEN;
    float *qkv = rope + rows * 2 * HEAD_DIM, *attn_out = qkv + rows * QKV_WIDTH;
    for (int64_t row = 0; row < rows; row++) {
        const float *embedding = model->embedding + ids[row] * HIDDEN;
        for (int64_t j = 0; j < HIDDEN; j++) hidden[row * HIDDEN + j] = embedding[j] * EMBEDDING_SCALE;
        copy(rope + row * 2 * HEAD_DIM, model->rope_table + positions[row] * 2 * HEAD_DIM, 2 * HEAD_DIM);
    }
    for (int64_t i = 0; i < num_layers; i++) {
        project_qkv(sgemm, layers[i], hidden, rope, slots, pools[i], qkv, rows);
        attend(parallel, threads, qkv, pools[i], blocks, blocks_per_sequence, block_size, query_positions, query_of_row,
               queries_per_sequence, attn_out, rows);
        if (i < num_layers - 1) project_out_and_mlp(sgemm, layers[i], attn_out, hidden, rows);
    }
    for (int64_t row = 0; row < num_logits; row++) { /* ascending, so no row is overwritten before it is read */
        copy(hidden + row * HIDDEN, hidden + logit_rows[row] * HIDDEN, HIDDEN);
        copy(attn_out + row * ATTN_WIDTH, attn_out + logit_rows[row] * ATTN_WIDTH, ATTN_WIDTH);
    }
    project_out_and_mlp(sgemm, layers[num_layers - 1], attn_out, hidden, num_logits);
    norm_rows(hidden, model->norm, hidden, num_logits);
    const int count = num_logits, in = HIDDEN, out = vocab;
    const float scale = LOGIT_SCALE, zero = 0;
    sgemm("T", "N", &out, &count, &in, &scale, model->head, &in, hidden, &in, &zero, logits, &out);
    for (int64_t row = 0; row < num_logits && model->head_bias; row++)
        for (int64_t j = 0; j < vocab; j++) logits[row * vocab + j] += model->head_bias[j];
    free(memory);
}

/* Return the first index whose running sum, starting at *below, exceeds `target` or equals the total. *below becomes
   the running sum before that index. */
static int64_t search_cumulative(const float *weights, int64_t count, double target, double *below) {
    double total = *below, sum = *below;
    for (int64_t i = 0; i < count; i++) total += weights[i];
    for (int64_t i = 0;; i++) {
        *below = sum, sum += weights[i];
        if (sum > target || sum >= total || i == count - 1) return i; /* the last index if the weights are NaN */
    }
}

static uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
    value = (value ^ value >> 27) * 0x94D049BB133111EB;
    return value ^ value >> 31;
}

/* Sample a token for each row of logits [rows, vocab], and compute its logprob. `seeds_and_positions` is [2, rows]. The
   algorithm is that of ramify.infer.sampler, which explains it. */
void sample_tokens(const float *logits, int64_t rows, int64_t vocab, const float *temperatures,
                   const uint64_t *seeds_and_positions, int64_t *tokens, float *logprobs) {
    int64_t num_chunks = (vocab + VOCAB_CHUNK - 1) / VOCAB_CHUNK;
    float *weights = malloc((vocab + num_chunks) * sizeof(float)), *sums = weights + vocab;
    for (int64_t row = 0; row < rows; row++, logits += vocab) {
        float max_logit = logits[0], scale = 1 / temperatures[row];
        for (int64_t j = 1; j < vocab; j++) max_logit = logits[j] > max_logit ? logits[j] : max_logit;
        for (int64_t j = 0; j < vocab; j++) weights[j] = fast_exp((logits[j] - max_logit) * scale);
        double total = 0, below = 0;
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
            int64_t stop = chunk < num_chunks - 1 ? (chunk + 1) * VOCAB_CHUNK : vocab;
            float sum = 0;
            for (int64_t j = chunk * VOCAB_CHUNK; j < stop; j++) sum += weights[j];
            total += sums[chunk] = sum;
        }
        uint64_t seed = seeds_and_positions[row], position = seeds_and_positions[rows + row];
        uint64_t noise = mix(mix(seed) + position * 0x9E3779B97F4A7C15) >> 11;
        double target = noise * 0x1p-53 * total;
        int64_t chunk = search_cumulative(sums, num_chunks, target, &below), first = chunk * VOCAB_CHUNK;
        int64_t count = chunk < num_chunks - 1 ? VOCAB_CHUNK : vocab - first;
        tokens[row] = first + search_cumulative(weights + first, count, target, &below);
        logprobs[row] = (logits[tokens[row]] - max_logit) * scale - logf(total);
    }
    free(weights);
}
