/* y = x w^T of a few rows by a weight laid out for it, compiled for this processor (compiled.py).

A weight F x E lies in blocks of BLOCK outputs; in a block, inputs follow one another, and for each of them the BLOCK
values of its outputs ("pairs": of two inputs, output by output). So a product reads the weight once, front to back,
which is what memory gives fastest, and keeps ROWS x BLOCK sums in registers.

Each output is one fp32 sum, over the inputs in order, by fused multiply-adds (pairs: by the processor's own products
of two bf16 pairs). So it is the same however many rows, blocks or threads there are. "int8": of four inputs, output by
output, summed as int32.

Codes: of a weight in an 8-bit format (e4m3, which holds e2m1's and four-bit integers too), a byte each, laid out as
pairs are, but that 8 bytes of one vector and 8 of the next lie in turn; the scales of each output's groups of inputs
follow. A block's codes become bf16 in the cache, some inputs at a time, and are multiplied there by all rows. Where the
scales are powers of two, the values are bf16's too ("folded"); else each group's sum is multiplied by the scales of both
operands, as on a tensor core.

A processor with AMX multiplies pairs and int8 in tiles of up to 16 rows by 16 outputs: the same layout, and still one
sum an output, whose order the instruction defines whatever rows stand beside it. */

#include "vectors.h"

#define ROWS 6
#define LINE 32
#define AT_ONCE 512 /* inputs at a time: a block of them stays in the cache from one group of rows to the next */
#define FEW 96      /* rows below which it is to be the first one, of 32 kB, for memory is what they wait for */
#define GROUP 256 /* rows whose sums stay in the cache until they are rounded */
#define CACHED (1 << 18) /* bytes of x that tiles read block after block */
#define AHEAD 8192 /* bytes of a weight that are asked for before their turn: memory takes long to answer */
enum { BLOCK = LANES * VECTORS };

INLINE long inputs_at_once(long rows) { return rows < FEW ? (1 << 15) / (4 * BLOCK) : AT_ONCE; }

/* TOTAL: pairs, and a scale of each output and of each row. */
enum kind { OF_FP32, OF_BF16, OF_FP16, PAIRS, OF_INT8, CODES, FOLDED, TOTAL };

/* One product: what every thread of it reads, and the next block that none has taken. */
struct product {
  const void *weight, *x;
  void *y; /* fp32; bf16 where `halves` */
  const float *bias;
  const float *scales, *row_scales; /* of codes: of each output, and of each row (its groups); NULL: 1 */
  long per; /* inputs that share a scale */
  long rows, in, out, taken, share, group; /* group: rows at a time */
  int halves;
  enum kind kind;
};

INLINE void ask_for(const void *weight, long bytes) {
  UNROLL(long k = 0; k < bytes; k += 64) _mm_prefetch((const char *)weight + AHEAD + k, _MM_HINT_T0);
}

/* What a pass over a block asks the memory for beside its sums: at each step `lines` lines from `from` + `bytes` each. */
struct ahead {
  const char *from;
  int lines, bytes;
};

INLINE void ask_ahead(struct ahead next, long step) {
  UNROLL(int k = 0; k < next.lines; k++) _mm_prefetch(next.from + step * next.bytes + k * 64, _MM_HINT_T1);
}

/* The sums of `rows` rows by one block over `count` inputs; `begun`: y holds those of the inputs before. */
#define MICRO(NAME, VALUE, LOAD)                                                                                  \
  INLINE void NAME(const int rows, const VALUE *w, const float *x, long in, long count, float *y, long out,       \
                   int begun, const struct ahead next) {                                                          \
    vector sum[ROWS][VECTORS], v[VECTORS];                                                                        \
    UNROLL(int r = 0; r < rows; r++)                                                                              \
    UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = begun ? load_fp32(y + r * out + k * LANES) : zero();          \
    for (long e = 0; e < count; e++, w += BLOCK) {                                                                \
      ask_ahead(next, e);                                                                                         \
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
                        int begun, const struct ahead next) {
  vector sum[ROWS][VECTORS];
  __m512bh v[VECTORS];
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = begun ? load_fp32(y + r * out + k * LANES) : zero();
  for (long e = 0; e < count; e += 2, w += 2 * BLOCK) {
    ask_ahead(next, e / 2);
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
                       int begun, const struct ahead next) {
  __m512i sum[ROWS][VECTORS], v[VECTORS];
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < VECTORS; k++) sum[r][k] = begun ? _mm512_loadu_si512(y + r * out + k * LANES) : all_bits(0);
  for (long e = 0; e < count; e += 4, w += 4 * BLOCK) {
    ask_ahead(next, e / 4);
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

/* The last argument where `some` is 0, else the one before it. */
#define OR(some, MICRO, rows, w, x, in, count, y, out, begun, none, soon)                                           \
  ((some) ? MICRO(rows, w, x, in, count, y, out, begun, none) : MICRO(rows, w, x, in, count, y, out, begun, soon))

/* Some inputs of one block of outputs for some rows; `out`: from a row's sums to the next's. Where the rows are one pass,
it asks for what it reads itself, a little later; where they are more, together they ask for what comes `next`, so that
memory answers while they multiply. `bytes`: that what comes next takes of a step. */
#define OF_BLOCK(NAME, VALUE, OPERAND, MICRO)                                                                     \
  INLINE void NAME##_part(const VALUE *w, const OPERAND *x, long in, long count, float *y, long rows, long out,   \
                          int begun, const char *next, const int bytes) {                                         \
    const int lines = (bytes + 63) / 64;                                                                          \
    const struct ahead soon = {(const char *)w + AHEAD, lines, bytes}, none = {next, 0, 0};                       \
    long passes = rows / ROWS, r = 0;                                                                             \
    if (passes == 1) MICRO(ROWS, w, x, in, count, y, out, begun, soon), r = ROWS;                                 \
    for (int asked = 0; r + ROWS <= rows; r += ROWS) {                                                            \
      const char *from = next + asked * 64;                                                                       \
      long each = asked >= lines ? 0 : passes >= 4 ? 1 : 2;                                                       \
      asked += each;                                                                                              \
      if (!each) MICRO(ROWS, w, x + r * in, in, count, y + r * out, out, begun, none);                            \
      else if (each == 1 || lines == 1)                                                                           \
        MICRO(ROWS, w, x + r * in, in, count, y + r * out, out, begun, ((struct ahead){from, 1, bytes}));         \
      else MICRO(ROWS, w, x + r * in, in, count, y + r * out, out, begun, ((struct ahead){from, 2, bytes}));      \
    }                                                                                                             \
    const OPERAND *left = x + r * in;                                                                             \
    float *sums = y + r * out;                                                                                    \
    switch (rows - r) {                                                                                           \
      case 5: OR(r, MICRO, 5, w, left, in, count, sums, out, begun, none, soon); break;                           \
      case 4: OR(r, MICRO, 4, w, left, in, count, sums, out, begun, none, soon); break;                           \
      case 3: OR(r, MICRO, 3, w, left, in, count, sums, out, begun, none, soon); break;                           \
      case 2: OR(r, MICRO, 2, w, left, in, count, sums, out, begun, none, soon); break;                           \
      case 1: OR(r, MICRO, 1, w, left, in, count, sums, out, begun, none, soon); break;                           \
    }                                                                                                             \
  }                                                                                                               \
  static void NAME(const VALUE *w, const OPERAND *x, float *y, long rows, long in, long out) {                    \
    long step = rows == 1 ? in : inputs_at_once(rows);                                                            \
    for (long e = 0; e < in; e += step) {                                                                         \
      long count = in - e < step ? in - e : step;                                                                 \
      const VALUE *from = w + e * BLOCK;                                                                          \
      NAME##_part(from, x + e, in, count, y, rows, out, e > 0, (const char *)(from + count * BLOCK), STEP_OF_##MICRO);  \
    }                                                                                                             \
  }
#define STEP_OF_micro_fp32 (4 * BLOCK)
#define STEP_OF_micro_bf16 (2 * BLOCK)
#define STEP_OF_micro_fp16 (2 * BLOCK)
#define STEP_OF_micro_pairs (4 * BLOCK)
#define STEP_OF_micro_int8 (4 * BLOCK)
OF_BLOCK(block_fp32, float, float, micro_fp32)
OF_BLOCK(few_bf16, uint16_t, float, micro_bf16)
OF_BLOCK(few_fp16, uint16_t, float, micro_fp16)

/* For many rows a block's values are widened once, not by each group of rows. */
#define WIDENED(NAME, FEW, LOAD)                                                                                  \
  static void NAME(const uint16_t *w, const float *x, float *y, long rows, long in, long out) {                   \
    float wide[AT_ONCE * BLOCK] __attribute__((aligned(64)));                                                     \
    if (rows < 4 * ROWS) {                                                                                        \
      FEW(w, x, y, rows, in, out);                                                                                \
      return;                                                                                                     \
    }                                                                                                             \
    for (long e = 0, step = inputs_at_once(rows); e < in; e += step) {                                            \
      long count = in - e < step ? in - e : step;                                                                 \
      for (long k = 0; k < count; k++, w += BLOCK)                                                                \
        UNROLL(int v = 0; v < VECTORS; v++) store(wide + k * BLOCK + v * LANES, LOAD(w + v * LANES));             \
      block_fp32_part(wide, x + e, in, count, y, rows, out, e > 0, (const char *)w, 2 * BLOCK);                   \
    }                                                                                                             \
  }
WIDENED(block_bf16, few_bf16, load_bf16)
WIDENED(block_fp16, few_fp16, load_fp16)
#ifdef __AVX512BF16__
OF_BLOCK(block_pairs, uint16_t, uint16_t, micro_pairs)
#endif
#ifdef __AVX512VNNI__
OF_BLOCK(block_int8, int8_t, uint8_t, micro_int8)
#endif

/* Lines of what comes next, and where the rest of it begins. */
INLINE const char *ask_next(struct ahead next) {
  for (int k = 0; k < next.lines; k++) _mm_prefetch(next.from + k * 64, _MM_HINT_T0);
  return next.from + next.bytes;
}

/* Tiles: registers of up to 16 rows of 64 bytes. A step of a sum takes 64 bytes of each row of x: 32 values of bf16, or
64 codes; the block's 16 lines of 16 outputs that belong to them are a tile of the weight. */
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#define DEEP 64
long syscall(long, ...); /* <unistd.h> has a read and a write of its own */
static int may_tile; /* the system gives a process tiles where it asks for them */

static int in_tiles(long bytes) { return may_tile && bytes % DEEP == 0; }

static void release_tiles(void) { _tile_release(); }

/* Sums in tiles 0 to 3, x in 4 and 5, the weight in 6 and 7. `tall` rows in each, and of 17 rows and more `rest` in the
tiles of the second half; 0: none. */
static void shape_tiles(int *held, long tall, long rest) {
  struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {0}};
  long rows[8] = {tall, tall, rest ? rest : tall, rest ? rest : tall, tall, rest ? rest : 16, 16, 16};
  if (*held == tall * 32 + rest) return;
  *held = tall * 32 + rest;
  for (int k = 0; k < 8; k++) shape.rows[k] = rows[k];
  __asm__ volatile("" : : "r"(&shape) : "memory"); /* gcc takes the instruction to read eight bytes of it */
  _tile_loadconfig(&shape);
}

/* `bytes`: of a row of x. */
#define TILES(NAME, VALUE, PRODUCT)                                                                               \
  /* Up to 16 rows by the block's 64 outputs, over `count` bytes of each row. */                                  \
  static void NAME##_low(const char *w, const char *x, float *y, long bytes, long count, long out, int begun,     \
                         int first, struct ahead next) {                                                          \
    if (begun) {                                                                                                  \
      _tile_loadd(0, y, 4 * out); _tile_loadd(1, y + 16, 4 * out);                                                \
      _tile_loadd(2, y + 32, 4 * out); _tile_loadd(3, y + 48, 4 * out);                                           \
    } else {                                                                                                      \
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);                                                 \
    }                                                                                                             \
    for (long e = 0; e < count; e += DEEP, w += 16 * 4 * BLOCK) {                                                 \
      if (first)                                                                                                  \
        for (int k = 0; k < 8; k++) ask_for(w + k * 512, 512);                                                    \
      next.from = ask_next(next);                                                                                 \
      _tile_loadd(4, x + e, bytes);                                                                               \
      _tile_loadd(5, w, 4 * BLOCK); PRODUCT(0, 4, 5);                                                             \
      _tile_loadd(6, w + 64, 4 * BLOCK); PRODUCT(1, 4, 6);                                                        \
      _tile_loadd(7, w + 128, 4 * BLOCK); PRODUCT(2, 4, 7);                                                       \
      _tile_loadd(5, w + 192, 4 * BLOCK); PRODUCT(3, 4, 5);                                                       \
    }                                                                                                             \
    _tile_stored(0, y, 4 * out); _tile_stored(1, y + 16, 4 * out);                                                \
    _tile_stored(2, y + 32, 4 * out); _tile_stored(3, y + 48, 4 * out);                                           \
  }                                                                                                               \
  /* 17 to 32 rows by 32 outputs. */                                                                             \
  static void NAME##_high(const char *w, const char *x, float *y, long bytes, long count, long out, int begun,    \
                          int first, struct ahead next) {                                                         \
    if (begun) {                                                                                                  \
      _tile_loadd(0, y, 4 * out); _tile_loadd(1, y + 16, 4 * out);                                                \
      _tile_loadd(2, y + 16 * out, 4 * out); _tile_loadd(3, y + 16 * out + 16, 4 * out);                          \
    } else {                                                                                                      \
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);                                                 \
    }                                                                                                             \
    for (long e = 0; e < count; e += DEEP, w += 16 * 4 * BLOCK) {                                                 \
      if (first)                                                                                                  \
        for (int k = 0; k < 16; k++) ask_for(w + k * 4 * BLOCK, 128);                                             \
      next.from = ask_next(next);                                                                                 \
      _tile_loadd(4, x + e, bytes);                                                                               \
      _tile_loadd(6, w, 4 * BLOCK); PRODUCT(0, 4, 6);                                                             \
      _tile_loadd(7, w + 64, 4 * BLOCK); PRODUCT(1, 4, 7);                                                        \
      _tile_loadd(5, x + 16 * bytes + e, bytes); PRODUCT(2, 5, 6); PRODUCT(3, 5, 7);                              \
    }                                                                                                             \
    _tile_stored(0, y, 4 * out); _tile_stored(1, y + 16, 4 * out);                                                \
    _tile_stored(2, y + 16 * out, 4 * out); _tile_stored(3, y + 16 * out + 16, 4 * out);                          \
  }                                                                                                               \
  /* Over `all` bytes of each row, of `bytes`; `begun`: y holds the sums of those before; `first`: nobody has asked   \
  for the weight. `next`: what each step asks for, NULL: nothing. */                                              \
  INLINE void NAME##_part(const VALUE *weight, const void *of, float *y, long rows, long bytes, long all, long out, \
                          int begun, int first, int *held, struct ahead *next) {                                  \
    struct ahead none = {0};                                                                                      \
    const char *w = (const void *)weight, *x = of;                                                                \
    long low = rows % 32 > 16 ? 0 : rows % 32, high = rows - low;                                                 \
    for (int half = 0; half < 2 && high; half++)                                                                  \
      for (long e = 0; e < all; e += 4 * AT_ONCE) {                                                               \
        long count = all - e < 4 * AT_ONCE ? all - e : 4 * AT_ONCE;                                               \
        for (long r = 0; r < high; r += 32) {                                                                     \
          shape_tiles(held, 16, high - r < 32 ? high - r - 16 : 16);                                              \
          NAME##_high(w + e * BLOCK + half * 128, x + r * bytes + e, y + r * out + half * 32, bytes, count, out,  \
                      begun || e > 0, first && r == 0, next ? *next : none);                                      \
          if (next) next->from += count / DEEP * next->bytes;                                                     \
        }                                                                                                         \
      }                                                                                                           \
    if (low) {                                                                                                    \
      shape_tiles(held, low, 0);                                                                                  \
      NAME##_low(w, x + high * bytes, y + high * out, bytes, all, out, begun, first && high == 0,                 \
                 next ? *next : none);                                                                            \
      if (next) next->from += all / DEEP * next->bytes;                                                           \
    }                                                                                                             \
  }                                                                                                               \
  static void NAME(const VALUE *weight, const void *of, float *y, long rows, long bytes, long out, int *held) {   \
    NAME##_part(weight, of, y, rows, bytes, bytes, out, 0, 1, held, NULL);                                              \
  }
TILES(tiles_pairs, uint16_t, _tile_dpbf16ps)
TILES(tiles_int8, int8_t, _tile_dpbusd)

int mantissa_tiles(void) { return may_tile = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }
#else
enum { may_tile = 0 };
#define in_tiles(bytes) 0
#define tiles_pairs(weight, x, y, rows, bytes, out, held) (void)held
#define tiles_pairs_part(weight, x, y, rows, bytes, all, out, begun, first, held, next) (void)held
#define tiles_int8 tiles_pairs
static void release_tiles(void) {}

int mantissa_tiles(void) { return 0; }
#endif

#ifdef __AVX512VNNI__
/* Integers become the values that they stand for: less what 128 too much in each x made, times both scales. */
static void of_integers(const struct product *p, long start, long from, long rows, float *y, long apart) {
  const int32_t *too_much = (const int32_t *)((const int8_t *)p->weight + p->out * p->in) + start;
  for (long r = from; r < from + rows; r++, y += apart)
    for (int k = 0; k < BLOCK; k++) {
      uint32_t sum;
      memcpy(&sum, y + k, sizeof sum);
      y[k] = (float)(int32_t)(sum - (uint32_t)too_much[k]) * p->row_scales[r] * p->scales[start + k];
    }
}
#endif

#if defined __AVX512BF16__ && defined __AVX512VBMI__
#define OF_CODES
#define MOST 512 /* inputs whose bf16 values lie in the cache at a time */
#define AT_A_TIME 32 /* rows whose sums of a group do */

/* The two bytes of each of e4m3's magnitudes as bf16. */
static uint8_t HIGH[128], LOW[128];

__attribute__((constructor)) static void find_bytes(void) {
  for (int code = 0; code < 128; code++) {
    float value = code < 8 ? code * 0x1p-9f : (8 + code % 8) * 0x1p-10f * (1 << code / 8);
    uint16_t bits = to_bf16(value);
    HIGH[code] = bits >> 8, LOW[code] = bits;
  }
}

/* Values times powers of two, by adding to their exponents; `exact`: none leaves the normals, which are all that the
processor knows. */
INLINE __m512i times_power(__m512i value, __m512i power, const int exact) {
  __m512i size = _mm512_and_si512(value, _mm512_set1_epi16(0x7FFF)), more;
  __mmask32 some = _mm512_test_epi16_mask(size, size);
  if (exact) return _mm512_mask_add_epi16(value, some, value, power);
  more = _mm512_add_epi16(size, power);
  some = _mm512_mask_cmpge_epi16_mask(some, more, _mm512_set1_epi16(0x80));
  return _mm512_ternarylogic_epi32(value, _mm512_set1_epi16(-0x8000), _mm512_maskz_mov_epi16(some, more), 0xEA);
}

/* The values of `count` inputs of a block; `kind`: multiplied by `power` 0: not, 1: exactly, 2: as may be. */
INLINE void widen_group(const uint8_t *w, uint16_t *wide, long count, const __m512i *power, const int kind, int ask) {
  const __m512i high_of[2] = {_mm512_loadu_si512(HIGH), _mm512_loadu_si512(HIGH + 64)};
  const __m512i low_of[2] = {_mm512_loadu_si512(LOW), _mm512_loadu_si512(LOW + 64)};
  for (long e = 0; e < count; e += 2, w += 2 * BLOCK, wide += 2 * BLOCK) {
    if (ask) ask_for(w, 2 * BLOCK);
    UNROLL(int k = 0; k < VECTORS; k += 2) {
      __m512i codes = _mm512_loadu_si512(w + 2 * k * LANES), low, high;
      low = _mm512_permutex2var_epi8(low_of[0], codes, low_of[1]);
      high = _mm512_permutex2var_epi8(high_of[0], codes, high_of[1]);
      high = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(-0x80), high, 0xEA); /* (a & b) | c */
      __m512i one = _mm512_unpacklo_epi8(low, high), two = _mm512_unpackhi_epi8(low, high);
      if (kind) one = times_power(one, power[k], kind == 1), two = times_power(two, power[k + 1], kind == 1);
      _mm512_storeu_si512(wide + 2 * k * LANES, one);
      _mm512_storeu_si512(wide + 2 * (k + 1) * LANES, two);
    }
  }
}

/* Of at most MOST inputs. `powers`: those of two that belong to them, BLOCK for each `per` inputs, or NULL. */
static void widen_codes(const uint8_t *w, uint16_t *wide, long count, const int8_t *powers, long per, int ask) {
  if (!powers) widen_group(w, wide, count, NULL, 0, ask);
  for (long e = 0; powers && e < count; e += per, powers += BLOCK) {
    long some = count - e < per ? count - e : per;
    __m512i power[VECTORS], least = _mm512_set1_epi32(0);
    UNROLL(int k = 0; k < VECTORS; k++) {
      __m512i n = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(powers + k * LANES)));
      least = _mm512_min_epi32(least, n);
      n = _mm512_slli_epi32(n, 7); /* to both values' exponents */
      power[k] = _mm512_mask_mov_epi16(_mm512_slli_epi32(n, 16), 0x55555555, n);
    }
    if (_mm512_cmplt_epi32_mask(least, _mm512_set1_epi32(-117))) /* the smallest code is 2^-9 */
      widen_group(w + e * BLOCK, wide + e * BLOCK, some, power, 2, ask);
    else widen_group(w + e * BLOCK, wide + e * BLOCK, some, power, 1, ask);
  }
}

/* The sums of some rows by a block of bf16 pairs, over `count` inputs from the `e`th on. */
INLINE void pairs_part(const struct product *p, const uint16_t *wide, const uint16_t *x, float *y, long rows, long count,
                       long apart, int begun, int *tiles, struct ahead *next) {
  if (in_tiles(2 * p->in)) tiles_pairs_part(wide, x, y, rows, 2 * p->in, 2 * count, apart, begun, 0, tiles, next);
  else block_pairs_part(wide, x, p->in, count, y, rows, apart, begun, NULL, 0);
}

/* y += part times the scales of the group, of each output (`of`) and of each row. */
static void add_group(const float *part, float *y, long rows, long apart, const float *of, const float *row, long step,
                      int begun) {
  for (long r = 0; r < rows; r++)
    UNROLL(int k = 0; k < VECTORS; k++) {
      vector scale = load_fp32(of + k * LANES), sum = load_fp32(part + r * BLOCK + k * LANES);
      if (row) scale = times(all(row[r * step]), scale);
      float *to = y + r * apart + k * LANES;
      store(to, begun ? fused(sum, scale, load_fp32(to)) : times(sum, scale));
    }
}

/* The sums of some rows by a block of codes. */
static void block_codes(const struct product *p, long start, long from, const uint16_t *x, float *y, long rows, long apart,
                        int *tiles) {
  uint16_t wide[MOST * BLOCK] __attribute__((aligned(64)));
  float part[AT_A_TIME * BLOCK] __attribute__((aligned(64)));
  const uint8_t *codes = (const uint8_t *)p->weight + start * p->in, *after = (const uint8_t *)p->weight + p->out * p->in;
  long groups = (p->in + p->per - 1) / p->per, folded = p->kind == FOLDED;
  /* For few rows so little that their products and the next codes' bytes come at the same time. */
  int few = rows <= AT_A_TIME / 2;
  long step = few ? LINE : folded ? MOST : p->per;
  const int8_t *powers = (const int8_t *)after + start * groups;
  const float *scales = (const float *)after + start * groups;
  for (long e = 0; e < p->in; e += step) {
    long count = p->in - e < step ? p->in - e : step, group = e / p->per, inside = e % p->per;
    const int8_t *of = folded ? powers + group * BLOCK : NULL;
    widen_codes(codes + e * BLOCK, wide, count, of, p->per, few || !in_tiles(2 * p->in));
    /* Of many rows each step of each asks for some of the codes that come next. */
    long passes = (rows + 31) / 32 * 2 * (count / LINE + 1), lines = count * BLOCK / 64 / passes + 1;
    struct ahead next = {(const char *)codes + (e + count) * BLOCK, lines, 64 * lines}, *soon = few ? NULL : &next;
    if (folded) pairs_part(p, wide, x + e, y, rows, count, apart, e > 0, tiles, soon);
    for (long at = 0; at < rows && !folded; at += AT_A_TIME) {
      long some = rows - at < AT_A_TIME ? rows - at : AT_A_TIME;
      pairs_part(p, wide, x + at * p->in + e, part, some, count, BLOCK, inside > 0, tiles, soon);
      if (inside + count < p->per && e + count < p->in) continue;
      const float *row = p->row_scales ? p->row_scales + (from + at) * groups + group : NULL;
      add_group(part, y + at * apart, some, apart, scales + group * BLOCK, row, groups, group > 0);
    }
  }
}
#endif

static long width_of(const struct product *p) { return p->kind == OF_INT8 ? 1 : p->kind < PAIRS ? 4 : 2; }

/* The sums of some rows by the block that begins at output `start`; `tiles`: their shape so far. */
static void sums_of(const struct product *p, long start, long from, long rows, float *y, long apart, int *tiles) {
  long first = start * p->in;
  const void *x = (const char *)p->x + from * p->in * width_of(p);
  switch (p->kind) {
    case OF_FP32: block_fp32((const float *)p->weight + first, x, y, rows, p->in, apart); break;
    case OF_BF16: block_bf16((const uint16_t *)p->weight + first, x, y, rows, p->in, apart); break;
    case OF_FP16: block_fp16((const uint16_t *)p->weight + first, x, y, rows, p->in, apart); break;
    case PAIRS: case TOTAL:
#ifdef __AVX512BF16__
      if (in_tiles(2 * p->in)) tiles_pairs((const uint16_t *)p->weight + first, x, y, rows, 2 * p->in, apart, tiles);
      else block_pairs((const uint16_t *)p->weight + first, x, y, rows, p->in, apart);
#ifdef OF_CODES
      if (p->kind == TOTAL) {
        const float *scales = (const float *)((const uint16_t *)p->weight + p->out * p->in) + start;
        for (long r = 0; r < rows; r++)
          add_group(y + r * apart, y + r * apart, 1, 0, scales, p->row_scales + from + r, 0, 0);
      }
#endif
#endif
      break;
    case CODES: case FOLDED:
#ifdef OF_CODES
      block_codes(p, start, from, x, y, rows, apart, tiles);
#endif
      break;
    case OF_INT8:
#ifdef __AVX512VNNI__
      if (in_tiles(p->in)) tiles_int8((const int8_t *)p->weight + first, x, y, rows, p->in, apart, tiles);
      else block_int8((const int8_t *)p->weight + first, x, y, rows, p->in, apart);
      of_integers(p, start, from, rows, y, apart);
#endif
      break;
  }
}

static void of_block(const struct product *p, long start, long from, long rows, int *tiles) {
  float few[GROUP * BLOCK] __attribute__((aligned(64)));
  long apart = p->halves ? BLOCK : p->out, at = from * p->out + start;
  float *y = p->halves ? few : (float *)p->y + at;
  sums_of(p, start, from, rows, y, apart, tiles);
  for (long r = 0; r < rows && (p->bias || p->halves); r++, y += apart) {
    if (p->bias)
      for (int k = 0; k < BLOCK; k++) y[k] += p->bias[start + k];
    if (p->halves)
      for (int k = 0; k < BLOCK; k++) ((uint16_t *)p->y)[at + r * p->out + k] = to_bf16(y[k]);
  }
}

static void work(void *of) {
  struct product *p = of;
  long blocks = p->out / BLOCK, first;
  int tiles = 0;
  while ((first = __atomic_fetch_add(&p->taken, p->share, __ATOMIC_RELAXED)) < blocks) {
    long end = first + p->share < blocks ? first + p->share : blocks;
    for (long from = 0; from < p->rows; from += p->group)
      for (long at = first, rows = p->rows - from < p->group ? p->rows - from : p->group; at < end; at++)
        of_block(p, at * BLOCK, from, rows, &tiles);
  }
  if (tiles) release_tiles();
}

static void shared(struct product *p, unsigned threads, parallel team) {
  long cached = CACHED / (p->in * width_of(p)) / 32 * 32, most = p->halves ? GROUP : p->rows;
  if (may_tile && width_of(p) < 4) most = cached > most ? most : cached > 32 ? cached : 32;
  p->group = most;
  p->share = p->out / BLOCK / (4 * threads) + 1;
  if (team && threads > 1)
    team(work, p, threads, 0);
  else
    work(p);
}

/* `halves`: y is bf16. `row_scales`, `per`: of codes. `team`: GOMP_parallel of the library whose threads torch's own
operations use; NULL: one thread. */
void mantissa_product(int kind, const void *weight, const void *x, void *y, int halves, const float *bias,
                      const float *row_scales, long per, long rows, long in, long out, unsigned threads, parallel team) {
  struct product p = {weight, x, y, bias, NULL, row_scales, per, rows, in, out, 0, 1, rows, halves, kind};
  shared(&p, threads, team);
}

/* The same of int8 codes, x's 128 larger. A weight's codes are followed by int32, 128 times the sum of each output's. */
void mantissa_integers(const void *weight, const void *x, void *y, int halves, const float *scales,
                       const float *row_scales, const float *bias, long rows, long in, long out, unsigned threads,
                       parallel team) {
  struct product p = {weight, x, y, bias, scales, row_scales, 0, rows, in, out, 0, 1, rows, halves, OF_INT8};
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
