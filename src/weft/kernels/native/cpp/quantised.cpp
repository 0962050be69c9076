// Compiled beside native.cpp, not after it.
#include "quantised.h"

template void quantised<4>(const Packed &, const WEFT_TYPE *, int64_t, const char *, int64_t, WEFT_TYPE *, int64_t, int64_t);
template void quantised<8>(const Packed &, const WEFT_TYPE *, int64_t, const char *, int64_t, WEFT_TYPE *, int64_t, int64_t);
