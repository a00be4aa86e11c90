// Placeholders and errors.

import { Problem, Unreachable } from "./api.js";
import { h } from "./dom.js";

export function loading(text) {
  return h(
    "div",
    { class: "loading", "aria-busy": "true" },
    h("p", { role: "status" }, text),
    h("div", { class: "bones", "aria-hidden": "true" }, h("i"), h("i"), h("i"), h("i")),
  );
}

export function empty(title, ...children) {
  return h("div", { class: "empty" }, h("h2", {}, title), ...children);
}

export function trouble(error, retry) {
  const title =
    error instanceof Problem
      ? error.title
      : error instanceof Unreachable
        ? "No answer"
        : "Something went wrong";
  return h(
    "div",
    { class: "notice bad", role: "alert" },
    h("h2", {}, title),
    h("p", {}, error.message),
    h(
      "p",
      { class: "ways" },
      retry && h("button", { type: "button", on: { click: retry } }, "Try again"),
      h("a", { href: "#/" }, "All runs"),
    ),
  );
}

// An unknown address.
export function nowhere(address) {
  return h(
    "div",
    { class: "notice", role: "alert" },
    h("h1", {}, "There is no such page"),
    h("p", {}, `Nothing is at ${address}.`),
    h("p", { class: "ways" }, h("a", { href: "#/" }, "All runs")),
  );
}
