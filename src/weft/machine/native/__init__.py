"""The C++ library of the CPU kernels: build, cache, structures and entries. It needs no torch."""
