// Products of bf16 by AMX, whose registers hold tiles of 16 rows of 64 bytes.
//
// A panel of dense.h lies as AMX multiplies it: 32 of its columns are two tiles of weights, side by side. A block is up
// to two tiles of tokens, each 16 tokens by 32 columns, with its sums in registers.
#pragma once

#if defined(__AMX_BF16__) && defined(__linux__)
#define WEFT_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "numbers.h"

constexpr int64_t AMX_TOKENS = 16;   // of a tile
constexpr int64_t AMX_COLUMNS = 32;  // of a tile

// True if this process may use AMX: Linux wants to be asked once, as the registers make a thread's state larger.
inline bool amx_allowed() {
    constexpr int REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
    return allowed;
}

// The shapes of the registers: sums 0 to 3, tokens 4 and 5, weights 6 and 7. `first` and `second` are numbers of tokens:
// of sums 0 and 1 and tokens 4, and of the others.
struct alignas(64) AmxShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    AmxShapes(int64_t first, int64_t second) {
        for (int i = 0; i < 8; i++) bytes[i] = 64;
        for (int i : {0, 1, 4}) rows[i] = uint8_t(first);
        for (int i : {2, 3, 5}) rows[i] = uint8_t(second);
        rows[6] = rows[7] = 16;
    }
};

// What is read next: `step` bytes from `at` on are prefetched with each tile of columns.
struct AmxAhead {
    const char *at;
    int64_t step;

    void fetch() {
        for (int64_t line = 0; line < step; line += 64) _mm_prefetch(at + line, _MM_HINT_T0);
        at += step;
    }
};

// Sums of up to 2 * AMX_TOKENS tokens with a panel, [tokens][32]; `cols` is a multiple of AMX_COLUMNS.
inline void amx_block(const bf16 *panel, const bf16 *x, int64_t cols, int64_t tokens, float *sums, AmxAhead ahead) {
    constexpr int64_t ROW = 128;  // bytes of a pair of a panel's columns, and of a token's sums
    const int64_t stride = cols * int64_t(sizeof(bf16)), tile = AMX_COLUMNS * ROW / 2;
    const char *weights = reinterpret_cast<const char *>(panel);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (tokens > AMX_TOKENS) {
        for (int64_t c = 0; c < cols; c += AMX_COLUMNS, weights += tile) {
            _tile_loadd(4, x + c, stride);
            _tile_loadd(6, weights, ROW);
            _tile_loadd(7, weights + 64, ROW);
            _tile_loadd(5, x + AMX_TOKENS * cols + c, stride);
            ahead.fetch();
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + AMX_TOKENS * 32, ROW);
        _tile_stored(3, sums + AMX_TOKENS * 32 + 16, ROW);
    } else {
        // Tiles of columns in turns have sums of their own, or each product would wait for the last.
        for (int64_t c = 0; c < cols; c += AMX_COLUMNS, weights += tile) {
            _tile_loadd(4, x + c, stride);
            _tile_loadd(6, weights, ROW);
            _tile_loadd(7, weights + 64, ROW);
            ahead.fetch();
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            c += AMX_COLUMNS;
            if (c == cols) break;
            weights += tile;
            _tile_loadd(5, x + c, stride);
            _tile_loadd(6, weights, ROW);
            _tile_loadd(7, weights + 64, ROW);
            ahead.fetch();
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + 16, ROW);
    if (tokens > AMX_TOKENS) return;
    alignas(64) float others[AMX_TOKENS * 32];
    _tile_stored(2, others, ROW);
    _tile_stored(3, others + 16, ROW);
    for (int64_t i = 0; i < tokens * 32; i++) sums[i] += others[i];
}
#endif
