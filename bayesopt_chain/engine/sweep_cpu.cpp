#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../random/philox.hpp"
#include "law.hpp"

namespace {

// what a step does, one bit each; see bayesopt_chain.engine.sweep_cpu
enum : int { MOVES = 1, DECAYS = 2, FLIPS = 4, ADDS = 8, DRAWS = 16, NESTEROV = 32, DIVIDES = 64, MOMENT = 128 };

// the numbers of a step of a leaf, in the order of bayesopt_chain.engine.engine.Move
struct Move {
  double factor, momentum, decay, current, previous, head, deferred, velocity_scale, remembers;
};

// the numbers by which a leaf learns, in the order of bayesopt_chain.engine.engine.Learned
struct Learned {
  double square_decay, square_gain, eps, eps_root, gain, correction, square_correction, learns;
};

// what of a run's numbers does not change, in the order of Engine.rule
struct Rule {
  double sign, momentum, decay, gain, mu, head, noise_decay, order, behind, deferred;
};

// what the noise of a leaf remembers of the last step: LangevinNoiseState.conditions
struct Conditions {
  double temperature, rate, front, surplus, other;
};

// behind it lie the addresses of the tensors, list behind list, which have the chains on their first axis
struct Job {
  const int64_t* sizes;
  int64_t chains;
  const int64_t* draws;
  int64_t lengths[10];  // of the lists that are read: see sweep
};

struct Numbers {
  Move move;
  double temperature;
  const Rule* rule;     // by which numbers are worked out of rate and temperature; null where they need only the rate
  const double* rates;  // of all leaves or of each, or a table; null where the move is whole
  const uint8_t* live;  // whether a leaf has a gradient; null if all have one
  int64_t stride;
  int64_t first, length;  // counts of the table; a length of 0 without one
  const Learned* learned;
  int64_t learned_stride;
  void* root;  // a function that takes roots; null for that of C++
};

// The arithmetic of bayesopt_chain.matching: law.py and filters.Scheduled of one branch, on doubles, operation for operation.

Coefficients white_noise(const Level& now, const Level& before, double momentum) {
  const double variance = 2.0 / (1.0 - momentum) * now.half, last_variance = 2.0 / (1.0 - momentum) * before.half;
  const bool rises = last_variance > 0 && variance < momentum * momentum * last_variance;
  const double k = rises ? root(variance / last_variance) : momentum + 0.0 * variance;
  const double e = 2.0 / (1.0 + momentum) * (now.temperature * variance - k * k * before.temperature * last_variance);
  return {root(e > 0 ? e : 0.0), 0.0 * e, k, 0.0 * e};
}

// the numbers of a leaf for the rate of this step, and what its noise has to remember
Move move_of(const Rule& rule, double rate_now, double now_temperature, const Conditions& last, Conditions& after) {
  const double behind = rule.behind ? rate_now : 1.0, last_moved = std::fabs(last.rate);
  const bool moves = behind != 0, last_moves = last.rate >= 0;
  const double now = moves ? behind : last_moved;
  const bool runs = now != 0, began = last_moved != 0, has_velocity = rule.mu > 0;
  const double rate = runs ? now : 1.0, temperature = runs ? now_temperature : 0.0;
  const double before = began ? last_moved : rate, before_temperature = began ? last.temperature : temperature;
  const double last_front = began ? last.front : 1.0;
  const bool moved = began ? last_moves : true;
  Level level_now = level(rate * rule.gain, rule.mu, temperature, rule.noise_decay);
  Level level_before = level(before * rule.gain, rule.mu, before_temperature, rule.noise_decay);
  const double own = rule.mu * last_front;
  double c = last.surplus;
  Coefficients k;
  if (rule.order == 1) {
    level_before.half = began ? level_before.half : 0.0;
    k = white_noise(level_now, level_before, rule.mu);
  } else {
    if (rule.mu != 0) {
      level_now.half = moves ? level_now.half : 0.0;
      level_before.half = moved ? level_before.half : 0.0;
      level_before.momentum = moved ? rule.mu + 0.0 * rate : -1.0;
    }
    c = began ? c : 0.0;
    k = scheduled_noise(level_now, level_before, c, own);
  }
  double scale = 1.0;
  if (rule.mu != 0) {
    const double front = 1.0 / (last_front > 0 ? last_front : 1.0);
    scale = k.velocity == own ? 1.0 + 0.0 * front : k.velocity / rule.mu * front;
    if (now_temperature == 0 && last.temperature == 0) scale = 1.0;
  }
  after = {now_temperature, moves ? now : -now, 1.0, rule.mu != 0 ? k.surplus : (moves ? k.surplus : c), last.other};
  const double factor = rule.sign * rate_now, previous = began ? k.previous : 0.0;
  const double alpha2 = temperature * level_now.half, a2 = alpha2 + k.surplus;  // of the step that is made
  const double deferred = rule.deferred * (alpha2 / (a2 > 0 ? a2 : 1.0));
  if (rule.order == 1 || rule.deferred > 0)
    return {factor, rule.momentum, rule.decay, rule.head * k.current, 0.0, 1.0, deferred, scale, 0.0};
  return {factor, rule.momentum, rule.decay, k.current, previous, rule.head, 0.0, scale, has_velocity || moves ? 1.0 : 2.0};
}

// the rates of this step: in a table that of the count of all leaves, null if they differ or it has none
const double* rates_of(const Numbers& now, const int64_t* const* counts, int64_t leaves) {
  if (!now.length) return now.rates;
  const int64_t n = *counts[0] - now.first;
  for (int64_t i = 1; i < leaves; ++i)
    if (*counts[i] != *counts[0]) return nullptr;
  return n >= 0 && n < now.length ? now.rates + n : nullptr;
}

// the numbers of all leaves; a leaf without a gradient remembers what it did
void moves_of(const Numbers& now, const double* rates, const Conditions* last, std::vector<Move>& moves,
              std::vector<Conditions>& after) {
  for (size_t i = 0; i < moves.size(); ++i) {
    const double rate = rates[i * now.stride];
    if (!now.rule) {
      moves[i] = now.move;
      moves[i].factor *= rate;
      continue;
    }
    after[i] = last[i];
    if (now.live && !now.live[i]) continue;
    // as most leaves are: like the one before
    const bool repeats = i && !now.live && !now.stride && !std::memcmp(last + i, last + i - 1, sizeof *last);
    if (repeats) after[i] = after[i - 1];
    moves[i] = repeats ? moves[i - 1] : move_of(*now.rule, rate, now.temperature, last[i], after[i]);
  }
}

// a + k b as torch's add(a, b, alpha=k) rounds it
template <class Real>
inline Real plus(Real a, Real k, Real b) {
#ifdef __FMA__
  return std::fma(k, b, a);
#else
  return a + k * b;
#endif
}

// SCALE: 0 none, 1 divides the velocity (Adam), 2 divides what enters it, or the gradient; VELOCITY: 0 none, 1 heavy ball,
// 2 Nesterov; NOISE: 0 none, 1 this draw alone, 2 with the last one, which memory holds; DECAY: whether there is any, towards 0
// or a centre. Both sides of what is chosen inside the loop are values at hand, so
// that compilers turn the loop into vectors.
template <int SCALE, int VELOCITY, int NOISE, bool DECAY, class Real>
void run(int64_t n, const Real* p, const Real* g, const Real* s, const Real* m, const Real* c, const Real* d, const Real* shape,
         const Real* xi, Real* u, Real* t, Real* w, const Move& k, const Learned& l, int64_t flags) {
  const bool moves = flags & MOVES, adds = flags & ADDS, pulls = c;
  const bool leaves = k.remembers == 2, defers = k.deferred != 0;
  const Real f(k.factor), mu(k.momentum), decay(k.decay), current(k.current), previous(k.previous), head(k.head),
      deferred(k.deferred), scale(k.velocity_scale), sign(flags & FLIPS ? -1 : 1);
  const Real kept(k.remembers == 1 ? 1 : k.current);  // memory holds the draw, or what it was multiplied by
  const Real gain(l.gain), correction(l.correction);
  if (!p) p = g;  // read, and not used
  if (!c) c = g;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real at = p[j];
    Real x = sign * g[j];
    if constexpr (DECAY) {
      const Real off = at - c[j];
      x = plus(x, decay, pulls ? off : at);
    }
    Real noise = 0;
    if constexpr (NOISE > 0) {
      const Real a = current * xi[j];
      noise = a;
      if constexpr (NOISE == 2) {
        const Real last = m[j];
        noise = a + previous * last;
        const Real now = kept * xi[j];
        w[j] = leaves ? last : now;
      }
      noise = head * noise;
      if constexpr (SCALE > 0) noise = noise * shape[j];
      const Real noisy = x + noise;
      x = adds ? noisy : x;
    }
    if constexpr (SCALE == 2) x = x / d[j];
    Real y = x;
    if constexpr (VELOCITY > 0) {
      const Real old = mu * (scale * s[j]), v = SCALE == 1 ? plus(old, gain, x) : old + x;
      y = VELOCITY == 2 ? plus(x, mu, v) : v;
      const Real late = v + deferred * noise;
      t[j] = NOISE == 1 && defers ? late : v;
    }
    if constexpr (SCALE == 1) y = y / correction / d[j];
    y = f * y;
    const Real there = at + y;
    u[j] = moves ? there : y;
  }
}

// roots as torch takes them: by MKL, whose result is not always the nearest number, or, without it, each by itself
template <class Real>
using Root = void (*)(int64_t, const Real*, Real*, int64_t);

template <class Real>
void roots(int64_t n, const Real* x, Real* y, Root<Real> mkl) {
  constexpr int64_t MODE = 0x140102;  // high accuracy, denormal numbers, no errors: of ATen's vml.h
  if (mkl) return mkl(n, x, y, MODE);
  for (int64_t j = 0; j < n; ++j) y[j] = std::sqrt(x[j]);
}

// the mean squares r after this step, the divisors d, and the roots of these, which shape the noise
template <class Real>
void learn(int64_t n, const Real* p, const Real* g, const Real* q, const Real* c, Real* r, Real* d, Real* shape, const Move& k,
           const Learned& l, int64_t flags, Root<Real> mkl) {
  const bool learns = l.learns != 0, decays = flags & DECAYS, pulls = c;
  const Real decay(k.decay), sign(flags & FLIPS ? -1 : 1), square_decay(l.square_decay), square_gain(l.square_gain), eps(l.eps),
      eps_root(l.eps_root), correction(l.square_correction);
  if (!p) p = g;  // read, and not used
  if (!c) c = g;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real clean = sign * g[j], off = p[j] - c[j], decayed = plus(clean, decay, pulls ? off : p[j]);
    const Real x = decays ? decayed : clean, was = q[j], square = plus(square_decay * was, square_gain * x, x);
    r[j] = learns ? square : was;
    d[j] = r[j] / correction + eps_root;
  }
  roots(n, d, d, mkl);
  for (int64_t j = 0; j < n; ++j) d[j] = d[j] + eps;
  if (flags & DRAWS) roots(n, d, shape, mkl);
}

template <class Real>
using Kernel = void (*)(int64_t, const Real*, const Real*, const Real*, const Real*, const Real*, const Real*, const Real*,
                        const Real*, Real*, Real*, Real*, const Move&, const Learned&, int64_t);

// in the place of a gradient that there is none of; null is the address of one without elements
template <class Real>
const Real* const MISSING = reinterpret_cast<const Real*>(-1);

template <class To>
inline To* from(To* const* places, int64_t i, int64_t a) {
  return places ? places[i] + a : nullptr;
}

// whether there is no rate for this step in the table; then nothing is done
template <class Real>
bool sweep(const Job& job, const Numbers& now, int64_t flags, int64_t threads) {
#define BY_DECAY(S, V, N) {run<S, V, N, false, Real>, run<S, V, N, true, Real>}
#define BY_NOISE(S, V) {BY_DECAY(S, V, 0), BY_DECAY(S, V, 1), BY_DECAY(S, V, 2)}
  static const Kernel<Real> table[7][3][2] = {BY_NOISE(0, 0), BY_NOISE(0, 1), BY_NOISE(0, 2), BY_NOISE(1, 1),
                                              BY_NOISE(2, 0), BY_NOISE(2, 1), BY_NOISE(2, 2)};
  // the last seven are written, and as long as the seven before them, which they replace
  enum { P, C, KEY, S, Q, M, COUNTS, STEP, CONDITIONS, G, T, R, W, NEXT_COUNTS, NEXT_STEP, NEXT_CONDITIONS, U, LISTS };
  void* const* lists[LISTS];
  auto next = reinterpret_cast<void* const*>(&job + 1);
  for (int k = 0; k < LISTS; ++k) {
    const int64_t length = job.lengths[k > G ? k - 7 : k];
    lists[k] = length ? next : nullptr;
    next += length;
  }
  const int64_t leaves = job.lengths[G];
  const bool draws = flags & DRAWS, decays = flags & DECAYS;
  const int velocity = lists[S] ? (flags & NESTEROV ? 2 : 1) : 0, first = flags & DIVIDES ? 4 : 0;
  const int form = flags & MOMENT ? 3 : first + velocity;
  const Kernel<Real> kernel = table[form][draws ? (lists[M] ? 2 : 1) : 0][decays];
  const Learned nothing = {0, 0, 0, 0, 1, 1, 1, 0};
  std::vector<Move> moves(now.rates ? leaves : 0);
  std::vector<Conditions> after(now.rule ? leaves : 0);
  const auto counts = reinterpret_cast<const int64_t* const*>(lists[COUNTS]);
  const auto last = lists[CONDITIONS] ? static_cast<const Conditions*>(*lists[CONDITIONS]) : nullptr;
  const double* rates = rates_of(now, counts, leaves);
  if (now.rates && !rates) return true;
  if (now.rates) moves_of(now, rates, last, moves, after);
  const auto p = reinterpret_cast<const Real* const*>(lists[P]), g = reinterpret_cast<const Real* const*>(lists[G]),
             s = reinterpret_cast<const Real* const*>(lists[S]), m = reinterpret_cast<const Real* const*>(lists[M]),
             q = reinterpret_cast<const Real* const*>(lists[Q]), c = reinterpret_cast<const Real* const*>(lists[C]);
  const auto u = reinterpret_cast<Real* const*>(lists[U]), t = reinterpret_cast<Real* const*>(lists[T]),
             w = reinterpret_cast<Real* const*>(lists[W]), r = reinterpret_cast<Real* const*>(lists[R]);
  const auto keys = draws ? static_cast<const uint64_t*>(*lists[KEY]) : nullptr,
             steps = draws ? static_cast<const uint64_t*>(*lists[STEP]) : nullptr;
  constexpr int64_t BLOCK = 1 << 14;
  const bool learning = flags & (DIVIDES | MOMENT);
  const int64_t row_size = draws || learning ? 4 * RUN : BLOCK;  // a row of draws lies in first-level cache while it is used
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  for (int64_t k = 0; k < job.chains * leaves; ++k) {
    const int64_t chain = k / leaves, i = k % leaves;
    if (g[i] == MISSING<Real>) continue;
    const int64_t size = job.sizes[i], blocks = (size + BLOCK - 1) / BLOCK;
    Stream stream = {};
    if (draws) {
      const uint64_t key = keys[chain], step = steps[chain];
      stream = {uint32_t(job.draws[i]), {uint32_t(step), uint32_t(step >> 32)}, {uint32_t(key), uint32_t(key >> 32)}};
    }
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t end = b * BLOCK + BLOCK < size ? b * BLOCK + BLOCK : size;
      Real xi[4 * RUN], d[4 * RUN], shape[4 * RUN];
      const Move& move = now.rates ? moves[i] : now.move;
      const Learned& learned = now.learned ? now.learned[i * now.learned_stride] : nothing;
      for (int64_t a = b * BLOCK; a < end; a += row_size) {
        const int64_t n = end - a < row_size ? end - a : row_size, at = chain * size + a;
        if (draws) row(a / (4 * RUN), 0, int(n), stream, xi);
        if (learning)
          learn(n, from(p, i, at), g[i] + at, from(q, i, at), from(c, i, at), from(r, i, at), d, shape, move, learned, flags,
                reinterpret_cast<Root<Real>>(now.root));
        kernel(n, from(p, i, at), g[i] + at, from(s, i, at), from(m, i, at), from(c, i, at), d, shape, xi, u[i] + at,
               from(t, i, at), from(w, i, at), move, learned, flags);
      }
    }
  }
  for (int64_t chain = 0; chain < job.chains; ++chain) {
    if (last) {
      const Conditions* from = now.rule ? after.data() : last + chain * leaves;
      std::memmove(static_cast<Conditions*>(*lists[NEXT_CONDITIONS]) + chain * leaves, from, sizeof *from * leaves);
    }
    if (draws) static_cast<uint64_t*>(*lists[NEXT_STEP])[chain] = steps[chain] + 1;
    for (int64_t i = 0; i < job.lengths[COUNTS]; ++i)
      if (g[i % leaves] != MISSING<Real>) static_cast<int64_t*>(lists[NEXT_COUNTS][i])[chain] = counts[i][chain] + 1;
  }
  return false;
}

}  // namespace

#define EXPORT(name, Real) \
  extern "C" int name(const Job* job, const Numbers* now, int64_t flags, int64_t threads) { \
    return sweep<Real>(*job, *now, flags, threads); \
  }
EXPORT(sweep_float, float)
EXPORT(sweep_double, double)
extern "C" void roots_float(int64_t n, const float* x, float* y, void* mkl) { roots(n, x, y, reinterpret_cast<Root<float>>(mkl)); }
extern "C" void roots_double(int64_t n, const double* x, double* y, void* mkl) {
  roots(n, x, y, reinterpret_cast<Root<double>>(mkl));
}

// whether torch's add with alpha, as this library has it, rounds once
extern "C" int fuses() {
#ifdef __FMA__
  return 1;
#else
  return 0;
#endif
}

// the numbers of one leaf, for comparison with bayesopt_chain.matching
extern "C" void numbers(const Rule* rule, double rate, double temperature, const Conditions* last, Move* move, Conditions* after) {
  *move = move_of(*rule, rate, temperature, *last, *after);
}
