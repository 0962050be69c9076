// One call of attention: the queries of a step's rows, and the paged cache of their keys and values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "numbers.h"
#include "tiles.h"

constexpr int64_t WIDEST_HEAD = 256;  // head_dim at most
constexpr int64_t LANES = 16;    // floats to a vector

// Part of a tile: its queries [first, first + queries), and the keys [begin, end) of `row` that they go over together.
// Those before `oldest` are behind every query's window: their blocks may be another request's by now.
struct Part {
    int64_t row, head, first, queries, begin, end, oldest;

    // The position whose key is loaded for one that no query sees.
    int64_t alive(int64_t position) const { return std::max(position, oldest); }
};

template <class T> struct Paged {
    const T *q, *keys, *values;
    T *out;
    Rows rows;
    int64_t q_heads, kv_heads, head_dim, window;
    int64_t q_width;  // elements from one token's queries to the next one's
    float scale;
    // See `PagedAttention.attend` of ranks/kernels/attention.py; may be null.
    float *lse;      // [tokens, q_heads]
    const T *sinks;  // [q_heads]
    int64_t fixed_order;  // one order of sums, see `Step`

    int64_t group() const { return q_heads / kv_heads; }

    // Number of query vectors that each row of a tile has; one row's follow the other's.
    int64_t queries(const Tile &tile) const { return (tile.last - tile.first) * group(); }

    // Part `number` of the `tile.count` + 1 parts of a tile: first the keys that all of its rows share, which may be
    // none, then the others of each row. Keys begin at a multiple of KEYS; not every query sees all of them.
    Part part(const Tile &tile, int64_t number) const {
        int64_t each = queries(tile), member = std::max<int64_t>(number - 1, 0), row = tile.rows[member];
        if (number) {
            int64_t oldest = oldest_seen(position(tile, member * each));
            int64_t end = rows.context[row] - rows.tokens(row) + tile.last;
            return {row, tile.head, member * each, each, std::max(oldest / KEYS * KEYS, tile.shared), end, oldest};
        }
        int64_t oldest = tile.shared;
        for (int64_t i = 0; i < tile.count * each; i += each) oldest = std::min(oldest, oldest_seen(position(tile, i)));
        return {row, tile.head, 0, tile.count * each, oldest / KEYS * KEYS, tile.shared, oldest};
    }

    // The first part that has keys.
    Part first_part(const Tile &tile) const {
        Part shared = part(tile, 0);
        return shared.begin < shared.end ? shared : part(tile, 1);
    }

    // Position of query i of a tile in its row.
    int64_t position(const Tile &tile, int64_t i) const {
        int64_t each = queries(tile), row = tile.rows[i / each];
        return rows.context[row] - rows.tokens(row) + tile.first + i % each / group();
    }

    // The range [from, to), of n keys from position `at` on, that the query at `position` sees.
    std::pair<int64_t, int64_t> seen(int64_t position, int64_t at, int64_t n) const {
        int64_t to = std::clamp<int64_t>(position + 1 - at, 0, n);
        return {window ? std::clamp<int64_t>(position - window + 1 - at, 0, to) : 0, to};
    }

    // The first position that the query at `position` sees.
    int64_t oldest_seen(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

    // Offset of query i of a tile in q or in out, whose tokens are `width` elements apart.
    int64_t place(const Tile &tile, int64_t i, int64_t width) const {
        int64_t each = queries(tile), token = rows.starts[tile.rows[i / each]] + tile.first + i % each / group();
        return token * width + (tile.head * group() + i % group()) * head_dim;
    }

    // Write the result of query i of a tile: `sums` times 1 / `total`. The logarithm of the sum of e^score is `log_sum`.
    void finish(const Tile &tile, int64_t i, const float *sums, float total, float log_sum) const {
        int64_t at = place(tile, i, q_heads * head_dim);
        float share = 1.0f / total;
        if (sinks) share /= 1.0f + std::exp(widen(sinks[at / head_dim % q_heads]) - log_sum);
        for (int64_t d = 0; d < head_dim; d++) out[at + d] = narrow<T>(sums[d] * share);
        if (lse) lse[at / head_dim] = log_sum;
    }

    // Multiply-adds of all scores, and as many again of all values.
    int64_t work() const {
        int64_t pairs = 0;
        for (int64_t row = 0; row < rows.count; row++) pairs += rows.tokens(row) * rows.context[row];
        return pairs * q_heads * head_dim;
    }
};
