// Proof of executions whose segments are given to devices one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace offload {

// What is the same in each execution of placed segments. Values and memories are numbered from 0.
struct DispatchRules {
  std::vector<std::vector<std::int64_t>> inputs;   // by segment, the Values that it takes
  std::vector<std::vector<std::int64_t>> outputs;  // and those that it makes
  std::vector<std::vector<std::int64_t>> after;    // and the segments that it waits for
  std::int64_t home = 0;                           // the memory of inputs and of returned Values
  std::vector<std::int64_t> returned;              // Values that are made and that the caller sees
  std::size_t n_memories = 1;
  std::vector<std::int64_t> names;  // by Value: its index in the whole Program, for messages

  // Throws PlanError for a number without a Value, segment or memory.
  void check() const;
};

// Proves each step of one execution before it is taken.
//
// A segment begins once, after those that it waits for, in a memory that has all that it reads; a
// Value is copied from a memory that has it, and to each memory once; in the end the caller's
// memory has what is returned. Shares no code with the dispatch that decides the steps.
//
// Owner: one execution; the rules outlive it and have passed their check. Thread: one at a time.
// Errors: PlanError for a step that breaks a rule, which must then not be taken, and for a number
// without a Value, segment or memory.
class DispatchCheck {
 public:
  // The caller's Values are in its memory.
  explicit DispatchCheck(const DispatchRules& rules);

  // Values of a segment, or of the caller (-1), begin to be copied from one memory to another.
  void copied(std::int64_t producer, std::int64_t origin, std::int64_t target,
              const std::vector<std::int64_t>& values);
  // That copy has ended.
  void arrived(std::int64_t target, const std::vector<std::int64_t>& values);
  // A segment begins in a memory.
  void begun(std::int64_t segment, std::int64_t memory);
  // It has ended: what it makes is in its memory.
  void ended(std::int64_t segment);
  // The execution ends.
  void finished() const;

 private:
  enum class Presence : std::uint8_t { kAbsent, kOnWay, kThere };

  std::size_t place(std::int64_t value, std::int64_t memory) const;
  std::size_t known(std::int64_t segment) const;

  const DispatchRules* rules_;
  std::vector<Presence> presences_;   // by value * n_memories + memory
  std::vector<std::int64_t> memory_;  // by segment: where it has begun; -1: it has not
  std::vector<bool> has_ended_;       // by segment
  std::size_t n_ended_ = 0;
};

}  // namespace offload
