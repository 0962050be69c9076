// Vectors of floats, written out where the compiler does not find them by itself.
#pragma once

#include <cstring>
#ifdef __AVX512F__
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
#else
    float part[WIDE];
    std::memcpy(part, &v, sizeof part);
    for (int64_t half = WIDE / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
#endif
}

// WIDE numbers as floats.
inline Wide widened(const float *at) { return vector_at(at); }
inline Wide widened(const bf16 *at) {
    typedef uint16_t Halves __attribute__((vector_size(WIDE * 2), aligned(2), may_alias));
    typedef uint32_t Words __attribute__((vector_size(WIDE * 4)));
    return (Wide)(__builtin_convertvector(*reinterpret_cast<const Halves *>(at), Words) << 16);
}
