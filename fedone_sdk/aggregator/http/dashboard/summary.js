// Summary of a run in six numbers.

import { h } from "./dom.js";
import { outlook, pace, secondsLeft, smooth } from "./forecast.js";
import { bytes, count, duration, loss, metric } from "./format.js";
import { baseline, signed } from "./worth.js";

export function summary() {
  const tiles = {
    Metric: tile(),
    Loss: tile(),
    Rounds: tile(),
    Queries: tile(),
    Time: tile(),
    Traffic: tile(),
  };
  const node = h(
    "dl",
    { class: "tiles" },
    Object.entries(tiles).map(([name, each]) => h("div", {}, h("dt", {}, name), each.value, each.note)),
  );
  const set = (name, value, note) => {
    tiles[name].value.textContent = value;
    tiles[name].note.textContent = note;
  };
  return {
    node,
    update({ rounds, result, planned }) {
      const now = result.metric.after ?? rounds.findLast((each) => each.metric !== null)?.metric ?? null;
      set("Metric", now === null ? "–" : metric(now), gained(result, now));
      const means = smooth(rounds.map((each) => each.mean_loss));
      set("Loss", means.length ? loss(means.at(-1)) : "–", means.length ? `${loss(means[0])} at first` : "no round yet");
      set("Rounds", count(result.rounds), `of ${count(planned)} planned`);
      const cap = result.cap.queries;
      set("Queries", count(result.spent.queries), cap === null ? "no cap" : `of ${count(cap)}`);
      set("Time", duration(result.wall_s), remaining(rounds, result, planned, cap));
      const { upload_bytes: up, download_bytes: down } = result.communication;
      set("Traffic", bytes(up + down), `${bytes(up)} up, ${bytes(down)} down`);
    },
  };
}

// The gain over the fair baseline, if it is known.
function gained({ metric: { before, ...measured }, verdict, status }, now) {
  const fair = verdict?.standings.find((each) => each.name === verdict.against)?.gain;
  if (fair) return `${signed(fair.value)} over ${verdict.against === "no_prompt" ? "no prompt" : "a label bias alone"}`;
  if (now === null) return status === "running" ? "not measured yet" : "not measured";
  const base = baseline(measured);
  if (base.value !== null) return `${signed(measured.name === "loss" ? base.value - now : now - base.value)} over ${base.label}`;
  return before === null ? "" : `${signed(now - before)} over untrained`;
}

function remaining(rounds, result, planned, cap) {
  if (result.status !== "running") return "in all";
  const left = cap === null ? Infinity : cap - result.spent.queries;
  const end = outlook(rounds.length, planned, left, pace(rounds));
  const seconds = secondsLeft(rounds.length, end.round, result.wall_s);
  return seconds === null ? "no round yet" : `about ${duration(seconds)} left`;
}

function tile() {
  return { value: h("dd", { class: "value" }), note: h("dd", { class: "note" }) };
}
