// The list of runs.

import { get, Problem } from "./api.js";
import * as banner from "./banner.js";
import { runsPanel } from "./curves.js";
import { h, say, table } from "./dom.js";
import { ago, amount, count, metric, plural, status, UNITS } from "./format.js";
import { modelNotice } from "./health.js";
import { empty, loading } from "./states.js";
import { pause } from "./stream.js";

const EVERY_MS = 3_000;

export async function showRuns({ main, signal, fail }) {
  document.title = "Runs · FedOne";
  const list = h("div", {}, loading("Loading the runs …"));
  const model = modelNotice();
  const together = runsPanel(signal);
  main.replaceChildren(h("h1", {}, "Runs"), model.node, list, together.node);
  let known = null;
  while (!signal.aborted) {
    try {
      const [runs] = await Promise.all([get("v1/runs", signal), model.look(signal)]);
      banner.found();
      const now = JSON.stringify([runs, runs.map(active)]);
      if (now !== known) {
        show(list, runs);
        await together.update(runs);
      }
      if (known === null) say(plural(runs.length, "run", "runs"));
      known = now;
      await pause(EVERY_MS, signal);
      if (document.hidden) await seen(signal);
    } catch (error) {
      if (signal.aborted) return;
      if (known === null || (error instanceof Problem && error.code !== "rate_limited")) {
        return fail(error);
      }
      await pause(EVERY_MS, signal, banner.lost);
    }
  }
}

// Resolves when the page is visible again.
export async function seen(signal) {
  while (document.hidden && !signal.aborted) {
    await new Promise((resolve) => {
      document.addEventListener("visibilitychange", resolve, { once: true });
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}

function show(list, runs) {
  if (!runs.length) {
    list.replaceChildren(
      empty(
        "No runs yet",
        h("p", {}, "A run tunes one prompt. Add its file to the server's configuration:"),
        h("pre", {}, h("code", {}, "runs: [run.yaml]")),
        h("p", {}, "or post it: ", h("code", {}, "POST /v1/runs"), " (", h("a", { href: "openapi.json" }, "all calls"), ")."),
      ),
    );
    return;
  }
  // Keeps the focus on the same element.
  const focused = document.activeElement?.getAttribute?.("href");
  let shown = list.querySelector("tbody");
  if (!shown) {
    const { node, body } = table("Runs", ["Run", "State", "Rounds", "Budget", "Metric", "Devices", "Last update", "Cost"].map((text) => ({ text })));
    node.classList.add("runs");
    list.replaceChildren(node);
    shown = body;
  }
  shown.replaceChildren(...runs.map(row));
  if (focused) [...shown.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
}

function row(run) {
  const [label, tone] = status(run.status);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("a", { href: `#/runs/${encodeURIComponent(run.run_id)}` }, run.run_id)),
    h("td", {}, h("span", { class: `pill ${tone}` }, label)),
    h("td", {}, meter(`Rounds of ${run.run_id}`, run.round, run.rounds), `${count(run.round)} of ${count(run.rounds)} rounds`),
    h("td", {}, ...budget(run)),
    fact("Metric", run.metric === undefined ? "–" : metric(run.metric), run.metric === undefined ? "" : words(run.metric_name)),
    fact("Devices", devices(run), run.devices && run.devices.fit < run.devices.connected ? `${count(run.devices.fit)} fit` : ""),
    fact("Last update", active(run)),
    fact("Cost", run.spent.usd === null ? "unknown" : amount("usd", run.spent.usd), `${count(run.spent.requests)} requests`),
  );
}

// On a phone there is no table header: each cell has a label.
function fact(title, text, note = "") {
  return h("td", { "data-title": title }, text, note && h("div", { class: "muted" }, note));
}

function devices(run) {
  return run.devices ? plural(run.devices.connected, "device", "devices") : "–";
}

function active(run) {
  return run.active_at === undefined ? "–" : ago(run.active_at);
}

function words(text) {
  return (text ?? "").replaceAll("_", " ");
}

export function spent(usage, unit) {
  return Number(unit === "tokens" ? usage.prompt_tokens + usage.completion_tokens : usage[unit]);
}

// The capped units of a run and their usage.
export function caps(run) {
  return Object.entries(run.cap)
    .filter(([, cap]) => cap !== null)
    .map(([unit, cap]) => ({ unit, cap: Number(cap), spent: spent(run.spent, unit) }));
}

function budget(run) {
  const capped = caps(run);
  if (!capped.length) return [`${count(run.spent.queries)} queries, no cap`];
  return capped.map((each) =>
    h(
      "div",
      {},
      meter(`Budget of ${run.run_id}: ${UNITS[each.unit]}`, each.spent, each.cap),
      `${amount(each.unit, each.spent)} of ${amount(each.unit, each.cap)} ${UNITS[each.unit]}`,
    ),
  );
}

export function meter(label, value, most) {
  const share = most > 0 ? Math.min(value / most, 1) : 0;
  const bar = h("i");
  bar.style.width = `${100 * share}%`;
  return h(
    "div",
    {
      class: "meter",
      role: "meter",
      "aria-label": label,
      "aria-valuemin": "0",
      "aria-valuemax": "100",
      "aria-valuenow": String(Math.round(100 * share)),
      "aria-valuetext": `${Math.round(100 * share)} %`,
    },
    bar,
  );
}
