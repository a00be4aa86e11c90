// Forecast of a run's spending. Pure functions of numbers.

const RECENT = 20;

// Computes the remaining amount of a cap at the start and after each round, as {x, left}. The cost of
// lost work belongs to no round; the newest point includes it.
export function burnDown(rounds, cap, spent) {
  const x = [0];
  const left = [cap];
  for (const each of rounds) {
    x.push(each.round + 1);
    left.push(left.at(-1) - each.queries);
  }
  left.push(Math.min(left.pop(), cap - spent));
  return { x, left };
}

// Mean queries per round of the newest rounds.
export function pace(rounds) {
  const recent = rounds.slice(-RECENT);
  return recent.length ? recent.reduce((sum, each) => sum + each.queries, 0) / recent.length : 0;
}

// Extrapolates `left` to the last planned round, or until the budget is empty; returns {round, left}.
export function outlook(done, planned, left, perRound) {
  const remaining = Math.max(planned - done, 0);
  const affordable = perRound > 0 ? Math.floor(left / perRound) : Infinity;
  const rounds = Math.min(remaining, affordable);
  return { round: done + rounds, left: left - rounds * perRound, enough: affordable >= remaining };
}

// Estimated remaining seconds of the run; null before its first round.
export function secondsLeft(done, end, wallSeconds) {
  return done > 0 && wallSeconds > 0 ? (wallSeconds / done) * (end - done) : null;
}

// An exponential mean, because losses of mini-batches are noisy; the command line uses it, too.
export function smooth(values, weight = 0.2) {
  let mean = null;
  return values.map((value) => (mean = mean === null ? value : mean + weight * (value - mean)));
}
