// sample_: the checks of its arguments, and its parameters, the same on every device.
#pragma once

#include "../csrc/math.h"
#include "../csrc/packed.h"
#include "../csrc/tensor.h"

namespace cog_rwkv::sampling {

constexpr const char* kName = "sample_";
constexpr int64_t kMostIds = 1 << 18;   // as many weights of 2^44 add up below 2^63
constexpr int64_t kMostRows = 1 << 24;  // of a batch, so that a grid has room

// Columns of the tables.
enum Number { kTemperature, kPresence, kFrequency, kDecay, kTopP, kNumbers };
enum Integer { kGreedy, kTopK, kKey, kDraws, kIntegers };

// Distances between the rows of what is written in place.
struct Strides {
  int64_t integers, counts;
};

inline Strides check_sample(const Tensor& logits, const Tensor& rows, const Tensor& allowed, const Tensor& numbers,
                            const Tensor& integers, const Tensor& counts) {
  check_float_or_half(kName, "logits", logits);
  check_dim(kName, "logits", logits, 2, "[B, V]");
  const int64_t batch = logits.size(0), vocab = logits.size(1), pool = counts.dim() > 0 ? counts.size(0) : 0;
  if (vocab < 1 || vocab > kMostIds || batch > kMostRows) {
    fail(kName, "logits has shape " + shape_text(logits) + "; B must be at most " + std::to_string(kMostRows) +
                    " and V from 1 to " + std::to_string(kMostIds));
  }
  check_dtype(kName, "rows", rows, {ScalarType::Long});
  check_device(kName, "rows", rows, "logits", logits);
  check_shape(kName, "rows", rows, {batch}, "[B] with B as in logits");
  check_dtype(kName, "allowed", allowed, {ScalarType::Bool});
  check_device(kName, "allowed", allowed, "logits", logits);
  check_shape(kName, "allowed", allowed, {vocab}, "[V] with V as in logits");
  check_dtype(kName, "counts", counts, {ScalarType::Float});
  check_device(kName, "counts", counts, "logits", logits);
  check_shape(kName, "counts", counts, {pool, vocab}, "[R, V] with V as in logits");
  check_dtype(kName, "numbers", numbers, {ScalarType::Float});
  check_device(kName, "numbers", numbers, "logits", logits);
  check_shape(kName, "numbers", numbers, {pool, kNumbers}, "[R, 5] with R as in counts");
  check_dtype(kName, "integers", integers, {ScalarType::Long});
  check_device(kName, "integers", integers, "logits", logits);
  check_shape(kName, "integers", integers, {pool, kIntegers}, "[R, 4] with R as in counts");
  return {check_pool(kName, "integers", integers), check_pool(kName, "counts", counts)};
}

// One row's parameters, taken from the tables.
struct Parameters {
  float temperature, presence, frequency, decay;
  double top_p;
  bool greedy, counted;  // counted: penalties depend on earlier draws
  int64_t top_k, key, draws;

  COG_RWKV_BOTH Parameters(const float* number, const int64_t* integer)
      : temperature(number[kTemperature]),
        presence(number[kPresence]),
        frequency(number[kFrequency]),
        decay(number[kDecay]),
        top_p(number[kTopP]),
        greedy(integer[kGreedy] != 0),
        counted(presence != 0.0f || frequency != 0.0f),
        top_k(integer[kTopK]),
        key(integer[kKey]),
        draws(integer[kDraws]) {}
};

}  // namespace cog_rwkv::sampling
