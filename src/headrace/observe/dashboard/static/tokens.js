// A trajectory token by token: what was read and sampled, coloured by mask, log-probability, version or advantage.

import { el, legend } from "./dom.js";
import { short } from "./format.js";
import * as source from "./source.js";

const PROBABILITIES = [[0.9, "over 90%"], [0.5, "50 to 90%"], [0.2, "20 to 50%"], [0.05, "5 to 20%"], [0.005, "0.5 to 5%"], [0, "below 0.5%"]];
const STRENGTHS = [[1, "1 and more"], [0.5, "0.5 to 1"], [0, "below 0.5"]];
const VERSIONS = 6;

/** Ways to colour tokens: id, name, and what gives each token a css class and the legend. */
const COLOURINGS = {
  mask: { name: "Mask", make: byMask },
  logprob: { name: "Log-probability", make: byProbability },
  version: { name: "Weight version", make: byVersion },
  advantage: { name: "Advantage", make: byAdvantage },
};

const STATES = { trained: "trained", pending: "may still train", elsewhere: "sampled, belongs to an earlier segment", read: "read, never trained" };

function maskClass(state) {
  return { trained: "m-trained", pending: "m-pending", elsewhere: "m-elsewhere", read: "m-read" }[state] || "m-dropped";
}

function byMask(data) {
  const states = [...new Set(data.state)];
  return {
    css: (i) => maskClass(data.state[i]),
    keys: states.map((state) => [STATES[state] || `not trained: ${state}`, `tok ${maskClass(state)}`]),
  };
}

function byProbability(data) {
  const level = (i) => PROBABILITIES.findIndex(([bound]) => Math.exp(data.logprob[i]) >= bound);
  return {
    css: (i) => (data.logprob[i] === null ? "m-read" : `p${level(i)}`),
    keys: PROBABILITIES.map(([, words], i) => [words, `tok p${i}`]),
    note: "Probability of each sampled token when it was sampled.",
  };
}

function byVersion(data) {
  const seen = [...new Set(data.version.filter((v) => v !== null))].sort((a, b) => b - a);
  const place = (v) => Math.min(seen.indexOf(v), VERSIONS - 1);
  const keys = seen.slice(0, VERSIONS).map((v, i) => [i === VERSIONS - 1 && seen.length > VERSIONS ? `v${v} and older` : `v${v}`, `tok v${i}`]);
  return { css: (i) => (data.version[i] === null ? "m-read" : `v${place(data.version[i])}`), keys, note: "Weights that sampled each token, newest first." };
}

function byAdvantage(data) {
  const value = data.advantage;
  if (value === null) return { css: (i) => (data.version[i] === null ? "m-read" : "m-dropped"), keys: [], note: "No advantage: this trajectory is in no batch." };
  const level = STRENGTHS.findIndex(([bound]) => Math.abs(value) >= bound);
  const sign = value > 0 ? "up" : value < 0 ? "down" : "flat";
  const keys = value === 0 ? [["0", "tok flat0"]] : [[`${value > 0 ? "+" : "−"}${Math.abs(value).toFixed(3)} (${STRENGTHS[level][1]})`, `tok ${sign}${level}`]];
  return {
    css: (i) => (data.version[i] === null ? "m-read" : data.state[i] === "trained" || data.state[i] === "pending" ? (value === 0 ? "flat0" : `${sign}${level}`) : "m-dropped"),
    keys, note: "The ledger holds one advantage per trajectory; every token of it that trains gets it.",
  };
}

/** The tokens of a trajectory's segments, with the choice of colouring. `choose` is told of changes. */
export function tokenView(trajectory, colouring, choose) {
  let colour = COLOURINGS[colouring] ? colouring : "mask";
  let shown = 0;
  const loaded = [];
  const problem = el("p", { class: "problem", role: "alert", hidden: true });
  const keys = el("div", {});
  const facts = el("p", { class: "token-facts", "aria-live": "polite" }, "Choose a token, or move with the arrow keys.");
  const text = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys move from one to the next" });
  const more = el("button", { type: "button", hidden: true, on: { click: () => load(loaded[shown].ids.length) } });
  const radios = el("fieldset", { class: "choice" }, el("legend", {}, "Colour by"), Object.entries(COLOURINGS).map(([id, { name }]) =>
    el("label", {}, el("input", { type: "radio", name: "colour", value: id, checked: id === colour, on: { change: () => { colour = id; choose(id); paint(); } } }), name)));
  const which = trajectory.segments.length > 1 ? el("label", {}, "Segment ", el("select", { on: { change: (event) => { shown = Number(event.target.value); open(); } } },
    trajectory.segments.map((s, i) => el("option", { value: i }, `${i + 1}: ${s.tokens} tokens, ${s.sampled} sampled`)))) : null;
  let chosen = -1;

  async function load(offset) {
    more.disabled = true;
    try {
      const part = await source.tokens(trajectory.id, shown, offset);
      const data = loaded[shown];
      if (!data || offset === 0) loaded[shown] = part;
      else for (const name of ["ids", "text", "special", "state", "logprob", "version", "newest"]) data[name].push(...part[name]);
      problem.hidden = true;
      build();
    } catch (error) {
      problem.textContent = String(error.message || error);
      problem.hidden = false;
    }
    more.disabled = false;
  }

  function build() {
    const data = loaded[shown];
    chosen = -1;
    text.replaceChildren(...data.ids.map((id, i) => {
      const words = data.named ? data.text[i].replaceAll("\n", "↵\n") : `${id} `;
      return el("span", { "data-i": i }, words === "" ? "·" : words);
    }));
    const left = data.total - data.ids.length;
    more.hidden = left <= 0 || !source.live;
    more.textContent = `Show more (${left} left)`;
    paint();
    if (!data.named) facts.textContent = "This run has no tokenizer in its checkpoints: ids are shown without text.";
    else if (left > 0 && !source.live) facts.textContent = `The last ${left} tokens are not in this export.`;
  }

  function paint() {
    const data = loaded[shown];
    if (!data) return;
    const made = COLOURINGS[colour].make(data);
    for (const span of text.children) {
      const i = Number(span.dataset.i);
      const trains = data.state[i] === "trained" || data.state[i] === "pending";
      span.className = `tok ${made.css(i)}${trains ? " trains" : ""}${data.special[i] ? " special" : ""}${i === chosen ? " chosen" : ""}`;
    }
    keys.replaceChildren(made.keys.length ? legend(made.keys) : "", made.note ? el("p", { class: "dim" }, made.note) : "");
  }

  function tell(index) {
    const data = loaded[shown];
    if (!data || index < 0 || index >= data.ids.length) return;
    text.children[chosen]?.classList.remove("chosen");
    chosen = index;
    const span = text.children[index];
    span.classList.add("chosen");
    span.scrollIntoView({ block: "nearest" });
    const words = [`#${index}`, `id ${data.ids[index]}`, JSON.stringify(data.text[index]), STATES[data.state[index]] || `not trained: ${data.state[index]}`];
    if (data.version[index] !== null) {
      const p = data.logprob[index];
      words.push(`log-probability ${p.toFixed(4)} (${(100 * Math.exp(p)).toPrecision(3)}%)`);
      words.push(data.newest[index] === data.version[index] ? `weights v${data.version[index]}` : `weights v${data.version[index]}..v${data.newest[index]}`);
      if (data.advantage !== null && data.state[index] === "trained") words.push(`advantage ${data.advantage >= 0 ? "+" : ""}${short(data.advantage)}`);
    }
    facts.textContent = words.join(" · ");
  }

  text.addEventListener("click", (event) => {
    const span = event.target.closest("[data-i]");
    if (span) tell(Number(span.dataset.i));
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    tell(Math.min(Math.max(chosen + step, 0), text.children.length - 1));
  });

  function open() {
    if (loaded[shown]) build();
    else load(0);
  }
  open();
  return el("div", { class: "token-view" }, el("div", { class: "row" }, radios, which), keys, problem, text, facts, more);
}
