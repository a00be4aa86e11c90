// The seats of each round, and the lost seats.

import { h, panel, svg } from "./dom.js";
import { count, duration, loss, plural, shortName } from "./format.js";

const LISTED = 12;
const MORE = 48;
const MOST_COLUMNS = 60;
const LANES = 8;
const CELL = 12;
const NAMES = 112;

export function roundsPanel() {
  const picture = h("div", { class: "lanes", "aria-hidden": "true" });
  const legend = h(
    "ul",
    { class: "legend" },
    key("worked", "finished the round"),
    key("now", "works now"),
    key("lost", "lost the seat"),
  );
  const list = h("ol", { class: "timeline", reversed: true });
  const listing = h("div", { class: "listing", tabindex: "0", role: "region", "aria-label": "Rounds, newest first" }, list);
  const more = h("button", { type: "button", hidden: true }, "Show more rounds");
  let listed = LISTED;
  let latest = null;
  more.addEventListener("click", () => {
    listed += MORE;
    show();
  });

  function show() {
    const { rounds, seats, result } = latest;
    const lost = byRound(seats.lost);
    const running = result.status === "running";
    const items = rounds.slice(-listed).reverse().map((each) => done(each, lost.get(each.round)));
    if (running) items.unshift(current(seats, lost.get(seats.round)));
    list.replaceChildren(...items);
    more.hidden = rounds.length <= listed;
    picture.hidden = legend.hidden = !rounds.length;
    if (rounds.length) {
      const room = Math.floor((picture.clientWidth - NAMES) / CELL);
      picture.replaceChildren(draw(rounds, seats, running, Math.min(Math.max(room, 8), MOST_COLUMNS)));
    }
  }

  return {
    node: panel("Rounds", legend, picture, listing, more),
    update(state) {
      latest = state;
      show();
    },
  };
}

function key(tone, text) {
  return h("li", {}, h("i", { class: `cell ${tone}`, "aria-hidden": "true" }), text);
}

function byRound(lost) {
  return Map.groupBy ? Map.groupBy(lost, (work) => work.round) : grouped(lost);
}

function grouped(lost) {
  const found = new Map();
  for (const work of lost) found.set(work.round, [...(found.get(work.round) ?? []), work]);
  return found;
}

const PHASES = { offered: "is offered the seat", working: "works", done: "is done" };

function current(seats, lost) {
  const holders = seats.seats.map((seat) =>
    h(
      "p",
      {},
      name(seat.client_id),
      ` ${PHASES[seat.phase]}`,
      seat.due_in_s === null ? "" : `, ${duration(seat.due_in_s)} left`,
    ),
  );
  return h(
    "li",
    { class: "now" },
    h("strong", {}, `Round ${count(seats.round + 1)}`),
    h("span", { class: "muted" }, ` in progress, ${plural(seats.waiting, "client waits", "clients wait")}`),
    holders.length ? holders : h("p", { class: "muted" }, "The seat is free until a client is drawn for it."),
    ...failures(lost),
  );
}

function done(report, lost) {
  return h(
    "li",
    {},
    h("strong", {}, `Round ${count(report.round + 1)}`),
    h(
      "span",
      { class: "muted" },
      ` loss ${loss(report.mean_loss)}, ${plural(report.queries, "query", "queries")}`,
    ),
    h("p", {}, report.client_id.split(",").flatMap((id, at) => (at ? [", ", name(id)] : [name(id)]))),
    ...failures(lost),
  );
}

// Why work was lost; only operators get the text of the device.
export const why = ({ reason, said }) => (said ? `${reason}: ${said}` : reason);

function failures(lost = []) {
  return lost.map((work) =>
    h("p", { class: "failover" }, name(work.client_id), ` lost the seat: ${why(work)}`),
  );
}

export function name(id) {
  return h(
    "code",
    { class: "client", title: id },
    h("span", { "aria-hidden": "true" }, shortName(id)),
    h("span", { class: "unseen" }, id),
  );
}

// The timeline: one row per recently seen client, one column per round.
function draw(rounds, seats, running, columns) {
  const first = Math.max(rounds.length - columns + 1, 0);
  const cells = [];
  for (const each of rounds.slice(first)) {
    for (const id of each.client_id.split(",")) cells.push([each.round, id, "worked"]);
  }
  for (const work of seats.lost) {
    if (work.round >= first && work.round <= rounds.length) cells.push([work.round, work.client_id, "lost"]);
  }
  if (running) {
    for (const seat of seats.seats) if (seat.phase === "working") cells.push([seats.round, seat.client_id, "now"]);
  }
  const newest = new Map();
  for (const [round, id] of cells) newest.set(id, Math.max(round, newest.get(id) ?? 0));
  const order = [...newest].sort((one, other) => other[1] - one[1]).map(([id]) => id);
  const lanes = new Map(order.map((id, at) => [id, Math.min(at, LANES)]));
  const rows = Math.min(order.length, LANES + 1);
  const width = NAMES + columns * CELL;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${rows * 20 + 20}`, width });
  for (let at = 0; at < rows; at += 1) {
    const label = svg("text", { x: 0, y: at * 20 + 14, class: "lane-name" });
    label.textContent = at === LANES ? "others" : shortName(order[at]);
    picture.append(label, svg("line", { x1: NAMES, x2: width, y1: at * 20 + 10, y2: at * 20 + 10, class: "lane" }));
  }
  for (const [round, id, tone] of cells) {
    const x = NAMES + (round - first) * CELL + 1;
    const y = lanes.get(id) * 20 + 4;
    picture.append(svg("rect", { x, y, width: CELL - 2, height: 12, rx: 3, class: `cell ${tone}` }));
    if (tone === "lost") {
      picture.append(svg("path", { d: `M${x + 2.5} ${y + 3.5}l5 5m0 -5l-5 5`, class: "cross" }));
    }
  }
  for (let round = first; round < first + columns - 1; round += 8) {
    const label = svg("text", { x: NAMES + (round - first) * CELL + 1, y: rows * 20 + 12, class: "lane-name" });
    label.textContent = count(round + 1);
    picture.append(label);
  }
  return picture;
}
