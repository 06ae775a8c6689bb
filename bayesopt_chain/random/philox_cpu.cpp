#include "philox.hpp"

namespace {

// the same block of a draw of neighbouring chains
void philox(uint32_t block, uint32_t draw, const int64_t* keys, const int64_t* steps, int n, uint32_t (*words)[RUN]) {
  philox(n, words, [=](int r, uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t& k0, uint32_t& k1) {
    c0 = block, c1 = draw, c2 = uint32_t(steps[r]), c3 = uint32_t(uint64_t(steps[r]) >> 32);
    k0 = uint32_t(keys[r]), k1 = uint32_t(uint64_t(keys[r]) >> 32);
  });
}

// runs of elements of draws, one behind the other; no starts: every run begins at element 0
template <class Real>
void normals(Real* out, const int64_t* keys, int64_t key_stride, const int64_t* steps, int64_t step_stride,
            int64_t chains, const int64_t* starts, const int64_t* lengths, int64_t runs, const int64_t* draws,
            int threads) {
  int64_t total = 0, offset = 0;
  for (int64_t i = 0; i < runs; ++i) total += lengths[i];
#pragma omp parallel num_threads(threads) firstprivate(offset) if (threads > 1)
  for (int64_t i = 0; i < runs; offset += lengths[i++]) {
    const int64_t begin = starts ? starts[i] : 0, end = begin + lengths[i];
    const int64_t head = begin / (4 * RUN), rows = (end + 4 * RUN - 1) / (4 * RUN) - head;
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t c = 0; c < chains; ++c)
      for (int64_t k = 0; k < rows; ++k) {
        const uint64_t key = keys[c * key_stride], step = steps[c * step_stride];
        const Stream s = {
            uint32_t(draws[i]), {uint32_t(step), uint32_t(step >> 32)}, {uint32_t(key), uint32_t(key >> 32)}};
        const int64_t q = head + k, low = 4 * RUN * q, high = low + 4 * RUN;
        const int64_t from = begin > low ? begin : low, to = end < high ? end : high;
        row(q, int(from - low), int(to - from), s, out + c * total + offset + (from - begin));
      }
  }
}

// the same elements of whole leaves, chains within elements: element e of chain c is out[e * chains + c]
template <class Real>
void normals_in_lanes(Real* out, const int64_t* keys, const int64_t* steps, int64_t chains, const int64_t* lengths,
                      int64_t leaves, const int64_t* draws) {
  for (int64_t c = 0; c < chains; c += RUN) {
    const int n = int(chains - c < RUN ? chains - c : RUN);
    Real* to = out + c;
    for (int64_t i = 0; i < leaves; to += lengths[i++] * chains)
      for (int64_t b = 0, e; (e = 4 * RUN * (b / RUN) + b % RUN) < lengths[i]; ++b) {
        uint32_t words[4][RUN];
        Real z[4][RUN];
        philox(uint32_t(b), uint32_t(draws[i]), keys + c, steps + c, n, words);
        box_muller(words[0], words[1], n, z[0], z[1]);
        if (e + 2 * RUN < lengths[i]) box_muller(words[2], words[3], n, z[2], z[3]);
        for (int l = 0; l < 4 && e + RUN * l < lengths[i]; ++l)
          std::memcpy(to + (e + RUN * l) * chains, z[l], sizeof(Real) * n);
      }
  }
}

}  // namespace

#define EXPORT(name, Real)                                                                                            \
  extern "C" void name(Real* out, const int64_t* keys, int64_t key_stride, const int64_t* steps, int64_t step_stride, \
                       int64_t chains, const int64_t* starts, const int64_t* lengths, int64_t runs,                   \
                       const int64_t* draws, int64_t threads) {                                                       \
    normals(out, keys, key_stride, steps, step_stride, chains, starts, lengths, runs, draws, int(threads));           \
  }
EXPORT(normals_float, float)
EXPORT(normals_double, double)

#define EXPORT_LANES(name, Real)                                                                                 \
  extern "C" void name(Real* out, const int64_t* keys, const int64_t* steps, int64_t chains, const int64_t* lengths, \
                       int64_t leaves, const int64_t* draws) {                                                    \
    normals_in_lanes(out, keys, steps, chains, lengths, leaves, draws);                                           \
  }
EXPORT_LANES(lanes_float, float)
EXPORT_LANES(lanes_double, double)
