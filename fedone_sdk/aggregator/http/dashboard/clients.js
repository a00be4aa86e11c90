// The clients of a run.

import { h, panel, table } from "./dom.js";
import { count, loss, percent } from "./format.js";
import { name } from "./rounds.js";

const SHOWN = 20;
const MORE = 100;

// The last three columns are empty in runs without defences and noise.
const COLUMNS = [
  { text: "Client" },
  { text: "State" },
  { text: "Rounds", number: true },
  { text: "Mean loss", number: true },
  { text: "Last round", number: true },
  { text: "Lost seats", number: true },
  { text: "Share of movement", number: true, of: judged },
  { text: "Rejected updates", number: true, of: judged },
  { text: "Epsilon", number: true, of: (line) => (line.ledger?.epsilon ?? null) !== null },
];

function judged({ ledger }) {
  return ledger !== null && ledger.rounds > 0;
}

export function clientsPanel() {
  const found = table("Clients", COLUMNS.map(({ text, number }) => ({ text, number })));
  const none = h("p", { class: "none" }, "No client has taken part yet.");
  const about = h("p", { class: "muted" });
  const more = h("button", { type: "button", hidden: true }, "Show more clients");
  let shown = SHOWN;
  let latest = null;
  more.addEventListener("click", () => {
    shown += MORE;
    show();
  });

  function show() {
    const lines = participation(latest);
    none.hidden = lines.length > 0;
    found.node.hidden = about.hidden = !lines.length;
    about.textContent = `${count(lines.length)} seen in this run, ${count(latest.seats.waiting)} waiting for work.`;
    found.body.replaceChildren(...lines.slice(0, shown).map(row));
    COLUMNS.forEach(({ of }, at) => {
      const unknown = of !== undefined && !lines.some(of);
      for (const line of found.node.querySelectorAll("tr")) line.children[at].hidden = unknown;
    });
    more.hidden = lines.length <= shown;
  }

  return {
    node: panel("Clients", none, about, found.node, more),
    update(state) {
      latest = state;
      show();
    },
  };
}

// One row per client, from the rounds, the seats, and the server's influence report.
export function participation({ rounds, seats, clients }) {
  const lines = new Map();
  const of = (id) => {
    if (!lines.has(id)) lines.set(id, { id, rounds: 0, losses: 0, last: null, lost: 0, phase: null, ledger: null });
    return lines.get(id);
  };
  for (const report of rounds) {
    for (const id of report.client_id.split(",")) {
      const line = of(id);
      line.rounds += 1;
      line.losses += report.mean_loss;
      line.last = report.round;
    }
  }
  for (const work of seats.lost) of(work.client_id).lost += 1;
  for (const seat of seats.seats) of(seat.client_id).phase = seat.phase;
  for (const ledger of clients) of(ledger.client_id).ledger = ledger;
  return [...lines.values()].sort((one, other) => other.rounds - one.rounds || (other.last ?? -1) - (one.last ?? -1));
}

function row(line) {
  const { id, rounds, losses, last, lost, phase, ledger } = line;
  const cells = [
    count(rounds),
    rounds ? loss(losses / rounds) : "–",
    last === null ? "–" : count(last + 1),
    count(lost),
    judged(line) ? percent(ledger.share) : "–",
    judged(line) ? count(ledger.outliers) : "–",
    ledger === null || ledger.epsilon === null ? "–" : ledger.epsilon.toFixed(2),
  ];
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, name(id)),
    h("td", {}, state(phase, ledger)),
    cells.map((text) => h("td", { class: "number" }, text)),
  );
}

function state(phase, ledger) {
  if (ledger?.quarantined) return h("span", { class: "pill bad" }, "In quarantine");
  if (phase === "working") return h("span", { class: "pill accent" }, "Works");
  if (phase === "offered") return h("span", { class: "pill plain" }, "Is offered work");
  return h("span", { class: "muted" }, "Waits, or is not connected");
}
