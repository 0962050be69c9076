// Mixtures of experts: each expert is a gated MLP that computes the tokens which chose it, all of them at once, so that
// its weights are read once.
//
// Work is dealt by panels, not by experts: a token with a few experts keeps all threads busy, and so do more threads than
// experts. What each token gets is added up in the order of the experts' numbers, whatever other tokens there are.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "matrix.h"
#include "memory.h"
#include "product.h"
#include "team.h"

// The experts of a rank. Mirrored in native/structures.py. A matrix is that of the first expert; those of the others
// follow it in the same memory. Panels of `gate_up` are those of the gate and those of the up projection in turns, both
// padded to whole panels.
struct Experts {
    Matrix gate_up, down;
    int64_t first, count;          // numbers of the experts: [first, first + count)
    float gain, limit, up_offset;  // see `activate`

    int64_t hidden() const { return down.rows; }
    int64_t width() const { return down.cols; }
};

// Tokens that choose experts: [tokens, top_k] numbers and shares. Experts of other ranks add nothing.
struct Choice {
    int64_t top_k;
    const int64_t *chosen;
    const float *shares;
};

// Rows of tokens, one for each expert of a token, that go through the experts at once. A step of more tokens is divided:
// each expert then has so many that the products take longer than the weights take to be read.
constexpr int64_t MOST_ROWS = 1 << 13;

inline int64_t tokens_at_once(int64_t tokens, int64_t top_k) {
    return std::min(tokens, std::max<int64_t>(1, MOST_ROWS / std::max<int64_t>(1, top_k)));
}

// Rows from which on panels are dealt one by one: experts may have very different numbers of them.
constexpr int64_t UNEVEN_ROWS = 64;

// The gate's SiLU times the up projection, for `count` columns. SiLU is x * sigmoid(gain * x).
template <class T>
void activate(const Experts &e, const float *gate, const float *up, T *out, int64_t count) {
    alignas(64) float piece[PANEL];
#pragma omp simd
    for (int64_t i = 0; i < PANEL; i++) {
        float g = std::min(gate[i], e.limit), u = std::max(std::min(up[i], e.limit), -e.limit);
        piece[i] = g / (1.0f + exp_moderate(-e.gain * g)) * (u + e.up_offset);
    }
    narrow_row(piece, out, count);
}

// Memory for up to `tokens` tokens, which layers with different experts may use in turn.
template <class T> struct ExpertSpace {
    int64_t tokens, top_k;
    int64_t count = 0, read = 0, width = 0, prepared_row = 0, panels = 0;  // the most of any layer
    int32_t *token;    // [rows]: the token of each row; rows lie expert by expert
    float *share;      // [rows]
    int64_t *begin;    // [count + 1]: first row of each expert
    int64_t *touched;  // [count]: experts that have rows, in order
    char *gathered;    // [rows]: of x, as the first product reads them
    T *inner;          // [rows, width]
    char *prepared;    // [rows]: of `inner`, as the second product reads them, unless that reads `inner` itself
    float *sums;       // [panels of hidden, tokens, PANEL]
    // What has been assigned. A thread that is late may read these while they change, to no effect.
    mutable std::atomic<int64_t> rows{0}, experts{0};

    ExpertSpace(int64_t tokens, int64_t top_k) : tokens(tokens), top_k(top_k) {}

    void include(const Experts &e) {
        count = std::max(count, e.count);
        read = std::max(read, row_bytes<T>(e.gate_up));
        width = std::max(width, e.width());
        prepared_row = std::max(prepared_row, prepared_bytes<T>(e.down));
        panels = std::max(panels, e.down.panels());
    }

    void reserve(Memory &memory) {
        int64_t most = tokens * top_k;
        memory.reserve(token, most);
        memory.reserve(share, most);
        memory.reserve(begin, count + 1);
        memory.reserve(touched, count);
        memory.reserve(gathered, most * read);
        memory.reserve(inner, most * width);
        memory.reserve(prepared, most * prepared_row);
        memory.reserve(sums, panels * PANEL * tokens);
    }
};

// One pass of some tokens through the experts of a rank.
template <class T> class ExpertPass {
    const Experts &e;
    const ExpertSpace<T> &space;

    int64_t rows_of(int64_t expert) const { return space.begin[expert + 1] - space.begin[expert]; }
    int64_t pairs() const { return e.gate_up.panels() / 2; }

    int64_t grain(int64_t pieces, const Team &team) const {
        return space.rows >= UNEVEN_ROWS ? 1 : std::max<int64_t>(1, pieces / (8 * team.size));
    }

    // x as the first product reads it is copied for rows [first, last), so that those of an expert lie together.
    void gather(const char *from, int64_t first, int64_t last) const {
        int64_t bytes = row_bytes<T>(e.gate_up);
        for (int64_t r = first; r < last; r++)
            std::memcpy(space.gathered + r * bytes, from + space.token[r] * bytes, bytes);
    }

    // Both projections and the activation for pairs of panels [first, last), of all touched experts in turn. `x` has the
    // rows, or the row of the only token.
    void open(const char *x, int64_t first, int64_t last) const {
        for (int64_t i = first; i < last; i++) open_pair(x, space.touched[i / pairs()], i % pairs());
    }

    void open_pair(const char *x, int64_t expert, int64_t pair) const {
        alignas(64) float gate[BATCH * PANEL], up[BATCH * PANEL];
        Matrix m = nth<T>(e.gate_up, expert);
        int64_t width = e.width(), column = pair * PANEL, count = std::min(PANEL, width - column);
        int64_t begin = space.begin[expert], all = rows_of(expert), bytes = row_bytes<T>(m);
        for (int64_t at = 0; at < all; at += BATCH) {
            int64_t n = std::min(BATCH, all - at);
            const char *from = x + (x == space.gathered ? begin + at : at) * bytes;
            panel_sums<T>(m, 2 * pair, from, n, gate, {panel_at<T>(m, 2 * pair + 1), all, at});
            add_bias<T>(m, 2 * pair, n, gate, PANEL);
            panel_sums<T>(m, 2 * pair + 1, from, n, up, {panel_at<T>(m, 2 * pair + 2), all, at});
            add_bias<T>(m, 2 * pair + 1, n, up, PANEL);
            for (int64_t r = 0; r < n; r++)
                activate(e, gate + r * PANEL, up + r * PANEL, space.inner + (begin + at + r) * width + column, count);
        }
    }

    // The last product for panels [first, last) of the hidden dim, weighted and added up over the experts.
    void close(int64_t tokens, T *out, int64_t first, int64_t last) const {
        float *sums = space.sums + first * tokens * PANEL;
        std::fill(sums, space.sums + last * tokens * PANEL, 0.0f);
        for (int64_t i = 0; i < space.experts; i++)
            for (int64_t p = first; p < last; p++)
                close_panel(space.touched[i], p, sums + (p - first) * tokens * PANEL);
        for (int64_t p = first; p < last; p++, sums += tokens * PANEL) {
            int64_t column = p * PANEL, count = std::min(PANEL, e.hidden() - column);
            for (int64_t t = 0; t < tokens; t++) narrow_row(sums + t * PANEL, out + t * e.hidden() + column, count);
        }
    }

    void close_panel(int64_t expert, int64_t p, float *sums) const {
        alignas(64) float parts[BATCH * PANEL];
        Matrix m = nth<T>(e.down, expert);
        const char *inner = m.dense() ? reinterpret_cast<const char *>(space.inner) : space.prepared;
        int64_t begin = space.begin[expert], all = rows_of(expert);
        for (int64_t at = 0; at < all; at += BATCH) {
            int64_t n = std::min(BATCH, all - at), row = begin + at;
            panel_sums<T>(m, p, inner + row * row_bytes<T>(m), n, parts, {panel_at<T>(m, p + 1), all, at});
            add_bias<T>(m, p, n, parts, std::min(PANEL, m.rows - p * PANEL));
            for (int64_t r = 0; r < n; r++) {
                float *sum = sums + space.token[row + r] * PANEL, share = space.share[row + r];
#pragma omp simd
                for (int64_t i = 0; i < PANEL; i++) sum[i] += share * parts[r * PANEL + i];
            }
        }
    }

    void prepare_inner(int64_t first, int64_t last) const {
        prepare_rows(e.down, space.inner, space.prepared, first, last);
    }

public:
    ExpertPass(const Experts &experts, const ExpertSpace<T> &space) : e(experts), space(space) {}

    // Sort the rows of `tokens` tokens by expert, those of an expert in the order of the tokens. One thread calls it.
    void assign(const Choice &choice, int64_t tokens) const {
        int64_t *next = space.begin + 1, placed = 0, experts = 0;
        std::fill(space.begin, next + e.count, 0);
        auto each = [&](auto &&work) {
            for (int64_t i = 0; i < tokens * choice.top_k; i++) {
                int64_t expert = choice.chosen[i] - e.first;
                if (expert >= 0 && expert < e.count) work(expert, i);
            }
        };
        each([&](int64_t expert, int64_t) { next[expert]++; });
        for (int64_t expert = 0; expert < e.count; expert++) {
            int64_t count = next[expert];
            if (count) space.touched[experts++] = expert;
            next[expert] = placed;  // and, once its rows are there, the first one of the next expert
            placed += count;
        }
        each([&](int64_t expert, int64_t i) {
            int64_t row = next[expert]++;
            space.token[row] = int32_t(i / choice.top_k);
            space.share[row] = choice.shares[i];
        });
        space.rows = placed;
        space.experts = experts;
    }

    // After `assign`: from the tokens' rows of x, as the first product reads them, to out [tokens, hidden], by the whole
    // team, then then() once. What lies between the products is done by one thread if it is `little`.
    void run(Team &team, const char *x, int64_t tokens, T *out, bool little, Then then) const {
        if (tokens > 1) {
            team.each(space.rows, [&](int64_t first, int64_t last) { gather(x, first, last); });
            x = space.gathered;
        }
        int64_t pieces = space.experts * pairs(), panels = e.down.panels();
        team.each(
            pieces, grain(pieces, team),
            [&](int64_t first, int64_t last) { open(x, first, last); },
            [&] {
                if (little) prepare_inner(0, space.rows);
            });
        if (!little && !e.down.dense())
            team.each(space.rows, [&](int64_t first, int64_t last) { prepare_inner(first, last); });
        team.each(
            panels, grain(panels, team), [&](int64_t first, int64_t last) { close(tokens, out, first, last); }, then);
    }
};

// out = the experts' results for `tokens` rows of x, weighted and added up: for a caller without a team.
template <class T>
void run_experts(const Experts &e, const T *x, const Choice &choice, int64_t tokens, T *out, int64_t threads) {
    int64_t most = tokens_at_once(tokens, choice.top_k);
    ExpertSpace<T> space(most, choice.top_k);
    space.include(e);
    char *prepared;
    auto reserve = [&](char *start) {
        Memory memory{start};
        space.reserve(memory);
        memory.reserve(prepared, most * prepared_bytes<T>(e.gate_up));
        return memory.bytes;
    };
    std::vector<char> bytes(reserve(nullptr) + WORKSPACE_ALIGNMENT);
    reserve(bytes.data() + -reinterpret_cast<uintptr_t>(bytes.data()) % WORKSPACE_ALIGNMENT);
    ExpertPass<T> pass(e, space);
    together(threads, tokens * choice.top_k * e.hidden() * e.width() > SMALL, [&](Team &team) {
        for (int64_t at = 0; at < tokens; at += most) {
            int64_t count = std::min(most, tokens - at);
            const T *rows = x + at * e.hidden();
            Choice some{choice.top_k, choice.chosen + at * choice.top_k, choice.shares + at * choice.top_k};
            team.each(
                count, [&](int64_t first, int64_t last) { prepare_rows(e.gate_up, rows, prepared, first, last); },
                [&] { pass.assign(some, count); });
            pass.run(team, e.gate_up.dense() ? reinterpret_cast<const char *>(rows) : prepared, count,
                     out + at * e.hidden(), false, nothing);
        }
    });
}
