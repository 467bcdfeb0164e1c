/* The product of a few bfloat16 rows with a matrix, at the speed of memory: all threads together read the matrix once,
   in order, with prefetches. Sums are float32. MAX_ROWS, at most four, is defined on the command line. */

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 32, TILE = 4 }; /* numbers in a vector; outputs that are computed together */

/* GOMP_parallel: runs `work` on `threads` threads of torch's own pool and waits for all of them. */
typedef void Parallel(void (*work)(void *), void *, unsigned threads, unsigned flags);

typedef struct {
    const uint16_t *x, *w, *addend;
    uint16_t *y;
    int64_t rows, in, out, chunk, next; /* a thread takes `chunk` outputs at a time, beginning at `next` */
} Gemm;

static inline float to_float(uint16_t bits) {
    union { uint32_t bits; float value; } number = {(uint32_t)bits << 16};
    return number.value;
}

static inline uint16_t to_bfloat16(float value) {
    union { float value; uint32_t bits; } number = {value};
    return (number.bits + 0x7FFF + (number.bits >> 16 & 1)) >> 16;
}

/* Compute TILE outputs of each row. `rows` is a constant in every call, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void compute_tile(const Gemm *gemm, int64_t first, const int rows) {
    const uint16_t *w = gemm->w + first * gemm->in;
    __m512 sums[TILE][MAX_ROWS];
    for (int k = 0; k < TILE; k++)
        for (int row = 0; row < rows; row++) sums[k][row] = _mm512_setzero_ps();
    for (int64_t j = 0; j < gemm->in; j += LANES)
        for (int k = 0; k < TILE; k++) {
            __m512bh weights = (__m512bh)_mm512_loadu_si512(w + k * gemm->in + j);
            _mm_prefetch(w + (TILE + k) * gemm->in + j, _MM_HINT_T0);
            for (int row = 0; row < rows; row++) {
                __m512bh x = (__m512bh)_mm512_loadu_si512(gemm->x + row * gemm->in + j);
                sums[k][row] = _mm512_dpbf16_ps(sums[k][row], weights, x);
            }
        }
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < TILE; k++) {
            int64_t index = row * gemm->out + first + k;
            float addend = gemm->addend ? to_float(gemm->addend[index]) : 0;
            gemm->y[index] = to_bfloat16(_mm512_reduce_add_ps(sums[k][row]) + addend);
        }
}

/* Take chunks until none is left: fewer threads may run than were requested. */
static void run_thread(void *argument) {
    Gemm *gemm = argument;
    for (int64_t begin; (begin = __atomic_fetch_add(&gemm->next, gemm->chunk, __ATOMIC_RELAXED)) < gemm->out;)
        for (int64_t k = begin; k < begin + gemm->chunk && k < gemm->out; k += TILE) {
            int64_t first = k + TILE < gemm->out ? k : gemm->out - TILE; /* the last outputs may be computed twice */
            switch (gemm->rows) {
            case 1: compute_tile(gemm, first, 1); break;
            case 2: compute_tile(gemm, first, 2); break;
            case 3: compute_tile(gemm, first, 3); break;
            default: compute_tile(gemm, first, MAX_ROWS);
            }
        }
}

/* y [rows, out] = x [rows, in] @ transposed w [out, in], plus `addend` unless it is null. */
void matmul(Parallel *parallel, int64_t threads, const uint16_t *x, const uint16_t *w, const uint16_t *addend,
            uint16_t *y, int64_t rows, int64_t in, int64_t out) {
    int64_t chunk = ((out + threads - 1) / threads + TILE - 1) / TILE * TILE;
    Gemm gemm = {x, w, addend, y, rows, in, out, chunk, 0};
    if (threads > 1)
        parallel(run_thread, &gemm, threads, 0);
    else
        run_thread(&gemm);
}
