#include "offload/dispatch_check.hpp"

#include <string>

#include "offload/errors.hpp"

namespace offload {
namespace {

constexpr std::int64_t kGiven = -1;
constexpr std::int64_t kNowhere = -1;

std::size_t at(std::int64_t number) { return static_cast<std::size_t>(number); }

bool is_below(std::int64_t number, std::size_t limit) { return number >= 0 && at(number) < limit; }

std::string text(std::int64_t number) { return std::to_string(number); }

}  // namespace

void DispatchRules::check() const {
  const auto fits = [](const std::vector<std::int64_t>& numbers, std::size_t limit) {
    for (const std::int64_t number : numbers) {
      if (!is_below(number, limit)) {
        throw PlanError("a rule names " + text(number) + ", which is not below " +
                        std::to_string(limit));
      }
    }
  };
  if (inputs.size() != outputs.size() || inputs.size() != after.size()) {
    throw PlanError("each segment has inputs, outputs and segments that it waits for");
  }
  for (const auto& one : inputs) fits(one, names.size());
  for (const auto& one : outputs) fits(one, names.size());
  for (const auto& one : after) fits(one, inputs.size());
  fits(returned, names.size());
  fits({home}, n_memories);
}

DispatchCheck::DispatchCheck(const DispatchRules& rules)
    : rules_(&rules),
      presences_(rules.names.size() * rules.n_memories, Presence::kThere),
      memory_(rules.inputs.size(), kNowhere),
      has_ended_(rules.inputs.size(), false) {
  for (std::size_t place = 0; place < presences_.size(); ++place) {
    if (place % rules.n_memories != at(rules.home)) presences_[place] = Presence::kAbsent;
  }
  for (const auto& made : rules.outputs) {
    for (const std::int64_t value : made) {
      presences_[at(value) * rules.n_memories + at(rules.home)] = Presence::kAbsent;
    }
  }
}

std::size_t DispatchCheck::place(std::int64_t value, std::int64_t memory) const {
  if (!is_below(value, rules_->names.size()) || !is_below(memory, rules_->n_memories)) {
    throw PlanError("value " + text(value) + " or memory " + text(memory) + " does not exist");
  }
  return at(value) * rules_->n_memories + at(memory);
}

std::size_t DispatchCheck::known(std::int64_t segment) const {
  if (!is_below(segment, memory_.size())) {
    throw PlanError("segment " + text(segment) + " does not exist");
  }
  return at(segment);
}

void DispatchCheck::copied(std::int64_t producer, std::int64_t origin, std::int64_t target,
                           const std::vector<std::int64_t>& values) {
  if (producer != kGiven && !has_ended_[known(producer)]) {
    throw PlanError("values of segment " + text(producer) + " are copied before it has ended");
  }
  for (const std::int64_t value : values) {
    const Presence there = presences_[place(value, origin)];
    Presence& here = presences_[place(value, target)];
    const std::string name = "%" + text(rules_->names[at(value)]);
    if (there != Presence::kThere) {
      throw PlanError(name + " is copied from memory " + text(origin) + ", which lacks it");
    }
    if (here != Presence::kAbsent) {
      throw PlanError(name + " is copied to memory " + text(target) + " a second time");
    }
    here = Presence::kOnWay;
  }
}

void DispatchCheck::arrived(std::int64_t target, const std::vector<std::int64_t>& values) {
  for (const std::int64_t value : values) {
    Presence& here = presences_[place(value, target)];
    if (here != Presence::kOnWay) {
      throw PlanError("%" + text(rules_->names[at(value)]) + " arrives in memory " + text(target) +
                      " without being on its way");
    }
    here = Presence::kThere;
  }
}

void DispatchCheck::begun(std::int64_t segment, std::int64_t memory) {
  const std::size_t one = known(segment);
  if (memory_[one] != kNowhere) {
    throw PlanError("segment " + text(segment) + " begins a second time");
  }
  for (const std::int64_t before : rules_->after[one]) {
    if (!has_ended_[at(before)]) {
      throw PlanError("segment " + text(segment) + " begins before segment " + text(before) +
                      " has ended");
    }
  }
  for (const std::int64_t value : rules_->inputs[one]) {
    if (presences_[place(value, memory)] != Presence::kThere) {
      throw PlanError("segment " + text(segment) + " reads %" + text(rules_->names[at(value)]) +
                      ", which memory " + text(memory) + " lacks");
    }
  }
  memory_[one] = memory;
}

void DispatchCheck::ended(std::int64_t segment) {
  const std::size_t one = known(segment);
  if (memory_[one] == kNowhere || has_ended_[one]) {
    throw PlanError("segment " + text(segment) + " ends without being under way");
  }
  has_ended_[one] = true;
  ++n_ended_;
  for (const std::int64_t value : rules_->outputs[one]) {
    presences_[place(value, memory_[one])] = Presence::kThere;
  }
}

void DispatchCheck::finished() const {
  if (n_ended_ != memory_.size()) {
    throw PlanError("an execution ends before its segments have");
  }
  for (const std::int64_t value : rules_->returned) {
    if (presences_[place(value, rules_->home)] != Presence::kThere) {
      throw PlanError("the caller reads %" + text(rules_->names[at(value)]) +
                      ", which its memory lacks");
    }
  }
}

}  // namespace offload
