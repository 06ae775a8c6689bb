#include <cmath>
#include <cstdint>

namespace {

enum Kind { MOMENT = 0, SCALED = 1, SCALED_MOMENTUM = 2 };

template <class Real>
struct Numbers {
  Real sign, decay, keep, momentum, gain, square_decay, square_gain, correction, eps, step_size, previous, current;

  explicit Numbers(const double* x)
      : sign(x[0]), decay(x[1]), keep(x[2]), momentum(x[3]), gain(x[4]), square_decay(x[5]), square_gain(x[6]),
        correction(x[7]), eps(x[8]), step_size(x[9]), previous(x[10]), current(x[11]) {}
};

template <int KIND, class Real>
void block(int64_t n, Real* p, const Real* g, Real* m, Real* v, Real* last, const Real* fresh, const Numbers<Real> k) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real x = k.sign * g[j] + k.decay * p[j];
    const Real square = k.square_decay * v[j] + k.square_gain * x * x;
    const Real e = k.previous * last[j] + k.current * fresh[j];
    const Real d = std::sqrt(square) * k.correction + k.eps;
    const Real noise = std::sqrt(d) * e;
    Real move;
    if constexpr (KIND == MOMENT) {
      const Real moment = k.momentum * m[j] + k.gain * x + noise;
      m[j] = moment;
      move = moment / d;
    } else if constexpr (KIND == SCALED) {
      move = (x + noise) / d;
    } else {
      move = k.momentum * m[j] + (x + noise) / d;
      m[j] = move;
    }
    v[j] = square;
    last[j] = fresh[j];
    p[j] = k.keep * p[j] - k.step_size * move;
  }
}

template <int KIND, class Real>
void sweep(int64_t leaves, const int64_t* sizes, Real** p, const Real** g, Real** m, Real** v, Real** last,
           const Real* fresh, const double* numbers, int threads) {
  constexpr int64_t BLOCK = 1 << 14;
  const Numbers<Real> k(numbers);
#pragma omp parallel num_threads(threads) firstprivate(fresh) if (threads > 1)
  for (int64_t i = 0; i < leaves; fresh += sizes[i], ++i) {
    const int64_t blocks = (sizes[i] + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t a = b * BLOCK, n = sizes[i] - a < BLOCK ? sizes[i] - a : BLOCK;
      block<KIND>(n, p[i] + a, g[i] + a, KIND == SCALED ? nullptr : m[i] + a, v[i] + a, last[i] + a, fresh + a, k);
    }
  }
}

template <class Real>
void count(int64_t leaves, Real** steps) {
  for (int64_t i = 0; i < leaves; ++i) *steps[i] += 1;
}

}  // namespace

#define EXPORT(name, Real)                                                                                           \
  extern "C" void name(int kind, int64_t leaves, const int64_t* sizes, Real** p, const Real** g, Real** m, Real** v, \
                       Real** last, const Real* fresh, const double* numbers, int threads) {                         \
    (kind == MOMENT   ? sweep<MOMENT, Real>                                                                          \
     : kind == SCALED ? sweep<SCALED, Real>                                                                          \
                      : sweep<SCALED_MOMENTUM, Real>)(leaves, sizes, p, g, m, v, last, fresh, numbers, threads);     \
  }
EXPORT(sweep_float, float)
EXPORT(sweep_double, double)

extern "C" void count_float(int64_t leaves, float** steps) { count(leaves, steps); }
extern "C" void count_double(int64_t leaves, double** steps) { count(leaves, steps); }
