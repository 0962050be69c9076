// The structures and constants that Python mirrors in machine/native/structures.py, by name: Python compares both sides when it
// loads the library.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "exchange.h"
#include "latent_products.h"
#include "masks.h"
#include "matrix.h"
#include "rounding.h"
#include "settings.h"
#include "stage.h"
#include "sum.h"

// A structure's size and a field's offset in bytes, or a constant's value. Mirrored in machine/native/library.py.
struct AbiEntry {
    const char *name;
    int64_t value;
};

#define STRUCTURE(S) {#S, int64_t(sizeof(S))}
#define FIELD(S, F) {#S "." #F, int64_t(offsetof(S, F))}
#define CONSTANT(NAME) {#NAME, int64_t(NAME)}

constexpr AbiEntry ABI[] = {
    STRUCTURE(Matrix), FIELD(Matrix, bits), FIELD(Matrix, rows), FIELD(Matrix, cols), FIELD(Matrix, data),
    FIELD(Matrix, scales), FIELD(Matrix, lowest), FIELD(Matrix, bias), FIELD(Matrix, group), FIELD(Matrix, lacking),
    FIELD(Matrix, kind), FIELD(Matrix, fixed_order),
    STRUCTURE(Experts), FIELD(Experts, gate_up), FIELD(Experts, down), FIELD(Experts, first), FIELD(Experts, count),
    FIELD(Experts, gain), FIELD(Experts, limit), FIELD(Experts, up_offset), FIELD(Experts, routed),
    STRUCTURE(Routing), FIELD(Routing, top_k), FIELD(Routing, normalised), FIELD(Routing, sigmoid),
    FIELD(Routing, groups), FIELD(Routing, top_groups), FIELD(Routing, group_best), FIELD(Routing, correction),
    FIELD(Routing, scaling),
    STRUCTURE(Mixture), FIELD(Mixture, router), FIELD(Mixture, routing), FIELD(Mixture, experts), FIELD(Mixture, shared),
    STRUCTURE(SharedExperts), FIELD(SharedExperts, gate_up), FIELD(SharedExperts, down), FIELD(SharedExperts, weigher),
    STRUCTURE(LatentProjection), FIELD(LatentProjection, keys), FIELD(LatentProjection, values),
    FIELD(LatentProjection, heads), FIELD(LatentProjection, rope_dim),
    STRUCTURE(Layer), FIELD(Layer, attention_norm), FIELD(Layer, q_norm), FIELD(Layer, k_norm), FIELD(Layer, mlp_norm),
    FIELD(Layer, keys), FIELD(Layer, values), FIELD(Layer, qkv), FIELD(Layer, out),
    FIELD(Layer, gate_up), FIELD(Layer, down), FIELD(Layer, mixture), FIELD(Layer, q_heads), FIELD(Layer, kv_heads),
    FIELD(Layer, head_dim), FIELD(Layer, window), FIELD(Layer, group), FIELD(Layer, sinks),
    FIELD(Layer, latent), FIELD(Layer, scale), FIELD(Layer, head_eps), FIELD(Layer, eps),
    STRUCTURE(Latent), FIELD(Latent, projection), FIELD(Latent, q_down), FIELD(Latent, kv_down), FIELD(Latent, q_norm),
    FIELD(Latent, kv_norm), FIELD(Latent, interleaved),
    FIELD(Latent, expands_from), FIELD(Latent, expanded_bytes), FIELD(Latent, q_eps), FIELD(Latent, kv_eps),
    STRUCTURE(Step), FIELD(Step, residual), FIELD(Step, angles), FIELD(Step, angle_rows), FIELD(Step, slots),
    FIELD(Step, row_starts), FIELD(Step, context), FIELD(Step, tables), FIELD(Step, tokens), FIELD(Step, rows),
    FIELD(Step, table_width), FIELD(Step, block_size), FIELD(Step, shared), FIELD(Step, sum),
    FIELD(Step, exchange), FIELD(Step, phases), FIELD(Step, fixed_order),
    STRUCTURE(PhaseEntry), FIELD(PhaseEntry, layer), FIELD(PhaseEntry, phase), FIELD(PhaseEntry, ended_ns),
    STRUCTURE(PhaseLog), FIELD(PhaseLog, entries), FIELD(PhaseLog, room), FIELD(PhaseLog, count),
    FIELD(PhaseLog, began_ns),
    STRUCTURE(Exchange), FIELD(Exchange, shared), FIELD(Exchange, begins), FIELD(Exchange, first),
    FIELD(Exchange, complete),
    STRUCTURE(Shared), FIELD(Shared, memory), FIELD(Shared, rank), FIELD(Shared, size), FIELD(Shared, head),
    FIELD(Shared, slot_bytes), FIELD(Shared, times),
    STRUCTURE(Rounding), FIELD(Rounding, type), FIELD(Rounding, rows), FIELD(Rounding, width), FIELD(Rounding, group),
    FIELD(Rounding, bits), FIELD(Rounding, kind), FIELD(Rounding, lacking), FIELD(Rounding, cols),
    CONSTANT(PANEL), CONSTANT(BLOCK), CONSTANT(WIDEST_HEAD), CONSTANT(WIDEST_GROUP), CONSTANT(WIDEST_LATENT),
    CONSTANT(LONGEST_GROUP),
    CONSTANT(WORKSPACE_ALIGNMENT), CONSTANT(PHASES), CONSTANT(Lowest::MIDDLE), CONSTANT(Lowest::ZERO), CONSTANT(Lowest::MINIMUM),
    CONSTANT(Lowest::MXFP4), CONSTANT(Lowest::NESTED), CONSTANT(Lowest::FP8), CONSTANT(Lowest::NF4), CONSTANT(Lowest::FP4),
    CONSTANT(Lowest::SIGNED), CONSTANT(BF16), CONSTANT(FP16),
    CONSTANT(FP32),
    CONSTANT(SAMPLING_BLOCK), CONSTANT(MASK_BITS), CONSTANT(NOT_FINITE), CONSTANT(SPLITMIX_STEP),
    CONSTANT(SPLITMIX_FIRST), CONSTANT(SPLITMIX_SECOND),
};

#undef STRUCTURE
#undef FIELD
#undef CONSTANT

// Number of fields that a structure has: of initialisers that its braces take.
struct AnyField {
    template <class F> constexpr operator F() const;
};
template <class S, size_t... I>
auto fits(std::index_sequence<I...>) -> decltype(S{(void(I), AnyField{})...}, std::true_type{});
template <class S> std::false_type fits(...);
template <class S, size_t N = 0> constexpr size_t field_count() {
    if constexpr (decltype(fits<S>(std::make_index_sequence<N + 1>{}))::value)
        return field_count<S, N + 1>();
    else
        return N;
}

// Number of fields of a structure that the list above has.
constexpr size_t listed_fields(const char *structure) {
    size_t count = 0;
    for (const AbiEntry &entry : ABI) {
        const char *a = entry.name, *b = structure;
        while (*b && *a == *b) a++, b++;
        count += !*b && *a == '.';
    }
    return count;
}

// A field that is left out of the list could hide in the padding of its structure.
static_assert(listed_fields("Matrix") == field_count<Matrix>(), "list all fields of Matrix in abi.h");
static_assert(listed_fields("Experts") == field_count<Experts>(), "list all fields of Experts in abi.h");
static_assert(listed_fields("SharedExperts") == field_count<SharedExperts>(),
              "list all fields of SharedExperts in abi.h");
static_assert(listed_fields("Routing") == field_count<Routing>(), "list all fields of Routing in abi.h");
static_assert(listed_fields("Mixture") == field_count<Mixture>(), "list all fields of Mixture in abi.h");
static_assert(listed_fields("LatentProjection") == field_count<LatentProjection>(),
              "list all fields of LatentProjection in abi.h");
static_assert(listed_fields("Latent") == field_count<Latent>(), "list all fields of Latent in abi.h");
static_assert(listed_fields("Layer") == field_count<Layer>(), "list all fields of Layer in abi.h");
static_assert(listed_fields("Step") == field_count<Step>(), "list all fields of Step in abi.h");
static_assert(listed_fields("PhaseEntry") == field_count<PhaseEntry>(), "list all fields of PhaseEntry in abi.h");
static_assert(listed_fields("PhaseLog") == field_count<PhaseLog>(), "list all fields of PhaseLog in abi.h");
static_assert(listed_fields("Exchange") == field_count<Exchange>(), "list all fields of Exchange in abi.h");
static_assert(listed_fields("Shared") == field_count<Shared>(), "list all fields of Shared in abi.h");
static_assert(listed_fields("Rounding") == field_count<Rounding>(), "list all fields of Rounding in abi.h");

// The list above, and the number of its entries.
ENTRY const AbiEntry *weft_abi(int64_t *count) {
    *count = sizeof ABI / sizeof *ABI;
    return ABI;
}
