// The remaining budget and its forecast.

import { lineChart } from "./chart.js";
import { h, panel } from "./dom.js";
import { burnDown, outlook, pace } from "./forecast.js";
import { amount, count, UNITS } from "./format.js";
import { caps, meter } from "./runs.js";

export function budgetPanel(signal) {
  const chart = lineChart({
    title: "Queries left over rounds",
    x: { label: "Rounds done", format: count },
    y: "Queries left",
    format: count,
    series: [
      { label: "Queries left", tone: 1 },
      { label: "Forecast", tone: 1, dash: true, mark: true },
    ],
    signal,
  });
  const verdict = h("p", { class: "verdict" });
  const units = h("ul", { class: "units" });
  const node = panel("Budget", verdict, chart.node, units);
  return {
    node,
    update({ rounds, result, planned }) {
      const capped = caps(result);
      const cap = result.cap.queries;
      const running = result.status === "running";
      const { x, left } = burnDown(rounds, cap ?? 0, result.spent.queries);
      const end = outlook(rounds.length, planned, left.at(-1), pace(rounds));
      chart.node.hidden = cap === null || !rounds.length;
      verdict.textContent = say(capped, cap, rounds, running, end, planned);
      if (!chart.node.hidden) {
        const ahead = x.map(() => null);
        if (running && end.round > x.at(-1)) {
          ahead[ahead.length - 1] = left.at(-1);
          x.push(end.round);
          left.push(null);
          ahead.push(end.left);
        }
        chart.update([x, left, ahead], verdict.textContent);
      }
      units.replaceChildren(...capped.map((each) => unit(each, result, running, planned)));
    },
  };
}

function say(capped, cap, rounds, running, end, planned) {
  if (!capped.length) return "This run has no cap. It ends after its last round.";
  if (!running) return "The run is not running, so it spends nothing.";
  if (!rounds.length) return "Training has spent nothing yet.";
  if (cap === null) return "";
  return end.enough
    ? `At this pace about ${count(Math.max(end.left, 0))} of ${count(cap)} queries are left after round ${count(planned)}.`
    : `At this pace the queries are used up after round ${count(end.round)} of ${count(planned)}.`;
}

function unit({ unit: name, cap, spent }, result, running, planned) {
  const leased = Number(name === "tokens" ? result.leased.prompt_tokens + result.leased.completion_tokens : result.leased[name]);
  const text = [`${amount(name, spent)} of ${amount(name, cap)} ${UNITS[name]} spent`];
  if (leased) text.push(`${amount(name, leased)} reserved`);
  if (running && result.rounds) {
    const all = (spent / result.rounds) * planned;
    text.push(all > cap ? "not enough for all rounds" : `about ${amount(name, all)} in the end`);
  }
  return h("li", {}, meter(`Spent: ${UNITS[name]}`, spent, cap), text.join(", "));
}
