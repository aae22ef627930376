// The refresh by gathering operators.
#include <algorithm>
#include <optional>

#include "ascend/gather_operators.hpp"
#include "ascend/gather_refresh.hpp"

namespace offload::acl {
namespace {

// selected[w] = base[index[w]], then args[w] = selected[w] + 1 * offset[w], as signed integers: in
// two's complement the sums are those of unsigned ones.
class Steps {
 public:
  Steps(const Runtime& runtime, const GatherOperators& operators, const DeviceMemory& bases,
        const DeviceMemory& index, const DeviceMemory& offset, const DeviceMemory& table,
        std::size_t n_words)
      : selected_memory_(runtime, 8 * n_words, "allocating the bases that the refresh selects"),
        base_(runtime, operators, bases, kInt64, bases.size_bytes() / 8),
        index_(runtime, operators, index, kInt32, n_words),
        selected_(runtime, operators, selected_memory_, kInt64, n_words),
        offset_(runtime, operators, offset, kInt64, n_words),
        table_(runtime, operators, table, kInt64, n_words),
        one_(runtime, operators, 1),
        select_(
            runtime, operators, "aclnnIndexSelect",
            [this, &operators](std::uint64_t* n_bytes, OperatorExecutor* executor) {
              return operators.plan_index_select(base_.handle(), 0, index_.handle(),
                                                 selected_.handle(), n_bytes, executor);
            },
            operators.index_select),
        add_(
            runtime, operators, "aclnnAdd",
            [this, &operators](std::uint64_t* n_bytes, OperatorExecutor* executor) {
              return operators.plan_add(selected_.handle(), offset_.handle(), one_.handle(),
                                        table_.handle(), n_bytes, executor);
            },
            operators.add),
        workspace_(runtime, std::max(select_.workspace_bytes(), add_.workspace_bytes()),
                   "allocating the workspace of the refresh") {}

  std::uint64_t n_plans() const { return select_.n_plans() + add_.n_plans(); }

  // On one stream, so that the operators may share their workspace.
  void enqueue(Stream stream) {
    select_.enqueue(workspace_, stream);
    add_.enqueue(workspace_, stream);
  }

 private:
  DeviceMemory selected_memory_;
  OperatorTensor base_;
  OperatorTensor index_;
  OperatorTensor selected_;
  OperatorTensor offset_;
  OperatorTensor table_;
  OperatorScalar one_;
  FixedOperator select_;
  FixedOperator add_;
  DeviceMemory workspace_;
};

class OperatorGather final : public GatherRefresh {
 public:
  OperatorGather(const Runtime& runtime, const TableParts& parts, const GatherOperators& operators)
      : GatherRefresh(runtime, parts, 0),
        bases_(runtime, bases_bytes(), "allocating the base table") {
    if (n_words() == 0) return;  // some operators refuse empty operands
    steps_.emplace(runtime, operators, bases_, index(), offset(), table(), n_words());
    counts_.plans = steps_->n_plans();
  }

 private:
  void gather(Stream stream, Submission& submission) override {
    copy_bases(bases_, stream, submission);
    steps_->enqueue(stream);
    counts_.plans = steps_->n_plans();
  }

  DeviceMemory bases_;
  std::optional<Steps> steps_;
};

}  // namespace

std::unique_ptr<TableRefresh> make_operator_gather(const Runtime& runtime,
                                                   const TableParts& parts) {
  return std::make_unique<OperatorGather>(runtime, parts, GatherOperators::get());
}

}  // namespace offload::acl
