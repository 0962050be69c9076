// Latent attention in the expanded form, for rows of many tokens: the latents of a row's context are projected to keys
// and values, some heads at a time, over which the row's queries attend. See ranks/kernels/latents.py.
#pragma once

#include <algorithm>
#include <deque>
#include <numeric>
#include <vector>

#include "attention.h"
#include "exchange.h"
#include "latent_products.h"
#include "latents.h"
#include "memory.h"

constexpr int64_t EXPANDED_BLOCK = 8;  // positions of a block of expanded keys and values

// A row of many tokens: its queries over all of its context, which lies in one place.
class ExpandedRow {
    const int32_t starts[2], lengths[1];
    std::vector<int32_t> blocks;
    std::deque<Tiles> tiles;  // of all heads that are expanded at once, and of the fewer ones that are left

public:
    const int64_t row, first, tokens, context;  // `first`: of its tokens, in the step
    const int64_t heads, at_once;

    ExpandedRow(const Rows &all, int64_t row, int64_t heads, int64_t at_once, int64_t threads)
        : starts{0, int32_t(all.tokens(row))}, lengths{all.context[row]},
          blocks((all.context[row] + EXPANDED_BLOCK - 1) / EXPANDED_BLOCK), row(row), first(all.starts[row]),
          tokens(all.tokens(row)), context(all.context[row]), heads(heads), at_once(at_once) {
        std::iota(blocks.begin(), blocks.end(), 0);
        tiles.emplace_back(rows(), 1, at_once, threads);
        if (int64_t left = heads % at_once) tiles.emplace_back(rows(), 1, left, threads);
    }

    // Not copied: tiles and rows point into it.
    ExpandedRow(const ExpandedRow &) = delete;
    ExpandedRow &operator=(const ExpandedRow &) = delete;

    Rows rows() const { return {starts, lengths, blocks.data(), 1, int64_t(blocks.size()), EXPANDED_BLOCK}; }
    const Tiles &tiles_of(int64_t count) const { return tiles[count != at_once]; }
};

// The rows of a step by their form: those of `least` tokens or more are expanded, and `absorbed` are the tokens of all
// others.
struct LatentForms {
    std::deque<ExpandedRow> expanded;
    std::vector<Tokens> absorbed;

    LatentForms(const Rows &rows, const LatentProjection &p, int64_t least, int64_t bytes, int64_t itemsize,
                int64_t threads) {
        for (int64_t row = 0; row < rows.count; row++) {
            if (rows.tokens(row) >= least) {
                int64_t head_bytes = int64_t(rows.context[row]) * (p.head_dim() + p.nope_dim() + p.rope_dim) * itemsize;
                int64_t at_once = std::clamp<int64_t>(bytes / std::max<int64_t>(1, head_bytes), 1, p.heads);
                expanded.emplace_back(rows, row, p.heads, at_once, threads);
                continue;
            }
            int64_t first = rows.starts[row], last = rows.starts[row + 1];
            if (!absorbed.empty() && absorbed.back().last == first)
                absorbed.back().last = last;
            else
                absorbed.push_back({first, last});
        }
    }
};

// What one row's expanded form takes. Rows of keys, values and results are as long as a head's key, although values may
// be shorter.
template <class T> struct ExpandedSpace {
    int64_t bytes = 0;
    T *latents, *keys, *values, *mixed;

    ExpandedSpace(const ExpandedRow &row, const LatentProjection &p, char *memory) {
        Memory parts{memory};
        int64_t positions = (row.context + EXPANDED_BLOCK - 1) / EXPANDED_BLOCK * EXPANDED_BLOCK;
        parts.reserve(latents, row.context * p.latent_dim());
        parts.reserve(keys, positions * row.at_once * p.head_dim());
        parts.reserve(values, positions * row.at_once * p.head_dim());
        parts.reserve(mixed, row.tokens * row.at_once * p.head_dim());
        bytes = parts.bytes;
    }
};

// Memory of the calling thread, which later calls use again: zeros at first, so that what nobody writes is no NaN.
inline char *expanded_memory(int64_t bytes) {
    static thread_local std::vector<char> held;
    if (int64_t(held.size()) < bytes + WORKSPACE_ALIGNMENT) held.resize(bytes + WORKSPACE_ALIGNMENT);
    return held.data() + -reinterpret_cast<uintptr_t>(held.data()) % WORKSPACE_ALIGNMENT;
}

// Attention of a row's rotated queries q [tokens, heads, head_dim], `q_stride` elements from one token's to the next
// one's, over the latents of its context, into out [tokens, heads * value_dim].
template <class T>
void attend_expanded(Team &team, const ExpandedRow &row, const LatentProjection &p, const PagedLatents<T> &a, const T *q,
                     int64_t q_stride, const ExpandedSpace<T> &space, T *out) {
    const int64_t width = p.latent_dim(), head_dim = p.head_dim();
    team.each(row.context, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++)
            std::memcpy(space.latents + i * width, a.latent(row.row, i), width * sizeof(T));
    });
    for (int64_t head = 0; head < row.heads; head += row.at_once) {
        int64_t count = std::min(row.at_once, row.heads - head);
        expand_latents(team, p, space.latents, row.context, head, count, space.keys, space.values, head_dim);
        Paged<T> paged{q + head * head_dim, space.keys, space.values, space.mixed, row.rows(), count, count, head_dim, 0,
                       q_stride, a.scale, nullptr, nullptr, 0};
        attend(team, paged, row.tiles_of(count), nothing);
        team.each(row.tokens, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                for (int64_t h = 0; h < count; h++)
                    std::memcpy(out + (t * p.heads + head + h) * p.value_dim(), space.mixed + (t * count + h) * head_dim,
                                p.value_dim() * sizeof(T));
        });
    }
}
