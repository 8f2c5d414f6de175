#include "coded_rows.cuh"

// ---- scores -------------------------------------------------------------------------------------------------
// queries in shared memory: [step][2][32 lanes][16 bytes]; ring of this warp: RING chunks of 2 KB
template <int BITS>
__device__ __forceinline__ void score_chunk(float (&acc)[2][NT][4], u32 ring, u32 queries, int lane) {
  using F = Fields<BITS>;
  u32 words[NT][2];
#pragma unroll
  for (int i = 0; i < NT / 2; i++) {
    uint4 x = get16(ring + (i * 32 + lane) * 16);
    words[2 * i][0] = x.x; words[2 * i][1] = x.y; words[2 * i + 1][0] = x.z; words[2 * i + 1][1] = x.w;
  }
  constexpr int GROUPS = F::each * 16 > 64 ? F::each * 16 / 64 : 1;
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    uint4 s4 = get16(ring + 2048 + (group * 8 + lane / 4) * 16);
    u32 s[4] = {s4.x, s4.y, s4.z, s4.w};
#pragma unroll
    for (int k = 0; k < F::each / GROUPS; k++) {
      const int f = group * (F::each / GROUPS) + k;
      uint4 a0 = get16(queries + (f * 2 * 32 + lane) * 16), a1 = get16(queries + ((f * 2 + 1) * 32 + lane) * 16);
#pragma unroll
      for (int j = 0; j < NT; j++) {
        u32 m = __byte_perm(s[j / 2], 0, j & 1 ? 0x3232 : 0x1010);
        u32 c = mul2(mul2(m, TINY), F::middle(f));
        u32 x = fma2(field<BITS>(words[j][0], f), m, c), y = fma2(field<BITS>(words[j][1], f), m, c);
        mma(acc[0][j], a0, x, y);
        mma(acc[1][j], a1, x, y);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) score_codes(
    const u32* q16,        // (pairs, steps, 2, 32, 4): queries as the tensor cores take them
    const float* factor,   // (pairs, 32): what products are multiplied by to be exponents of two
    const unsigned char* words, const uint4* scales,  // (pairs, tiles, chunks, 2048), (pairs, tiles, groups, 8)
    uint4* weights, float* tops, float* sums,          // (pairs, tiles, 4, 2, 32), (pairs, tiles, 32) twice
    const int* lengths, const int* starts, int G, int tiles, int first, int newest,
    int c8, int c4, int c2) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = blockIdx.x, S = gridDim.y;
  const int chunks = c8 + c4 + c2, steps = 2 * c8 + 4 * c4 + 8 * c2, groups = (c8 + 1) / 2 + c4 + 2 * c2;
  const int begin = starts[pair / G] + first, end = lengths[pair / G] - newest;
  const int t0 = begin / 64, t1 = (end + 63) / 64, each = (max(t1 - t0, 0) + S - 1) / S;
  const int low = t0 + blockIdx.y * each, high = min(low + each, t1);
  u32 base = shared_at(room);
  {
    const uint4* from = (const uint4*)q16 + (u64)pair * steps * 64;
    for (int i = threadIdx.x; i < steps * 64; i += WARPS * 32) copy16(base + i * 16, from + i);
    commit();
    wait_copies<0>();
    __syncthreads();
  }
  const u32 queries = 0, ring = steps * 1024 + warp * (RING * SLOT);
  float scale[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++) scale[i / 2][i % 2] = factor[pair * 32 + i * 8 + lane / 4];
  const int mine = low + warp < high ? (high - low - warp + WARPS - 1) / WARPS : 0, total = mine * chunks;
  const unsigned char* source = words + ((u64)pair * tiles + low + warp) * chunks * 2048 + lane * 16;
  const u64 jump = (u64)(WARPS - 1) * chunks * 2048;
  const unsigned char* more = (const unsigned char*)(scales + ((u64)pair * tiles + low + warp) * groups * 8) + (lane & 15) * 16;
  const u64 more_jump = (u64)(WARPS - 1) * groups * 128;
  const int fine = c8 + c4;
  int left = total, ahead_chunk = 0, ahead_slot = 0;  // the next chunk that is fetched
  auto fetch = [&]() {
    if (left > 0) {
      u32 to = base + ring + ahead_slot * SLOT + lane * 16;
#pragma unroll
      for (int i = 0; i < 4; i++) copy16(to + i * 512, source + i * 512);
      const int wide = ahead_chunk < fine ? 8 : 16;
      if (lane < wide) copy16(to + 2048, more);
      source += 2048;
      more += ahead_chunk < c8 ? (ahead_chunk & 1) * 128 : wide * 16;
      if (++ahead_chunk == chunks) { ahead_chunk = 0; source += jump; more += more_jump; }
      ahead_slot = ahead_slot + 1 == RING ? 0 : ahead_slot + 1;
      left--;
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < RING - 1; i++) fetch();
  int slot = 0;
  for (int n = 0; n < mine; n++) {
    const int tile = low + warp + n * WARPS;
    const u64 row = (u64)pair * tiles + tile;
    float acc[2][NT][4];
#pragma unroll
    for (int i = 0; i < 2 * NT * 4; i++) ((float*)acc)[i] = 0.f;
    u32 at = queries;
    for (int c = 0; c < c8; c++) {
      wait_copies<RING - 2>();
      __syncwarp();
      score_chunk<8>(acc, ring + slot * SLOT, at, lane);
      fetch();
      at += 2 * 1024;
      slot = slot + 1 == RING ? 0 : slot + 1;
    }
    for (int c = 0; c < c4; c++) {
      wait_copies<RING - 2>();
      __syncwarp();
      score_chunk<4>(acc, ring + slot * SLOT, at, lane);
      fetch();
      at += 4 * 1024;
      slot = slot + 1 == RING ? 0 : slot + 1;
    }
    for (int c = 0; c < c2; c++) {
      wait_copies<RING - 2>();
      __syncwarp();
      score_chunk<2>(acc, ring + slot * SLOT, at, lane);
      fetch();
      at += 8 * 1024;
      slot = slot + 1 == RING ? 0 : slot + 1;
    }
    const int place = tile * 64 + 2 * (lane & 3);
#pragma unroll
    for (int mt = 0; mt < 2; mt++) {
      float most[2] = {-NEVER, -NEVER}, sum[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int l = place + j * 8 + (i & 1);
          float x = l >= begin && l < end ? acc[mt][j][i] * scale[mt][i / 2] : -NEVER;
          acc[mt][j][i] = x;
          most[i / 2] = fmaxf(most[i / 2], x);
        }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
        most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
      }
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float x = ex2(acc[mt][j][i] - (most[i / 2] == -NEVER ? 0.f : most[i / 2]) + 8.f);
          acc[mt][j][i] = x;
          sum[i / 2] += x;
        }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if ((lane & 3) == 0) {
          tops[row * 32 + mt * 16 + h * 8 + lane / 4] = most[h];
          sums[row * 32 + mt * 16 + h * 8 + lane / 4] = sum[h];
        }
      }
#pragma unroll
      for (int k = 0; k < NT / 2; k++) {
        float(&u)[4] = acc[mt][2 * k], (&v)[4] = acc[mt][2 * k + 1];
        weights[(row * 4 + k) * 64 + mt * 32 + lane] =
            make_uint4(pack(u[0], u[1]), pack(u[2], u[3]), pack(v[0], v[1]), pack(v[2], v[3]));
      }
    }
  }
}

// Queries (pairs, 32, K) of 16 bits (bfloat16) as the score kernel takes them: divided by their largest number and multiplied by `ratio`.
extern "C" __global__ void __launch_bounds__(1024) prepare(
    const unsigned short* q, const float* ratio, unsigned short* q16, float* factor, int K, float scaling) {
  const int pair = blockIdx.x, head = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const unsigned short* row = q + ((u64)pair * 32 + head) * K;
  float most = 1e-30f;
  for (int k = lane; k < K; k += 32) most = fmaxf(most, fabsf(__uint_as_float((u32)row[k] << 16)));
#pragma unroll
  for (int i = 16; i; i >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
  if (lane == 0) factor[pair * 32 + head] = most * 128.f * scaling * 1.4426950408889634f;
  const float each = 1.f / most;
  for (int k = lane; k < K; k += 32) {
    const int step = k / 16, w = k % 16, to = (head % 8 * 4 + w % 8 / 2) * 4 + w / 8 * 2 + head / 8 % 2;
    const u32 x = pack(__uint_as_float((u32)row[k] << 16) * each * ratio[k], 0.f);
    q16[((((u64)pair * (K / 16) + step) * 2 + head / 16) * 128 + to) * 2 + w % 2] = (unsigned short)x;
  }
}
