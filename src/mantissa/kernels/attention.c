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
enum { TOGETHER = LANES / 4 }; /* rows of a product whose sums registers hold */

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

/* out[r] += p[r][j] v[j] of `rows` rows over the j `from` to `to`, `width` vectors of features at a time; p's rows lie
`padded` values apart, and its columns `along`. */
INLINE void weighed(const int rows, const int width, const float *p, long padded, long along, const float *v, long step,
                    long from, long to, float *out, long size, long d) {
  vector sum[4][4];
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < width; k++) sum[r][k] = load_fp32(out + r * size + d + k * LANES);
  for (long j = from; j < to; j++)
    UNROLL(int k = 0; k < width; k++) {
      vector value = load_fp32(v + j * step + d + k * LANES);
      UNROLL(int r = 0; r < rows; r++) sum[r][k] = fused(all(p[r * padded + j * along]), value, sum[r][k]);
    }
  UNROLL(int r = 0; r < rows; r++)
  UNROLL(int k = 0; k < width; k++) store(out + r * size + d + k * LANES, sum[r][k]);
}

INLINE void weighed_all(const int rows, const float *p, long padded, long along, const float *v, long step, long from,
                        long to, float *out, long size) {
  long d = 0;
  for (; d + 4 * LANES <= size; d += 4 * LANES) weighed(rows, 4, p, padded, along, v, step, from, to, out, size, d);
  for (; d + 2 * LANES <= size; d += 2 * LANES) weighed(rows, 2, p, padded, along, v, step, from, to, out, size, d);
  for (; d < size; d += LANES) weighed(rows, 1, p, padded, along, v, step, from, to, out, size, d);
}

/* Keys that row r sees of some rows, `group` to a query, of which the first sees `first`. */
#define SEEN(r) (first + (r) / group)

/* How many of LANES keys from `first` on a row sees that sees `seen`. */
INLINE long among(long seen, long first) { return seen <= first ? 0 : seen - first < LANES ? seen - first : LANES; }

/* The scores of `rows` rows (1 or 2) by LANES keys: half of the keys at a time, so that the sums stay in registers. */
INLINE void scores_of(const int rows, const float *x, const float *keys, long step, long size, float scale, float *to,
                      long padded) {
  vector sum[2][LANES];
  UNROLL(int half = 0; half < LANES; half += LANES / 2) {
    vector part[2][LANES / 2];
    UNROLL(int key = 0; key < LANES / 2; key++) part[0][key] = part[1][key] = zero();
    for (long d = 0; d < size; d += LANES) {
      vector one = load_fp32(x + d), other = rows == 2 ? load_fp32(x + size + d) : one;
      UNROLL(int key = 0; key < LANES / 2; key++) {
        vector value = load_fp32(keys + (half + key) * step + d);
        part[0][key] = fused(one, value, part[0][key]);
        if (rows == 2) part[1][key] = fused(other, value, part[1][key]);
      }
    }
    UNROLL(int key = 0; key < LANES / 2; key++) sum[0][half + key] = part[0][key], sum[1][half + key] = part[1][key];
  }
  store(to, times(summed(sum[0]), all(scale)));
  if (rows == 2) store(to + padded, times(summed(sum[1]), all(scale)));
}

/* to[r][j + key] = scale * x[r] . keys[key] of LANES keys from the j-th on, of the rows that see the j-th. */
static void products(const float *x, long rows, long first, long group, const float *keys, long step, long j, long size,
                     float scale, float *to, long padded) {
  long r = j < first ? 0 : (j - first + 1) * group;
  for (; r + 2 <= rows; r += 2) scores_of(2, x + r * size, keys, step, size, scale, to + r * padded + j, padded);
  if (r < rows) scores_of(1, x + r * size, keys, step, size, scale, to + r * padded + j, padded);
}

/* Some queries of the heads that share keys. Row r is query r / group; `room`: scores, queries, results and a tile. */
static void of_rows(const struct attention *a, long sequence, long head, long start, float *room) {
  long count = a->queries - start < a->at_once ? a->queries - start : a->at_once, rows = count * a->group, step;
  long all_seen = a->seen ? a->seen[sequence] : a->keys, size = a->size, group = a->group;
  long first = all_seen - (a->queries - start) + 1, last = first + count - 1; /* seen by the first and the last query */
  float *scores = room, *q = scores + a->group * a->at_once * a->padded, *out = q + a->group * a->at_once * size;
  float *wide = out + a->group * a->at_once * size;
  long k = sequence * a->of_k[SEQUENCE] + head * a->of_k[HEAD], v = sequence * a->of_v[SEQUENCE] + head * a->of_v[HEAD];
  for (long r = 0; r < rows; r++)
    widen(a, a->q, sequence * a->of_q[SEQUENCE] + (head * a->group + r % a->group) * a->of_q[HEAD] +
                       (start + r / a->group) * a->of_q[POSITION], q + r * size);
  for (long j = 0; j < last; j += LANES) {
    ask_for(a, a->k, k + j * a->of_k[POSITION], a->of_k[POSITION]);
    const float *keys = tile(a, a->k, k + j * a->of_k[POSITION], a->of_k[POSITION], among(last, j), wide, &step);
    products(q, rows, first, group, keys, step, j, size, a->scale, scores, a->padded);
  }
  for (long r = 0; r < rows; r++) softmax(scores + r * a->padded, SEEN(r), a->format);
  memset(out, 0, rows * size * sizeof *out);
  for (long j = 0; j < last; j += LANES) {
    ask_for(a, a->v, v + j * a->of_v[POSITION], a->of_v[POSITION]);
    const float *values = tile(a, a->v, v + j * a->of_v[POSITION], a->of_v[POSITION], among(last, j), wide, &step);
    for (long r = 0; r < rows; r += TOGETHER) { /* a later row sees as many or more */
      const float *p = scores + r * a->padded + j;
      long count = rows - r < TOGETHER ? rows - r : TOGETHER, alike = count == TOGETHER ? among(SEEN(r), j) : 0;
      if (alike) weighed_all(TOGETHER, p, a->padded, 1, values, step, 0, alike, out + r * size, size);
      for (long i = 0; i < count; i++)
        if (among(SEEN(r + i), j) > alike)
          weighed_all(1, p + i * a->padded, a->padded, 1, values, step, alike, among(SEEN(r + i), j), out + (r + i) * size,
                      size);
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

static long queries_at_once(long scores, long queries) {
  long fit = AT_ONCE / scores;
  return fit < 1 ? 1 : fit > queries ? queries : fit;
}

/* Some threads at `work`, which finds `values` of room for each of them at `*room`. Not 0: there is no memory. */
static int begin(void (*work)(void *), void *of, float **room, long values, unsigned threads, parallel team) {
  if (!team) threads = 1;
  if (posix_memalign((void **)room, 64, threads * values * sizeof **room)) return 1;
  if (threads > 1) team(work, of, threads, 0);
  else work(of);
  free(*room);
  return 0;
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
  a.at_once = queries_at_once(a.padded * a.group, a.queries);
  return begin(work, &a, &a.room, room_of(&a), threads, team);
}

/* Attention of packed positions, and its gradients: sequences that share their prompt share its positions too. A unit is
a prompt's key head: the prompt's queries, and then those of each response to it. Which sequences stand in a batch changes
nothing of a row, as above. */

struct packed {
  const char *q, *k, *v, *out, *grad; /* operands of `bytes` bytes; heads and positions at `of`'s strides */
  char *to, *of_q, *of_k, *of_v;      /* results, positions x heads x size, contiguous */
  const long *prompts, *responses;    /* of a prompt: where it begins, its length, the first of its responses and the
                                         one after the last; of a response: where it begins, and its length */
  long units, kv_heads, group, size, of[5][2];
  float scale;
  enum format format;
  int bytes;
  long longest, queries, at_once; /* keys of the longest sequence, in whole vectors; queries of the longest part */
  float *room;                    /* of each thread */
  long taken, entered;
};

enum { Q, K, V, OUT, GRAD };
#define STRIDE(p, which, axis) (p)->of[which][axis] /* axis 0: heads, 1: positions */

/* `count` positions of one head from the one at `start`, widened, one after another. */
static void gather(const struct packed *p, const char *from, int which, long head, long start, long count, float *to) {
  for (long t = 0; t < count; t++)
    for (long d = 0; d < p->size; d += LANES)
      store(to + t * p->size + d,
            read(from, head * STRIDE(p, which, 0) + (start + t) * STRIDE(p, which, 1) + d, p->bytes));
}

/* The same back into a result of so many heads, times `scale` and rounded. */
static void scatter(const struct packed *p, const float *from, float scale, char *to, long heads, long head, long start,
                    long count) {
  for (long t = 0; t < count; t++)
    for (long d = 0; d < p->size; d += LANES)
      write(to, ((start + t) * heads + head) * p->size + d,
            rounded(times(load_fp32(from + t * p->size + d), all(scale)), p->format), p->bytes);
}

struct span {
  long start, queries, keys; /* the queries are the last of the keys */
};

static struct attention within(const struct packed *p, const struct span *s, const float *q, const float *k,
                               const float *v, float *out) {
  struct attention a = {.q = (const char *)q, .k = (const char *)k, .v = (const char *)v, .out = out, .sequences = 1,
                        .kv_heads = 1, .group = p->group, .queries = s->queries, .keys = s->keys, .size = p->size,
                        .of_q = {0, s->queries * p->size, p->size}, .of_k = {0, 0, p->size}, .of_v = {0, 0, p->size},
                        .scale = p->scale, .format = p->format, .bytes = 4, .at_once = p->at_once,
                        .padded = (s->keys + LANES - 1) / LANES * LANES};
  return a;
}

static void forward_of(const struct packed *p, const struct span *s, long head, float *k, float *v, float *room) {
  long values = p->group * s->queries * p->size;
  float *q = room, *out = q + values;
  for (long g = 0; g < p->group; g++)
    gather(p, p->q, Q, head * p->group + g, s->start, s->queries, q + g * s->queries * p->size);
  struct attention a = within(p, s, q, k, v, out);
  for (long start = 0; start < s->queries; start += a.at_once) of_rows(&a, 0, 0, start, out + values);
  for (long g = 0; g < p->group; g++)
    scatter(p, out + g * s->queries * p->size, 1.0f, p->to, p->kv_heads * p->group, head * p->group + g, s->start,
            s->queries);
}

/* dv += p^T do, dk += ds^T q, dq = ds k, of rows that see `first` and more keys, the last of them `last`. */
static void accumulate(const struct packed *p, const float *x, const float *of, long rows, long first, long last,
                       long padded, float *to) {
  long group = p->group, size = p->size;
  for (long j = 0; j < last; j += TOGETHER) {
    long from = j < first ? 0 : (j - first + 1) * group; /* the first row that sees key j */
    if (j + TOGETHER <= last) weighed_all(TOGETHER, x + j, 1, padded, of, size, from, rows, to + j * size, size);
    else
      for (long i = j; i < last; i++) weighed_all(1, x + i, 1, padded, of, size, from, rows, to + i * size, size);
  }
}

static void backward_of(const struct packed *p, const struct span *s, long head, const float *k, const float *v, float *dk,
                        float *dv, float *room) {
  long group = p->group, size = p->size, most = group * p->at_once;
  long padded = (s->keys + LANES - 1) / LANES * LANES + LANES; /* rows that are read column by column share no lines */
  float *q = room, *grad = q + most * size, *dq = grad + most * size, *line = dq + most * size;
  float *scores = line + p->at_once * size, *slopes = scores + most * padded;
  for (long start = 0; start < s->queries; start += p->at_once) {
    long count = s->queries - start < p->at_once ? s->queries - start : p->at_once, rows = count * group;
    long first = s->keys - s->queries + start + 1, last = first + count - 1, at = s->start + start;
    float delta[rows];
    for (long g = 0; g < group; g++) { /* row r is query r / group */
#define ROWS(to) for (long t = 0; t < count; t++) memcpy(to + (t * group + g) * size, line + t * size, size * sizeof *line)
      gather(p, p->q, Q, head * group + g, at, count, line);
      ROWS(q);
      gather(p, p->grad, GRAD, head * group + g, at, count, line);
      ROWS(grad);
      gather(p, p->out, OUT, head * group + g, at, count, line);
      for (long t = 0; t < count; t++) {
        vector sum = zero();
        for (long d = 0; d < size; d += LANES)
          sum = fused(load_fp32(line + t * size + d), load_fp32(grad + (t * group + g) * size + d), sum);
        delta[t * group + g] = lanes_sum(sum);
      }
    }
    for (long j = 0; j < last; j += LANES) { /* behind the last key there are zeros */
      products(q, rows, first, group, k + j * size, size, j, size, p->scale, scores, padded);
      products(grad, rows, first, group, v + j * size, size, j, size, 1.0f, slopes, padded);
    }
    for (long r = 0; r < rows; r++) {
      float *x = scores + r * padded, *slope = slopes + r * padded;
      long whole = (SEEN(r) + LANES - 1) / LANES * LANES;
      softmax(x, SEEN(r), FP32);
      for (long j = 0; j < whole; j += LANES) {
        vector each = load_fp32(x + j);
        store(slope + j, rounded(times(minus(load_fp32(slope + j), all(delta[r])), each), p->format));
        store(x + j, rounded(each, p->format));
      }
      memset(x + whole, 0, (padded - whole) * sizeof *x);
      memset(slope + whole, 0, (padded - whole) * sizeof *x);
    }
    memset(dq, 0, rows * size * sizeof *dq);
    for (long r = 0; r < rows; r += TOGETHER) {
      const float *slope = slopes + r * padded;
      if (r + TOGETHER <= rows)
        weighed_all(TOGETHER, slope, padded, 1, k, size, 0, SEEN(r + TOGETHER - 1), dq + r * size, size);
      else
        for (long i = 0; i < rows - r; i++)
          weighed_all(1, slope + i * padded, padded, 1, k, size, 0, SEEN(r + i), dq + (r + i) * size, size);
    }
    accumulate(p, scores, grad, rows, first, last, padded, dv);
    accumulate(p, slopes, q, rows, first, last, padded, dk);
    for (long g = 0; g < group; g++)
      for (long t = 0; t < count; t++)
        scatter(p, dq + (t * group + g) * size, p->scale, p->of_q, p->kv_heads * group, head * group + g, at + t, 1);
  }
}

/* Values of a thread's room: keys, values and their gradients, and what the parts above take of it. */
static long packed_room(const struct packed *p) {
  long most = p->group * p->at_once;
  long forward = 2 * p->group * p->queries * p->size + most * (p->longest + 2 * p->size) + LANES * p->size;
  long backward = (3 * most + p->at_once) * p->size + 2 * most * (p->longest + LANES);
  return (4 * p->longest * p->size + (forward > backward ? forward : backward) + 15) / 16 * 16;
}

static void packed_part(const struct packed *p, long part, float *room) {
  const long *prompt = p->prompts + part / p->kv_heads * 4;
  long head = part % p->kv_heads, size = p->size, own = prompt[1], all = p->longest * size;
  float *k = room, *v = k + all, *dk = v + all, *dv = dk + all;
  gather(p, p->k, K, head, prompt[0], own, k);
  gather(p, p->v, V, head, prompt[0], own, v);
  memset(dk, 0, 2 * all * sizeof *dk);
  for (long r = prompt[2] - 1; r < prompt[3]; r++) { /* the prompt itself, and its responses */
    struct span span = {prompt[0], own, own};
    if (r >= prompt[2]) {
      const long *response = p->responses + 2 * r;
      span.start = response[0], span.queries = response[1], span.keys = own + response[1];
    }
    long from = (span.keys - span.queries) * size, padded = (span.keys + LANES - 1) / LANES * LANES;
    if (!span.queries) continue;
    if (from) {
      gather(p, p->k, K, head, span.start, span.queries, k + from);
      gather(p, p->v, V, head, span.start, span.queries, v + from);
    }
    memset(k + span.keys * size, 0, (padded - span.keys) * size * sizeof *k);
    memset(v + span.keys * size, 0, (padded - span.keys) * size * sizeof *v);
    if (!p->grad) {
      forward_of(p, &span, head, k, v, dv + all);
      continue;
    }
    if (from) {
      memset(dk + from, 0, span.queries * size * sizeof *dk);
      memset(dv + from, 0, span.queries * size * sizeof *dv);
    }
    backward_of(p, &span, head, k, v, dk, dv, dv + all);
    if (!from) continue;
    scatter(p, dk + from, p->scale, p->of_k, p->kv_heads, head, span.start, span.queries);
    scatter(p, dv + from, 1.0f, p->of_v, p->kv_heads, head, span.start, span.queries);
  }
  if (!p->grad) return;
  scatter(p, dk, p->scale, p->of_k, p->kv_heads, head, prompt[0], own);
  scatter(p, dv, 1.0f, p->of_v, p->kv_heads, head, prompt[0], own);
}

static void packed_work(void *of) {
  struct packed *p = of;
  float *room = p->room + __atomic_fetch_add(&p->entered, 1, __ATOMIC_RELAXED) * packed_room(p);
  long at;
  while ((at = __atomic_fetch_add(&p->taken, 1, __ATOMIC_RELAXED)) < p->units * p->kv_heads) packed_part(p, at, room);
}

/* `prompts` (4 each) and `responses` (2 each): as in struct packed. `sizes`: prompts, key heads, queries' heads to each,
size, keys of the longest sequence, and queries of the longest part. `strides`: of q, k, v, out and grad, by head and
position. With `grad` the gradients of q, k and v, else the result, to `to`. Not 0: there is no memory. */
int mantissa_packed_attention(int bytes, int format, const void *const *given, void *const *results,
                              const long *prompts, const long *responses, const long *sizes, const long *strides,
                              float scale, unsigned threads, parallel team) {
  struct packed p = {.q = given[Q], .k = given[K], .v = given[V], .out = given[OUT], .grad = given[GRAD],
                     .to = results[0], .of_q = results[0], .of_k = results[1], .of_v = results[2], .prompts = prompts,
                     .responses = responses, .units = sizes[0], .kv_heads = sizes[1], .group = sizes[2],
                     .size = sizes[3], .scale = scale, .format = format, .bytes = bytes, .queries = sizes[5]};
  memcpy(p.of, strides, sizeof p.of);
  p.longest = (sizes[4] + LANES - 1) / LANES * LANES;
  p.at_once = queries_at_once(p.longest * p.group, p.queries);
  return begin(packed_work, &p, &p.room, packed_room(&p), threads, team);
}
