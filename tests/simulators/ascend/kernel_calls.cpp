// Binaries in the simulator's format, and launches of their functions.
//
// A binary is, little endian: char magic[8] = "SIMKERN1"; uint64 n; n entries { char name[48];
// uint64 function; uint64 user; uint64 argument_bytes }. `function` is the address of a
// simulator::BlockFunction of this process, `argument_bytes` the minimum for a launch.
#include <cstring>
#include <fstream>
#include <iterator>

#include "models.hpp"

namespace simulated_ascend {
namespace {

constexpr char kMagic[] = "SIMKERN1";
constexpr std::size_t kHeaderBytes = 16;

struct Entry {
  char name[48];
  std::uint64_t function, user, argument_bytes;
};
static_assert(sizeof(Entry) == 72);

void load(Runtime& state, const void* data, std::size_t n_bytes, LoadedBinary* result) {
  require_given(data, "the binary");
  require_given(result, "the result");
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint64_t count = 0;
  refuse_unless(n_bytes >= kHeaderBytes && std::memcmp(at, kMagic, sizeof kMagic - 1) == 0,
                kRtParamInvalid, "not a binary of the simulator's");
  std::memcpy(&count, at + sizeof kMagic - 1, sizeof count);
  refuse_unless(count <= (n_bytes - kHeaderBytes) / sizeof(Entry), kRtParamInvalid,
                "the binary ends too early");
  const auto binary = state.binaries.add(std::make_shared<BinaryState>());
  for (std::uint64_t index = 0; index < count; ++index) {
    Entry entry;
    std::memcpy(&entry, at + kHeaderBytes + index * sizeof entry, sizeof entry);
    auto function = state.functions.add(std::make_shared<FunctionState>());
    function->binary = binary->handle;
    function->name.assign(entry.name, strnlen(entry.name, sizeof entry.name));
    function->function = reinterpret_cast<simulator::BlockFunction>(entry.function);
    function->user = reinterpret_cast<void*>(entry.user);
    function->argument_bytes = entry.argument_bytes;
    binary->functions.push_back(std::move(function));
  }
  *result = as_handle<LoadedBinary>(binary->handle);
}

std::shared_ptr<BinaryState> binary_of(Runtime& state, LoadedBinary binary) {
  const auto found = state.binaries.find(as_number(binary));
  refuse_unless(found != nullptr, kRtParamInvalid, "no binary has this handle");
  return found;
}

std::shared_ptr<FunctionState> function_of(Runtime& state, Function function) {
  const auto found = state.functions.find(as_number(function));
  refuse_unless(found != nullptr, kRtParamInvalid, "no function has this handle");
  return found;
}

KernelContent content_of(Runtime& state, Function function, std::uint32_t n_blocks,
                         std::size_t argument_bytes, const LaunchConfiguration* configuration) {
  KernelContent content;
  content.function = function_of(state, function);
  content.n_blocks = n_blocks;
  content.argument_bytes = argument_bytes;
  refuse_unless(n_blocks != 0, kRtParamInvalid, "no blocks are launched");
  refuse_unless(argument_bytes >= content.function->argument_bytes, kRtParamInvalid,
                "the argument block is shorter than the kernel's");
  if (configuration != nullptr) {
    content.attributes.assign(configuration->attributes,
                              configuration->attributes + configuration->n_attributes);
  }
  return content;
}

// The arguments stay in the caller's device memory.
void launch(Runtime& state, const std::shared_ptr<StreamState>& stream, Function function,
            std::uint32_t n_blocks, const void* arguments, std::size_t argument_bytes,
            const LaunchConfiguration* configuration) {
  trace(state, "bytes=%zu blocks=%u stream=%d", argument_bytes, n_blocks, stream->id);
  auto content = content_of(state, function, n_blocks, argument_bytes, configuration);
  refuse_unless(arguments != nullptr || argument_bytes == 0, kRtParamInvalid,
                "the arguments are null");
  keep_arguments(state, arguments, content);
  submit(state, stream, make_task(kTaskKernel, std::move(content)));
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

// Keeps the caller's bytes, which must live until it is loaded.
ACL_EXPORT Binary aclrtCreateBinary(const void* data, std::size_t n_bytes) {
  std::uint64_t made = 0;
  call("aclrtCreateBinary", Needs::kInitialised, [&](Runtime& state) {
    require_given(data, "the binary");
    auto image = state.images.add(std::make_shared<ImageState>());
    image->data = data;
    image->n_bytes = n_bytes;
    made = image->handle;
  });
  return as_handle<Binary>(made);
}

ACL_EXPORT int aclrtDestroyBinary(Binary binary) {
  return call("aclrtDestroyBinary", Needs::kInitialised, [&](Runtime& state) {
    refuse_unless(state.images.find(as_number(binary)) != nullptr, kRtParamInvalid,
                  "no binary has this handle");
    state.images.remove(as_number(binary));
  });
}

ACL_EXPORT int aclrtBinaryLoad(Binary binary, LoadedBinary* result) {
  return call("aclrtBinaryLoad", Needs::kContext, [&](Runtime& state) {
    const auto image = state.images.find(as_number(binary));
    refuse_unless(image != nullptr, kRtParamInvalid, "no binary has this handle");
    load(state, image->data, image->n_bytes, result);
  });
}

ACL_EXPORT int aclrtBinaryLoadFromData(const void* data, std::size_t n_bytes,
                                       const BinaryLoadOptions*, LoadedBinary* result) {
  return call("aclrtBinaryLoadFromData", Needs::kContext,
              [&](Runtime& state) { load(state, data, n_bytes, result); });
}

ACL_EXPORT int aclrtBinaryLoadFromFile(const char* path, const BinaryLoadOptions*,
                                       LoadedBinary* result) {
  return call("aclrtBinaryLoadFromFile", Needs::kContext, [&](Runtime& state) {
    require_given(path, "the path");
    std::ifstream file(path, std::ios::binary);
    refuse_unless(file.good(), kRtFileOpen, "the file cannot be opened");
    const std::string content(std::istreambuf_iterator<char>(file), {});
    load(state, content.data(), content.size(), result);
  });
}

// A later launch of its functions is a fault.
ACL_EXPORT int aclrtBinaryUnLoad(LoadedBinary handle) {
  return call("aclrtBinaryUnLoad", Needs::kInitialised, [&](Runtime& state) {
    const auto binary = binary_of(state, handle);
    for (const auto& function : binary->functions) {
      function->function = nullptr;
      state.functions.remove(function->handle);
    }
    state.binaries.remove(binary->handle);
  });
}

ACL_EXPORT int aclrtBinaryGetFunction(LoadedBinary handle, const char* name, Function* result) {
  return call("aclrtBinaryGetFunction", Needs::kContext, [&](Runtime& state) {
    require_given(name, "the name");
    require_given(result, "the result");
    for (const auto& function : binary_of(state, handle)->functions) {
      if (function->name != name) continue;
      *result = as_handle<Function>(function->handle);
      return;
    }
    refuse(kRtKernelLookup, text("the binary has no function %s", name));
  });
}

ACL_EXPORT int aclrtGetFunctionName(Function function, std::uint32_t room, char* name) {
  return call("aclrtGetFunctionName", Needs::kContext, [&](Runtime& state) {
    require_given(name, "the result");
    const auto found = function_of(state, function);
    refuse_unless(room > found->name.size(), kRtParamInvalid, "the name does not fit");
    std::memcpy(name, found->name.c_str(), found->name.size() + 1);
  });
}

ACL_EXPORT int aclrtLaunchKernel(Function function, std::uint32_t n_blocks, const void* arguments,
                                 std::size_t argument_bytes, Stream handle) {
  return call_on("aclrtLaunchKernel", handle, [&](Runtime& state, const auto& stream) {
    launch(state, stream, function, n_blocks, arguments, argument_bytes, nullptr);
  });
}

ACL_EXPORT int aclrtLaunchKernelV2(Function function, std::uint32_t n_blocks, const void* arguments,
                                   std::size_t argument_bytes, LaunchConfiguration* configuration,
                                   Stream handle) {
  return call_on("aclrtLaunchKernelV2", handle, [&](Runtime& state, const auto& stream) {
    launch(state, stream, function, n_blocks, arguments, argument_bytes, configuration);
  });
}

namespace {

// The arguments in a block that the runtime owns, with the placeholders filled in.
std::shared_ptr<const ArgumentBlock> make_block(Runtime& state, const StreamState& stream,
                                                const void* arguments, std::size_t n_bytes,
                                                const PlaceHolder* place_holders,
                                                std::size_t n_place_holders) {
  for (std::size_t index = 0; index < n_place_holders; ++index) {
    const auto& place = place_holders[index];
    refuse_unless(std::size_t{place.address_offset} + sizeof(std::uint64_t) <= n_bytes &&
                      place.data_offset <= n_bytes,
                  kRtParamInvalid, "a placeholder lies outside of the arguments");
  }
  std::shared_ptr<const ArgumentBlock> block;
  try {
    block = std::make_shared<const ArgumentBlock>(state.arguments, n_bytes);
  } catch (const simulator::DeviceError&) {  // a task that cannot be made invalidates the capture
    if (stream.capture != nullptr) stream.capture->is_invalidated = true;
    throw;
  }
  auto* const content = reinterpret_cast<unsigned char*>(block->address);
  if (n_bytes != 0) std::memcpy(content, arguments, n_bytes);
  for (std::size_t index = 0; index < n_place_holders; ++index) {
    const std::uint64_t address = block->address + place_holders[index].data_offset;
    std::memcpy(content + place_holders[index].address_offset, &address, sizeof address);
  }
  return block;
}

}  // namespace

ACL_EXPORT int aclrtLaunchKernelWithHostArgs(Function function, std::uint32_t n_blocks,
                                             Stream handle, LaunchConfiguration* configuration,
                                             void* arguments, std::size_t argument_bytes,
                                             PlaceHolder* place_holders,
                                             std::size_t n_place_holders) {
  return call_on("aclrtLaunchKernelWithHostArgs", handle, [&](Runtime& state, const auto& stream) {
    trace(state, "bytes=%zu blocks=%u stream=%d", argument_bytes, n_blocks, stream->id);
    auto content = content_of(state, function, n_blocks, argument_bytes, configuration);
    refuse_unless(arguments != nullptr || argument_bytes == 0, kRtParamInvalid,
                  "the arguments are null");
    refuse_unless(place_holders != nullptr || n_place_holders == 0, kRtParamInvalid,
                  "the placeholders are null");
    content.block =
        make_block(state, *stream, arguments, argument_bytes, place_holders, n_place_holders);
    content.arguments = content.block->address;
    submit(state, stream, make_task(kTaskKernel, std::move(content)));
  });
}
