// Traffic, model usage and lost work.

import { h, panel } from "./dom.js";
import { amount, bytes, count, moment, plural } from "./format.js";
import { name, why } from "./rounds.js";

const LISTED = 20;
const NAMED = 3;
const BROKEN_OFF = ["stopped", "failed"];

export function trafficPanel() {
  const list = h("dl", { class: "facts" });
  return {
    node: panel("Traffic and model", list),
    update({ result }) {
      const { communication, gateway, cache, censoring, evaluation, proposer } = result;
      const facts = [
        ["Federated messages", traffic(communication)],
        ["Gateway", gateway.messages ? traffic(gateway) : "not used"],
        ["Model", result.model ?? "no request yet"],
        ["Requests", `${plural(result.spent.requests, "request", "requests")}, ${count(result.spent.prompt_tokens + result.spent.completion_tokens)} tokens`],
        ["Cost", result.spent.usd === null ? "unknown: the model has no known price" : amount("usd", result.spent.usd)],
        ["Evaluation", plural(evaluation.queries, "query", "queries")],
        ...(proposer ? [["Proposer", `${plural(proposer.calls, "call", "calls")}, ${proposer.failed} failed; ${plural(proposer.added, "candidate", "candidates")} added, ${proposer.dropped} dropped; ${cost(proposer.spent)}`]] : []),
        ...(result.judge ? [["Judge", `${plural(result.judge.requests, "request", "requests")}; ${cost(result.judge)}`]] : []),
        ["Answers from the cache", count(cache.hits)],
      ];
      if (censoring.censored) {
        facts.push(["Log-probabilities that the model did not return", `${count(censoring.censored)} of ${count(censoring.values)}`]);
      }
      if (result.privacy) {
        facts.push(["Privacy", `ε ${result.privacy.epsilon.toFixed(2)} at δ ${result.privacy.delta}, at most, per ${result.privacy.unit}`]);
      }
      facts.push(["Alpha", result.alpha_sha256.slice(0, 12)], ["Seed", String(result.seed)]);
      list.replaceChildren(...facts.map(([term, text]) => h("div", {}, h("dt", {}, term), h("dd", {}, text))));
    },
  };
}

function cost(spent) {
  return spent.usd === null ? "cost unknown" : amount("usd", spent.usd);
}

function traffic({ upload_bytes: up, download_bytes: down, messages }) {
  return `${bytes(up)} up, ${bytes(down)} down in ${plural(messages, "message", "messages")}`;
}

// Lost work by reason, newest first.
export function grouped(works) {
  const found = new Map();
  for (const work of works) {
    const reason = why(work);
    const group = found.get(reason) ?? { reason, clients: new Set(), count: 0 };
    found.delete(reason); // Reinserted, so that it is the last.
    found.set(reason, group);
    group.count += 1;
    group.clients.add(work.client_id);
    group.round = work.round;
    group.at = work.at ?? null;
  }
  return [...found.values()].reverse();
}

function lost({ reason, clients, count: times, round, at }) {
  const names = [...clients];
  const few = names.slice(-NAMED).flatMap((id, index) => (index ? [", ", name(id)] : [name(id)]));
  if (names.length > NAMED) few.push(` and ${plural(names.length - NAMED, "other", "others")}`);
  const when = at === null ? "" : ` at ${moment(at)}`;
  return h(
    "li",
    {},
    h("strong", {}, times === 1 ? "Once" : `${count(times)} times`),
    `, last in round ${count(round + 1)}${when}: ${reason} (`,
    ...few,
    ")",
  );
}

export function troublePanel() {
  const list = h("ul", { class: "troubles" });
  const none = h("p", { class: "none" }, "Nothing went wrong so far.");
  return {
    node: panel("Errors", none, list),
    update({ result, seats }) {
      const items = [];
      if (BROKEN_OFF.includes(result.status) && result.reason) items.push(h("li", {}, h("strong", {}, "Run: "), result.reason));
      if (result.quarantined) {
        items.push(h("li", {}, h("strong", {}, plural(result.quarantined, "client", "clients")), " in quarantine."));
      }
      for (const group of grouped(seats.lost).slice(0, LISTED)) items.push(lost(group));
      none.hidden = items.length > 0;
      list.hidden = !items.length;
      list.replaceChildren(...items);
    },
  };
}
