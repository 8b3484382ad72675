/* Rounding in one pass: to a half, and to the values of the codes that share a scale with their block. Each step is one
fp32 operation, those of the Python that defines it (precision/formats.py, schemes.py) in its order: the same bits. */

#include <stdlib.h>
#include "vectors.h"

/* Of one call, whose threads take `SPAN` values at a time. */
#define SPAN (1L << 15)
struct halves {
  const float *from;
  float *to; /* NULL: nothing is written, and `changes` says whether a value would be another */
  long count;
  enum format format;
  int changes;
};

/* Whether `LANES` values are other ones when they are rounded. */
INLINE int changes(vector x, const enum format format) {
  vector y = rounded(x, format);
#ifdef __AVX512F__
  return _mm512_cmpneq_epi32_mask(bits_of(x), bits_of(y)) != 0;
#else
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(bits_of(x), bits_of(y))) != -1;
#endif
}

INLINE void round_span(struct halves *h, long part, const enum format format) {
  const float *from = h->from + part * SPAN;
  long count = h->count - part * SPAN < SPAN ? h->count - part * SPAN : SPAN, at = 0, whole = count / LANES * LANES;
  float rest[LANES] = {0};
  memcpy(rest, from + whole, (count - whole) * sizeof *rest);
  if (!h->to) {
    int found = changes(load_fp32(rest), format);
    for (; at < whole && !found && !__atomic_load_n(&h->changes, __ATOMIC_RELAXED); at += LANES)
      found = changes(load_fp32(from + at), format);
    if (found) __atomic_store_n(&h->changes, 1, __ATOMIC_RELAXED);
    return;
  }
  float *to = h->to + part * SPAN;
  for (; at < whole; at += LANES) store(to + at, rounded(load_fp32(from + at), format));
  store(rest, rounded(load_fp32(rest), format));
  memcpy(to + at, rest, (count - at) * sizeof *rest);
}

static void round_part(void *of, long part) {
  struct halves *h = of;
  if (h->format == FP16) round_span(h, part, FP16);
  else round_span(h, part, BF16);
}

/* Each of `count` fp32 values to the nearest of a half, ties to even; `to` may be `from`. Whether `from` holds others,
where `to` is NULL. */
int mantissa_round(int format, const float *from, float *to, long count, unsigned threads, parallel team) {
  struct halves h = {from, to, count, format, 0};
  share(round_part, &h, (count + SPAN - 1) / SPAN, threads, team);
  return h.changes;
}

enum scheme { FP8, FP8_POWER_OF_TWO, MXFP8, MXFP4, NVFP4, INT8 };
enum { LARGEST_BLOCK = 128 };
static const float TINY = 0x1p-126f;

INLINE float of_word(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t word_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* The largest magnitude of whole vectors; NaN where there is one, for its bits exceed infinity's. */
INLINE float peak_of(const float *x, long count) {
  integers most = all_bits(0);
  for (long e = 0; e < count; e += LANES)
    most = larger_int(most, both(bits_of(load_fp32(x + e)), all_bits(0x7FFFFFFF)));
  return of_word(largest_lane(most));
}

/* y to the grid of a format of `mantissa` bits and a bias, |y| at most its largest or NaN: round_bounded_. */
INLINE vector on_grid(vector y, int bias, int mantissa) {
  integers power = larger_int(both(bits_of(y), all_bits(0x7F800000)), all_bits((128 - bias) << 23));
  vector number = of_bits(sum_of(power, all_bits(((23 - mantissa) << 23) + 0x400000)));
  return minus(plus(y, number), number);
}

/* What NaN is stays: the second operand is what min and max return then. */
INLINE vector clamped(vector y, float lowest, float largest) {
  return smaller(all(largest), larger(all(lowest), y));
}

INLINE float at_least(float value, float least) { return value < least ? least : value; } /* NaN stays */

/* values = grid(clamp(x / d)) * held, where d is a power of two by its reciprocal; nvfp4's and int8's d is one. */
INLINE void block(const float *x, float *y, long count, const enum scheme scheme, float d, float held) {
  if (scheme == FP8_POWER_OF_TWO || scheme == MXFP8 || scheme == MXFP4) d = 1.0f / d;
  for (long e = 0; e < count; e += LANES) {
    vector code, value = load_fp32(x + e);
    switch (scheme) {
      case FP8: code = on_grid(over(value, all(d)), 7, 3); break;
      case FP8_POWER_OF_TWO: code = on_grid(times(value, all(d)), 7, 3); break;
      case MXFP8: code = on_grid(clamped(times(value, all(d)), -448, 448), 7, 3); break;
      case MXFP4: code = on_grid(clamped(times(value, all(d)), -6, 6), 1, 1); break;
      case NVFP4: code = on_grid(clamped(times(value, all(d)), -6, 6), 1, 1); break;
      default: code = clamped(nearest(times(value, all(d))), -128, 127);
    }
    store(y + e, times(code, all(held)));
  }
}

INLINE float finite_or_nan(float value) { return value <= 0x1.fffffep127f ? value : of_word(0x7FC00000); }

/* nvfp4's e4m3 scale of a block. */
INLINE float second_of(float peak, float total) {
  float scale = peak / 6.0f / total, least = 0x1p-6f, rounded[LANES];
  scale = scale < least ? least : scale > 448.0f ? 448.0f : scale;
  store(rounded, on_grid(all(scale), 7, 3));
  return rounded[0];
}

/* The scales of one block of that largest magnitude: what its values are divided by, and what codes are multiplied by.
`total`: nvfp4's second. */
INLINE void scales_of(const enum scheme scheme, float peak, float total, float *d, float *held) {
  switch (scheme) {
    case FP8: case FP8_POWER_OF_TWO:
      *d = at_least(peak / 448.0f, TINY);
      if (scheme == FP8_POWER_OF_TWO && *d <= 0x1.fffffep127f) *d = of_word((word_of(*d) + 0x7FFFFF) & 0x7F800000);
      if (peak == 0) *d = 1;
      *held = *d;
      return;
    case MXFP8: case MXFP4: {
      int byte = (int)(word_of(peak) >> 23 & 0xFF) - (scheme == MXFP8 ? 8 : 2);
      byte = byte < 0 ? 0 : byte;
      *d = peak != peak ? peak : at_least(of_word((uint32_t)byte << 23), TINY);
      *held = byte == 0 ? 0x1p-127f : *d;
      return;
    }
    case NVFP4: {
      float second = second_of(peak, total);
      *d = 1.0f / total / second;
      *held = second * total;
      return;
    }
    default:
      *held = at_least(peak / 127.5f, TINY);
      *d = 1.0f / *held;
  }
}

INLINE long length_of(const enum scheme scheme) {
  return scheme == NVFP4 ? 16 : scheme == MXFP8 || scheme == MXFP4 ? 32 : LARGEST_BLOCK;
}

/* One row, whole blocks and a rest that zeros fill up. int8's scale is the row's, nvfp4's second too. With `scales`, not
of int8, y is what a product multiplies: codes, and the scale of each block; of nvfp4 codes times their e4m3, and the
second one. */
INLINE void row_of(const float *x, float *y, float *scales, long width, const enum scheme scheme) {
  long size = length_of(scheme), whole = width - width % size;
  float rest[LARGEST_BLOCK] = {0}, total = 0, peak, d, held;
  memcpy(rest, x + whole, (width - whole) * sizeof *rest);
  if (scheme == INT8 || scheme == NVFP4) {
    float one = peak_of(x, whole), two = peak_of(rest, size);
    peak = word_of(one) > word_of(two) ? one : two;
    peak = finite_or_nan(peak);
    total = at_least(peak / 2688.0f, 0x1p-110f);
    if (scheme == INT8) scales_of(scheme, peak, 0, &d, &held);
    if (scales) *scales = total;
  }
  for (long at = 0; at < width; at += size) {
    const float *from = at < whole ? x + at : rest;
    float *to = at < whole ? y + at : rest;
    if (scheme != INT8) {
      peak = peak_of(from, size);
      if (scheme != FP8 && scheme != FP8_POWER_OF_TWO) peak = finite_or_nan(peak);
      scales_of(scheme, peak, total, &d, &held);
    }
    if (scales && scheme == NVFP4) held = second_of(peak, total);
    else if (scales) *scales++ = held, held = 1;
    block(from, to, size, scheme, d, held);
  }
  memcpy(y + whole, rest, (width - whole) * sizeof *rest);
}

#define ROW(NAME, SCHEME) \
  static void NAME(const float *x, float *y, float *scales, long width) { row_of(x, y, scales, width, SCHEME); }
ROW(fp8_row, FP8)
ROW(fp8_power_row, FP8_POWER_OF_TWO)
ROW(mxfp8_row, MXFP8)
ROW(mxfp4_row, MXFP4)
ROW(nvfp4_row, NVFP4)
ROW(int8_row, INT8)
static void (*const OF_ROW[])(const float *, float *, float *, long) = {fp8_row,   fp8_power_row, mxfp8_row,
                                                                       mxfp4_row, nvfp4_row,     int8_row};

/* What threads share of one call: rows, `share` of them at a time. */
struct rows {
  const void *x;
  void *y;
  float *scales;
  long rows, width, share, taken;
  enum scheme scheme;
  int bytes, failed;
};

static void scaled_row(const struct rows *p, long r, float *room) {
  long size = p->scheme == NVFP4 ? p->width : length_of(p->scheme);
  float *scales = p->scales ? p->scales + r * ((p->width + size - 1) / size) : NULL;
  if (p->bytes == 4) {
    OF_ROW[p->scheme]((const float *)p->x + r * p->width, (float *)p->y + r * p->width, scales, p->width);
    return;
  }
  const uint16_t *x = (const uint16_t *)p->x + r * p->width;
  uint16_t *y = (uint16_t *)p->y + r * p->width;
  long whole = p->width / LANES * LANES;
  for (long e = 0; e < whole; e += LANES) store(room + e, load_bf16(x + e));
  for (long e = whole; e < p->width; e++) room[e] = of_word((uint32_t)x[e] << 16);
  OF_ROW[p->scheme](room, room, scales, p->width);
  for (long e = 0; e < whole; e += LANES) store_bf16(y + e, rounded(load_fp32(room + e), BF16));
  for (long e = whole; e < p->width; e++) y[e] = to_bf16(room[e]);
}

static void scale_rows(void *of) {
  struct rows *p = of;
  float *room = p->bytes == 4 ? NULL : malloc(p->width * sizeof *room);
  if (p->bytes != 4 && !room) {
    p->failed = 1;
    return;
  }
  long at;
  while ((at = __atomic_fetch_add(&p->taken, p->share, __ATOMIC_RELAXED)) < p->rows)
    for (long end = at + p->share < p->rows ? at + p->share : p->rows; at < end; at++) scaled_row(p, at, room);
  free(room);
}

/* The values of the codes of each row, in fp32, or in bf16 where it holds them: as x, of `bytes` bytes; with `scales`
what a product multiplies, and these. Not 0: no room. */
int mantissa_scaled(int scheme, int bytes, const void *x, void *y, float *scales, long rows, long width,
                    unsigned threads, parallel team) {
  struct rows p = {x, y, scales, rows, width, rows / (4 * threads) + 1, 0, scheme, bytes, 0};
  if (team && threads > 1)
    team(scale_rows, &p, threads, 0);
  else
    scale_rows(&p);
  return p.failed;
}

/* int8's codes of each row, 128 larger, and its scale. `bytes` of an x: fp32 or bf16. */
int mantissa_codes(int bytes, const void *x, uint8_t *codes, float *scales, long rows, long width) {
  float *room = malloc((width + LANES) * sizeof *room), d;
  if (!room) return 1;
  for (long e = width; e < width + LANES; e++) room[e] = 0;
  long whole = (width + LANES - 1) / LANES * LANES;
  for (long r = 0; r < rows; r++, codes += width) {
    if (bytes == 4) memcpy(room, (const float *)x + r * width, width * sizeof *room);
    else
      for (long e = 0; e < width; e++) room[e] = of_word((uint32_t)((const uint16_t *)x)[r * width + e] << 16);
    scales_of(INT8, finite_or_nan(peak_of(room, whole)), 0, &d, scales + r);
    block(room, room, whole, INT8, d, 1.0f);
    for (long e = 0; e < width; e++) codes[e] = (int)room[e] + 128;
    for (long e = width; e < whole; e++) room[e] = 0;
  }
  free(room);
  return 0;
}
