// The half of the work that is attention and quantised products: compiled beside native.cpp, not after it.
#include "attention.h"
#include "quantised.h"

#define T WEFT_TYPE
template void run_tiles(const Paged<T> &, const Tiles &, int64_t, int64_t);
template void quantised<4, 1>(const Packed &, const T *, int64_t, const char *, int64_t, T *, int64_t, int64_t);
template void quantised<4, 2>(const Packed &, const T *, int64_t, const char *, int64_t, T *, int64_t, int64_t);
template void quantised<8, 1>(const Packed &, const T *, int64_t, const char *, int64_t, T *, int64_t, int64_t);
