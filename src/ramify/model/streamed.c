/* The product of a few rows with a matrix in bfloat16, which is as fast as the matrix comes from memory: it is read once,
   in order, by all threads, and asked for ahead. Sums are float32. FEW, at most four, is given. */

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 32, SIDE = 4 }; /* numbers in a vector, outputs side by side */

/* torch's own threads: `work` is called by `threads` of them, and all are waited for. */
typedef void Parallel(void (*work)(void *), void *, unsigned threads, unsigned flags);

typedef struct {
    const uint16_t *x, *w, *onto;
    uint16_t *y;
    int64_t rows, in, out, share, taken; /* `share` outputs for each thread, and how many are taken */
} Product;

static inline float wide(uint16_t bits) {
    union { uint32_t bits; float value; } number = {(uint32_t)bits << 16};
    return number.value;
}

static inline uint16_t narrow(float value) {
    union { float value; uint32_t bits; } number = {value};
    return (number.bits + 0x7FFF + (number.bits >> 16 & 1)) >> 16;
}

/* SIDE outputs of `rows` rows, a constant wherever this is called: then the sums are registers. */
static inline __attribute__((always_inline)) void side(const Product *of, int64_t first, const int rows) {
    const uint16_t *w = of->w + first * of->in;
    __m512 sums[SIDE][FEW];
    for (int k = 0; k < SIDE; k++)
        for (int row = 0; row < rows; row++) sums[k][row] = _mm512_setzero_ps();
    for (int64_t j = 0; j < of->in; j += LANES)
        for (int k = 0; k < SIDE; k++) {
            __m512bh weights = (__m512bh)_mm512_loadu_si512(w + k * of->in + j);
            _mm_prefetch(w + (SIDE + k) * of->in + j, _MM_HINT_T0);
            for (int row = 0; row < rows; row++) {
                __m512bh x = (__m512bh)_mm512_loadu_si512(of->x + row * of->in + j);
                sums[k][row] = _mm512_dpbf16_ps(sums[k][row], weights, x);
            }
        }
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < SIDE; k++) {
            int64_t place = row * of->out + first + k;
            of->y[place] = narrow(_mm512_reduce_add_ps(sums[k][row]) + (of->onto ? wide(of->onto[place]) : 0));
        }
}

/* As many shares as are left: there may be fewer threads than were asked for. */
static void work(void *product) {
    Product *of = product;
    for (int64_t begin; (begin = __atomic_fetch_add(&of->taken, of->share, __ATOMIC_RELAXED)) < of->out;)
        for (int64_t k = begin; k < begin + of->share && k < of->out; k += SIDE) {
            int64_t first = k + SIDE < of->out ? k : of->out - SIDE; /* the last ones may be done twice */
            switch (of->rows) {
            case 1: side(of, first, 1); break;
            case 2: side(of, first, 2); break;
            case 3: side(of, first, 3); break;
            default: side(of, first, FEW);
            }
        }
}

/* y [rows, out] = x [rows, in] times w [out, in], on top of `onto` if that is not null. */
void product(Parallel *parallel, int64_t threads, const uint16_t *x, const uint16_t *w, const uint16_t *onto, uint16_t *y,
             int64_t rows, int64_t in, int64_t out) {
    int64_t share = ((out + threads - 1) / threads + SIDE - 1) / SIDE * SIDE;
    Product all = {x, w, onto, y, rows, in, out, share, 0};
    if (threads > 1)
        parallel(work, &all, threads, 0);
    else
        work(&all);
}
