// Charts of several series, as SVG: lines with the spread of their seeds, points, a goal, and the
// values under the pointer. Their numbers stand in a table below.
(() => {
  const WIDTH = 560, HEIGHT = 300, LEFT = 62, RIGHT = 12, TOP = 12, BOTTOM = 40;
  const MOST_POINTS = 1200;
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "1 4"];
  const { known } = TP;

  TP.seriesColour = (k) => `var(--series-${k % TP.data.palette.series})`;
  // Where colours begin again, they come with other dashes.
  TP.seriesDash = (k) => DASHES[(k + Math.floor(k / TP.data.palette.series)) % DASHES.length];
  TP.seriesSwatch = (k) => TP.el("svg", { viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" },
    TP.el("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-width": 2.5, stroke: TP.seriesColour(k), "stroke-dasharray": TP.seriesDash(k) }));

  /** A legend of series, by colour and dash. */
  TP.seriesLegend = (names) => TP.el("ul", { class: "legend" }, names.map((name, k) => TP.el("li", {}, TP.seriesSwatch(k), name)));

  // Axes ----------------------------------------------------------------------------------------

  const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

  /** From the least to the most, with a share of that as room at both ends. */
  const range = (values, room, log) => {
    let [low, high] = extent(log ? values.map(Math.log10) : values);
    if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= Math.abs(low) * 0.1 || 1; }
    const found = [low - room * (high - low), high + room * (high - low)];
    // Of a loss that blows up, what room takes may be more than a number can be.
    return log ? found.map((v) => 10 ** Math.min(308, Math.max(-307, v))) : found;
  };

  /** About so many round numbers from `low` to `high`. */
  const ticks = (low, high, count) => {
    const step = TP.niceStep(high - low || 1, count), found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Number(v.toPrecision(10)));
    return found;
  };

  const logTicks = (low, high) => {
    for (const digits of [[1], [1, 3], [1, 2, 5]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
        for (const digit of digits) {
          const v = Number((digit * 10 ** power).toPrecision(6));
          if (v >= low * 0.999 && v <= high * 1.001) found.push(v);
        }
      }
      if (found.length > 12) return found.filter((_, k) => k % Math.ceil(found.length / 8) === 0);
      if (found.length > 2) return found;
    }
    return ticks(low, high, 5);
  };

  /** From numbers to places, and the ticks. */
  const scale = (low, high, from, to, count, log) => {
    const f = log ? Math.log10 : (v) => v;
    return {
      place: (v) => high > low ? from + (to - from) * (f(v) - f(low)) / (f(high) - f(low)) : (from + to) / 2,
      ticks: log ? logTicks(low, high) : ticks(low, high, count),
    };
  };

  // Lines ---------------------------------------------------------------------------------------

  /** Means over `width` points before and after; missing ones are left out. */
  const smooth = (points, width) => {
    if (!width) return points;
    const sums = [0], counts = [0];
    points.forEach(([, y], k) => {
      sums.push(sums[k] + (known(y) ? y : 0));
      counts.push(counts[k] + known(y));
    });
    return points.map(([x], k) => {
      const begin = Math.max(0, k - width), end = Math.min(points.length, k + width + 1);
      const count = counts[end] - counts[begin];
      return [x, count ? (sums[end] - sums[begin]) / count : null];
    });
  };

  /** At most so many points, each the first of a stretch, and the last one. */
  const thin = (points) => {
    const step = Math.max(1, Math.ceil(points.length / MOST_POINTS));
    return points.filter((_, k) => k % step === 0 || k === points.length - 1);
  };

  /** A path through points by `at`; where one has no value, it begins anew. */
  const path = (points, at) => {
    let text = "", pen = false;
    for (const p of points) {
      if (known(p[1])) text += `${pen ? "L" : "M"}${at(p, 1)}`;
      pen = known(p[1]);
    }
    return text;
  };

  /**
   * A chart.
   * @param options.series [{name, index, points: [[x, y, low, high]], lines, dots, crosses}]; index:
   *   which colour
   * @param options.goal a level, with its text; x, y: texts of ticks; xLabel; logX; logY: a
   *   logarithmic vertical axis where all is positive; x0, y0: let an axis begin at 0; noisy: draw
   *   a mean over the noise; named: names beside the points; front: points to be joined; cap: what
   *   is higher goes out at the top; alone: not one of several
   */
  TP.chart = ({ title, name, series, xLabel, x: xText = TP.number, y: yText = TP.number, goal = null, logX = false, logY = false, x0 = false, y0 = false, noisy = false, named = false, front = null, cap = null, alone = false }) => {
    const all = series.flatMap((one) => one.points);
    let ys = all.map((p) => p[1]).filter(known);
    // What blows up leaves the others to be seen.
    const most = known(cap) ? Math.max(cap, extent(ys)[0]) : Infinity;
    ys = ys.map((v) => Math.min(v, most));
    if (goal) ys.push(goal.level);
    const log = logY && ys.every((v) => v > 0);
    const figure = TP.el("figure", { class: `chart line-chart${alone ? " alone" : ""}`, id: name }, TP.el("figcaption", {},
      TP.el("h3", {}, log && ys.length ? `${title} (logarithmic)` : title)));
    if (!ys.length && !series.some((one) => one.crosses && one.crosses.length)) {
      figure.append(TP.el("p", { class: "hint" }, "Nothing to draw."));
      return figure;
    }
    const xs = all.flatMap((p) => [p[0], ...(p.wide || [])]);
    let [low, high] = range(ys.length ? ys : [0, 1], 0.06, log);
    if (y0) low = Math.min(0, ...extent(ys));
    let [left, right] = range(xs, logX ? 0.05 : all.some((p) => p.tall) ? 0.04 : 0, logX);
    if (x0) [left, right] = [Math.min(0, extent(xs)[0]), extent(xs)[1] * (named ? 1.06 : 1)];
    const X = scale(left, right, LEFT, WIDTH - RIGHT, 6, logX);
    const Y = scale(low, high, HEIGHT - BOTTOM, TOP, 5, log);
    // What blows up would have numbers that the axis has no room for.
    const yTick = (v) => yText(v).length > 9 ? v.toExponential() : yText(v);
    const inside = (v) => Math.min(Math.max(v, TOP), HEIGHT - BOTTOM);
    const svg = TP.el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "lines",
      "aria-label": `${title}: ${series.map((one) => one.name).join(", ")}; the numbers are in the table below` });
    for (const v of Y.ticks) svg.append(
      TP.el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: Y.place(v), y2: Y.place(v) }),
      TP.el("text", { class: "tick", x: LEFT - 6, y: Y.place(v) + 4, "text-anchor": "end" }, yTick(v)));
    for (const v of X.ticks) svg.append(
      TP.el("line", { class: "grid", x1: X.place(v), x2: X.place(v), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }),
      TP.el("text", { class: "tick", x: X.place(v), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, xText(v)));
    svg.append(TP.el("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
      TP.el("text", { class: "tick", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xLabel));
    if (goal) svg.append(
      TP.el("line", { class: "goal", x1: LEFT, x2: WIDTH - RIGHT, y1: Y.place(goal.level), y2: Y.place(goal.level) }),
      TP.el("text", { class: "goal-text", x: WIDTH - RIGHT - 2, y: Y.place(goal.level) - 5, "text-anchor": "end" }, "target"));
    if (front && front.length > 1) svg.append(TP.el("path", { class: "front",
      d: front.map(([a, b], k) => `${k ? "L" : "M"}${X.place(a).toFixed(1)} ${Y.place(b).toFixed(1)}`).join("") }));
    const tall = series.filter((one) => one.points.some((p) => p.tall));
    for (const one of series) {
      const colour = TP.seriesColour(one.index);
      const at = (p, k) => `${X.place(p[0]).toFixed(1)} ${inside(Y.place(p[k])).toFixed(1)}`;
      if (one.lines) {
        const band = one.points.filter((p) => known(p[2]) && known(p[3]));
        if (band.length > 1) svg.append(TP.el("path", { fill: colour, opacity: 0.13,
          d: `M${band.map((p) => at(p, 3)).join("L")}L${[...band].reverse().map((p) => at(p, 2)).join("L")}Z` }));
        const width = noisy ? Math.floor(one.points.length / 60) : 0;
        const common = { fill: "none", stroke: colour, "stroke-linejoin": "round" };
        if (width) svg.append(TP.el("path", { ...common, class: "raw", d: path(thin(one.points), at) }));
        svg.append(TP.el("path", { ...common, class: "mean", "stroke-dasharray": TP.seriesDash(one.index), d: path(thin(smooth(one.points, width)), at) }));
      }
      if (one.dots) for (const p of one.points.filter((each) => known(each[1]))) {
        if (p.wide) svg.append(TP.el("line", { x1: X.place(p.wide[0]), x2: X.place(p.wide[1]), y1: Y.place(p[1]), y2: Y.place(p[1]), stroke: colour, "stroke-width": 1.6 }));
        if (p.tall) {
          // Side by side, so that none hides another.
          const a = X.place(p[0]) + 5 * (tall.indexOf(one) - (tall.length - 1) / 2);
          svg.append(TP.el("line", { x1: a, x2: a, y1: inside(Y.place(p.tall[0])), y2: inside(Y.place(p.tall[1])), stroke: colour, "stroke-width": 1.6, opacity: 0.55 }));
        }
        svg.append(TP.el("circle", { cx: X.place(p[0]), cy: Y.place(p[1]), r: p.chosen ? 5 : 3.2, fill: p.hollow ? "var(--paper)" : colour, stroke: colour, "stroke-width": 1.8 },
          TP.el("title", {}, p.text || `${one.name}: ${yText(p[1])}`)));
      }
      for (const p of one.crosses || []) {
        const [a, b] = [X.place(p[0]), TOP + 7 + 9 * p[1]];
        svg.append(TP.el("path", { d: `M${a - 4} ${b - 4}L${a + 4} ${b + 4}M${a - 4} ${b + 4}L${a + 4} ${b - 4}`, stroke: colour, "stroke-width": 2 },
          TP.el("title", {}, p.text)));
      }
    }
    if (named) label(svg, series, X, Y);
    figure.append(svg);
    if (series.some((one) => one.lines)) follow(figure, svg, series, X, left, right, logX, xText, yText);
    return figure;
  };

  /** Names beside points, each where it covers no other. */
  const label = (svg, series, X, Y) => {
    const taken = [];
    for (const one of series) for (const p of one.points) {
      const width = 6.3 * one.name.length, a = X.place(p[0]);
      const end = a + 9 + width > WIDTH - RIGHT;
      const from = end ? a - 9 - width : a + 9;
      let b = Y.place(p[1]) + 4;
      // Above the bar of its interval, where it has one.
      for (const step of [...(p.wide ? [-9] : [0]), -12, 12, -24, 24, -36, 36, -48, 48]) {
        const y = Y.place(p[1]) + 4 + step;
        if (y > TOP + 6 && y < HEIGHT - BOTTOM && !taken.some((t) => Math.abs(t.y - y) < 11.5 && from < t.to && from + width > t.from)) { b = y; break; }
      }
      taken.push({ from, to: from + width, y: b });
      svg.append(TP.el("text", { class: "name", x: end ? a - 9 : a + 9, y: b, "text-anchor": end ? "end" : "start" }, one.name));
    }
  };

  /** A rule under the pointer, and the values there. */
  const follow = (figure, svg, series, X, left, right, logX, xText, yText) => {
    const rule = TP.el("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, x1: 0, x2: 0, visibility: "hidden" });
    const status = TP.el("p", { class: "values", "aria-hidden": "true" }, " ");
    svg.append(rule);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
      if (share < 0 || share > 1) { rule.setAttribute("visibility", "hidden"); return; }
      const at = logX ? left * (right / left) ** share : left + (right - left) * share;
      rule.setAttribute("visibility", "visible");
      rule.setAttribute("x1", X.place(at)); rule.setAttribute("x2", X.place(at));
      const texts = series.flatMap((one) => {
        const points = one.points.filter((p) => known(p[1]));
        if (!points.length || at > points[points.length - 1][0] * 1.02) return [];
        const near = points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
        return [series.length > 1 ? `${one.name} ${yText(near[1])}` : yText(near[1])];
      });
      status.textContent = `${xText(at)}: ${texts.join(", ")}`;
    });
    svg.addEventListener("pointerleave", () => { rule.setAttribute("visibility", "hidden"); status.textContent = " "; });
    figure.append(status);
  };
})();
