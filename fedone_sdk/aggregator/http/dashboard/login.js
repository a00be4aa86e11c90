// Login with a token, until the tab is closed.

import { get, Problem, token } from "./api.js";
import { h } from "./dom.js";

const ADVICE = {
  unauthorized: "The server does not know this token. Is it one of auth.admin_tokens?",
  forbidden: "No token for users is configured on this server: see auth.admin_tokens.",
};

// Shows the form; calls `enter` with the signed-in user.
export function login(main, enter, { message } = {}) {
  const refusal = h("p", { class: "refusal", role: "alert" }, message ?? "");
  const field = h("input", {
    id: "token",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "token-help",
  });
  const button = h("button", { class: "primary", type: "submit" }, "Sign in");
  const form = h(
    "form",
    { class: "login panel" },
    h("h1", {}, "Sign in"),
    h("label", { for: "token" }, "Token"),
    field,
    h(
      "p",
      { class: "help", id: "token-help" },
      "A token with role viewer, operator or admin. This tab stores it until you close the tab.",
    ),
    refusal,
    button,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    refusal.textContent = "";
    button.disabled = true;
    token.set(field.value.trim());
    try {
      enter(await get("v1/me"));
    } catch (error) {
      token.clear();
      refusal.textContent = (error instanceof Problem && ADVICE[error.code]) || error.message;
      field.setAttribute("aria-invalid", "true");
      field.focus();
    } finally {
      button.disabled = false;
    }
  });
  document.title = "Sign in · FedOne";
  main.replaceChildren(form);
  field.focus();
}
