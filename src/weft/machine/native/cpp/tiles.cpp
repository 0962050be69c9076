// Attention, quantised products, sampling, scoring and masks: half of the code, compiled at the same time as native.cpp.
#include "attention.h"
#include "dequantised.h"
#include "float8.h"
#include "latents.h"
#include "masks.h"
#include "quantised.h"
#include "sampling.h"
#include "scoring.h"

#define T WEFT_TYPE
template void run_tiles(const Paged<T> &, const Tiles &, int64_t, int64_t);
template void run_latents(const PagedLatents<T> &, const LatentTiles &, LatentSums *, int64_t, int64_t);
#undef T
template void quantised_sums<Octets>(const Packed &, const char *, int64_t, float *, Ahead);
template void quantised_sums<Nibbles>(const Packed &, const char *, int64_t, float *, Ahead);
template void quantised_sums<HalfBlocks>(const Packed &, const char *, int64_t, float *, Ahead);
template void quantised_sums<Floats>(const Packed &, const char *, int64_t, float *, Ahead);
template void quantised_sums<Nested>(const Packed &, const char *, int64_t, float *, Ahead);
template void float8_sums<Float8>(const Packed &, const char *, int64_t, float *, bool);
template void float8_sums<NormalFloats>(const Packed &, const char *, int64_t, float *, bool);
template void float8_sums<Float4>(const Packed &, const char *, int64_t, float *, bool);
template void float8_sums<SignedOctets>(const Packed &, const char *, int64_t, float *, bool);
#ifdef WEFT_AMX
template void dequantised_sums<Octets>(const Packed &, const bf16 *, int64_t, float *);
template void dequantised_sums<Nibbles>(const Packed &, const bf16 *, int64_t, float *);
template void dequantised_sums<HalfBlocks>(const Packed &, const bf16 *, int64_t, float *);
template void dequantised_sums<Floats>(const Packed &, const bf16 *, int64_t, float *);
template void dequantised_sums<Nested>(const Packed &, const bf16 *, int64_t, float *);
template void dequantised_sums<Float8>(const Packed &, const bf16 *, int64_t, float *);
template void dequantised_sums<NormalFloats>(const Packed &, const bf16 *, int64_t, float *);
template void dequantised_sums<Float4>(const Packed &, const bf16 *, int64_t, float *);
template void dequantised_sums<SignedOctets>(const Packed &, const bf16 *, int64_t, float *);
#endif

ENTRY const char *weft_setting_names() { return SETTING_NAMES; }
ENTRY void weft_sample(const void *logits, int64_t size, int64_t rows, int64_t vocab, int64_t stride,
                       const SamplingSettings *settings, const uint64_t *streams, int64_t *tokens, int64_t threads) {
    sample(logits, size, rows, vocab, stride, settings, streams, tokens, threads);
}
ENTRY void weft_score(const void *logits, int64_t size, int64_t rows, int64_t vocab, int64_t stride,
                      const int64_t *tokens, int64_t top, double *out, int64_t threads) {
    score(logits, size, rows, vocab, stride, tokens, top, out, threads);
}
ENTRY void weft_apply_masks(void *logits, int64_t size, int64_t vocab, int64_t stride, const int64_t *rows,
                            const uint32_t *masks, int64_t count, int64_t threads) {
    apply_masks(logits, size, vocab, stride, rows, masks, count, threads);
}
