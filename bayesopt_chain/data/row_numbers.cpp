#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

// The rows of many chains' batches: the orders of index_stream.py, integer for integer.

namespace {

constexpr int RUN = 64;

// keys 2 block and 2 block + 1 of the stream (seed, number, chain), 62 bits each, of n neighbouring blocks
void keys_of(uint32_t block, int n, uint32_t chain, uint64_t number, uint64_t seed, uint64_t (*keys)[2]) {
#pragma omp simd
  for (int r = 0; r < n; ++r) {
    uint32_t c0 = block + r, c1 = chain, c2 = uint32_t(number), c3 = uint32_t(number >> 32);
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int i = 0; i < 10; ++i) {
      const uint64_t p0 = uint64_t(0xD2511F53) * c0, p1 = uint64_t(0xCD9E8D57) * c2;
      c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
      c1 = uint32_t(p1);
      c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
      c3 = uint32_t(p0);
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    keys[r][0] = uint64_t(c0 >> 1) << 31 | c1 >> 1;
    keys[r][1] = uint64_t(c2 >> 1) << 31 | c3 >> 1;
  }
}

struct Room {
  std::vector<uint64_t> keys;
  std::vector<int32_t> begin;
  std::vector<uint64_t> sorted;
};

void draw(Room& room, int64_t n, uint32_t chain, uint64_t number, uint64_t seed) {
  const int64_t blocks = (n + 1) / 2;
  room.keys.resize(2 * blocks);
  auto pairs = reinterpret_cast<uint64_t(*)[2]>(room.keys.data());
  for (int64_t b = 0; b < blocks; b += RUN)
    keys_of(uint32_t(b), int(blocks - b < RUN ? blocks - b : RUN), chain, number, seed, pairs + b);
}

// the places of n keys in ascending order, the earlier of two equal ones first: into buckets by their first bits, of which
// there are about as many as keys, and then by insertion, which finds nearly everything in its place. A place and the first
// bits of its key are one word; where those of two keys are equal, which hardly ever happens, the whole keys decide.
void permute(Room& room, int64_t n, uint32_t chain, uint64_t number, uint64_t seed, int32_t* out, int64_t wanted) {
  draw(room, n, chain, number, seed);
  int bits = 1;
  while ((int64_t(1) << bits) < n) ++bits;
  const int shift = 62 - bits;
  const uint64_t place = (uint64_t(1) << bits) - 1;
  const uint64_t* keys = room.keys.data();
  room.begin.assign((std::size_t(1) << bits) + 1, 0);
  room.sorted.resize(n);
  int32_t* begin = room.begin.data();
  uint64_t* s = room.sorted.data();
  for (int64_t i = 0; i < n; ++i) ++begin[(keys[i] >> shift) + 1];
  for (int64_t b = 1; b <= int64_t(place) + 1; ++b) begin[b] += begin[b - 1];
  for (int64_t i = 0; i < n; ++i) s[begin[keys[i] >> shift]++] = (keys[i] << 2 & ~place) | uint64_t(i);
  for (int64_t i = 1; i < n; ++i) {
    const uint64_t x = s[i];
    int64_t j = i;
    for (; j > 0 && s[j - 1] > x; --j) s[j] = s[j - 1];
    s[j] = x;
  }
  for (int64_t i = 0; i < wanted; ++i) out[i] = int32_t(s[i] & place);
  for (int64_t i = 1; i < n; ++i)
    if ((s[i] & ~place) == (s[i - 1] & ~place)) {
      std::vector<int32_t> all(n);
      std::iota(all.begin(), all.end(), 0);
      std::stable_sort(all.begin(), all.end(), [=](int32_t a, int32_t b) { return keys[a] < keys[b]; });
      std::copy(all.begin(), all.begin() + wanted, out);
      return;
    }
}

// the first `wanted` different numbers of the keys modulo n
void choose(Room& room, int64_t n, uint32_t chain, uint64_t number, uint64_t seed, int32_t* out, int64_t wanted) {
  const uint64_t inverse = ~uint64_t(0) / uint64_t(n);  // of a key of 62 bits the quotient by it is right or one too small
  room.begin.resize(n, 0);                               // 1 where a number was met; all 0 again at the end
  int64_t found = 0;
  for (int64_t drawn = (wanted + wanted / 8 + 17) / 16 * 16, from = 0; found < wanted; from = drawn, drawn *= 2) {
    draw(room, drawn, chain, number, seed);
    for (int64_t i = from; i < drawn && found < wanted; ++i) {
      const uint64_t key = room.keys[i], rest = key - uint64_t((unsigned __int128)key * inverse >> 64) * uint64_t(n);
      const int32_t row = int32_t(rest < uint64_t(n) ? rest : rest - uint64_t(n));
      if (room.begin[row]) continue;
      room.begin[row] = 1;
      out[found++] = row;
    }
  }
  for (int64_t i = 0; i < wanted; ++i) room.begin[out[i]] = 0;
}

template <class Of>
void each_chain(int32_t* out, int64_t chains, int64_t wanted, int threads, Of of) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Room room;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chains; ++c) of(room, uint32_t(c), out + c * wanted);
  }
}

}  // namespace

// for every chain the first `wanted` of its permutation of n rows
extern "C" void permutations(int32_t* out, int64_t chains, int64_t n, int64_t wanted, uint64_t number, uint64_t seed,
                             int threads) {
  each_chain(out, chains, wanted, threads,
             [=](Room& room, uint32_t chain, int32_t* to) { permute(room, n, chain, number, seed, to, wanted); });
}

// for every chain `wanted` different rows of n
extern "C" void subsets(int32_t* out, int64_t chains, int64_t n, int64_t wanted, uint64_t number, uint64_t seed,
                        int threads) {
  each_chain(out, chains, wanted, threads,
             [=](Room& room, uint32_t chain, int32_t* to) { choose(room, n, chain, number, seed, to, wanted); });
}
