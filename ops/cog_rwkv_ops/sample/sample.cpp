// sample_: schema and CPU kernel.
#include "sample.h"

#include <memory>

#include "../csrc/cpu.h"
#include "cut.h"

namespace cog_rwkv {
namespace {

using namespace sampling;

constexpr int64_t kChunk = 1024;  // ids of which a sum, or whether one is among them, is asked before they are walked

// One row on its way to an id. The buffers serve one row after the other.
struct Row {
  int64_t n;
  std::unique_ptr<uint32_t[]> words;          // [n], the bits of the values, then distances from the largest
  std::unique_ptr<uint64_t[]> weights, sums;  // [n], [kBins]
  std::unique_ptr<uint16_t[]> bins;           // [n], of the first cut
  std::unique_ptr<int32_t[]> within;          // [n], the ids of its bin that was found
  float top = 0;                              // the largest value
  bool finite = true;

  explicit Row(int64_t size)
      : n(size),
        words(new uint32_t[size]),
        weights(new uint64_t[size]),
        sums(new uint64_t[kBins]),
        bins(new uint16_t[size]),
        within(new int32_t[size]) {}

  template <class T, class Value>
  COG_RWKV_INLINE void take(const T* logits, const bool* allowed, const Value& value) {
    uint32_t bad = 0, *const word = words.get();
    for (int64_t i = 0, size = n; i < size; i++) {
      const float logit = static_cast<float>(logits[i]), v = value(logit, i);
      bad |= (bits_of(logit) & kInfinity) == kInfinity ? 1 : 0;
      const uint32_t may = -static_cast<uint32_t>(allowed[i]);
      word[i] = (bits_of(v) & may) | ((kInfinity | 0x80000000) & ~may);
    }
    finite = bad == 0;
  }

  // The first id of the largest value, which becomes `top`; of a row that is not finite some id that may be drawn.
  COG_RWKV_INLINE int64_t likeliest(const bool* allowed) {
    const uint32_t* const word = words.get();
    int32_t most = order(word[0]);
    for (int64_t i = 1, size = n; i < size; i++) most = order(word[i]) > most ? order(word[i]) : most;
    const uint32_t sought = order(most);
    top = float_of(sought);
    finite = finite && sought != (kInfinity | 0x80000000);  // which is where nothing may be drawn
    if (!finite) return some(allowed);
    int64_t i = 0;
    for (; i + kChunk < n; i += kChunk) {
      uint32_t found = 0;
      for (int64_t j = i; j < i + kChunk; j++) found |= word[j] == sought ? 1 : 0;
      if (found) break;
    }
    while (word[i] != sought) i++;
    return i;
  }

  // Numbers in the order of the floats that have these bits; of its own result it gives back the bits.
  static COG_RWKV_INLINE int32_t order(uint32_t bits) {
    return static_cast<int32_t>(bits) ^ ((static_cast<int32_t>(bits) >> 31) & 0x7fffffff);
  }

  int64_t some(const bool* allowed) const {
    int64_t best = 0;
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t now = order_of(float_of(words[i]), allowed[i]);
      if (now > most) most = now, best = i;
    }
    return best;
  }

  COG_RWKV_INLINE void weigh(float temperature) {
    const float largest = top;
    uint32_t* const word = words.get();
    uint64_t* const out = weights.get();
    for (int64_t i = 0, size = n; i < size; i++) {
      word[i] = distance(float_of(word[i]), largest);
      out[i] = weight(word[i], temperature);
    }
  }

  COG_RWKV_INLINE uint64_t kept(int64_t begin, int64_t end, uint32_t limit) const {
    const uint32_t* const word = words.get();
    const uint64_t* const amount = weights.get();
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; i++) sum += amount[i] & -uint64_t{word[i] <= limit};
    return sum;
  }

  // The least distance up to which amount(i) add up to `wanted`, which is at most the sum up to `limit`.
  template <class Amount>
  COG_RWKV_INLINE uint32_t threshold(uint32_t limit, float temperature, uint64_t wanted, const Amount& amount) {
    Cut cut = Cut::first(limit, temperature);
    const uint32_t* const word = words.get();
    uint16_t* const bin = bins.get();
    for (int64_t i = 0, size = n; i < size; i++) {
      bin[i] = word[i] <= limit ? static_cast<uint16_t>(cut.bin(word[i])) : kBins - 1;  // its sum is never asked for
    }
    std::fill_n(sums.get(), kBins, 0);
    for (int64_t i = 0, size = n; i < size; i++) sums[bin[i]] += amount(i);
    const int found = find(wanted);
    cut = cut.inside(found);
    int64_t left = 0;
    for (int64_t i = 0, size = n; i < size; i++) {
      within[left] = static_cast<int32_t>(i);
      left += bin[i] == found ? 1 : 0;
    }
    while (cut.low < cut.high) {
      std::fill_n(sums.get(), kBins, 0);
      for (int64_t k = 0; k < left; k++) {
        const int64_t i = within[k];
        if (cut.has(words[i])) sums[cut.bin(words[i])] += amount(i);
      }
      cut = cut.inside(find(wanted));
    }
    return cut.low;
  }

  // The first bin that reaches `wanted`, of which what lies before it is taken.
  COG_RWKV_INLINE int find(uint64_t& wanted) const {
    int bin = 0;
    while (bin < kBins - 1 && sums[bin] < wanted) wanted -= sums[bin++];
    return bin;
  }

  // The distance of the least likely id that may be drawn.
  COG_RWKV_INLINE uint32_t limit_of(const Parameters& p) {
    uint32_t limit = kInfinity;
    if (p.top_k > 0 && p.top_k < n) {
      limit = threshold(limit, p.temperature, p.top_k, [](int64_t) { return uint64_t{1}; });
    }
    const uint64_t total = p.top_p < 1.0 ? kept(0, n, limit) : 0;
    if (total == 0) return limit;
    return threshold(limit, p.temperature, wanted_share(p.top_p, total), [&](int64_t i) { return weights[i]; });
  }

  // By the inverse of the cumulated weights; -1 where nothing weighs anything.
  COG_RWKV_INLINE int64_t draw(const Parameters& p) {
    weigh(p.temperature);
    const uint32_t limit = limit_of(p);
    const uint64_t total = kept(0, n, limit);
    if (total == 0) return -1;
    uint64_t left = position(p.key, p.draws, total);
    int64_t i = 0;
    for (uint64_t sum; i + kChunk < n && left >= (sum = kept(i, i + kChunk, limit)); i += kChunk) left -= sum;
    for (uint64_t sum; left >= (sum = kept(i, i + 1, limit)); i++) left -= sum;
    return i;
  }

  template <class T>
  COG_RWKV_INLINE int64_t sample(const T* logits, const bool* allowed, const Parameters& p, float* counts) {
    if (p.counted) {
      take(logits, allowed, [&](float x, int64_t i) { return penalised(x, counts[i], p.presence, p.frequency); });
    } else {
      take(logits, allowed, [](float x, int64_t) { return plus(x, 0.0f); });
    }
    const int64_t first = likeliest(allowed), drawn = p.greedy || !finite ? -1 : draw(p);
    const int64_t id = drawn < 0 ? first : drawn;
    if (p.counted) {
      for (int64_t i = 0; i < n; i++) counts[i] = times(counts[i], p.decay);
      counts[id] = plus(counts[id], 1.0f);
    }
    return id;
  }
};

void check_rows(const int64_t* rows, int64_t batch, int64_t pool) {
  std::vector<int64_t> sorted(rows, rows + batch);
  std::sort(sorted.begin(), sorted.end());
  for (int64_t i = 0; i < batch; i++) {
    const int64_t row = sorted[i];
    if (row < 0 || row >= pool) {
      fail(kName, "rows has " + std::to_string(row) + "; the tables have rows 0 to " + std::to_string(pool - 1));
    }
    if (i > 0 && row == sorted[i - 1]) fail(kName, "rows has " + std::to_string(row) + " twice; each must be another");
  }
}

std::tuple<Tensor, Tensor> sample_cpu(const Tensor& logits, const Tensor& rows, const Tensor& allowed,
                                      const Tensor& numbers, const Tensor& integers, const Tensor& counts) {
  const Strides strides = check_sample(logits, rows, allowed, numbers, integers, counts);
  const Tensor given = as_contiguous(logits), index = as_contiguous(rows), may = as_contiguous(allowed),
               number = as_contiguous(numbers);
  const int64_t batch = logits.size(0), n = logits.size(1);
  const auto* row_of = data<int64_t>(index);
  check_rows(row_of, batch, counts.size(0));
  Tensor ids = empty_tensor(rows, {batch}), finite = empty_tensor(allowed, {batch});
  dispatch_float_or_half(logits.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(batch, 1 + 4096 / n, [&](int64_t begin, int64_t end) {
      Row row(n);
      for (int64_t b = begin; b < end; b++) {
        int64_t* integer = mutable_data<int64_t>(integers) + row_of[b] * strides.integers;
        float* count = mutable_data<float>(counts) + row_of[b] * strides.counts;
        const Parameters p(data<float>(number) + row_of[b] * kNumbers, integer);
        int64_t id = 0;
        best_cpu([&] { id = row.sample(data<T>(given) + b * n, data<bool>(may), p, count); });
        mutable_data<int64_t>(ids)[b] = id;
        mutable_data<bool>(finite)[b] = row.finite;
        integer[kDraws]++;
      }
    });
  });
  return {ids, finite};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def(
      "sample_(Tensor logits, Tensor rows, Tensor allowed, Tensor numbers, Tensor(a!) integers, Tensor(b!) counts) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("sample_", TORCH_BOX(&sample_cpu)); }

}  // namespace cog_rwkv
