// Stop, resume and raise caps, for operators.

import { post, runPath } from "./api.js";
import { h, say } from "./dom.js";

const STEERS = ["operator", "admin"];
const RESUMABLE = ["stopped", "failed"];

// Calls `changed` with the new state of the run after a click.
export function steering(id, me, changed, signal) {
  const refusal = h("p", { class: "refusal", role: "alert" });
  if (!STEERS.includes(me.role)) {
    const note = h("p", { class: "muted" }, "Only operators can stop and resume runs, and raise caps.");
    return { node: h("div", { class: "steering" }, note), update: () => {} };
  }
  const stop = h("button", { type: "button", class: "danger" }, "Stop");
  const resume = h("button", { type: "button", class: "primary" }, "Resume");
  const dialog = confirmation(id, () => ask("stop", "stopped"));
  stop.addEventListener("click", () => dialog.showModal());
  resume.addEventListener("click", () => ask("resume", "running again"));
  const higher = h("button", { type: "button" }, "Raise caps");
  const caps = raising(id, (wanted) => ask("budget", "using the higher caps", wanted));
  higher.addEventListener("click", () => caps.open());
  let busy = false;

  async function ask(verb, outcome, body) {
    if (busy) return; // Not disabled, so that the button keeps the focus.
    busy = true;
    refusal.textContent = "";
    try {
      changed(await post(runPath(id, `/${verb}`), signal, body));
      say(`The run is ${outcome}.`);
    } catch (error) {
      if (!signal.aborted) refusal.textContent = error.message;
    } finally {
      busy = false;
    }
  }

  return {
    node: h("div", { class: "steering" }, stop, resume, higher, refusal, dialog, caps.node),
    update({ result }) {
      const focused = [stop, resume].includes(document.activeElement);
      stop.hidden = result.status !== "running";
      resume.hidden = !RESUMABLE.includes(result.status);
      higher.hidden = result.status === "completed" || !caps.update(result.cap);
      if (focused) (stop.hidden ? resume : stop).focus();
    },
  };
}

function confirmation(id, confirmed) {
  const dialog = h(
    "dialog",
    { "aria-labelledby": "confirm-title" },
    h("h2", { id: "confirm-title" }, `Stop ${id}?`),
    h("p", {}, "The run ends with its current prompt. Open work is discarded, and its possible cost counts as spent. You can resume the run."),
    h(
      "div",
      { class: "choices" },
      h("button", { type: "button", on: { click: () => dialog.close() } }, "Keep running"),
      h(
        "button",
        {
          type: "button",
          class: "danger",
          on: {
            click: () => {
              dialog.close();
              confirmed();
            },
          },
        },
        "Stop the run",
      ),
    ),
  );
  return dialog;
}

// The dialog for higher caps; calls `confirmed` with the changed caps.
function raising(id, confirmed) {
  const fields = h("div", { class: "caps" });
  const node = h(
    "dialog",
    { "aria-labelledby": "caps-title" },
    h("h2", { id: "caps-title" }, `Raise the caps of ${id}`),
    h("p", {}, "A cap can only be raised. If the run ended because its budget was exhausted, it continues."),
    h(
      "form",
      { method: "dialog", on: { submit: () => confirmed(changed()) } },
      fields,
      h(
        "div",
        { class: "choices" },
        h("button", { type: "button", on: { click: () => node.close() } }, "Cancel"),
        h("button", { class: "primary" }, "Raise"),
      ),
    ),
  );
  let known = {};

  function changed() {
    const wanted = [...fields.querySelectorAll("input")].map((input) => [input.name, input.valueAsNumber]);
    return Object.fromEntries(wanted.filter(([unit, value]) => value !== known[unit]));
  }

  return {
    node,
    update(cap) {
      known = Object.fromEntries(Object.entries(cap).filter(([, value]) => value !== null));
      return Object.keys(known).length > 0;
    },
    open() {
      fields.replaceChildren(
        ...Object.entries(known).map(([unit, value]) => {
          const step = unit === "usd" ? "any" : "1";
          return h("label", {}, `${unit.replace("_", " ")} `, h("input", { type: "number", name: unit, min: value, value, step, required: true }));
        }),
      );
      node.showModal();
    },
  };
}
