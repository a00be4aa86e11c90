// Loss and metric over queries.

import { get, runPath } from "./api.js";
import { lineChart } from "./chart.js";
import { h, panel } from "./dom.js";
import { smooth } from "./forecast.js";
import { count, loss, metric } from "./format.js";
import { baseline } from "./worth.js";

const QUERIES = { label: "Queries", format: count };

export function lossPanel(signal) {
  const chart = lineChart({
    title: "Loss over queries",
    x: QUERIES,
    y: "Mean loss",
    format: loss,
    series: [
      { label: "Round", tone: 1, faint: true },
      { label: "Smoothed", tone: 1 },
    ],
    signal,
  });
  const none = h("p", { class: "none" }, "No round is done yet.");
  const node = panel("Loss", none, chart.node);
  return {
    node,
    update({ rounds }) {
      none.hidden = rounds.length > 0;
      chart.node.hidden = !rounds.length;
      if (!rounds.length) return;
      const values = rounds.map((each) => each.mean_loss);
      const means = smooth(values);
      const x = queries(rounds);
      chart.update(
        [x, values, means],
        `Smoothed mean loss: ${loss(means[0])} in the first round, ${loss(means.at(-1))} after ` +
          `${count(x.at(-1))} queries.`,
      );
    },
  };
}

export function metricPanel(signal) {
  const chart = lineChart({
    title: "Metric over queries",
    x: QUERIES,
    y: "Metric on the dev split",
    format: metric,
    series: [
      { label: "Tuned prompt", tone: 2, dots: true },
      { label: "Untrained prompt", tone: 3, dash: true, mark: true },
      { label: "No prompt (with or without bias)", tone: 4, dash: true, mark: true },
    ],
    signal,
  });
  const none = h("p", { class: "none" });
  const heading = panel("Metric", none, chart.node);
  const title = heading.querySelector("h2");
  return {
    node: heading,
    update({ rounds, result }) {
      const { name, before, after } = result.metric;
      const { value: bare, label } = baseline(result.metric, result.verdict);
      title.textContent = name.replaceAll("_", " ").replace(/^./, (first) => first.toUpperCase());
      const x = [0, ...queries(rounds)];
      const values = [before, ...rounds.map((each) => each.metric)];
      if (after !== null && values.length > 1) values[values.length - 1] = after;
      const known = values.filter((value) => value !== null);
      const found = known.length > 0 && rounds.length > 0;
      none.hidden = found;
      none.textContent = rounds.length
        ? (result.verdict?.text.replace(/^./, (first) => first.toUpperCase()) ?? "Nothing is measured yet.")
        : before === null
          ? "Nothing is measured yet."
          : `${metric(before)} with the untrained prompt. The curve begins with the first round.`;
      chart.node.hidden = !found;
      if (!found) return;
      chart.update(
        [x, values, x.map(() => before), x.map(() => bare)],
        `${name}: ${metric(known.at(-1))} of the tuned prompt` +
          (before === null ? "" : `, ${metric(before)} of the untrained one`) +
          (bare === null ? "." : `, ${metric(bare)} of ${label}.`),
      );
    },
  };
}

const SIDE_BY_SIDE = 4; // Runs in one chart: as many as there are colours.

// One chart of the newest runs that have the same metric; hidden if there are fewer than two.
export function runsPanel(signal) {
  const node = panel("Side by side");
  node.style.marginTop = "16px";
  node.hidden = true;
  let [names, chart] = ["", null];
  return {
    node,
    async update(runs) {
      const measured = runs.filter((each) => each.metric !== undefined);
      const shown = measured.filter((each) => each.metric_name === measured[0].metric_name).slice(0, SIDE_BY_SIDE);
      node.hidden = shown.length < 2;
      if (node.hidden) return;
      const found = await Promise.all(shown.map((each) => get(runPath(each.run_id), signal)));
      const now = JSON.stringify(shown.map((each) => each.run_id));
      if (now !== names) {
        chart?.node.remove();
        const series = shown.map((each, at) => ({ label: each.run_id, tone: at + 1, dots: true }));
        chart = lineChart({ title: "Metric of several runs", x: QUERIES, y: shown[0].metric_name, format: metric, series, signal });
        node.append(chart.node);
        names = now;
      }
      const curves = found.map(({ history, metric: { before, after } }) => {
        const spent = [0, ...queries(history)];
        const points = spent.map((x, at) => [x, at ? history[at - 1].metric : before]);
        if (after !== null) points.push([spent.at(-1), after]);
        return new Map(points.filter(([, value]) => value !== null));
      });
      const x = [...new Set(curves.flatMap((each) => [...each.keys()]))].sort((one, other) => one - other);
      const text = shown.map((each) => `${each.run_id}: ${metric(each.metric)}`).join(", ");
      chart.update([x, ...curves.map((each) => x.map((at) => each.get(at) ?? null))], `${text}.`);
    },
  };
}

// Cumulative queries after each round.
function queries(rounds) {
  let sum = 0;
  return rounds.map((each) => (sum += each.queries));
}
