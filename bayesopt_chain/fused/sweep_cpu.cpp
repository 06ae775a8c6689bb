#include <cstdint>

namespace {

template <bool MOVES, class Real>
Real put(const Real* from, int64_t j, Real move) {
  if constexpr (MOVES)
    return from[j] + move;
  else
    return move;
}

template <bool MOVES, class Real>
void without_noise(int64_t n, const Real* p, const Real* g, const Real* s, Real* u, Real* t, Real mu, Real f) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real v = mu * s[j] + g[j];
    u[j] = put<MOVES>(p, j, f * v);
    t[j] = v;
  }
}

template <bool MOVES, class Real>
void with_velocity(int64_t n, const Real* p, const Real* g, const Real* s, const Real* e, Real* u, Real* t, Real mu, Real f, Real deferred) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real v = mu * s[j] + (g[j] + e[j]);
    u[j] = put<MOVES>(p, j, f * v);
    t[j] = v + deferred * e[j];
  }
}

template <bool MOVES, class Real>
void with_memory(int64_t n, const Real* p, const Real* g, const Real* m, const Real* e, Real* u, Real* t, Real f) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real noise = e[j];
    u[j] = put<MOVES>(p, j, f * (g[j] + (noise + m[j])));
    t[j] = noise;
  }
}

template <bool MOVES, class Real>
void sweep(int64_t leaves, const int64_t* sizes, const Real** p, const Real** g, const Real** s, const Real* e, Real** u,
           Real** t, int velocity, double mu, double f, double deferred, int threads) {
  constexpr int64_t BLOCK = 1 << 14;
#pragma omp parallel num_threads(threads) firstprivate(e) if (threads > 1)
  for (int64_t i = 0; i < leaves; e += e ? sizes[i] : 0, ++i) {
    const int64_t blocks = (sizes[i] + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t a = b * BLOCK, n = sizes[i] - a < BLOCK ? sizes[i] - a : BLOCK;
      const Real* from = MOVES ? p[i] + a : nullptr;
      if (!e)
        without_noise<MOVES>(n, from, g[i] + a, s[i] + a, u[i] + a, t[i] + a, Real(mu), Real(f));
      else if (velocity)
        with_velocity<MOVES>(n, from, g[i] + a, s[i] + a, e + a, u[i] + a, t[i] + a, Real(mu), Real(f), Real(deferred));
      else
        with_memory<MOVES>(n, from, g[i] + a, s[i] + a, e + a, u[i] + a, t[i] + a, Real(f));
    }
  }
}

}  // namespace

#define EXPORT(name, Real)                                                                                            \
  extern "C" void name(int64_t leaves, const int64_t* sizes, const Real** p, const Real** g, const Real** s,          \
                       const Real* e, Real** u, Real** t, int velocity, double mu, double f, double deferred,         \
                       int threads) {                                                                                 \
    (p ? sweep<true, Real> : sweep<false, Real>)(leaves, sizes, p, g, s, e, u, t, velocity, mu, f, deferred, threads); \
  }
EXPORT(sweep_float, float)
EXPORT(sweep_double, double)
