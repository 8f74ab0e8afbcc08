// Says whether the page is kept up to date. Without scripts, the page reloads by itself.
"use strict";
const said = document.getElementById("live");
const say = (state, words) => {
  said.dataset.state = state;
  said.textContent = words;
};
document.body.addEventListener("htmx:sseOpen", () => say("live", "live"));
document.body.addEventListener("htmx:sseError", () => say("lost", "not live: pdcluster ui has ended, or this browser lost it"));
