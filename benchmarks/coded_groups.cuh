// Products of a warp group: codes from registers are the rows, 16 deep; 32 heads in shared memory are the columns.
#include "coded_rows.cuh"

__device__ __forceinline__ void wgmma(float (&d)[16], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
// No swizzle: 8 heads times 8 of what is summed over are 128 bytes; the next 8 of these follow, then the next heads.
__device__ __forceinline__ u64 columns_at(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_products(float (&d)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %16;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "n"(N) : "memory");
}
