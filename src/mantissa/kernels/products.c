/* y = x w^T of a few rows by a weight laid out for it, compiled for this processor (compiled.py).

A weight F x E lies in blocks of BLOCK outputs; in a block, inputs follow one another, and for each of them the BLOCK
values of its outputs ("pairs": of two inputs, output by output). So a product reads the weight once, front to back,
which is what memory gives fastest, and keeps ROWS x BLOCK sums in registers.

Each output is one fp32 sum, over the inputs in order, by fused multiply-adds (pairs: by the processor's own products
of two bf16 pairs). So it is the same however many rows, blocks or threads there are. "int8": of four inputs, output by
output, summed as int32. */

#include "vectors.h"

#define ROWS 6
#define LINE 32
#define AT_ONCE 512 /* inputs at a time: a block of them stays in the cache from one group of rows to the next */
enum { BLOCK = LANES * VECTORS };

enum kind { OF_FP32, OF_BF16, OF_FP16, PAIRS, OF_INT8 };

/* One product: what every thread of it reads, and the next block that none has taken. */
struct product {
  const void *weight, *x;
  float *y;
  const float *bias;
  uint16_t *rounded; /* y in bf16; NULL: y itself is the result */
  const float *scales, *row_scales; /* of codes: of each output, and of each row */
  long rows, in, out, taken, share;
  enum kind kind;
};

/* The sums of `rows` rows by one block over `count` inputs; `begun`: y holds those of the inputs before. */
#define MICRO(NAME, VALUE, LOAD)                                                                                  \
  INLINE void NAME(const int rows, const VALUE *w, const float *x, long in, long count, float *y, long out,       \
                   int begun) {                                                                                   \
    vector sum[ROWS][VECTORS], v[VECTORS];                                                                        \
    UNROLL(int r = 0; r < rows; r++)                                                                              \
    UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = begun ? load_fp32(y + r * out + k * LANES) : zero();          \
    for (long e = 0; e < count; e++, w += BLOCK) {                                                                \
      UNROLL(int k = 0; k < VECTORS; k++) v[k] = LOAD(w + k * LANES);                                             \
      UNROLL(int r = 0; r < rows; r++) {                                                                          \
        vector one = all(x[r * in + e]);                                                                          \
        UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = fused(one, v[k], sum[r][k]);                              \
      }                                                                                                           \
    }                                                                                                             \
    UNROLL(int r = 0; r < rows; r++)                                                                              \
    UNROLL(int k = 0; k < VECTORS; k++) store(y + r * out + k * LANES, sum[r][k]);                                \
  }
MICRO(micro_fp32, float, load_fp32)
MICRO(micro_bf16, uint16_t, load_bf16)
MICRO(micro_fp16, uint16_t, load_fp16)

#ifdef __AVX512BF16__
INLINE void micro_pairs(const int rows, const uint16_t *w, const uint16_t *x, long in, long count, float *y, long out,
                        int begun) {
  vector sum[ROWS][VECTORS];
  __m512bh v[VECTORS];
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = begun ? load_fp32(y + r * out + k * LANES) : zero();
  for (long e = 0; e < count; e += 2, w += 2 * BLOCK) {
    UNROLL(int k = 0; k < VECTORS; k++) v[k] = (__m512bh)_mm512_loadu_si512(w + 2 * k * LANES);
    UNROLL(int r = 0; r < rows; r++) {
      int pair;
      memcpy(&pair, x + r * in + e, sizeof pair);
      UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = _mm512_dpbf16_ps(sum[r][k], (__m512bh)_mm512_set1_epi32(pair), v[k]);
    }
  }
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < VECTORS; k++) store(y + r * out + k * LANES, sum[r][k]);
}
#endif

#ifdef __AVX512VNNI__
/* The processor multiplies unsigned codes of x by signed ones: x comes 128 larger. y holds the sums as integers. */
INLINE void micro_int8(const int rows, const int8_t *w, const uint8_t *x, long in, long count, float *y, long out,
                       int begun) {
  __m512i sum[ROWS][VECTORS], v[VECTORS];
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = begun ? _mm512_loadu_si512(y + r * out + k * LANES) : all_bits(0);
  for (long e = 0; e < count; e += 4, w += 4 * BLOCK) {
    UNROLL(int k = 0; k < VECTORS; k++) v[k] = _mm512_loadu_si512(w + 4 * k * LANES);
    UNROLL(int r = 0; r < rows; r++) {
      int four;
      memcpy(&four, x + r * in + e, sizeof four);
      UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = _mm512_dpbusd_epi32(sum[r][k], all_bits(four), v[k]);
    }
  }
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < VECTORS; k++) _mm512_storeu_si512(y + r * out + k * LANES, sum[r][k]);
}
#endif

/* One block of outputs for all rows. One row reads the block in one go. */
#define OF_BLOCK(NAME, VALUE, OPERAND, MICRO)                                                                     \
  static void NAME(const VALUE *w, const OPERAND *x, float *y, long rows, long in, long out) {                    \
    long step = rows == 1 ? in : AT_ONCE;                                                                         \
    for (long e = 0; e < in; e += step) {                                                                         \
      long count = in - e < step ? in - e : step, r = 0;                                                          \
      const VALUE *part = w + e * BLOCK;                                                                          \
      for (; r + ROWS <= rows; r += ROWS) MICRO(ROWS, part, x + r * in + e, in, count, y + r * out, out, e > 0);  \
      const OPERAND *left = x + r * in + e;                                                                       \
      float *sums = y + r * out;                                                                                  \
      switch (rows - r) {                                                                                         \
        case 5: MICRO(5, part, left, in, count, sums, out, e > 0); break;                                         \
        case 4: MICRO(4, part, left, in, count, sums, out, e > 0); break;                                         \
        case 3: MICRO(3, part, left, in, count, sums, out, e > 0); break;                                         \
        case 2: MICRO(2, part, left, in, count, sums, out, e > 0); break;                                         \
        case 1: MICRO(1, part, left, in, count, sums, out, e > 0); break;                                         \
      }                                                                                                           \
    }                                                                                                             \
  }
OF_BLOCK(block_fp32, float, float, micro_fp32)
OF_BLOCK(block_bf16, uint16_t, float, micro_bf16)
OF_BLOCK(block_fp16, uint16_t, float, micro_fp16)
#ifdef __AVX512BF16__
OF_BLOCK(block_pairs, uint16_t, uint16_t, micro_pairs)
#endif
#ifdef __AVX512VNNI__
OF_BLOCK(block_int8, int8_t, uint8_t, micro_int8)

/* Integers become the values that they stand for: less what 128 too much in each x made, times both scales. */
static void of_integers(const struct product *p, long start) {
  const int32_t *too_much = (const int32_t *)((const int8_t *)p->weight + p->out * p->in) + start;
  float *y = p->y + start;
  for (long r = 0; r < p->rows; r++, y += p->out)
    for (int k = 0; k < BLOCK; k++) {
      uint32_t sum;
      memcpy(&sum, y + k, sizeof sum);
      y[k] = (float)(int32_t)(sum - (uint32_t)too_much[k]) * p->row_scales[r] * p->scales[start + k];
    }
}
#endif

static void of_block(const struct product *p, long at) {
  long start = at * BLOCK, first = start * p->in;
  float *y = p->y + start;
  switch (p->kind) {
    case OF_FP32: block_fp32((const float *)p->weight + first, p->x, y, p->rows, p->in, p->out); break;
    case OF_BF16: block_bf16((const uint16_t *)p->weight + first, p->x, y, p->rows, p->in, p->out); break;
    case OF_FP16: block_fp16((const uint16_t *)p->weight + first, p->x, y, p->rows, p->in, p->out); break;
    case PAIRS:
#ifdef __AVX512BF16__
      block_pairs((const uint16_t *)p->weight + first, p->x, y, p->rows, p->in, p->out);
#endif
      break;
    case OF_INT8:
#ifdef __AVX512VNNI__
      block_int8((const int8_t *)p->weight + first, p->x, y, p->rows, p->in, p->out);
      of_integers(p, start);
#endif
      break;
  }
  for (long r = 0; r < p->rows && (p->bias || p->rounded); r++, y += p->out) {
    if (p->bias)
      for (int k = 0; k < BLOCK; k++) y[k] += p->bias[start + k];
    if (p->rounded)
      for (int k = 0; k < BLOCK; k++) p->rounded[r * p->out + start + k] = to_bf16(y[k]);
  }
}

static void work(void *of) {
  struct product *p = of;
  long blocks = p->out / BLOCK, at;
  while ((at = __atomic_fetch_add(&p->taken, p->share, __ATOMIC_RELAXED)) < blocks)
    for (long end = at + p->share < blocks ? at + p->share : blocks; at < end; at++) of_block(p, at);
}

static void shared(struct product *p, unsigned threads, parallel team) {
  p->share = p->out / BLOCK / (4 * threads) + 1;
  if (team && threads > 1)
    team(work, p, threads, 0);
  else
    work(p);
}

/* `team`: GOMP_parallel of the library whose threads torch's own operations use; NULL: one thread. */
void mantissa_product(int kind, const void *weight, const void *x, float *y, const float *bias, uint16_t *rounded,
                      long rows, long in, long out, unsigned threads, parallel team) {
  struct product p = {weight, x, y, bias, rounded, NULL, NULL, rows, in, out, 0, 1, kind};
  shared(&p, threads, team);
}

/* The same of int8 codes, x's 128 larger. A weight's codes are followed by int32, 128 times the sum of each output's. */
void mantissa_integers(const void *weight, const void *x, float *y, const float *scales, const float *row_scales,
                       const float *bias, uint16_t *rounded, long rows, long in, long out, unsigned threads,
                       parallel team) {
  struct product p = {weight, x, y, bias, rounded, scales, row_scales, rows, in, out, 0, 1, OF_INT8};
  shared(&p, threads, team);
}

/* A weight in the layout above, of units of `size` bytes: a value, or those that are multiplied at a time; `back`: the
other way round. Some outputs at a time, each line of the cache read and written once. */
#define LAY(NAME, UNIT)                                                                                           \
  static void NAME(const UNIT *from, UNIT *to, long in, long out, int back) {                                     \
    for (long f = 0; f < out; f += BLOCK)                                                                         \
      for (long start = 0; start < in; start += LINE)                                                             \
        for (long k = 0; k < BLOCK; k += LANES)                                                                   \
          for (long e = start; e < start + LINE && e < in; e++)                                                   \
            for (long j = k; j < k + LANES; j++) {                                                                \
              long plain = (f + j) * in + e, laid = f * in + e * BLOCK + j;                                       \
              if (back) to[plain] = from[laid];                                                                   \
              else to[laid] = from[plain];                                                                        \
            }                                                                                                     \
  }
LAY(lay_2, uint16_t)
LAY(lay_4, uint32_t)

void mantissa_lay(int size, const void *from, void *to, long in, long out, int back) {
  if (size == 2) lay_2(from, to, in, out, back);
  else lay_4(from, to, in, out, back);
}

int mantissa_block(void) { return BLOCK; }

int mantissa_lanes(void) { return LANES; }
