// Matched noise of one branch under a schedule: bayesopt_chain.matching.law on doubles, operation for operation.
#include <cmath>

namespace {

struct Level {
  double temperature, half, arrives, momentum;
};

struct Coefficients {
  double current, previous, velocity, surplus;
};

double root(double x) { return x == 0 ? 0.0 : std::pow(x, 0.5); }

Level level(double rate, double momentum, double temperature, double decay) {
  return {temperature, 0.5 * ((1.0 - momentum) / rate + decay), 0.5 * ((1.0 + momentum) / rate - decay), momentum};
}

Coefficients scheduled_noise(const Level& now, const Level& before, double surplus, double momentum) {
  const double alpha2 = before.temperature * before.half, a2 = alpha2 + surplus;
  const double share = alpha2 / (a2 > 0 ? a2 : 1.0), b = share * root(a2), s = surplus * share;
  const double least_variance = before.temperature * before.arrives - s, growth = now.arrives - before.arrives;
  const double c_own = before.temperature * growth + s, mu = before.momentum, d = (momentum - mu) / (1.0 - mu);
  const double c_optimizer = c_own - d * (d * alpha2 + (2.0 - d) * s);
  const bool fits = c_optimizer >= 0 && (alpha2 > 0 || momentum == mu);
  const double g = root(c_own < 0 ? before.temperature * now.arrives / least_variance : 1.0);
  const double excess = now.temperature < before.temperature ? (before.temperature - now.temperature) * growth : 0.0;
  double c = (fits ? c_optimizer : c_own) - excess;
  c = c > 0 ? c : 0.0;
  return {root(now.temperature * now.half + c), (fits ? 1.0 - d : g) * b, fits ? momentum : g * mu, c};
}

}  // namespace
