// Compiled beside native.cpp, not after it.
#include "attention.h"

template void run_tiles(const Paged<WEFT_TYPE> &, const std::vector<Tile> &, int64_t, int64_t);
