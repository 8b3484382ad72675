/* Whole vectors of this processor, for the products and the attention: AVX512, or AVX2 with FMA and F16C. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8") for

#ifdef __AVX512F__
typedef __m512 vector;
enum { LANES = 16, VECTORS = 4 };
#define load_fp32(p) _mm512_loadu_ps(p)
#define load_bf16(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(p))), 16))
#define load_fp16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
#define store _mm512_storeu_ps
#define store_bf16(p, x) _mm256_storeu_si256((void *)(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)))
#define times _mm512_mul_ps
#define plus _mm512_add_ps
#define minus _mm512_sub_ps
#define over _mm512_div_ps
#define larger _mm512_max_ps /* the second where one is NaN */
#define smaller _mm512_min_ps
#define by_sign(x, below, above) _mm512_mask_mov_ps(above, _mm512_movepi32_mask(_mm512_castps_si512(x)), below)
#define nearest(x) _mm512_roundscale_ps(x, 8)
#define to_fp16(x) _mm512_cvtph_ps(_mm512_cvtps_ph(x, 8))
#define fused _mm512_fmadd_ps
#define all _mm512_set1_ps
#define zero _mm512_setzero_ps
typedef __m512i integers;
#define bits_of _mm512_castps_si512
#define of_bits _mm512_castsi512_ps
#define all_bits _mm512_set1_epi32
#define both _mm512_and_si512
#define sum_of _mm512_add_epi32
#define larger_int _mm512_max_epi32
#define largest_lane _mm512_reduce_max_epi32
#else /* AVX2, FMA and F16C */
typedef __m256 vector;
enum { LANES = 8, VECTORS = 2 };
#define load_fp32(p) _mm256_loadu_ps(p)
#define load_bf16(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p))), 16))
#define load_fp16(p) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define store _mm256_storeu_ps
#define store_bf16(p, x) _mm_storeu_si128((void *)(p), halves_of(_mm256_srli_epi32(_mm256_castps_si256(x), 16)))
#define times _mm256_mul_ps
#define plus _mm256_add_ps
#define minus _mm256_sub_ps
#define over _mm256_div_ps
#define larger _mm256_max_ps
#define smaller _mm256_min_ps
#define by_sign(x, below, above) _mm256_blendv_ps(above, below, x)
#define nearest(x) _mm256_round_ps(x, 8)
#define to_fp16(x) _mm256_cvtph_ps(_mm256_cvtps_ph(x, 0))
INLINE __m128i halves_of(__m256i x) {
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08));
}
#define fused _mm256_fmadd_ps
#define all _mm256_set1_ps
#define zero _mm256_setzero_ps
typedef __m256i integers;
#define bits_of _mm256_castps_si256
#define of_bits _mm256_castsi256_ps
#define all_bits _mm256_set1_epi32
#define both _mm256_and_si256
#define sum_of _mm256_add_epi32
#define larger_int _mm256_max_epi32
INLINE int largest_lane(__m256i x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
}
#endif

typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, of torch's own threads */

/* Work in `count` parts, of which `taken` were begun: threads take the next one. */
struct shared {
  void (*part)(void *, long);
  void *of;
  long count, taken;
};

static inline void take_parts(void *of) {
  struct shared *s = of;
  long at;
  while ((at = __atomic_fetch_add(&s->taken, 1, __ATOMIC_RELAXED)) < s->count) s->part(s->of, at);
}

static inline void share(void (*part)(void *, long), void *of, long count, unsigned threads, parallel team) {
  struct shared s = {part, of, count, 0};
  if (team && threads > 1 && count > 1) team(take_parts, &s, threads, 0);
  else take_parts(&s);
}

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return value != value ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

enum format { FP32, BF16, FP16 };

INLINE vector rounded(vector x, enum format format) {
  if (format == FP16) return to_fp16(x);
  if (format != BF16) return x;
#ifdef __AVX512F__
  __m512i bits = _mm512_castps_si512(x), even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
  bits = _mm512_and_si512(bits, _mm512_set1_epi32(0xFFFF0000));
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000)));
#else
  __m256i bits = _mm256_castps_si256(x), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7FFF)));
  bits = _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF0000));
  vector none = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
  return _mm256_blendv_ps(_mm256_castsi256_ps(bits), none, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
#endif
}

/* A vector of operands of `bytes` bytes, fp32 or bf16. */
INLINE vector read(const void *from, long at, int bytes) {
  return bytes == 4 ? load_fp32((const float *)from + at) : load_bf16((const uint16_t *)from + at);
}

/* The same back; what is written as bf16 must be a value of bf16. */
INLINE void write(void *to, long at, vector value, int bytes) {
  if (bytes == 4) store((float *)to + at, value);
  else store_bf16((uint16_t *)to + at, value);
}

/* The sum of the lanes, as a tree. */
INLINE float lanes_sum(vector x) {
  float lanes[LANES];
  store(lanes, x);
  for (int half = LANES / 2; half; half /= 2)
    for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
  return lanes[0];
}

#ifdef __AVX512F__
#define LOWEST -104.0f /* below, exp is 0 */
#else
#define LOWEST -87.0f /* below, exp is no normal number, and here 0 */
#endif

/* e^x for x <= 0, by Cephes' polynomial over |x| <= ln(2) / 2. */
INLINE vector exponential(vector x) {
  vector low = larger(all(LOWEST), x), n = nearest(times(low, all(1.44269504088896341f)));
  vector r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), low)), y = all(1.9875691500e-4f);
  y = fused(y, r, all(1.3981999507e-3f));
  y = fused(y, r, all(8.3334519073e-3f));
  y = fused(y, r, all(4.1665795894e-2f));
  y = fused(y, r, all(1.6666665459e-1f));
  y = fused(y, r, all(5.0000001201e-1f));
  y = plus(fused(y, times(r, r), r), all(1.0f));
#ifdef __AVX512F__
  return _mm512_scalef_ps(y, n);
#else
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(times(y, _mm256_castsi256_ps(power)), _mm256_cmp_ps(x, all(LOWEST), _CMP_NLT_UQ));
#endif
}
