// A stand-in for torch's CUDA backend in a torch built without one: tensors of the device type
// "cuda", streams by the driver's handles, generators, and the allocator's entry. Allocation and
// operators are implemented in Python (stand_in.py); memory is the simulated driver's.
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <set>

#define STAND_IN extern "C" __attribute__((visibility("default")))

namespace {

using AllocateFunction = void* (*)(std::size_t);
using FreeFunction = void (*)(void*);

AllocateFunction allocate_function = nullptr;
FreeFunction free_function = nullptr;

thread_local std::int64_t current_stream = 0;

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// A function of Python's, which is in the process.
template <typename Function>
Function* python(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// Kernels compute in Python, on the thread that waits for them: who calls the driver must not hold
// Python's lock.
class LockReleased {
 public:
  LockReleased()
      : state_(python<int()>("PyGILState_Check")() != 0 ? python<void*()>("PyEval_SaveThread")()
                                                        : nullptr) {}
  ~LockReleased() {
    if (state_ != nullptr) python<void(void*)>("PyEval_RestoreThread")(state_);
  }
  LockReleased(const LockReleased&) = delete;
  LockReleased& operator=(const LockReleased&) = delete;

 private:
  void* const state_;
};

// Memory also goes while an error of Python's is on its way, which other Python code must not meet.
void free_memory(void* address) {
  if (address == nullptr) return;
  const int lock = python<int()>("PyGILState_Ensure")();
  void *type = nullptr, *value = nullptr, *trace = nullptr;
  python<void(void**, void**, void**)>("PyErr_Fetch")(&type, &value, &trace);
  free_function(address);
  python<void(void*, void*, void*)>("PyErr_Restore")(type, value, trace);
  python<void(int)>("PyGILState_Release")(lock);
}

struct StandInAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t n_bytes) override {
    void* const address = n_bytes == 0 ? nullptr : allocate_function(n_bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, n_bytes == 0 || address != nullptr,
                     "CUDA out of memory: tried to allocate ", n_bytes, " bytes");
    return {address, address, &free_memory, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, std::size_t n_bytes) const override {
    std::memcpy(to, from, n_bytes);
  }
};

StandInAllocator allocator;

using GetFunction = int (*)(const char*, void**, int, unsigned long long, int*);

// Calls a function of the simulated driver, which is loaded by then; returns its code.
template <typename... Arguments>
int driver(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  TORCH_CHECK(library != nullptr, "the simulated driver is not loaded");
  static auto* const find = reinterpret_cast<GetFunction>(dlsym(library, "cuGetProcAddress_v2"));
  void* function = nullptr;
  const int code = find(name, &function, 12000, 0, nullptr);
  TORCH_CHECK(code == 0 && function != nullptr, "the simulated driver has no ", name);
  const LockReleased released;
  return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

// As torch does before it calls the driver on a thread.
void make_context_current() {
  static std::atomic<void*> retained = nullptr;  // two threads may retain it: it is never released
  void* context = retained;
  if (context == nullptr) {
    const int code = driver("cuDevicePrimaryCtxRetain", &context, 0);
    TORCH_CHECK(code == 0, "cuDevicePrimaryCtxRetain failed with ", code);
    retained = context;
  }
  driver("cuCtxSetCurrent", context);
}

template <typename... Arguments>
void call_driver(const char* name, Arguments... arguments) {
  make_context_current();
  const int code = driver(name, arguments...);
  TORCH_CHECK(code == 0, name, " failed with ", code);
}

void* handle_of(const c10::Stream& stream) { return reinterpret_cast<void*>(stream.id()); }

struct StandInGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(kDevice);
    current_stream = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  // Streams and events that torch makes, which nothing destroys as in torch's own pools of streams.
  c10::Stream getNewStream(c10::Device, int) const override {
    void* made = nullptr;
    call_driver("cuStreamCreate", &made, 1u);
    return c10::Stream(c10::Stream::UNSAFE, kDevice, reinterpret_cast<std::int64_t>(made));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) call_driver("cuEventCreate", event, 2u);
    call_driver("cuEventRecord", *event, handle_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) call_driver("cuStreamWaitEvent", handle_of(stream), event, 0u);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || driver("cuEventQuery", event) == 0;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) call_driver("cuEventSynchronize", event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) driver("cuEventDestroy", event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return driver("cuStreamQuery", handle_of(stream)) == 0;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    call_driver("cuStreamSynchronize", handle_of(stream));
  }
};

std::mutex pinned_mutex;
std::set<std::pair<const char*, const char*>> pinned;  // beginnings and ends

void free_pinned(void* address) {
  if (address == nullptr) return;
  {
    const std::lock_guard lock(pinned_mutex);  // not in the call, which waits for Python's lock
    pinned.erase(pinned.lower_bound({static_cast<const char*>(address), nullptr}));
  }
  driver("cuMemFreeHost", address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t n_bytes) override {
    void* address = nullptr;
    if (n_bytes != 0) {
      call_driver("cuMemHostAlloc", &address, n_bytes, 0u);
      const std::lock_guard lock(pinned_mutex);
      auto* const begin = static_cast<const char*>(address);
      pinned.insert({begin, begin + n_bytes});
    }
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t n_bytes) const override {
    std::memcpy(to, from, n_bytes);
  }
};

// As at::CUDAGeneratorImpl: a seed and an offset, which generators may share.
struct State : c10::intrusive_ptr_target {
  std::uint64_t seed = c10::default_rng_seed_val;
  std::uint64_t offset = 0;
};

class StandInGenerator final : public c10::GeneratorImpl {
 public:
  StandInGenerator()
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        state_(c10::make_intrusive<State>()) {}

  void set_current_seed(std::uint64_t seed) override {
    state_->seed = seed;
    state_->offset = 0;
  }
  void set_offset(std::uint64_t offset) override { state_->offset = offset; }
  std::uint64_t get_offset() const override { return state_->offset; }
  std::uint64_t current_seed() const override { return state_->seed; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return state_->seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    const auto* const numbers = static_cast<const std::uint64_t*>(state.data());
    state_->seed = numbers[0];
    state_->offset = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, c10::ScalarType::Byte, c10::kStrided, c10::kCPU, false,
                                       std::nullopt);
    std::memcpy(state.data_ptr(), &state_->seed, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &state_->offset, 8);
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    state_ = static_cast<StandInGenerator*>(other.get())->state_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    auto found = c10::make_intrusive<StandInGenerator>();
    found->state_ = state_;
    return found;
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* const copy = new StandInGenerator;
    *copy->state_ = *state_;
    return copy;
  }

  c10::intrusive_ptr<State> state_;
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator made;
    return &made;
  }
  bool isPinnedPtr(const void* address) const override {
    const std::lock_guard lock(pinned_mutex);
    const auto* const at = static_cast<const char*>(address);
    for (const auto& [begin, end] : pinned) {
      if (begin <= at && at < end) return true;
    }
    return false;
  }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::make_generator<StandInGenerator>();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<StandInGenerator>();
  }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& result, at::Storage source, std::int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(result, std::move(source), offset, size, stride);
}

at::Tensor& set_whole(at::Tensor& result, at::Storage source) {
  return at::native::set_(result, std::move(source));
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, StandInGuard);
}

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole);
}

// Sets the functions that allocate and free from here on; null from `allocate`: out of memory.
STAND_IN void stand_in_set_allocator(AllocateFunction allocate, FreeFunction release) {
  allocate_function = allocate;
  free_function = release;
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator, 255);
}

// The calling thread's current stream, by the driver's handle.
STAND_IN std::int64_t stand_in_stream() { return current_stream; }
STAND_IN void stand_in_set_stream(std::int64_t stream) { current_stream = stream; }
