// A node of a resident graph: its parameter bytes, and how they are passed to the driver.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/driver.hpp"

namespace offload::cuda {

inline constexpr std::size_t kWordBytes = 8;
inline constexpr std::size_t kHalfWordBytes = kWordBytes / 2;

// A node with the image of its parameters, in which every address word can be written.
//
// Parts of a kernel: 0, its packed arguments at the offsets that the driver states; of a copy: 0,
// the source's address and at 8 the destination's, and 1, the bytes of a host source (its table);
// of a memset: 0, the destination's address.
//
// Owner: one resident. Thread: callers serialise, with a current context. Errors: make_node throws
// CaptureError for a node that cannot be resident and ExecutionError where the driver fails;
// methods that set or issue return the driver's result.
class ResidentNode {
 public:
  ResidentNode(const Driver& driver, GraphNode node) : driver_(driver), node_(node) {}
  virtual ~ResidentNode() = default;
  ResidentNode(const ResidentNode&) = delete;
  ResidentNode& operator=(const ResidentNode&) = delete;

  // "kernel vectorized_add", for messages.
  virtual std::string describe() const = 0;

  // Sets the template node to the image.
  virtual Result set_template() = 0;

  // Sets the node of an executable graph to the image. `node` is the corresponding node in the
  // graph from which it was instantiated: the template, or a clone of it. `context`: that of copies
  // and memsets.
  virtual Result set_exec(GraphExec exec, GraphNode node, Context context) = 0;

  // Enqueues the node's work by itself, with the image.
  virtual Result issue(Stream stream) = 0;

  // Whether the driver keeps the allocation of an address as well as the address, so that an equal
  // address is stale once its memory was freed and allocated again (copies and memsets).
  virtual bool keeps_allocations() const { return false; }

  // Whether the executable graph's node accepts other addresses: copies and memsets of one row
  // (cuGraphExecMemcpyNodeSetParams and cuGraphExecMemsetNodeSetParams of the driver's manual).
  virtual bool can_move() const { return true; }

  // Whether it executes anything.
  virtual bool does_work() const { return true; }

  GraphNode handle() const { return node_; }

  // The bytes that set_template and set_exec pass.
  const std::vector<unsigned char>& image() const { return image_; }

  // The offset of a word's bytes in a kernel's packed arguments; no value for other nodes.
  virtual std::optional<std::size_t> argument_offset(const unsigned char*) const {
    return std::nullopt;
  }

  // The address of a word's eight bytes; null if the part has no such bytes.
  unsigned char* word_at(std::size_t part, std::size_t offset_bytes) {
    return bytes_at(part, offset_bytes, kWordBytes);
  }

  // The address of `n_bytes` of a part, at any offset; null if the part has no such bytes.
  unsigned char* bytes_at(std::size_t part, std::size_t offset_bytes, std::size_t n_bytes);

  // The host source that the resident keeps for a copy; empty for other nodes.
  std::vector<unsigned char>& table() { return table_; }

  // Whether the executable graph has other bytes, or unknown ones.
  bool is_changed() const { return !is_known_ || image_ != applied_; }
  void forget() { is_known_ = false; }
  void note_applied() {
    applied_ = image_;
    is_known_ = true;
  }

 protected:
  const Driver& driver_;
  GraphNode node_;
  std::vector<unsigned char> image_;  // never resized once made: parameters point into it
  std::vector<unsigned char> table_;

 private:
  std::vector<unsigned char> applied_;
  bool is_known_ = false;
};

// Reads a node. `given_table`: the bytes of a copy's host source, if the caller kept them;
// otherwise they are read from the source, unless its address is to be patched (`source_is_word`).
std::unique_ptr<ResidentNode> make_node(const Driver& driver, GraphNode node,
                                        const std::vector<unsigned char>* given_table,
                                        bool source_is_word);

}  // namespace offload::cuda
