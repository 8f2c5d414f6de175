// Decode attention over coded rows: one new token of 32 query heads against a row per place for keys and one for values.
//
// A row holds codes of 8, 4 and 2 bits, packed in words of 16. A tile is 64 places. Words lie as the tensor cores take
// them, two neighbours of the reduction in one register: keys pair coefficients, values pair places. So a mask (and a
// shift for every other field) makes numbers of two codes at once: what is left of a word, read as a number of 16 bits,
// has no leading one and is code * 2**(place - 24) exactly. One fused multiply-add applies the scale and takes off the
// middle. `score_codes` writes weights relative to the highest score of a tile, `sum_codes` reads them with values,
// `combine` joins splits. Scales of 64 coefficients are numbers of 16 bits, times 256. Needs compute capability 9.0.
typedef unsigned int u32;
typedef unsigned long long u64;
#define WARPS 12  // that score places
#define RING 4    // chunks of a warp in shared memory
#define STAGES 3  // tiles of 64 places in shared memory, of the kernel that sums
#define NEVER __int_as_float(0x7f800000)
#define SLOT 2304  // bytes of a chunk and its scales
#define NT 8  // groups of 8 places that a warp scores together

__device__ __forceinline__ void mma(float* c, uint4 a, u32 x, u32 y) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(x), "r"(y));
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
extern __shared__ __align__(128) unsigned char room[];
__device__ __forceinline__ uint4 get16(u32 at) { return *(const uint4*)(room + at); }
__device__ __forceinline__ uint2 get8(u32 at) { return *(const uint2*)(room + at); }
__device__ __forceinline__ u32 get4(u32 at) { return *(const u32*)(room + at); }

// A number of 16 bits as a pattern: value = n * 2**e, normal range, positive n < 2048.
__host__ __device__ constexpr u32 half_of(int n2, int e) {  // n2 * 2**(e - 1)
  int k = 0;
  while ((n2 >> (k + 1)) > 0) k++;
  int exponent = k + e - 1 + 15;
  u32 one = (u32)(exponent << 10) | (u32)((k <= 10 ? n2 << (10 - k) : n2 >> (k - 10)) & 1023);
  return one | one << 16;
}
template <int BITS>
struct Fields {
  static constexpr int each = 16 / BITS, per = 10 / BITS;
  static constexpr __host__ __device__ int place(int f) { return f % per * BITS; }
  static constexpr __host__ __device__ int shift(int f) { return f / per * per * BITS; }
  static constexpr __host__ __device__ u32 mask(int f) { return (((1u << BITS) - 1) << place(f)) * 0x10001u; }
  static constexpr __host__ __device__ u32 middle(int f) {  // -(2**BITS - 1) / 2 * 2**(place - 14)
    return half_of((1 << BITS) - 1, place(f) - 14) | 0x80008000u;
  }
};
template <int BITS>
__device__ __forceinline__ u32 field(u32 word, int f) {
  return (word >> Fields<BITS>::shift(f)) & Fields<BITS>::mask(f);
}
#define TINY 0x14001400u  // 2**-10, twice
