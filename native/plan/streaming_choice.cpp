#include "streaming_choice.hpp"

#include <algorithm>

#include "streaming_ring.hpp"

namespace offload {

void PieceChoice::add(std::size_t index, const StreamingWeight& weight) {
  const bool is_long = weight.last_launch > weight.first_launch;
  const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& kind) {
    return kind.size_bytes == weight.size_bytes && kind.is_long == is_long;
  });
  items.push_back({index, static_cast<std::size_t>(found - kinds.begin()), weight.first_launch,
                   weight.last_launch});
  if (found == kinds.end()) {
    const std::int64_t aligned_bytes = round_up(weight.size_bytes, alignment_bytes_);
    kinds.push_back({weight.size_bytes, aligned_bytes, is_long, 0});
  }
  ++kinds[items.back().kind].n_items;
}

void PieceChoice::order() {
  std::stable_sort(items.begin(), items.end(), [](const Item& one, const Item& other) {
    return one.first_launch < other.first_launch;
  });
  parts.resize(items.size());
}

Part PieceChoice::part(const Kind& kind, bool tails, std::int64_t unit_bytes) const {
  if (kind.size_bytes <= unit_bytes) return {kind.size_bytes, kind.aligned_bytes};
  if (!tails) return {};
  const std::int64_t resident_bytes = round_up(kind.size_bytes - unit_bytes, granule_bytes_);
  if (resident_bytes >= kind.size_bytes) return {};
  return {kind.size_bytes - resident_bytes, kind.aligned_bytes - resident_bytes};
}

Part PieceChoice::part(const Kind& kind, const Family& family) const {
  if (kind.is_long && !family.long_spans) return {};
  const Part found = part(kind, family.tails, family.unit_bytes);
  const double least = family.least_share * static_cast<double>(family.unit_bytes);
  return static_cast<double>(found.streamed_bytes) < least ? Part{} : found;
}

std::int64_t PieceChoice::chosen_bytes() const {
  std::int64_t bytes = 0;
  for (const std::size_t index : chosen) bytes += parts[index].streamed_bytes;
  return bytes;
}

bool PieceChoice::choose(const Family& family, std::int64_t needed_bytes, int n_extra) {
  const double rate = static_cast<double>(needed_bytes + n_extra * family.unit_bytes) /
                      static_cast<double>(family.most_saved_bytes);
  if (rate > 1) return false;
  kind_parts_.clear();
  for (const Kind& kind : kinds) kind_parts_.push_back(part(kind, family));
  std::int64_t chosen_bytes = 0;
  double due_bytes = 0;
  for (std::size_t index = 0; index < items.size(); ++index) {
    const Part& found = kind_parts_[items[index].kind];
    const auto saved_bytes = static_cast<double>(found.saved_bytes);
    parts[index] = {};
    if (family.opens && chosen_bytes < family.unit_bytes) {
      Family any = family;
      any.least_share = 0;
      parts[index] = part(kind_of(index), any);
      chosen_bytes += parts[index].saved_bytes;
      continue;
    }
    due_bytes += rate * saved_bytes;
    if (found.saved_bytes == 0 || due_bytes < 0.5 * saved_bytes) continue;
    due_bytes -= saved_bytes;
    parts[index] = found;
    chosen_bytes += found.saved_bytes;
  }
  for (std::size_t index = 0; index < items.size() && chosen_bytes < needed_bytes; ++index) {
    if (parts[index].saved_bytes > 0) continue;
    parts[index] = kind_parts_[items[index].kind];
    chosen_bytes += parts[index].saved_bytes;
  }
  if (chosen_bytes < needed_bytes) return false;
  if (family.tails) {
    trim(family, needed_bytes, chosen_bytes);
  } else {
    drop(needed_bytes, chosen_bytes);
  }
  chosen.clear();
  for (std::size_t index = 0; index < items.size(); ++index) {
    if (parts[index].saved_bytes > 0) chosen.push_back(index);
  }
  return true;
}

// Drops whole items that are not needed.
void PieceChoice::drop(std::int64_t needed_bytes, std::int64_t chosen_bytes) {
  for (Part& one : parts) {
    if (one.saved_bytes == 0 || chosen_bytes - one.saved_bytes < needed_bytes) continue;
    chosen_bytes -= one.saved_bytes;
    one = {};
  }
}

// Trims the largest parts to what is needed: all to one size first, then one by one.
void PieceChoice::trim(const Family& family, std::int64_t needed_bytes, std::int64_t chosen_bytes) {
  const std::int64_t granule = granule_bytes_;
  if (chosen_bytes - needed_bytes < granule) return;
  n_chosen_kind_.assign(kinds.size(), 0);
  for (std::size_t index = 0; index < items.size(); ++index) {
    n_chosen_kind_[items[index].kind] += parts[index].saved_bytes > 0 ? 1 : 0;
  }
  std::int64_t fits = family.unit_bytes;
  std::int64_t fails = granule - 1;
  while (fits - fails > granule) {
    const std::int64_t middle = fails + (fits - fails) / 2;
    std::int64_t saved = 0;
    for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
      if (n_chosen_kind_[kind] == 0) continue;
      saved += n_chosen_kind_[kind] * part(kinds[kind], true, middle).saved_bytes;
    }
    (saved >= needed_bytes ? fits : fails) = middle;
  }
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    kind_parts_[kind] = part(kinds[kind], true, fits);
  }
  chosen_bytes = 0;
  for (std::size_t index = 0; index < items.size(); ++index) {
    if (parts[index].saved_bytes > 0) parts[index] = kind_parts_[items[index].kind];
    chosen_bytes += parts[index].saved_bytes;
  }
  for (std::size_t index = 0; index < items.size(); ++index) {
    if (chosen_bytes - granule < needed_bytes) break;
    Part& one = parts[index];
    const bool is_cut = one.saved_bytes > 0 && one.streamed_bytes < kind_of(index).size_bytes;
    if (!is_cut || one.streamed_bytes <= granule) continue;
    one.streamed_bytes -= granule;
    one.saved_bytes -= granule;
    chosen_bytes -= granule;
  }
}

}  // namespace offload
