// Availability of the server's model. The route is public and has no rate limit.

import { h } from "./dom.js";

export function modelNotice() {
  const node = h("p", { class: "notice warn", role: "status", hidden: true });
  return {
    node,
    async look(signal) {
      try {
        const response = await fetch("readyz", { signal, cache: "no-store", credentials: "omit" });
        const { checks } = await response.json();
        node.hidden = checks.model?.ok !== false;
      } catch {
        return; // Other requests report that the server is unreachable.
      }
      node.textContent = node.hidden ? "" : "The model is not available at the moment. Runs that need it wait or are paused; the server's log says why.";
    },
  };
}
