// Rounding of rows of weights to the numbers of a scheme. The candidates, and the choice among them, are those of
// ranks/quant/rounding.py.
//
// The same columns of several rows lie side by side, one row in each lane of a vector: no sum has to be gathered from
// several lanes.
#pragma once

#include <iterator>

#include "quantised.h"

// The types of weights, and a weight that is to be rounded. Mirrored in machine/native/structures.py.
enum Weights : int64_t { BF16, FP16, FP32 };

struct Rounding {
    int64_t type;           // one of Weights
    int64_t rows, width;    // of the weight; its first column begins a group, its last group may be short
    int64_t group;          // columns
    int64_t bits;           // 4 or 8
    Lowest kind;
    int64_t lacking, cols;  // columns dropped at the beginning, and columns kept after them: multiples of BLOCK

    int64_t groups() const { return (width + group - 1) / group; }  // of a row
    float most() const { return float((1 << bits) - 1); }
    float zero() const { return kind == Lowest::MIDDLE ? float(1 << (bits - 1)) : 0.0f; }
};

constexpr int64_t LONGEST_GROUP = 128;  // columns of a group at most

// Factors on a group's range that are tried with 4 bits, whose steps are coarse: on its part below the middle, and on
// the part above.
struct RangeFactors {
    float below, above;
};
constexpr RangeFactors OF_MINIMUM[] = {{1.0f, 1.0f}, {1.0f, 0.9f}, {0.9f, 1.0f}, {0.9f, 0.9f}};
constexpr RangeFactors OF_MIDDLE[] = {{1.0f, 1.0f}, {0.9f, 0.9f}, {0.8f, 0.8f}};

constexpr float TINY = 0x1p-23f;  // smallest float16 scale: two steps of subnormal float16

// ---------------------------------------------------------------------------------------------- vectors

typedef uint16_t shorts __attribute__((vector_size(2 * SLICE)));
typedef uint8_t eights __attribute__((vector_size(SLICE)));

inline floats smaller(floats a, floats b) { return a < b ? a : b; }
inline floats larger(floats a, floats b) { return a > b ? a : b; }
inline floats at_least(floats x, float low) { return larger(x, floats{} + low); }
inline floats between(floats x, float low, float high) { return smaller(at_least(x, low), floats{} + high); }
inline floats size_of(floats x) { return larger(x, -x); }
inline floats whole(floats x) { return __builtin_convertvector(nearest(x), floats); }

// x in fp16, to nearest, ties to even. What is too large becomes the largest number.
inline shorts to_halves(floats x) {
    floats size = smaller(size_of(x), floats{} + 65504.0f);
    ints bits = (ints)size, normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    ints rounded = size < 0x1p-14f ? nearest(size * 0x1p24f) : normal;
    return __builtin_convertvector(rounded | ((ints)x >> 16 & 0x8000), shorts);
}

// x rounded to the fp16 that is stored.
inline floats as_stored(floats x) {
    shorts bits = to_halves(x);
    return halves(reinterpret_cast<const char *>(&bits));
}

// --------------------------------------------------------------------------------------------- the scales

// w = scale * (q - zero) + from, q from 0 on. `lowest` is the stored minimum or zero point.
struct Fit {
    floats scale, from, zero, lowest;
};

// q - zero, for a scheme whose zero is the same in all groups.
inline floats number(const Rounding &r, floats w, floats from, floats inverse) {
    return between(whole((w - from) * inverse), -r.zero(), r.most() - r.zero());
}

// The first scale for factors on the range [low, high], and where the range then begins.
inline Fit first_fit(const Rounding &r, floats low, floats high, RangeFactors factors) {
    floats zero = floats{} + r.zero();
    if (r.kind == Lowest::MINIMUM) {
        floats middle = (high + low) / 2;
        floats below = (middle - low) * factors.below, above = (high - middle) * factors.above;
        return {as_stored(at_least((above + below) / r.most(), TINY)), middle - below, zero, floats{}};
    }
    // The number farthest from zero is on the side that has one step more.
    floats scale = as_stored((high > -low ? high : low) / -r.zero() * factors.above);
    return {size_of(scale) < TINY ? floats{} + TINY : scale, floats{}, zero, floats{}};
}

// The scale, and the minimum, with the smallest error for the numbers that `fit` rounds to. Errors of columns are
// weighted by `error_weights`, which add up to 1.
inline Fit refine_fit(const Rounding &r, const floats *w, const float *error_weights, floats mean, Fit fit) {
    bool minimum = r.kind == Lowest::MINIMUM;
    floats inverse = 1 / fit.scale, centre = minimum ? mean : floats{}, average = {}, squares = {}, products = {};
    for (int64_t c = 0; c < r.group; c++) {
        floats q = number(r, w[c], fit.from, inverse), counted = error_weights[c] * q;
        average += counted;
        squares += counted * q;
        products += (w[c] - centre) * counted;
    }
    if (minimum) {
        floats variance = squares - average * average;
        floats scale = as_stored(at_least(products / at_least(variance, TINY), TINY));
        fit.scale = variance > 0 ? scale : fit.scale;
        fit.from = fit.lowest = as_stored(mean - fit.scale * average);
    } else {
        floats scale = as_stored(products / at_least(squares, TINY));
        fit.scale = size_of(scale) < TINY ? fit.scale : scale;
    }
    return fit;
}

// The weighted mean of squared errors.
inline floats error_of(const Rounding &r, const floats *w, const float *error_weights, const Fit &fit) {
    floats inverse = 1 / fit.scale, sum = {};
    for (int64_t c = 0; c < r.group; c++) {
        floats off = number(r, w[c], fit.from, inverse) * fit.scale + (fit.from - w[c]);
        sum += error_weights[c] * (off * off);
    }
    return sum;
}

// The best fit of each lane's group, whose columns are w.
inline Fit best_fit(const Rounding &r, const floats *w, const float *error_weights) {
    floats low = w[0], high = w[0], mean = {}, none = {};
    for (int64_t c = 0; c < r.group; c++) {
        low = smaller(low, w[c]);
        high = larger(high, w[c]);
        mean += error_weights[c] * w[c];
    }
    if (r.kind == Lowest::ZERO) {
        low = smaller(low, none);
        floats scale = as_stored(at_least((at_least(high, 0) - low) / r.most(), TINY));
        floats zero = between(whole(-low / scale), 0, r.most());
        return {scale, none, zero, zero};
    }
    if (r.kind == Lowest::MIDDLE && r.bits == 8)
        return {as_stored(at_least(larger(high, -low) / (r.zero() - 1), TINY)), none, none + r.zero(), none};
    const bool minimum = r.kind == Lowest::MINIMUM;
    const RangeFactors *tried = minimum ? OF_MINIMUM : OF_MIDDLE;
    const size_t tries = r.bits == 8 ? 1 : minimum ? std::size(OF_MINIMUM) : std::size(OF_MIDDLE);
    Fit best = {};
    floats least = {};
    for (size_t i = 0; i < tries; i++) {
        Fit candidate = refine_fit(r, w, error_weights, mean, first_fit(r, low, high, tried[i]));
        floats error = error_of(r, w, error_weights, candidate);
        ints better = i ? error < least : ~ints{};
        least = better ? error : least;
        best.scale = better ? candidate.scale : best.scale;
        best.from = better ? candidate.from : best.from;
        best.lowest = better ? candidate.lowest : best.lowest;
        best.zero = candidate.zero;
    }
    return best;
}

// ---------------------------------------------------------------------------------------------- the rows

// Read `count` weights, a multiple of BLOCK, as floats.
inline void read_weights(int64_t type, const char *from, int64_t count, float *to) {
    for (int64_t c = 0; c < count; c += SLICE) {
        floats some = type == FP32   ? wide(reinterpret_cast<const float *>(from) + c)
                      : type == BF16 ? wide(reinterpret_cast<const bf16 *>(from) + c)
                                     : halves(from + c * 2);
        std::memcpy(to + c, &some, sizeof some);
    }
}

// Write the numbers of BLOCK weights; with 4 bits, those of the second half are the high nibbles.
template <int BITS> void write_block(const float *w, float scale, float from, float zero, char *to) {
    constexpr int64_t PARTS = BLOCK / SLICE;
    constexpr float MAX_NUMBER = (1 << BITS) - 1;
    float inverse = 1 / scale;
    ints q[PARTS];
    for (int64_t i = 0; i < PARTS; i++)
        q[i] = nearest(between((wide(w + i * SLICE) - from) * inverse, -zero, MAX_NUMBER - zero)) + int32_t(zero);
    for (int64_t i = 0; i < PARTS * BITS / 8; i++) {
        eights some = __builtin_convertvector(BITS == 8 ? q[i] : q[i] | q[i + PARTS / 2] << 4, eights);
        std::memcpy(to + i * SLICE, &some, sizeof some);
    }
}

// Round weights [rows, width] to values [rows, cols * bits / 8] and, for each group of a row, a scale (fp16) and, as
// the kind has it, a minimum (fp16) or a zero point (a byte). `error_weights` [groups, group] weight the squared errors,
// and add up to 1 in each group. Runs in the calling thread.
inline void round_rows(const Rounding &r, const char *weights, const float *error_weights, char *values,
                       uint16_t *scales, void *lowest) {
    float rows[SLICE][LONGEST_GROUP];
    floats columns[LONGEST_GROUP];
    const int64_t groups = r.groups(), bytes = r.type == FP32 ? 4 : 2;
    for (int64_t first = 0; first < r.rows; first += SLICE) {
        const int64_t count = std::min(SLICE, r.rows - first);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t begin = g * r.group, width = std::min(r.group, r.width - begin);
            for (int64_t i = 0; i < SLICE; i++) {
                int64_t row = first + std::min(i, count - 1);  // unused lanes do the last row again
                read_weights(r.type, weights + (row * r.width + begin) * bytes, width, rows[i]);
                // Copies of the last column change neither end of the range.
                for (int64_t c = width; c < r.group; c++) rows[i][c] = rows[i][width - 1];
            }
            for (int64_t c = 0; c < r.group; c++)
                for (int64_t i = 0; i < SLICE; i++) columns[c][i] = rows[i][c];
            Fit fit = best_fit(r, columns, error_weights + begin);
            shorts scale = to_halves(fit.scale), minimum = to_halves(fit.lowest);
            for (int64_t i = 0; i < count; i++) {
                int64_t row = first + i, at = row * groups + g;
                scales[at] = scale[i];
                if (r.kind == Lowest::MINIMUM) static_cast<uint16_t *>(lowest)[at] = minimum[i];
                if (r.kind == Lowest::ZERO) static_cast<uint8_t *>(lowest)[at] = uint8_t(fit.lowest[i]);
                for (int64_t c = 0; c < r.group; c += BLOCK) {
                    int64_t col = begin + c - r.lacking;  // of the kept columns
                    if (col < 0 || col >= r.cols) continue;
                    char *to = values + (row * r.cols + col) * r.bits / 8;
                    (r.bits == 4 ? write_block<4> : write_block<8>)(rows[i] + c, fit.scale[i], fit.from[i], fit.zero[i],
                                                                     to);
                }
            }
        }
    }
}
