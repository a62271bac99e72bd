// Who waited for whom: what trainer and engine did with every second, and how fast they were.

import { lanes, lineChart } from "./charts.js";
import { el, section, shares } from "./dom.js";
import { duration, percent } from "./format.js";

export const title = "Timeline";
export const needs = ["timeline"];

/** Why no rollout was begun, as the run's metrics name it. */
const HOLDS = {
  concurrency: "as many in flight as may be", ready: "finished groups wait for the trainer", batch: "the mode goes no further ahead",
  publication: "new weights come first", tasks: "tasks are at their limits or rest", staleness: "they would be too old when trained",
};

export function render({ timeline }) {
  if (!timeline.stages.length) {
    return [section("Timeline", "No update of a reinforcement-learning stage was logged yet.")];
  }
  return timeline.stages.map(stage);
}

function stage(one) {
  const column = (index) => one.columns.map((c) => c[index]);
  const { totals } = one;
  const observed = totals.generating === undefined ? 0 : totals.generating + totals.idle;
  return section(`Stage ${one.stage}`, verdict(totals, observed),
    lanes({
      title: "What both sides did", start: one.start, end: one.end, xLabel: "minute",
      lanes: [
        {
          label: "Trainer",
          parts: [
            { label: "update", colour: 0, shares: column(0) },
            { label: "publish weights", colour: 4, shares: column(1) },
            { label: "waits for rollouts", colour: 1, shares: column(2) },
          ],
          rest: { label: "between updates", colour: 6 },
        },
        {
          label: "Engine",
          parts: [{ label: "generates", colour: 2, shares: column(3) }],
          rest: { label: "idle", colour: 1 },
        },
      ],
    }),
    el("h3", {}, "Trainer, all in all"),
    shares([["update", totals.update, "block s0"], ["publish weights", totals.publish, "block s4"], ["waits for rollouts", totals.wait, "block s1"], ["between updates", totals.other, "block s6"]], duration),
    observed ? el("h3", {}, "Engine, all in all") : null,
    observed ? shares([["generates", totals.generating, "block s2"], ["idle", totals.idle, "block s1"]], duration) : null,
    el("div", { class: "grid" },
      lineChart({
        title: "Throughput", xLabel: "minute", yLabel: "tokens/s",
        lines: [{ label: "generated", points: one.rates.gen_tokens_per_s, colour: 2 }, { label: "trained", points: one.rates.train_tokens_per_s, colour: 0 }],
      }),
      lineChart({ title: "Finished groups waiting for the trainer", xLabel: "minute", yLabel: "groups", lines: [{ label: "groups", points: one.rates.queue_groups, colour: 1 }] }),
      lineChart({ title: "Rollouts in flight", xLabel: "minute", yLabel: "rollouts", lines: [{ label: "rollouts", points: one.rates.rollouts_in_flight, colour: 2 }] }),
      lineChart({
        title: "No rollout was begun, because", xLabel: "minute", yLabel: "share of time", yRange: [0, 1], yFormat: (v) => percent(v, 0),
        lines: Object.entries(one.held).map(([reason, points], i) => ({ label: HOLDS[reason] || reason, points, colour: i })),
        none: "Not recorded, or nothing ever held rollouts back.",
      })));
}

function verdict(totals, observed) {
  const wait = totals.wait / totals.seconds;
  const words = `Over ${duration(totals.seconds)} the trainer waited ${duration(totals.wait)} (${percent(wait, 0)}) for rollouts`;
  if (!observed) return `${words}; how busy the engine was is not recorded.`;
  const idle = totals.idle / observed;
  const reading = wait > idle + 0.1 ? "Training waits for generation." : idle > wait + 0.1 ? "Generation waits for training." : "Neither side waits much more than the other.";
  return `${words}, and the engine was idle for ${duration(totals.idle)} (${percent(idle, 0)}). ${reading}`;
}
