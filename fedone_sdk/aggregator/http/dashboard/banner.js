// The banner that reports stale data.

import { h, say } from "./dom.js";

const node = () => document.getElementById("banner");
let ticking = null;

// Shows that the connection is lost, and counts down to the next attempt.
export function lost(ms, tryNow) {
  const first = !node().classList.contains("lost");
  clearInterval(ticking);
  const until = Date.now() + ms;
  const left = h("span", { "aria-hidden": "true" });
  const tick = () => {
    const seconds = Math.max(Math.ceil((until - Date.now()) / 1000), 0);
    left.textContent = seconds ? ` Trying again in ${seconds} s.` : " Trying again.";
  };
  tick();
  ticking = setInterval(tick, 500);
  const button = h("button", { type: "button", on: { click: tryNow } }, "Try now");
  if (first) {
    node().replaceChildren(h("span", {}, "Connection lost. The page may be out of date."), left, button);
  } else {
    // The first words do not change, so that a screen reader reads them only once.
    node().replaceChildren(node().firstChild, left, button);
  }
  node().classList.add("lost");
  document.body.classList.add("stale");
}

export function found() {
  if (!node().classList.contains("lost")) return;
  clear();
  say("Connected again.");
}

export function clear() {
  clearInterval(ticking);
  node().classList.remove("lost");
  node().replaceChildren();
  document.body.classList.remove("stale");
}
