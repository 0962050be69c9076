// Work that is handed on: a function in somebody's frame, called while that waits. One type for all, so that what takes
// work is compiled once.
#pragma once

#include <cstdint>

template <class... Arguments> class Work {
    const void *function;
    void (*call)(const void *, Arguments...);

public:
    template <class Function>
    Work(const Function &function)
        : function(&function), call([](const void *function, Arguments... arguments) {
              (*static_cast<const Function *>(function))(arguments...);
          }) {}
    void operator()(Arguments... arguments) const { call(function, arguments...); }
};

using Pieces = Work<int64_t, int64_t>;  // things [first, last)
using Then = Work<>;

inline constexpr auto nothing = [] {};
