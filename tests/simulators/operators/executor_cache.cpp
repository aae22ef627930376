// From the sources of opbase (nnopbase/common/utils/op_cache.cpp, aclnn_engine/op_executor.cpp):
// each thread has its own cache; a client that hashes its arguments itself begins with
// InitPTACacheThreadLocal, sets its key, adds the address of each tensor's storage in the order of
// the parameters, and queries; a following first phase is cached under that key until
// UnInitPTACacheThreadLocal. A cached result launches with the added addresses.
#include "executor_cache.hpp"

#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace simulated_operators {
namespace {

constexpr std::size_t kMostEntries = 10'000;

// Operators whose launch and result are independent of the data: not those whose second phase
// determines the result's size.
const std::unordered_set<std::string> kOfData = {"aclnnNonzero", "aclnnMaskedSelect"};

struct Entry {
  const Kernel* kernel = nullptr;
  Launch launch;
  std::vector<bool> is_given;
  std::vector<std::int64_t> offsets_bytes;
  std::vector<bool> is_output;
  std::vector<std::size_t> parameters;  // by given operand: the client's tensor that it lies in
};

std::atomic<bool> is_open{false};
std::atomic<std::uint64_t> n_closed{0};

struct ThreadCache {
  std::unordered_map<std::string, Entry> entries;
  std::deque<std::string> order;  // of keys, oldest first
  std::uint64_t n_closed_seen = 0;
  bool uses_clients_key = false;
  std::string key;  // empty: nothing is cached
  std::vector<char*> addresses;
};

ThreadCache& of_thread() {
  thread_local ThreadCache cache;
  if (cache.n_closed_seen != n_closed) {
    cache.entries.clear();
    cache.order.clear();
    cache.n_closed_seen = n_closed;
  }
  return cache;
}

void begin(bool uses_clients_key) {
  ThreadCache& cache = of_thread();
  cache.uses_clients_key = uses_clients_key;
  cache.key.clear();
  cache.addresses.clear();
}

std::string key_of(std::uint64_t hash) {
  return hash == 0 ? std::string() : std::string(reinterpret_cast<const char*>(&hash), sizeof hash);
}

aclOpExecutor* found(const std::string& key, std::uint64_t* workspace_bytes) {
  const ThreadCache& cache = of_thread();
  const auto entry = cache.entries.find(key);
  if (!is_open || key.empty() || entry == cache.entries.end()) return nullptr;
  const auto& [kernel, launch, is_given, offsets_bytes, is_output, parameters] = entry->second;
  auto executor = std::make_unique<aclOpExecutor>();
  executor->kernel = kernel;
  executor->launch = launch;
  executor->is_given = is_given;
  executor->offsets_bytes = offsets_bytes;
  executor->is_output = is_output;
  auto parameter = parameters.begin();
  for (std::size_t index = 0; index < is_given.size(); ++index) {
    if (!is_given[index]) continue;
    executor->launch.operands[index].data = cache.addresses.at(*parameter++) + offsets_bytes[index];
  }
  *workspace_bytes = launch.workspace_bytes;
  return executor.release();
}

// Finds the client's tensor that holds each operand: of several with the same begin the next, and
// the same tensor again where an operator works in place. False where no tensor holds an operand.
bool find_parameters(const aclOpExecutor& executor, const std::vector<char*>& addresses,
                     std::vector<std::size_t>& parameters) {
  std::vector<bool> is_taken(addresses.size());
  for (std::size_t index = 0; index < executor.is_given.size(); ++index) {
    if (!executor.is_given[index]) continue;
    char* const begin = executor.launch.operands[index].data - executor.offsets_bytes[index];
    std::size_t found = addresses.size();
    for (std::size_t at = addresses.size(); at-- > 0;) {
      if (addresses[at] != begin) continue;
      if (found == addresses.size() || !is_taken[at] || is_taken[found]) found = at;
    }
    if (found == addresses.size()) return false;
    is_taken[found] = true;
    parameters.push_back(found);
  }
  return true;
}

}  // namespace

void remember(const char* name, const aclOpExecutor& executor) {
  ThreadCache& cache = of_thread();
  const std::string operator_name(name, std::strlen(name) - std::strlen("GetWorkspaceSize"));
  if (!is_open || !cache.uses_clients_key || cache.key.empty() || kOfData.count(operator_name)) {
    return;
  }
  Entry entry{executor.kernel,        executor.launch,    executor.is_given,
              executor.offsets_bytes, executor.is_output, {}};
  if (!find_parameters(executor, cache.addresses, entry.parameters)) return;
  if (!cache.entries.insert_or_assign(cache.key, entry).second) return;
  cache.order.push_back(cache.key);
  if (cache.order.size() <= kMostEntries) return;
  cache.entries.erase(cache.order.front());
  cache.order.pop_front();
}

void close_executor_cache() {
  is_open = false;
  ++n_closed;
}

OPERATORS_EXPORT bool CanUsePTACache(const char* name) {
  return is_open && name != nullptr && kOfData.count(name) == 0;
}

OPERATORS_EXPORT void InitPTACacheThreadLocal() { begin(true); }
OPERATORS_EXPORT void ResetCacheThreadLocal() { begin(false); }
OPERATORS_EXPORT void UnInitPTACacheThreadLocal() { of_thread().uses_clients_key = false; }
OPERATORS_EXPORT void SetPTAHashKey(std::uint64_t hash) { of_thread().key = key_of(hash); }

OPERATORS_EXPORT void SetPTACacheHashKey(std::uint8_t* key, std::size_t n_bytes) {
  of_thread().key.assign(reinterpret_cast<const char*>(key), key == nullptr ? 0 : n_bytes);
}

OPERATORS_EXPORT void AddTensorAddrToCachedList(void* address) {
  of_thread().addresses.push_back(static_cast<char*>(address));
}

OPERATORS_EXPORT aclOpExecutor* PTAGetExecCache(std::uint64_t hash, std::uint64_t* bytes) {
  return found(key_of(hash), bytes);
}

OPERATORS_EXPORT aclOpExecutor* PTAFindExecCache(std::uint8_t* key, std::size_t n_bytes,
                                                 std::uint64_t* bytes) {
  return found(std::string(reinterpret_cast<const char*>(key), n_bytes), bytes);
}

// Control for tests: whether the library caches, as it does on hardware.
OPERATORS_EXPORT void sim_operators_set_executor_cache(int caches) {
  close_executor_cache();
  is_open = caches != 0;
}

}  // namespace simulated_operators
