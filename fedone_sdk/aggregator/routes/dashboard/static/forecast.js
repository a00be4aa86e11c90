// Where a run's spending leads, from where it has been. Plain numbers in, plain numbers out.

const RECENT = 20;

// Rounds -> {x, left}: what is left of a cap before the first round and after each. What work cost
// that came to nothing is in no round; it shows in the newest point, by all that is spent.
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

// Queries of a round, as the newest rounds spent them.
export function pace(rounds) {
  const recent = rounds.slice(-RECENT);
  return recent.length ? recent.reduce((sum, each) => sum + each.queries, 0) / recent.length : 0;
}

// Where `left` ends at this pace: {round, left}, at the plan's end or where nothing is left.
export function outlook(done, planned, left, perRound) {
  const remaining = Math.max(planned - done, 0);
  const affordable = perRound > 0 ? Math.floor(left / perRound) : Infinity;
  const rounds = Math.min(remaining, affordable);
  return { round: done + rounds, left: left - rounds * perRound, enough: affordable >= remaining };
}

// Seconds that the rest of the run takes, if it goes on as it went; null before its first round.
export function secondsLeft(done, end, wallSeconds) {
  return done > 0 && wallSeconds > 0 ? (wallSeconds / done) * (end - done) : null;
}

// An exponential mean with the weight that the command line shows, too: mini-batches jump.
export function smooth(values, weight = 0.2) {
  let mean = null;
  return values.map((value) => (mean = mean === null ? value : mean + weight * (value - mean)));
}
