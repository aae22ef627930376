// Handles by number: a stale one is never reused, so that its use is always detected.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "status.hpp"

namespace simulator {

// A number that no handle of the process had before. Thread: under the device's mutex.
inline std::uint64_t new_handle() {
  static std::uint64_t next = 0x5100'0000'0000;
  return next += 16;
}

// Objects of one kind by handle. Owner: the device. Thread: under the device's mutex.
template <class Object>
class Registry {
 public:
  // Takes ownership of the object and sets its `handle`.
  std::shared_ptr<Object> add(std::shared_ptr<Object> object) {
    object->handle = new_handle();
    objects_.emplace(object->handle, object);
    return object;
  }

  // Null for an unknown or removed handle.
  std::shared_ptr<Object> find(std::uint64_t handle) const {
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  // DeviceError(otherwise) for an unknown or removed handle.
  std::shared_ptr<Object> get(std::uint64_t handle, Status otherwise) const {
    auto found = find(handle);
    require(found != nullptr, otherwise);
    return found;
  }

  void remove(std::uint64_t handle) { objects_.erase(handle); }
  void clear() { objects_.clear(); }
  std::size_t size() const { return objects_.size(); }

  // A copy, so that objects may come and go while it is read.
  std::vector<std::shared_ptr<Object>> all() const {
    std::vector<std::shared_ptr<Object>> result;
    result.reserve(objects_.size());
    for (const auto& entry : objects_) result.push_back(entry.second);
    return result;
  }

 private:
  std::map<std::uint64_t, std::shared_ptr<Object>> objects_;
};

}  // namespace simulator
