// The page's frame: which view is shown, what the banner says, and where the parts begin.

import { askForKey, keyHeaders, onKeyChange, startAccess } from "./access.js";
import { startChat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { startExplorer } from "./explorer.js";
import { Feed } from "./feed.js";
import { startFleet } from "./fleet.js";
import { startTimeline } from "./timeline.js";

const VIEWS = ["fleet", "chat", "api"];
const feed = new Feed("console/feed", keyHeaders);

function showView() {
  const name = VIEWS.find((view) => location.hash === `#${view}`) ?? "fleet";
  for (const view of VIEWS) byId(`view-${view}`).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.dispatchEvent(new CustomEvent("view", { detail: name }));
}

const STATES = { connecting: "connecting", live: "live", lost: "no feed", refused: "key needed" };

function showFeedState() {
  const { state, reason } = feed;
  const shown = byId("feed-state");
  shown.dataset.state = state;
  setText(shown, STATES[state]);
  document.body.dataset.feed = state;
  const banner = byId("banner");
  banner.hidden = state === "live" || state === "connecting";
  const button = byId("banner-action");
  if (state === "lost") {
    setText(byId("banner-text"), `The live feed is lost: ${reason}. What is shown is old; trying again.`);
    setText(button, "Try now");
    button.onclick = () => feed.connect();
  } else if (state === "refused") {
    setText(byId("banner-text"), `The live view is closed: ${reason}`);
    setText(button, "Enter a key");
    button.onclick = () => askForKey(reason);
  }
}

function start() {
  startAccess();
  onKeyChange(() => feed.connect());
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  feed.addEventListener("state", showFeedState);
  feed.addEventListener("fleet", () => {
    const { version, worker, workers } = feed.fleet;
    const which = workers > 1 ? `${version} · worker ${worker + 1} of ${workers}` : version;
    setText(byId("version"), which);
  });
  startFleet(feed);
  startTimeline(feed);
  startChat(feed);
  startExplorer();
  window.addEventListener("hashchange", showView);
  showView();
  feed.connect();
}

start();
