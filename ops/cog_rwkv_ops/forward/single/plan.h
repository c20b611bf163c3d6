// One step of one token in one kernel: what it is given, and which rows of which matrix are whose.
//
// A layer has four stages, with a barrier of the grid after each:
//   first   layer norm, shift and mixes by every block for itself; rows of r, k, v and of the low-rank first halves
//   heads   a block a head: second halves, the recurrence, group norm, gate
//   output  rows of the output projection; the residual sum
//   key     layer norm, shift and mix; rows of the keys; and of the values, those rows that these keys need
// Then the head of the model. What the values add up to over the blocks is summed in 64 bits, fixed point: any order of
// the blocks gives the same bytes.
#pragma once

#include <cstdint>

#include "../../csrc/math.h"

namespace cog_rwkv {

constexpr uint32_t kSingleLayers = 64;  // at most: they are the kernel's argument
constexpr int kFirstJobs = 7, kSecondJobs = 4;

// Stages that are products of rows with a vector that all blocks have.
enum Stage : uint32_t { kFirstStage, kOutputStage, kKeyStage, kHeadStage, kStages };

// Which of the six mixes r, w, k, v, a, g each job of the first stage multiplies.
COG_RWKV_BOTH uint32_t mix_of_job(uint32_t job) { return 0x3415320u >> 4 * job & 15; }

struct SingleLayer {
  const float *norm_weight[2], *norm_bias[2], *mix[2];  // of time mix and channel mix: [C], [C], [6 or 1, C]
  const void* first[kFirstJobs];    // receptance, key, value, g1, w1, a1, v1 (not in the first layer): [rows, C]
  const void* second[kSecondJobs];  // g2, w2, a2, v2: [C, rank]
  const float *w0, *a0, *v0, *k_k, *k_a, *r_k, *group_weight, *group_bias;  // [C]
  const void *output, *key, *value_t;                                       // [C, C], [F, C], [F, C]
};

struct Single {
  SingleLayer layers[kSingleLayers];
  const float *norm_weight, *norm_bias;
  const void* head;  // [vocabulary, C]
  const float* x;    // [C]
  float* shift;      // [layers, 2, pool rows, C]
  void* wkv;         // [layers, pool rows, C / 64, 64, 64]
  const int64_t* row;
  float* logits;
  // Between stages. W is the weights' dtype.
  float *stream, *middle;           // [C]: the residual stream before a layer, and before its channel mix
  uint64_t *sums, *bad;             // [copies, C], [1]: what values add up to; not 0 where that is no number
  void *projected, *first, *gated;  // W: r, k, v, first halves [3 C + ranks]; v of the first layer; [C]
  int64_t pool_rows;
  uint32_t head_bytes;  // of a head's state
  uint32_t layer_count, c, ffn, ranks[kSecondJobs], all_ranks;
  uint32_t rows[kStages];     // of a stage: of all its matrices, v1 included
  uint32_t at_once[kStages];  // of a copy
  uint32_t slice;             // channels of which a block writes what all know: a multiple of 4
  bool values_ahead;          // bring all value rows into L2 before it is known which are needed
};

constexpr uint32_t kSlots = 24, kSlotBytes = 8192;  // a multiple of the warps: a slot is always the same warp's
constexpr uint32_t kMostSums = 4;                   // copies of Single::sums
constexpr uint32_t kMostRows = 256;                 // of a block, of the output and of the keys

struct Range {
  uint32_t begin, end;
};

// The rows of one of `parts` that share `rows`.
COG_RWKV_BOTH Range share_of(uint32_t rows, uint32_t part, uint32_t parts) {
  const uint32_t each = rows / parts, more = rows - each * parts;
  const uint32_t begin = part * each + (part < more ? part : more);
  return {begin, begin + each + (part < more ? 1 : 0)};
}

// Rows of a matrix that lie one after the other, in copies of `at_once`.
struct Part {
  const unsigned char* from;
  uint32_t rows, row_bytes, at_once;

  COG_RWKV_BOTH uint32_t copies() const { return (rows + at_once - 1) / at_once; }
};

COG_RWKV_BOTH const unsigned char* bytes_at(const void* from, uint64_t offset) {
  return static_cast<const unsigned char*>(from) + offset;
}

// The matrices of a stage.
COG_RWKV_BOTH uint32_t jobs_of(uint32_t stage, uint32_t layer) {
  return stage != kFirstStage ? 1 : layer == 0 ? kFirstJobs - 1 : kFirstJobs;
}
COG_RWKV_BOTH uint32_t job_rows(const Single& p, uint32_t stage, uint32_t job) {
  return stage != kFirstStage ? p.rows[stage] : job < 3 ? p.c : p.ranks[job - 3];
}
COG_RWKV_BOTH const void* job_weight(const Single& p, uint32_t stage, uint32_t layer, uint32_t job) {
  return stage == kHeadStage     ? p.head
         : stage == kOutputStage ? p.layers[layer].output
         : stage == kKeyStage    ? p.layers[layer].key
                                 : p.layers[layer].first[job];
}

// A block's rows of one matrix of a stage. `row`: the number of the first among all rows of the stage.
struct StagePart {
  Part part;
  uint32_t copies, job, row;
};

// Calls f(StagePart) for each matrix of a stage of which a block has rows.
template <class F>
COG_RWKV_BOTH void each_part(const Single& p, uint32_t stage, uint32_t layer, uint32_t block, uint32_t blocks, F f) {
  const uint32_t left_out = stage == kFirstStage && layer == 0 ? p.ranks[kSecondJobs - 1] : 0;
  const Range mine = share_of(p.rows[stage] - left_out, block, blocks);
  const uint32_t jobs = jobs_of(stage, layer), row_bytes = p.c * 2;
  uint32_t start = 0;
#pragma unroll 1
  for (uint32_t job = 0; job < jobs; job++) {
    const uint32_t stop = start + job_rows(p, stage, job);
    const uint32_t begin = mine.begin > start ? mine.begin : start, end = mine.end < stop ? mine.end : stop;
    if (begin < end) {
      const uint64_t offset = uint64_t{begin - start} * row_bytes;
      const Part part{bytes_at(job_weight(p, stage, layer, job), offset), end - begin, row_bytes, p.at_once[stage]};
      f(StagePart{part, part.copies(), job, begin});
    }
    start = stop;
  }
}

// The second half of a low-rank projection, for the 64 channels of a head.
COG_RWKV_BOTH Part second_part(const Single& p, uint32_t layer, uint32_t job, uint32_t head) {
  // Of small models there is room in the ring to give every warp some.
  const uint32_t row_bytes = p.ranks[job] * 2, room = kSlotBytes / row_bytes, most = p.c <= 2048 ? 16 : 64;
  return {bytes_at(p.layers[layer].second[job], uint64_t{head} * 64 * row_bytes), 64, row_bytes,
          room < most ? room : most};
}

// The stages follow each other as the weights do: three a layer, and the head of the model.
struct Place {
  uint32_t stage, layer;
};
COG_RWKV_BOTH uint32_t places(const Single& p) { return 3 * p.layer_count + 1; }
COG_RWKV_BOTH Place place_at(const Single& p, uint32_t i) {
  return i == 3 * p.layer_count ? Place{kHeadStage, p.layer_count} : Place{i % 3, i / 3};
}

// In the first layer values are not mixed.
COG_RWKV_BOTH uint32_t second_jobs(uint32_t layer) { return layer == 0 ? kSecondJobs - 1 : kSecondJobs; }

}  // namespace cog_rwkv
