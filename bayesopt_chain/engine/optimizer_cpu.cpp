#include <cmath>
#include <cstdint>

#include "../random/philox.hpp"

namespace {

enum Kind { MOMENT = 0, SCALED = 1, SCALED_MOMENTUM = 2, PLAIN = 3, MOMENTUM = 4 };

template <class Real>
struct Numbers {
  Real sign, decay, eps, step_size, momentum, gain, direct, keep, square_decay, square_gain, correction, previous, current,
      velocity_scale, direct_current, direct_previous;

  explicit Numbers(const double* x)
      : sign(x[0]), decay(x[1]), eps(x[2]), step_size(x[3]), momentum(x[4]), gain(x[5]), direct(x[6]), keep(1.0 - x[7]),
        square_decay(x[8]), square_gain(1.0 - x[8]), correction(x[9]), previous(x[10]), current(x[11]),
        velocity_scale(x[12]), direct_current(x[13]), direct_previous(x[14]) {}
};

// the leaves of a step, addresses and integers in the order of bayesopt_chain.engine.optimizer_cpu.step_
template <class Real>
struct Job {
  int64_t kind, leaves;
  const int64_t* sizes;
  Real** p;
  const Real** g;
  Real **m, **v, **last[2];   // last draws of the two branches; null where they are made again
  const int64_t* draws[2];    // numbers of the leaves in the random stream; null without that branch
  const double* numbers;
  int64_t key, step;
  int64_t again[2][2];        // of each branch, key and step of the draws that are made again; a step below 0 for none
  int64_t threads;
};

// DIRECT: whether there is a direct branch, which has a noise of its own
template <int KIND, bool DIRECT, class Real>
void run(int64_t n, Real* p, const Real* g, Real* m, Real* v, Real* const* last, const Real (*fresh)[4 * RUN],
         const Numbers<Real> k) {
  Real *const before = last[0], *const direct_before = last[1];
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real x = k.sign * g[j] + k.decay * p[j];
    const Real e = k.previous * before[j] + k.current * fresh[0][j];
    before[j] = fresh[0][j];
    Real move;
    if constexpr (KIND == PLAIN) {
      move = k.step_size * (x + e);
    } else if constexpr (KIND == MOMENTUM) {
      const Real velocity = k.momentum * (k.velocity_scale * m[j]) + k.gain * x + e;
      m[j] = velocity;
      move = k.step_size * velocity;
    } else {
      const Real square = k.square_decay * v[j] + k.square_gain * x * x;
      const Real d = std::sqrt(square) * k.correction + k.eps;
      const Real noise = std::sqrt(d) * e;
      if constexpr (KIND == MOMENT) {
        const Real moment = k.momentum * (k.velocity_scale * m[j]) + k.gain * x + noise;
        m[j] = moment;
        move = k.step_size * (moment / d);
      } else if constexpr (KIND == SCALED) {
        move = k.step_size * ((x + noise) / d);
      } else {
        const Real velocity = k.momentum * (k.velocity_scale * m[j]) + (x + noise) / d;
        m[j] = velocity;
        move = k.step_size * velocity;
      }
      v[j] = square;
    }
    if constexpr (DIRECT) {
      move += k.direct * (x + k.direct_previous * direct_before[j] + k.direct_current * fresh[1][j]);
      direct_before[j] = fresh[1][j];
    }
    p[j] = k.keep * p[j] - move;
  }
}

inline Stream stream(int64_t draw, int64_t key, int64_t step) {
  const uint64_t a = key, b = step;
  return {uint32_t(draw), {uint32_t(b), uint32_t(b >> 32)}, {uint32_t(a), uint32_t(a >> 32)}};
}

template <int KIND, bool DIRECT, class Real>
void sweep(const Job<Real>& job) {
  constexpr int64_t BLOCK = 1 << 14, ROW = 4 * RUN;
  constexpr int BRANCHES = DIRECT ? 2 : 1;
  const Numbers<Real> k(job.numbers);
#pragma omp parallel num_threads(int(job.threads)) if (job.threads > 1)
  for (int64_t i = 0; i < job.leaves; ++i) {
    const int64_t size = job.sizes[i], blocks = (size + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks; ++b) {
      Real fresh[2][ROW], again[2][ROW];  // a row of draws lies in first-level cache while it is used
      for (int64_t a = b * BLOCK; a < size && a < (b + 1) * BLOCK; a += ROW) {
        const int64_t n = size - a < ROW ? size - a : ROW;
        Real* last[2] = {again[0], again[1]};
        for (int c = 0; c < BRANCHES; ++c) {
          const int64_t draw = job.draws[c][i];
          row(a / ROW, 0, int(n), stream(draw, job.key, job.step), fresh[c]);
          if (job.last[c]) last[c] = job.last[c][i] + a;
          else if (job.again[c][1] >= 0) row(a / ROW, 0, int(n), stream(draw, job.again[c][0], job.again[c][1]), again[c]);
          else for (int64_t j = 0; j < n; ++j) again[c][j] = 0;
        }
        run<KIND, DIRECT>(n, job.p[i] + a, job.g[i] + a, job.m ? job.m[i] + a : nullptr, job.v ? job.v[i] + a : nullptr, last,
                          fresh, k);
      }
    }
  }
}

template <class Real>
void step(const Job<Real>& job) {
  switch (job.kind) {
    case MOMENT: return sweep<MOMENT, false>(job);
    case SCALED: return sweep<SCALED, false>(job);
    case SCALED_MOMENTUM: return sweep<SCALED_MOMENTUM, false>(job);
    case PLAIN: return sweep<PLAIN, false>(job);
    default: return job.draws[1] ? sweep<MOMENTUM, true>(job) : sweep<MOMENTUM, false>(job);
  }
}

// what all counters were; NaN if they differ
template <class Real>
double count(int64_t leaves, Real** steps, int64_t added) {
  const double was = double(*steps[0]);
  bool same = true;
  for (int64_t i = 0; i < leaves; ++i) {
    same = same && double(*steps[i]) == was;
    *steps[i] += Real(added);
  }
  return same ? was : std::nan("");
}

}  // namespace

extern "C" void step_float(const Job<float>* job) { step(*job); }
extern "C" void step_double(const Job<double>* job) { step(*job); }
extern "C" double count_float(int64_t leaves, float** steps, int64_t added) { return count(leaves, steps, added); }
extern "C" double count_double(int64_t leaves, double** steps, int64_t added) { return count(leaves, steps, added); }
