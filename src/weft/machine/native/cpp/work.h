// A reference to a function in a frame of the stack that outlives the calls. All functions with the same arguments have
// one type here, so that code that takes work is compiled once.
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

using Pieces = Work<int64_t, int64_t>;  // work on elements [first, last)
using Then = Work<>;  // called once, after the rest

inline constexpr auto nothing = [] {};
