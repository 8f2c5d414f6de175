#include "coded_rows.cuh"

// ---- sums ---------------------------------------------------------------------------------------------------
// A stage: weights 4 KB, words of all warps, scales (groups, 64) of 16 bits, tops (32 floats)
template <int BITS>
__device__ __forceinline__ void sum_tile(float (&acc)[8][2][4], u32 p, u32 words, u32 scales, const u32 (&fade)[2][2], int lane) {
  using F = Fields<BITS>;
  constexpr int U = 8 / F::each, REGS = U * 2;
#pragma unroll
  for (int kk = 0; kk < 4; kk++) {
    uint4 a[2];
#pragma unroll
    for (int mt = 0; mt < 2; mt++) {
      a[mt] = get16(p + ((kk * 2 + mt) * 32 + lane) * 16);
      a[mt].x = mul2(a[mt].x, fade[mt][0]); a[mt].y = mul2(a[mt].y, fade[mt][1]);
      a[mt].z = mul2(a[mt].z, fade[mt][0]); a[mt].w = mul2(a[mt].w, fade[mt][1]);
    }
    u32 w[REGS];
    if (REGS == 2) {
      u32 at = words + ((kk / 2) * 32 + lane) * 16 + (kk % 2) * 8;
      uint2 x = get8(at);
      w[0] = x.x; w[1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < REGS / 4; i++) {
        uint4 x = get16(words + ((kk * (REGS / 4) + i) * 32 + lane) * 16);
        w[4 * i] = x.x; w[4 * i + 1] = x.y; w[4 * i + 2] = x.z; w[4 * i + 3] = x.w;
      }
    }
    u32 m0 = get4(scales + kk * 32 + (lane & 3) * 4), m1 = get4(scales + kk * 32 + 16 + (lane & 3) * 4);
    u32 s0 = mul2(m0, TINY), s1 = mul2(m1, TINY);
#pragma unroll
    for (int f = 0; f < F::each; f++) {
      u32 c0 = mul2(s0, F::middle(f)), c1 = mul2(s1, F::middle(f));
#pragma unroll
      for (int u = 0; u < U; u++) {
        u32 x = fma2(field<BITS>(w[2 * u], f), m0, c0), y = fma2(field<BITS>(w[2 * u + 1], f), m1, c1);
        mma(acc[u * F::each + f][0], a[0], x, y);
        mma(acc[u * F::each + f][1], a[1], x, y);
      }
    }
  }
}

__device__ __forceinline__ void bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
struct Source {  // what a stage is filled from, at place 0 of a text
  const unsigned char *p, *w, *s, *t;
  u64 w_tile, s_tile;
  u32 w_bytes, s_bytes, stage;
  __device__ __forceinline__ void fetch(u32 base, u32 barriers, int slot, u64 tile) const {
    const u32 to = base + slot * stage, barrier = barriers + slot * 8;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(4096 + w_bytes + s_bytes + 128) : "memory");
    bulk(to, p + tile * 4096, 4096, barrier);
    bulk(to + 4096, w + tile * w_tile, w_bytes, barrier);
    bulk(to + 4096 + w_bytes, s + tile * s_tile, s_bytes, barrier);
    bulk(to + 4096 + w_bytes + s_bytes, t + tile * 128, 128, barrier);
  }
};

template <int BITS>
__device__ __forceinline__ void sum_warp(
    const Source& from, u32 base, u32 barriers, int low, int n, u32 words_at, u32 scales_at, u32 tops_at, const float (&most)[2][2], float (&acc)[8][2][4]) {
  const int lane = threadIdx.x & 31;
  int slot = 0;
  u32 parity = 0;
  for (int i = 0; i < n; i++) {
    wait_for(barriers + slot * 8, parity);
    asm volatile("bar.sync 0;" ::: "memory");  // all have read the stage before
    if (threadIdx.x == 0 && i + STAGES - 1 < n) from.fetch(base, barriers, slot == 0 ? STAGES - 1 : slot - 1, low + i + STAGES - 1);
    const u32 stage = slot * from.stage;
    u32 fade[2][2];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float x = ex2(__uint_as_float(get4(stage + tops_at + (k * 8 + lane / 4) * 4)) - most[k / 2][k % 2]);
      fade[k / 2][k % 2] = pack(x, x);
    }
    sum_tile<BITS>(acc, stage, stage + words_at, stage + scales_at, fade, lane);
    if (++slot == STAGES) { slot = 0; parity ^= 1; }
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) sum_codes(
    const unsigned char* weights, const unsigned char* tops, const float* sums, const unsigned char* words,
    const unsigned char* scales, float* part, float* top, float* total, const int* lengths, const int* starts, int G,
    int tiles, int first, int newest, int w8, int w4, int w2, int V, const float* steps) {
  const int lane = threadIdx.x & 31, own = threadIdx.x >> 5, warps = blockDim.x >> 5, pair = blockIdx.x, S = gridDim.y;
  const int warp = blockIdx.z * warps + own;  // of all that share a row
  const int begin = starts[pair / G] + first, end = lengths[pair / G] - newest;
  const int t0 = begin / 64, t1 = (end + 63) / 64, each = (max(t1 - t0, 0) + S - 1) / S;
  const int low = t0 + blockIdx.y * each, high = max(low, min(low + each, t1));
  auto slab = [&](int w) { return 512 * (w < w8 ? w * 8 : w < w8 + w4 ? w8 * 8 + (w - w8) * 4 : w8 * 8 + w4 * 4 + (w - w8 - w4) * 2); };
  const int begins = slab(blockIdx.z * warps), every = w8 + w4 + w2, ends = slab(min((int)(blockIdx.z + 1) * warps, every));
  const u64 row = (u64)pair * tiles;
  const u32 base = shared_at(room);
  Source from;
  from.w_bytes = ends - begins;
  from.s_bytes = warps * 128;
  from.stage = 4096 + from.w_bytes + from.s_bytes + 128;
  from.w_tile = slab(every);
  from.s_tile = every * 128;
  from.p = weights + row * 4096;
  from.w = words + row * from.w_tile + begins;
  from.s = scales + row * from.s_tile + blockIdx.z * warps * 128;
  from.t = tops + row * 128;
  const u32 barriers = base + STAGES * from.stage;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + i * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < STAGES - 1 && low + i < high; i++) from.fetch(base, barriers, i, low + i);
  }
  float most[2][2], sum = 0.f;
  {  // the highest score of the split, and the sum of its weights
    float x = -NEVER;
    float* found = (float*)(room + STAGES * from.stage + 64);
    const float* its = (const float*)tops + row * 32 + lane;
    for (int t = low + own; t < high; t += warps) x = fmaxf(x, its[(u64)t * 32]);
    found[own * 32 + lane] = x;
    __syncthreads();
    for (int i = 0; i < warps; i++) x = fmaxf(x, found[i * 32 + lane]);
    const float highest = x;
    x = x == -NEVER ? 0.f : x;
    for (int t = low + own; t < high; t += warps) sum += sums[(row + t) * 32 + lane] * ex2(its[(u64)t * 32] - x);
    __syncthreads();
    found[own * 32 + lane] = sum;
    __syncthreads();
    if (warp == 0) {  // of the first program
      sum = 0.f;
      for (int i = 0; i < warps; i++) sum += found[i * 32 + lane];
      top[((u64)pair * S + blockIdx.y) * 32 + lane] = highest;
      total[((u64)pair * S + blockIdx.y) * 32 + lane] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4; k++) most[k / 2][k % 2] = __shfl_sync(~0u, x, k * 8 + lane / 4);
  }
  float acc[8][2][4];
#pragma unroll
  for (int i = 0; i < 64; i++) ((float*)acc)[i] = 0.f;
  const u32 words_at = 4096 + slab(warp) - begins, scales_at = 4096 + from.w_bytes + own * 128, tops_at = 4096 + from.w_bytes + from.s_bytes;
#define RUN(BITS) sum_warp<BITS>(from, base, barriers, low, high - low, words_at, scales_at, tops_at, most, acc)
  if (warp < w8) RUN(8);
  else if (warp < w8 + w4) RUN(4);
  else RUN(2);
  float* out = part + ((u64)pair * S + blockIdx.y) * 32 * V;
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const int d = warp * 64 + n * 8 + 2 * (lane & 3);
    const float x = steps[d], y = steps[d + 1];
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int head = mt * 16 + h * 8 + lane / 4;
        if (d < V) *(float2*)(out + head * V + d) = make_float2(acc[n][mt][2 * h] * x, acc[n][mt][2 * h + 1] * y);
      }
  }
}

extern "C" __global__ void combine(const float* part, const float* top, const float* total, float* out, int S, int V) {
  const int pair = blockIdx.x / 32, head = blockIdx.x % 32;
  float most = -NEVER, all = 0.f;
  for (int s = 0; s < S; s++) most = fmaxf(most, top[((u64)pair * S + s) * 32 + head]);
  for (int s = 0; s < S; s++) all += total[((u64)pair * S + s) * 32 + head] * ex2(top[((u64)pair * S + s) * 32 + head] - most);
  for (int d = threadIdx.x; d < V; d += blockDim.x) {
    float x = 0.f;
    for (int s = 0; s < S; s++)
      x += part[(((u64)pair * S + s) * 32 + head) * V + d] * ex2(top[((u64)pair * S + s) * 32 + head] - most);
    out[((u64)pair * 32 + head) * V + d] = x / all;
  }
}
