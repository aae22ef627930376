// The simulated Ascend runtime from C++, so that it runs under the sanitizers: every kind of object
// is made, used, freed, and used once more; models end in all possible ways.
#include <cstring>
#include <thread>
#include <vector>

#include "ascend/acl_abi.hpp"
#include "ascend/offline_format.hpp"
#include "check.hpp"

using namespace offload::acl;

extern "C" {
int aclInit(const char*);
int aclFinalize();
int aclrtSetDevice(std::int32_t);
int aclrtMalloc(void**, std::size_t, MallocPolicy);
int aclrtFree(void*);
int aclrtCreateStreamWithConfig(Stream*, std::uint32_t, std::uint32_t);
int aclrtDestroyStream(Stream);
int aclrtSynchronizeStream(Stream);
int aclrtCreateEventExWithFlag(Event*, std::uint32_t);
int aclrtDestroyEvent(Event);
int aclrtRecordEvent(Event, Stream);
int aclrtStreamWaitEvent(Stream, Event);
int aclrtMemcpyAsync(void*, std::size_t, const void*, std::size_t, MemcpyKind, Stream);
int aclrtBinaryLoadFromData(const void*, std::size_t, const BinaryLoadOptions*, LoadedBinary*);
int aclrtBinaryGetFunction(LoadedBinary, const char*, Function*);
int aclrtBinaryUnLoad(LoadedBinary);
int aclrtLaunchKernelWithHostArgs(Function, std::uint32_t, Stream, LaunchConfiguration*, void*,
                                  std::size_t, PlaceHolder*, std::size_t);
int aclmdlRICaptureBegin(Stream, CaptureMode);
int aclmdlRICaptureEnd(Stream, Model*);
int aclmdlRICaptureTaskGrpBegin(Stream);
int aclmdlRICaptureTaskGrpEnd(Stream, TaskGroup*);
int aclmdlRICaptureTaskUpdateBegin(Stream, TaskGroup);
int aclmdlRICaptureTaskUpdateEnd(Stream);
int aclmdlRIExecuteAsync(Model, Stream);
int aclmdlRIDestroy(Model);
int aclmdlRIBuildBegin(Model*, std::uint32_t);
int aclmdlRIBindStream(Model, Stream, std::uint32_t);
int aclmdlRIEndTask(Model, Stream);
int aclmdlRIBuildEnd(Model, void*);
int aclmdlLoadFromMem(const void*, std::size_t, std::uint32_t*);
int aclmdlUnload(std::uint32_t);
Dataset aclmdlCreateDataset();
int aclmdlDestroyDataset(Dataset);
int aclmdlAddDatasetBuffer(Dataset, DataBuffer);
DataBuffer aclCreateDataBuffer(void*, std::size_t);
int aclDestroyDataBuffer(DataBuffer);
int aclmdlExecuteAsync(std::uint32_t, Dataset, Dataset, Stream);
std::size_t sim_live_bytes();
std::size_t sim_argument_bytes();
int sim_hide(const char*);
int sim_set_personality(const char*);
int sim_reset();
}

namespace {

struct Addition {
  std::uint64_t* address;
  std::uint64_t number;
};

int add(const void* arguments, std::size_t, std::uint32_t, void*) {
  Addition addition{};
  std::memcpy(&addition, arguments, sizeof addition);
  if (addition.address == nullptr) return 1;
  *addition.address += addition.number;
  return 0;
}

struct Kernels {
  LoadedBinary binary = nullptr;
  Function add = nullptr;
};

Kernels load() {
  struct Image {
    char magic[8];
    std::uint64_t count;
    char name[48];
    std::uint64_t function, user, argument_bytes;
  } image{{}, 1, "add", reinterpret_cast<std::uint64_t>(&add), 0, sizeof(Addition)};
  std::memcpy(image.magic, "SIMKERN1", sizeof image.magic);
  Kernels result;
  CHECK_THAT(aclrtBinaryLoadFromData(&image, sizeof image, nullptr, &result.binary) == kSuccess);
  CHECK_THAT(aclrtBinaryGetFunction(result.binary, "add", &result.add) == kSuccess);
  return result;
}

Stream make_stream(std::uint32_t flags = 0) {
  Stream stream = nullptr;
  CHECK_THAT(aclrtCreateStreamWithConfig(&stream, 0, flags) == kSuccess);
  return stream;
}

std::uint64_t* allocate() {
  void* address = nullptr;
  CHECK_THAT(aclrtMalloc(&address, sizeof(std::uint64_t), kMallocHugeFirst) == kSuccess);
  *static_cast<std::uint64_t*>(address) = 0;
  return static_cast<std::uint64_t*>(address);
}

void launch(const Kernels& kernels, Stream stream, std::uint64_t* address, std::uint64_t number) {
  Addition addition{address, number};
  CHECK_THAT(aclrtLaunchKernelWithHostArgs(kernels.add, 1, stream, nullptr, &addition,
                                           sizeof addition, nullptr, 0) == kSuccess);
}

void test_capture(const Kernels& kernels) {
  std::uint64_t* const address = allocate();
  const Stream stream = make_stream(), side = make_stream();
  Event event = nullptr;
  CHECK_THAT(aclrtCreateEventExWithFlag(&event, kEventSync) == kSuccess);
  Model model = nullptr;
  TaskGroup group = nullptr;
  CHECK_THAT(aclmdlRICaptureBegin(stream, kCaptureThreadLocal) == kSuccess);
  CHECK_THAT(aclrtRecordEvent(event, stream) == kSuccess);
  CHECK_THAT(aclrtStreamWaitEvent(side, event) == kSuccess);
  launch(kernels, side, address, 1);
  CHECK_THAT(aclrtRecordEvent(event, side) == kSuccess);
  CHECK_THAT(aclrtStreamWaitEvent(stream, event) == kSuccess);
  CHECK_THAT(aclmdlRICaptureTaskGrpBegin(stream) == kSuccess);
  launch(kernels, stream, address, 10);
  CHECK_THAT(aclmdlRICaptureTaskGrpEnd(stream, &group) == kSuccess);
  CHECK_THAT(aclmdlRICaptureEnd(stream, &model) == kSuccess);
  CHECK_THAT(aclmdlRIExecuteAsync(model, stream) == kSuccess);
  CHECK_THAT(aclmdlRICaptureTaskUpdateBegin(stream, group) == kSuccess);
  launch(kernels, stream, address, 100);
  CHECK_THAT(aclmdlRICaptureTaskUpdateEnd(stream) == kSuccess);
  CHECK_THAT(aclmdlRIExecuteAsync(model, stream) == kSuccess);
  CHECK_THAT(aclrtSynchronizeStream(stream) == kSuccess);
  CHECK_THAT(*address == 112);
  CHECK_THAT(aclmdlRIDestroy(model) == kSuccess);
  CHECK_THAT(sim_argument_bytes() == 0);
  CHECK_THAT(aclrtDestroyEvent(event) == kSuccess);
  CHECK_THAT(aclrtDestroyStream(side) == kSuccess);
  CHECK_THAT(aclrtDestroyStream(stream) == kSuccess);
  CHECK_THAT(aclrtFree(address) == kSuccess);
}

// At the reset: a failed capture, an active one, and a model whose execution is queued.
void test_reset(const Kernels& kernels) {
  std::uint64_t* const address = allocate();
  const Stream stream = make_stream(), other = make_stream();
  Model model = nullptr;
  CHECK_THAT(aclmdlRICaptureBegin(stream, kCaptureRelaxed) == kSuccess);
  launch(kernels, stream, address, 1);
  std::thread([&] { aclmdlRICaptureEnd(stream, &model); }).join();  // without a device
  CHECK_THAT(aclmdlRICaptureEnd(stream, &model) == kSuccess);
  CHECK_THAT(aclmdlRIExecuteAsync(model, stream) == kSuccess);
  CHECK_THAT(aclmdlRICaptureBegin(other, kCaptureGlobal) == kSuccess);
  launch(kernels, other, address, 1);
  CHECK_THAT(sim_reset() == 0);
  CHECK_THAT(sim_live_bytes() == 0 && sim_argument_bytes() == 0);
}

void test_build(const Kernels& kernels) {
  std::uint64_t* const address = allocate();
  const Stream bound = make_stream(kStreamPersistent), stream = make_stream();
  Model model = nullptr;
  CHECK_THAT(aclmdlRIBuildBegin(&model, 0) == kSuccess);
  CHECK_THAT(aclmdlRIBindStream(model, bound, kModelStreamHead) == kSuccess);
  launch(kernels, bound, address, 7);
  CHECK_THAT(aclmdlRIEndTask(model, bound) == kSuccess);
  CHECK_THAT(aclmdlRIBuildEnd(model, nullptr) == kSuccess);
  CHECK_THAT(aclmdlRIExecuteAsync(model, stream) == kSuccess);
  CHECK_THAT(aclmdlRIDestroy(model) == kSuccess);  // waits
  CHECK_THAT(*address == 7);
  CHECK_THAT(aclrtDestroyStream(bound) == kSuccess);
  CHECK_THAT(aclrtDestroyStream(stream) == kSuccess);
  CHECK_THAT(aclrtFree(address) == kSuccess);
}

// One output, to which a kernel adds 3.
std::vector<unsigned char> offline_model() {
  using namespace simulated_ascend;
  const struct {
    FileHeader header;
    FileTensor output;
    FileKernel kernel;
    FileTask task;
    FileOperand operands[2];
  } file{{{'S', 'I', 'M', 'M', 'O', 'D', 'L', '1'}, 64, 0, 0, 1, 1, 1},
         {"y", kUint64, kFormatNd, 8, 1, {1}},
         {"add", reinterpret_cast<std::uint64_t>(&add), 0},
         {0, 1, 2},
         {{Region::kOutput, 0, 0}, {Region::kNone, 0, 3}}};
  std::vector<unsigned char> bytes(sizeof file);
  std::memcpy(bytes.data(), &file, sizeof file);
  return bytes;
}

void test_offline() {
  std::uint64_t* const address = allocate();
  const auto bytes = offline_model();
  const Stream stream = make_stream();
  std::uint32_t model = 0;
  CHECK_THAT(aclmdlLoadFromMem(bytes.data(), bytes.size() - 1, &model) == kAclParseModel);
  CHECK_THAT(aclmdlLoadFromMem(bytes.data(), bytes.size(), &model) == kSuccess);
  const Dataset inputs = aclmdlCreateDataset(), outputs = aclmdlCreateDataset();
  const DataBuffer buffer = aclCreateDataBuffer(address, sizeof *address);
  CHECK_THAT(aclmdlAddDatasetBuffer(outputs, buffer) == kSuccess);
  CHECK_THAT(aclmdlExecuteAsync(model, inputs, outputs, stream) == kSuccess);
  CHECK_THAT(aclmdlUnload(model) == kRtModelRunning);
  CHECK_THAT(aclrtSynchronizeStream(stream) == kSuccess);
  CHECK_THAT(*address == 3);
  CHECK_THAT(aclmdlUnload(model) == kSuccess);
  CHECK_THAT(aclDestroyDataBuffer(buffer) == kSuccess);
  CHECK_THAT(aclmdlDestroyDataset(inputs) == kSuccess);
  CHECK_THAT(aclmdlDestroyDataset(outputs) == kSuccess);
  CHECK_THAT(aclrtDestroyStream(stream) == kSuccess);
  CHECK_THAT(aclrtFree(address) == kSuccess);
}

// Threads that use their own streams, and each other's events.
void test_threads(const Kernels& kernels) {
  constexpr int kRounds = 50;
  std::vector<std::thread> threads;
  for (int index = 0; index < 3; ++index) {
    threads.emplace_back([&kernels] {
      CHECK_THAT(aclrtSetDevice(0) == kSuccess);
      std::uint64_t* const address = allocate();
      const Stream stream = make_stream();
      for (int round = 0; round < kRounds; ++round) {
        launch(kernels, stream, address, 1);
        if (round % 2 == 0) CHECK_THAT(aclrtSynchronizeStream(stream) == kSuccess);
      }
      CHECK_THAT(aclrtSynchronizeStream(stream) == kSuccess);
      CHECK_THAT(*address == kRounds);
      CHECK_THAT(aclrtDestroyStream(stream) == kSuccess);
      CHECK_THAT(aclrtFree(address) == kSuccess);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main() {
  CHECK_THAT(aclrtSetDevice(0) == kAclUninitialize);
  CHECK_THAT(aclInit(nullptr) == kSuccess);
  CHECK_THAT(aclrtSetDevice(0) == kSuccess);
  for (int round = 0; round < 2; ++round) {
    const Kernels kernels = load();
    test_capture(kernels);
    test_build(kernels);
    test_offline();
    test_threads(kernels);
    CHECK_THAT(sim_live_bytes() == 0);
    test_reset(kernels);
  }
  CHECK_THAT(sim_hide("aclmdlRIExecute") == 0 && sim_set_personality("8.1") == 0);
  CHECK_THAT(sim_set_personality("") == 0);
  CHECK_THAT(aclFinalize() == kSuccess);
  return offload::test::result();
}
