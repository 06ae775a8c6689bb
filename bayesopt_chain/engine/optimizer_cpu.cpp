#include <cmath>
#include <cstdint>
#include <cstring>

#include "../random/philox.hpp"
#include "law.hpp"

namespace {

enum Kind { MOMENT = 0, SCALED = 1, SCALED_MOMENTUM = 2, PLAIN = 3, MOMENTUM = 4 };

// what the noise depends on of the last step that drew, in the order of bayesopt_chain.optim._rule.Before; NaN before the first
struct Before {
  double temperature, half, arrives, momentum, gain, surplus, direct_half, direct_surplus;
};

// the numbers of a step, in the order of bayesopt_chain.engine.optimizer_cpu.Job.run
struct Given {
  double sign, decay, eps, step_size, momentum, gain, direct, shrink, square_decay, correction, temperature;
};

struct Noise {
  double previous = 0, current = 0, velocity_scale = 1, direct = 0, direct_previous = 0;
};

// bayesopt_chain.optim._rule.noise_of, operation for operation; what the next step needs is written. At a rate of 0 there has to
// be a velocity and a draw before this one.
Noise noise_of(const Given& k, Before& before) {
  const Before last = before;
  const bool began = !std::isnan(last.temperature);
  const double mu = k.momentum, rate = k.step_size * k.gain;
  const Level then = {last.temperature, last.half, last.arrives, last.momentum};
  Noise noise;
  if (rate > 0) {
    const Level now = level(rate, mu, k.temperature, mu * k.shrink / rate);
    const double own = !began ? mu : last.momentum != 0 ? mu * last.gain / k.gain : 0.0;
    const Coefficients c = scheduled_noise(now, began ? then : now, began ? last.surplus : 0.0, own);
    noise.previous = began ? k.gain * c.previous : 0.0;
    noise.current = k.gain * c.current;
    if (began && mu != 0 && !(last.momentum != 0 && c.velocity == own))
      noise.velocity_scale = c.velocity * k.gain / (mu * last.gain);
    before = {now.temperature, now.half, now.arrives, mu, k.gain, c.surplus, 0.0, 0.0};
  } else {
    const Coefficients c = scheduled_noise({then.temperature, 0.0, then.arrives, then.momentum}, then, last.surplus, then.momentum);
    noise.previous = k.gain * c.previous;
    noise.current = k.gain * c.current;
    noise.velocity_scale = last.momentum * k.gain / (mu * last.gain);
    before = {last.temperature, 0.0, last.arrives, -1.0, k.gain, c.surplus, last.direct_half, last.direct_surplus};
  }
  if (k.direct > 0) {
    const bool goes_on = began && last.direct_half != 0;
    const Level direct = level(k.direct, 0.0, k.temperature, 0.0);
    const Level was = goes_on ? Level{last.temperature, last.direct_half, last.direct_half, 0.0} : direct;
    const Coefficients d = scheduled_noise(direct, was, goes_on ? last.direct_surplus : 0.0, 0.0);
    noise.direct = d.current;
    noise.direct_previous = goes_on ? d.previous : 0.0;
    before.direct_half = direct.half;
    before.direct_surplus = d.surplus;
  }
  return noise;
}

template <class Real>
struct Numbers {
  Real sign, decay, eps, step_size, momentum, gain, direct, keep, square_decay, square_gain, correction, previous, current,
      velocity_scale, direct_current, direct_previous;

  Numbers(const Given& k, const Noise& noise)
      : sign(k.sign), decay(k.decay), eps(k.eps), step_size(k.step_size), momentum(k.momentum), gain(k.gain),
        direct(k.direct), keep(1.0 - k.shrink), square_decay(k.square_decay), square_gain(1.0 - k.square_decay),
        correction(k.correction), previous(noise.previous), current(noise.current), velocity_scale(noise.velocity_scale),
        direct_current(noise.direct), direct_previous(noise.direct_previous) {}
};

// the leaves of a step, in the order of bayesopt_chain.engine.optimizer_cpu, where _tensors_of ends and _now begins at numbers
template <class Real>
struct Job {
  int64_t kind, leaves;
  const int64_t* sizes;
  Real** p;
  const Real** g;
  Real **m, **v, **last[2];   // last draws of the two branches; null where they are made again
  const int64_t* draws[2];    // numbers of the leaves in the random stream; null without that branch
  Before* before;
  int64_t (*again)[2];  // of each branch, key and step of the last draws; a step below 0 for none
  Given numbers;
  int64_t key, step, threads;
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
void sweep(const Job<Real>& job, const Numbers<Real>& k) {
  constexpr int64_t BLOCK = 1 << 14, ROW = 4 * RUN;
  constexpr int BRANCHES = DIRECT ? 2 : 1;
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
  const Numbers<Real> k(job.numbers, noise_of(job.numbers, *job.before));
  switch (job.kind) {
    case MOMENT: sweep<MOMENT, false>(job, k); break;
    case SCALED: sweep<SCALED, false>(job, k); break;
    case SCALED_MOMENTUM: sweep<SCALED_MOMENTUM, false>(job, k); break;
    case PLAIN: sweep<PLAIN, false>(job, k); break;
    default: job.draws[1] ? sweep<MOMENTUM, true>(job, k) : sweep<MOMENTUM, false>(job, k);
  }
  for (int c = 0; c < 2; ++c)
    if (job.draws[c]) job.again[c][0] = job.key, job.again[c][1] = job.step;
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
