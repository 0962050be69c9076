// Packing: rows that lie one after the other to panels, see quantised.h.
#pragma once

#include "quantised.h"

// values [rows][blocks][BLOCK], without a sign; of 4 bits, two halves of a block in the nibbles of BLOCK / 2 bytes.
template <int BITS> void pack_values(const char *values, char *to, int64_t rows, int64_t blocks, int64_t threads) {
    constexpr int64_t WORDS = BLOCK * BITS / 32;  // of a row in a block
    int64_t panels = (rows + PANEL - 1) / PANEL, size = blocks * BLOCK_BYTES<BITS>;
    auto pack = [&](int64_t first, int64_t last) {
        for (int64_t p = first; p < last; p++)
            for (int64_t b = 0; b < blocks; b++)
                for (int64_t r = 0; r < PANEL; r++)
                    for (int64_t w = 0; w < WORDS; w++) {
                        int64_t row = p * PANEL + r;
                        char *at =
                            to + p * size + b * BLOCK_BYTES<BITS> + ((r / SLICE * WORDS + w) * SLICE + r % SLICE) * 4;
                        if (row < rows)
                            std::memcpy(at, values + ((row * blocks + b) * WORDS + w) * 4, 4);
                        else
                            std::memset(at, 0, 4);
                    }
    };
    together(threads, rows * blocks * BLOCK > SMALL, [&](Team &team) { team.each(panels, pack); });
}

// A number of `size` bytes for each group: [rows][groups] to the panels' [groups][PANEL].
inline void pack_groups(const char *from, char *to, int64_t rows, int64_t groups, int64_t size) {
    for (int64_t p = 0; p < (rows + PANEL - 1) / PANEL; p++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t r = 0; r < PANEL; r++) {
                int64_t row = p * PANEL + r;
                char *at = to + ((p * groups + g) * PANEL + r) * size;
                if (row < rows)
                    std::memcpy(at, from + (row * groups + g) * size, size);
                else
                    std::memset(at, 0, size);
            }
}
