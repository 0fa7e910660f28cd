// The key that the router asks for: in this tab's session storage, nowhere else.

import { byId } from "./dom.js";

const NAME = "penstock-key";
let key = stored();
const listeners = [];

function stored() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

/** Headers of a request to the router. */
export function keyHeaders() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export const hasKey = () => key !== "";

export function onKeyChange(listener) {
  listeners.push(listener);
}

/** Ask for a key; `reason` says why, in the server's words. */
export function askForKey(reason) {
  byId("key-reason").textContent = reason;
  const dialog = byId("key-dialog");
  byId("key").value = "";
  if (!dialog.open) dialog.showModal();
}

function use(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // It holds until the page is loaded again.
  }
  byId("key-dialog").close();
  showState();
  for (const listener of listeners) listener();
}

function showState() {
  const button = byId("key-button");
  button.dataset.set = String(hasKey());
  button.title = hasKey() ? "A key is set for this tab" : "No key is set";
}

export function startAccess() {
  showState();
  byId("key-button").addEventListener("click", () =>
    askForKey("Needed where the router was started with keys; the live view needs an operator's."));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(byId("key").value.trim());
  });
  byId("key-forget").addEventListener("click", () => use(""));
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
}
