#include "coded_groups.cuh"

// Scores as `score_codes` has them, by the instructions of a warp group: codes are the rows of a product from registers,
// unscaled, and queries its columns from shared memory. A scale is applied to the sums of its coefficients, which begin
// at what takes the middles of codes off. A program has GROUPS_OF warp groups; each takes tiles of 64 places.
#define GROUPS_OF 4
#define DEPTH 4  // chunks of a warp in shared memory

__device__ __forceinline__ u32 turned(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float wide(u32 x) {  // the lower half of two numbers of 16 bits
  float y;
  asm("{ .reg .b16 h, l; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(y) : "r"(x));
  return y;
}

// Fields from..to of a chunk, which share a scale: s += scale * (zero + codes . queries)
template <int BITS, int FROM, int TO>
__device__ __forceinline__ void score_unit(float (&s)[16], uint4 words, u64 queries, u32 zeros, u32 scale, int lane) {
  u32 a[TO - FROM][4];
#pragma unroll
  for (int f = FROM; f < TO; f++) {
    a[f - FROM][0] = field<BITS>(words.x, f);  // places g, words 2t and 2t + 1
    a[f - FROM][1] = field<BITS>(words.z, f);  // places g + 8
    a[f - FROM][2] = field<BITS>(words.y, f);  // places g, words 2t + 8 and 2t + 9
    a[f - FROM][3] = field<BITS>(words.w, f);
  }
  float d[16];
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const float2 z = *(const float2*)(room + zeros + (n * 8 + 2 * (lane & 3)) * 4);
    d[4 * n] = d[4 * n + 2] = z.x;
    d[4 * n + 1] = d[4 * n + 3] = z.y;
  }
  begin_products();
#pragma unroll
  for (int f = FROM; f < TO; f++) wgmma(d, a[f - FROM][0], a[f - FROM][1], a[f - FROM][2], a[f - FROM][3], queries + f * 64);
  commit_products();
  const float low = wide(scale), high = wide(scale >> 16);
  wait_products<0>(d);
#pragma unroll
  for (int i = 0; i < 16; i++) s[i] += (i & 2 ? high : low) * d[i];
}

extern "C" __global__ void __launch_bounds__(GROUPS_OF * 128, 1) score_wgmma(
    const uint4* q16,      // (pairs, steps, 64): 1 KB of queries for every 16 coefficients
    const float* factor,   // (pairs, 32)
    const float* zeros,    // (pairs, units, 32)
    const unsigned char* words, const unsigned char* scales,
    u32* weights,  // (pairs, tiles, 4, 4, 2, 8, 4): of 16 places, 8 heads, 8 places each, pairs of places
    float* tops, float* sums, const int* lengths, const int* starts, int G, int tiles, int first, int newest, int c8, int c4, int c2) {
  const int lane = threadIdx.x & 31, w = (threadIdx.x >> 5) & 3, wg = threadIdx.x >> 7, pair = blockIdx.x, S = gridDim.y;
  const int chunks = c8 + c4 + c2, steps = 2 * c8 + 4 * c4 + 8 * c2, groups = (c8 + 1) / 2 + c4 + 2 * c2, units = c8 + c4 + 2 * c2;
  const int begin = starts[pair / G] + first, end = lengths[pair / G] - newest;
  const int t0 = begin / 64, t1 = (end + 63) / 64, each = (max(t1 - t0, 0) + S - 1) / S;
  const int low = t0 + blockIdx.y * each, high = min(low + each, t1);
  const u32 base = shared_at(room), zero_at = steps * 1024, most_at = zero_at + units * 128 + wg * 1024;
  const u32 ring = zero_at + units * 128 + GROUPS_OF * 1024 + (threadIdx.x >> 5) * (DEPTH * 768);
  for (int i = threadIdx.x; i < steps * 64; i += GROUPS_OF * 128) copy16(base + i * 16, q16 + (u64)pair * steps * 64 + i);
  for (int i = threadIdx.x; i < units * 8; i += GROUPS_OF * 128)
    copy16(base + zero_at + i * 16, (const uint4*)(zeros + (u64)pair * units * 32) + i);
  commit();
  wait_copies<0>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  float scale[4][2];
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const float2 x = *(const float2*)(factor + pair * 32 + n * 8 + 2 * (lane & 3));
    scale[n][0] = x.x;
    scale[n][1] = x.y;
  }
  const u64 descriptor = columns_at(base);
  const int mine = low + wg < high ? (high - low - wg + GROUPS_OF - 1) / GROUPS_OF : 0;
  const unsigned char* source = words + ((u64)pair * tiles + low + wg) * chunks * 2048 + w * 512 + lane * 16;
  const unsigned char* more = scales + ((u64)pair * tiles + low + wg) * groups * 128 + (lane & 15) * 16;
  int left = mine * chunks, ahead_chunk = 0, ahead_slot = 0;
  auto fetch = [&]() {  // 512 bytes of words, and the scales of a chunk
    if (left > 0) {
      const u32 to = base + ring + ahead_slot * 768 + lane * 16;
      copy16(to, source);
      const int count = ahead_chunk < c8 + c4 ? 8 : 16;
      if (lane < count) copy16(to + 512, more);
      source += 2048;
      more += ahead_chunk < c8 ? (ahead_chunk & 1) * 128 : count * 16;
      if (++ahead_chunk == chunks) {
        ahead_chunk = 0;
        source += (u64)(GROUPS_OF - 1) * chunks * 2048;
        more += (u64)(GROUPS_OF - 1) * groups * 128;
      }
      ahead_slot = ahead_slot + 1 == DEPTH ? 0 : ahead_slot + 1;
      left--;
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) fetch();
  int slot = 0;
  for (int n = 0; n < mine; n++) {
    const int tile = low + wg + n * GROUPS_OF;
    const u64 row = (u64)pair * tiles + tile;
    float s[16];
#pragma unroll
    for (int i = 0; i < 16; i++) s[i] = 0.f;
    u64 at = descriptor;
    u32 zero = zero_at;
    for (int c = 0; c < chunks; c++) {
      wait_copies<DEPTH - 2>();
      __syncwarp();
      const u32 here = ring + slot * 768, its = here + 512 + (lane / 4) * 16 + w * 4;
      const uint4 x = get16(here + lane * 16);
      const u32 one = get4(its), two = get4(its + 128);
      __syncwarp();
      fetch();
      if (c < c8) {
        score_unit<8, 0, 2>(s, x, at, zero, one, lane);
        at += 2 * 64;
      } else if (c < c8 + c4) {
        score_unit<4, 0, 4>(s, x, at, zero, one, lane);
        at += 4 * 64;
      } else {
        score_unit<2, 0, 4>(s, x, at, zero, one, lane);
        zero += 128;
        score_unit<2, 4, 8>(s, x, at, zero, two, lane);
        at += 8 * 64;
      }
      zero += 128;
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    const int place = tile * 64 + w * 16 + lane / 4;
    const bool seen[2] = {place >= begin && place < end, place + 8 >= begin && place + 8 < end};
    float most[8], sum[8];
#pragma unroll
    for (int i = 0; i < 16; i++) s[i] = seen[i / 2 % 2] ? s[i] * scale[i / 4][i % 2] : -NEVER;
#pragma unroll
    for (int h = 0; h < 8; h++) {  // head 8 (h / 2) + 2t + h % 2
      float x = fmaxf(s[h / 2 * 4 + h % 2], s[h / 2 * 4 + h % 2 + 2]);
#pragma unroll
      for (int i = 4; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
      most[h] = x;
    }
    float* shared = (float*)(room + most_at);  // 4 warps of 32 heads, twice
    if (lane < 4)
#pragma unroll
      for (int h = 0; h < 8; h++) shared[w * 32 + h / 2 * 8 + 2 * lane + h % 2] = most[h];
    asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory");
#pragma unroll
    for (int h = 0; h < 8; h++) {
      const int head = h / 2 * 8 + 2 * (lane & 3) + h % 2;
      most[h] = fmaxf(fmaxf(shared[head], shared[32 + head]), fmaxf(shared[64 + head], shared[96 + head]));
      const float off = most[h] == -NEVER ? 0.f : most[h];
      const int i = h / 2 * 4 + h % 2;
      s[i] = ex2(s[i] - off + 8.f);
      s[i + 2] = ex2(s[i + 2] - off + 8.f);
      float x = s[i] + s[i + 2];
#pragma unroll
      for (int k = 4; k < 32; k *= 2) x += __shfl_xor_sync(~0u, x, k);
      sum[h] = x;
    }
    if (lane < 4)
#pragma unroll
      for (int h = 0; h < 8; h++) shared[128 + w * 32 + h / 2 * 8 + 2 * lane + h % 2] = sum[h];
    asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory");
    if (w == 0) {
      tops[row * 32 + lane] = fmaxf(fmaxf(shared[lane], shared[32 + lane]), fmaxf(shared[64 + lane], shared[96 + lane]));
      sums[row * 32 + lane] = shared[128 + lane] + shared[160 + lane] + shared[192 + lane] + shared[224 + lane];
    }
#pragma unroll
    for (int n = 0; n < 4; n++)  // pairs of heads become pairs of places
#pragma unroll
      for (int h = 0; h < 2; h++)
        weights[(row * 4 + w) * 256 + n * 64 + h * 32 + lane] = turned(pack(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
    asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory");
  }
}

// Queries (pairs, 32, K) in bfloat16, divided by their largest number and multiplied by `ratio`; and what takes the
// middles of codes off: of every unit of 32 coefficients of 8 bits, or of 64 others.
extern "C" __global__ void __launch_bounds__(1024) prepare_wgmma(
    const unsigned short* q, const float* ratio, const float* middle, unsigned short* q16, float* factor, float* zeros,
    int K, int c8, int units, float scaling) {
  const int pair = blockIdx.x, head = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const unsigned short* row = q + ((u64)pair * 32 + head) * K;
  float most = 1e-30f;
  for (int k = lane; k < K; k += 32) most = fmaxf(most, fabsf(__uint_as_float((u32)row[k] << 16)));
#pragma unroll
  for (int i = 16; i; i >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
  if (lane == 0) factor[pair * 32 + head] = most * 128.f * scaling * 1.4426950408889634f;
  const float each = 1.f / most;
  float* zero = zeros + (u64)pair * units * 32 + head;
  int unit = 0;
  for (int k = 0; k < K; k += unit < c8 ? 32 : 64, unit++) {
    float sum = 0.f;
    const int count = unit < c8 ? 32 : 64;
    for (int i = k + lane; i < k + count; i += 32) {
      const u32 x = pack(__uint_as_float((u32)row[i] << 16) * each * ratio[i], 0.f);
      const int w = i % 16;
      q16[((u64)pair * (K / 16) + i / 16) * 512 + head / 8 * 128 + w / 8 * 64 + head % 8 * 8 + w % 8] = (unsigned short)x;
      float y;
      asm("{ .reg .b16 h, l; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(y) : "r"(x));
      sum -= y * middle[i];
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
    if (lane == 0) zero[unit * 32] = sum;
  }
}
