// All layers of a pipeline stage in one call: one team from the first norm to the last product.
#pragma once

#include <atomic>
#include <deque>
#include <optional>

#include "attention.h"
#include "exchange.h"
#include "expanded.h"
#include "experts.h"
#include "latent_products.h"
#include "latents.h"
#include "matrix.h"
#include "product.h"
#include "routing.h"
#include "rows.h"
#include "sum.h"
#include "team.h"
#include "workspace.h"

// A part of a layer: its products before attention, attention, the product after it, a sum over the ranks with the wait
// for them, the feed-forward part, norms and residuals. Mirrored in machine/native/structures.py.
enum Phase : int64_t { QKV, ATTEND, OUT, SUM, FEED_FORWARD, NORMS, PHASES };

// A phase of a layer, counted from the call's first one, and its end by the monotonic clock. Mirrored in
// machine/native/structures.py.
struct PhaseEntry {
    int64_t layer, phase, ended_ns;
};

// The ends of phases in the order of time, of a step that is traced: `count` entries of `room`. Phases that do not fit
// are left out. Mirrored in machine/native/structures.py.
struct PhaseLog {
    PhaseEntry *entries;
    int64_t room, count, began_ns;

    void add(int64_t layer, Phase phase) {
        if (count < room) entries[count++] = {layer, phase, now_ns()};
    }
};

// The step that a call computes, see Batch in ranks/kernels/batch.py. Mirrored in machine/native/structures.py. x [tokens, hidden] is
// summed over the ranks through `shared`, or by sum(), which returns 0, or another number if it failed. Both are null
// if there is one rank. `exchange` is null unless other attention groups take the step with this one, which then may
// have no tokens: only the exchange is read. `phases` is null unless the step is traced. With a `fixed_order` of sums, a
// token's result has the same bits whatever other tokens are in the step; matrices have such a field of their own.
struct Step {
    void *residual;  // [tokens, hidden]: the layers' input and result
    const float *angles;
    const int32_t *angle_rows;
    const int64_t *slots;  // [groups, tokens]
    const int32_t *row_starts, *context;
    const int32_t *tables;  // [groups, rows, table_width]
    int64_t tokens, rows, table_width, block_size;
    const Shared *shared;
    int32_t (*sum)();
    const Exchange *exchange;
    PhaseLog *phases;
    int64_t fixed_order;

    // Tokens that go through the experts of a rank.
    int64_t routed() const { return exchange ? exchange->tokens() : tokens; }

    Rows all_rows(int64_t group) const {
        return {row_starts, context, tables + group * rows * table_width, rows, table_width, block_size};
    }
};

// Elements of a step's rows, at their widest: one thread goes through fewer sooner than all threads would meet.
constexpr int64_t LITTLE = 1 << 14;

// All layers by a team, which goes from one product to the next. The operations on rows in between are phases of their
// own, or, if they are `little` work, done by the thread that ends the phase before.
template <class T> class Stage {
    const Step &step;
    const Workspace<T> &space;
    const std::deque<Tiles> &tiles;  // by KV group; none with latent attention
    // Null unless the layers have latent attention: the forms of the rows, and the tiles of those that are absorbed.
    const LatentForms *forms;
    const LatentTiles *latent_tiles;
    LatentSums *const parts;  // room for the parts of these tiles
    char *const expanded;     // memory for rows that are expanded
    const int64_t hidden;
    const bool little;
    const bool at_once;  // one thread goes on with the sums of a product as soon as they are complete
    std::atomic<bool> failed{false};
    int64_t layer = 0;  // of the thread that leads, if the step is traced

    T *residual() const { return static_cast<T *>(step.residual); }

    // out = x W^T for `tokens` rows, then then() once. With `little` work, x has been prepared.
    void multiply_rows(Team &team, const Matrix &m, const T *x, int64_t tokens, T *out, Then then) const {
        product(team, m, x, tokens, out, space.prepared, little, then);
    }

    void prepare(const Matrix &m, const T *x, int64_t first, int64_t last) const {
        if (little && !reads_plain<T>(m, step.tokens)) prepare_rows(m, x, space.prepared, first, last);
    }

    // Log the end of a phase: the thread that leads does.
    void ended(const Team &team, Phase phase) const {
        if (step.phases && !team.rank) step.phases->add(layer, phase);
    }

    // Sum space.x over the ranks. Returns false if that failed: then the call ends.
    bool sum(Team &team) {
        if (step.shared)
            team.each(1, [&](int64_t, int64_t) { step.shared->sum(space.x, step.tokens * hidden); });
        else if (step.sum)
            team.lead([&] { failed = step.sum() != 0; });
        if (step.shared || step.sum) ended(team, SUM);
        return !failed;
    }

    // residual += x if `add`; x = norm(residual).
    void norm(const void *weight, float eps, bool add, int64_t first, int64_t last) const {
        for (int64_t t = first; t < last; t++) {
            T *x = space.x + t * hidden, *r = residual() + t * hidden;
            norm_row<T>(add ? x : r, add ? r : nullptr, static_cast<const T *>(weight), x, hidden, eps);
        }
    }

    // Rows of space.x from token `at` on become x W^T; then `join`.
    bool multiply_and_join(Team &team, const Matrix &m, const T *x, int64_t at, Pieces rows, Phase phase) {
        multiply_rows(team, m, x, step.tokens - at, space.x + at * m.rows, [&] { join_at_once(rows); });
        ended(team, phase);
        return join(team, rows);
    }

    // Rows of space.x are joined in two parts, of which only one does anything: the first when the last of them is
    // done, by one thread, the second then by the whole team.
    void join_at_once(Pieces rows) const {
        if (at_once) rows(int64_t(0), step.tokens);
    }

    // Sum all rows of space.x over the ranks, unless they are `complete`, and call rows(first, last) for them. Returns
    // false if the sum failed.
    bool join(Team &team, Pieces rows, bool complete = false) {
        if (at_once) return true;
        if (!complete && !sum(team)) return false;
        team.each(step.tokens, rows);
        ended(team, NORMS);
        return true;
    }

    // Latent attention of one layer, its cache and its mixed latents.
    PagedLatents<T> paged_latents(const Layer &l) const {
        const LatentProjection &p = l.latent->projection;
        return {space.absorbed, static_cast<const T *>(l.keys), space.mixed_latents, step.all_rows(l.group), l.q_heads,
                p.rank(), p.latent_dim(), l.scale, nullptr, step.fixed_order};
    }

    // Queries into space.qkv, and latents into space.latents.
    void project_latents(Team &team, const Layer &l) {
        const Latent &m = *l.latent;
        const T *x = space.x;
        product(team, m.kv_down, x, step.tokens, space.latents, space.prepared, false, nothing);
        if (m.q_down.rows) {
            product(team, m.q_down, x, step.tokens, space.q_low, space.prepared, false, nothing);
            team.each(step.tokens, [&](int64_t first, int64_t last) {
                for (int64_t t = first; t < last; t++) {
                    T *row = space.q_low + t * m.q_down.rows;
                    norm_row<T>(row, nullptr, static_cast<const T *>(m.q_norm), row, m.q_down.rows, m.q_eps);
                }
            });
            x = space.q_low;
        }
        product(team, l.qkv, x, step.tokens, space.qkv, space.prepared, false, nothing);
    }

    bool latent_attention(Team &team, const Layer &l, Pieces rows) {
        const Latent &m = *l.latent;
        const LatentProjection &p = m.projection;
        const int64_t *slots = step.slots + l.group * step.tokens;
        project_latents(team, l);
        ended(team, QKV);
        LatentRows<T> stored{l.q_heads, p.rank(), p.rope_dim, p.nope_dim(), static_cast<const T *>(m.kv_norm), m.kv_eps,
                             m.interleaved != 0};
        // All rows before attention: a row may read what another one stores in this step.
        team.each(step.tokens, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                stored.run(space.qkv + t * l.qkv.rows, space.latents + t * stored.width(),
                           static_cast<T *>(l.keys) + slots[t] * stored.width(),
                           step.angles + int64_t(step.angle_rows[t]) * p.rope_dim);
        });
        PagedLatents<T> paged = paged_latents(l);
        auto ready = [&] { prepare(l.out, space.mixed, 0, step.tokens); };
        absorbed_attention(team, p, paged, l.qkv.rows, forms->expanded.empty() ? Then(ready) : Then(nothing));
        for (const ExpandedRow &row : forms->expanded)
            attend_expanded(team, row, p, paged, space.qkv + row.first * l.qkv.rows, l.qkv.rows,
                            ExpandedSpace<T>(row, p, expanded), space.mixed + row.first * l.out.cols);
        if (!forms->expanded.empty()) team.each(0, [](int64_t, int64_t) {}, ready);
        ended(team, ATTEND);
        return multiply_and_join(team, l.out, space.mixed, 0, rows, OUT);
    }

    // Attention of the rows that are absorbed, from queries in space.qkv to values in space.mixed; then then() once.
    void absorbed_attention(Team &team, const LatentProjection &p, const PagedLatents<T> &paged, int64_t q_stride,
                            Then then) const {
        if (forms->absorbed.empty()) return;
        int64_t queried = p.heads * p.latent_dim(), mixed = p.heads * p.rank(), valued = p.heads * p.value_dim();
        for (Tokens some : forms->absorbed)
            absorb(team, p, space.qkv + some.first * q_stride, q_stride, some.count(), space.absorbed + some.first * queried,
                   nothing);
        attend(team, paged, *latent_tiles, parts, nothing);
        for (Tokens some : forms->absorbed)
            latent_values(team, p, space.mixed_latents + some.first * mixed, some.count(), space.mixed + some.first * valued,
                          then);
    }

    // Prepare rows [first, last) of x for a layer's first product. Latent attention has several, and prepares its own.
    void prepare_attention(const Layer &l, int64_t first, int64_t last) const {
        if (!l.latent) prepare(l.qkv, space.x, first, last);
    }

    bool attention(Team &team, const Layer &l, Pieces rows) {
        if (l.latent) return latent_attention(team, l, rows);
        int64_t width = l.qkv.rows;
        T *keys = static_cast<T *>(l.keys), *values = static_cast<T *>(l.values);
        const int64_t *slots = step.slots + l.group * step.tokens;
        Heads<T> heads{l.q_heads, l.kv_heads, l.head_dim, static_cast<const T *>(l.q_norm),
                       static_cast<const T *>(l.k_norm), l.head_eps};
        auto rotated = [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                rotate(heads, space.qkv + t * width, space.qkv + t * width,
                       step.angles + int64_t(step.angle_rows[t]) * l.head_dim,
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
        ended(team, QKV);
        Paged<T> paged{space.qkv, keys, values, space.mixed, step.all_rows(l.group), l.q_heads, l.kv_heads, l.head_dim,
                       l.window, width, l.scale, nullptr, static_cast<const T *>(l.sinks), step.fixed_order};
        attend(team, paged, tiles[l.group], [&] { prepare(l.out, space.mixed, 0, step.tokens); });
        ended(team, ATTEND);
        return multiply_and_join(team, l.out, space.mixed, 0, rows, OUT);
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
            if (at + count == step.tokens) return multiply_and_join(team, l.down, space.inner, at, rows, FEED_FORWARD);
            multiply_rows(team, l.down, space.inner, count, space.x + at * hidden, nothing);
        }
    }

    // The shares of the shared experts in the results of `count` tokens, whose rows are x.
    void weigh_shared(const Matrix &weigher, const T *x, int64_t count, float *shares) const {
        if (!weigher.rows) return std::fill(shares, shares + count, 1.0f);
        multiply(weigher, x, nullptr, count, shares, 0, 1);
        // In whole vectors, see `weigh_experts`: a token's share would depend on its place in the step.
        constexpr int64_t PIECE = 16;
        for (int64_t at = 0; at < count; at += PIECE) {
            int64_t n = std::min(PIECE, count - at);
            float piece[PIECE] = {};
            std::memcpy(piece, shares + at, n * sizeof(float));
            for (int64_t i = 0; i < PIECE; i++) piece[i] = 1 / (1 + exp_moderate(-piece[i]));
            std::memcpy(shares + at, piece, n * sizeof(float));
        }
    }

    // The experts of `count` tokens from token `at` on, and their shares; then then() once.
    void route(Team &team, const Mixture &m, int64_t at, int64_t count, Then then) const {
        const T *x = space.x + at * hidden;
        auto choose = [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                choose_experts(space.scores + t * m.router.rows, m.router.rows, m.routing,
                               space.chosen + t * m.top_k(), space.shares + t * m.top_k());
            if (m.has_shared())
                weigh_shared(m.shared.weigher, x + first * hidden, last - first, space.experts.shared_share + first);
        };
        int64_t panels = m.router.panels();
        if (little)
            return team.each(
                panels,
                [&](int64_t first, int64_t last) {
                    multiply(m.router, x, nullptr, count, space.scores, first, last);
                },
                [&] {
                    choose(0, count);
                    then();
                });
        team.each(
            count,
            [&](int64_t first, int64_t last) {
                float *scores = space.scores + first * m.router.rows;
                multiply(m.router, x + first * hidden, nullptr, last - first, scores, 0, panels);
                choose(first, last);
            },
            then);
    }

    bool mixture(Team &team, const Mixture &m, Pieces rows) {
        ExpertPass<T> pass(m, space.experts);
        int64_t most = space.experts.tokens;
        for (int64_t at = 0; at < step.tokens; at += most) {
            int64_t count = std::min(most, step.tokens - at);
            bool last = at + count == step.tokens;
            route(team, m, at, count, [&] { pass.assign({m.top_k(), space.chosen, space.shares}, count); });
            TokenRows x{pass.routed_rows(space.x, space.routed_rows, at),
                        pass.shared_rows(space.x, space.shared_rows, at), count, 0, count};
            pass.run(team, x, space.x + at * hidden, little, [&] {
                if (last) join_at_once(rows);
            });
        }
        ended(team, FEED_FORWARD);
        return join(team, rows);
    }

    // The same for the tokens of all attention groups, which the ranks exchange.
    bool exchanged_mixture(Team &team, const Mixture &m, Pieces rows) {
        const Exchange &given = *step.exchange;
        TokenExchange<T> exchange(given, hidden, m.top_k());
        Tokens group{given.first, given.first + step.tokens};
        int64_t all = given.tokens(), most = std::min(space.experts.tokens, exchange.most());
        for (int64_t at = 0; at < all; at += most) {
            Tokens chunk{at, std::min(at + most, all)};
            exchanged_chunk(team, m, exchange, chunk, group.within(chunk), [&] {
                if (chunk.last == all) join_at_once(rows);
            });
        }
        ended(team, FEED_FORWARD);
        return join(team, rows, given.complete);
    }

    // The results for the tokens `own` of this rank's group in a chunk of all tokens; then then() once.
    void exchanged_chunk(Team &team, const Mixture &m, const TokenExchange<T> &exchange, Tokens chunk, Tokens own,
                         Then then) {
        ExpertPass<T> pass(m, space.experts);
        int64_t at = own.count() ? own.first - step.exchange->first : 0, count = chunk.count();
        T *x = space.x + at * hidden;
        auto dispatch = [&] { exchange.dispatch(chunk, x, space.chosen, space.shares, own.first); };
        if (own.count())
            route(team, m, at, own.count(), dispatch);
        else
            team.each(0, [](int64_t, int64_t) {}, dispatch);
        team.each(
            count,
            [&](int64_t from, int64_t to) {
                Tokens some{chunk.first + from, chunk.first + to};
                exchange.receive(chunk, some, space.received, space.chosen, space.shares);
                pass.prepare_routed(space.received, space.routed_rows, from, to);
            },
            [&] { pass.assign({m.top_k(), space.chosen, space.shares}, count); });
        TokenRows all{pass.routed_rows(space.received, space.routed_rows, 0),
                      pass.shared_rows(space.x, space.shared_rows, at), count, own.first - chunk.first, own.count()};
        auto combine = [&](int64_t from, int64_t to) {
            exchange.combine(chunk, {own.first + from, own.first + to}, x + from * hidden);
        };
        pass.run(team, all, exchange.results(), little, [&] {
            exchange.publish();
            if (!little) return;
            combine(0, own.count());
            then();
        });
        if (!little) team.each(own.count(), combine, then);
    }

    // Prepare rows [first, last) for the first products of the feed-forward part.
    void prepare_ffn(const Layer &l, int64_t first, int64_t last) const {
        if (!l.mixture) return prepare(l.gate_up, space.x, first, last);
        ExpertPass<T> pass(*l.mixture, space.experts);
        pass.prepare_shared(space.x, space.shared_rows, first, last);
        if (!step.exchange) pass.prepare_routed(space.x, space.routed_rows, first, last);
    }

    bool feed_forward(Team &team, const Layer &l, Pieces rows) {
        if (!l.mixture) return mlp(team, l, rows);
        return step.exchange ? exchanged_mixture(team, *l.mixture, rows) : mixture(team, *l.mixture, rows);
    }

public:
    Stage(const Step &step, const Workspace<T> &space, const std::deque<Tiles> &tiles, const LatentForms *forms,
          const LatentTiles *latent_tiles, char *expanded, int64_t hidden)
        : step(step), space(space), tiles(tiles), forms(forms), latent_tiles(latent_tiles),
          parts(latent_tiles ? latent_parts(latent_tiles->parts()) : nullptr), expanded(expanded), hidden(hidden),
          little(step.routed() <= CHUNK && step.routed() * space.widest <= LITTLE),
          at_once(little && !step.shared && !step.sum) {}

    // The experts of a rank whose attention group has no tokens in the step.
    void serve_others(Team &team, const Layer *layers, int64_t count) {
        for (const Layer *l = layers; l < layers + count; l++) {
            if (!team.rank) layer = l - layers;
            if (l->mixture) exchanged_mixture(team, *l->mixture, [](int64_t, int64_t) {});
        }
    }

    void run(Team &team, const Layer *layers, int64_t count) {
        const Layer *end = layers + count;
        team.each(step.tokens, [&](int64_t first, int64_t last) {
            norm(layers->attention_norm, layers->eps, false, first, last);
            prepare_attention(*layers, first, last);
        });
        ended(team, NORMS);
        for (const Layer *l = layers; l < end; l++) {
            if (!team.rank) layer = l - layers;
            auto before_mlp = [&](int64_t first, int64_t last) {
                norm(l->mlp_norm, l->eps, true, first, last);
                prepare_ffn(*l, first, last);
            };
            auto after_mlp = [&](int64_t first, int64_t last) {
                const Layer *next = l + 1;
                if (next < end) {
                    norm(next->attention_norm, next->eps, true, first, last);
                    return prepare_attention(*next, first, last);
                }
                for (int64_t i = first * hidden; i < last * hidden; i++)
                    residual()[i] = narrow<T>(widen(residual()[i]) + widen(space.x[i]));
            };
            if (!attention(team, *l, before_mlp)) return;
            if (!feed_forward(team, *l, after_mlp)) return;
        }
    }
};

// step.residual through all layers. `memory` has as many bytes as Workspace computes.
template <class T> void stage(const Layer *layers, int64_t count, const Step &step, char *memory, int64_t threads) {
    if (step.phases) step.phases->began_ns = now_ns();
    Workspace<T> space(layers, count, step.tokens, step.routed(), step.exchange, memory);
    int64_t groups = 0;
    const Latent *latent = layers->latent;
    for (const Layer *l = layers; step.tokens && !latent && l < layers + count; l++) groups = std::max(groups, l->group + 1);
    std::deque<Tiles> tiles;
    for (int64_t group = 0; group < groups; group++)
        tiles.emplace_back(step.all_rows(group), layers->q_heads / layers->kv_heads, layers->kv_heads, threads);
    std::optional<LatentForms> forms;
    std::optional<LatentTiles> latent_tiles;
    char *expanded = nullptr;
    if (latent) {
        const LatentProjection &p = latent->projection;
        PagedLatents<T> rows{nullptr, nullptr, nullptr, step.all_rows(layers->group), layers->q_heads, p.rank(),
                             p.latent_dim(), layers->scale, nullptr, step.fixed_order};
        forms.emplace(rows.rows, p, latent->expands_from, latent->expanded_bytes, int64_t(sizeof(T)), threads);
        latent_tiles.emplace(rows, threads, latent->expands_from);
        int64_t most = 0;
        for (const ExpandedRow &row : forms->expanded) most = std::max(most, ExpandedSpace<T>(row, p, nullptr).bytes);
        if (most) expanded = expanded_memory(most);
    }
    Stage<T> stage(step, space, tiles, forms ? &*forms : nullptr, latent_tiles ? &*latent_tiles : nullptr, expanded,
                   layers->out.rows);
    int64_t weights = layers->qkv.rows * layers->qkv.cols + layers->opening().rows * layers->opening().cols;
    together(threads, weights * std::max(step.tokens, step.routed()) > SMALL, [&](Team &team) {
        if (step.tokens)
            stage.run(team, layers, count);
        else
            stage.serve_others(team, layers, count);
    });
}
