// A line chart of several series, as SVG: axes, a legend, values under the pointer, and a table.
(() => {
  const WIDTH = 560, HEIGHT = 270, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 38;
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "1 4"];

  TP.seriesColour = (k) => `var(--series-${k % TP.data.palette.series})`;
  TP.seriesDash = (k) => DASHES[k % DASHES.length];

  /** A legend of runs, by colour and dash. */
  TP.seriesLegend = (names) => TP.el("ul", { class: "legend" }, names.map((name, k) => TP.el("li", {},
    TP.el("svg", { viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" },
      TP.el("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-width": 2.5, stroke: TP.seriesColour(k), "stroke-dasharray": TP.seriesDash(k) })),
    name)));

  /** Means over `width` numbers before and after; missing ones are left out. */
  const smooth = (ys, width) => ys.map((_, k) => {
    let sum = 0, count = 0;
    for (let j = Math.max(0, k - width); j <= Math.min(ys.length - 1, k + width); j++) {
      if (ys[j] !== null && ys[j] !== undefined) { sum += ys[j]; count += 1; }
    }
    return count ? sum / count : null;
  });

  /** At most `most` points, each the first of a stretch. */
  const thin = (xs, ys, most) => {
    const step = Math.max(1, Math.ceil(xs.length / most));
    const points = [];
    for (let k = 0; k < xs.length; k += step) points.push([xs[k], ys[k]]);
    if (xs.length && (xs.length - 1) % step) points.push([xs[xs.length - 1], ys[ys.length - 1]]);
    return points;
  };

  const path = (points, x, y) => {
    let text = "", pen = false;
    for (const [a, b] of points) {
      if (a === null || b === null || b === undefined) { pen = false; continue; }
      text += `${pen ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`;
      pen = true;
    }
    return text;
  };

  /**
   * @param series [{name, xs, ys, index}], index: which colour
   * @param options.title, name, xLabel, xText, yText; noisy: draw a mean over the noise; zero: let
   *   the vertical axis begin at 0
   */
  TP.lineChart = (series, { title, name, xLabel, xText = TP.number, yText = TP.number, noisy = false, zero = false }) => {
    const known = series.filter((one) => one.xs.length);
    const ys = known.flatMap((one) => one.ys.filter((v) => v !== null && v !== undefined));
    const xs = known.flatMap((one) => [one.xs[0], one.xs[one.xs.length - 1]]);
    const figure = TP.el("figure", { class: "chart line-chart", id: name }, TP.el("figcaption", {}, TP.el("h3", {}, title)));
    if (!ys.length) { figure.append(TP.el("p", { class: "hint" }, "Nothing yet.")); return figure; }
    let low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
    if (zero) low = Math.min(low, 0);
    if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= zero ? 0 : Math.abs(low) * 0.1 || 1; }
    const room = (high - low) * 0.05;
    high += room; if (!zero || low < 0) low -= room;
    const left = Math.min(0, ...xs), right = Math.max(...xs);
    const x = (v) => LEFT + (WIDTH - LEFT - RIGHT) * (right > left ? (v - left) / (right - left) : 0.5);
    const y = (v) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (v - low) / (high - low);
    const svg = TP.el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${known.map((one) => one.name).join(", ")}; the numbers are in the table below`, class: "lines" });
    const yStep = TP.niceStep(high - low, 5), xStep = TP.niceStep(right - left || 1, 6);
    for (let v = Math.ceil(low / yStep) * yStep; v <= high + yStep * 1e-9; v += yStep) {
      svg.append(TP.el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }),
        TP.el("text", { class: "tick", x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, yText(Number(v.toPrecision(10)))));
    }
    for (let v = Math.ceil(left / xStep) * xStep; v <= right + xStep * 1e-9; v += xStep) {
      svg.append(TP.el("line", { class: "grid", x1: x(v), x2: x(v), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }),
        TP.el("text", { class: "tick", x: x(v), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, xText(Number(v.toPrecision(10)))));
    }
    svg.append(TP.el("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
      TP.el("text", { class: "tick", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xLabel));
    for (const one of known) {
      const width = noisy ? Math.floor(one.xs.length / 60) : 0;
      const mean = width ? smooth(one.ys, width) : one.ys;
      const common = { fill: "none", stroke: TP.seriesColour(one.index), "stroke-linejoin": "round" };
      if (width) svg.append(TP.el("path", { ...common, class: "raw", d: path(thin(one.xs, one.ys, 1200), x, y) }));
      svg.append(TP.el("path", { ...common, class: "mean", "stroke-dasharray": TP.seriesDash(one.index), d: path(thin(one.xs, mean, 1200), x, y) }));
      if (one.xs.length <= 40) {
        one.xs.forEach((v, k) => {
          if (mean[k] !== null && mean[k] !== undefined) svg.append(TP.el("circle", { cx: x(v), cy: y(mean[k]), r: 2.6, fill: TP.seriesColour(one.index) }));
        });
      }
    }
    const rule = TP.el("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, x1: 0, x2: 0, visibility: "hidden" });
    const status = TP.el("p", { class: "values", "aria-hidden": "true" }, " ");
    svg.append(rule);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = left + (right - left) * ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
      if (at < left || at > right) { rule.setAttribute("visibility", "hidden"); return; }
      rule.setAttribute("visibility", "visible");
      rule.setAttribute("x1", x(at)); rule.setAttribute("x2", x(at));
      status.replaceChildren(`${xText(at)}: `, ...known.flatMap((one, n) => {
        let k = 0;
        while (k + 1 < one.xs.length && Math.abs(one.xs[k + 1] - at) <= Math.abs(one.xs[k] - at)) k += 1;
        const text = one.ys[k] === null || one.ys[k] === undefined ? "–" : yText(one.ys[k]);
        return [n ? ", " : "", known.length > 1 ? `${one.name} ${text}` : text];
      }));
    });
    svg.addEventListener("pointerleave", () => { rule.setAttribute("visibility", "hidden"); status.textContent = " "; });
    figure.append(svg, status);
    return figure;
  };
})();
