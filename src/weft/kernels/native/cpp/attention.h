// Attention over paged KV: which of the two ways a cache lies and is read, and the threads' part in it.
#pragma once

#include <vector>

#include "attention_pairs.h"
#include "attention_rows.h"
#include "numbers.h"
#include "paged.h"
#include "team.h"

// Store one head's key and value at a slot of their caches.
template <class T>
void store(const T *key, const T *value, T *keys, T *values, int64_t slot, int64_t head, int64_t block_size,
           int64_t kv_heads, int64_t head_dim) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == 2)
        if (in_pairs(block_size, head_dim)) {
            int64_t at = group_at(slot, head, block_size, kv_heads, head_dim);
            return store_in_pairs(key, value, keys + at, values + at, slot, head_dim);
        }
#endif
    int64_t at = (slot * kv_heads + head) * head_dim;
    std::memcpy(keys + at, key, head_dim * sizeof(T));
    std::memcpy(values + at, value, head_dim * sizeof(T));
}

// This thread's tiles. What comes after meets first.
template <class Way, class T>
void take_tiles(const Team &team, const Paged<T> &a, const std::vector<Tile> &tiles) {
    Way way(a);  // some 300 KB of the thread's stack
    int64_t count = tiles.size();
    // All heads of some tokens lie side by side in the cache. With few tokens they are all that there is to share out.
    int64_t grain = count >= 8 * team.size * a.kv_heads ? a.kv_heads : 1;
    int64_t i = team.take(grain);
    while (i < count) {
        // One ahead, so that its keys are on their way when it begins.
        int64_t then = team.take(grain), end = std::min(i + grain, count);
        for (; i < end; i++) {
            int64_t after = i + 1 < end ? i + 1 : then;
            way.run(tiles[i], tiles[after < count ? after : i]);
        }
        i = then;
    }
}

template <class T>
void attend(const Team &team, const Paged<T> &a, const std::vector<Tile> &tiles) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == 2)
        if (in_pairs(a.block_size, a.head_dim)) return take_tiles<PairedAttention>(team, a, tiles);
#endif
    take_tiles<RowAttention<T>>(team, a, tiles);
}
