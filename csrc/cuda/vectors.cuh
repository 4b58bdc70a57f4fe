// Loads and stores of 1 to 16 bytes that do not stay in L1, as every byte is touched once. They are predicated and
// not branched around, so that many are issued back to back: a branch between two loads would let the first one's
// address arithmetic delay the second. A load that is switched off leaves its value undefined.
#pragma once

#include <cstdint>

namespace kvxfer::cuda {

__device__ __forceinline__ void load_if(bool wanted, std::uint64_t address, uint4& value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address), "r"(static_cast<std::uint32_t>(wanted)));
}

__device__ __forceinline__ void store_if(bool wanted, std::uint64_t address, const uint4& value) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.L1::no_allocate.v4.u32 [%4], {%0, %1, %2, %3}; }" ::"r"(
          value.x),
      "r"(value.y), "r"(value.z), "r"(value.w), "l"(address), "r"(static_cast<std::uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void load_if(bool wanted, std::uint64_t address, uint2& value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2]; }"
               : "=r"(value.x), "=r"(value.y)
               : "l"(address), "r"(static_cast<std::uint32_t>(wanted)));
}

__device__ __forceinline__ void store_if(bool wanted, std::uint64_t address, const uint2& value) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.L1::no_allocate.v2.u32 [%2], {%0, %1}; }" ::"r"(value.x),
      "r"(value.y), "l"(address), "r"(static_cast<std::uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void load_if(bool wanted, std::uint64_t address, std::uint32_t& value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.L1::no_allocate.u32 %0, [%1]; }"
               : "=r"(value)
               : "l"(address), "r"(static_cast<std::uint32_t>(wanted)));
}

__device__ __forceinline__ void store_if(bool wanted, std::uint64_t address, std::uint32_t value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.L1::no_allocate.u32 [%1], %0; }" ::"r"(value),
               "l"(address), "r"(static_cast<std::uint32_t>(wanted))
               : "memory");
}

__device__ __forceinline__ void load_if(bool wanted, std::uint64_t address, std::uint16_t& value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.L1::no_allocate.u16 %0, [%1]; }"
               : "=h"(value)
               : "l"(address), "r"(static_cast<std::uint32_t>(wanted)));
}

__device__ __forceinline__ void store_if(bool wanted, std::uint64_t address, std::uint16_t value) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.L1::no_allocate.u16 [%1], %0; }" ::"h"(value),
               "l"(address), "r"(static_cast<std::uint32_t>(wanted))
               : "memory");
}

// PTX has no 8-bit registers: a byte travels in a 32-bit one.
struct Byte {
  std::uint32_t value;
};

__device__ __forceinline__ void load_if(bool wanted, std::uint64_t address, Byte& byte) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.L1::no_allocate.u8 %0, [%1]; }"
               : "=r"(byte.value)
               : "l"(address), "r"(static_cast<std::uint32_t>(wanted)));
}

__device__ __forceinline__ void store_if(bool wanted, std::uint64_t address, const Byte& byte) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.L1::no_allocate.u8 [%1], %0; }" ::"r"(byte.value),
               "l"(address), "r"(static_cast<std::uint32_t>(wanted))
               : "memory");
}

template <class Vector>
constexpr std::uint32_t kVectorBytes = sizeof(Vector);
template <>
constexpr std::uint32_t kVectorBytes<Byte> = 1;

}  // namespace kvxfer::cuda
