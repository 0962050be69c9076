// Tiles: a step's attention in pieces. The queries of a tile go over their keys together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

constexpr int64_t QUERIES = 96;  // query vectors per tile at most: tokens x heads of one group
constexpr int64_t WIDEST_GROUP = QUERIES;  // query heads per KV head at most: a tile holds those of one token
constexpr int64_t KEYS = 64;     // keys that are worked on at once
constexpr int64_t PER_THREAD = 4;  // rows are not joined below this number of tiles per thread: some would have none

// The rows of a step: their tokens, and the KV blocks that hold their positions.
struct Rows {
    const int32_t *starts, *context, *tables;
    int64_t count, table_width, block_size;

    int64_t tokens(int64_t row) const { return starts[row + 1] - starts[row]; }

    const int32_t *blocks(int64_t row) const { return tables + row * table_width; }

    // The slot in the cache of a row's position.
    int64_t slot(int64_t row, uint32_t position) const {
        uint32_t size = block_size;
        return int64_t(blocks(row)[position / size]) * size + position % size;
    }

    // Number of whole blocks before a row's last position.
    int64_t whole(int64_t row) const { return (context[row] - 1) / block_size; }

    // Number of first positions that two rows have in the same blocks, a multiple of KEYS.
    int64_t shared(int64_t a, int64_t b) const {
        int64_t most = std::min(whole(a), whole(b));
        int64_t same = std::mismatch(blocks(a), blocks(a) + most, blocks(b)).first - blocks(a);
        return same * block_size / KEYS * KEYS;
    }
};

// Queries: of each of `count` rows the tokens [first, last), counted from the row's first token, and of these the query
// heads of KV head `head`. The rows have all keys before position `shared` in common.
struct Tile {
    const int32_t *rows;
    int64_t count, shared, head, first, last;
};

class Tiles {
    std::vector<int32_t> order;  // of the rows: those with one token sorted by their blocks, then those with more
    std::vector<Tile> tiles;

public:
    Tiles(const Rows &rows, int64_t group, int64_t kv_heads, int64_t threads) : order(rows.count) {
        std::iota(order.begin(), order.end(), 0);
        auto many = std::stable_partition(order.begin(), order.end(), [&](int32_t r) { return rows.tokens(r) == 1; });
        int64_t single = many - order.begin();
        // Rows with the same first blocks become neighbours, and their keys are read together: as many rows as a tile
        // has queries for, and few enough that all threads have something to do.
        int64_t most = std::min(QUERIES / group, single * kv_heads / (PER_THREAD * threads));
        if (most > 1)
            std::sort(order.begin(), many, [&](int32_t a, int32_t b) {
                const int32_t *x = rows.blocks(a), *y = rows.blocks(b);
                return std::lexicographical_compare(x, x + rows.whole(a), y, y + rows.whole(b));
            });
        for (int64_t from = 0, to; from < single; from = to) {
            int64_t shared = 0;
            for (to = from + 1; to < single && to - from < most; to++) {
                // A row joins only if that saves no less: one that shares little would cut what the others share.
                int64_t with = rows.shared(order[from], order[to]);
                if (with == 0 || with * (to - from) < shared * (to - from - 1)) break;
                shared = with;
            }
            for (int64_t head = 0; head < kv_heads; head++)
                tiles.push_back({&order[from], to - from, shared, head, 0, 1});
        }
        // From each row's end: tiles with the most keys come first, so that no thread starts one when others are done.
        int64_t step = std::max<int64_t>(1, QUERIES / group);
        for (int64_t i = single; i < rows.count; i++)
            for (int64_t last = rows.tokens(order[i]); last > 0; last -= step)
                for (int64_t head = 0; head < kv_heads; head++)
                    tiles.push_back({&order[i], 1, 0, head, std::max<int64_t>(last - step, 0), last});
    }

    // Not copied: tiles point into `order`.
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;

    int64_t size() const { return tiles.size(); }
    const Tile &operator[](int64_t i) const { return tiles[i]; }
};
