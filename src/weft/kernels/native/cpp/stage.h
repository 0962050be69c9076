// All layers of a stage in one call: one team from the first norm to the last product.
#pragma once

#include <atomic>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "product.h"
#include "rows.h"
#include "sum.h"
#include "team.h"

// One layer with its KV cache; tensors are of T. As in native/stage.py.
struct Layer {
    const void *attention_norm, *q_norm, *k_norm, *mlp_norm;
    void *keys, *values;
    Matrix qkv, out, gate_up, down;
    int64_t q_heads, kv_heads, head_dim, window;
    float scale, head_eps, eps;
};

// What is computed in a call, see Batch in kernels/batch.py. x [tokens, hidden] is summed over the ranks through
// `shared`, or by `sum`, which returns 0, or something else where that failed; both are null for a rank alone.
struct Step {
    void *residual;  // [tokens, hidden], the layers' input and their result
    const float *angles;
    const int32_t *positions;
    const int64_t *slots;
    const int32_t *row_starts, *context, *tables;
    int64_t tokens, rows, table_width, block_size;
    const Shared *shared;
    int32_t (*sum)();
};

// Tokens that go through an MLP at a time: what lies between its products then stays in the cache.
constexpr int64_t CHUNK = 256;

// Where the team's results lie between the parts of a layer. The layers take turns in it.
template <class T> struct Workspace {
    int64_t bytes = 0;
    T *x;        // [tokens, hidden]: a norm's result, then what is still to be added to the residual
    T *qkv;      // [tokens, (q_heads + 2 kv_heads) * head_dim], q rotated in place
    T *mixed;    // [tokens, q_heads * head_dim]
    T *gate_up;  // [CHUNK, 2 * inner]
    T *inner;    // [CHUNK, inner]
    char *prepared;

    // In `memory`, whose address is a multiple of 64; null to ask for `bytes` only.
    Workspace(const Layer *layers, int64_t count, int64_t tokens, char *memory) {
        int64_t chunk = std::min(tokens, CHUNK), hidden = 0, qkv_rows = 0, heads = 0, wide = 0, scratch = 0;
        for (const Layer *l = layers; l < layers + count; l++) {
            hidden = std::max(hidden, l->out.rows);
            qkv_rows = std::max(qkv_rows, l->qkv.rows);
            heads = std::max(heads, l->out.cols);
            wide = std::max(wide, l->gate_up.rows);
            for (const Matrix *m : {&l->qkv, &l->out, &l->gate_up, &l->down})
                scratch = std::max(scratch, scratch_bytes<T>(*m, tokens));
        }
        auto take = [&](auto *&place, int64_t count) {
            place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(memory + bytes);
            bytes += (count * int64_t(sizeof *place) + 63) / 64 * 64;
        };
        take(x, tokens * hidden);
        take(qkv, tokens * qkv_rows);
        take(mixed, tokens * heads);
        take(gate_up, chunk * wide);
        take(inner, chunk * wide / 2);
        take(prepared, scratch);
    }
};

template <class T> class Stage {
    const Step &step;
    const Workspace<T> &space;
    const std::vector<Tile> &tiles;
    std::atomic<bool> failed{false};

    T *residual() const { return static_cast<T *>(step.residual); }

    // residual += x, where there is something in it; x = norm(residual).
    void norm(const Team &team, const void *weight, int64_t hidden, float eps, bool add) const {
        Range mine = team.share(step.tokens);
        for (int64_t t = mine.first; t < mine.last; t++) {
            T *x = space.x + t * hidden, *r = residual() + t * hidden;
            norm_row<T>(add ? x : r, add ? r : nullptr, static_cast<const T *>(weight), x, hidden, eps);
        }
        team.meet();
    }

    // x summed over the ranks. False where that failed, and all is over.
    bool sum(const Team &team, int64_t hidden) {
        team.meet();
        if (!step.sum && !step.shared) return true;
        if (team.rank == 0) {
            if (step.shared)
                step.shared->sum(space.x, step.tokens * hidden);
            else
                failed = step.sum() != 0;
        }
        team.meet();
        return !failed;
    }

    bool attention(const Team &team, const Layer &l) {
        int64_t width = l.qkv.rows;
        T *keys = static_cast<T *>(l.keys), *values = static_cast<T *>(l.values);
        product(team, l.qkv, space.x, step.tokens, space.qkv, space.prepared);
        team.meet();
        Heads<T> heads{l.q_heads, l.kv_heads, l.head_dim, static_cast<const T *>(l.q_norm),
                       static_cast<const T *>(l.k_norm), l.head_eps};
        Range mine = team.share(step.tokens);
        for (int64_t t = mine.first; t < mine.last; t++)
            rotate(heads, space.qkv + t * width, space.qkv + t * width,
                   step.angles + int64_t(step.positions[t]) * l.head_dim,
                   [&](int64_t head, const T *key, const T *value) {
                       store(key, value, keys, values, step.slots[t], head, step.block_size, l.kv_heads, l.head_dim);
                   });
        // A row may read what another one has stored in this step.
        team.meet();
        attend(team, Paged<T>{space.qkv, keys, values, space.mixed, step.row_starts, step.context, step.tables,
                            step.table_width, step.block_size, l.q_heads, l.kv_heads, l.head_dim, l.window, width,
                            l.scale},
               tiles);
        team.meet();
        product(team, l.out, space.mixed, step.tokens, space.x, space.prepared);
        return sum(team, l.out.rows);
    }

    bool mlp(const Team &team, const Layer &l) {
        int64_t hidden = l.down.rows, width = l.down.cols;
        for (int64_t at = 0; at < step.tokens; at += CHUNK) {
            int64_t count = std::min(CHUNK, step.tokens - at);
            if (at) team.meet();  // others may still read what the chunk before has prepared
            product(team, l.gate_up, space.x + at * hidden, count, space.gate_up, space.prepared);
            team.meet();
            silu_mul(team, count, width);
            team.meet();
            product(team, l.down, space.inner, count, space.x + at * hidden, space.prepared);
        }
        return sum(team, hidden);
    }

    // By columns: there may be fewer tokens than threads.
    void silu_mul(const Team &team, int64_t tokens, int64_t width) const {
        Range mine = team.share((width + PANEL - 1) / PANEL);
        int64_t first = mine.first * PANEL, count = std::min(mine.last * PANEL, width) - first;
        for (int64_t t = 0; t < tokens; t++) {
            const T *gate = space.gate_up + t * 2 * width + first;
            silu_mul_row(gate, gate + width, space.inner + t * width + first, count);
        }
    }

public:
    Stage(const Step &step, const Workspace<T> &space, const std::vector<Tile> &tiles)
        : step(step), space(space), tiles(tiles) {}

    void run(const Team &team, const Layer *layers, int64_t count) {
        int64_t hidden = layers->out.rows;
        for (const Layer *l = layers; l < layers + count; l++) {
            norm(team, l->attention_norm, hidden, l->eps, l != layers);
            if (!attention(team, *l)) return;
            norm(team, l->mlp_norm, hidden, l->eps, true);
            if (!mlp(team, *l)) return;
        }
        Range mine = team.share(step.tokens * hidden);
        for (int64_t i = mine.first; i < mine.last; i++)
            residual()[i] = narrow<T>(widen(residual()[i]) + widen(space.x[i]));
    }
};

// step.residual through all layers; `memory` of as many bytes as a Workspace says.
template <class T> void stage(const Layer *layers, int64_t count, const Step &step, char *memory) {
    Workspace<T> space(layers, count, step.tokens, memory);
    std::vector<Tile> tiles = tiles_of(step.row_starts, step.rows, layers->q_heads / layers->kv_heads, layers->kv_heads);
    Stage<T> stage(step, space, tiles);
    int64_t weights = layers->qkv.rows * layers->qkv.cols + layers->gate_up.rows * layers->gate_up.cols;
    together(weights * step.tokens > SMALL, [&](const Team &team) { stage.run(team, layers, count); });
}
