// Products with quantised weights: 4 or 8 bits each, in groups of columns that share a scale.
//
// x is quantised too, to 8 bits with a scale for every BLOCK columns of a token, so that integers are multiplied:
// AVX512-VNNI does 64 products per instruction. Numbers q of weights are unsigned: w = scale * q + lowest. The lowest
// number of a group is stored, or follows from its zero point, or from zero being the middle of the range of q.
//
// A panel is a sequence of blocks of BLOCK columns. A block is a sequence of slices of SLICE rows, each
// [BLOCK / 4][SLICE][4] numbers; with 4 bits, the first half of the columns are the low nibbles and the second half the
// high ones. The panel's scales are [groups][PANEL] fp16, with as many minima in fp16 or zero points of a byte. A group
// is one or more blocks, or half a block: PER_BLOCK, the number of groups in a block, is 2 for the latter and 1 for all
// others. Nested groups have two fp16 numbers, [groups][2][PANEL], and 12 bytes with scales and 6-bit minima for
// their NEST blocks, [groups][12][PANEL]: see `Packed::nested_at`.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "dense.h"
#include "numbers.h"

constexpr int64_t BLOCK = 32;  // columns
#ifdef __AVX512F__
constexpr int64_t SLICE = 16;  // rows of a panel, of which one vector holds a number each
#else
constexpr int64_t SLICE = 8;
#endif
constexpr int64_t SLICES = PANEL / SLICE;
constexpr int64_t NEST = 8;  // blocks of a nested group

// The source of a group's lowest number, see checkpoint/quantised/schemes.py. Numbers of MXFP4 stand for values of a table, and scales
// are powers of two of a byte each. FP8 and all after it have 32-bit scales, and their numbers become floats: see
// float8.h for FP8's, tabled.h for others. Mirrored in machine/native/structures.py.
enum class Lowest : int64_t { MIDDLE, ZERO, MINIMUM, MXFP4, NESTED, FP8, NF4, FP4, SIGNED };

// How a block's numbers are stored. `PER_BLOCK`: groups in a block, see above. `TABLE`: numbers are places of MXFP4's.
// `NESTED`: groups are nested ones. `FLOAT8`: numbers are FP8. `FLOATS`: the kind of numbers that become floats in
// another way; MIDDLE for none.
template <int BITS_, int PER_BLOCK_ = 1, bool TABLE_ = false, bool NESTED_ = false, bool FLOAT8_ = false,
          Lowest FLOATS_ = Lowest::MIDDLE>
struct Coding {
    static constexpr int BITS = BITS_, PER_BLOCK = PER_BLOCK_;
    static constexpr bool TABLE = TABLE_, NESTED = NESTED_, FLOAT8 = FLOAT8_;
    static constexpr Lowest FLOATS = FLOATS_;
    static constexpr bool WIDE = FLOAT8 || FLOATS != Lowest::MIDDLE;  // multiplied as floats
};
using Octets = Coding<8>;
using Nibbles = Coding<4>;
using HalfBlocks = Coding<4, 2>;
using Floats = Coding<4, 1, true>;
using Nested = Coding<4, 1, false, true>;
using Float8 = Coding<8, 1, false, false, true>;
using NormalFloats = Coding<4, 1, false, false, false, Lowest::NF4>;
using Float4 = Coding<4, 1, false, false, false, Lowest::FP4>;
using SignedOctets = Coding<8, 1, false, false, false, Lowest::SIGNED>;

// Twice the values of MXFP4, made unsigned by adding MXFP4_ZERO.
constexpr int MXFP4_ZERO = 12;
constexpr uint8_t MXFP4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A matrix's columns in blocks. Its first group may lack some of its first blocks.
struct Grouping {
    int64_t blocks;  // of all columns
    int64_t group;   // of a whole group; 0 if a block is two groups
    int64_t lacking; // that the first group lacks

    int64_t per_block() const { return group ? 1 : 2; }
    int64_t groups() const { return group ? (blocks + lacking + group - 1) / group : 2 * blocks; }
    int64_t group_of(int64_t block, int64_t half) const { return group ? (block + lacking) / group : 2 * block + half; }
    int64_t end(int64_t g) const { return std::min((g + 1) * group - lacking, blocks); }
};

template <int BITS> constexpr int64_t BLOCK_BYTES = PANEL * BLOCK * BITS / 8;

// ---------------------------------------------------------------------------------------------- vectors

// One number for each row of a slice. If the CPU's vectors are shorter, the compiler uses several.
typedef float floats __attribute__((vector_size(4 * SLICE)));
typedef int32_t ints __attribute__((vector_size(4 * SLICE)));

template <class V> inline V load(const void *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline floats halves(const char *from) {
#ifdef __AVX512F__
    return (floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    typedef uint16_t shorts __attribute__((vector_size(2 * SLICE)));
    ints bits = __builtin_convertvector(load<shorts>(from), ints);
    // A product corrects the other bias of exponents, and gets subnormal numbers right too.
    return (floats)((ints)((floats)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}

typedef uint8_t octets __attribute__((vector_size(SLICE)));

// Numbers of a byte each.
inline ints words(octets eight) {
#ifdef __AVX512F__
    return (ints)_mm512_cvtepu8_epi32((__m128i)eight);
#elif defined(__AVX2__)
    int64_t bits;
    std::memcpy(&bits, &eight, sizeof bits);
    return (ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits));
#else
    return __builtin_convertvector(eight, ints);
#endif
}

inline floats bytes(const char *from) { return __builtin_convertvector(words(load<octets>(from)), floats); }

// Half of the powers of two whose exponents, plus 127, are given: 0 in place of the two smallest.
inline floats powers(const char *from) {
    return (floats)(words(load<octets>(from)) << 23) * 0.5f;
}

// The unsigned numbers that stored ones, of a byte each, stand for.
template <class C> inline ints numbers(ints stored) {
    if constexpr (!C::TABLE) return stored;
#if defined(__AVX512BW__)
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(MXFP4)));
    return (ints)_mm512_shuffle_epi8(table, (__m512i)stored);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(MXFP4)));
    return (ints)_mm256_shuffle_epi8(table, (__m256i)stored);
#else
    uint8_t each[4 * SLICE];
    std::memcpy(each, &stored, sizeof each);
    for (uint8_t &number : each) number = MXFP4[number];
    return load<ints>(each);
#endif
}

// FP8 (E4M3). The bits of a number, moved to where a float has them, are those of the number times 2^-120, subnormal
// ones too.
constexpr float FLOAT8_BIAS = 0x1p120f;

inline float float8(uint8_t number) {
    uint32_t bits = uint32_t(number & 0x80) << 24 | uint32_t(number & 0x7f) << 20;
    float small;
    std::memcpy(&small, &bits, 4);
    return small * FLOAT8_BIAS;
}

// Four columns of a slice, times 2^-120. Each word's bytes are moved in pairs, as bf16, then apart.
inline void float8s(ints four, floats (&each)[4]) {
    typedef int16_t pairs __attribute__((vector_size(4 * SLICE)));
    constexpr int32_t KEPT = int32_t(0x87f087f0), UPPER = int32_t(0xffff0000);
    ints odd = (ints)((pairs)four >> 4) & KEPT, even = (ints)((pairs)four << 8 >> 4) & KEPT;
    each[0] = (floats)(even << 16);
    each[1] = (floats)(odd << 16);
    each[2] = (floats)(even & UPPER);
    each[3] = (floats)(odd & UPPER);
}

// bitsandbytes' tables of 16 values, mirrored in checkpoint/quantised/schemes.py.
alignas(64) constexpr float NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
alignas(64) constexpr float FP4[16] = {
    0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 6.0f / 12, 2.0f / 12, 3.0f / 12,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12};
template <class C> constexpr const float *FLOAT4S = C::FLOATS == Lowest::FP4 ? FP4 : NF4;

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define WEFT_SHORTS  // products of neighbouring columns are added in 16 bits
#endif

// sum += the product of four columns of a slice with four numbers of x.
inline void dot(ints &sum, ints w, const int8_t *x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    int32_t four;
    std::memcpy(&four, x, 4);
#endif
#if defined(__AVX512VNNI__)
    sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    sum = (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(four));
#else
    for (int j = 0; j < 4; j++) sum += (w >> (8 * j) & 255) * int32_t(x[j]);
#endif
}

// ------------------------------------------------------------------------------------------- the tokens

// A token's row of x in 8 bits: [blocks][BLOCK] integers, a scale for each block, then the sum of each block's numbers.
// If weights have two groups `per_block`, these are the sums of the first halves of blocks, then of the second halves.
struct Row {
    const int8_t *values;
    const char *scales;

    Row(const char *at, int64_t blocks)
        : values(reinterpret_cast<const int8_t *>(at)), scales(at + blocks * BLOCK) {}
    static int64_t sums_after(int64_t blocks) { return blocks * int64_t(sizeof(float)); }
    static int64_t bytes(int64_t blocks, int64_t per_block) {
        return (blocks * BLOCK + (1 + per_block) * sums_after(blocks) + 63) / 64 * 64;
    }
};

// x rounded to the nearest integer, ties to even, for |x| up to 2^22: the last bits of x + 1.5 * 2^23.
inline ints nearest(floats x) { return (ints)(x + 0x1.8p23f) - 0x4b400000; }

inline floats wide(const float *from) { return load<floats>(from); }
inline floats wide(const bf16 *from) {
    typedef uint16_t shorts __attribute__((vector_size(2 * SLICE)));
    return (floats)(__builtin_convertvector(load<shorts>(from), ints) << 16);
}

template <class T> void quantise_row(const T *x, int64_t blocks, int64_t per_block, char *to) {
    typedef int8_t bytes __attribute__((vector_size(SLICE)));
    constexpr int64_t PARTS = BLOCK / SLICE;
    float *scales = reinterpret_cast<float *>(to + blocks * BLOCK), *sums = scales + blocks;
    for (int64_t b = 0; b < blocks; b++, x += BLOCK, to += BLOCK) {
        floats part[PARTS], largest = {};
        for (int64_t i = 0; i < PARTS; i++) {
            part[i] = wide(x + i * SLICE);
            floats size = part[i] < 0 ? -part[i] : part[i];
            largest = size > largest ? size : largest;
        }
        float each[SLICE], most = 0;
        std::memcpy(each, &largest, sizeof each);
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < SLICE; i++) most = std::max(most, each[i]);
        float times = most > 0 ? 127 / most : 0;
        ints total[2] = {};
        for (int64_t i = 0; i < PARTS; i++) {
            ints q = nearest(part[i] * times);
            total[i / (PARTS / 2)] += q;
            bytes eight = __builtin_convertvector(q, bytes);
            std::memcpy(to + i * SLICE, &eight, sizeof eight);
        }
        scales[b] = most / 127;
        if (per_block == 1) total[0] += total[1];
        for (int64_t half = 0; half < per_block; half++) {
            int32_t count[SLICE], sum = 0;
            std::memcpy(count, &total[half], sizeof count);
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < SLICE; i++) sum += count[i];
            sums[half * blocks + b] = scales[b] * float(sum);
        }
    }
}

// ---------------------------------------------------------------------------------------------- products

constexpr int64_t FETCHING = 24;  // tokens during which all of what comes next is prefetched
constexpr int64_t AHEAD = 2048;  // bytes that a tile prefetches ahead of itself if no other tile reads the panel

// Packed weights: all panels, or one.
struct Packed {
    const char *values, *scales, *lowest;
    Lowest kind;
    Grouping columns;

    // Of a group of one row.
    int64_t scale_bytes() const {
        return kind == Lowest::MXFP4 ? 1 : kind >= Lowest::NESTED ? 4 : 2;
    }
    int64_t lowest_bytes() const { return kind == Lowest::ZERO ? 1 : kind == Lowest::NESTED ? 12 : 2; }

    // Index of the scale of half `half` of a block: that of its group; of nested groups, that of the block itself.
    template <class C> int64_t scale_index(int64_t block, int64_t half) const {
        return C::NESTED ? block + columns.lacking : columns.group_of(block, half);
    }

    // Scales and lowest numbers of a slice's rows, given the index of their scale.
    template <class C> void numbers_at(int64_t index, int64_t slice, floats &scale, floats &least) const {
        if constexpr (C::NESTED) return nested_at(index, slice, scale, least);
        int64_t from = index * PANEL + slice * SLICE;
        scale = scales_at(from);
        least = lowest_at<C::BITS>(scale, from);
    }

    // Those of nested groups: products of the group's two numbers with the block's, of 6 bits. Those of the first four
    // blocks are the lower bits of bytes 0 to 3 (scales) and 4 to 7 (minima). Those of the others have their lower
    // halves in bytes 8 to 11 and their upper bits above those of the first four.
    void nested_at(int64_t index, int64_t slice, floats &scale, floats &least) const {
        int64_t group = index / NEST, block = index % NEST;
        const char *both = scales + group * scale_bytes() * PANEL + slice * SLICE * 2;
        const char *sixes = lowest + group * lowest_bytes() * PANEL + slice * SLICE;
        auto plane = [&](int64_t byte) { return words(load<octets>(sixes + byte * PANEL)); };
        ints s, m;
        if (block < NEST / 2) {
            s = plane(block) & 63;
            m = plane(block + 4) & 63;
        } else {
            ints low = plane(block + 4);
            s = (low & 15) | (plane(block - 4) >> 2 & 48);
            m = low >> 4 | (plane(block) >> 2 & 48);
        }
        scale = halves(both) * __builtin_convertvector(s, floats);
        least = halves(both + 2 * PANEL) * __builtin_convertvector(-m, floats);
    }

    // Prefetch a share of the next nested group's numbers: its lines are as many as it has blocks.
    void fetch_nested(int64_t index) const {
        static_assert((4 + 12) * PANEL == 64 * NEST);
        int64_t group = index / NEST + 1, line = index % NEST, scale_lines = 4 * PANEL / 64;
        const char *at = line < scale_lines ? scales + group * 4 * PANEL + line * 64
                                            : lowest + group * 12 * PANEL + (line - scale_lines) * 64;
        __builtin_prefetch(at);
    }

    // The scales of a slice's group, from place `from` on.
    floats scales_at(int64_t from) const {
        if (kind >= Lowest::FP8) return load<floats>(scales + from * 4);
        return kind == Lowest::MXFP4 ? powers(scales + from) : halves(scales + from * 2);
    }

    // Its lowest numbers, given its scales.
    template <int BITS> floats lowest_at(floats scale, int64_t from) const {
        switch (kind) {
            case Lowest::MINIMUM: return halves(lowest + from * 2);
            case Lowest::ZERO: return scale * -bytes(lowest + from);
            case Lowest::MXFP4: return scale * -float(MXFP4_ZERO);
            case Lowest::FP8:
            case Lowest::NF4:
            case Lowest::FP4: return floats{};
            default: return scale * -float(1 << (BITS - 1));
        }
    }

    template <int BITS> Packed panel(int64_t p) const {
        int64_t at = p * columns.groups() * PANEL;
        return {values + p * columns.blocks * BLOCK_BYTES<BITS>, scales + at * scale_bytes(),
                lowest + at * lowest_bytes(), kind, columns};
    }
};

// Sums of a slice's block, at `from`, with N rows of x, whose numbers begin at value[n / 3] + n % 3 * stride: one, or two of
// half a block each.
template <class C, int N>
inline __attribute__((always_inline)) void multiply_block(const char *from, const int8_t *const *value, int64_t stride,
                                                          ints (&sum)[N][C::PER_BLOCK]) {
#ifdef WEFT_SHORTS
    auto four = [&](int n, int column) __attribute__((always_inline)) {
        int32_t bits;
        std::memcpy(&bits, value[n / 3] + n % 3 * stride + column, sizeof bits);
        return _mm256_set1_epi32(bits);
    };
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (C::BITS == 4) {
        // Eight products of pairs with numbers up to 15 fit into 16 bits; of those up to 24, four.
        constexpr int SUMS = C::PER_BLOCK == 2 || C::TABLE ? 2 : 1;
        __m256i part[N][SUMS];
        for (int n = 0; n < N; n++)
            for (int i = 0; i < SUMS; i++) part[n][i] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            ints w = load<ints>(from + v * 4 * SLICE);
            __m256i low = (__m256i)numbers<C>(w & 0x0f0f0f0f), high = (__m256i)numbers<C>(w >> 4 & 0x0f0f0f0f);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                part[n][0] = _mm256_add_epi16(part[n][0], _mm256_maddubs_epi16(low, four(n, v * 4)));
                part[n][SUMS - 1] = _mm256_add_epi16(part[n][SUMS - 1], _mm256_maddubs_epi16(high, four(n, BLOCK / 2 + v * 4)));
            }
            // Or GCC multiplies all before it adds, and has no registers for the products.
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                for (int i = 0; i < SUMS; i++) asm("" : "+x"(part[n][i]));
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
            for (int i = 0; i < SUMS; i++) sum[n][C::PER_BLOCK == 2 ? i : 0] += (ints)_mm256_madd_epi16(part[n][i], ones);
    } else {
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            // Less 128, see SHIFT: sizes of numbers times those of x, with the numbers' signs, fit into 16 bits.
            __m256i w = (__m256i)(load<ints>(from + v * 4 * SLICE) ^ int32_t(0x80808080)), size = _mm256_abs_epi8(w);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four(n, v * 4), w));
                ints &to = sum[n][v * C::PER_BLOCK / 8];
                to += (ints)_mm256_madd_epi16(pairs, ones);
                asm("" : "+x"(to));
            }
        }
    }
#else
#pragma GCC unroll 8
    for (int v = 0; v < C::BITS; v++) {
        ints w = load<ints>(from + v * 4 * SLICE);
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) {
            const int8_t *four = value[n / 3] + n % 3 * stride + v * 4;
            if constexpr (C::BITS == 4) {
                dot(sum[n][0], numbers<C>(w & 0x0f0f0f0f), four);
                dot(sum[n][C::PER_BLOCK - 1], numbers<C>(w >> 4 & 0x0f0f0f0f), four + BLOCK / 2);
            } else {
                dot(sum[n][v * C::PER_BLOCK / C::BITS], w, four);
            }
        }
    }
#endif
}

// -ffast-math would order the products of floats otherwise in each tile, and so give a row of x other bits beside others
// than alone: answers would depend on other requests.
inline floats in_this_order(floats product) {
#if defined(__AVX512F__)
    asm("" : "+v"(product));
#elif defined(__AVX2__)
    asm("" : "+x"(product));
#endif
    return product;
}

// The numbers of a nested group, of all rows of a panel: those of 6 bits as bytes.
struct NestedGroup {
    typedef uint8_t Rows __attribute__((vector_size(PANEL), aligned(1), may_alias));
    alignas(64) uint8_t scales[NEST][PANEL], minima[NEST][PANEL];
    const char *halves_at = nullptr;

    // See `Packed::nested_at`.
    void unpack(const Packed &panel, int64_t group) {
        const char *sixes = panel.lowest + group * panel.lowest_bytes() * PANEL;
        auto plane = [&](int64_t byte) { return *reinterpret_cast<const Rows *>(sixes + byte * PANEL); };
        for (int64_t i = 0; i < NEST / 2; i++) {
            Rows first = plane(i), second = plane(i + 4), both = plane(i + 8);
            *reinterpret_cast<Rows *>(scales[i]) = first & 63;
            *reinterpret_cast<Rows *>(minima[i]) = second & 63;
            *reinterpret_cast<Rows *>(scales[i + 4]) = (both & 15) | (first >> 2 & 48);
            *reinterpret_cast<Rows *>(minima[i + 4]) = both >> 4 | (second >> 2 & 48);
        }
        halves_at = panel.scales + group * panel.scale_bytes() * PANEL;
    }

    // Scales and lowest numbers of a slice's rows in a block of the group.
    void numbers_at(int64_t block, int64_t slice, floats &scale, floats &least) const {
        const char *both = halves_at + slice * SLICE * 2;
        auto sixes = [&](const uint8_t *rows) {
            return __builtin_convertvector(words(load<octets>(rows + slice * SLICE)), floats);
        };
        scale = in_this_order(halves(both) * sixes(scales[block]));
        least = in_this_order(halves(both + 2 * PANEL) * -sixes(minima[block]));
    }
};

// sum + a * b, rounded once where the CPU can.
inline floats multiply_add(floats sum, floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

// What `multiply_block` subtracts from each number of a weight.
#ifdef WEFT_SHORTS
template <class C> constexpr float SHIFT = C::BITS == 8 ? 128 : 0;
#else
template <class C> constexpr float SHIFT = 0;
#endif

// Sums of N rows of x with H slices of a panel, from slice `first` on: [N][PANEL]. With each block, `step` bytes from
// `next` on are prefetched; if N is 1, so that a loop would take time, the bytes of a block.
template <class C, int N, int H>
[[gnu::noinline]] void quantised_tile(const Packed &panel, const char *x, int64_t first, float *sums, const char *next,
                                      int64_t step) {
    constexpr int BITS = C::BITS, PER_BLOCK = C::PER_BLOCK;
    const Grouping &columns = panel.columns;
    // Addresses of every third row of x only: there are not enough registers for twelve.
    int64_t stride = Row::bytes(columns.blocks, PER_BLOCK), sums_after = Row::sums_after(columns.blocks);
    const int8_t *value[(N + 2) / 3];
    const char *scale_of[(N + 2) / 3];
    for (int n = 0; n < N; n += 3) {
        Row row(x + n * stride, columns.blocks);
        value[n / 3] = row.values;
        scale_of[n / 3] = row.scales;
    }
    auto number = [&](int n, int64_t after) {
        float f;
        std::memcpy(&f, scale_of[n / 3] + n % 3 * stride + after, sizeof f);
        return f;
    };
    floats total[N][H] = {};
    const char *at = panel.values + first * BLOCK_BYTES<BITS> / SLICES;
    NestedGroup nested;
    for (int64_t g = 0, block = 0; block < columns.blocks; g++) {
        floats scale[H][PER_BLOCK], lowest[H][PER_BLOCK];
        if (C::NESTED && (g == 0 || (g + columns.lacking) % NEST == 0)) nested.unpack(panel, (g + columns.lacking) / NEST);
#pragma GCC unroll 4
        for (int i = 0; i < H * PER_BLOCK; i++) {
            int h = i / PER_BLOCK, half = i % PER_BLOCK;
            if constexpr (C::NESTED)
                nested.numbers_at((g + columns.lacking) % NEST, first + h, scale[h][half], lowest[h][half]);
            else
                panel.numbers_at<C>(g * PER_BLOCK + half, first + h, scale[h][half], lowest[h][half]);
            if constexpr (SHIFT<C> != 0)
                lowest[h][half] = multiply_add(lowest[h][half], scale[h][half], floats{} + SHIFT<C>);
        }
        for (int64_t end = PER_BLOCK == 2 || C::NESTED ? block + 1 : columns.end(g); block < end; block++) {
            if constexpr (N == 1) {
                if (step)
#pragma GCC unroll 16
                    for (int64_t line = 0; line < BLOCK_BYTES<BITS>; line += 64) __builtin_prefetch(next + line);
            } else {
                for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(next + line);
            }
            next += step;
            if constexpr (C::NESTED)
                if (step) panel.fetch_nested(block + columns.lacking);
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                ints sum[N][PER_BLOCK] = {};
                multiply_block<C, N>(at + h * BLOCK_BYTES<BITS> / SLICES, value, stride, sum);
#pragma GCC unroll 12
                for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                    for (int half = 0; half < PER_BLOCK; half++) {
                        floats products = __builtin_convertvector(sum[n][half], floats);
                        floats factor = in_this_order(scale[h][half] * number(n, 0));
                        total[n][h] = multiply_add(total[n][h], products, factor);
                        total[n][h] =
                            multiply_add(total[n][h], lowest[h][half], floats{} + number(n, (1 + half) * sums_after));
                    }
            }
            at += BLOCK_BYTES<BITS>;
#pragma GCC unroll 4
            for (int i = 0; i < (N + 2) / 3; i++) {
                value[i] += BLOCK;
                scale_of[i] += sizeof(float);
            }
        }
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int h = 0; h < H; h++) std::memcpy(sums + n * PANEL + (first + h) * SLICE, &total[n][h], sizeof(floats));
}

// A whole panel by tiles of N tokens, then by smaller ones (FEWER) for the other tokens. While `all` tokens are
// multiplied, as many bytes are prefetched as a panel has, a share by each tile; none if `all` is 0.
template <class C, int N, int... FEWER>
void quantised_tiles(const Packed &panel, const char *x, int64_t tokens, float *sums, const char *next, int64_t all) {
    int64_t stride = Row::bytes(panel.columns.blocks, C::PER_BLOCK);
    // Sixteen tokens are faster as two tiles of eight than as twelve and four.
    for (; tokens >= N && !(N == 12 && tokens == 16); tokens -= N, x += N * stride, sums += N * PANEL) {
        // A few tokens leave enough registers for several slices at once.
        constexpr int TOGETHER = N * SLICES <= 8 ? SLICES : 1;
        constexpr int64_t WORK = BLOCK_BYTES<C::BITS> * N * TOGETHER / SLICES;
        int64_t step = all ? (WORK / all + 63) / 64 * 64 : 0;
        for (int64_t slice = 0; slice < SLICES; slice += TOGETHER, next += step * panel.columns.blocks)
            quantised_tile<C, N, TOGETHER>(panel, x, slice, sums, next, step);
    }
    if constexpr (sizeof...(FEWER) > 0) quantised_tiles<C, FEWER...>(panel, x, tokens, sums, next, all);
}

template <class C>
void tiles(const Packed &panel, const char *x, int64_t tokens, float *sums, const char *after, bool fetch) {
    // A single tile prefetches its own panel; several tiles prefetch what is read `after` it.
    constexpr int64_t MAX_TOKENS = 8 / SLICES;  // tokens of a tile that reads the panel once
    bool alone = tokens <= MAX_TOKENS && !(tokens & (tokens - 1));
    const char *next = alone ? panel.values + AHEAD : after;
    int64_t all = fetch ? tokens : 0;
#ifdef __AVX512VNNI__
    // Twelve tokens have twelve sums of integers and twelve of floats in 32 registers; with half blocks, twice as many
    // integers.
    if constexpr (C::PER_BLOCK == 1) return quantised_tiles<C, 12, 8, 4, 2, 1>(panel, x, tokens, sums, next, all);
    quantised_tiles<C, 8, 4, 2, 1>(panel, x, tokens, sums, next, all);
#else
    quantised_tiles<C, 4, 2, 1>(panel, x, tokens, sums, next, all);
#endif
}

// Sums of `tokens` prepared rows of x with a panel: [tokens][PANEL].
template <class C>
void quantised_sums(const Packed &panel, const char *x, int64_t tokens, float *sums, Ahead ahead) {
    int64_t stride = Row::bytes(panel.columns.blocks, C::PER_BLOCK);
    for (int64_t t = 0; t < tokens; t += FETCHING) {
        bool fetch = ahead.tokens && t + ahead.before == 0;
        int64_t n = std::min(FETCHING, tokens - t);
        tiles<C>(panel, x + t * stride, n, sums + t * PANEL, ahead.at, fetch);
    }
}

// One row of weights, dequantised: out [blocks * BLOCK].
template <class C, class T> void row_of(const Packed &weights, int64_t row, T *out) {
    constexpr int BITS = C::BITS;
    constexpr int64_t WORDS = BLOCK * BITS / 32;
    Packed panel = weights.panel<BITS>(row / PANEL);
    const Grouping &columns = panel.columns;
    int64_t lane = row % PANEL, length = BLOCK / columns.per_block();
    const char *at = panel.values + (lane / SLICE * WORDS * SLICE + lane % SLICE) * 4;
    for (int64_t block = 0; block < columns.blocks; block++, at += BLOCK_BYTES<BITS>, out += BLOCK)
        for (int64_t first = 0; first < BLOCK; first += length) {
            floats scales, lowests;
            panel.template numbers_at<C>(panel.template scale_index<C>(block, first / length), lane / SLICE, scales,
                                         lowests);
            float scale = scales[lane % SLICE], lowest = lowests[lane % SLICE];
#pragma GCC unroll 1
            for (int64_t i = first; i < first + length; i++) {
                int q = uint8_t(at[i / 4 % WORDS * SLICE * 4 + i % 4]);
                if (BITS == 4) q = i < BLOCK / 2 ? q & 15 : q >> 4;
                if (C::TABLE) q = MXFP4[q];
                float number = C::FLOAT8 ? float8(uint8_t(q)) : C::WIDE && BITS == 4 ? FLOAT4S<C>[q] : float(q);
                out[i] = narrow<T>(scale * number + lowest);
            }
        }
}
