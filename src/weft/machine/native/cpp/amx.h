// Products of bf16 by AMX, whose registers hold tiles of 16 rows of 64 bytes.
//
// A panel of dense.h lies as AMX multiplies it: 32 of its columns are two tiles of weights, side by side. A block is up
// to two tiles of tokens, each 16 tokens by 32 columns, with its sums in registers.
#pragma once

#if defined(__AMX_BF16__) && defined(__linux__) && !defined(WEFT_NARROW)
#define WEFT_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "numbers.h"

constexpr int64_t AMX_TOKENS = 16;   // of a tile
constexpr int64_t AMX_COLUMNS = 32;  // of a tile

// True if this process may use AMX: Linux wants to be asked once, as the registers make a thread's state larger.
inline bool amx_allowed() {
    constexpr int REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
    return allowed;
}

// The shapes of the registers: sums 0 to 3, tokens 4 and 5, weights 6 and 7. `first` and `second` are numbers of
// tokens: of sums 0 and 1 and tokens 4, and of the others.
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

// Weights: columns of a panel, `cols` of them, a multiple of AMX_COLUMNS.
struct AmxPanel {
    const bf16 *data;
    int64_t cols;
};

// Rows of x: `tokens` of them, `width` elements apart.
struct AmxRows {
    const bf16 *data;
    int64_t width, tokens;

    AmxRows skip(int64_t rows) const { return {data + rows * width, width, tokens - rows}; }
    const bf16 *tile(int64_t row, int64_t col) const { return data + row * width + col; }
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

constexpr int64_t AMX_ROW = 128;  // bytes of a pair of a panel's columns, and of a token's sums
constexpr int64_t AMX_TILE = AMX_COLUMNS * AMX_ROW / 2;  // bytes of a tile's columns of a panel

// Sums of more than AMX_TOKENS tokens, [tokens][32]; added to what is there if `add`.
inline void amx_two_tiles(AmxPanel panel, AmxRows x, float *sums, bool add, AmxAhead ahead) {
    const int64_t stride = x.width * int64_t(sizeof(bf16));
    const char *weights = reinterpret_cast<const char *>(panel.data);
    float *second = sums + AMX_TOKENS * 32;
    if (add) {
        _tile_loadd(0, sums, AMX_ROW);
        _tile_loadd(1, sums + 16, AMX_ROW);
        _tile_loadd(2, second, AMX_ROW);
        _tile_loadd(3, second + 16, AMX_ROW);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t c = 0; c < panel.cols; c += AMX_COLUMNS, weights += AMX_TILE) {
        _tile_loadd(4, x.tile(0, c), stride);
        _tile_loadd(6, weights, AMX_ROW);
        _tile_loadd(7, weights + 64, AMX_ROW);
        _tile_loadd(5, x.tile(AMX_TOKENS, c), stride);
        ahead.fetch();
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, AMX_ROW);
    _tile_stored(1, sums + 16, AMX_ROW);
    _tile_stored(2, second, AMX_ROW);
    _tile_stored(3, second + 16, AMX_ROW);
}

// The same for up to AMX_TOKENS tokens. Tiles of columns in turns have sums of their own, or each product would wait
// for the one before.
inline void amx_one_tile(AmxPanel panel, AmxRows x, float *sums, bool add, AmxAhead ahead) {
    const int64_t stride = x.width * int64_t(sizeof(bf16));
    const char *weights = reinterpret_cast<const char *>(panel.data);
    if (add) {
        _tile_loadd(0, sums, AMX_ROW);
        _tile_loadd(1, sums + 16, AMX_ROW);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < panel.cols; c += 2 * AMX_COLUMNS, weights += 2 * AMX_TILE) {
        _tile_loadd(4, x.tile(0, c), stride);
        _tile_loadd(6, weights, AMX_ROW);
        _tile_loadd(7, weights + 64, AMX_ROW);
        ahead.fetch();
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (c + AMX_COLUMNS == panel.cols) break;
        _tile_loadd(5, x.tile(0, c + AMX_COLUMNS), stride);
        _tile_loadd(6, weights + AMX_TILE, AMX_ROW);
        _tile_loadd(7, weights + AMX_TILE + 64, AMX_ROW);
        ahead.fetch();
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) float others[AMX_TOKENS * 32];
    _tile_stored(0, sums, AMX_ROW);
    _tile_stored(1, sums + 16, AMX_ROW);
    _tile_stored(2, others, AMX_ROW);
    _tile_stored(3, others + 16, AMX_ROW);
    for (int64_t i = 0; i < x.tokens * 32; i++) sums[i] += others[i];
}

// Sums of any number of tokens with columns of a panel, [tokens][32]; added to what is there if `add`. Meanwhile
// `bytes` are prefetched from `at` on.
inline void amx_product(AmxPanel panel, AmxRows x, float *sums, bool add, const char *at, int64_t bytes) {
    constexpr int64_t MAX_TOKENS = 2 * AMX_TOKENS;
    const int64_t tiles = panel.cols / AMX_COLUMNS, all = x.tokens;
    for (; x.tokens > 0; x = x.skip(MAX_TOKENS), sums += MAX_TOKENS * 32) {
        int64_t n = std::min(MAX_TOKENS, x.tokens), one = std::min(AMX_TOKENS, n);
        AmxShapes shapes(one, n > one ? n - one : one);
        _tile_loadconfig(&shapes);
        AmxAhead ahead{at, (bytes * n / (all * tiles) + 63) / 64 * 64};
        AmxRows rows{x.data, x.width, n};
        (n > AMX_TOKENS ? amx_two_tiles : amx_one_tile)(panel, rows, sums, add, ahead);
        at += bytes * n / all;
    }
    _tile_release();
}
#endif
