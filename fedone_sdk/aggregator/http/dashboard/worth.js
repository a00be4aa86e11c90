// The verdict: the tuned prompt against the baselines.

import { h, panel, table } from "./dom.js";
import { metric } from "./format.js";

const NAMES = {
  chance: "One answer for everything",
  no_prompt: "No prompt",
  no_prompt_biased: "Label bias alone",
  untrained: "Untrained prompt",
  cheapest: "Cheapest within the interval",
  tuned: "Tuned prompt",
};

export function worthPanel() {
  const verdict = h("p", { class: "verdict" });
  const { node: list, body } = table(
    "Prompts on the dev rows",
    ["Prompt", "Value", "95 % interval", "Gain of tuned prompt (95 % interval)"].map((text, at) => ({ text, number: at > 0 })),
  );
  const node = panel("Was it worth it?", verdict, list);
  node.classList.add("worth");
  return {
    node,
    update({ result }) {
      const found = result.verdict;
      node.hidden = !found;
      if (!found) return;
      verdict.textContent = `${found.text.replace(/^./, (first) => first.toUpperCase())}.`;
      list.hidden = !found.standings.length;
      body.replaceChildren(...found.standings.map(row));
    },
  };
}

function row({ name, value, interval, gain }) {
  const number = (text) => h("td", { class: "number" }, text);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, NAMES[name] ?? name),
    number(value === null ? "–" : metric(value)),
    number(interval ? `${metric(interval[0])} to ${metric(interval[1])}` : "–"),
    number(gain ? `${signed(gain.value)} (${signed(gain.low)} to ${signed(gain.high)})` : "–"),
  );
}

// The fair baseline: the baseline of the verdict. Without a verdict it is the better of "no prompt"
// with a label bias and "no prompt" without it.
export function baseline({ name, no_prompt: bare, no_prompt_biased: biased = null }, verdict) {
  const judged = verdict?.standings.find((each) => each.name === verdict.against);
  if (judged) return { value: judged.value, label: judged.name === "no_prompt" ? "no prompt" : "a label bias alone" };
  const better = name.includes(":") || (name === "loss" ? biased <= bare : biased >= bare);
  return biased !== null && better
    ? { value: biased, label: "a label bias alone" }
    : { value: bare, label: "no prompt" };
}

export function signed(value) {
  return `${value < 0 ? "−" : "+"}${metric(Math.abs(value))}`;
}
