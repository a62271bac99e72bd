// The page: which view is shown, and keeping it up to date while the run goes on.

import { el } from "./dom.js";
import { duration, moment } from "./format.js";
import * as health from "./health.js";
import * as learning from "./learning.js";
import * as overview from "./overview.js";
import * as source from "./source.js";
import * as timeline from "./timeline.js";
import * as trajectories from "./trajectories.js";

const VIEWS = { overview, learning, timeline, health, trajectories };
const POLL_MS = 2000;
const SLOW_POLL_MS = 10000;

const view = document.getElementById("view");
const problem = document.getElementById("problem");
const state = document.getElementById("state");
const tabs = document.getElementById("tabs");

let current = null;
let shownOf = "";
let turn = 0;
let moved = () => {};
let head = null;

function parse() {
  const [name, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: Object.hasOwn(VIEWS, name) ? name : "overview", parameters: new URLSearchParams(query || "") };
}

function query(values) {
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) if (value) found.set(key, value);
  return found.toString();
}

/** What a view may do with the address. */
function placeOf(name) {
  const { parameters } = parse();
  const place = {
    parameters,
    query,
    put(values) {
      if (!("colour" in values) && place.parameters.get("colour")) values = { ...values, colour: place.parameters.get("colour") };
      place.parameters = new URLSearchParams(query(values));
      const address = `#/${name}?${place.parameters}`;
      if (address !== location.hash) history.pushState(null, "", address);
    },
    again: () => show(true),
    onMove(listener) {
      moved = (found) => { place.parameters = found; listener(found); };
    },
  };
  return place;
}

async function show(anew) {
  const mine = ++turn;
  const { name } = parse();
  const chosen = VIEWS[name];
  for (const link of tabs.children) {
    if (link.dataset.view === name) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    else link.removeAttribute("aria-current");
  }
  if (anew && current !== name) view.replaceChildren(el("p", { class: "empty" }, "Loading …"));
  try {
    const answers = {};
    const versions = [];
    for (const need of chosen.needs) {
      const { value, version } = await source.aggregate(need);
      answers[need] = value;
      versions.push(version);
    }
    if (mine !== turn) return;
    moved = () => {};
    const scroll = window.scrollY;
    view.className = name;
    view.replaceChildren(...chosen.render(answers, placeOf(name)).filter(Boolean));
    if (current === name && !anew) window.scrollTo(0, scroll);
    current = name;
    // Answers of different versions: ask again at the next look.
    shownOf = versions.every((v) => v === versions[0]) ? versions[0] : "";
    tell("");
  } catch (error) {
    if (mine === turn) tell(String(error.message || error));
  }
}

function tell(words) {
  problem.textContent = words;
  problem.hidden = !words;
}

async function header() {
  head = (await source.aggregate("overview")).value;
  document.title = `${head.name} · headrace`;
  document.getElementById("name").textContent = head.name;
  status(head.last_change);
}

function status(changed) {
  const tone = head.silent ? "open" : { finished: "good", failed: "bad" }[head.status] || "open";
  const words = [];
  if (head.wall_s) words.push(duration(head.wall_s));
  if (head.seed !== null && head.seed !== undefined) words.push(`seed ${head.seed}`);
  if (source.made) words.push(`exported ${source.made.at}: ${source.made.words}`);
  else if (head.going && changed) words.push(`last change ${moment(changed)}${head.silent ? "; nothing since, it may have ended without a word" : ""}`);
  state.replaceChildren(el("b", { class: `badge ${tone}` }, head.status), ` ${words.join(" · ")}`);
}

async function look() {
  let wait = POLL_MS;
  if (!document.hidden) {
    try {
      const now = await source.version();
      tell("");
      if (now.version !== shownOf) {
        await header();
        if (VIEWS[current]?.steady) offer(now.version);
        else if (!busy()) await show(false);
      } else if (!head.going) {
        wait = SLOW_POLL_MS;
      }
    } catch (error) {
      tell(`The run cannot be read: ${error.message || error}. Trying again.`);
      wait = SLOW_POLL_MS;
    }
  }
  setTimeout(look, wait);
}

/** Whether somebody is at a chart or a control of the view, which must not be replaced then. */
function busy() {
  const focused = document.activeElement;
  return (view.contains(focused) && focused !== view) || view.querySelector("svg.chart:hover") !== null;
}

function offer(version) {
  shownOf = version;
  if (document.getElementById("fresh")) return;
  view.prepend(el("p", { id: "fresh" }, "The run has gone on. ",
    el("button", { type: "button", on: { click: () => show(true) } }, "Show the newest")));
}

for (const [name, { title }] of Object.entries(VIEWS)) {
  tabs.append(el("a", { href: `#/${name}`, "data-view": name }, title));
}
window.addEventListener("popstate", () => {
  const { name, parameters } = parse();
  if (name !== current || VIEWS[name].steady !== true) show(true);
  else moved(parameters);
});

try {
  await header();
  await show(true);
} catch (error) {
  tell(String(error.message || error));
}
if (source.live) setTimeout(look, POLL_MS);
