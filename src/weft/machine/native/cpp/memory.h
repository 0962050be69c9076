// Memory that one call divides among its intermediate results.
#pragma once

#include <cstdint>

constexpr int64_t WORKSPACE_ALIGNMENT = 64;  // bytes

// Hands out parts of `base`, whose address is a multiple of WORKSPACE_ALIGNMENT; null to count `bytes` only.
struct Memory {
    char *base;
    int64_t bytes = 0;

    template <class T> void reserve(T *&place, int64_t count) {
        place = reinterpret_cast<T *>(base + bytes);
        bytes += (count * int64_t(sizeof(T)) + WORKSPACE_ALIGNMENT - 1) / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT;
    }
};
