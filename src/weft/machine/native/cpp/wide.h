// Vectors of floats, written out where the compiler does not find them by itself.
#pragma once

#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "numbers.h"

// A vector register, which GCC and clang multiply and add as a whole.
#ifdef __AVX512F__
constexpr int64_t WIDE = 16;
#else
constexpr int64_t WIDE = 8;
#endif
typedef float Wide __attribute__((vector_size(WIDE * sizeof(float)), aligned(4), may_alias));

inline const Wide &vector_at(const float *at) { return *reinterpret_cast<const Wide *>(at); }
inline Wide &vector_at(float *at) { return *reinterpret_cast<Wide *>(at); }

inline float sum_of(Wide v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);  // of the loop below GCC makes branches
#elif defined(__AVX2__)
    // Empty asm statements keep the order: -ffast-math would choose it anew wherever this is inlined.
    auto kept = [](__m128 part) {
        asm("" : "+x"(part));
        return part;
    };
    __m128 four = kept(_mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1)));
    __m128 two = kept(_mm_add_ps(four, _mm_movehl_ps(four, four)));
    return _mm_cvtss_f32(kept(_mm_add_ss(two, _mm_movehdup_ps(two))));
#else
    float part[WIDE];
    std::memcpy(part, &v, sizeof part);
    for (int64_t half = WIDE / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
#endif
}

// sum + a * b, rounded once where the CPU can, in the order of the source: GCC would order products otherwise, or add them
// before they meet the sum, each time that a loop is compiled for another number of queries.
inline Wide fused_add(Wide sum, Wide a, Wide b) {
#if defined(__AVX512F__)
    return (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

// WIDE numbers as floats.
inline Wide widened(const float *at) { return vector_at(at); }
inline Wide widened(const bf16 *at) {
    typedef uint16_t Halves __attribute__((vector_size(WIDE * 2), aligned(2), may_alias));
    typedef uint32_t Words __attribute__((vector_size(WIDE * 4)));
    return (Wide)(__builtin_convertvector(*reinterpret_cast<const Halves *>(at), Words) << 16);
}
