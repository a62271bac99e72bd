// Reading selections [S, K] of key rows, and summing gradients of gathered rows reproducibly.
#pragma once

#include <algorithm>
#include <vector>

#include "common.h"

namespace headrace {

// Copies the valid entries of one selection (all but -1). Entries outside [0, T) set `bad`.
inline int64_t compact(const int32_t* indices, int64_t K, int64_t T, int32_t* rows,
                       int32_t* places, bool& bad) {
  int64_t n = 0;
  for (int64_t i = 0; i < K; i++) {
    const int32_t row = indices[i];
    if (row == -1) continue;
    if (row < 0 || row >= T) {
      bad = true;
      continue;
    }
    rows[n] = row;
    places[n++] = static_cast<int32_t>(i);
  }
  return n;
}

// A fixed split of the queries over workers. Each worker sums gradients of key rows in fp32 memory
// of its own, over the range of rows its queries touch; `finish` adds the workers in order. So the
// result depends on the number of workers and on nothing else.
class SplitSums {
 public:
  // Contiguous shares with about equal numbers of valid entries.
  SplitSums(const int32_t* indices, int64_t S, int64_t K, int64_t T, int64_t width, int threads)
      : T_(T), stride_(round_up(width, 16)) {
    std::vector<int64_t> work(S);
    std::vector<int32_t> low(S), high(S);
    bool bad = false;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(|| : bad)
    for (int64_t s = 0; s < S; s++) {
      int32_t first = INT32_MAX, last = -1;
      int64_t n = 0;
      for (int64_t i = 0; i < K; i++) {
        const int32_t row = indices[s * K + i];
        if (row == -1) continue;
        bad = bad || row < 0 || row >= T;
        first = std::min(first, row);
        last = std::max(last, row);
        n++;
      }
      work[s] = n;
      low[s] = first;
      high[s] = last;
    }
    bad_ = bad;
    if (bad) return;
    int64_t total = 0;
    for (int64_t n : work) total += n + 8;
    // Memory is bounded: with very many threads and keys, fewer of them share the work.
    const int64_t bytes = std::max<int64_t>(1, T * stride_ * 4);
    int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, kMemory / bytes));
    workers = std::max<int64_t>(1, std::min(workers, S));
    shares_.resize(workers);
    int64_t s = 0, done = 0;
    for (int64_t w = 0; w < workers; w++) {
      Share& share = shares_[w];
      share.begin = s;
      share.first = INT32_MAX;
      share.last = -1;
      while (s < S && (w + 1 == workers || done < total * (w + 1) / workers)) {
        share.first = std::min<int64_t>(share.first, low[s]);
        share.last = std::max<int64_t>(share.last, high[s]);
        done += work[s++] + 8;
      }
      share.end = s;
    }
  }

  struct Share {
    int64_t begin, end;   // queries
    int64_t first, last;  // key rows touched; none when last < first
    Block memory;
    float* sums() const { return reinterpret_cast<float*>(memory.data); }
  };

  bool bad() const { return bad_; }
  int workers() const { return static_cast<int>(shares_.size()); }
  int64_t stride() const { return stride_; }
  // False when there is no memory.
  bool allocate(int64_t w) {
    Share& share = shares_[w];
    if (share.last < share.first) share.first = 0;
    share.memory.reset((share.last - share.first + 1) * stride_ * sizeof(float));
    return share.memory.data != nullptr;
  }
  const Share& share(int64_t w) const { return shares_[w]; }

  // out [T, width] = the sum over workers, in their order.
  template <class Out>
  void finish(Out* out, int64_t width, int threads) const {
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> sum(width);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < T_; row++) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (const Share& share : shares_) {
          if (row < share.first || row > share.last) continue;
          const float* part = share.sums() + (row - share.first) * stride_;
          for (int64_t c = 0; c < width; c++) sum[c] += part[c];
        }
        for (int64_t c = 0; c < width; c++) narrow(sum[c], out + row * width + c);
      }
    }
  }

 private:
  static constexpr int64_t kMemory = int64_t{4} << 30;
  int64_t T_, stride_;
  bool bad_ = false;
  std::vector<Share> shares_;
};

}  // namespace headrace
