// Charts in SVG, drawn at the width they have, with a crosshair for pointer and arrow keys.

import { el, legend, svg } from "./dom.js";
import { short } from "./format.js";

const COLOURS = 6;
/** Widest bar of a histogram, in pixels. */
const WIDEST = 90;
const LEFT = 60, RIGHT = 14, TOP = 12, BOTTOM = 38;

/** Round numbers (1, 2 or 5 times a power of ten apart) within [low, high]; `whole`: no fractions. */
export function ticks(low, high, about, whole = false) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = Math.max(span / Math.max(about, 1), whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

/** A figure whose drawing follows its width: draw(width) gives an element. */
function figure(title, keys, draw, css = "") {
  const box = el("div", { class: "plot" });
  const shown = el("figure", { class: css },
    el("figcaption", {}, title), keys.length > 1 ? legend(keys) : null, box);
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.floor(box.clientWidth);
    if (width > 0 && width !== drawn) {
      drawn = width;
      box.replaceChildren(draw(width));
    }
  }).observe(box);
  return shown;
}

function empty(title, words = "Not recorded.") {
  return el("figure", {}, el("figcaption", {}, title), el("p", { class: "empty" }, words));
}

function scale(low, high, from, to) {
  return (value) => from + ((value - low) / (high - low)) * (to - from);
}

function axes(area, { xs, ys, xTicks, yTicks, xLabel, yLabel, xFormat, yFormat }) {
  const { left, right, top, bottom, height } = area;
  const parts = [];
  for (const value of yTicks) {
    const y = ys(value);
    parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
    parts.push(svg("text", { class: "tick", "text-anchor": "end", x: left - 7, y: y + 4 }, yFormat(value)));
  }
  parts.push(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const value of xTicks) {
    parts.push(svg("text", { class: "tick", "text-anchor": "middle", x: xs(value), y: bottom + 15 }, xFormat(value)));
  }
  if (xLabel) parts.push(svg("text", { class: "label", "text-anchor": "middle", x: (left + right) / 2, y: height - 5 }, xLabel));
  if (yLabel) {
    const middle = (top + bottom) / 2;
    parts.push(svg("text", { class: "label", "text-anchor": "middle", transform: `translate(11 ${middle}) rotate(-90)` }, yLabel));
  }
  return parts;
}

/** A readout that follows pointer and arrow keys over positions `at` (pixels, rising). */
function crosshair(root, area, at, words) {
  if (!at.length) return root;
  const line = svg("line", { class: "cross", y1: area.top, y2: area.bottom, visibility: "hidden" });
  root.append(line);
  const readout = el("p", { class: "readout", hidden: true, "aria-live": "polite" });
  const holder = el("div", { class: "holder" }, root, readout);
  let current = at.length - 1;
  const show = (index) => {
    current = Math.min(Math.max(index, 0), at.length - 1);
    line.setAttribute("x1", at[current]);
    line.setAttribute("x2", at[current]);
    line.setAttribute("visibility", "visible");
    readout.replaceChildren(...words(current));
    readout.hidden = false;
    readout.classList.toggle("leftward", at[current] > area.width / 2);
  };
  const hide = () => {
    line.setAttribute("visibility", "hidden");
    readout.hidden = true;
  };
  root.setAttribute("tabindex", "0");
  root.addEventListener("pointermove", (event) => {
    const x = event.clientX - root.getBoundingClientRect().left;
    let best = 0;
    for (let i = 1; i < at.length; i++) if (Math.abs(at[i] - x) < Math.abs(at[best] - x)) best = i;
    show(best);
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focus", () => { if (root.matches(":focus-visible")) show(current); });
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -at.length, End: at.length }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(current + step);
  });
  return holder;
}

/**
 * Curves over a common axis.
 *
 * lines: { label, points: [[x, y, low, high]], colour, faint, dashed }; low and high draw an
 * interval, a y of null is a gap.
 * dots: { x, y, low, high, label, colour }: measurements with intervals.
 * stretches: { start, end, label }: shaded parts of the x axis.
 * whole: x is a count.
 */
export function lineChart(spec) {
  const { title, xLabel = "", yLabel = "", zero = true, log = false, whole = false, yFormat = short, xFormat = short } = spec;
  const height = spec.height || 220, dots = spec.dots || [], stretches = spec.stretches || [];
  const put = log ? (y) => Math.log10(y) : (y) => y;
  const usable = (p) => Number.isFinite(p[0]) && Number.isFinite(p[1]) && (!log || p[1] > 0);
  const lines = spec.lines
    .map((line) => ({ ...line, colour: line.colour % COLOURS, pieces: pieces(line.points, usable), points: line.points.filter(usable) }))
    .filter((line) => line.points.length);
  if (!lines.length && !dots.length) return empty(title, spec.none);
  const allX = lines.flatMap((l) => l.points.map((p) => p[0])).concat(dots.map((d) => d.x), stretches.flatMap((s) => [s.start, s.end]));
  const allY = lines.flatMap((l) => l.points.flatMap((p) => [p[1], p[2] ?? p[1], p[3] ?? p[1]]).map(put))
    .concat(dots.flatMap((d) => [d.low ?? d.y, d.high ?? d.y]));
  let [xLow, xHigh] = [Math.min(...allX), Math.max(...allX)];
  if (xHigh <= xLow) [xLow, xHigh] = [xLow - 0.5, xHigh + 0.5];
  let [yLow, yHigh] = spec.yRange || [Math.min(...allY), Math.max(...allY)];
  if (log) [yLow, yHigh] = [Math.floor(yLow), Math.ceil(yHigh)];
  else if (!spec.yRange && zero) yLow = Math.min(yLow, 0);
  if (yHigh <= yLow) [yLow, yHigh] = yLow === 0 ? [0, 1] : [yLow - Math.abs(yLow) * 0.1 - 1e-9, yHigh + Math.abs(yHigh) * 0.1 + 1e-9];
  if (!spec.yRange && !log) {
    const air = (yHigh - yLow) * 0.05;
    yHigh += air;
    if (yLow !== 0) yLow -= air;
  }
  const written = (y) => (log ? y.toExponential(1) : yFormat(y));
  const keys = [...new Map(lines.map((l) => [l.label, [l.label, `line s${l.colour}${l.faint ? " faint" : ""}${l.dashed ? " dashed" : ""}`]])).values()];
  if (dots.length && spec.dotsLabel) keys.push([spec.dotsLabel, "dot mark"]);
  return figure(title, keys, (width) => {
    const area = { left: LEFT, right: width - RIGHT, top: TOP, bottom: height - BOTTOM, width, height };
    const xs = scale(xLow, xHigh, area.left, area.right), ys = scale(yLow, yHigh, area.bottom, area.top);
    const clampY = (y) => Math.min(Math.max(ys(y), area.top), area.bottom);
    const root = svg("svg", { class: "chart", width, height, role: "img", "aria-label": summary(title, lines, dots, written) });
    stretches.forEach((stretch, i) => {
      const [a, b] = [xs(stretch.start), xs(stretch.end)];
      root.append(svg("rect", { class: `stretch${i % 2}`, x: a, y: area.top, width: Math.max(b - a, 0), height: area.bottom - area.top }));
      if (b - a > 7 * stretch.label.length) {
        root.append(svg("text", { class: "tick", "text-anchor": "middle", x: (a + b) / 2, y: area.top + 12 }, stretch.label));
      }
    });
    root.append(...axes(area, {
      xs, ys, xLabel, yLabel, xFormat,
      xTicks: ticks(xLow, xHigh, width / 80, whole),
      yTicks: log ? ticks(yLow, yHigh, 5).filter(Number.isInteger) : ticks(yLow, yHigh, 5),
      yFormat: log ? (v) => `1e${v}` : yFormat,
    }));
    for (const line of lines) {
      for (const piece of line.pieces) {
        const sure = piece.filter((p) => Number.isFinite(p[2]) && Number.isFinite(p[3]));
        if (sure.length < 2) continue;
        const up = sure.map((p) => `${xs(p[0]).toFixed(1)},${clampY(put(p[3])).toFixed(1)}`);
        const down = sure.map((p) => `${xs(p[0]).toFixed(1)},${clampY(put(p[2])).toFixed(1)}`).reverse();
        root.append(svg("polygon", { class: `sure s${line.colour}`, points: up.concat(down).join(" ") }));
      }
      const faint = `${line.faint ? " faint" : ""}${line.dashed ? " dashed" : ""}`;
      for (const piece of line.pieces) {
        if (piece.length === 1) {
          const [x, y] = piece[0];
          root.append(svg("circle", { class: `dot s${line.colour}`, cx: xs(x), cy: clampY(put(y)), r: line.points.length === 1 ? 3 : 1.5 }));
          continue;
        }
        const path = piece.map((p) => `${xs(p[0]).toFixed(1)},${clampY(put(p[1])).toFixed(1)}`).join(" ");
        root.append(svg("polyline", { class: `line s${line.colour}${faint}`, points: path }));
      }
    }
    for (const dot of dots) {
      const colour = dot.colour === undefined ? "" : ` s${dot.colour}`;
      root.append(svg("g", { class: `mark${colour}` },
        svg("title", {}, dot.label),
        svg("line", { x1: xs(dot.x), x2: xs(dot.x), y1: clampY(dot.low ?? dot.y), y2: clampY(dot.high ?? dot.y) }),
        svg("circle", { cx: xs(dot.x), cy: clampY(dot.y), r: 4.5 })));
    }
    const places = [...new Set(lines.flatMap((l) => l.points.map((p) => p[0])))].sort((a, b) => a - b);
    return crosshair(root, area, places.map(xs), (index) => {
      const x = places[index];
      const rows = [el("b", {}, `${xLabel ? `${xLabel} ` : ""}${xFormat(x)}`)];
      for (const line of lines) {
        const near = line.points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));
        const sure = Number.isFinite(near[2]) ? ` (${written(near[2])} to ${written(near[3])}, n=${near[4]})` : "";
        rows.push(el("span", {}, el("i", { class: `s${line.colour}` }), `${line.label} ${written(near[1])}${sure}`));
      }
      return rows;
    });
  }, spec.css);
}

/** Stretches of neighbouring points without a gap. */
function pieces(points, usable) {
  const found = [[]];
  for (const point of points) {
    if (usable(point)) found[found.length - 1].push(point);
    else if (point[1] === null) found.push([]);
  }
  return found.filter((piece) => piece.length);
}

function summary(title, lines, dots, written) {
  const words = lines.map((l) => `${l.label}: from ${written(l.points[0][1])} to ${written(l.points[l.points.length - 1][1])}`);
  return [title, ...words, ...dots.map((d) => d.label)].join(". ");
}

/** Vertical bars: [label, value] each; `warn(i)` marks a bar. */
export function histogram({ title, bars: given, xLabel = "", yLabel = "", warn = () => false, none, colour = 0, height = 220 }) {
  const top = Math.max(...given.map(([, value]) => value), 0);
  if (!top) return empty(title, none);
  return figure(title, [], (width) => {
    const area = { left: LEFT, right: width - RIGHT, top: TOP, bottom: height - BOTTOM, width, height };
    const xs = scale(0, given.length, area.left, area.right), ys = scale(0, top * 1.06, area.bottom, area.top);
    const root = svg("svg", { class: "chart", width, height, role: "img", "aria-label": `${title}. ${given.map(([l, v]) => `${l}: ${short(v)}`).join(", ")}` });
    const every = Math.ceil(given.length / Math.max(width / 34, 1));
    root.append(...axes(area, { xs: (i) => xs(i + 0.5), ys, xLabel, yLabel, yFormat: short, yTicks: ticks(0, top * 1.06, 5, true),
      xTicks: given.map((_, i) => i).filter((i) => i % every === 0), xFormat: (i) => given[i][0] }));
    given.forEach(([, value], i) => {
      const y = ys(value), wide = Math.min(Math.max(xs(i + 0.9) - xs(i + 0.1), 0.5), WIDEST);
      root.append(svg("rect", { class: `bar s${warn(i) ? 3 : colour}`, x: xs(i + 0.5) - wide / 2, y, width: wide, height: Math.max(area.bottom - y, value ? 1 : 0) }));
    });
    return crosshair(root, area, given.map((_, i) => xs(i + 0.5)), (i) => [el("b", {}, `${xLabel} ${given[i][0]}`), el("span", {}, `${short(given[i][1])} ${yLabel}`)]);
  });
}

/**
 * Lanes of stacked shares over time.
 *
 * lanes: { label, parts: [{ label, colour, shares: [0..1 or null per column] }], rest: { label, colour } }.
 */
export function lanes({ title, start, end, lanes: given, xLabel }) {
  const lane = 74, gap = 22, height = TOP + 14 + given.length * (lane + gap) - gap + BOTTOM;
  const columns = given[0].parts[0].shares.length;
  const keys = given.flatMap((l) => [...l.parts, l.rest].map((p) => [p.label, `block s${p.colour}`]));
  return figure(title, keys, (width) => {
    const area = { left: 8, right: width - 8, top: TOP, bottom: height - BOTTOM, width, height };
    const xs = scale(0, columns, area.left, area.right), time = scale(start, end, area.left, area.right);
    const root = svg("svg", { class: "chart", width, height, role: "img", "aria-label": title });
    given.forEach((one, index) => {
      const y0 = TOP + 14 + index * (lane + gap);
      root.append(svg("text", { class: "label strong", x: area.left, y: y0 - 5 }, one.label));
      root.append(svg("rect", { class: "track", x: area.left, y: y0, width: area.right - area.left, height: lane }));
      for (let i = 0; i < columns; i++) {
        if (one.parts[0].shares[i] === null) continue;
        let y = y0 + lane;
        const stack = one.parts.map((p) => [p.colour, p.shares[i] || 0]);
        stack.push([one.rest.colour, Math.max(1 - stack.reduce((s, [, v]) => s + v, 0), 0)]);
        for (const [colour, share] of stack) {
          const size = Math.min(share, 1) * lane;
          y -= size;
          if (size > 0.2) root.append(svg("rect", { class: `bar s${colour}`, x: xs(i), y, width: xs(i + 1) - xs(i) + 0.4, height: size }));
        }
      }
    });
    for (const value of ticks(start, end, width / 90)) {
      root.append(svg("text", { class: "tick", "text-anchor": "middle", x: time(value), y: area.bottom + 15 }, short(value)));
    }
    root.append(svg("text", { class: "label", "text-anchor": "middle", x: width / 2, y: height - 5 }, xLabel));
    return crosshair(root, area, Array.from({ length: columns }, (_, i) => xs(i + 0.5)), (i) => {
      const rows = [el("b", {}, `${xLabel} ${short(start + ((i + 0.5) / columns) * (end - start))}`)];
      for (const one of given) for (const part of one.parts) {
        const share = part.shares[i];
        rows.push(el("span", {}, el("i", { class: `s${part.colour}` }), `${part.label} ${share === null ? "–" : `${(100 * share).toFixed(0)}%`}`));
      }
      return rows;
    });
  }, "wide");
}
