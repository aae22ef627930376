// Binds an inherited method without arguments as a method of the derived class.
#pragma once

namespace offload {

// Before 3.0.4 (torch 2.11 brings an older one) pybind11 takes a noexcept method of a base as a
// method of the base, which is not registered: a call then finds no such method of Self.
template <class Self, auto Method>
inline constexpr auto method_of = [](Self& self) { return (self.*Method)(); };

}  // namespace offload
