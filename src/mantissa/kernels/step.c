/* One token for some rows through all layers of a dense decoder, in one call: what decoder.py and the kernels behind it
call one by one, in their order and with their rounding, so the bits are theirs. A decode step of one row is some 300 such
calls, whose entry from Python takes a quarter of its time.

All operands have `bytes` bytes, fp32 or bf16, and hold values of the format; a product's sums are fp32. */

#include "vectors.h"

void mantissa_product(int, const void *, const void *, void *, int, const float *, const float *, long, long, long, long,
                      unsigned, parallel);
void mantissa_integers(const void *, const void *, void *, int, const float *, const float *, const float *, long, long,
                       long, unsigned, parallel);
int mantissa_codes(int, const void *, uint8_t *, float *, long, long);
int mantissa_scaled(int, int, const void *, void *, float *, long, long, unsigned, parallel);
int mantissa_round(int, const float *, float *, long, unsigned, parallel);
void mantissa_norm(int, int, const void *, const void *, const void *, void *, void *, long, long, float, unsigned,
                   parallel);
void mantissa_swiglu(int, int, const void *, const void *, void *, long, long, long, unsigned, parallel);
void mantissa_rotate(int, int, const void *, const float *, const float *, void *, const long *, int, unsigned,
                     parallel);
int mantissa_attention(int, int, const void *, const void *, const void *, void *, const int64_t *, const long *, float,
                       unsigned, parallel);

enum { OF_INT8 = 4, CODES = 5, TOTAL = 7 }; /* of products.c's kinds */

struct projection {
  const void *weight; /* laid out; NULL: it is joined with the one before */
  const float *bias, *scales;
  long in, out, kind, scheme, per; /* scheme: of the activations' codes (rounding.c); -1: as they are; per: a scale */
};

struct layer {
  const void *norm, *query_norm, *key_norm, *second_norm; /* those of queries and keys: NULL where there are none */
  struct projection qkv[3], o, gate_up[2], down;
};

struct decoder {
  const struct layer *layers;
  const void *norm;
  long count, hidden, heads, kv_heads, size, inner, bytes, format, shared; /* shared: products from which threads share */
  float eps, scale;
};

struct step {
  void *x, *out;           /* rows x hidden: embeddings, overwritten; and the last norm */
  const float *cos, *sin;  /* rows x size */
  void **cache;            /* of each layer keys and values: slots x kv_heads x length x size */
  const int64_t *at, *seen; /* of each row: where its position is written, and how many it sees */
  long rows, length;
  unsigned threads;
  parallel team;
  char *room;
};

/* What a step writes between its operations, one after another in `room`. */
struct room {
  float *row_scales;
  char *normed, *coded, *qkv, *turned, *attended, *gate_up, *inner, *added;
};

static long larger_of(long a, long b) { return a > b ? a : b; }

static long lay_room(const struct decoder *d, long rows, char *from, struct room *room) {
  long heads = d->heads + 2 * d->kv_heads, widest = larger_of(larger_of(d->hidden, heads * d->size), 2 * d->inner), at = 0;
#define PART(name, count, bytes) \
  room->name = (void *)(from + at), at += ((count) * (bytes) + 63) / 64 * 64
  PART(row_scales, rows * (widest / 32 + 1), sizeof(float));
  PART(normed, rows * d->hidden, d->bytes);
  PART(coded, rows * widest, d->bytes);
  PART(qkv, rows * heads * d->size, d->bytes);
  PART(turned, rows * heads * d->size, d->bytes);
  PART(attended, rows * d->heads * d->size, d->bytes);
  PART(gate_up, 2 * rows * d->inner, d->bytes);
  PART(inner, rows * d->inner, d->bytes);
  PART(added, rows * d->hidden, d->bytes);
  return at;
}

/* Bytes of the room that a step of so many rows needs. */
long mantissa_room(const struct decoder *d, long rows) {
  struct room room;
  return lay_room(d, rows, NULL, &room);
}

static unsigned threads_of(const struct decoder *d, const struct step *s, long products) {
  return products >= d->shared ? s->threads : 1;
}

/* y = round(x w^T + b). Not 0: there is no memory. */
static int project(const struct decoder *d, const struct step *s, const struct room *room, const struct projection *p,
                   const void *x, void *y) {
  unsigned threads = threads_of(d, s, s->rows * p->in * p->out);
  int halves = d->bytes == 2;
  if (p->kind == OF_INT8) {
    if (mantissa_codes(d->bytes, x, (uint8_t *)room->coded, room->row_scales, s->rows, p->in)) return 1;
    mantissa_integers(p->weight, room->coded, y, halves, p->scales, room->row_scales, p->bias, s->rows, p->in, p->out,
                      threads, s->team);
  } else {
    float *scales = p->scheme >= 0 && (p->kind == CODES || p->kind == TOTAL) ? room->row_scales : NULL;
    if (p->scheme >= 0) {
      unsigned few = threads_of(d, s, s->rows * p->in);
      if (mantissa_scaled(p->scheme, d->bytes, x, room->coded, scales, s->rows, p->in, few, s->team)) return 1;
      x = room->coded;
    }
    mantissa_product(p->kind, p->weight, x, y, halves, p->bias, scales, p->per, s->rows, p->in, p->out, threads, s->team);
  }
  if (d->bytes == 4 && d->format != FP32)
    mantissa_round(d->format, y, y, s->rows * p->out, threads_of(d, s, s->rows * p->out), s->team);
  return 0;
}

/* The outputs of several projections of one x, row by row those of each after another where they are joined, else all
rows of the first, then all of the next. `from`: where the first row of each begins, in values; the rest is its step. */
static int project_all(const struct decoder *d, const struct step *s, const struct room *room,
                       const struct projection *parts, const long *widths, int count, const void *x, char *y, long *from,
                       long *step) {
  long at = 0, joined = parts[1].weight == NULL;
  for (int k = 0; k < count; k++) {
    from[k] = at, step[k] = joined ? parts[0].out : widths[k];
    if (!joined || k == 0)
      if (project(d, s, room, parts + k, x, y + at * d->bytes)) return 1;
    at += joined ? widths[k] : s->rows * widths[k];
  }
  return 0;
}

/* Keys or values of every row into the cache. */
static void append(const struct decoder *d, const struct step *s, char *cache, const char *from, long step) {
  long vector = d->size * d->bytes;
  for (long r = 0; r < s->rows; r++)
    for (long h = 0; h < d->kv_heads; h++)
      memcpy(cache + ((r * d->kv_heads + h) * s->length + s->at[r]) * vector, from + r * step + h * vector, vector);
}

static int attend(const struct decoder *d, const struct step *s, const struct room *room, const struct layer *layer,
                  long number) {
  long size = d->size, widths[3] = {d->heads * size, d->kv_heads * size, d->kv_heads * size}, from[3], step[3];
  if (project_all(d, s, room, layer->qkv, widths, 3, room->normed, room->qkv, from, step)) return 1;
  char *turned[2] = {room->turned, room->turned + s->rows * widths[0] * d->bytes};
  for (int k = 0; k < 2; k++) {
    long heads = k ? d->kv_heads : d->heads;
    const void *norm = k ? layer->key_norm : layer->query_norm;
    for (long r = 0; norm && r < s->rows; r++) {
      char *row = room->qkv + (from[k] + r * step[k]) * d->bytes;
      mantissa_norm(d->bytes, d->format, row, NULL, norm, row, row, heads, size, d->eps, 1, NULL);
    }
    long sizes[11] = {s->rows, heads, 1, size, step[k], size, step[k], size, widths[k], size, size};
    mantissa_rotate(d->bytes, d->format, room->qkv + from[k] * d->bytes, s->cos, s->sin, turned[k], sizes, 0, 1, NULL);
  }
  char *keys = s->cache[2 * number], *values = s->cache[2 * number + 1];
  append(d, s, keys, turned[1], widths[1] * d->bytes);
  append(d, s, values, room->qkv + from[2] * d->bytes, step[2] * d->bytes);
  long block = s->length * size, all = d->kv_heads * block;
  long sizes[15] = {s->rows, d->kv_heads, d->heads / d->kv_heads, 1, s->length, size, widths[0], size, size,
                    all, block, size, all, block, size};
  unsigned threads = threads_of(d, s, s->rows * d->heads * block);
  if (mantissa_attention(d->bytes, d->format, turned[0], keys, values, room->attended, s->seen, sizes, d->scale, threads,
                         s->team)) return 1;
  return project(d, s, room, &layer->o, room->attended, room->added);
}

static int feed_forward(const struct decoder *d, const struct step *s, const struct room *room,
                        const struct layer *layer) {
  long widths[2] = {d->inner, d->inner}, from[2], step[2];
  if (project_all(d, s, room, layer->gate_up, widths, 2, room->normed, room->gate_up, from, step)) return 1;
  const char *gate = room->gate_up + from[0] * d->bytes, *up = room->gate_up + from[1] * d->bytes;
  mantissa_swiglu(d->bytes, d->format, gate, up, room->inner, s->rows, d->inner, step[0], 1, NULL);
  return project(d, s, room, &layer->down, room->inner, room->added);
}

static void normed(const struct decoder *d, const struct step *s, void *x, const void *added, const void *weight, void *y) {
  mantissa_norm(d->bytes, d->format, x, added, weight, x, y, s->rows, d->hidden, d->eps, 1, NULL);
}

/* Not 0: there is no memory. */
int mantissa_step(const struct decoder *d, const struct step *s) {
  struct room room;
  lay_room(d, s->rows, s->room, &room);
  for (long n = 0; n < d->count; n++) {
    const struct layer *layer = d->layers + n;
    const void *added = n ? room.added : NULL;
    normed(d, s, s->x, added, layer->norm, room.normed);
    if (attend(d, s, &room, layer, n)) return 1;
    normed(d, s, s->x, room.added, layer->second_norm, room.normed);
    if (feed_forward(d, s, &room, layer)) return 1;
  }
  normed(d, s, s->x, room.added, d->norm, s->out);
  return 0;
}
