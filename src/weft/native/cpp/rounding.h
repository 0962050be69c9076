// Rounding: rows of weights to the numbers of a scheme, with the scales that lose least. What is tried, and what is
// taken of it, is that of quant/rounding.py.
//
// The same columns of several rows lie side by side, one row in each lane of a vector, so that no sum has to be gathered
// from its lanes.
#pragma once

#include <iterator>

#include "quantised.h"

enum Weights : int64_t { BF16, FP16, FP32 };  // as in native/rounding.py

struct Rounding {
    int64_t type;           // of the weights, one of Weights
    int64_t rows, width;    // of the weights; the first column begins a group, the last group may be short
    int64_t group;          // columns
    int64_t bits;           // 4 or 8
    Lowest kind;
    int64_t lacking, cols;  // columns left out at the beginning, and those that are kept: in multiples of BLOCK

    int64_t groups() const { return (width + group - 1) / group; }  // of a row
    float most() const { return float((1 << bits) - 1); }
    float zero() const { return kind == Lowest::MIDDLE ? float(1 << (bits - 1)) : 0.0f; }
};

constexpr int64_t LONGEST = 128;  // columns of a group

// Shares of a group's range, tried where its steps are coarse: of what is below its middle, and above.
struct Shares {
    float below, above;
};
constexpr Shares OF_MINIMUM[] = {{1.0f, 1.0f}, {1.0f, 0.9f}, {0.9f, 1.0f}, {0.9f, 0.9f}};
constexpr Shares OF_MIDDLE[] = {{1.0f, 1.0f}, {0.9f, 0.9f}, {0.8f, 0.8f}};

constexpr float TINY = 0x1p-23f;  // the smallest scale

// ---------------------------------------------------------------------------------------------- vectors

typedef uint16_t shorts __attribute__((vector_size(2 * SLICE)));
typedef uint8_t eights __attribute__((vector_size(SLICE)));

inline floats smaller(floats a, floats b) { return a < b ? a : b; }
inline floats larger(floats a, floats b) { return a > b ? a : b; }
inline floats at_least(floats x, float low) { return larger(x, floats{} + low); }
inline floats between(floats x, float low, float high) { return smaller(at_least(x, low), floats{} + high); }
inline floats size_of(floats x) { return larger(x, -x); }
inline floats whole(floats x) { return __builtin_convertvector(nearest(x), floats); }

// x in fp16, to nearest, ties to even; what is too large becomes the largest.
inline shorts to_halves(floats x) {
    floats size = smaller(size_of(x), floats{} + 65504.0f);
    ints bits = (ints)size, normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    ints found = size < 0x1p-14f ? nearest(size * 0x1p24f) : normal;
    return __builtin_convertvector(found | ((ints)x >> 16 & 0x8000), shorts);
}

// x as it is stored.
inline floats stored(floats x) {
    shorts bits = to_halves(x);
    return halves(reinterpret_cast<const char *>(&bits));
}

// --------------------------------------------------------------------------------------------- the scales

// w = scale * (q - zero) + from, q from 0 on. `lowest` is what is stored of a minimum or a zero point.
struct Fit {
    floats scale, from, zero, lowest;
};

// q - zero of a scheme whose zero is the same everywhere.
inline floats number(const Rounding &it, floats w, floats from, floats inverse) {
    return between(whole((w - from) * inverse), -it.zero(), it.most() - it.zero());
}

// A first scale for shares of the range [low, high], and where they begin.
inline Fit guess(const Rounding &it, floats low, floats high, Shares shares) {
    floats zero = floats{} + it.zero();
    if (it.kind == Lowest::MINIMUM) {
        floats middle = (high + low) / 2, below = (middle - low) * shares.below, above = (high - middle) * shares.above;
        return {stored(at_least((above + below) / it.most(), TINY)), middle - below, zero, floats{}};
    }
    // The number farthest from zero is on the side that has one step more.
    floats scale = stored((high > -low ? high : low) / -it.zero() * shares.above);
    return {size_of(scale) < TINY ? floats{} + TINY : scale, floats{}, zero, floats{}};
}

// The scale, and the minimum, that lose least for the numbers that a first fit leads to, where each column counts as
// `counts` says, which add up to 1.
inline Fit refined(const Rounding &it, const floats *w, const float *counts, floats mean, Fit fit) {
    bool minimum = it.kind == Lowest::MINIMUM;
    floats inverse = 1 / fit.scale, centre = minimum ? mean : floats{}, average = {}, squares = {}, products = {};
    for (int64_t c = 0; c < it.group; c++) {
        floats q = number(it, w[c], fit.from, inverse), counted = counts[c] * q;
        average += counted;
        squares += counted * q;
        products += (w[c] - centre) * counted;
    }
    if (minimum) {
        floats variance = squares - average * average;
        floats scale = stored(at_least(products / at_least(variance, TINY), TINY));
        fit.scale = variance > 0 ? scale : fit.scale;
        fit.from = fit.lowest = stored(mean - fit.scale * average);
    } else {
        floats scale = stored(products / at_least(squares, TINY));
        fit.scale = size_of(scale) < TINY ? fit.scale : scale;
    }
    return fit;
}

// The mean of squares.
inline floats error_of(const Rounding &it, const floats *w, const float *counts, const Fit &fit) {
    floats inverse = 1 / fit.scale, sum = {};
    for (int64_t c = 0; c < it.group; c++) {
        floats off = number(it, w[c], fit.from, inverse) * fit.scale + (fit.from - w[c]);
        sum += counts[c] * (off * off);
    }
    return sum;
}

// The fit of each lane's group, whose columns are w.
inline Fit fit(const Rounding &it, const floats *w, const float *counts) {
    floats low = w[0], high = w[0], mean = {}, none = {};
    for (int64_t c = 0; c < it.group; c++) {
        low = smaller(low, w[c]);
        high = larger(high, w[c]);
        mean += counts[c] * w[c];
    }
    if (it.kind == Lowest::ZERO) {
        low = smaller(low, none);
        floats scale = stored(at_least((at_least(high, 0) - low) / it.most(), TINY));
        floats zero = between(whole(-low / scale), 0, it.most());
        return {scale, none, zero, zero};
    }
    if (it.kind == Lowest::MIDDLE && it.bits == 8)
        return {stored(at_least(larger(high, -low) / (it.zero() - 1), TINY)), none, none + it.zero(), none};
    const bool minimum = it.kind == Lowest::MINIMUM;
    const Shares *tried = minimum ? OF_MINIMUM : OF_MIDDLE;
    const size_t tries = it.bits == 8 ? 1 : minimum ? std::size(OF_MINIMUM) : std::size(OF_MIDDLE);
    Fit best = {};
    floats least = {};
    for (size_t i = 0; i < tries; i++) {
        Fit found = refined(it, w, counts, mean, guess(it, low, high, tried[i]));
        floats error = error_of(it, w, counts, found);
        ints better = i ? error < least : ~ints{};
        least = better ? error : least;
        best.scale = better ? found.scale : best.scale;
        best.from = better ? found.from : best.from;
        best.lowest = better ? found.lowest : best.lowest;
        best.zero = found.zero;
    }
    return best;
}

// ---------------------------------------------------------------------------------------------- the rows

// `count` weights, a multiple of BLOCK, as floats.
inline void read_weights(int64_t type, const char *from, int64_t count, float *to) {
    for (int64_t c = 0; c < count; c += SLICE) {
        floats some = type == FP32   ? wide(reinterpret_cast<const float *>(from) + c)
                      : type == BF16 ? wide(reinterpret_cast<const bf16 *>(from) + c)
                                     : halves(from + c * 2);
        std::memcpy(to + c, &some, sizeof some);
    }
}

// The numbers of BLOCK weights; of 4 bits, those of the second half in the high nibbles.
template <int BITS> void write_block(const float *w, float scale, float from, float zero, char *to) {
    constexpr int64_t PARTS = BLOCK / SLICE;
    constexpr float MOST = (1 << BITS) - 1;
    float inverse = 1 / scale;
    ints q[PARTS];
    for (int64_t i = 0; i < PARTS; i++)
        q[i] = nearest(between((wide(w + i * SLICE) - from) * inverse, -zero, MOST - zero)) + int32_t(zero);
    for (int64_t i = 0; i < PARTS * BITS / 8; i++) {
        eights some = __builtin_convertvector(BITS == 8 ? q[i] : q[i] | q[i + PARTS / 2] << 4, eights);
        std::memcpy(to + i * SLICE, &some, sizeof some);
    }
}

// weights [rows, width] to values [rows, cols * bits / 8] and, for each of a row's groups, a scale (fp16) and what its
// kind has beside it: a minimum (fp16) or a zero point (a byte). `counts` [groups, group] are what the squares of errors
// count, which add up to 1 in each group. Runs in the calling thread.
inline void round_rows(const Rounding &it, const char *weights, const float *counts, char *values, uint16_t *scales,
                       void *lowest) {
    float rows[SLICE][LONGEST];
    floats columns[LONGEST];
    const int64_t groups = it.groups(), bytes = it.type == FP32 ? 4 : 2;
    for (int64_t first = 0; first < it.rows; first += SLICE) {
        const int64_t count = std::min(SLICE, it.rows - first);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t begin = g * it.group, there = std::min(it.group, it.width - begin);
            for (int64_t i = 0; i < SLICE; i++) {
                int64_t row = first + std::min(i, count - 1);  // lanes that are left over do the last row again
                read_weights(it.type, weights + (row * it.width + begin) * bytes, there, rows[i]);
                // Copies of the last column change neither end of the range.
                for (int64_t c = there; c < it.group; c++) rows[i][c] = rows[i][there - 1];
            }
            for (int64_t c = 0; c < it.group; c++)
                for (int64_t i = 0; i < SLICE; i++) columns[c][i] = rows[i][c];
            Fit found = fit(it, columns, counts + begin);
            shorts scale = to_halves(found.scale), minimum = to_halves(found.lowest);
            for (int64_t i = 0; i < count; i++) {
                int64_t row = first + i, at = row * groups + g;
                scales[at] = scale[i];
                if (it.kind == Lowest::MINIMUM) static_cast<uint16_t *>(lowest)[at] = minimum[i];
                if (it.kind == Lowest::ZERO) static_cast<uint8_t *>(lowest)[at] = uint8_t(found.lowest[i]);
                for (int64_t c = 0; c < it.group; c += BLOCK) {
                    int64_t col = begin + c - it.lacking;  // of the columns kept
                    if (col < 0 || col >= it.cols) continue;
                    char *to = values + (row * it.cols + col) * it.bits / 8;
                    (it.bits == 4 ? write_block<4> : write_block<8>)(rows[i] + c, found.scale[i], found.from[i],
                                                                     found.zero[i], to);
                }
            }
        }
    }
}
