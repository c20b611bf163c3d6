// wkv7 and wkv7_ on CUDA: the choice of the kernel, and the launches.
#include <cstdlib>
#include <tuple>

#include "../csrc/aligned.cuh"
#include "gradients.cuh"
#include "parts.cuh"
#include "states.cuh"
#include "stepwise.cuh"

namespace cog_rwkv {
namespace {

// The inputs, contiguous, as [tokens, heads, 64].
struct Inputs {
  Tensor r, w, k, v, a, b;
};

// Tokens of a sequence from which chunks are faster than steps: by mma, and by wgmma.
constexpr int64_t kChunksFrom = 64, kGroupFrom = 16;

// For measurements: COG_RWKV_CHUNKS=n, instead of kGroupFrom.
int64_t group_from() {
  const char* wanted = std::getenv("COG_RWKV_CHUNKS");
  return wanted ? std::atoll(wanted) : kGroupFrom;
}

int multiprocessors() { return device_attribute("wkv7", cudaDevAttrMultiProcessorCount); }

// What slots, exchanges and the like may take of a multiprocessor's shared memory: all.
int room_for_slots(int consumers) {
  const int all = device_attribute("wkv7", cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return all - 1024 - consumers * static_cast<int>(sizeof(Exchange));
}

// How many blocks share a head, so that all multiprocessors have something to do.
int shares_of(int64_t heads) { return heads * 4 <= multiprocessors() ? 4 : heads * 2 <= multiprocessors() ? 2 : 1; }

// A block takes all of a multiprocessor's shared memory. Where heads are few, several share one.
template <class T>
void launch_chunked(const Launch& launch, const Wkv7<T, void>& work, ScalarType state_type) {
  const int64_t heads = work.batch * work.heads;
  const int shares = shares_of(heads);
  const int consumers = 4 / shares, exchanges = consumers * static_cast<int>(sizeof(Exchange));
  const int producers =
      std::clamp(room_for_slots(consumers) / Slot::kBytes, 1, std::min(kMaxProducers, kMaxPairs - consumers));
  const int threads = (consumers + producers) * 2 * kWarp, bytes = producers * Slot::kBytes + exchanges;
  const auto kernel = wkv7_chunked_kernel<T, sizeof(T) == 4>;
  launch_chained("wkv7", launch.stream, kernel, dim3(static_cast<unsigned>(heads * shares)), dim3(threads), bytes, work,
                 state_type, shares, producers);
}

// The most tokens that a part but the first may have, of a sequence of up to `longest` tokens.
int64_t longest_part(const Parts& parts, int64_t longest) {
  int64_t most = 0;
  for (int count = 2; count <= parts.most; count++) {
    const int64_t tokens = count == parts.most ? longest : std::min(longest, int64_t{count + 1} * kPartTokens);
    most = std::max(most, Parts::begin(tokens, 2, count) - Parts::begin(tokens, 1, count) + kChunk);
  }
  return most;
}

// By wgmma: a block a head, of a long sequence one a part.
template <class T>
void launch_group(const Launch& launch, const Wkv7<T, void>& work, ScalarType state_type, const Tensor& y) {
  const int64_t longest = work.rows != nullptr ? work.tokens : work.each;
  Parts parts{.passed = nullptr,
              .ends = nullptr,
              .most = static_cast<int>(std::clamp<int64_t>(multiprocessors() / work.heads, 1, kMostParts))};
  parts.most = parts.of(longest);
  const int64_t places = work.rows == nullptr ? work.batch : work.tokens / kPartTokens + 1;
  const int64_t floats = places * work.heads * parts.most * 2 * kHead * kHead;
  Tensor room;
  if (parts.most > 1) {
    room = empty_tensor(y, {2 * floats + work.tokens * work.heads * kHead});
    parts.ends = static_cast<float*>(room.mutable_data_ptr());
    parts.passed = reinterpret_cast<Half*>(parts.ends + floats);
  }
  const int most = multiprocessors(), firsts = std::min(parts.units(work, false), most);
  const int others = std::min(parts.units(work, true), most);
  launch_chained("wkv7", launch.stream, wkv7_group_kernel<T>, dim3(static_cast<unsigned>(firsts + others)),
                 dim3(kGroupThreads), kGroupBytes, work, state_type, parts, firsts);
  if (others == 0) return;
  const int64_t pieces = (longest_part(parts, longest) + kJoinTokens - 1) / kJoinTokens;
  const int64_t joins = std::min<int64_t>(parts.units(work, true) * pieces, int64_t{most} * kJoinBlocks);
  launch_chained("wkv7", launch.stream, wkv7_join_kernel<T>, dim3(static_cast<unsigned>(joins)),
                 dim3(kJoinWarps * kWarp), 0, work, state_type, parts, static_cast<int>(pieces));
}

// The length of a sequence alone decides how it is computed, whatever its neighbours: so on the device, where the
// lengths are, unless none can be long. One token each is how a batch decodes.
template <class T>
bool any_chunks(const Wkv7<T, void>& work, int64_t from) {
  const bool packed = work.rows != nullptr;
  bool aligned = true;
  for (const T* in : work.in) aligned = aligned && aligned16(in);
  return aligned && (packed ? work.tokens : work.each) >= from && !(packed && work.tokens == work.batch);
}

template <class T>
void launch_wkv7(const Launch& launch, Wkv7<T, void> work, ScalarType state_type, const Tensor& y) {
  const bool group = sizeof(T) == 2 && has_wgmma("wkv7");
  const int64_t from = group ? group_from() : kChunksFrom;
  const bool chunks = any_chunks(work, from);
  if (chunks) {
    // One packed sequence has all tokens, or its ends make no sense: no need to ask who is shorter.
    work.alone = work.rows != nullptr && work.batch == 1;
    work.shortest = work.alone ? 0 : from, work.longest = INT64_MAX;
    if (group) {
      if constexpr (sizeof(T) == 2) launch_group(launch, work, state_type, y);
    } else {
      launch_chunked(launch, work, state_type);
    }
    if (work.rows == nullptr || work.alone) return;
  }
  work.shortest = 0, work.longest = chunks ? from - 1 : INT64_MAX;
  dispatch_float_or_half(state_type, [&](auto type) {
    using S = typename decltype(type)::type;
    const auto count = static_cast<unsigned>(work.batch * work.heads);
    launch_chained("wkv7", launch.stream, wkv7_kernel<T, S>, dim3(count), dim3(kThreads), 0,
                   work.template with_states<S>());
  });
}

void wkv7_run(const Launch& launch, const Inputs& in, const Tensor& y, const Tensor& state, const Tensor& state_out,
              Layout layout) {
  const int64_t count = layout.batch * layout.heads;
  if (count == 0) {  // no block would write y, which may have tokens all the same
    const size_t bytes = y.numel() * y.element_size();
    if (bytes > 0) check_cuda("wkv7", cudaMemsetAsync(y.mutable_data_ptr(), 0xff, bytes, launch.stream));  // NaN
    return;
  }
  if (count > INT32_MAX / 4) fail("wkv7", "rows: there are more than 2^29 heads to compute");
  layout.aligned = aligned16(state.const_data_ptr(), state_out.const_data_ptr()) && layout.in_stride % 4 == 0 &&
                   layout.out_stride % 4 == 0;
  dispatch_float_or_half(y.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Wkv7<T, void> work{layout,
                             {data<T>(in.r), data<T>(in.w), data<T>(in.k), data<T>(in.v), data<T>(in.a), data<T>(in.b)},
                             mutable_data<T>(y),
                             state.const_data_ptr(),
                             state_out.mutable_data_ptr()};
    launch_wkv7(launch, work, state.scalar_type(), y);
  });
}

std::tuple<Tensor, Tensor> wkv7_cuda(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                                     const Tensor& a, const Tensor& b, const Tensor& state) {
  check_wkv7(r, w, k, v, a, b, state);
  const Launch launch("wkv7", r);
  const Inputs in{as_contiguous(r), as_contiguous(w), as_contiguous(k),
                  as_contiguous(v), as_contiguous(a), as_contiguous(b)};
  const Tensor before = as_contiguous(state);
  Tensor y = empty_tensor(r, r.sizes()), after = empty_tensor(state, state.sizes());
  const int64_t batch = r.size(0), each = r.size(1), heads = r.size(2), stride = heads * kHead * kHead;
  wkv7_run(launch, in, y, before, after,
           {.rows = nullptr,
            .cu_seqlens = nullptr,
            .batch = batch,
            .tokens = batch * each,
            .heads = heads,
            .pool_rows = batch,
            .in_stride = stride,
            .out_stride = stride,
            .each = each});
  return {y, after};
}

}  // namespace

Tensor wkv7_packed_cuda(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                        const Tensor& b, const Tensor& pool, const Tensor& rows, const Tensor& cu_seqlens) {
  const int64_t stride = check_wkv7_packed(r, w, k, v, a, b, pool, rows, cu_seqlens);
  const Launch launch("wkv7_", r);
  const Inputs in{as_contiguous(r), as_contiguous(w), as_contiguous(k),
                  as_contiguous(v), as_contiguous(a), as_contiguous(b)};
  const Tensor row = as_contiguous(rows), start = as_contiguous(cu_seqlens);
  Tensor y = empty_tensor(r, r.sizes());
  wkv7_run(launch, in, y, pool, pool,
           {.rows = data<int64_t>(row),
            .cu_seqlens = data<int64_t>(start),
            .batch = rows.size(0),
            .tokens = r.size(0),
            .heads = pool.size(1),
            .pool_rows = pool.size(0),
            .in_stride = stride,
            .out_stride = stride});
  return y;
}

namespace {

template <class T>
void launch_scans(const Launch& launch, const StateScans<T>& work, int64_t heads) {
  const int shares = shares_of(2 * heads), consumers = kScanConsumers / shares;
  const int producers = std::clamp(room_for_slots(0) / Slot::kBytes, 1, kScanProducers);
  const int threads = (consumers + 2 * producers) * kWarp;
  launch_chained("wkv7_backward", launch.stream, wkv7_scan_kernel<T>, dim3(static_cast<unsigned>(2 * heads * shares)),
                 dim3(threads), producers * Slot::kBytes, work, shares, producers);
}

// What a backward keeps of every chunk until all gradients are there.
struct Kept {
  Tensor states[2], removed[2];

  Kept(const Tensor& like, int64_t chunks) {
    for (Tensor& t : states) t = empty_tensor(like, {chunks, kHead, kHead});
    for (Tensor& t : removed) t = empty_tensor(like, {chunks, kChunk, kHead});
  }
};

template <class T>
void run_backward(const Launch& launch, const Tensor (&in)[6], const Tensor& d_y, const Tensor& state,
                  const Tensor& d_end, const Tensor (&out)[6], const Tensor& d_state) {
  const int64_t batch = d_y.size(0), tokens = d_y.size(1), heads = d_y.size(2), chunks = (tokens + kChunk - 1) / kChunk;
  const Kept kept(state, batch * heads * chunks);
  StateScans<T> scans{.begin = {data<float>(state), data<float>(d_end)},
                      .d_state = mutable_data<float>(d_state),
                      .tokens = tokens,
                      .heads = heads,
                      .chunks = chunks};
  ChunkGradients<T> work{.d_y = data<T>(d_y),
                         .tokens = tokens,
                         .heads = static_cast<uint32_t>(heads),
                         .chunks = static_cast<uint32_t>(chunks)};
  for (int i = 0; i < 6; i++) work.in[i] = data<T>(in[i]), work.out[i] = mutable_data<T>(out[i]);
  for (int i = 0; i < 2; i++) {
    work.states[i] = scans.states[i] = mutable_data<float>(kept.states[i]);
    work.removed[i] = scans.removed[i] = mutable_data<float>(kept.removed[i]);
  }
  const T* const forwards[6] = {work.in[kR], work.in[kW], work.in[kK], work.in[kV], work.in[kA], work.in[kB]};
  const T* const backwards[6] = {nullptr, work.in[kW], work.in[kR], work.d_y, work.in[kB], work.in[kA]};
  std::copy_n(forwards, 6, scans.in[kForwards]), std::copy_n(backwards, 6, scans.in[kBackwards]);
  launch_scans(launch, scans, batch * heads);
  if (chunks == 0) return;
  const auto grid = static_cast<unsigned>(batch * heads * chunks);
  wkv7_gradients_kernel<T><<<grid, kGradientThreads, 0, launch.stream>>>(work);  // one that needs its cache
  launch.check();
}

Gradients wkv7_backward_cuda(const Tensor& d_y, const Tensor& d_end, const Tensor& r, const Tensor& w, const Tensor& k,
                             const Tensor& v, const Tensor& a, const Tensor& b, const Tensor& state) {
  check_wkv7_backward(d_y, d_end, r, w, k, v, a, b, state);
  const Launch launch("wkv7_backward", r);
  const Tensor in[6] = {as_aligned(r), as_aligned(w), as_aligned(k), as_aligned(v), as_aligned(a), as_aligned(b)};
  const Tensor before = as_contiguous(state), dy = as_aligned(d_y), end = as_contiguous(d_end);
  Tensor out[6];
  for (Tensor& t : out) t = empty_tensor(r, r.sizes());
  const Tensor d_state = empty_tensor(state, state.sizes());
  const int64_t count = r.size(0) * r.size(2);
  if (count > INT32_MAX / 8 || r.size(2) > 1 << 21) {
    fail("wkv7_backward", "r: there are more than 2^28 heads to compute, or more than 2^21 of a token");
  }
  if (count > 0) {
    dispatch_float_or_half(r.scalar_type(), [&](auto type) {
      run_backward<typename decltype(type)::type>(launch, in, dy, before, end, out, d_state);
    });
  }
  return {out[kR], out[kW], out[kK], out[kV], out[kA], out[kB], d_state};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) {
  m.impl("wkv7", TORCH_BOX(&wkv7_cuda));
  m.impl("wkv7_", TORCH_BOX(&wkv7_packed_cuda));
  m.impl("wkv7_backward", TORCH_BOX(&wkv7_backward_cuda));
}

}  // namespace cog_rwkv
