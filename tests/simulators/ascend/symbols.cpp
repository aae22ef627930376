#include "symbols.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "runtime.hpp"

namespace simulated_ascend {
namespace {

// The dynamic symbols of this library, as the loader reads them.
struct Table {
  ElfW(Sym) * symbols = nullptr;
  std::size_t count = 0;
  const char* names = nullptr;
};

// The number of symbols is stored nowhere: the last chain of the hash table ends with it.
std::size_t count_of(const std::uint32_t* hash) {
  const std::uint32_t n_buckets = hash[0], first = hash[1], n_words = hash[2];
  const std::uint32_t* buckets = hash + 4 + n_words * (sizeof(ElfW(Addr)) / sizeof *hash);
  const std::uint32_t* chains = buckets + n_buckets;
  std::uint32_t last = 0;
  for (std::uint32_t index = 0; index < n_buckets; ++index) last = std::max(last, buckets[index]);
  if (last < first) return first;
  while ((chains[last - first] & 1) == 0) ++last;
  return last + 1;
}

Table find_table() {
  Table table;
  Dl_info information{};
  link_map* map = nullptr;
  if (dladdr1(reinterpret_cast<void*>(&find_table), &information, reinterpret_cast<void**>(&map),
              RTLD_DL_LINKMAP) == 0) {
    return table;
  }
  for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_SYMTAB) {
      table.symbols = reinterpret_cast<ElfW(Sym)*>(entry->d_un.d_ptr);
    } else if (entry->d_tag == DT_STRTAB) {
      table.names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    } else if (entry->d_tag == DT_GNU_HASH) {
      table.count = count_of(reinterpret_cast<const std::uint32_t*>(entry->d_un.d_ptr));
    }
  }
  return table;
}

// The values of hidden symbols, by their index in the table. The loader ignores a symbol without a
// value.
std::map<std::size_t, ElfW(Addr)>& hidden() {
  static std::map<std::size_t, ElfW(Addr)> values;
  return values;
}

void write_value(ElfW(Sym) & symbol, ElfW(Addr) value) {
  const auto page = static_cast<std::uintptr_t>(getpagesize());
  const auto begin = reinterpret_cast<std::uintptr_t>(&symbol) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(&symbol + 1);
  mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE);
  symbol.st_value = value;
}

void show_all() {
  const Table table = find_table();
  for (const auto& [index, value] : hidden()) write_value(table.symbols[index], value);
  hidden().clear();
}

// By the first release whose public headers have them.
constexpr const char* kSince85[] = {
    "aclFinalizeReference",
    "aclrtStreamWaitEventWithTimeout",
    "aclrtMallocWithCfg",
    "aclrtMallocHostWithCfg",
    "aclrtMemcpyAsyncWithOffset",
    "aclrtMemcpyAsyncWithDesc",
    "aclrtGetMemcpyDescSize",
    "aclrtSetMemcpyDesc",
    "aclrtHostRegister",
    "aclrtHostRegisterV2",
    "aclrtHostUnregister",
    "aclrtPointerGetAttributes",
    "aclrtLaunchKernelWithHostArgs",
    "aclrtLaunchHostFunc",
    "aclrtValueWrite",
    "aclrtValueWait",
    "aclrtSetStreamAttribute",
    "aclrtActiveStream",
    "aclmdlRICaptureThreadExchangeMode",
    "aclmdlRIExecute",
    "aclmdlRIDebugJsonPrint",
    "aclmdlRIBuildBegin",
    "aclmdlRIBindStream",
    "aclmdlRIEndTask",
    "aclmdlRIBuildEnd",
    "aclmdlRIUnbindStream",
    "aclmdlRIAbort",
    "aclmdlRISetName",
    "aclmdlRIGetName",
    "aclmdlExecuteAsyncV2",
};
constexpr const char* kSince90[] = {
    "aclmdlRIDestroyRegisterCallback",
    "aclmdlRIDestroyUnregisterCallback",
};
constexpr const char* kSince91[] = {
    "aclmdlRIGetId",
    "aclmdlRIGetStreams",
    "aclmdlRIGetTasksByStream",
    "aclmdlRITaskGetType",
    "aclmdlRITaskGetSeqId",
    "aclmdlRITaskGetParams",
    "aclmdlRITaskSetParams",
    "aclmdlRIKernelTaskGetAttribute",
    "aclmdlRITaskDisable",
    "aclmdlRIUpdate",
    "aclmdlRICondHandleCreate",
    "aclmdlRICondHandleGetCondPtr",
    "aclmdlRIAddCondTask",
    "aclmdlRICaptureToModelRIBegin",
};
constexpr const char* kSince92[] = {
    "aclrtRecordEventWithFlag",
    "aclrtStreamWaitEventWithFlag",
};

// Versions that set_personality accepts, oldest first, with their releases; the last has all.
constexpr const char* kPersonalities[] = {"8.1", "8.5", "9.0", "9.1", ""};
constexpr const char* kReleases[] = {"8.1.RC1", "8.5.0", "9.0.0", "9.1.0", "9.2.0"};
std::atomic<int> personality{4};

template <std::size_t kCount>
void hide_all(const char* const (&names)[kCount]) {
  for (const char* name : names) hide_symbol(name);
}

}  // namespace

bool hide_symbol(const char* name) {
  const Table table = find_table();
  for (std::size_t index = 0; index < table.count; ++index) {
    ElfW(Sym) & symbol = table.symbols[index];
    if (std::strcmp(table.names + symbol.st_name, name) != 0) continue;
    if (hidden().count(index) != 0) return true;
    if (symbol.st_value == 0) continue;  // of another library
    hidden()[index] = symbol.st_value;
    write_value(symbol, 0);
    return true;
  }
  return false;
}

bool set_personality(const char* version) {
  const std::string wanted = version;
  int age = -1;
  for (int index = 0; index < 5; ++index) {
    if (wanted == kPersonalities[index]) age = index;
  }
  if (age < 0) return false;
  personality = age;
  show_all();
  if (age <= 0) hide_all(kSince85);
  if (age <= 1) hide_all(kSince90);
  if (age <= 2) hide_all(kSince91);
  if (age <= 3) hide_all(kSince92);
  return true;
}

bool has_verbose_json() { return personality >= 3; }

bool has_staged_copies() { return personality >= 1; }

const char* release() { return kReleases[personality]; }

}  // namespace simulated_ascend
