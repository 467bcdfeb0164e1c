/* The small operators of a decoder layer, float32. Compiled for one model: HEADS, KV_HEADS and HEAD_DIM are given. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum { GROUP = HEADS / KV_HEADS, HALF = HEAD_DIM / 2 };
enum { ROW = (HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH = 2 * KV_HEADS * HEAD_DIM }; /* of qkv, of a slot in the pool */

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

void norm(const float *x, const float *weight, float *out, int64_t rows, int64_t dim, float eps) {
    for (int64_t row = 0; row < rows; row++, x += dim, out += dim) {
        float sum = 0;
        for (int64_t j = 0; j < dim; j++) sum += x[j] * x[j];
        float scale = 1.0f / sqrtf(sum / dim + eps);
        for (int64_t j = 0; j < dim; j++) out[j] = x[j] * scale * weight[j];
    }
}

void gate(const float *gate_up, float *out, int64_t rows, int64_t dim) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * dim, out += dim)
        for (int64_t j = 0; j < dim; j++) out[j] = gate_up[j] / (1.0f + exponential(-gate_up[j])) * gate_up[dim + j];
}

/* Rotates queries and keys of qkv [rows, ROW] where they are, and stores keys and values in the pool's slots. */
void turn(float *qkv, const float *turns, const int64_t *slots, float *pool, int64_t rows) {
    for (int64_t row = 0; row < rows; row++, qkv += ROW, turns += 2 * HEAD_DIM) {
        const float *cos = turns, *sin = turns + HEAD_DIM;
        for (float *x = qkv; x < qkv + ROW - KV_HEADS * HEAD_DIM; x += HEAD_DIM)
            for (int j = 0; j < HALF; j++) {
                float low = x[j], high = x[HALF + j];
                x[j] = low * cos[j] + high * sin[j];
                x[HALF + j] = high * cos[HALF + j] + low * sin[HALF + j];
            }
        float *slot = pool + slots[row] * WIDTH;
        for (int j = 0; j < WIDTH; j++) slot[j] = qkv[HEADS * HEAD_DIM + j];
    }
}

/* One query a row against its sequence's blocks, read where they lie: `blocks` is [rows, most]. */
void attend(const float *restrict qkv, const float *restrict pool, const int64_t *restrict blocks, int64_t most,
            int64_t block_size, const int64_t *restrict positions, float *restrict out, int64_t rows, float scaling) {
    int64_t room = most * block_size;
    float *restrict scores = malloc(HEADS * room * sizeof(float));
    for (int64_t row = 0; row < rows; row++, qkv += ROW, out += HEADS * HEAD_DIM, blocks += most) {
        int64_t keys = positions[row] + 1, used = (keys + block_size - 1) / block_size;
        for (int64_t b = 0; b < used; b++)
            for (int head = 0; head < HEADS; head++) {
                const float *key = pool + blocks[b] * block_size * WIDTH + head / GROUP * HEAD_DIM;
                const float *query = qkv + head * HEAD_DIM;
                float *score = scores + head * room + b * block_size;
                for (int64_t t = 0; t < block_size; t++, key += WIDTH) {
                    float sum = 0;
                    for (int j = 0; j < HEAD_DIM; j++) sum += query[j] * key[j];
                    score[t] = sum * scaling;
                }
            }
        for (int head = 0; head < HEADS; head++) {
            float *score = scores + head * room, peak = score[0], total = 0, sum[HEAD_DIM] = {0};
            for (int64_t t = 1; t < keys; t++) peak = score[t] > peak ? score[t] : peak;
            for (int64_t t = 0; t < keys; t++) total += score[t] = exponential(score[t] - peak);
            for (int64_t t = keys; t < used * block_size; t++) score[t] = 0;
            for (int64_t b = 0; b < used; b++) {
                const float *value = pool + blocks[b] * block_size * WIDTH + (KV_HEADS + head / GROUP) * HEAD_DIM;
                for (int64_t t = 0; t < block_size; t++, value += WIDTH)
                    for (int j = 0; j < HEAD_DIM; j++) sum[j] += score[b * block_size + t] * value[j];
            }
            for (int j = 0; j < HEAD_DIM; j++) out[head * HEAD_DIM + j] = sum[j] / total;
        }
    }
    free(scores);
}
