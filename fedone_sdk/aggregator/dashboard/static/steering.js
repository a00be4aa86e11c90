// Stop and resume, for those who may.

import { post, runPath } from "./api.js";
import { h, say } from "./dom.js";

const STEERS = ["operator", "admin"];
const RESUMABLE = ["stopped", "failed"];

// `changed` is called with the run as it stands after a click.
export function steering(id, me, changed, signal) {
  const refusal = h("p", { class: "refusal", role: "alert" });
  if (!STEERS.includes(me.role)) {
    const note = h("p", { class: "muted" }, "You can look: operators stop and resume runs.");
    return { node: h("div", { class: "steering" }, note), update: () => {} };
  }
  const stop = h("button", { type: "button", class: "danger" }, "Stop");
  const resume = h("button", { type: "button", class: "primary" }, "Resume");
  const dialog = confirmation(id, () => ask("stop", "stopped"));
  stop.addEventListener("click", () => dialog.showModal());
  resume.addEventListener("click", () => ask("resume", "running again"));
  let busy = false;

  async function ask(verb, outcome) {
    if (busy) return; // Not disabled: the button would lose the focus.
    busy = true;
    refusal.textContent = "";
    try {
      changed(await post(runPath(id, `/${verb}`), signal));
      say(`The run is ${outcome}.`);
    } catch (error) {
      if (!signal.aborted) refusal.textContent = error.message;
    } finally {
      busy = false;
    }
  }

  return {
    node: h("div", { class: "steering" }, stop, resume, refusal, dialog),
    update({ result }) {
      const focused = [stop, resume].includes(document.activeElement);
      stop.hidden = result.status !== "running";
      resume.hidden = !RESUMABLE.includes(result.status);
      if (focused) (stop.hidden ? resume : stop).focus();
    },
  };
}

function confirmation(id, confirmed) {
  const dialog = h(
    "dialog",
    { "aria-labelledby": "confirm-title" },
    h("h2", { id: "confirm-title" }, `Stop ${id}?`),
    h("p", {}, "It ends with the prompt that it has now. Work under way is lost, what it may have cost stays spent. You can resume the run."),
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
