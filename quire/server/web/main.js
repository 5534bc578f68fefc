// Starts the page: tabs, who serves it, and its two views.

import { getJson, post } from "/page/api.js";
import { byId } from "/page/dom.js";
import { startTalk } from "/page/talk.js";
import { startWatch } from "/page/watch.js";

const tabs = ["talk", "watch"];
let watch = null;

function select(name, focus = false) {
  for (const one of tabs) {
    const tab = byId(`tab-${one}`);
    const chosen = one === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(one).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  if (name === "watch") watch.open();
  else watch.close();
}

function startTabs() {
  for (const [index, name] of tabs.entries()) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => {
      select(name);
      history.replaceState(null, "", name === "watch" ? "#watch" : location.pathname);
    });
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      select(tabs[(to + tabs.length) % tabs.length], true);
    });
  }
}

async function start() {
  watch = startWatch();
  startTabs();
  byId("sign-in-again").addEventListener("click", () => location.reload());
  byId("sign-out").addEventListener("click", async () => {
    await post("/page/sign_out");
    location.reload();
  });
  addEventListener("hashchange", () => select(location.hash === "#watch" ? "watch" : "talk"));
  if (location.hash === "#watch") select("watch");
  const wide = matchMedia("(min-width: 56.01rem)");
  byId("settings-panel").open = wide.matches;
  wide.addEventListener("change", () => (byId("settings-panel").open = wide.matches));
  byId("show-sidebar").addEventListener("click", () => {
    const isShown = byId("sidebar").classList.toggle("shown");
    byId("show-sidebar").setAttribute("aria-expanded", String(isShown));
  });
  const about = await getJson("/page/about");
  byId("model").textContent = about.models[0];
  byId("model").title = `Quire ${about.version}, ${about.fingerprint}, ${about.max_model_len} tokens of context`;
  document.title = `Quire: ${about.models[0]}`;
  byId("sign-out").hidden = !about.has_keys;
  watch.setEngines(about.engines);
  startTalk(about);
}

start();
