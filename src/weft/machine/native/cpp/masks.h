// Masks of tokens: of each row of logits that has one, the tokens whose bit is 0 become impossible.
#pragma once

#include <cstdint>

#include "team.h"

constexpr int64_t MASK_BITS = 32;  // tokens to a word of a mask, the first one in its lowest bit

// `never` are the bits of -infinity in the logits' type. Logits of allowed tokens stay as they are.
template <class Bits> void mask_row(Bits *logits, int64_t vocab, const uint32_t *mask, Bits never) {
    for (int64_t first = 0; first < vocab; first += MASK_BITS) {
        uint32_t word = *mask++;
        if (word == UINT32_MAX) continue;
        int64_t count = std::min(MASK_BITS, vocab - first);
        Bits *x = logits + first;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) x[i] = word >> i & 1 ? x[i] : never;
    }
}

// Apply masks [count, words] to the rows `rows` of logits [.., vocab], which are `stride` apart; `size` is as in
// `sample`.
inline void apply_masks(void *logits, int64_t size, int64_t vocab, int64_t stride, const int64_t *rows,
                        const uint32_t *masks, int64_t count, int64_t threads) {
    int64_t words = (vocab + MASK_BITS - 1) / MASK_BITS;
    auto mask_rows = [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            if (size == 2)
                mask_row(static_cast<uint16_t *>(logits) + rows[i] * stride, vocab, masks + i * words, uint16_t(0xff80));
            else
                mask_row(static_cast<uint32_t *>(logits) + rows[i] * stride, vocab, masks + i * words, 0xff800000u);
        }
    };
    together(threads, count > 1, [&](Team &team) { team.each(count, 1, mask_rows, nothing); });
}
