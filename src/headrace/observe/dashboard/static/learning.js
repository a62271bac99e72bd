// Does it learn? Reward and held-out success per task, then every stage's own curves.

import { lineChart } from "./charts.js";
import { el, section } from "./dom.js";
import { percent } from "./format.js";

export const title = "Learning";
export const needs = ["learning"];

export function render({ learning }) {
  const tasks = [...new Set([...learning.tasks.map((t) => t.task), ...learning.evaluations.map((e) => e.task)])];
  const parts = [];
  if (tasks.length) {
    parts.push(section("Reward and held-out success",
      "Training reward is the mean over rollouts that finished in one stretch of time; bands are 95% intervals that take rollouts as independent. Dots are evaluations where their stage ended.",
      el("div", { class: tasks.length > 1 ? "grid" : "" }, tasks.map((task) => taskChart(learning, task, tasks.length)))));
  }
  for (const stage of learning.charts) {
    parts.push(section(`Stage ${stage.stage}`, stage.kind === "agentic_rl" ? "One point per update." : "One point per step that was logged.",
      el("div", { class: "grid" }, stage.charts.map((chart) => lineChart({
        title: chart.title, xLabel: stage.kind === "agentic_rl" ? "update" : "step", yLabel: chart.unit, zero: chart.zero, whole: true,
        lines: chart.lines.map((line, i) => ({ ...line, colour: i, dashed: line.label === "target" })),
      })))));
  }
  if (!parts.length) parts.push(section("Learning", "No step was logged yet."));
  return parts;
}

function taskChart(learning, task, number) {
  const lines = learning.tasks.filter((t) => t.task === task).map((t, i) => ({ label: `training reward, ${t.stage}`, points: t.points, colour: i }));
  const dots = learning.evaluations.filter((e) => e.task === task && e.minutes !== null && e.success !== null)
    .map((e) => ({ x: e.minutes, y: e.success, low: e.low, high: e.high, colour: e.greedy ? 4 : undefined, label: `${e.label}: ${percent(e.success)}` }));
  const values = lines.flatMap((l) => l.points.map((p) => p[1])).concat(dots.map((d) => d.y));
  const shares = values.every((v) => v >= 0 && v <= 1);
  return lineChart({
    title: `Task ${task}`, xLabel: "minute", yLabel: "reward", lines, dots, dotsLabel: "held-out success",
    stretches: learning.stages.map((s) => ({ start: s.start, end: s.end, label: s.stage })),
    yRange: shares ? [0, 1] : undefined, yFormat: shares ? (v) => percent(v, 0) : undefined,
    height: number > 1 ? 260 : 320, css: number > 1 ? "" : "wide",
  });
}
