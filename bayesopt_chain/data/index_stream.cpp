#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../random/philox.hpp"

// The rows of many chains' batches: the orders of index_stream.py, integer for integer.

namespace {

// keys 2 block and 2 block + 1 of the stream (seed, number, chain), 62 bits each, of n neighbouring blocks
void keys_of(uint32_t block, int n, uint32_t chain, uint64_t number, uint64_t seed, uint64_t (*keys)[2]) {
  uint32_t words[4][RUN];
  philox(block, n, {chain, {uint32_t(number), uint32_t(number >> 32)}, {uint32_t(seed), uint32_t(seed >> 32)}}, words);
  for (int r = 0; r < n; ++r) {
    keys[r][0] = uint64_t(words[0][r] >> 1) << 31 | words[1][r] >> 1;
    keys[r][1] = uint64_t(words[2][r] >> 1) << 31 | words[3][r] >> 1;
  }
}

struct Room {
  std::vector<uint64_t> keys;
  std::vector<int32_t> begin;
  std::vector<uint64_t> words, sorted;
};

void draw(Room& room, int64_t n, uint32_t chain, uint64_t number, uint64_t seed) {
  const int64_t blocks = (n + 1) / 2;
  room.keys.resize(2 * blocks);
  auto pairs = reinterpret_cast<uint64_t(*)[2]>(room.keys.data());
  for (int64_t b = 0; b < blocks; b += RUN)
    keys_of(uint32_t(b), int(blocks - b < RUN ? blocks - b : RUN), chain, number, seed, pairs + b);
}

// the places of n keys in ascending order, the earlier of two equal ones first. A place and the first bits of its key are one
// word. Words are sorted by the upper two digits of their keys, which have some bits more than n, by counting, the lower digit
// first; then by insertion, which finds nearly everything in its place, so that no branch is hard to foresee. Where all bits
// of two keys in their words are equal, which hardly ever happens, the whole keys decide.
// Batch k of `size` places goes to out[k stride], k < batches.
void permute(Room& room, int64_t n, uint32_t chain, uint64_t number, uint64_t seed, int32_t* out, int64_t batches, int64_t size,
             int64_t stride) {
  draw(room, n, chain, number, seed);
  int bits = 1;
  while ((int64_t(1) << bits) < n) ++bits;
  const uint64_t place = (uint64_t(1) << bits) - 1;
  const int digit = std::min((bits + 7) / 2, (64 - bits) / 2);  // both digits lie above the place
  const int upper = 64 - digit, lower = 64 - 2 * digit;
  const std::size_t values = std::size_t(1) << digit;
  const uint64_t last = values - 1;
  room.begin.assign(2 * values, 0);
  room.words.resize(n);
  room.sorted.resize(n);
  int32_t *low = room.begin.data(), *high = low + values;
  const uint64_t* w = room.keys.data();
  uint64_t *t = room.words.data(), *s = room.sorted.data();
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t x = w[i] << 2;
    ++low[x >> lower & last];
    ++high[x >> upper];
  }
  for (int32_t v = 0, below = 0, above = 0; v < int32_t(values); ++v) {
    const int32_t of_low = low[v], of_high = high[v];
    low[v] = below;
    high[v] = above;
    below += of_low;
    above += of_high;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t x = (w[i] << 2 & ~place) | uint64_t(i);
    t[low[x >> lower & last]++] = x;
  }
  for (int64_t i = 0; i < n; ++i) s[high[t[i] >> upper]++] = t[i];
  for (int64_t i = 1; i < n; ++i) {
    const uint64_t x = s[i];
    int64_t j = i;
    for (; j > 0 && s[j - 1] > x; --j) s[j] = s[j - 1];
    s[j] = x;
  }
  bool equal = false;
  for (int64_t i = 1; i < n; ++i) equal |= (s[i] & ~place) == (s[i - 1] & ~place);
  if (equal) {
    const uint64_t* keys = room.keys.data();
    std::iota(s, s + n, 0);
    std::stable_sort(s, s + n, [=](uint64_t a, uint64_t b) { return keys[a] < keys[b]; });
  }
  for (int64_t k = 0; k < batches; ++k)
    for (int64_t i = 0; i < size; ++i) out[k * stride + i] = int32_t(s[k * size + i] & place);
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
void each_chain(int32_t* out, int64_t chains, int64_t size, int threads, Of of) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Room room;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chains; ++c) of(room, uint32_t(c), out + c * size);
  }
}

}  // namespace

// for every chain the first `batches` batches of `size` of its permutation of n rows: out[batches][chains][size]
extern "C" void permutations(int32_t* out, int64_t chains, int64_t n, int64_t batches, int64_t size, uint64_t number,
                             uint64_t seed, int threads) {
  each_chain(out, chains, size, threads, [=](Room& room, uint32_t chain, int32_t* to) {
    permute(room, n, chain, number, seed, to, batches, size, chains * size);
  });
}

// for every chain `wanted` different rows of n
extern "C" void subsets(int32_t* out, int64_t chains, int64_t n, int64_t wanted, uint64_t number, uint64_t seed,
                        int threads) {
  each_chain(out, chains, wanted, threads,
             [=](Room& room, uint32_t chain, int32_t* to) { choose(room, n, chain, number, seed, to, wanted); });
}
