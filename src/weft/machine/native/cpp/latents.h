// Latent attention in the absorbed form: all heads of a token read the same latents, each once for keys and values.
//
// A latent is a row of the cache [block, position, width]. Its first `rank` values are the value, all of them the key.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "numbers.h"
#include "team.h"
#include "tiles.h"
#include "wide.h"

constexpr int64_t WIDEST_LATENT = 640;  // values of a latent at most
constexpr int64_t LATENT_QUERIES = 32;  // query vectors, tokens x heads, that go over latents together, at most
constexpr int64_t LATENT_KEYS = 48;     // latents that are worked on at once
constexpr int64_t LATENT_PART = 10 * LATENT_KEYS;  // positions of a part of a context, unless it has too many parts
constexpr int64_t MAX_PARTS = 32;

constexpr int64_t whole_vectors(int64_t count) { return (count + 15) / 16 * 16; }

// One call: queries q [tokens, heads, width] over the latents of their rows, into out [tokens, heads, rank].
template <class T> struct PagedLatents {
    const T *q, *latents;
    T *out;
    Rows rows;
    int64_t heads, rank, width;
    float scale;
    float *lse;  // [tokens, heads], or null
    int64_t fixed_order;  // one order of sums, see `Step`

    // Query vectors of a row.
    int64_t queries(int64_t row) const { return rows.tokens(row) * heads; }

    // Position of a row's query vector.
    int64_t position(int64_t row, int64_t query) const {
        return rows.context[row] - rows.tokens(row) + query / heads;
    }

    // Positions of a part of a row's context. They depend on the row alone, and so do the sums of its queries. In a fixed
    // order not even on its context, of which a chunk of a prompt has less.
    int64_t part_size(int64_t row) const {
        if (fixed_order) return LATENT_PART;
        int64_t parts = (rows.context[row] + LATENT_PART - 1) / LATENT_PART;
        return (parts + MAX_PARTS - 1) / MAX_PARTS * LATENT_PART;
    }

    int64_t parts(int64_t row) const { return (rows.context[row] + part_size(row) - 1) / part_size(row); }

    const T *latent(int64_t row, int64_t position) const { return latents + rows.slot(row, position) * width; }

    // Multiply-adds of all scores and values.
    int64_t work() const {
        int64_t pairs = 0;
        for (int64_t row = 0; row < rows.count; row++) pairs += rows.tokens(row) * rows.context[row];
        return pairs * heads * (width + rank);
    }
};

// Query vectors [first, last) of a row.
struct LatentTile {
    int64_t row, first, last;
    int64_t slot;  // of its first part's result, if the parts of its context are computed apart
};

// The tiles of a step. If there are few, each is a piece of work for every part of its context.
class LatentTiles {
    struct Piece {
        int64_t tile, part;  // part -1: all
    };
    std::vector<LatentTile> tiles;
    std::vector<Piece> pieces;
    int64_t slots = 0;

public:
    // Of rows with fewer than `longest` tokens.
    template <class T> LatentTiles(const PagedLatents<T> &a, int64_t threads, int64_t longest) {
        for (int64_t row = 0; row < a.rows.count; row++) {
            if (a.rows.tokens(row) >= longest) continue;
            int64_t queries = a.queries(row), count = (queries + LATENT_QUERIES - 1) / LATENT_QUERIES;
            for (int64_t i = count - 1; i >= 0; i--)
                tiles.push_back({row, queries * i / count, queries * (i + 1) / count, 0});
        }
        // The longest first, so that no thread begins one when the others are done.
        auto longer = [&](const LatentTile &x, const LatentTile &y) {
            return a.rows.context[x.row] > a.rows.context[y.row];
        };
        std::stable_sort(tiles.begin(), tiles.end(), longer);
        bool few = int64_t(tiles.size()) < 2 * threads && threads > 1;
        for (size_t i = 0; i < tiles.size(); i++) {
            int64_t parts = a.parts(tiles[i].row);
            tiles[i].slot = few && parts > 1 && parts <= MAX_PARTS ? slots : -1;
            if (tiles[i].slot < 0) {
                pieces.push_back({int64_t(i), -1});
                continue;
            }
            for (int64_t part = 0; part < parts; part++) pieces.push_back({int64_t(i), part});
            slots += parts;
        }
    }

    int64_t count() const { return pieces.size(); }
    const LatentTile &tile(int64_t piece) const { return tiles[pieces[piece].tile]; }
    int64_t part(int64_t piece) const { return pieces[piece].part; }
    // Parts whose results wait to be joined.
    int64_t parts() const { return slots; }
    const std::vector<LatentTile> &all() const { return tiles; }
};

// The result of queries over a part of their context: weighted sums of values, relative to the highest score.
struct LatentSums {
    alignas(64) float values[LATENT_QUERIES * WIDEST_LATENT];  // rows of `stride` floats
    float highest[LATENT_QUERIES], total[LATENT_QUERIES];

    void clear(int64_t count, int64_t stride) {
        std::memset(values, 0, count * stride * sizeof(float));
        std::fill(highest, highest + count, -std::numeric_limits<float>::infinity());
        std::fill(total, total + count, 0.0f);
    }

    // Add the sums of another part, which comes after those that are here.
    void join(const LatentSums &other, int64_t count, int64_t stride) {
        for (int64_t i = 0; i < count; i++) {
            float top = std::max(highest[i], other.highest[i]);
            float mine = exp_moderate(highest[i] - top), theirs = exp_moderate(other.highest[i] - top);
            float *to = values + i * stride;
            const float *from = other.values + i * stride;
#pragma omp simd
            for (int64_t d = 0; d < stride; d++) to[d] = to[d] * mine + from[d] * theirs;
            total[i] = total[i] * mine + other.total[i] * theirs;
            highest[i] = top;
        }
    }
};

// Parts that wait to be joined: memory of the calling thread, which later calls use again.
inline LatentSums *latent_parts(int64_t count) {
    static thread_local std::vector<LatentSums> held;
    if (int64_t(held.size()) < count) held.resize(count);
    return held.data();
}

template <class T> class LatentAttention {
    struct Scratch {
        alignas(64) float queries[LATENT_QUERIES * WIDEST_LATENT];
        alignas(64) float keys[LATENT_KEYS * WIDEST_LATENT];
        alignas(64) float scores[LATENT_QUERIES * LATENT_KEYS];
        LatentSums part, whole;
    };

    const PagedLatents<T> &a;
    const int64_t width, stride;  // of queries and keys, and of sums: whole vectors
    Scratch s;

public:
    explicit LatentAttention(const PagedLatents<T> &a)
        : a(a), width(whole_vectors(a.width)), stride(whole_vectors(a.rank)) {
        // Rows of fewer latents than LATENT_KEYS leave others as they were: never NaN.
        std::memset(s.keys, 0, LATENT_KEYS * width * sizeof(float));
    }

    // The queries of a tile over one part of its context into `parts`, or over all of it.
    void run(const LatentTile &tile, int64_t part, LatentSums *parts) {
        int64_t count = tile.last - tile.first, size = a.part_size(tile.row);
        load_queries(tile, count);
        if (part >= 0) return over(tile, count, part * size, parts[tile.slot + part], size);
        over(tile, count, 0, s.whole, size);
        for (int64_t begin = size; begin < end(tile); begin += size) {
            over(tile, count, begin, s.part, size);
            s.whole.join(s.part, count, stride);
        }
        finish(tile, s.whole);
    }

    // Join the parts of a tile that were computed apart.
    static void join(const PagedLatents<T> &a, const LatentTile &tile, LatentSums *parts) {
        LatentSums *first = parts + tile.slot;
        for (int64_t part = 1; part < a.parts(tile.row); part++)
            first->join(first[part], tile.last - tile.first, whole_vectors(a.rank));
        write(a, tile, *first);
    }

private:
    // Position after the last one that a query of the tile sees.
    int64_t end(const LatentTile &tile) const { return a.position(tile.row, tile.last - 1) + 1; }

    void load_queries(const LatentTile &tile, int64_t count) {
        const T *q = a.q + (a.rows.starts[tile.row] * a.heads + tile.first) * a.width;
        for (int64_t i = 0; i < count; i++) widen_row(q + i * a.width, s.queries + i * width);
    }

    void widen_row(const T *from, float *to) const {
        int64_t d = 0;
#pragma omp simd
        for (d = 0; d < a.width; d++) to[d] = widen(from[d]);
        for (d = a.width; d < width; d++) to[d] = 0;
    }

    // Sums over `size` positions from `begin` on.
    void over(const LatentTile &tile, int64_t count, int64_t begin, LatentSums &sums, int64_t size) {
        int64_t stop = std::min(begin + size, end(tile));
        sums.clear(count, stride);
        prefetch(tile.row, begin, stop);
        for (int64_t at = begin; at < stop; at += LATENT_KEYS) {
            int64_t n = std::min(LATENT_KEYS, stop - at);
            for (int64_t j = 0; j < n; j++) widen_row(a.latent(tile.row, at + j), s.keys + j * width);
            prefetch(tile.row, at + LATENT_KEYS, stop);
            score(count, n);
            soften(tile, count, at, n, sums);
            mix(count, n, sums);
        }
    }

    // Always inlined: see RowAttention.
    __attribute__((always_inline)) void prefetch(int64_t row, int64_t at, int64_t stop) const {
        for (int64_t position = at; position < std::min(at + LATENT_KEYS, stop); position++) {
            const T *latent = a.latent(row, position);
            for (int64_t d = 0; d < a.width; d += int64_t(64 / sizeof(T))) __builtin_prefetch(latent + d);
        }
    }

    // Scores of n keys. Three keys at a time stay in the first cache while all queries go over them.
    void score(int64_t count, int64_t n) {
        for (int64_t j = 0; j < n; j += 3) {
            int64_t i = 0;
            for (; i + 4 <= count; i += 4) score_tile<4>(i, j);
            for (; i < count; i++) score_tile<1>(i, j);
        }
    }

    // scores[i + q][j + k] = queries[i + q] . keys[j + k]
    template <int Q> void score_tile(int64_t i, int64_t j) {
        Wide sum[Q][3] = {};
        const float *q = s.queries + i * width, *k = s.keys + j * width;
        for (int64_t d = 0; d < width; d += WIDE) {
            Wide a = vector_at(k + d), b = vector_at(k + width + d), c = vector_at(k + 2 * width + d);
#pragma GCC unroll 4
            for (int n = 0; n < Q; n++) {
                Wide query = vector_at(q + n * width + d);
                sum[n][0] = fused_add(sum[n][0], query, a);
                sum[n][1] = fused_add(sum[n][1], query, b);
                sum[n][2] = fused_add(sum[n][2], query, c);
            }
        }
        for (int n = 0; n < Q; n++)
            for (int m = 0; m < 3; m++) s.scores[(i + n) * LATENT_KEYS + j + m] = sum_of(sum[n][m]);
    }

    // Online softmax, see RowAttention.
    void soften(const LatentTile &tile, int64_t count, int64_t at, int64_t n, LatentSums &sums) {
        for (int64_t i = 0; i < count; i++) {
            float *row = s.scores + i * LATENT_KEYS;
            int64_t seen = std::clamp<int64_t>(a.position(tile.row, tile.first + i) + 1 - at, 0, n);
            for (int64_t j = seen; j < n; j++) row[j] = 0;
            if (!seen) continue;
            float highest = sums.highest[i], total = 0;
#pragma omp simd reduction(max : highest)
            for (int64_t j = 0; j < seen; j++) {
                row[j] *= a.scale;
                highest = std::max(highest, row[j]);
            }
            float shrink = exp_moderate(sums.highest[i] - highest);
#pragma omp simd reduction(+ : total)
            for (int64_t j = 0; j < seen; j++) {
                row[j] = exp_moderate(row[j] - highest);
                total += row[j];
            }
            if (shrink != 1.0f)
                for (int64_t d = 0; d < stride; d++) sums.values[i * stride + d] *= shrink;
            sums.total[i] = sums.total[i] * shrink + total;
            sums.highest[i] = highest;
        }
    }

    // The sums of values. Two vectors of all keys stay in the first cache while all queries go over them.
    void mix(int64_t count, int64_t n, LatentSums &sums) {
        for (int64_t d = 0; d < stride; d += 2 * WIDE) {
            int64_t i = 0;
            for (; i + 6 <= count; i += 6) mix_tile<6>(i, d, n, sums);
            for (; i + 4 <= count; i += 4) mix_tile<4>(i, d, n, sums);
            for (; i < count; i++) mix_tile<1>(i, d, n, sums);
        }
    }

    // values[i + q][d ...] += scores[i + q][j] * keys[j][d ...] for all j, in their order whatever Q is. The last of
    // both vectors may be behind the sums' row: it is left out then.
    template <int Q> void mix_tile(int64_t i, int64_t d, int64_t n, LatentSums &sums) {
        const bool both = d + WIDE < stride;
        const int64_t second = both ? WIDE : 0;
        Wide low[Q], high[Q];
        float *to = sums.values + i * stride + d;
        for (int q = 0; q < Q; q++) low[q] = vector_at(to + q * stride), high[q] = vector_at(to + q * stride + second);
        for (int64_t j = 0; j < n; j++) {
            Wide a = vector_at(s.keys + j * width + d), b = vector_at(s.keys + j * width + d + second);
#pragma GCC unroll 6
            for (int q = 0; q < Q; q++) {
                Wide weight = Wide{} + s.scores[(i + q) * LATENT_KEYS + j];
                low[q] = fused_add(low[q], weight, a);
                high[q] = fused_add(high[q], weight, b);
            }
        }
        for (int q = 0; q < Q; q++) {
            if (both) vector_at(to + q * stride + second) = high[q];
            vector_at(to + q * stride) = low[q];
        }
    }

    void finish(const LatentTile &tile, const LatentSums &sums) const { write(a, tile, sums); }

    static void write(const PagedLatents<T> &a, const LatentTile &tile, const LatentSums &sums) {
        int64_t at = a.rows.starts[tile.row] * a.heads + tile.first, stride = whole_vectors(a.rank);
        float row[WIDEST_LATENT];
        for (int64_t i = 0; i < tile.last - tile.first; i++) {
            float share = 1.0f / sums.total[i];
            for (int64_t d = 0; d < a.rank; d++) row[d] = sums.values[i * stride + d] * share;
            narrow_row(row, a.out + (at + i) * a.rank, a.rank);
            if (a.lse) a.lse[at + i] = sums.highest[i] + std::log(sums.total[i]);
        }
    }
};

// Pieces [first, last) of the tiles, in the calling thread.
template <class T>
void run_latents(const PagedLatents<T> &a, const LatentTiles &tiles, LatentSums *parts, int64_t first, int64_t last) {
    LatentAttention<T> attention(a);  // some 400 KB of the thread's stack
    for (int64_t i = first; i < last; i++) attention.run(tiles.tile(i), tiles.part(i), parts);
}

// Latent attention by the whole team, then then() once. `parts` has room for the parts of the tiles.
template <class T>
void attend(Team &team, const PagedLatents<T> &a, const LatentTiles &tiles, LatentSums *parts, Then then) {
    auto run = [&](int64_t first, int64_t last) { run_latents(a, tiles, parts, first, last); };
    if (!tiles.parts()) return team.each(tiles.count(), 1, run, then);
    team.each(tiles.count(), 1, run, nothing);
    auto join = [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++)
            if (const LatentTile &tile = tiles.all()[i]; tile.slot >= 0) LatentAttention<T>::join(a, tile, parts);
    };
    team.each(tiles.all().size(), 1, join, then);
}
