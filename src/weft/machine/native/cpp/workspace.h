// The layers of a stage, and the memory that a step takes beside their weights and KV caches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "experts.h"
#include "latent_products.h"
#include "matrix.h"
#include "memory.h"
#include "product.h"

// What latent attention has besides a layer's `qkv`, which projects to the queries of all heads: from x, or from the
// norm of its product with `q_down`, if that has rows. Mirrored in machine/native/structures.py.
struct Latent {
    LatentProjection projection;
    Matrix q_down, kv_down;
    const void *q_norm, *kv_norm;
    int64_t interleaved;
    int64_t expands_from;    // tokens of a row from which on it is computed in the expanded form
    int64_t expanded_bytes;  // of a row's keys and values that are expanded at once, unless one head has more
    float q_eps, kv_eps;
};

// One decoder layer with its KV cache; tensors are of T. A layer with a mixture of experts has no gate_up and down.
// Mirrored in machine/native/structures.py.
struct Layer {
    const void *attention_norm, *q_norm, *k_norm, *mlp_norm;
    void *keys, *values;
    Matrix qkv, out, gate_up, down;
    const Mixture *mixture;  // null in a layer with one MLP
    int64_t q_heads, kv_heads, head_dim, window;
    int64_t group;  // KV group, whose tables and slots say where its keys and values are
    const void *sinks;  // see `Paged`
    const Latent *latent;  // null in a layer with keys and values of heads; else `keys` are latents
    float scale, head_eps, eps;

    // The first matrix of the feed-forward part.
    const Matrix &opening() const { return mixture ? mixture->experts.gate_up : gate_up; }
};

// Tokens that go through an MLP at a time: results between its products then stay in the CPU's cache.
constexpr int64_t CHUNK = 256;

// Memory for results between the parts of a layer, which all layers use in turn.
template <class T> struct Workspace {
    int64_t bytes = 0;
    T *x;        // [tokens, hidden]: a norm's result, then what is to be added to the residual
    T *qkv;      // [tokens, (q_heads + 2 kv_heads) * head_dim], q rotated in place
    T *mixed;    // [tokens, q_heads * head_dim]
    // Of latent attention: [tokens, rows of q_down], latents [tokens, latent_dim], queries in their space [tokens,
    // q_heads, latent_dim] and their results [tokens, q_heads, rank].
    T *q_low, *latents, *absorbed, *mixed_latents;
    T *gate_up;  // [CHUNK, 2 * inner]
    T *inner;    // [CHUNK, inner]
    char *prepared;  // rows as the next product reads them
    // Rows as the first products of routed and of shared experts read them.
    char *routed_rows, *shared_rows;
    float *scores;    // [tokens, experts], of tokens that go through the experts at once; so are `chosen` and `shares`
    int64_t *chosen;  // [tokens, top_k]
    float *shares;
    T *received;  // [tokens, hidden], likewise, with an exchange
    ExpertSpace<T> experts;
    int64_t widest = 0;  // elements of a token's row

    // For a step of `tokens`, of which `all` go through the experts, after an exchange if one is `exchanged`. In
    // `memory`, whose address is a multiple of WORKSPACE_ALIGNMENT; null to compute `bytes` only.
    Workspace(const Layer *layers, int64_t count, int64_t tokens, int64_t all, bool exchanged, char *memory)
        : experts(tokens_at_once(all, most_chosen(layers, count)), most_chosen(layers, count)) {
        int64_t chunk = std::min(tokens, CHUNK), hidden = 0, qkv_rows = 0, heads = 0, wide = 0, scratch = 0;
        int64_t scored = 0, routed = 0, shared = 0, low = 0, latent_dim = 0, absorbed_dim = 0, mixed_dim = 0;
        for (const Layer *l = layers; l < layers + count; l++) {
            hidden = std::max(hidden, l->out.rows);
            qkv_rows = std::max(qkv_rows, l->qkv.rows);
            heads = std::max(heads, l->out.cols);
            for (const Matrix *m : {&l->qkv, &l->out, &l->gate_up, &l->down})
                scratch = std::max(scratch, scratch_bytes<T>(*m, tokens));
            wide = std::max(wide, l->gate_up.rows);
            if (const Latent *m = l->latent) {
                const LatentProjection &p = m->projection;
                for (const Matrix *d : {&m->q_down, &m->kv_down}) scratch = std::max(scratch, scratch_bytes<T>(*d, tokens));
                low = std::max(low, m->q_down.rows);
                latent_dim = std::max(latent_dim, p.latent_dim());
                absorbed_dim = std::max(absorbed_dim, p.heads * p.latent_dim());
                mixed_dim = std::max(mixed_dim, p.heads * p.rank());
            }
            if (const Mixture *m = l->mixture) {
                experts.include(*m);
                scored = std::max(scored, m->router.rows);
                routed = std::max(routed, scratch_bytes<T>(m->experts.gate_up, exchanged ? experts.tokens : tokens));
                shared = std::max(shared, scratch_bytes<T>(m->shared.gate_up, tokens));
            }
        }
        widest = std::max({wide, qkv_rows, experts.top_k * std::max(hidden, experts.width), experts.shared_width});
        Memory parts{memory};
        parts.reserve(x, tokens * hidden);
        parts.reserve(qkv, tokens * qkv_rows);
        parts.reserve(mixed, tokens * heads);
        parts.reserve(q_low, tokens * low);
        parts.reserve(latents, tokens * latent_dim);
        parts.reserve(absorbed, tokens * absorbed_dim);
        parts.reserve(mixed_latents, tokens * mixed_dim);
        parts.reserve(gate_up, chunk * wide);
        parts.reserve(inner, chunk * wide / 2);
        parts.reserve(prepared, scratch);
        parts.reserve(routed_rows, routed);
        parts.reserve(shared_rows, shared);
        parts.reserve(scores, experts.tokens * scored);
        parts.reserve(chosen, experts.tokens * experts.top_k);
        parts.reserve(shares, experts.tokens * experts.top_k);
        parts.reserve(received, exchanged ? experts.tokens * hidden : 0);
        experts.reserve(parts);
        bytes = parts.bytes;
    }

private:
    // The most experts that a token has in any layer.
    static int64_t most_chosen(const Layer *layers, int64_t count) {
        int64_t most = 0;
        for (const Layer *l = layers; l < layers + count; l++)
            if (l->mixture) most = std::max(most, l->mixture->top_k());
        return most;
    }
};
