// Login and routing. Addresses are #/ and #/runs/NAME, without secrets.

import { get, Problem, token } from "./api.js";
import * as banner from "./banner.js";
import { h } from "./dom.js";
import { login } from "./login.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { loading, nowhere, trouble } from "./states.js";

const main = document.getElementById("main");
let me = null;
let view = new AbortController();
let shown = false;

function signOut(message) {
  token.clear();
  me = null;
  document.getElementById("who").replaceChildren();
  leave();
  login(main, enter, { message });
}

function enter(person) {
  me = person;
  document
    .getElementById("who")
    .replaceChildren(
      h("span", {}, person.name, " ", h("span", { class: "pill plain" }, person.role)),
      h("button", { type: "button", on: { click: () => signOut() } }, "Sign out"),
    );
  route();
}

function leave() {
  view.abort();
  view = new AbortController();
  banner.clear();
}

async function identify() {
  leave();
  main.replaceChildren(loading("Signing in …"));
  try {
    enter(await get("v1/me", view.signal));
  } catch (error) {
    if (view.signal.aborted) return;
    if (error instanceof Problem && error.status < 429) signOut(refused(error));
    else main.replaceChildren(trouble(error, identify));
  }
}

function refused(error) {
  return error.status === 401 ? "The server does not accept this token any more." : error.message;
}

function route() {
  if (me === null) return;
  leave();
  const { signal } = view;
  const page = {
    me,
    signal,
    main,
    // For errors that a view cannot recover from.
    fail(error) {
      if (signal.aborted) return;
      leave();
      if (error instanceof Problem && error.status === 401) signOut(refused(error));
      else main.replaceChildren(trouble(error, route));
    },
  };
  const run = /^#\/runs\/([^/]+)$/.exec(location.hash);
  if (run) showRun(page, named(run[1]));
  else if (["", "#", "#/"].includes(location.hash)) showRuns(page);
  else {
    document.title = "No such page · FedOne";
    main.replaceChildren(nowhere(location.hash));
  }
  if (shown) main.focus(); // Not on the first page, which starts at the top.
  shown = true;
}

function named(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // An invalid escape: no run has this name.
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // The router uses the hash.
  main.focus();
});
addEventListener("hashchange", route);
if (token.get() === null) login(main, enter);
else identify();
