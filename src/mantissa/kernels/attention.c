/* round(round(softmax(scale q k^T)) v) of queries against the keys before them, for the processor at hand.

A row is one query of one head, and what it gives depends on its query, its keys and values alone, not on which rows
stand beside it or what follows: every sum is over a row's own terms in one order. A score is LANES partial sums over
the head's features, which a tree adds; the softmax's total is LANES partial sums over the keys, which a tree adds; a
result is one sum over the keys in order. Keys are read LANES at a time, for all rows that share them. */

#include <math.h>
#include <stdlib.h>
#include "vectors.h"

enum { SEQUENCE, HEAD, POSITION };
#define AT_ONCE (1 << 16) /* scores that a thread holds at a time: 256 kB */
#define AHEAD (4 * LANES) /* keys that are asked for before their turn */

struct attention {
  const char *q, *k, *v; /* operands of `bytes` bytes: fp32, or bf16 */
  void *out;             /* sequences x heads x queries x size, contiguous, of the same */
  const int64_t *seen;   /* keys that a sequence's last query sees; NULL: all of them */
  long sequences, kv_heads, group, queries, keys, size;
  long of_q[3], of_k[3], of_v[3]; /* strides, in values */
  float scale;
  enum format format;
  int bytes;
  long at_once, padded; /* queries of a head at a time, and keys in whole vectors */
  float *room;          /* of each thread: scores, queries, results and a tile */
  long taken, entered;
};

/* Lane j of the result: the sum of the lanes of x[j]. */
INLINE vector summed(vector *x) {
#ifdef __AVX512F__
  UNROLL(int j = 0; j < 8; j++)
  x[j] = plus(_mm512_unpacklo_ps(x[2 * j], x[2 * j + 1]), _mm512_unpackhi_ps(x[2 * j], x[2 * j + 1]));
#define HALVES(f, a, b) _mm512_castpd_ps(f(_mm512_castps_pd(a), _mm512_castps_pd(b)))
  UNROLL(int j = 0; j < 4; j++)
  x[j] = plus(HALVES(_mm512_unpacklo_pd, x[2 * j], x[2 * j + 1]), HALVES(_mm512_unpackhi_pd, x[2 * j], x[2 * j + 1]));
#define QUARTERS(a, b) plus(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD))
  return QUARTERS(QUARTERS(x[0], x[1]), QUARTERS(x[2], x[3]));
#else
  UNROLL(int j = 0; j < 4; j++)
  x[j] = plus(_mm256_unpacklo_ps(x[2 * j], x[2 * j + 1]), _mm256_unpackhi_ps(x[2 * j], x[2 * j + 1]));
#define HALVES(f, a, b) _mm256_castpd_ps(f(_mm256_castps_pd(a), _mm256_castps_pd(b)))
  UNROLL(int j = 0; j < 2; j++)
  x[j] = plus(HALVES(_mm256_unpacklo_pd, x[2 * j], x[2 * j + 1]), HALVES(_mm256_unpackhi_pd, x[2 * j], x[2 * j + 1]));
  return plus(_mm256_permute2f128_ps(x[0], x[1], 0x20), _mm256_permute2f128_ps(x[0], x[1], 0x31));
#endif
}

static void widen(const struct attention *a, const char *from, long at, float *to) {
  for (long d = 0; d < a->size; d += LANES) store(to + d, read(from, at + d, a->bytes));
}

/* LANES keys or values from the one at `at`, `count` of them real and zeros behind: where they lie, or widened. */
INLINE const float *tile(const struct attention *a, const char *from, long at, long stride, long count, float *room,
                         long *step) {
  *step = a->bytes == 4 && count == LANES ? stride : a->size;
  if (a->bytes == 4 && count == LANES) return (const float *)from + at;
  for (long j = 0; j < count; j++) widen(a, from, at + j * stride, room + j * a->size);
  memset(room + count * a->size, 0, (LANES - count) * a->size * sizeof *room);
  return room;
}

/* Ask for keys or values before their turn: memory takes long to answer. */
INLINE void ask_for(const struct attention *a, const char *from, long at, long stride) {
  for (long j = AHEAD; j < AHEAD + LANES; j++)
    for (long b = 0; b < a->size * a->bytes; b += 64) _mm_prefetch(from + (at + j * stride) * a->bytes + b, _MM_HINT_T0);
}

/* The scores of one row become its probabilities, zeros beyond those it sees. */
static void softmax(float *scores, long seen, enum format format) {
  long whole = (seen + LANES - 1) / LANES * LANES;
  for (long j = seen; j < whole; j++) scores[j] = -INFINITY;
  float lanes[LANES], most = -INFINITY;
  vector highest = all(-INFINITY), total = zero();
  for (long j = 0; j < whole; j += LANES) highest = larger(load_fp32(scores + j), highest);
  store(lanes, highest);
  for (int j = 0; j < LANES; j++) most = lanes[j] > most ? lanes[j] : most;
  for (long j = 0; j < whole; j += LANES) {
    vector each = exponential(minus(load_fp32(scores + j), all(most)));
    store(scores + j, each);
    total = plus(total, each);
  }
  vector sum = all(lanes_sum(total));
  for (long j = 0; j < whole; j += LANES) store(scores + j, rounded(over(load_fp32(scores + j), sum), format));
}

/* out += p v of `rows` rows over the values `from` to `to` of a tile, `width` vectors of features at a time. */
INLINE void weighed(const int rows, const int width, const float *p, long padded, const float *v, long step, long from,
                    long to, float *out, long size, long d) {
  vector sum[2][4];
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < width; k++) sum[r][k] = load_fp32(out + r * size + d + k * LANES);
  for (long j = from; j < to; j++)
    UNROLL(int k = 0; k < width; k++) {
      vector value = load_fp32(v + j * step + d + k * LANES);
      UNROLL(int r = 0; r < rows; r++) sum[r][k] = fused(all(p[r * padded + j]), value, sum[r][k]);
    }
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < width; k++) store(out + r * size + d + k * LANES, sum[r][k]);
}

INLINE void weighed_all(const int rows, const float *p, long padded, const float *v, long step, long from, long to,
                        float *out, long size) {
  long d = 0;
  for (; d + 4 * LANES <= size; d += 4 * LANES) weighed(rows, 4, p, padded, v, step, from, to, out, size, d);
  for (; d < size; d += LANES) weighed(rows, 1, p, padded, v, step, from, to, out, size, d);
}

/* How many of LANES keys from `first` on a row sees that sees `seen`. */
INLINE long among(long seen, long first) { return seen <= first ? 0 : seen - first < LANES ? seen - first : LANES; }

/* Some queries of the heads that share keys. Row r is query r / group; `room`: scores, queries, results and a tile. */
static void of_rows(const struct attention *a, long sequence, long head, long start, float *room) {
  long count = a->queries - start < a->at_once ? a->queries - start : a->at_once, rows = count * a->group, step;
  long all_seen = a->seen ? a->seen[sequence] : a->keys, size = a->size;
  long first = all_seen - (a->queries - start) + 1, last = first + count - 1; /* seen by the first and the last query */
  float *scores = room, *q = scores + a->group * a->at_once * a->padded, *out = q + a->group * a->at_once * size;
  float *wide = out + a->group * a->at_once * size;
  long k = sequence * a->of_k[SEQUENCE] + head * a->of_k[HEAD], v = sequence * a->of_v[SEQUENCE] + head * a->of_v[HEAD];
#define SEEN(r) (first + (r) / a->group)
  for (long r = 0; r < rows; r++)
    widen(a, a->q, sequence * a->of_q[SEQUENCE] + (head * a->group + r % a->group) * a->of_q[HEAD] +
                       (start + r / a->group) * a->of_q[POSITION], q + r * size);
  for (long j = 0; j < last; j += LANES) {
    ask_for(a, a->k, k + j * a->of_k[POSITION], a->of_k[POSITION]);
    const float *keys = tile(a, a->k, k + j * a->of_k[POSITION], a->of_k[POSITION], among(last, j), wide, &step);
    for (long r = 0; r < rows; r++) {
      if (SEEN(r) <= j) continue;
      vector sum[LANES];
      UNROLL(int key = 0; key < LANES; key++) sum[key] = zero();
      for (long d = 0; d < size; d += LANES) {
        vector one = load_fp32(q + r * size + d);
        UNROLL(int key = 0; key < LANES; key++) sum[key] = fused(one, load_fp32(keys + key * step + d), sum[key]);
      }
      store(scores + r * a->padded + j, times(summed(sum), all(a->scale)));
    }
  }
  for (long r = 0; r < rows; r++) softmax(scores + r * a->padded, SEEN(r), a->format);
  memset(out, 0, rows * size * sizeof *out);
  for (long j = 0; j < last; j += LANES) {
    ask_for(a, a->v, v + j * a->of_v[POSITION], a->of_v[POSITION]);
    const float *values = tile(a, a->v, v + j * a->of_v[POSITION], a->of_v[POSITION], among(last, j), wide, &step);
    for (long r = 0; r < rows; r += 2) { /* a later row sees as many or more */
      const float *p = scores + r * a->padded + j;
      long one = among(SEEN(r), j), other = r + 1 < rows ? among(SEEN(r + 1), j) : 0;
      if (other) weighed_all(2, p, a->padded, values, step, 0, one, out + r * size, size);
      else weighed_all(1, p, a->padded, values, step, 0, one, out + r * size, size);
      if (other > one)
        weighed_all(1, p + a->padded, a->padded, values, step, one, other, out + (r + 1) * size, size);
    }
  }
  for (long r = 0; r < rows; r++) {
    long at = ((sequence * a->kv_heads + head) * a->group + r % a->group) * a->queries + start + r / a->group;
    for (long d = 0; d < size; d += LANES)
      write(a->out, at * size + d, rounded(load_fp32(out + r * size + d), a->format), a->bytes);
  }
}

static long room_of(const struct attention *a) {
  return (a->group * a->at_once * (a->padded + 2 * a->size) + LANES * a->size + 15) / 16 * 16;
}

static void work(void *of) {
  struct attention *a = of;
  long blocks = (a->queries + a->at_once - 1) / a->at_once, units = a->sequences * a->kv_heads * blocks, at;
  float *room = a->room + __atomic_fetch_add(&a->entered, 1, __ATOMIC_RELAXED) * room_of(a);
  while ((at = __atomic_fetch_add(&a->taken, 1, __ATOMIC_RELAXED)) < units)
    of_rows(a, at / blocks / a->kv_heads, at / blocks % a->kv_heads, at % blocks * a->at_once, room);
}

/* `sizes`: sequences, key heads, queries' heads to each, queries, keys, size, and the strides of q, k and v. Not 0:
there is no memory. */
int mantissa_attention(int bytes, int format, const void *q, const void *k, const void *v, void *out,
                        const int64_t *seen, const long *sizes, float scale, unsigned threads, parallel team) {
  struct attention a = {.q = q, .k = k, .v = v, .out = out, .seen = seen, .sequences = sizes[0], .kv_heads = sizes[1],
                        .group = sizes[2], .queries = sizes[3], .keys = sizes[4], .size = sizes[5], .scale = scale,
                        .format = format, .bytes = bytes};
  memcpy(a.of_q, sizes + 6, sizeof a.of_q);
  memcpy(a.of_k, sizes + 9, sizeof a.of_k);
  memcpy(a.of_v, sizes + 12, sizeof a.of_v);
  a.padded = (a.keys + LANES - 1) / LANES * LANES;
  a.at_once = AT_ONCE / (a.padded * a.group);
  a.at_once = a.at_once < 1 ? 1 : a.at_once > a.queries ? a.queries : a.at_once;
  if (!team) threads = 1;
  if (posix_memalign((void **)&a.room, 64, threads * room_of(&a) * sizeof *a.room)) return 1;
  if (threads > 1) team(work, &a, threads, 0);
  else work(&a);
  free(a.room);
  return 0;
}
