// The CPU kernels: plain C++ that the compiler vectorises for this machine, behind a C ABI.
// Tensors are rows of T, which is WEFT_TYPE (bf16 as its bits, or float). Names of entries end in WEFT_NAME.

#include "abi.h"
#include "attention.h"
#include "experts.h"
#include "latent_products.h"
#include "latents.h"
#include "matrix.h"
#include "pack.h"
#include "product.h"
#include "rounding.h"
#include "routing.h"
#include "rows.h"
#include "stage.h"

// Instantiated in tiles.cpp, which is compiled at the same time.
#define T WEFT_TYPE
extern template void run_tiles(const Paged<T> &, const Tiles &, int64_t, int64_t);
extern template void run_latents(const PagedLatents<T> &, const LatentTiles &, LatentSums *, int64_t, int64_t);
#undef T
extern template void quantised_sums<Octets>(const Packed &, const char *, int64_t, float *, Ahead);
extern template void quantised_sums<Nibbles>(const Packed &, const char *, int64_t, float *, Ahead);
extern template void quantised_sums<HalfBlocks>(const Packed &, const char *, int64_t, float *, Ahead);
extern template void quantised_sums<Floats>(const Packed &, const char *, int64_t, float *, Ahead);
extern template void quantised_sums<Nested>(const Packed &, const char *, int64_t, float *, Ahead);
extern template void float8_sums<Float8>(const Packed &, const char *, int64_t, float *, bool);
extern template void float8_sums<NormalFloats>(const Packed &, const char *, int64_t, float *, bool);
extern template void float8_sums<Float4>(const Packed &, const char *, int64_t, float *, bool);
extern template void float8_sums<SignedOctets>(const Packed &, const char *, int64_t, float *, bool);
#ifdef WEFT_AMX
extern template void dequantised_sums<Octets>(const Packed &, const bf16 *, int64_t, float *);
extern template void dequantised_sums<Nibbles>(const Packed &, const bf16 *, int64_t, float *);
extern template void dequantised_sums<HalfBlocks>(const Packed &, const bf16 *, int64_t, float *);
extern template void dequantised_sums<Floats>(const Packed &, const bf16 *, int64_t, float *);
extern template void dequantised_sums<Nested>(const Packed &, const bf16 *, int64_t, float *);
extern template void dequantised_sums<Float8>(const Packed &, const bf16 *, int64_t, float *);
extern template void dequantised_sums<NormalFloats>(const Packed &, const bf16 *, int64_t, float *);
extern template void dequantised_sums<Float4>(const Packed &, const bf16 *, int64_t, float *);
extern template void dequantised_sums<SignedOctets>(const Packed &, const bf16 *, int64_t, float *);
#endif

namespace {

template <class T>
void norm(const T *x, T *residual, const T *weight, T *out, int64_t rows, int64_t width, float eps,
          int64_t threads) {
    together(threads, rows >= 8, [&](Team &team) {
        team.each(rows, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++)
                norm_row(x + r * width, residual ? residual + r * width : nullptr, weight, out + r * width, width, eps);
        });
    });
}

template <class T> void silu_mul(const T *gate_up, T *out, int64_t rows, int64_t width, int64_t threads) {
    together(threads, rows >= 4, [&](Team &team) {
        team.each(rows, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++)
                silu_mul_row(gate_up + r * 2 * width, gate_up + (r * 2 + 1) * width, out + r * width, width);
        });
    });
}

template <class T>
void rotate_and_store(const Heads<T> &heads, const T *qkv, T *q, T *keys, T *values, const float *table,
                      const int32_t *angle_rows, const int64_t *slots, int64_t tokens, int64_t block_size,
                      int64_t threads) {
    together(threads, tokens >= 4, [&](Team &team) {
        team.each(tokens, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                rotate(heads, qkv + t * heads.width(), q + t * heads.q_heads * heads.head_dim,
                       table + int64_t(angle_rows[t]) * heads.head_dim, [&](int64_t head, const T *key, const T *value) {
                           store(key, value, keys, values, slots[t], head, block_size, heads.kv_heads, heads.head_dim);
                       });
        });
    });
}

template <class T> void attend(const Paged<T> &attention, int64_t threads) {
    Tiles tiles(attention.rows, attention.group(), attention.kv_heads, threads);
    together(threads, attention.work() > SMALL, [&](Team &team) { attend(team, attention, tiles, nothing); });
}

template <class T> void attend_latents(const PagedLatents<T> &attention, int64_t threads) {
    bool parallel = attention.work() > SMALL;
    LatentTiles tiles(attention, parallel ? threads : 1, std::numeric_limits<int64_t>::max());
    LatentSums *parts = latent_parts(tiles.parts());
    together(threads, parallel, [&](Team &team) { attend(team, attention, tiles, parts, nothing); });
}

template <class T>
void store_latents(const LatentRows<T> &rows, T *q, const T *latents, T *cache, const float *table,
                   const int32_t *angle_rows, const int64_t *slots, int64_t tokens, int64_t threads) {
    together(threads, tokens >= 4, [&](Team &team) {
        team.each(tokens, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                rows.run(q + t * rows.heads * rows.head_dim(), latents + t * rows.width(),
                         cache + slots[t] * rows.width(), table + int64_t(angle_rows[t]) * rows.rope_dim);
        });
    });
}

template <class T>
void absorb(const LatentProjection &p, const T *q, int64_t tokens, T *out, int64_t threads) {
    together(threads, tokens * p.heads * p.rank() * p.nope_dim() > SMALL,
             [&](Team &team) { absorb(team, p, q, p.heads * p.head_dim(), tokens, out, nothing); });
}

template <class T>
void latent_values(const LatentProjection &p, const T *mixed, int64_t tokens, T *out, int64_t threads) {
    together(threads, tokens * p.heads * p.rank() * p.value_dim() > SMALL,
             [&](Team &team) { latent_values(team, p, mixed, tokens, out, nothing); });
}

template <class T>
void expand_latents(const LatentProjection &p, const T *latents, int64_t count, int64_t first, int64_t heads, T *keys,
                    T *values, int64_t threads) {
    together(threads, count * heads * p.rank() * p.nope_dim() > SMALL,
             [&](Team &team) { expand_latents(team, p, latents, count, first, heads, keys, values, p.value_dim()); });
}

}  // namespace

// Two macros, so that NAME is expanded before it is pasted.
#define EXPORT(T, NAME) EXPORT_AS(T, NAME)
#define EXPORT_AS(T, NAME)                                                                                             \
    ENTRY void weft_norm_##NAME(const T *x, T *residual, const T *weight, T *out, int64_t rows, int64_t width,         \
                                float eps, int64_t threads) {                                                          \
        norm(x, residual, weight, out, rows, width, eps, threads);                                                     \
    }                                                                                                                  \
    ENTRY void weft_silu_mul_##NAME(const T *gate_up, T *out, int64_t rows, int64_t width, int64_t threads) {          \
        silu_mul(gate_up, out, rows, width, threads);                                                                  \
    }                                                                                                                  \
    ENTRY void weft_rotate_and_store_##NAME(                                                                           \
        const T *qkv, T *q, T *keys, T *values, const float *table, const int32_t *angle_rows, const int64_t *slots,    \
        const T *q_norm, const T *k_norm, float eps, int64_t tokens, int64_t q_heads, int64_t kv_heads,                \
        int64_t head_dim, int64_t block_size, int64_t threads) {                                                       \
        rotate_and_store(Heads<T>{q_heads, kv_heads, head_dim, q_norm, k_norm, eps}, qkv, q, keys, values, table,      \
                         angle_rows, slots, tokens, block_size, threads);                                               \
    }                                                                                                                  \
    ENTRY void weft_attend_##NAME(const T *q, const T *keys, const T *values, T *out, const int32_t *row_starts,       \
                                  const int32_t *context, const int32_t *tables, int64_t table_width, int64_t rows,    \
                                  int64_t block_size, int64_t q_heads, int64_t kv_heads, int64_t head_dim,             \
                                  int64_t window, float scale, float *lse, const T *sinks, int64_t fixed_order,        \
                                  int64_t threads) {                                                                   \
        Rows all{row_starts, context, tables, rows, table_width, block_size};                                          \
        attend(Paged<T>{q, keys, values, out, all, q_heads, kv_heads, head_dim, window, q_heads * head_dim, scale,     \
                        lse, sinks, fixed_order},                                                                      \
               threads);                                                                                               \
    }                                                                                                                  \
    ENTRY void weft_attend_latents_##NAME(const T *q, const T *latents, T *out, const int32_t *row_starts,             \
                                          const int32_t *context, const int32_t *tables, int64_t table_width,          \
                                          int64_t rows, int64_t block_size, int64_t heads, int64_t rank, int64_t width,\
                                          float scale, float *lse, int64_t threads) {                                  \
        Rows all{row_starts, context, tables, rows, table_width, block_size};                                          \
        attend_latents(PagedLatents<T>{q, latents, out, all, heads, rank, width, scale, lse, 0}, threads);             \
    }                                                                                                                  \
    ENTRY void weft_store_latents_##NAME(T *q, const T *latents, T *cache, const float *table,                         \
                                         const int32_t *angle_rows, const int64_t *slots, const T *norm, float eps,     \
                                         int64_t interleaved, int64_t tokens, int64_t heads, int64_t rank,             \
                                         int64_t rope_dim, int64_t nope_dim, int64_t threads) {                        \
        store_latents(LatentRows<T>{heads, rank, rope_dim, nope_dim, norm, eps, interleaved != 0}, q, latents, cache,  \
                      table, angle_rows, slots, tokens, threads);                                                       \
    }                                                                                                                  \
    ENTRY void weft_absorb_##NAME(const LatentProjection *p, const T *q, int64_t tokens, T *out, int64_t threads) {    \
        absorb(*p, q, tokens, out, threads);                                                                           \
    }                                                                                                                  \
    ENTRY void weft_latent_values_##NAME(const LatentProjection *p, const T *mixed, int64_t tokens, T *out,            \
                                         int64_t threads) {                                                            \
        latent_values(*p, mixed, tokens, out, threads);                                                                \
    }                                                                                                                  \
    ENTRY void weft_expand_latents_##NAME(const LatentProjection *p, const T *latents, int64_t count, int64_t first,   \
                                          int64_t heads, T *keys, T *values, int64_t threads) {                        \
        expand_latents(*p, latents, count, first, heads, keys, values, threads);                                       \
    }                                                                                                                  \
    ENTRY int64_t weft_panel_size_##NAME(int64_t cols) { return panel_size<T>(cols); }                                 \
    ENTRY void weft_pack_dense_##NAME(const T *weight, T *to, int64_t rows, int64_t cols, int64_t threads) {           \
        pack_dense(weight, to, rows, cols, threads);                                                                   \
    }                                                                                                                  \
    ENTRY void weft_rows_of_##NAME(const Matrix *m, const int64_t *rows, int64_t count, T *out) {                      \
        rows_of(*m, rows, count, out);                                                                                 \
    }                                                                                                                  \
    ENTRY void weft_product_##NAME(const Matrix *m, const T *x, int64_t tokens, T *out, int64_t threads) {             \
        product(*m, x, tokens, out, threads);                                                                          \
    }                                                                                                                  \
    ENTRY void weft_wide_product_##NAME(const Matrix *m, const T *x, int64_t tokens, float *out, int64_t threads) {    \
        product(*m, x, tokens, out, threads);                                                                          \
    }                                                                                                                  \
    ENTRY void weft_experts_##NAME(const Experts *experts, const T *x, const int64_t *chosen, const float *shares,     \
                                   int64_t tokens, int64_t top_k, T *out, int64_t threads) {                           \
        run_experts(*experts, x, {top_k, chosen, shares}, tokens, out, threads);                                       \
    }                                                                                                                  \
    ENTRY int64_t weft_workspace_bytes_##NAME(const Layer *layers, int64_t count, int64_t tokens, int64_t all,         \
                                              int64_t exchanged) {                                                     \
        return Workspace<T>(layers, count, tokens, all, exchanged, nullptr).bytes;                                     \
    }                                                                                                                  \
    ENTRY void weft_stage_##NAME(const Layer *layers, int64_t count, const Step *step, char *workspace,                \
                                 int64_t threads) {                                                                    \
        stage<T>(layers, count, *step, workspace, threads);                                                            \
    }

ENTRY void weft_choose_experts(const float *scores, int64_t count, int64_t tokens, const Routing *routing,
                               int64_t *chosen, float *shares) {
    for (int64_t t = 0; t < tokens; t++)
        choose_experts(scores + t * count, count, *routing, chosen + t * routing->top_k, shares + t * routing->top_k);
}
ENTRY void weft_pack_values(const char *values, char *to, int64_t rows, int64_t blocks, int64_t bits, int64_t threads) {
    (bits == 4 ? pack_values<4> : pack_values<8>)(values, to, rows, blocks, threads);
}
ENTRY void weft_pack_groups(const char *from, char *to, int64_t rows, int64_t groups, int64_t size) {
    pack_groups(from, to, rows, groups, size);
}
ENTRY void weft_round_rows(const Rounding *rounding, const char *weights, const float *error_weights, char *values,
                           uint16_t *scales, void *lowest) {
    round_rows(*rounding, weights, error_weights, values, scales, lowest);
}

EXPORT(WEFT_TYPE, WEFT_NAME)
