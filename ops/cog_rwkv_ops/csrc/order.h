// Many small rows all over a table in host memory, in the order in which they lie there.
//
// The GPU finds about 100 million pages of host memory a second, whatever it reads there: of small rows that lie
// anywhere, that and not the bytes takes the time. In the order of the table many rows follow each other in one page.
#pragma once

#include <optional>

#include "cuda.cuh"
#include "table.h"

namespace cog_rwkv {

// A permutation of 0 to n - 1, uint32, in which the rows that `ids` (contiguous, on the GPU) names lie by stretches of
// a table in host memory, and in any order within a stretch. Ids without a row stand at either end. None where the
// rows are so few or so wide that it would not pay.
class RowOrder {
 public:
  RowOrder(const char* op, const Launch& launch, const Table& table, const Tensor& ids, bool on_host);

  // Null for none. On the GPU, for the stream of the launch, as long as this lives.
  const uint32_t* places() const { return places_; }

 private:
  std::optional<Tensor> memory_;
  const uint32_t* places_ = nullptr;
};

}  // namespace cog_rwkv
