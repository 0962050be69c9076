// What sampling shares with torch and Triton: see ranks/kernels/random.py.
#pragma once

#include <cstdint>

constexpr int64_t SAMPLING_BLOCK = 256;  // tokens that race as one, then among themselves
constexpr int64_t NOT_FINITE = -1;       // in place of a token of logits that are not finite

// SplitMix64: the step of its counter and the multipliers of its finaliser.
constexpr uint64_t SPLITMIX_STEP = 0x9E3779B97F4A7C15;
constexpr uint64_t SPLITMIX_FIRST = 0xBF58476D1CE4E5B9;
constexpr uint64_t SPLITMIX_SECOND = 0x94D049BB133111EB;
