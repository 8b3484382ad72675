/* What a decoder computes row by row beside products and attention: norms, rotation, SwiGLU, and their gradients. In fp32,
each result rounded where the kernels' contract says (interface.py). Operands and results have `bytes` bytes, fp32 or
bf16, and hold values of the format; a row's width is whole vectors. Threads take AT_A_TIME rows after another. */

#include <math.h>
#include "vectors.h"

enum { AT_A_TIME = 32 };
INLINE long parts_of(long rows) { return (rows + AT_A_TIME - 1) / AT_A_TIME; }
INLINE long end_of(long start, long rows) { return start + AT_A_TIME < rows ? start + AT_A_TIME : rows; }

/* Call a function whose first argument is the size of an operand, with that size as a constant. */
#define OF_BYTES(bytes, function, ...) ((bytes) == 4 ? function(4, __VA_ARGS__) : function(2, __VA_ARGS__))

struct norm {
  int bytes;
  enum format format;
  const void *x, *added, *weight, *grad, *grad_total;
  void *total, *y;
  float *of_weight; /* of each part: its gradient */
  long rows, width;
  float eps;
};

/* y = round(w * round(x * s)), s = 1 / sqrt(mean(x^2) + eps). Where `added` is given, x + added, rounded and written to
`total`, stands for x. */
INLINE void norms(const int bytes, const struct norm *n, long part) {
  long width = n->width;
  for (long at = part * AT_A_TIME * width; at < end_of(part * AT_A_TIME, n->rows) * width; at += width) {
    vector squares = zero();
    for (long e = at; e < at + width; e += LANES) {
      vector value = read(n->x, e, bytes);
      if (n->added) {
        value = rounded(plus(value, read(n->added, e, bytes)), n->format);
        write(n->total, e, value, bytes);
      }
      squares = fused(value, value, squares);
    }
    vector scale = all(1.0f / sqrtf(lanes_sum(squares) / width + n->eps));
    for (long e = 0; e < width; e += LANES) {
      vector value = rounded(times(read(n->added ? n->total : n->x, at + e, bytes), scale), n->format);
      write(n->y, at + e, rounded(times(value, read(n->weight, e, bytes)), n->format), bytes);
    }
  }
}

static void norms_of(void *of, long part) {
  const struct norm *n = of;
  OF_BYTES(n->bytes, norms, n, part);
}

void mantissa_norm(int bytes, int format, const void *x, const void *added, const void *weight, void *total, void *y,
                   long rows, long width, float eps, unsigned threads, parallel team) {
  struct norm n = {.bytes = bytes, .format = format, .x = x, .added = added, .weight = weight, .total = total, .y = y,
                   .rows = rows, .width = width, .eps = eps};
  share(norms_of, &n, parts_of(rows), threads, team);
}

/* With g = round(grad), n = x * s, dn = round(g * w): y = round(s * (dn - n * mean(dn * n))), the gradient of x, to which
`grad_total`, where it is given, is added and the sum rounded; and the sum over the part's rows of round(g * round(n)). */
INLINE void norm_gradients(const int bytes, const struct norm *n, long part) {
  long width = n->width;
  float *of_weight = n->of_weight + part * width;
  memset(of_weight, 0, width * sizeof *of_weight);
  for (long at = part * AT_A_TIME * width; at < end_of(part * AT_A_TIME, n->rows) * width; at += width) {
    vector squares = zero(), products = zero();
    for (long e = at; e < at + width; e += LANES) {
      vector value = read(n->x, e, bytes);
      squares = fused(value, value, squares);
    }
    vector scale = all(1.0f / sqrtf(lanes_sum(squares) / width + n->eps));
    for (long e = 0; e < width; e += LANES) {
      vector g = rounded(read(n->grad, at + e, bytes), n->format), value = times(read(n->x, at + e, bytes), scale);
      products = fused(rounded(times(g, read(n->weight, e, bytes)), n->format), value, products);
      store(of_weight + e, plus(load_fp32(of_weight + e), rounded(times(g, rounded(value, n->format)), n->format)));
    }
    vector mean = all(lanes_sum(products) / width);
    for (long e = 0; e < width; e += LANES) {
      vector g = rounded(read(n->grad, at + e, bytes), n->format), value = times(read(n->x, at + e, bytes), scale);
      vector normed = rounded(times(g, read(n->weight, e, bytes)), n->format);
      vector grad = rounded(times(minus(normed, times(value, mean)), scale), n->format);
      if (n->grad_total) grad = rounded(plus(grad, read(n->grad_total, at + e, bytes)), n->format);
      write(n->y, at + e, grad, bytes);
    }
  }
}

static void norm_gradients_of(void *of, long part) {
  const struct norm *n = of;
  OF_BYTES(n->bytes, norm_gradients, n, part);
}

/* `of_weight` has a row for each AT_A_TIME rows of x; the first becomes the sum of them in order. */
void mantissa_norm_gradients(int bytes, int format, const void *x, const void *weight, const void *grad,
                             const void *grad_total, void *y, float *of_weight, long rows, long width, float eps,
                             unsigned threads, parallel team) {
  struct norm n = {.bytes = bytes, .format = format, .x = x, .weight = weight, .grad = grad, .grad_total = grad_total,
                   .y = y, .of_weight = of_weight, .rows = rows, .width = width, .eps = eps};
  share(norm_gradients_of, &n, parts_of(rows), threads, team);
  for (long part = 1; part < parts_of(rows); part++)
    for (long e = 0; e < width; e += LANES)
      store(of_weight + e, plus(load_fp32(of_weight + e), load_fp32(of_weight + part * width + e)));
}

struct swiglu {
  int bytes;
  enum format format;
  const void *gate, *up, *grad;
  void *y, *of_up;
  long rows, width, stride;
};

/* sigmoid(g) = 1 / (1 + e^-g); below 0: e^g / (1 + e^g), so that nothing overflows. silu(g) = g * sigmoid(g). */
INLINE vector silu_of(vector g, vector *sigmoid) {
  vector small = exponential(smaller(g, minus(zero(), g))), one = by_sign(g, small, all(1.0f)); /* e^-|g| */
  vector below = plus(all(1.0f), small);
  if (sigmoid) *sigmoid = over(one, below);
  return over(times(g, one), below);
}

/* y = round(round(silu(gate)) * up); rows of gate and up lie `stride` values apart. */
INLINE void swiglus(const int bytes, const struct swiglu *s, long part) {
  for (long r = part * AT_A_TIME; r < end_of(part * AT_A_TIME, s->rows); r++)
    for (long e = 0; e < s->width; e += LANES) {
      vector silu = silu_of(read(s->gate, r * s->stride + e, bytes), NULL);
      vector y = times(rounded(silu, s->format), read(s->up, r * s->stride + e, bytes));
      write(s->y, r * s->width + e, rounded(y, s->format), bytes);
    }
}

static void swiglus_of(void *of, long part) {
  const struct swiglu *s = of;
  OF_BYTES(s->bytes, swiglus, s, part);
}

void mantissa_swiglu(int bytes, int format, const void *gate, const void *up, void *y, long rows, long width,
                     long stride, unsigned threads, parallel team) {
  struct swiglu s = {bytes, format, gate, up, NULL, y, NULL, rows, width, stride};
  share(swiglus_of, &s, parts_of(rows), threads, team);
}

/* With dy = grad: of_up = round(dy * round(silu(gate))); y = round(round(dy * up) * d silu / d gate), the gradient of the
gate, d silu / dg = s * (1 + g * (1 - s)) with s = sigmoid(g). All contiguous. */
INLINE void swiglu_gradients(const int bytes, const struct swiglu *s, long part) {
  for (long at = part * AT_A_TIME * s->width; at < end_of(part * AT_A_TIME, s->rows) * s->width; at += LANES) {
    vector gate = read(s->gate, at, bytes), grad = read(s->grad, at, bytes), sigmoid;
    vector silu = silu_of(gate, &sigmoid), slope = fused(gate, minus(all(1.0f), sigmoid), all(1.0f));
    write(s->of_up, at, rounded(times(grad, rounded(silu, s->format)), s->format), bytes);
    vector inner = rounded(times(grad, read(s->up, at, bytes)), s->format);
    write(s->y, at, rounded(times(inner, times(sigmoid, slope)), s->format), bytes);
  }
}

static void swiglu_gradients_of(void *of, long part) {
  const struct swiglu *s = of;
  OF_BYTES(s->bytes, swiglu_gradients, s, part);
}

void mantissa_swiglu_gradients(int bytes, int format, const void *gate, const void *up, const void *grad, void *of_gate,
                               void *of_up, long rows, long width, unsigned threads, parallel team) {
  struct swiglu s = {bytes, format, gate, up, grad, of_gate, of_up, rows, width, width};
  share(swiglu_gradients_of, &s, parts_of(rows), threads, team);
}

struct rotation {
  int bytes;
  enum format format;
  const void *x;
  const float *cos, *sin;
  void *y;
  const long *sizes;
  int back;
};

/* A part: AT_A_TIME positions of a head of a sequence. */
INLINE void rotated(const int bytes, const struct rotation *o, long part) {
  const long *sizes = o->sizes, half = sizes[3] / 2, parts = parts_of(sizes[2]);
  long b = part / parts / sizes[1], h = part / parts % sizes[1], start = part % parts * AT_A_TIME;
  vector sign = all(o->back ? -1.0f : 1.0f);
  for (long t = start; t < end_of(start, sizes[2]); t++) {
    long from = b * sizes[4] + h * sizes[5] + t * sizes[6], angle = b * sizes[7] + t * sizes[3];
    long to = b * sizes[8] + h * sizes[9] + t * sizes[10];
    for (long d = 0; d < half; d += LANES) {
      vector one = read(o->x, from + d, bytes), two = read(o->x, from + half + d, bytes);
#define OF(table, at) load_fp32(o->table + angle + at)
      vector first = minus(times(one, OF(cos, d)), times(two, times(sign, OF(sin, half + d))));
      vector second = plus(times(two, OF(cos, half + d)), times(one, times(sign, OF(sin, d))));
      write(o->y, to + d, rounded(first, o->format), bytes);
      write(o->y, to + half + d, rounded(second, o->format), bytes);
    }
  }
}

static void rotated_of(void *of, long part) {
  const struct rotation *o = of;
  OF_BYTES(o->bytes, rotated, o, part);
}

/* y = round(x * cos + rotate_half(x) * sin), each operation rounded to fp32; with `back` by the opposite angles. `sizes`:
sequences, heads, positions, size, the strides of x by sequence, head and position, that of cos and sin (fp32) by
sequence, and those of y as of x. */
void mantissa_rotate(int bytes, int format, const void *x, const float *cos, const float *sin, void *y,
                     const long *sizes, int back, unsigned threads, parallel team) {
  struct rotation o = {bytes, format, x, cos, sin, y, sizes, back};
  share(rotated_of, &o, sizes[0] * sizes[1] * parts_of(sizes[2]), threads, team);
}
