// Shared by all native ops: vector types of 16 floats, scratch memory, instruction levels.
//
// Kernels are written once over 16-lane vectors (GNU vector extensions) and compiled for several
// instruction sets, see each_target.inl. Rows of tensors are contiguous; nothing here reads or
// writes beyond the last element of a row.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HR_X86 1
#include <immintrin.h>
#else
#define HR_X86 0
#endif

#define HR_INLINE inline __attribute__((always_inline))
#define HR_EXPORT __attribute__((visibility("default")))

namespace headrace {

// Ascending: a processor of one level runs the code of all lower ones.
enum Level : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };
enum Dtype : int { kFloat32 = 0, kBfloat16 = 1 };
enum Status : int { kOk = 0, kBadIndex = 1, kNoMemory = 2 };

typedef float F16 __attribute__((vector_size(64)));
typedef float F16Any __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint16_t H16Any __attribute__((vector_size(32), aligned(2), may_alias));

struct Bf16 {
  uint16_t bits;
};

HR_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

HR_INLINE float widen(float x) { return x; }
HR_INLINE float widen(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

HR_INLINE void narrow(float x, float* out) { *out = x; }
HR_INLINE void narrow(float x, Bf16* out) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = 0x7fc0;
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

// Hands out 64-byte aligned pieces of one block. Built on address 0 it only measures.
struct Arena {
  uintptr_t at;
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(at);
    at += static_cast<uintptr_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return piece;
  }
};

// One zeroed, aligned block; `data` is null when there is no memory.
struct Block {
  char* data = nullptr;
  Block() = default;
  explicit Block(size_t bytes) { reset(bytes); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  Block(Block&& other) noexcept : data(other.data), raw_(other.raw_) {
    other.data = nullptr;
    other.raw_ = nullptr;
  }
  ~Block() { free(raw_); }
  void reset(size_t bytes) {
    free(raw_);
    raw_ = calloc(bytes + 64, 1);  // fresh pages of a large block cost nothing until touched
    data = raw_ == nullptr
               ? nullptr
               : reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw_) + 63) & ~uintptr_t{63});
  }

 private:
  void* raw_ = nullptr;
};

// Working space that is kept between calls: fresh pages would cost more than a decoding step's
// product, and small ones more than its arithmetic. One per thread that calls.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { free(data_); }

  // At least `bytes` of whatever is left there, aligned to 64; null when there is no memory.
  char* reserve(size_t bytes) {
    if (bytes <= size_) return data_;
    free(data_);
    const size_t unit = bytes < kLargePage ? 64 : kLargePage;
    size_ = (bytes + unit - 1) / unit * unit;
    data_ = static_cast<char*>(aligned_alloc(unit, size_));
    if (data_ == nullptr) size_ = 0;
#ifdef __linux__
    if (data_ != nullptr && unit == kLargePage) madvise(data_, size_, MADV_HUGEPAGE);
#endif
    return data_;
  }

 private:
  static constexpr size_t kLargePage = size_t{2} << 20;
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace headrace
