// Mixtures of experts: each expert is a gated MLP that computes the tokens which chose it, all of them at once, so that
// its weights are read once.
//
// Work is dealt by panels, not by experts: a token with a few experts keeps all threads busy, and so do more threads
// than experts. What each token gets is added up in the order of the experts' numbers, whatever other tokens there are.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "matrix.h"
#include "memory.h"
#include "product.h"
#include "routing.h"
#include "team.h"

// The experts of a rank. Mirrored in machine/native/structures.py. A matrix is that of the first expert; those of the others
// follow it in the same memory. Panels of `gate_up` are those of the gate and those of the up projection in turns, both
// padded to whole panels.
struct Experts {
    Matrix gate_up, down;
    int64_t first, count;          // numbers of the experts: [first, first + count)
    float gain, limit, up_offset;  // see `Activation`
    int64_t *routed;               // [count]: tokens that each has computed so far

    int64_t hidden() const { return down.rows; }
    int64_t width() const { return down.cols; }
};

// The shared experts, together one MLP that every token goes through: its gate_up has the panels of the gate before
// those of the up projection. The sigmoid of a token's product with `weigher`, of one row, multiplies its result.
// A matrix without rows is one that the mixture lacks. Mirrored in machine/native/structures.py.
struct SharedExperts {
    Matrix gate_up, down, weigher;

    int64_t width() const { return down.cols; }
};

// A router and a rank's share of the experts. The router's weights and the weigher's are not quantised. Mirrored in
// machine/native/structures.py.
struct Mixture {
    Matrix router;
    Routing routing;
    Experts experts;
    SharedExperts shared;

    int64_t top_k() const { return routing.top_k; }
    bool has_shared() const { return shared.down.rows; }
};

// Tokens that choose experts: [tokens, top_k] numbers and shares. Experts of other ranks add nothing.
struct Choice {
    int64_t top_k;
    const int64_t *chosen;
    const float *shares;
};

// Rows of tokens, one for each expert of a token, that go through the experts at once. A step of more tokens is
// divided: each expert then has so many that the products take longer than the weights take to be read.
constexpr int64_t MAX_ROWS = 1 << 13;

inline int64_t tokens_at_once(int64_t tokens, int64_t top_k) {
    return std::min(tokens, std::max<int64_t>(1, MAX_ROWS / std::max<int64_t>(1, top_k)));
}

// Rows from which on panels are dealt one by one: experts may have very different numbers of them.
constexpr int64_t UNEVEN_ROWS = 64;

// The activation of an MLP: the gate's SiLU, x * sigmoid(gain * x), times the up projection with an offset. Both are
// clamped before: the gate from above, the up projection from both sides.
struct Activation {
    float gain, limit, up_offset;

    // Of the columns of a panel, of which `count` are written.
    template <class T> void apply(const float *gate, const float *up, T *out, int64_t count) const {
        alignas(64) float piece[PANEL];
#pragma omp simd
        for (int64_t i = 0; i < PANEL; i++) {
            float g = std::min(gate[i], limit), u = std::max(std::min(up[i], limit), -limit);
            piece[i] = g / (1.0f + exp_moderate(-gain * g)) * (u + up_offset);
        }
        narrow_row(piece, out, count);
    }
};

// Rows of tokens that go through one MLP.
template <class T> struct ExpertRows {
    Matrix gate_up, down;
    int64_t step, up;  // panels of gate_up: from one of the gate to the next one, and to that of the up projection
    Activation activation;
    int64_t count;
    bool plain, inner_plain;  // gate_up and down read rows as they are, not prepared ones
    const char *x;            // [count]
    T *inner;                 // [count, width]: results of the activation
    const char *prepared;     // [count]: of `inner`
    const int32_t *token;  // of each row; null: row r is token `first_token` + r
    int64_t first_token;
    const float *share;    // of each row

    // Both projections and the activation, for panel p of the gate.
    void open(int64_t p) const {
        alignas(64) float gate[BATCH * PANEL], above[BATCH * PANEL];
        int64_t width = down.cols, column = p * PANEL, columns = std::min(PANEL, width - column), first = p * step;
        const char *second = panel_at<T>(gate_up, first + up), *next = panel_at<T>(gate_up, first + step);
        for (int64_t at = 0; at < count; at += BATCH) {
            int64_t n = std::min(BATCH, count - at);
            const char *rows = x + at * row_bytes<T>(gate_up, plain);
            panel_sums<T>(gate_up, first, rows, plain, n, gate, {second, count, at});
            add_bias<T>(gate_up, first, n, gate, PANEL);
            panel_sums<T>(gate_up, first + up, rows, plain, n, above, {next, count, at});
            add_bias<T>(gate_up, first + up, n, above, PANEL);
            for (int64_t r = 0; r < n; r++)
                activation.apply(gate + r * PANEL, above + r * PANEL, inner + (at + r) * width + column, columns);
        }
    }

    // Add the weighted results for panel p of the hidden dim to sums [tokens, PANEL].
    void close(int64_t p, float *sums) const {
        alignas(64) float parts[BATCH * PANEL];
        const char *rows = inner_plain ? reinterpret_cast<const char *>(inner) : prepared;
        int64_t stride = row_bytes<T>(down, inner_plain);
        for (int64_t at = 0; at < count; at += BATCH) {
            int64_t n = std::min(BATCH, count - at);
            panel_sums<T>(down, p, rows + at * stride, inner_plain, n, parts, {panel_at<T>(down, p + 1), count, at});
            add_bias<T>(down, p, n, parts, std::min(PANEL, down.rows - p * PANEL));
            for (int64_t r = at; r < at + n; r++) {
                float *sum = sums + (token ? token[r] : first_token + r) * PANEL;
                const float *part = parts + (r - at) * PANEL;
#pragma omp simd
                for (int64_t i = 0; i < PANEL; i++) sum[i] += share[r] * part[i];
            }
        }
    }
};

// Memory for up to `tokens` tokens, which layers with different mixtures may use in turn.
template <class T> struct ExpertSpace {
    int64_t tokens, top_k;
    // The most of any layer.
    int64_t count = 0, read = 0, width = 0, prepared_row = 0, panels = 0, shared_width = 0, shared_prepared_row = 0;
    int32_t *token;         // [rows]: the token of each row; rows lie expert by expert
    float *share;           // [rows]
    int64_t *begin;         // [count + 1]: first row of each expert
    int64_t *touched;       // [count]: experts that have rows, in order
    char *gathered;         // [rows]: of x, as the first product reads them
    T *inner;               // [rows, width]
    char *prepared;         // [rows]: of `inner`, as the second product reads them, unless that reads `inner` itself
    T *shared_inner;        // [tokens, shared_width]
    char *shared_prepared;  // [tokens]
    float *shared_share;    // [tokens]
    float *sums;            // [panels of hidden, tokens, PANEL]
    // What has been assigned. A thread that is late may read these while they change, to no effect.
    mutable std::atomic<int64_t> rows{0}, experts{0};

    ExpertSpace(int64_t tokens, int64_t top_k) : tokens(tokens), top_k(top_k) {}

    void include(const Mixture &m) {
        count = std::max(count, m.experts.count);
        read = std::max({read, row_bytes<T>(m.experts.gate_up, true), row_bytes<T>(m.experts.gate_up, false)});
        width = std::max(width, m.experts.width());
        prepared_row = std::max(prepared_row, prepared_bytes<T>(m.experts.down));
        panels = std::max(panels, m.experts.down.panels());
        if (!m.has_shared()) return;
        shared_width = std::max(shared_width, m.shared.width());
        shared_prepared_row = std::max(shared_prepared_row, prepared_bytes<T>(m.shared.down));
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
        memory.reserve(shared_inner, tokens * shared_width);
        memory.reserve(shared_prepared, tokens * shared_prepared_row);
        memory.reserve(shared_share, shared_width ? tokens : 0);
        memory.reserve(sums, panels * PANEL * tokens);
    }
};

// Rows of `count` tokens as the first product of the routed experts reads them. The shared experts compute
// `shared_count` of these tokens, from `shared_first` on: their rows as that one's first product reads them.
struct TokenRows {
    const char *routed, *shared;
    int64_t count, shared_first, shared_count;
};

// One pass of some tokens through the experts of a rank.
template <class T> class ExpertPass {
    const Mixture &m;
    const Experts &e;
    const ExpertSpace<T> &space;

    int64_t pairs() const { return e.gate_up.panels() / 2; }
    int64_t shared_pairs() const { return m.has_shared() ? m.shared.gate_up.panels() / 2 : 0; }

    int64_t grain(int64_t pieces, const Team &team) const {
        return space.rows >= UNEVEN_ROWS ? 1 : std::max<int64_t>(1, pieces / (8 * team.size));
    }

    // Whether products of routed and of shared experts read rows as they are: by the number of rows that each can
    // expect.
    bool routed_plain(const Matrix &weight) const {
        return reads_plain<T>(weight, space.tokens * m.top_k() / e.count);
    }
    bool shared_plain(const Matrix &weight) const { return reads_plain<T>(weight, space.tokens); }

    // Bytes of a row of x for the routed experts.
    int64_t read_bytes() const { return row_bytes<T>(e.gate_up, routed_plain(e.gate_up)); }

    // The rows of an expert. `x` has those of all experts, or the row of the only token.
    ExpertRows<T> routed(int64_t expert, const char *x) const {
        int64_t begin = space.begin[expert], count = space.begin[expert + 1] - begin;
        Matrix gate_up = nth<T>(e.gate_up, expert), down = nth<T>(e.down, expert);
        return {gate_up,
                down,
                2,
                1,
                {e.gain, e.limit, e.up_offset},
                count,
                routed_plain(gate_up),
                routed_plain(down),
                x + (x == space.gathered ? begin * read_bytes() : 0),
                space.inner + begin * e.width(),
                space.prepared + begin * prepared_bytes<T>(down),
                space.token + begin,
                0,
                space.share + begin};
    }

    ExpertRows<T> shared(const TokenRows &x) const {
        Activation silu{1, std::numeric_limits<float>::infinity(), 0};
        return {m.shared.gate_up,
                m.shared.down,
                1,
                shared_pairs(),
                silu,
                x.shared_count,
                shared_plain(m.shared.gate_up),
                shared_plain(m.shared.down),
                x.shared,
                space.shared_inner,
                space.shared_prepared,
                nullptr,
                x.shared_first,
                space.shared_share};
    }

    // x as the first product reads it is copied for rows [first, last), so that those of an expert lie together.
    void gather(const char *from, int64_t first, int64_t last) const {
        int64_t bytes = read_bytes();
        for (int64_t r = first; r < last; r++)
            std::memcpy(space.gathered + r * bytes, from + space.token[r] * bytes, bytes);
    }

    // The first products and the activation, for pairs of panels [first, last): those of each touched expert in turn,
    // then those of the shared ones.
    void open(const TokenRows &x, int64_t first, int64_t last) const {
        int64_t all = space.experts * pairs();
        for (int64_t i = first; i < last; i++)
            if (i < all)
                routed(space.touched[i / pairs()], x.routed).open(i % pairs());
            else
                shared(x).open(i - all);
    }

    // The last product for panels [first, last) of the hidden dim, weighted and added up over the experts.
    void close(const TokenRows &x, T *out, int64_t first, int64_t last) const {
        int64_t size = x.count * PANEL;
        float *sums = space.sums + first * size;
        std::fill(sums, space.sums + last * size, 0.0f);
        auto add = [&](const ExpertRows<T> &rows) {
            for (int64_t p = first; p < last; p++) rows.close(p, sums + (p - first) * size);
        };
        for (int64_t i = 0; i < space.experts; i++) add(routed(space.touched[i], nullptr));
        if (m.has_shared()) add(shared(x));
        for (int64_t p = first; p < last; p++, sums += size) {
            int64_t column = p * PANEL, count = std::min(PANEL, e.hidden() - column);
            for (int64_t t = 0; t < x.count; t++) narrow_row(sums + t * PANEL, out + t * e.hidden() + column, count);
        }
    }

    static const char *rows(const Matrix &w, bool plain, const T *x, const char *prepared, int64_t at) {
        return plain ? reinterpret_cast<const char *>(x + at * w.cols) : prepared + at * prepared_bytes<T>(w);
    }

    void prepare_inner(int64_t first, int64_t last) const {
        if (!routed_plain(e.down)) prepare_rows(e.down, space.inner, space.prepared, first, last);
    }
    void prepare_shared_inner(int64_t first, int64_t last) const {
        if (!shared_plain(m.shared.down))
            prepare_rows(m.shared.down, space.shared_inner, space.shared_prepared, first, last);
    }

public:
    ExpertPass(const Mixture &mixture, const ExpertSpace<T> &space) : m(mixture), e(mixture.experts), space(space) {}

    // Prepare rows [first, last) of x for the first products, once for all experts that read them.
    void prepare_routed(const T *x, char *prepared, int64_t first, int64_t last) const {
        if (!routed_plain(e.gate_up)) prepare_rows(e.gate_up, x, prepared, first, last);
    }
    void prepare_shared(const T *x, char *prepared, int64_t first, int64_t last) const {
        if (!shared_plain(m.shared.gate_up)) prepare_rows(m.shared.gate_up, x, prepared, first, last);
    }

    // Rows of x from token `at` on, as the first products read them: themselves, or what is prepared.
    const char *routed_rows(const T *x, const char *prepared, int64_t at) const {
        return rows(e.gate_up, routed_plain(e.gate_up), x, prepared, at);
    }
    const char *shared_rows(const T *x, const char *prepared, int64_t at) const {
        return rows(m.shared.gate_up, shared_plain(m.shared.gate_up), x, prepared, at);
    }

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
            e.routed[expert] += count;
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

    // After `assign`: from the tokens' rows of x to out [tokens, hidden], by the whole team, then then() once. What
    // lies between the products is done by one thread if it is `little`.
    void run(Team &team, TokenRows x, T *out, bool little, Then then) const {
        if (x.count > 1) {
            const char *from = x.routed;
            team.each(space.rows, [&](int64_t first, int64_t last) { gather(from, first, last); });
            x.routed = space.gathered;
        }
        int64_t pieces = space.experts * pairs() + shared_pairs(), panels = e.down.panels();
        team.each(
            pieces, grain(pieces, team), [&](int64_t first, int64_t last) { open(x, first, last); },
            [&] {
                if (!little) return;
                prepare_inner(0, space.rows);
                prepare_shared_inner(0, x.shared_count);
            });
        if (!little && !routed_plain(e.down))
            team.each(space.rows, [&](int64_t first, int64_t last) { prepare_inner(first, last); });
        if (!little && !shared_plain(m.shared.down))
            team.each(x.shared_count, [&](int64_t first, int64_t last) { prepare_shared_inner(first, last); });
        team.each(
            panels, grain(panels, team), [&](int64_t first, int64_t last) { close(x, out, first, last); }, then);
    }
};

// out = the experts' results for `tokens` rows of x, weighted and added up: for a caller without a team.
template <class T>
void run_experts(const Experts &e, const T *x, const Choice &choice, int64_t tokens, T *out, int64_t threads) {
    const Mixture m{{}, {choice.top_k, 0, 0, 1, 1, 1, nullptr, 1.0f}, e, {}};
    int64_t most = tokens_at_once(tokens, choice.top_k);
    ExpertSpace<T> space(most, choice.top_k);
    space.include(m);
    char *prepared;
    auto reserve = [&](char *start) {
        Memory memory{start};
        space.reserve(memory);
        memory.reserve(prepared, most * prepared_bytes<T>(e.gate_up));
        return memory.bytes;
    };
    std::vector<char> bytes(reserve(nullptr) + WORKSPACE_ALIGNMENT);
    reserve(bytes.data() + -reinterpret_cast<uintptr_t>(bytes.data()) % WORKSPACE_ALIGNMENT);
    ExpertPass<T> pass(m, space);
    together(threads, tokens * choice.top_k * e.hidden() * e.width() > SMALL, [&](Team &team) {
        for (int64_t at = 0; at < tokens; at += most) {
            int64_t count = std::min(most, tokens - at);
            const T *rows = x + at * e.hidden();
            Choice some{choice.top_k, choice.chosen + at * choice.top_k, choice.shares + at * choice.top_k};
            team.each(
                count, [&](int64_t first, int64_t last) { pass.prepare_routed(rows, prepared, first, last); },
                [&] { pass.assign(some, count); });
            TokenRows all{pass.routed_rows(rows, prepared, 0), nullptr, count, 0, 0};
            pass.run(team, all, out + at * e.hidden(), false, nothing);
        }
    });
}
