// What attention is asked: the queries of a step's rows over their paged keys and values, cut into tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

constexpr int64_t QUERIES = 96;  // query vectors per tile at most: tokens x heads of one group
constexpr int64_t WIDEST = 256;  // head_dim at most
constexpr int64_t LANES = 16;    // floats to a vector

// Tokens [first, last) of one row, and the query heads of one KV head.
struct Tile {
    int64_t row, head, first, last;
};

// Positions: of a tile's first query, and of the keys [begin, end) that its queries see.
struct Seen {
    int64_t position, begin, end;
};

template <class T> struct Paged {
    const T *q, *keys, *values;
    T *out;
    const int32_t *row_starts, *context, *tables;
    int64_t table_width, block_size, q_heads, kv_heads, head_dim, window;
    int64_t q_width;  // from one token's queries to the next one's
    float scale;

    int64_t group() const { return q_heads / kv_heads; }

    Seen seen(const Tile &tile) const {
        int64_t position = context[tile.row] - row_starts[tile.row + 1] + tile.first;
        return {position, window ? std::max<int64_t>(0, position - window + 1) : 0, position + tile.last - tile.first};
    }

    // Where query i of a tile lies in q or in out, whose tokens are `width` apart.
    int64_t place(const Tile &tile, int64_t i, int64_t width) const {
        return (tile.first + i / group()) * width + (tile.head * group() + i % group()) * head_dim;
    }

    // The place of a row's position among all of the cache's.
    int64_t slot(int64_t row, uint32_t position) const {
        uint32_t size = block_size;
        return int64_t(tables[row * table_width + position / size]) * size + position % size;
    }
};

// A step's work, in pieces that threads take as they come free.
inline std::vector<Tile> tiles_of(const int32_t *row_starts, int64_t rows, int64_t group, int64_t kv_heads) {
    int64_t step = std::max<int64_t>(1, QUERIES / group);
    std::vector<Tile> tiles;
    // From each row's end: the tiles with the most keys first, so that no thread starts one when others are done.
    for (int64_t row = 0; row < rows; row++)
        for (int64_t last = row_starts[row + 1]; last > row_starts[row]; last -= step)
            for (int64_t head = 0; head < kv_heads; head++)
                tiles.push_back({row, head, std::max<int64_t>(last - step, row_starts[row]), last});
    return tiles;
}

// Multiply-adds of it all, for scores as for values.
template <class T> int64_t work_of(const Paged<T> &a, int64_t rows) {
    int64_t pairs = 0;
    for (int64_t row = 0; row < rows; row++)
        pairs += int64_t(a.row_starts[row + 1] - a.row_starts[row]) * a.context[row];
    return pairs * a.q_heads * a.head_dim;
}
