// Transposition of squares of 32-bit words.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int64_t SQUARE = 16;  // words each way: a vector of AVX-512

// Row i begins `stride` bytes after the one before it; word j of row i goes to word i of row j of `to`.
inline void transpose(const void *from, int64_t stride, void *to, int64_t to_stride) {
    const char *source = static_cast<const char *>(from);
    char *target = static_cast<char *>(to);
#ifdef __AVX512F__
    __m512i v[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(source + i * stride);
    // First the squares of 4 x 4 within each quarter of a vector, then the quarters.
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), odd = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        __m512i even_high = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        __m512i odd_high = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
        _mm512_storeu_si512(target + i * to_stride, _mm512_shuffle_i32x4(even, even_high, 0x88));
        _mm512_storeu_si512(target + (i + 4) * to_stride, _mm512_shuffle_i32x4(odd, odd_high, 0x88));
        _mm512_storeu_si512(target + (i + 8) * to_stride, _mm512_shuffle_i32x4(even, even_high, 0xdd));
        _mm512_storeu_si512(target + (i + 12) * to_stride, _mm512_shuffle_i32x4(odd, odd_high, 0xdd));
    }
#else
    for (int64_t i = 0; i < SQUARE; i++)
        for (int64_t j = 0; j < SQUARE; j++)
            std::memcpy(target + j * to_stride + i * 4, source + i * stride + j * 4, 4);
#endif
}
