// The run at a glance: progress, what was measured, where sampled tokens went, laws.

import { el, section, shares, table } from "./dom.js";
import { count, duration, percent, plural, points, short } from "./format.js";

export const title = "Overview";
export const needs = ["overview"];

export function render({ overview: run }) {
  return [
    headline(run),
    run.stages.length ? stages(run) : null,
    run.evaluations.length ? evaluations(run) : null,
    run.measurements.length ? measurements(run) : null,
    tokens(run),
    run.laws.length ? laws(run) : null,
  ];
}

function headline(run) {
  const change = run.headline;
  const last = change ? change.after : run.evaluations[run.evaluations.length - 1];
  const reinforced = run.stages.filter((s) => s.sides).pop();
  const cards = [];
  if (last) cards.push(card(`held-out success ${last.label}`, percent(last.success), `${percent(last.low)} to ${percent(last.high)}, n = ${count(last.n)}`));
  if (change) {
    const tone = change.low > 0 ? "good" : change.high < 0 ? "bad" : "open";
    cards.push(card(`change over stage ${change.stage}`, points(change.difference), `${points(change.low)} to ${points(change.high)} points, paired`, tone));
  }
  if (reinforced) {
    const { sides } = reinforced;
    cards.push(card("trainer waited for rollouts", percent(sides.wait / sides.seconds, 0), `of ${duration(sides.seconds)} in stage ${reinforced.name}`));
    if (sides.generating !== undefined) {
      const observed = sides.generating + sides.idle;
      cards.push(card("engine was idle", percent(sides.idle / observed, 0), `of ${duration(observed)}`));
    }
  }
  const rollouts = Object.values(run.outcomes).reduce((a, b) => a + b, 0);
  if (rollouts) cards.push(card("rollouts", count(rollouts), Object.entries(run.outcomes).map(([name, n]) => `${count(n)} ${name}`).join(", ")));
  return el("section", { class: "headline" },
    run.description ? el("p", { class: "about" }, run.description) : null,
    run.paused ? el("p", { class: "problem", role: "status" }, run.paused) : null,
    run.problem ? el("p", { class: "empty" }, `No trajectories: ${run.problem}.`) : null,
    cards.length ? el("div", { class: "cards" }, cards) : el("p", {}, "Nothing was measured yet."));
}

function card(label, value, small, tone = "") {
  return el("div", { class: `card ${tone}` }, el("p", {}, label), el("p", { class: "big" }, value), el("p", { class: "small" }, small));
}

function stages(run) {
  const rows = run.stages.map((stage) => {
    const { newest } = stage;
    const words = [];
    for (const [key, label, write] of [
      ["reward_mean", "reward", short], ["loss", "loss", short], ["lag_mean", "lag", short],
      ["gen_tokens_per_s", "tokens generated/s", short], ["train_tokens_per_s", "tokens trained/s", short],
      ["tokens_per_s", "tokens/s", short], ["queue_groups", "groups waiting", count],
      ["rollouts_in_flight", "rollouts in flight", count],
    ]) if (newest[key] !== undefined) words.push(`${label} ${write(newest[key])}`);
    return [stage.name, stage.kind, stage.step === null ? "–" : count(stage.step), duration(stage.wall_s), words.join(" · ") || "not started"];
  });
  return section("Stages", "How far every stage of the recipe came; the last column is its newest step.",
    table([["stage", ""], ["kind", ""], ["step", "n"], ["took", "n"], ["newest numbers", "wide-cell"]], rows));
}

function evaluations(run) {
  const rows = run.evaluations.map((e) => [e.label, e.task, percent(e.success), `${percent(e.low)} to ${percent(e.high)}`, count(e.n)]);
  const changes = run.comparisons.map((c) => [c.stage, c.against, points(c.difference), `${points(c.low)} to ${points(c.high)}`, `${c.gained} learned, ${c.lost} lost`, count(c.n)]);
  return section("Held-out success", "On instances that no stage trains on, the same ones every time. Intervals are 95%.",
    table([["measured", ""], ["task", ""], ["success", "n"], ["interval", "n"], ["n", "n"]], rows),
    changes.length ? el("h3", {}, "Paired comparisons, points") : null,
    changes.length ? table([["stage", ""], ["against", ""], ["change", "n"], ["interval", "n"], ["instances", ""], ["n", "n"]], changes) : null);
}

function measurements(run) {
  const rows = run.measurements.map((m) => [m.after, m.task, m.words, m.low === null ? "–" : `${percent(m.low)} to ${percent(m.high)}`, count(m.n)]);
  return section("Language model", "What was measured of the model itself.",
    table([["after stage", ""], ["measured", ""], ["value", "n"], ["interval", "n"], ["n", "n"]], rows));
}

const DROP_COLOURS = ["s5", "s4", "s1", "s3", "s6"];

function tokens(run) {
  if (!run.tokens) return null;
  const { sampled, trained, pending, dropped, closes } = run.tokens;
  const lost = Object.entries(dropped).sort((a, b) => b[1] - a[1]);
  const entries = [["trained", trained, "block s2"], ["pending", pending, "block s0"],
    ...lost.map(([reason, n], i) => [reason, n, `block ${DROP_COLOURS[Math.min(i, DROP_COLOURS.length - 1)]}`])];
  const forks = Object.entries(run.forks).map(([reason, n]) => `${count(n)} ${reason}`);
  return section("Where sampled tokens went", `${plural(sampled, "token")} sampled. Every one trains at most once or has a reason.`,
    shares(entries, short),
    el("p", {}, el("b", { class: closes ? "good" : "bad" }, closes ? "The ledger closes." : "The ledger does not close."),
      forks.length ? ` Forked calls: ${forks.join(", ")}.` : " No call was forked."));
}

function laws(run) {
  return section("Laws", "What the run was audited for.",
    el("ul", { class: "laws" }, run.laws.map((law) =>
      el("li", {}, el("b", { class: `badge ${law.held ? "good" : "bad"}` }, `${law.law} ${law.held ? "held" : "broken"}`),
        ` ${law.says}${law.detail ? ` (${law.detail})` : ""}`))));
}
