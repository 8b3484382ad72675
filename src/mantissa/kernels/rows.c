/* What a decoder computes row by row beside products and attention: norms, rotation, SwiGLU. In fp32, each result
rounded where the kernels' contract says (interface.py). Operands and results have `bytes` bytes, fp32 or bf16, and hold
values of the format; a row's width is whole vectors. */

#include <math.h>
#include "vectors.h"

/* y = round(w * round(x * s)), s = 1 / sqrt(mean(x^2) + eps). Where `added` is given, x + added, rounded and written to
`total`, stands for x. */
INLINE void norms(const int bytes, enum format format, const void *x, const void *added, const void *weight, void *total,
                  void *y, long rows, long width, float eps) {
  for (long at = 0; at < rows * width; at += width) {
    vector squares = zero();
    for (long e = at; e < at + width; e += LANES) {
      vector value = read(x, e, bytes);
      if (added) {
        value = rounded(plus(value, read(added, e, bytes)), format);
        write(total, e, value, bytes);
      }
      squares = fused(value, value, squares);
    }
    vector scale = all(1.0f / sqrtf(lanes_sum(squares) / width + eps));
    for (long e = 0; e < width; e += LANES) {
      vector value = rounded(times(read(added ? total : x, at + e, bytes), scale), format);
      write(y, at + e, rounded(times(value, read(weight, e, bytes)), format), bytes);
    }
  }
}

void mantissa_norm(int bytes, int format, const void *x, const void *added, const void *weight, void *total, void *y,
                   long rows, long width, float eps) {
  if (bytes == 4) norms(4, format, x, added, weight, total, y, rows, width, eps);
  else norms(2, format, x, added, weight, total, y, rows, width, eps);
}

/* y = round(round(silu(gate)) * up), silu(g) = g / (1 + e^-g); rows of gate and up lie `stride` values apart. */
INLINE void swiglus(const int bytes, enum format format, const void *gate, const void *up, void *y, long rows, long width,
                    long stride) {
  for (long r = 0; r < rows; r++)
    for (long e = 0; e < width; e += LANES) {
      vector g = read(gate, r * stride + e, bytes), small = exponential(smaller(g, minus(zero(), g))); /* e^-|g| */
      /* Below 0: g e^g / (1 + e^g), so that nothing overflows. */
      vector silu = over(times(g, by_sign(g, small, all(1.0f))), plus(all(1.0f), small));
      write(y, r * width + e, rounded(times(rounded(silu, format), read(up, r * stride + e, bytes)), format), bytes);
    }
}

void mantissa_swiglu(int bytes, int format, const void *gate, const void *up, void *y, long rows, long width,
                     long stride) {
  if (bytes == 4) swiglus(4, format, gate, up, y, rows, width, stride);
  else swiglus(2, format, gate, up, y, rows, width, stride);
}

/* y = round(x * cos + rotate_half(x) * sin), each operation rounded to fp32. `sizes`: sequences, heads, positions, size,
the strides of x by sequence, head and position, and that of cos and sin (fp32) by sequence; y is contiguous. */
INLINE void rotated(const int bytes, enum format format, const void *x, const float *cos, const float *sin, void *y,
                    const long *sizes) {
  long half = sizes[3] / 2;
  for (long b = 0; b < sizes[0]; b++)
    for (long h = 0; h < sizes[1]; h++)
      for (long t = 0; t < sizes[2]; t++) {
        long from = b * sizes[4] + h * sizes[5] + t * sizes[6], angle = b * sizes[7] + t * sizes[3];
        long to = ((b * sizes[1] + h) * sizes[2] + t) * sizes[3];
        for (long d = 0; d < half; d += LANES) {
          vector one = read(x, from + d, bytes), two = read(x, from + half + d, bytes);
#define OF(table, at) load_fp32(table + angle + at)
          vector first = minus(times(one, OF(cos, d)), times(two, OF(sin, half + d)));
          vector second = plus(times(two, OF(cos, half + d)), times(one, OF(sin, d)));
          write(y, to + d, rounded(first, format), bytes);
          write(y, to + half + d, rounded(second, format), bytes);
        }
      }
}

void mantissa_rotate(int bytes, int format, const void *x, const float *cos, const float *sin, void *y,
                     const long *sizes) {
  if (bytes == 4) rotated(4, format, x, cos, sin, y, sizes);
  else rotated(2, format, x, cos, sin, y, sizes);
}
