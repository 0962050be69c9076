// Weights that become floats without a loss, for the products of float8.h: FP8, indices of a table of 16 values
// (bitsandbytes' NF4 and FP4), and 8-bit integers.
#pragma once

#include "quantised.h"

// What a row of x, and each scale, is multiplied by. Floats that are made of FP8 are 2^120 times too small; a row of x
// 2^60 times too large and scales make up for it, so that neither products nor sums are subnormal.
template <class C> constexpr float FACTOR = C::FLOAT8 ? 0x1p60f : 1.0f;

// The values of a table at the places in the four lowest bits of each word.
inline floats look_up(const float *table, ints place) {
#if defined(__AVX512F__)
    return (floats)_mm512_permutexvar_ps((__m512i)place, _mm512_load_ps(table));
#elif defined(__AVX2__)
    // A permutation reads three bits; the fourth one, as a sign, chooses the half of the table.
    __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)place);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), (__m256i)place);
    return (floats)_mm256_blendv_ps(low, high, (__m256)(place << 28));
#else
    int32_t places[SLICE];
    float values[SLICE];
    std::memcpy(places, &place, sizeof places);
    for (int64_t i = 0; i < SLICE; i++) values[i] = table[places[i] & 15];
    return load<floats>(values);
#endif
}

// Four columns of a slice, times 2^-120 if they are FP8. With 4 bits, those of the lower (0) or the upper `half`s of bytes.
template <class C> inline void widen_four(ints four, int half, floats (&each)[4]) {
    if constexpr (C::FLOAT8) return float8s(four, each);
    if constexpr (C::FLOATS == Lowest::SIGNED) four ^= int32_t(0x80808080);  // from 0 .. 255 to -128 .. 127
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        if constexpr (C::FLOATS == Lowest::SIGNED)
            each[j] = __builtin_convertvector(four << (24 - 8 * j) >> 24, floats);
        else
            each[j] = look_up(FLOAT4S<C>, four >> (8 * j + 4 * half));
}
