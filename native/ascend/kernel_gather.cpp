// The refresh by a gathering kernel.
#include "ascend/gather_refresh.hpp"
#include "ascend/table_copies.hpp"

namespace offload::acl {
namespace {

// The words of a gather's argument block; the bases follow if they fit.
enum GatherArgument : std::size_t { kTable, kIndex, kOffset, kCount, kBases, kFirstBase };
static_assert(kFirstBase * 8 == kGatherArgumentsBytes);

class KernelGather final : public GatherRefresh {
 public:
  KernelGather(const Runtime& runtime, const TableParts& parts, const GatherKernel& kernel)
      : GatherRefresh(runtime, parts, kFirstBase),
        kernel_(kernel),
        fits_(runtime.has(Capability::kHostArguments) && arguments_bytes() <= kLaunchBytes),
        bases_(runtime, fits_ ? 0 : bases_bytes(), "allocating the base table"),
        block_(runtime, fits_ ? 0 : kGatherArgumentsBytes, "allocating the refresh's arguments") {
    std::vector<std::uint64_t>& arguments = host();
    arguments[kTable] = table().address();
    arguments[kIndex] = index().address();
    arguments[kOffset] = offset().address();
    arguments[kCount] = n_words();
    arguments[kBases] = bases_.address();
    if (fits_) return;
    const std::vector<std::uint64_t> head(arguments.begin(), arguments.begin() + kFirstBase);
    upload(runtime, block_, head, "copying the refresh's arguments");
  }

 private:
  std::size_t arguments_bytes() { return kGatherArgumentsBytes + bases_bytes(); }

  void gather(Stream stream, Submission& submission) override {
    if (fits_) return launch_with_bases(stream);
    copy_bases(bases_, stream, submission);
    runtime().check(runtime().launch_kernel(kernel_.function, kernel_.n_blocks, block_.data(),
                                            kGatherArgumentsBytes, stream),
                    "launching the refresh of kernel arguments");
  }

  void launch_with_bases(Stream stream) {
    PlaceHolder bases = {8 * kBases, 8 * kFirstBase};
    runtime().check(
        runtime().launch_with_host_arguments(kernel_.function, kernel_.n_blocks, stream, nullptr,
                                             host().data(), arguments_bytes(), &bases, 1),
        "launching the refresh of kernel arguments");
    counts_.bytes_launched += arguments_bytes();
  }

  GatherKernel kernel_;
  bool fits_;
  DeviceMemory bases_;
  DeviceMemory block_;
};

}  // namespace

std::unique_ptr<TableRefresh> make_kernel_gather(const Runtime& runtime, const TableParts& parts,
                                                 const GatherKernel& kernel) {
  runtime.require(Capability::kKernelLaunch, "refreshing kernel arguments by a kernel");
  return std::make_unique<KernelGather>(runtime, parts, kernel);
}

}  // namespace offload::acl
