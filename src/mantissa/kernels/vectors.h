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
#define fused _mm512_fmadd_ps
#define all _mm512_set1_ps
#define zero _mm512_setzero_ps
#else /* AVX2, FMA and F16C */
typedef __m256 vector;
enum { LANES = 8, VECTORS = 2 };
#define load_fp32(p) _mm256_loadu_ps(p)
#define load_bf16(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p))), 16))
#define load_fp16(p) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define store _mm256_storeu_ps
#define fused _mm256_fmadd_ps
#define all _mm256_set1_ps
#define zero _mm256_setzero_ps
#endif

typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, of torch's own threads */

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return value != value ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
