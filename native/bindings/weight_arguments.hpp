// Weights that are streamed, as Python describes them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "streaming/stream_plan.hpp"
#include "streaming/weight_source.hpp"

namespace offload {

// Where a weight's bytes begin in a file; they are as many as the weight has.
struct FileRange {
  std::string path;
  std::size_t offset_bytes = 0;
};

// A weight, and the FileRange or tensor that its bytes come from.
struct StreamedWeight {
  WeightPlacement placement;
  pybind11::object source;
};

// (weight, piece, first launch, last launch, after launch, after pass)
using TransferTuple =
    std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t, int>;

// Throws FileError and BindingError naming the weight. Needs the GIL.
std::shared_ptr<WeightSource> make_source(const WeightPlacement& weight, pybind11::handle source,
                                          WeightFiles& files);

// The plan, and the sources by weight. Errors and GIL: as make_source.
std::pair<StreamPlan, std::vector<std::shared_ptr<WeightSource>>> stream_arguments(
    std::size_t memory_bytes, std::size_t granule_bytes, const std::vector<StreamedWeight>& weights,
    const std::vector<TransferTuple>& transfers, std::size_t n_launches);

// "memory", "direct" or "buffered".
const char* mode_name(ReadMode mode);

}  // namespace offload
