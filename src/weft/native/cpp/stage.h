// All layers of a pipeline stage in one call: one team from the first norm to the last product.
#pragma once

#include <atomic>
#include <deque>

#include "attention.h"
#include "experts.h"
#include "matrix.h"
#include "memory.h"
#include "product.h"
#include "routing.h"
#include "rows.h"
#include "sum.h"
#include "team.h"

// A router, whose weights are not quantised, and a rank's share of the experts. Mirrored in native/structures.py.
struct Mixture {
    Matrix router;
    int64_t top_k, normalised;  // see `choose_experts`
    Experts experts;
};

// One decoder layer with its KV cache; tensors are of T. A layer with a mixture of experts has no gate_up and down.
// Mirrored in native/structures.py.
struct Layer {
    const void *attention_norm, *q_norm, *k_norm, *mlp_norm;
    void *keys, *values;
    Matrix qkv, out, gate_up, down;
    const Mixture *mixture;  // null in a layer with one MLP
    int64_t q_heads, kv_heads, head_dim, window;
    int64_t group;  // KV group, whose tables and slots say where its keys and values are
    float scale, head_eps, eps;

    // The first matrix of the feed-forward part.
    const Matrix &opening() const { return mixture ? mixture->experts.gate_up : gate_up; }
};

// The step that a call computes, see Batch in kernels/batch.py. Mirrored in native/structures.py. x [tokens, hidden] is
// summed over the ranks through `shared`, or by sum(), which returns 0, or another number if it failed. Both are null
// if there is one rank.
struct Step {
    void *residual;  // [tokens, hidden]: the layers' input and result
    const float *angles;
    const int32_t *positions;
    const int64_t *slots;  // [groups, tokens]
    const int32_t *row_starts, *context;
    const int32_t *tables;  // [groups, rows, table_width]
    int64_t tokens, rows, table_width, block_size;
    const Shared *shared;
    int32_t (*sum)();

    Rows all_rows(int64_t group) const {
        return {row_starts, context, tables + group * rows * table_width, rows, table_width, block_size};
    }
};

// Tokens that go through an MLP at a time: results between its products then stay in the CPU's cache.
constexpr int64_t CHUNK = 256;

// Memory for results between the parts of a layer, which all layers use in turn.
template <class T> struct Workspace {
    int64_t bytes = 0;
    T *x;        // [tokens, hidden]: a norm's result, then what is to be added to the residual
    T *qkv;      // [tokens, (q_heads + 2 kv_heads) * head_dim], q rotated in place
    T *mixed;    // [tokens, q_heads * head_dim]
    T *gate_up;  // [CHUNK, 2 * inner]
    T *inner;    // [CHUNK, inner]
    char *prepared;
    float *scores;    // [tokens, experts], of tokens that go through the experts at once; so are `chosen` and `shares`
    int64_t *chosen;  // [tokens, top_k]
    float *shares;
    ExpertSpace<T> experts;
    int64_t widest = 0;  // elements of a token's row

    // In `memory`, whose address is a multiple of WORKSPACE_ALIGNMENT; null to compute `bytes` only.
    Workspace(const Layer *layers, int64_t count, int64_t tokens, char *memory)
        : experts(tokens_at_once(tokens, most_chosen(layers, count)), most_chosen(layers, count)) {
        int64_t chunk = std::min(tokens, CHUNK), hidden = 0, qkv_rows = 0, heads = 0, wide = 0, scratch = 0, routed = 0;
        for (const Layer *l = layers; l < layers + count; l++) {
            hidden = std::max(hidden, l->out.rows);
            qkv_rows = std::max(qkv_rows, l->qkv.rows);
            heads = std::max(heads, l->out.cols);
            for (const Matrix *m : {&l->qkv, &l->out, &l->opening()})
                scratch = std::max(scratch, scratch_bytes<T>(*m, tokens));
            if (l->mixture) {
                experts.include(l->mixture->experts);
                routed = std::max(routed, l->mixture->router.rows);
            } else {
                wide = std::max(wide, l->gate_up.rows);
                scratch = std::max(scratch, scratch_bytes<T>(l->down, tokens));
            }
        }
        widest = std::max({wide, qkv_rows, experts.top_k * std::max(hidden, experts.width)});
        Memory parts{memory};
        parts.reserve(x, tokens * hidden);
        parts.reserve(qkv, tokens * qkv_rows);
        parts.reserve(mixed, tokens * heads);
        parts.reserve(gate_up, chunk * wide);
        parts.reserve(inner, chunk * wide / 2);
        parts.reserve(prepared, scratch);
        parts.reserve(scores, experts.tokens * routed);
        parts.reserve(chosen, experts.tokens * experts.top_k);
        parts.reserve(shares, experts.tokens * experts.top_k);
        experts.reserve(parts);
        bytes = parts.bytes;
    }

private:
    // The most experts that a token has in any layer.
    static int64_t most_chosen(const Layer *layers, int64_t count) {
        int64_t most = 0;
        for (const Layer *l = layers; l < layers + count; l++)
            if (l->mixture) most = std::max(most, l->mixture->top_k);
        return most;
    }
};

// Elements of a step's rows, at their widest: one thread goes through fewer sooner than all threads would meet.
constexpr int64_t LITTLE = 1 << 14;

// All layers by a team, which goes from one product to the next. The operations on rows in between are phases of their
// own, or, if they are `little` work, done by the thread that ends the phase before.
template <class T> class Stage {
    const Step &step;
    const Workspace<T> &space;
    const std::deque<Tiles> &tiles;  // by KV group
    const int64_t hidden;
    const bool little;
    const bool at_once;  // one thread goes on with the sums of a product as soon as they are complete
    std::atomic<bool> failed{false};

    T *residual() const { return static_cast<T *>(step.residual); }

    // out = x W^T for `tokens` rows, then then() once. With `little` work, x has been prepared.
    void multiply_rows(Team &team, const Matrix &m, const T *x, int64_t tokens, T *out, Then then) const {
        product(team, m, x, tokens, out, space.prepared, little, then);
    }

    void prepare(const Matrix &m, const T *x, int64_t first, int64_t last) const {
        if (little) prepare_rows(m, x, space.prepared, first, last);
    }

    // Sum space.x over the ranks. Returns false if that failed: then the call ends.
    bool sum(Team &team) {
        if (step.shared)
            team.each(1, [&](int64_t, int64_t) { step.shared->sum(space.x, step.tokens * hidden); });
        else if (step.sum)
            team.lead([&] { failed = step.sum() != 0; });
        return !failed;
    }

    // residual += x if `add`; x = norm(residual), prepared for a product with `next`.
    void norm(const void *weight, const Matrix &next, float eps, bool add, int64_t first, int64_t last) const {
        for (int64_t t = first; t < last; t++) {
            T *x = space.x + t * hidden, *r = residual() + t * hidden;
            norm_row<T>(add ? x : r, add ? r : nullptr, static_cast<const T *>(weight), x, hidden, eps);
        }
        prepare(next, space.x, first, last);
    }

    // Rows of space.x from token `at` on become x W^T; then `join`.
    bool multiply_and_join(Team &team, const Matrix &m, const T *x, int64_t at, Pieces rows) {
        multiply_rows(team, m, x, step.tokens - at, space.x + at * m.rows, [&] { join_at_once(rows); });
        return join(team, rows);
    }

    // Rows of space.x are joined in two parts, of which only one does anything: the first when the last of them is done,
    // by one thread, the second then by the whole team.
    void join_at_once(Pieces rows) const {
        if (at_once) rows(int64_t(0), step.tokens);
    }

    // Sum all rows of space.x over the ranks, and call rows(first, last) for them. Returns false if the sum failed.
    bool join(Team &team, Pieces rows) {
        if (at_once) return true;
        if (!sum(team)) return false;
        team.each(step.tokens, rows);
        return true;
    }

    bool attention(Team &team, const Layer &l, Pieces rows) {
        int64_t width = l.qkv.rows;
        T *keys = static_cast<T *>(l.keys), *values = static_cast<T *>(l.values);
        const int64_t *slots = step.slots + l.group * step.tokens;
        Heads<T> heads{l.q_heads, l.kv_heads, l.head_dim, static_cast<const T *>(l.q_norm),
                       static_cast<const T *>(l.k_norm), l.head_eps};
        auto rotated = [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                rotate(heads, space.qkv + t * width, space.qkv + t * width,
                       step.angles + int64_t(step.positions[t]) * l.head_dim,
                       [&](int64_t head, const T *key, const T *value) {
                           store(key, value, keys, values, slots[t], head, step.block_size, l.kv_heads,
                                 l.head_dim);
                       });
        };
        multiply_rows(team, l.qkv, space.x, step.tokens, space.qkv, [&] {
            if (little) rotated(0, step.tokens);
        });
        // All rows before attention: a row may read what another one stores in this step.
        if (!little) team.each(step.tokens, rotated);
        Paged<T> paged{space.qkv, keys, values, space.mixed, step.all_rows(l.group), l.q_heads, l.kv_heads, l.head_dim,
                       l.window, width, l.scale, nullptr};
        attend(team, paged, tiles[l.group], [&] { prepare(l.out, space.mixed, 0, step.tokens); });
        return multiply_and_join(team, l.out, space.mixed, 0, rows);
    }

    bool mlp(Team &team, const Layer &l, Pieces rows) {
        int64_t width = l.down.cols;
        for (int64_t at = 0;; at += CHUNK) {
            int64_t count = std::min(CHUNK, step.tokens - at);
            // By columns, as there may be fewer tokens than threads.
            auto activated = [&](int64_t first, int64_t last) {
                int64_t from = first * PANEL, columns = std::min(last * PANEL, width) - from;
                for (int64_t t = 0; t < count; t++) {
                    const T *gate = space.gate_up + t * 2 * width + from;
                    silu_mul_row(gate, gate + width, space.inner + t * width + from, columns);
                }
            };
            int64_t panels = (width + PANEL - 1) / PANEL;
            multiply_rows(team, l.gate_up, space.x + at * hidden, count, space.gate_up, [&] {
                if (!little) return;
                activated(0, panels);
                prepare(l.down, space.inner, 0, count);
            });
            if (!little) team.each(panels, activated);
            if (at + count == step.tokens) return multiply_and_join(team, l.down, space.inner, at, rows);
            multiply_rows(team, l.down, space.inner, count, space.x + at * hidden, nothing);
        }
    }

    // The experts of `count` tokens from token `at` on, and their shares.
    void route(Team &team, const Mixture &m, const ExpertPass<T> &pass, int64_t at, int64_t count) const {
        const T *x = space.x + at * hidden;
        auto choose = [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                choose_experts(space.scores + t * m.router.rows, m.router.rows, m.top_k, m.normalised,
                               space.chosen + t * m.top_k, space.shares + t * m.top_k);
        };
        auto assign = [&] { pass.assign({m.top_k, space.chosen, space.shares}, count); };
        int64_t panels = m.router.panels();
        if (little)
            return team.each(
                panels,
                [&](int64_t first, int64_t last) {
                    multiply(m.router, x, nullptr, count, space.scores, first, last);
                },
                [&] {
                    choose(0, count);
                    assign();
                });
        team.each(
            count,
            [&](int64_t first, int64_t last) {
                float *scores = space.scores + first * m.router.rows;
                multiply(m.router, x + first * hidden, nullptr, last - first, scores, 0, panels);
                choose(first, last);
            },
            assign);
    }

    bool mixture(Team &team, const Mixture &m, Pieces rows) {
        ExpertPass<T> pass(m.experts, space.experts);
        int64_t most = space.experts.tokens;
        for (int64_t at = 0; at < step.tokens; at += most) {
            int64_t count = std::min(most, step.tokens - at);
            bool last = at + count == step.tokens;
            route(team, m, pass, at, count);
            const Matrix &first = m.experts.gate_up;
            T *x = space.x + at * hidden;
            const char *read = first.dense() ? reinterpret_cast<const char *>(x)
                                             : space.prepared + at * prepared_bytes<T>(first);
            pass.run(team, read, count, x, little, [&] {
                if (last) join_at_once(rows);
            });
        }
        return join(team, rows);
    }

public:
    Stage(const Step &step, const Workspace<T> &space, const std::deque<Tiles> &tiles, int64_t hidden)
        : step(step), space(space), tiles(tiles), hidden(hidden),
          little(step.tokens <= CHUNK && step.tokens * space.widest <= LITTLE),
          at_once(little && !step.shared && !step.sum) {}

    void run(Team &team, const Layer *layers, int64_t count) {
        const Layer *end = layers + count;
        team.each(step.tokens, [&](int64_t first, int64_t last) {
            norm(layers->attention_norm, layers->qkv, layers->eps, false, first, last);
        });
        for (const Layer *l = layers; l < end; l++) {
            auto before_mlp = [&](int64_t first, int64_t last) {
                norm(l->mlp_norm, l->opening(), l->eps, true, first, last);
                // Rows are prepared before they are copied to the experts, however many they are.
                if (l->mixture && !little) prepare_rows(l->opening(), space.x, space.prepared, first, last);
            };
            auto after_mlp = [&](int64_t first, int64_t last) {
                const Layer *next = l + 1;
                if (next < end) return norm(next->attention_norm, next->qkv, next->eps, true, first, last);
                for (int64_t i = first * hidden; i < last * hidden; i++)
                    residual()[i] = narrow<T>(widen(residual()[i]) + widen(space.x[i]));
            };
            if (!attention(team, *l, before_mlp)) return;
            if (!(l->mixture ? mixture(team, *l->mixture, after_mlp) : mlp(team, *l, after_mlp))) return;
        }
    }
};

// step.residual through all layers. `memory` has as many bytes as Workspace computes.
template <class T> void stage(const Layer *layers, int64_t count, const Step &step, char *memory, int64_t threads) {
    Workspace<T> space(layers, count, step.tokens, memory);
    int64_t groups = 0;
    for (const Layer *l = layers; l < layers + count; l++) groups = std::max(groups, l->group + 1);
    std::deque<Tiles> tiles;
    for (int64_t group = 0; group < groups; group++)
        tiles.emplace_back(step.all_rows(group), layers->q_heads / layers->kv_heads, layers->kv_heads, threads);
    Stage<T> stage(step, space, tiles, layers->out.rows);
    int64_t weights = layers->qkv.rows * layers->qkv.cols + layers->opening().rows * layers->opening().cols;
    together(threads, weights * step.tokens > SMALL, [&](Team &team) { stage.run(team, layers, count); });
}
