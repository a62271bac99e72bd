// What goes wrong: failures with their reasons, staleness, and how far both sides disagree.

import { histogram, lineChart } from "./charts.js";
import { bars, el, section, table } from "./dom.js";
import { count, plural } from "./format.js";

export const title = "Health";
export const needs = ["failures", "distributions"];

export function render({ failures, distributions }) {
  return [ends(failures), named(failures), reasons(failures), ...distributions.stages.map(stage),
    distributions.stages.length ? null : section("Staleness and mismatch", "No reinforcement-learning stage has logged anything yet.")];
}

function ends(failures) {
  const outcomes = Object.entries(failures.outcomes).sort((a, b) => b[1] - a[1]);
  const colour = { ok: "s2", env_failed: "s3", cancelled: "s5", open: "s0" };
  const rows = (wanted) => failures.ends.filter(wanted).map((f) => [
    count(f.count), el("span", { class: `badge ${f.outcome === "ok" ? "good" : "bad"}` }, f.outcome),
    f.reason || "no reason given", f.task, f.stage,
    el("a", { href: `#/trajectories?id=${encodeURIComponent(f.newest)}` }, "newest"),
  ]);
  const columns = [["count", "n"], ["outcome", ""], ["reason", "wide-cell"], ["task", ""], ["stage", ""], ["look", ""]];
  const failed = rows((f) => f.outcome !== "ok");
  const judged = rows((f) => f.outcome === "ok");
  return section("How rollouts ended", "An environment failure is never a reward of 0: it is left out before the baseline is computed.",
    outcomes.length ? bars(outcomes.map(([name, n]) => [name, n, count(n), colour[name] || "s1"])) : el("p", { class: "empty" }, "No rollout yet."),
    el("h3", {}, "Failures by reason"),
    failed.length ? table(columns, failed) : el("p", { class: "empty" }, "No rollout failed or was cancelled."),
    judged.length ? el("details", {}, el("summary", {}, "What verifiers said of rollouts that ended well"), table(columns, judged)) : null);
}

function named(failures) {
  const rows = failures.reasons.map((r) => [
    count(r.count), r.reason, r.whose, r.rule || "–", r.stage,
    el("a", { href: `#/trajectories?${new URLSearchParams({ stage: r.stage, failure: r.reason })}`, "aria-label": `look at ${r.reason}` }, "all"),
  ]);
  return section("Rollouts that are no clean samples", "By reason, with what the recipe does about it. A rollout may count twice: for how it ended, and for why it did not train.",
    rows.length ? table([["count", "n"], ["reason", ""], ["whose", ""], ["rule", ""], ["stage", ""], ["look", ""]], rows) : el("p", { class: "empty" }, "Every rollout is a clean sample so far."));
}

function reasons(failures) {
  const byTokens = Object.entries(failures.tokens).sort((a, b) => b[1] - a[1]);
  const forks = Object.entries(failures.forks).sort((a, b) => b[1] - a[1]);
  return section("Why sampled tokens do not train", "Counted for every token; the number of whole rollouts stands behind.",
    byTokens.length ? bars(byTokens.map(([reason, n]) => [reason, n, `${count(n)} tokens${failures.drops[reason] ? `, ${plural(failures.drops[reason], "rollout")}` : ""}`, "s5"])) : el("p", { class: "empty" }, "Every sampled token trained or still may."),
    el("h3", {}, "Forked calls"),
    forks.length ? bars(forks.map(([reason, n]) => [reason, n, count(n), "s1"])) : el("p", { class: "empty" }, "No call started a new branch in its session."));
}

function stage(one) {
  const lags = new Map(one.staleness);
  const top = Math.max(...lags.keys(), 0);
  const all = Array.from({ length: lags.size ? top + 1 : 0 }, (_, lag) => [String(lag), lags.get(lag) || 0]);
  const bound = Number.isInteger(one.bound) ? one.bound : null;
  return section(`Staleness and mismatch, stage ${one.stage}`,
    "Mismatch compares the log-probabilities that trainer and engine give the same tokens under the same weights; the importance ratio also holds what training changed since. Single tokens are not recorded, so mismatch is counted over updates.",
    el("div", { class: "grid" },
      histogram({ title: `Staleness of trained tokens${bound === null ? "" : ` (bound ${bound})`}`, bars: all, xLabel: "lag", yLabel: "tokens", warn: (i) => bound !== null && i > bound, none: "No token was trained yet." }),
      lineChart({ title: "Lag at the cut", xLabel: "update", whole: true, yLabel: "versions", lines: one.lag.map((l, i) => ({ ...l, colour: i })) }),
      histogram({ title: "Mean |log-probability mismatch| of an update", bars: one.mismatch.mean, xLabel: "nats, at least", yLabel: "updates", colour: 2 }),
      histogram({ title: "Largest |log-probability mismatch| of an update", bars: one.mismatch.largest, xLabel: "nats, at least", yLabel: "updates", colour: 1 }),
      lineChart({ title: "Mismatch over updates", xLabel: "update", whole: true, yLabel: "nats, logarithmic", log: true, lines: one.mismatch_curve.map((l, i) => ({ ...l, colour: i })) }),
      lineChart({ title: "Importance ratio, new over rollout policy", xLabel: "update", whole: true, yLabel: "ratio", zero: false, lines: one.ratio.map((l, i) => ({ ...l, colour: i })) })));
}
