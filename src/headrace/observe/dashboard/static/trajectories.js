// Browsing trajectories: filters and search on one side, one trajectory in full on the other.

import { el, svg } from "./dom.js";
import { count, duration, moment, short } from "./format.js";
import * as source from "./source.js";
import { tokenView } from "./tokens.js";

export const title = "Trajectories";
export const needs = ["choices"];
/** New data must not pull the list away from under a reader, so this view offers it instead. */
export const steady = true;

const CONDITIONS = ["stage", "purpose", "task", "outcome", "failure", "fate", "min_reward", "max_reward", "forked", "text", "group"];
const TYPING_MS = 350;

export function render({ choices }, place) {
  const filter = Object.fromEntries(CONDITIONS.map((name) => [name, place.parameters.get(name) || ""]));
  const list = el("div", { class: "list" });
  const detail = el("div", { class: "detail", tabindex: -1 });
  const box = el("div", { class: "browser" }, el("div", { class: "side" }, filters(choices, filter, changed), list), detail);
  let asked = 0;
  let opened = null;

  function changed() {
    place.put({ ...filter, id: place.parameters.get("id") || "" });
    show();
  }

  async function show() {
    const turn = ++asked;
    list.setAttribute("aria-busy", "true");
    try {
      const found = await source.page(filter);
      if (turn === asked) list.replaceChildren(...rows(found, filter, turn));
    } catch (error) {
      if (turn === asked) list.replaceChildren(el("p", { class: "problem" }, String(error.message || error)));
    }
    if (turn === asked) list.removeAttribute("aria-busy");
  }

  function rows(found, wanted, turn) {
    const body = el("ul", { class: "rows" }, found.rows.map(item));
    const status = el("p", { class: "dim", "aria-live": "polite" });
    const more = el("button", { type: "button" }, "Show more");
    let total = found.rows.length;
    let next = found.next;
    const tell = (complete) => {
      more.hidden = next === null;
      more.textContent = complete ? "Show more" : "Search on";
      status.textContent = total === 0 && next === null ? "No trajectory meets these conditions."
        : `${count(total)} shown${next === null ? ", all there are" : complete ? ", newest first" : "; the search can go on further back"}${source.live ? "" : " in this export"}.`;
    };
    more.addEventListener("click", async () => {
      more.disabled = true;
      try {
        const page = await source.page(wanted, next);
        if (turn !== asked) return;
        body.append(...page.rows.map(item));
        total += page.rows.length;
        next = page.next;
        tell(page.complete);
      } catch (error) {
        status.textContent = String(error.message || error);
      }
      more.disabled = false;
    });
    tell(found.complete);
    return [status, body, more];
  }

  function item(row) {
    const link = el("a", { href: `#/trajectories?${place.query({ ...filter, id: row.id })}`, "data-id": row.id, "aria-current": row.id === opened ? "true" : null },
      el("span", { class: "first" }, el("b", {}, row.family || row.task), reward(row)),
      el("span", { class: "second" }, [row.purpose === "train" ? row.stage : row.purpose, row.outcome === "ok" ? null : row.outcome, ...row.reasons.filter((reason) => reason !== row.outcome && reason !== row.fate), row.fate === row.outcome ? null : row.fate,
        `${count(row.tokens)} tokens`, row.version === null ? null : `v${row.version}`].filter(Boolean).join(" · ")),
      el("span", { class: "third" }, row.id));
    link.addEventListener("click", (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      place.put({ ...filter, id: row.id });
      open(row.id, true);
    });
    return el("li", {}, link);
  }

  async function open(id, focus) {
    opened = id;
    box.classList.toggle("opened", Boolean(id));
    for (const link of list.querySelectorAll("a[data-id]")) {
      if (link.dataset.id === id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    if (!id) {
      detail.replaceChildren(el("p", { class: "empty" }, "Choose a trajectory to see what was said, how its calls hang together, and every token."));
      return;
    }
    try {
      const found = await source.trajectory(id);
      if (opened !== id) return;
      detail.replaceChildren(...full(found));
    } catch (error) {
      if (opened === id) detail.replaceChildren(back(), el("p", { class: "problem" }, String(error.message || error)));
    }
    if (focus) detail.focus({ preventScroll: false });
  }

  function back() {
    return el("button", { type: "button", class: "back", on: { click: () => { const was = opened; place.put({ ...filter, id: "" }); open("").then(() => { for (const link of list.querySelectorAll("a[data-id]")) if (link.dataset.id === was) link.focus(); }); } } }, "← Back to the list");
  }

  function full(t) {
    const siblings = el("button", { type: "button", on: { click: () => { for (const name of CONDITIONS) filter[name] = ""; filter.group = t.group; place.put({ ...filter, id: t.id }); place.again(); } } }, "Show its group");
    return [
      back(),
      el("h2", { class: "id" }, t.id),
      el("p", { class: "verdict" }, el("span", { class: `badge ${t.outcome === "ok" ? "good" : t.outcome === "open" ? "open" : "bad"}` }, t.outcome),
        t.reasons.filter((reason) => reason !== t.outcome).map((reason) => el("span", { class: "badge open" }, reason)), reward(t), ` ${t.said}`, t.reason ? ` · ${t.reason}` : ""),
      el("dl", { class: "facts" }, [
        ["task", t.task], ["purpose", t.purpose], ["stage", t.stage], ["group", t.group], ["calls", count(t.calls)], ["tokens sampled", count(t.tokens)],
        ["took", t.finished ? duration(t.finished - t.dispatched) : "–"], ["began", moment(t.dispatched)],
        ...Object.entries(t.rewards).filter(([name]) => name !== "reward").map(([name, value]) => [`reward: ${name}`, short(value)]),
      ].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      el("p", {}, siblings),
      el("details", {}, el("summary", {}, "Task instance"), el("pre", {}, t.instance)),
      el("h3", {}, "Conversation"),
      t.turns_skipped ? el("p", { class: "dim" }, `${count(t.turns_skipped)} earlier messages are left out.`) : null,
      ...t.turns.map(turn),
      t.turns.length ? null : el("p", { class: "empty" }, "Nothing was said."),
      el("h3", {}, "Calls"),
      tree(t),
      el("h3", {}, "Tokens"),
      t.segments.length ? tokenView(t, place.parameters.get("colour") || "mask", (colour) => place.put({ ...filter, id: t.id, colour })) : el("p", { class: "empty" }, "No token was sampled."),
    ].filter(Boolean);
  }

  place.onMove((parameters) => {
    if (CONDITIONS.some((name) => (parameters.get(name) || "") !== filter[name])) place.again();
    else open(parameters.get("id") || "", false);
  });
  show();
  open(place.parameters.get("id") || "", false);
  return [box];
}

function filters(choices, filter, changed) {
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(changed, TYPING_MS); };
  const select = (name, label) => el("label", {}, label, el("select", { name, on: { change: (event) => { filter[name] = event.target.value; changed(); } } },
    el("option", { value: "" }, "any"),
    Object.entries(choices[name] || {}).map(([value, n]) => el("option", { value, selected: filter[name] === value }, `${value} (${count(n)})`))));
  const number = (name, label) => el("label", {}, label, el("input", { type: "number", step: "any", name, value: filter[name], on: { input: (event) => { filter[name] = event.target.value; later(); } } }));
  const text = el("input", { type: "search", name: "text", maxlength: 200, value: filter.text, placeholder: "in messages, ids, instances, reasons, failures", on: { input: (event) => { filter.text = event.target.value; later(); } } });
  const forked = el("input", { type: "checkbox", name: "forked", checked: Boolean(filter.forked), on: { change: (event) => { filter.forked = event.target.checked ? "true" : ""; changed(); } } });
  const group = filter.group ? el("p", {}, `Only group ${filter.group}. `, el("button", { type: "button", on: { click: (event) => { filter.group = ""; event.target.parentElement.remove(); changed(); } } }, "Show all groups")) : null;
  return el("form", { class: "filters", role: "search", "aria-label": "Filter trajectories", on: { submit: (event) => event.preventDefault() } },
    el("label", { class: "whole" }, "Search", text),
    select("stage", "Stage"), select("purpose", "Purpose"), select("task", "Task"), select("outcome", "Outcome"), select("failure", "Failure reason"), select("fate", "What became of it"),
    el("div", { class: "pair" }, number("min_reward", "Reward from"), number("max_reward", "to")),
    el("label", { class: "check" }, forked, "only with forks"), group);
}

function reward(row) {
  if (row.reward === null) return el("span", { class: "reward" }, "–");
  return el("span", { class: `reward ${row.reward >= 1 ? "good" : row.reward <= 0 ? "bad" : "open"}` }, short(row.reward));
}

function turn(one) {
  return el("div", { class: `turn ${["system", "user", "assistant", "tool"].includes(one.role) ? one.role : "other"}` },
    el("p", { class: "role" }, one.role, one.note ? el("i", {}, ` ${one.note}`) : null),
    one.reasoning ? el("pre", { class: "think" }, one.reasoning) : null,
    el("pre", {}, one.text));
}

const ROW = 26, LANE = 16, LANES = 12;

/** The calls with lines from each to the one it continues; a fork begins a new line. */
function tree(t) {
  if (!t.tree.length) return el("p", { class: "empty" }, "No call was made.");
  const x = (call) => 9 + Math.min(call.lane, LANES - 1) * LANE;
  const rowOf = new Map(t.tree.map((call, i) => [call.index, i]));
  const width = Math.max(...t.tree.map(x)) + 12;
  const graph = svg("svg", { width, height: t.tree.length * ROW, "aria-hidden": "true", class: "graph" });
  t.tree.forEach((call, i) => {
    const y = i * ROW + ROW / 2;
    const above = call.parent === null ? undefined : rowOf.get(call.parent);
    if (above !== undefined) {
      const from = t.tree[above], fromY = above * ROW + ROW / 2;
      graph.append(svg("path", { class: `edge s${call.lane % 6}`, d: from.lane === call.lane ? `M${x(from)} ${fromY}V${y}` : `M${x(from)} ${fromY}Q${x(call)} ${fromY} ${x(call)} ${fromY + ROW * 0.7}V${y}` }));
    }
  });
  t.tree.forEach((call, i) => graph.append(svg("circle", { class: `dot s${call.lane % 6}`, cx: x(call), cy: i * ROW + ROW / 2, r: call.fork ? 5.5 : 4 })));
  const lines = t.tree.map((call) => el("li", {},
    el("b", {}, `call ${call.index}`), call.model ? el("span", { class: "badge open" }, call.model) : null,
    ` ${count(call.held)} held + ${count(call.read)} read, ${count(call.sampled)} sampled · ${call.finish}`,
    call.parse === "ok" ? null : el("span", { class: "badge bad" }, call.parse),
    call.fork ? el("span", { class: "badge open" }, `fork: ${call.fork}`) : null,
    call.versions.length ? ` · ${call.versions.map((v) => `v${v}`).join(", ")}` : "", ` · ${duration(call.seconds)}`));
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Calls" },
    el("div", { class: "tree" }, graph, el("ol", {}, lines)),
    t.tree_skipped ? el("p", { class: "dim" }, `${count(t.tree_skipped)} further calls are left out.`) : null);
}
