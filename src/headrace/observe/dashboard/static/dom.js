// Making elements. Text only ever becomes text nodes: what models wrote is never read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: attributes by name, `on` for listeners, children that are nodes or texts. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A titled part of a view; `intro` says what question it answers. */
export function section(title, intro, ...body) {
  return el("section", {}, el("h2", {}, title), intro ? el("p", { class: "intro" }, intro) : null, ...body);
}

/** A table that scrolls sideways in its own box. Columns: [title, "n" for numbers]; cells: nodes or texts. */
export function table(columns, rows, css = "") {
  const head = columns.map(([title, kind]) => el("th", { class: kind, scope: "col" }, title));
  const body = rows.map((cells) =>
    el("tr", {}, cells.map((cell, i) => el("td", { class: columns[i][1] }, cell))));
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" },
    el("table", { class: css }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

/** Names of colours: [label, css class] each. */
export function legend(entries) {
  return el("div", { class: "legend" },
    entries.map(([label, css]) => el("span", { class: "key" }, el("i", { class: css }), label)));
}

/** Horizontal bars with their numbers: [label, value, written, css class] each. */
export function bars(entries) {
  const top = Math.max(...entries.map(([, value]) => value), 1e-9);
  return el("div", { class: "bars" }, entries.map(([label, value, written, css]) => {
    const fillBar = el("i", { class: css || "s0" });
    fillBar.style.width = `${Math.max((100 * value) / top, 0.4)}%`;
    return el("div", { class: "bar-row" },
      el("span", { class: "bar-name" }, label),
      el("span", { class: "bar-track", "aria-hidden": "true" }, fillBar),
      el("span", { class: "bar-value" }, written));
  }));
}

/** One bar split into shares: [label, size, css class] each; sizes of zero are left out. */
export function shares(entries, write) {
  const shown = entries.filter(([, size]) => size > 0);
  const total = shown.reduce((sum, [, size]) => sum + size, 0);
  if (!total) return el("p", { class: "empty" }, "Nothing yet.");
  const words = ([label, size]) => `${label} ${write(size)} (${size / total < 0.005 ? "<1" : ((100 * size) / total).toFixed(0)}%)`;
  const track = el("div", { class: "shares", role: "img", "aria-label": shown.map(words).join(", ") },
    shown.map((entry) => {
      const part = el("i", { class: entry[2], title: words(entry) });
      part.style.flexGrow = entry[1] / total;
      return part;
    }));
  return el("div", {}, track, legend(shown.map((entry) => [words(entry), entry[2]])));
}
