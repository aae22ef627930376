// A method without arguments, bound as one of the class that has it.
#pragma once

namespace offload {

// Before 3.0.4, which torch 2.11 brings, pybind11 takes a noexcept method of a base for one of the
// base, which is not registered: a call then finds no such method of Self.
template <class Self, auto Method>
inline constexpr auto method_of = [](Self& self) { return (self.*Method)(); };

}  // namespace offload
