// What everything else stands on: elements, units, colours, the register of sections.
"use strict";
const TP = {};

// Elements ------------------------------------------------------------------------------------

const SVG_TAGS = new Set(["svg", "path", "line", "rect", "text", "g", "title", "circle", "polyline"]);

/** An element. Children are nodes or text; null is left out. */
TP.el = (tag, attributes = {}, ...children) => {
  const svg = SVG_TAGS.has(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
};

/** A number that scripts and tests can read: `path` says where in the JSON it stands. */
TP.figure = (path, number, text) => TP.el("data", { value: String(number), "data-path": path }, text);

/** A table that scrolls sideways by itself. rows: of text, nodes; `words`: columns of words. */
TP.table = (caption, heads, rows, words = 1) =>
  TP.el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    TP.el("table", {},
      TP.el("caption", { class: "hidden" }, caption),
      TP.el("thead", {}, TP.el("tr", {}, heads.map((head, k) =>
        TP.el("th", { scope: "col", class: k < words ? "word" : null }, head)))),
      TP.el("tbody", {}, rows.map((row) => TP.el("tr", {}, row.map((cell, k) =>
        k === 0 ? TP.el("th", { scope: "row", class: "word" }, cell)
          : TP.el("td", { class: k < words ? "word" : null }, cell)))))));

/** The same, folded away beside a picture. `make` is called when it is opened first. */
TP.asTable = (label, make) => {
  const box = TP.el("details", { class: "as-table" }, TP.el("summary", {}, label));
  box.addEventListener("toggle", () => { if (box.open && box.childElementCount === 1) box.append(make()); });
  return box;
};

/** A legend. entries: [label, CSS colour, pattern]. */
TP.legend = (entries) => TP.el("ul", { class: "legend" }, entries.map(([label, colour, pattern]) =>
  TP.el("li", {}, TP.el("span", { class: `swatch ${pattern || "plain"}`, style: { "--fill": colour } }), label)));

/** One figure of several at a glance, with words below it. */
TP.tile = (name, value, note) => TP.el("div", { class: "tile" },
  TP.el("dt", {}, name), TP.el("dd", {}, value, note ? TP.el("span", { class: "note" }, note) : null));

TP.known = (value) => value !== null && value !== undefined;

/** A bar of parts [size, label, colour, pattern, ink], where `most` has the whole width. `text`: of
 *  a size; more: what else lies in it. */
TP.stackedBar = (parts, most, text, more = null) => TP.el("div", { class: "bar", "aria-hidden": "true" },
  parts.filter(([size]) => size > 0).map(([size, label, colour, pattern, ink = `var(--${colour}-ink)`]) => TP.el("span", {
    class: `part ${pattern}`, title: `${label}: ${text(size)}`,
    style: { width: `${100 * size / most}%`, "--fill": `var(--${colour})`, "--on": ink },
  }, size / most > 0.11 ? TP.el("b", {}, text(size)) : null)), more);

/** The same of bytes by kind. */
TP.memoryBar = (kinds, bytes, most, more = null) => TP.stackedBar(
  kinds.map((kind, k) => [bytes[k], TP.data.palette.memory[kind][0], `mem-${kind}`, TP.data.palette.memory[kind][1]]), most, TP.bytes, more);

TP.counted = (number, one, many) => `${TP.number(number)} ${number === 1 ? one : many}`;

// Units ---------------------------------------------------------------------------------------

/** Three digits: 0.0123, 12.3, 1,234. */
TP.number = (value, digits = 3) => {
  if (!Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
};

TP.bytes = (count) => {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" ? `${Math.round(size)} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
};

TP.seconds = (seconds, digits = 3) => {
  if (seconds === 0) return "0 s";
  const size = Math.abs(seconds);
  const [factor, unit] = size < 1e-3 ? [1e6, "µs"] : size < 1 ? [1e3, "ms"] : [1, "s"];
  const scaled = seconds * factor;
  const text = Math.abs(scaled) >= 10 ** digits ? scaled.toFixed(0) : String(Number(scaled.toPrecision(digits)));
  return `${text} ${unit}`;
};

/** Whole percents, rounded as the commands and figures do: halves go to the even one. */
TP.share = (share) => {
  const whole = Math.floor(100 * share), rest = 100 * share - whole;
  return `${whole + (rest > 0.5 || (rest === 0.5 && whole % 2) ? 1 : 0)} %`;
};

TP.percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Steps of 1, 2 or 5 times a power of ten, about `count` of them. */
TP.niceStep = (range, count) => {
  const raw = range / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= raw * 0.999);
};

// Colours -------------------------------------------------------------------------------------

let colours = new Map();
const themed = new Set();

/** The colour of a CSS variable, for canvases. */
TP.colour = (name) => {
  if (!colours.has(name)) {
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return colours.get(name);
};

/** `first` with a share of `second` in it; both "#rrggbb". */
TP.blended = (first, second, share) => {
  const mixed = [1, 3, 5].map((k) => Math.round(
    parseInt(first.slice(k, k + 2), 16) * (1 - share) + parseInt(second.slice(k, k + 2), 16) * share));
  return "#" + mixed.map((channel) => channel.toString(16).padStart(2, "0")).join("");
};

TP.onTheme = (listener) => { themed.add(listener); };

TP.setTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  colours = new Map();
  for (const listener of themed) listener();
};

TP.themeToggle = () => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const button = TP.el("button", { type: "button", class: "theme" });
  const show = () => {
    const theme = chosen || (dark.matches ? "dark" : "light");
    TP.setTheme(theme);
    const other = theme === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Show the page in ${other} colours`);
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    show();
  });
  dark.addEventListener("change", show);
  show();
  return button;
};

// Canvases have no print colours of their own: paper is light.
let before = null;
addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; TP.setTheme("light"); });
addEventListener("afterprint", () => { if (before) TP.setTheme(before); });

// Sections ------------------------------------------------------------------------------------

TP.sections = [];

/** Register a section; see page.py. */
TP.section = (section) => { TP.sections.push(section); };
