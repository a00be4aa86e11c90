// The list of runs.

import { get, Problem } from "./api.js";
import * as banner from "./banner.js";
import { h, say, table } from "./dom.js";
import { amount, count, plural, status, UNITS } from "./format.js";
import { empty, loading } from "./states.js";
import { pause } from "./stream.js";

const EVERY_MS = 3_000;

export async function showRuns({ main, signal, fail }) {
  document.title = "Runs · FedOne";
  const list = h("div", {}, loading("Loading the runs …"));
  main.replaceChildren(h("h1", {}, "Runs"), list);
  let known = null;
  while (!signal.aborted) {
    try {
      const runs = await get("v1/runs", signal);
      banner.found();
      const now = JSON.stringify(runs);
      if (now !== known) show(list, runs);
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

// Returns when somebody looks again.
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
        h("p", {}, "A run is one tuning job. Name its file in the server's configuration:"),
        h("pre", {}, h("code", {}, "runs: [run.yaml]")),
        h("p", {}, "or post it: ", h("code", {}, "POST /v1/runs"), " (", h("a", { href: "docs" }, "all calls"), ")."),
      ),
    );
    return;
  }
  // The link that has the focus keeps it.
  const focused = document.activeElement?.getAttribute?.("href");
  let shown = list.querySelector("tbody");
  if (!shown) {
    const { node, body } = table("Runs", ["Run", "State", "Rounds", "Budget"].map((text) => ({ text })));
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
  );
}

export function spent(usage, unit) {
  return Number(unit === "tokens" ? usage.prompt_tokens + usage.completion_tokens : usage[unit]);
}

// The capped units of a run, with what is spent of each.
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
