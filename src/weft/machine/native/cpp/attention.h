// Attention over paged KV by a team of threads, over either of the two layouts of the cache.
#pragma once

#include "attention_pairs.h"
#include "attention_rows.h"
#include "numbers.h"
#include "paged.h"
#include "team.h"

// Store one head's key and value in the slot of their caches.
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

template <class Way, class T>
void run_by(const Paged<T> &a, const Tiles &tiles, int64_t first, int64_t last) {
    Way way(a);  // some 300 KB of the thread's stack
    // This thread most likely gets the tile after its last one next: its keys are on their way when it begins.
    for (int64_t i = first; i < last; i++) way.run(tiles[i], tiles[std::min(i + 1, tiles.size() - 1)]);
}

// Attention of tiles [first, last), in the calling thread.
template <class T> void run_tiles(const Paged<T> &a, const Tiles &tiles, int64_t first, int64_t last) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == 2)
        if (in_pairs(a.rows.block_size, a.head_dim)) return run_by<PairedAttention>(a, tiles, first, last);
#endif
    run_by<RowAttention<T>>(a, tiles, first, last);
}

// Attention of all tiles by the whole team, then then() once.
template <class T> void attend(Team &team, const Paged<T> &a, const Tiles &tiles, Then then) {
    int64_t count = tiles.size();
    // All heads of a token lie side by side in the cache, so one thread takes them all, unless there are few tiles.
    int64_t grain = count >= 8 * team.size * a.kv_heads ? a.kv_heads : 1;
    team.each(count, grain, [&](int64_t first, int64_t last) { run_tiles(a, tiles, first, last); }, then);
}
