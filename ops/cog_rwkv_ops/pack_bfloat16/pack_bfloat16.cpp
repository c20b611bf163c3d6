// pack_bfloat16 and unpack_bfloat16: schemas and CPU kernels. The layout is that of csrc/packed_weight.h.
#include <atomic>
#include <cstring>

#include "../csrc/matmul.h"
#include "../csrc/packed_weight.h"

#define COG_RWKV_KERNELS "../csrc/matmul_kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/floats.h"

namespace cog_rwkv {
namespace {

int exponent_of(uint16_t bits) { return bits >> 8 & 0x7f; }  // the seven high bits

// Whether the row fits; what is written does not count where it does not.
bool pack_row(const uint16_t* row, int64_t k, uint8_t* out) {
  PackedTail tail{};
  int largest = 0;
  for (int64_t i = 0; i < k; i++) largest = std::max(largest, exponent_of(row[i]));
  tail.base = static_cast<uint8_t>(std::max(0, largest - 7));
  std::memset(out, 0, packed_row_bytes(k));
  for (int64_t i = 0; i < k; i++) {
    uint8_t* block = out + i / kPackedBlock * kPackedBlockBytes;
    const int64_t at = i % kPackedBlock, lane = at % 16;
    const int code = exponent_of(row[i]) - tail.base;
    if (code < 0) {
      if (tail.patches == kMostPatches) return false;
      tail.patch[tail.patches++] = {static_cast<uint16_t>(i), row[i]};
      tail.blocks |= static_cast<uint16_t>(1 << i / kPackedBlock % 16);
      continue;
    }
    block[64 * (at / 64) + 4 * lane + at % 64 / 16] = static_cast<uint8_t>(row[i]);
    const int nibble = (row[i] >> 15) << 3 | code;
    block[128 + 4 * lane + at / 32] |= static_cast<uint8_t>(nibble << (at / 16 % 2 * 4));
  }
  std::memcpy(out + k / kPackedBlock * kPackedBlockBytes, &tail, sizeof(tail));
  return true;
}

void check_pack(const Tensor& weight) {
  constexpr const char* op = "pack_bfloat16";
  check_dtype(op, "weight", weight, {ScalarType::BFloat16});
  check_dim(op, "weight", weight, 2, "[M, K]");
  if (packed_row_bytes(weight.size(1)) == 0) {
    fail(op, "weight has shape " + shape_text(weight) + "; K must be a multiple of 128, at most 65536");
  }
}

std::tuple<Tensor, Tensor> pack_bfloat16_cpu(const Tensor& weight) {
  check_pack(weight);
  const Tensor rows = as_contiguous(weight);
  const int64_t m = weight.size(0), k = weight.size(1), bytes = packed_row_bytes(k);
  Tensor out = torch::stable::new_empty(weight, {m, bytes}, ScalarType::Byte);
  Tensor fits = torch::stable::new_empty(weight, {}, ScalarType::Bool);
  const auto* from = static_cast<const uint16_t*>(rows.const_data_ptr());
  std::atomic<bool> all{true};
  parallel_for(m, 1 + 8192 / k, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      if (!pack_row(from + i * k, k, mutable_data<uint8_t>(out) + i * bytes)) all = false;
    }
  });
  *mutable_data<bool>(fits) = all;
  return {out, fits};
}

Tensor unpack_bfloat16_cpu(const Tensor& packed) {
  constexpr const char* op = "unpack_bfloat16";
  check_dtype(op, "packed", packed, {ScalarType::Byte});
  check_dim(op, "packed", packed, 2, "[M, 3 K / 2 + 32]");
  const int64_t m = packed.size(0), k = (packed.size(1) - static_cast<int64_t>(sizeof(PackedTail))) / 3 * 2;
  if (packed_row_bytes(k) == 0 || packed_row_bytes(k) != packed.size(1)) {
    fail(op, "packed has shape " + shape_text(packed) + "; it must be [M, 3 K / 2 + 32] with K a multiple of 128");
  }
  const Tensor rows = as_contiguous(packed);
  Tensor out = torch::stable::new_empty(packed, {m, k}, ScalarType::BFloat16);
  const auto kernel = COG_RWKV_KERNEL(unpack_row);
  parallel_for(m, 1 + 8192 / (k + 1), [&](int64_t begin, int64_t end) {
    const auto floats = scratch(k);
    for (int64_t i = begin; i < end; i++) {
      kernel(data<uint8_t>(rows) + i * packed.size(1), k, floats.get());
      auto* to = static_cast<uint16_t*>(out.mutable_data_ptr()) + i * k;
      for (int64_t j = 0; j < k; j++) {  // their upper halves as they are: rounding would change a NaN
        uint32_t bits;
        std::memcpy(&bits, floats.get() + j, sizeof(bits));
        to[j] = static_cast<uint16_t>(bits >> 16);
      }
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("pack_bfloat16(Tensor weight) -> (Tensor, Tensor)");
  m.def("unpack_bfloat16(Tensor packed) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("pack_bfloat16", TORCH_BOX(&pack_bfloat16_cpu));
  m.impl("unpack_bfloat16", TORCH_BOX(&unpack_bfloat16_cpu));
}

}  // namespace cog_rwkv
