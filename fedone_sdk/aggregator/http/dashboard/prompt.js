// The current prompt and the token probabilities.

import { h, panel, say, table } from "./dom.js";
import { percent, token } from "./format.js";

export const TOP = 8;

export function promptPanel() {
  const text = h("p", { class: "prompt" });
  const copy = h("button", { type: "button" }, "Copy");
  const bias = h("p", { class: "muted" });
  let current = "";
  let known = null;
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(current);
      say("The prompt is copied.");
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Select it to copy"; // Browsers have no clipboard without TLS.
    }
    setTimeout(() => (copy.textContent = "Copy"), 2_000);
  });
  const heat = table("Token probabilities by position", [
    { text: "Position" },
    { text: "Bits", number: true },
    ...Array.from({ length: TOP }, (_, at) => ({ text: at ? `${at + 1}.` : "Likeliest" })),
  ]);
  heat.node.classList.add("heat");
  const about = h("p", { class: "muted" });
  return {
    node: panel("Prompt", h("div", { class: "prompt-line" }, text, copy), bias, h("h3", {}, "Token probabilities"), about, heat.node),
    update({ result, tokens }) {
      const { prompt } = result;
      const { labels } = tokens;
      const now = JSON.stringify([prompt, tokens]);
      if (now === known) return; // Not redrawn, so that selected text stays selected.
      known = now;
      current = prompt.text;
      text.replaceChildren(...chips(prompt.tokens));
      bias.textContent = prompt.bias ? `Label biases: ${prompt.bias.map((value, at) => `${labels[at] ?? at}: ${value.toFixed(2)}`).join(", ")}` : "";
      bias.hidden = !prompt.bias;
      about.textContent =
        `Probabilities of the most likely of ${tokens.vocab_size} candidates at each position; the frame ` +
        "marks the token in the prompt. The bits are the entropy of a position: at 0 it is decided.";
      heat.body.replaceChildren(...tokens.positions.map((each, at) => position(each, at, prompt.tokens[at])));
    },
  };
}

// The candidates that devices wrote, each below its parent.
export function lineagePanel() {
  const columns = ["Text", "Client", "Lower loss", "Deployed", "Parent"];
  const written = table("Candidates written from failures", columns.map((text) => ({ text })));
  const node = panel("Written from failures", written.node);
  return {
    node,
    update({ result }) {
      const lineage = result.lineage ?? [];
      node.hidden = !lineage.length;
      written.body.replaceChildren(...lineage.map(origin));
    },
  };
}

function origin({ text, client, parents, depth, gain, won }) {
  const cells = [client ?? "merged", gain?.toFixed(3) ?? "–", won ? "yes" : "", parents.map((parent) => parent || "(blank)").join(" + ")];
  const shown = `${"\u2003".repeat(depth)}${text}`;
  return h("tr", {}, h("th", { scope: "row" }, shown), ...cells.map((cell) => h("td", {}, String(cell))));
}

function chips(tokens) {
  return tokens.map((each) => h("span", { class: "chip" }, token(each)));
}

function position(found, at, chosen) {
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, String(at + 1)),
    h("td", { class: "number" }, found.entropy.toFixed(2)),
    found.tokens.map((each) =>
      h(
        "td",
        { class: `heat${shade(each.probability)}${each.token === chosen ? " chosen" : ""}` },
        h("span", { class: "token" }, token(each.token)),
        h("span", { class: "share" }, percent(each.probability)),
        each.token === chosen ? h("span", { class: "unseen" }, ", in the prompt") : null,
      ),
    ),
  );
}

// Eight shades; the square root separates small probabilities.
function shade(probability) {
  return Math.min(Math.floor(8 * Math.sqrt(probability)), 7);
}

