// The counter-based stream of philox.py: ten rounds of Philox-4x32 for 64 neighbouring blocks, and their normals.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE_PRODUCTS
#include <immintrin.h>
#endif

namespace {

constexpr int RUN = 64;

struct Stream {
  uint32_t draw, step[2], key[2];
};

template <class To, class From>
To bits(From x) {
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// u = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); log(1 + f) = f - f^2/2 + s (f^2/2 + r(s^2)), s = f / (2 + f)
float log_of(float u) {
  const int32_t i = bits<int32_t>(u) + (0x3f800000 - 0x3f3504f3);
  const float k = float((i >> 23) - 127), f = bits<float>((i & 0x7fffff) + 0x3f3504f3) - 1.0f;
  const float s = f / (2.0f + f), z = s * s, half = 0.5f * f * f;
  const float r = z * (0.66666662693f + z * (0.40000972152f + z * (0.28498786688f + z * 0.24279078841f)));
  return k * 6.9313812256e-1f - ((half - (s * (half + r) + k * 9.0580006145e-6f)) - f);
}

// on [-pi/4, pi/4]
float cos_of(float x) {
  const float z = x * x;
  return 1.0f - 0.5f * z + z * z * (4.166664568e-2f + z * (-1.388731626e-3f + z * 2.443315712e-5f));
}

float sin_of(float x) {
  const float z = x * x;
  return x + x * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
}

double log_of(double u) { return std::log(u); }
double cos_of(double x) { return std::cos(x); }
double sin_of(double x) { return std::sin(x); }

// ten rounds for n counters; of(r, c0, c1, c2, c3, k0, k1) says which counter, under which key
template <class Of>
inline void philox(int n, uint32_t (*words)[RUN], Of of) {
#pragma omp simd
  for (int r = 0; r < n; ++r) {
    uint32_t c0, c1, c2, c3, k0, k1;
    of(r, c0, c1, c2, c3, k0, k1);
    for (int i = 0; i < 10; ++i) {
      const uint64_t p0 = uint64_t(0xD2511F53) * c0, p1 = uint64_t(0xCD9E8D57) * c2;
      c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
      c1 = uint32_t(p1);
      c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
      c3 = uint32_t(p0);
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    words[0][r] = c0;
    words[1][r] = c1;
    words[2][r] = c2;
    words[3][r] = c3;
  }
}

// Ten rounds on vectors by hand take half the time of those that compilers make of 32-bit words.
#if defined(WIDE_PRODUCTS) && defined(__AVX512F__)
typedef uint64_t Lanes __attribute__((vector_size(64)));
inline Lanes product(Lanes a, Lanes b) { return Lanes(_mm512_mul_epu32(__m512i(a), __m512i(b))); }
#elif defined(WIDE_PRODUCTS)
typedef uint64_t Lanes __attribute__((vector_size(32)));
inline Lanes product(Lanes a, Lanes b) { return Lanes(_mm256_mul_epu32(__m256i(a), __m256i(b))); }
#endif

// neighbouring blocks of one draw
void philox(uint32_t block, int n, const Stream& s, uint32_t (*words)[RUN]) {
#ifdef WIDE_PRODUCTS
  // A word lies in the lower half of 64 bits, where products are whole; what stands above it is never read. The last vector may
  // go beyond n, not beyond RUN.
  typedef uint32_t Words __attribute__((vector_size(sizeof(Lanes) / 2)));
  constexpr int WIDTH = sizeof(Lanes) / sizeof(uint64_t);
  uint64_t k0[10], k1[10];
  for (uint32_t i = 0; i < 10; ++i) k0[i] = s.key[0] + i * 0x9E3779B9, k1[i] = s.key[1] + i * 0xBB67AE85;
  const Lanes none = {}, m0 = none + 0xD2511F53, m1 = none + 0xCD9E8D57;
  Lanes number = none + block;
  for (int l = 0; l < WIDTH; ++l) number[l] += l;
  for (int r = 0; r < n; r += WIDTH, number += WIDTH) {
    Lanes c0 = number, c1 = none + s.draw, c2 = none + s.step[0], c3 = none + s.step[1];
#pragma GCC unroll 10
    for (int i = 0; i < 10; ++i) {
      const Lanes p0 = product(c0, m0), p1 = product(c2, m1);
      c0 = (p1 >> 32) ^ c1 ^ k0[i];
      c1 = p1;
      c2 = (p0 >> 32) ^ c3 ^ k1[i];
      c3 = p0;
    }
    const Words w[4] = {__builtin_convertvector(c0, Words), __builtin_convertvector(c1, Words),
                        __builtin_convertvector(c2, Words), __builtin_convertvector(c3, Words)};
    for (int k = 0; k < 4; ++k) std::memcpy(words[k] + r, &w[k], sizeof(Words));
  }
#else
  philox(n, words, [=](int r, uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t& k0, uint32_t& k1) {
    c0 = block + r, c1 = s.draw, c2 = s.step[0], c3 = s.step[1], k0 = s.key[0], k1 = s.key[1];
  });
#endif
}

template <class Real>
void box_muller(const uint32_t* first, const uint32_t* second, int n, Real* x, Real* y) {
#pragma omp simd
  for (int r = 0; r < n; ++r) {
    const Real u = (Real(int32_t(first[r] >> 9)) + Real(0.5)) * Real(1.1920928955078125e-7);
    const Real angle = (Real(int32_t((second[r] & 0x3FFFFFFF) >> 7)) - Real(4194303.5)) * Real(1.8725351414619535e-7);
    const Real length = std::sqrt(Real(-2) * log_of(u)), radius = second[r] >> 31 ? -length : length;
    const Real c = radius * cos_of(angle), s = radius * sin_of(angle);
    const bool odd = second[r] >> 30 & 1;
    x[r] = odd ? -s : c;
    y[r] = odd ? c : s;
  }
}

// elements first to first + n - 1 of the 256 that come from blocks 64 q to 64 q + 63; n is at least 1
template <class Real>
void row(int64_t q, int first, int n, const Stream& s, Real* out) {
  uint32_t words[4][RUN];
  Real z[4 * RUN];
  const int last = first + n - 1;
  const bool all = n == 4 * RUN;
  const bool within = first / RUN == last / RUN;  // one lane: these blocks and no others
  const int from = within ? first % RUN : 0, blocks = within ? n : RUN;
  Real* to = all ? out : z;
  philox(uint32_t(RUN * q + from), blocks, s, words);
  if (first < 2 * RUN) box_muller(words[0], words[1], blocks, to + from, to + RUN + from);
  if (last >= 2 * RUN) box_muller(words[2], words[3], blocks, to + 2 * RUN + from, to + 3 * RUN + from);
  if (!all) std::memcpy(out, z + first, sizeof(Real) * n);
}

}  // namespace
