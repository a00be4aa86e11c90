// One run, live.

import { get, Problem, runPath } from "./api.js";
import * as banner from "./banner.js";
import { budgetPanel } from "./budget.js";
import { clientsPanel } from "./clients.js";
import { lossPanel, metricPanel } from "./curves.js";
import { trafficPanel, troublePanel } from "./details.js";
import { h, say } from "./dom.js";
import { count, plural, status } from "./format.js";
import { modelNotice } from "./health.js";
import { lineagePanel, promptPanel, TOP } from "./prompt.js";
import { roundsPanel } from "./rounds.js";
import { seen } from "./runs.js";
import { loading } from "./states.js";
import { steering } from "./steering.js";
import { follow, pause } from "./stream.js";
import { summary } from "./summary.js";
import { worthPanel } from "./worth.js";

const LOOK_MS = 2_000; // Interval of polling in addition to the event stream.
const CLIENTS_MS = 10_000; // The list may be long.
const QUIET_LOOK_MS = 10_000; // For an ended run, which may get its last metric or be resumed.

export async function showRun({ main, me, signal, fail }, id) {
  document.title = `${id} · FedOne`;
  main.replaceChildren(crumbs(id), h("h1", {}, id), loading("Loading the run …"));
  const run = new Run(id, signal);
  try {
    await run.look();
  } catch (error) {
    return fail(error);
  }
  const view = new View(main, me, run, signal);
  view.draw();
  run.changed = () => view.draw();
  await Promise.race([listen(run, signal), watch(run, signal)]).catch(fail);
}

// Follows the rounds; after the run has ended, waits until it is resumed.
async function listen(run, signal) {
  for (;;) {
    await follow(runPath(run.id, "/events"), {
      signal,
      onLost: banner.lost,
      onEvent: (event) => {
        banner.found();
        run.onEvent(event);
      },
    });
    await run.resumed(signal);
    signal.throwIfAborted();
  }
}

// Polls everything except the rounds; the stream shows if the server is unreachable.
async function watch(run, signal) {
  while (!signal.aborted) {
    await pause(run.result.status === "running" ? LOOK_MS : QUIET_LOOK_MS, signal);
    if (document.hidden) await seen(signal);
    if (signal.aborted) return;
    try {
      await run.look();
      if (run.result.status !== "running") banner.found();
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.code !== "rate_limited") throw error;
      if (run.result.status !== "running") await pause(LOOK_MS, signal, banner.lost);
    }
  }
}

// The state of a run's view.
class Run {
  constructor(id, signal) {
    this.id = id;
    this.signal = signal;
    this.reports = new Map(); // By round; a rollback removes some.
    this.receivedAt = new Map();
    this.clientsAt = -CLIENTS_MS;
    this.tookAt = -1;
    this.model = modelNotice();
    this.changed = () => {};
    this.wake = () => {};
  }

  async look() {
    const began = performance.now();
    const path = (rest) => runPath(this.id, rest);
    const old = began - this.clientsAt >= CLIENTS_MS;
    const [result, seats, clients, runs] = await Promise.all([
      get(path("?history=false"), this.signal),
      get(path("/seats"), this.signal),
      old ? get(path("/clients"), this.signal) : this.clients,
      this.planned === undefined ? get("v1/runs", this.signal) : null,
      this.model.look(this.signal),
    ]);
    if (old) this.clientsAt = began;
    if (runs) this.planned = runs.find((each) => each.run_id === this.id)?.rounds ?? result.rounds;
    if (this.tokens !== null && this.alpha !== result.alpha_sha256) {
      this.tokens = await get(path(`/probabilities?top=${TOP}`), this.signal);
      this.alpha = result.alpha_sha256;
    }
    Object.assign(this, { seats, clients });
    for (const round of this.reports.keys()) {
      if (round >= result.rounds && this.receivedAt.get(round) < began) this.reports.delete(round);
    }
    if (this.tookAt < began) this.take(result); // Otherwise a newer event has ended the run.
  }

  take(result) {
    this.tookAt = performance.now();
    const before = this.result?.status;
    this.result = result;
    if (before !== undefined && before !== result.status) {
      say(`The run is: ${status(result.status)[0]}.`);
      if (result.status === "running") this.wake();
    }
    this.changed();
  }

  onEvent({ name, data }) {
    if (name === "round") {
      this.reports.set(data.round, data);
      this.receivedAt.set(data.round, performance.now());
      this.changed();
    } else if (name === "end") {
      this.take(data);
    }
  }

  // Resolves when the run is running again.
  resumed(signal) {
    return new Promise((resolve) => {
      this.wake = resolve;
      signal.addEventListener("abort", resolve, { once: true });
      if (this.result.status === "running") resolve();
    });
  }

  get rounds() {
    return [...this.reports.values()].sort((one, other) => one.round - other.round);
  }
}

function crumbs(id) {
  return h(
    "nav",
    { "aria-label": "Where you are", class: "crumbs" },
    h("a", { href: "#/" }, "Runs"),
    h("span", { "aria-hidden": "true" }, " / "),
    h("span", { "aria-current": "page" }, id),
  );
}

// Rounds arrive as events, other data is polled; the highest round number is shown.
function together({ result, seats, rounds }) {
  const done = Math.max(result.rounds, seats.round, (rounds.at(-1)?.round ?? -1) + 1);
  return {
    result: done > result.rounds ? { ...result, rounds: done } : result,
    seats: done > seats.round ? { ...seats, round: done, seats: [] } : seats,
  };
}

function fit(devices) {
  if (!devices || devices.fit === devices.connected) return "";
  const reasons = devices.unfit.map(({ reason, devices: number }) => `${reason} (${count(number)})`);
  const told = `${plural(devices.connected, "device", "devices")} connected, ${count(devices.fit)} fit`;
  return reasons.length ? `${told}: ${reasons.join("; ")}` : `${told}.`;
}

class View {
  constructor(main, me, run, signal) {
    this.run = run;
    this.pill = h("span", { class: "pill" });
    this.empty = h(
      "div",
      { class: "notice" },
      h("h2", {}, "Waiting for the first client"),
      h("p", {}, "Start a client to see its work here:"),
      h("pre", {}, h("code", {}, "FEDONE_TOKEN=... fedone client --server URL --data my.jsonl")),
    );
    this.reason = h("p", { class: "reason" });
    this.devices = h("p", { class: "reason" });
    const steer = steering(run.id, me, (result) => run.take({ ...result, history: [] }), signal);
    const [worth, tiles] = [worthPanel(), summary()];
    const [loss, metric] = [lossPanel(signal), metricPanel(signal)];
    const budget = budgetPanel(signal);
    const [prompt, lineage] = [promptPanel(), lineagePanel()];
    const [rounds, clients] = [roundsPanel(), clientsPanel()];
    const [traffic, trouble] = [trafficPanel(), troublePanel()];
    this.parts = [steer, worth, tiles, loss, metric, budget, prompt, lineage, rounds, clients, traffic, trouble];
    main.replaceChildren(
      crumbs(run.id),
      h("div", { class: "headline" }, h("h1", {}, run.id, " ", this.pill), steer.node),
      run.model.node,
      this.reason,
      this.devices,
      this.empty,
      worth.node,
      tiles.node,
      h("div", { class: "grid" }, loss.node, metric.node, budget.node, rounds.node),
      prompt.node,
      lineage.node,
      clients.node,
      h("div", { class: "grid" }, traffic.node, trouble.node),
    );
    this.drawing = false;
    signal.addEventListener("abort", () => (this.drawing = true), { once: true });
  }

  // Renders once per frame.
  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      if (this.run.signal.aborted) return;
      this.drawing = false;
      const { clients, tokens, planned, rounds } = this.run;
      const { result, seats } = together(this.run);
      const [label, tone] = status(result.status);
      this.pill.className = `pill ${tone}`;
      this.pill.textContent = label;
      this.reason.textContent = result.reason ?? "";
      this.devices.textContent = fit(result.devices);
      this.empty.hidden = result.devices?.connected > 0 || rounds.length > 0 || seats.seats.length > 0 || result.status !== "running";
      for (const part of this.parts) part.update({ result, seats, clients, tokens, planned, rounds });
    });
  }
}
