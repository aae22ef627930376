// Device memory in layouts that a probe chooses, behind the two functions that torch's pluggable
// allocator calls. One pool is current at a time. Thread: any; one mutex. Nothing is freed before
// the process ends.
#include <cuda.h>
#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

namespace {

constexpr std::size_t kChunkBytes = std::size_t{2} << 20;

struct Allocation {
  CUdeviceptr address;
  std::size_t n_bytes;
};

std::mutex mutex;
std::vector<Allocation> allocations;  // of the current pool, in order
std::size_t position = 0;             // of the next one, after a rewind
std::mt19937 draw;
CUmemGenericAllocationHandle shared_chunk = 0;
CUdeviceptr window_begin = 0;  // 0: each allocation has a separate guarded address
CUdeviceptr window_next = 0;
CUdeviceptr window_end = 0;
CUmemGenericAllocationHandle window_memory = 0;
CUresult last_error = CUDA_SUCCESS;

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp found{};
  found.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  found.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  found.location.id = device;
  return found;
}

bool ok(CUresult result) {
  if (result != CUDA_SUCCESS) last_error = result;
  return result == CUDA_SUCCESS;
}

bool let_access(CUdeviceptr address, std::size_t n_bytes, int device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return ok(cuMemSetAccess(address, n_bytes, &access, 1));
}

// Addresses where offload asks for its own (native/cuda/memory.cpp), so that pairs of small numbers
// do not resemble them; if the driver does not follow the hint, the addresses that it gives.
CUresult reserve(CUdeviceptr* address, std::size_t n_bytes) {
  static CUdeviceptr next = 0x2d50'0000'0000;
  if (cuMemAddressReserve(address, n_bytes, kChunkBytes, next, 0) == CUDA_SUCCESS) {
    next += n_bytes;
    return CUDA_SUCCESS;
  }
  return cuMemAddressReserve(address, n_bytes, kChunkBytes, 0, 0);
}

// A guarded address over the single shared chunk, at a random distance from its beginning.
CUdeviceptr guarded(std::size_t n_bytes, int device) {
  const std::size_t skew = std::size_t{512} * (draw() % (kChunkBytes / 512));
  const std::size_t n_chunks = (skew + n_bytes + kChunkBytes - 1) / kChunkBytes;
  const std::size_t n_spare = 2 + draw() % 8;  // unmapped: one before, the others behind
  const CUmemAllocationProp wanted = properties(device);
  if (shared_chunk == 0 && !ok(cuMemCreate(&shared_chunk, kChunkBytes, &wanted, 0))) return 0;
  CUdeviceptr base = 0;
  if (!ok(reserve(&base, (n_chunks + n_spare) * kChunkBytes))) return 0;
  const CUdeviceptr mapped = base + kChunkBytes;
  for (std::size_t chunk = 0; chunk < n_chunks; ++chunk)
    if (!ok(cuMemMap(mapped + chunk * kChunkBytes, kChunkBytes, 0, shared_chunk, 0))) return 0;
  if (!let_access(mapped, n_chunks * kChunkBytes, device)) return 0;
  return mapped + skew;
}

CUdeviceptr in_window(std::size_t n_bytes) {
  const CUdeviceptr address = window_next;
  window_next += (n_bytes + 511) / 512 * 512;
  if (window_next <= window_end) return address;
  last_error = CUDA_ERROR_OUT_OF_MEMORY;
  return 0;
}

}  // namespace

extern "C" {

// Begins a pool whose layout is determined by the seed.
void probe_pool_begin(unsigned seed) {
  const std::lock_guard<std::mutex> lock(mutex);
  allocations.clear();
  position = 0;
  draw.seed(seed);
  window_begin = 0;
}

// The next allocations get the addresses of this pool again, in the same order.
void probe_pool_rewind() {
  const std::lock_guard<std::mutex> lock(mutex);
  position = 0;
}

// Begins a pool that cuts its allocations from one range over real memory. With `share` that is the
// previous window's memory, mapped once more.
int probe_window_begin(std::size_t n_bytes, int device, int share) {
  const std::lock_guard<std::mutex> lock(mutex);
  n_bytes = (n_bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  const CUmemAllocationProp wanted = properties(device);
  if (!share && !ok(cuMemCreate(&window_memory, n_bytes, &wanted, 0))) return last_error;
  if (!ok(reserve(&window_begin, n_bytes))) return last_error;
  if (!ok(cuMemMap(window_begin, n_bytes, 0, window_memory, 0))) return last_error;
  if (!let_access(window_begin, n_bytes, device)) return last_error;
  window_next = window_begin;
  window_end = window_begin + n_bytes;
  allocations.clear();
  position = 0;
  return CUDA_SUCCESS;
}

void* probe_pool_malloc(ssize_t n_bytes, int device, CUstream) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto size = static_cast<std::size_t>(n_bytes);
  if (position < allocations.size()) {
    const Allocation& known = allocations[position++];
    if (known.n_bytes == size) return reinterpret_cast<void*>(known.address);
    last_error = CUDA_ERROR_INVALID_VALUE;
    return nullptr;
  }
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;  // mapping is allowed under capture
  cuThreadExchangeStreamCaptureMode(&mode);
  const CUdeviceptr address = window_begin ? in_window(size) : guarded(size, device);
  cuThreadExchangeStreamCaptureMode(&mode);
  if (address == 0) return nullptr;
  allocations.push_back({address, size});
  position = allocations.size();
  return reinterpret_cast<void*>(address);
}

void probe_pool_free(void*, std::size_t, int, CUstream) {}

int probe_pool_count() {
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int>(allocations.size());
}

void probe_pool_at(int index, std::uint64_t* address, std::uint64_t* n_bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  *address = allocations[static_cast<std::size_t>(index)].address;
  *n_bytes = allocations[static_cast<std::size_t>(index)].n_bytes;
}

int probe_pool_error() {
  const std::lock_guard<std::mutex> lock(mutex);
  return last_error;
}

}  // extern "C"
