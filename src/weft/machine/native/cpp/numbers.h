// Number types: bf16 as its bits, and float. Sums are float everywhere.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Marks a function that the library exports.
#define ENTRY extern "C" __attribute__((visibility("default")))

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <class T> inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    // To nearest, ties to even. A NaN keeps its top bits and stays a NaN.
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded)};
}

// e^x, x clamped to [-87, 87], to about 1e-7: 2^(integer part) times a polynomial in the fraction. Vectorises, unlike
// expf.
inline float exp_moderate(float x) {
    x = std::min(std::max(x, -87.0f), 87.0f);
    float n = std::floor(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t scale = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &scale, 4);
    return p * power;
}

// `count` floats to T.
template <class T> inline void narrow_row(const float *from, T *to, int64_t count) {
    int64_t i = 0;
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == 2)
        for (; i + 16 <= count; i += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
#endif
    for (; i < count; i++) to[i] = narrow<T>(from[i]);
}
