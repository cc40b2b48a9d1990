// The page of a study. Its charts are SVG: curves with the spread of their seeds, and points.
(() => {
  const WIDTH = 560, HEIGHT = 300, LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 40;
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "1 4"];
  const colour = (k) => `var(--series-${k % TP.data.palette.series})`;
  // Colours come again after the sixth, with other dashes.
  const dash = (k) => DASHES[(k + Math.floor(k / TP.data.palette.series)) % DASHES.length];
  const known = (value) => value !== null && value !== undefined;
  const swatch = (k) => TP.el("svg", { viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" },
    TP.el("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-width": 2.5, stroke: colour(k), "stroke-dasharray": dash(k) }));

  /** A scale from numbers to places, and its ticks; logarithmic where asked. */
  const scale = (low, high, from, to, { log = false, count = 5 } = {}) => {
    const f = log ? Math.log10 : (v) => v;
    const place = (v) => high > low ? from + (to - from) * (f(v) - f(low)) / (f(high) - f(low)) : (from + to) / 2;
    const ticks = [];
    if (log) {
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
        for (const m of high / low > 300 ? [1] : [1, 2, 5]) {
          const v = Number((m * 10 ** e).toPrecision(6));
          if (v >= low * 0.999 && v <= high * 1.001) ticks.push(v);
        }
      }
    } else {
      const step = TP.niceStep(high - low || 1, count);
      for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(Number(v.toPrecision(10)));
    }
    return { place, ticks };
  };

  const range = (values, room) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= Math.abs(low) * 0.1 || 1; }
    return [low - room * (high - low), high + room * (high - low)];
  };

  /**
   * A chart.
   * @param options.series [{name, index, points: [[x, y, low, high]], lines, dots, crosses}]
   * @param options.goal a level, with its text; x, y: texts of ticks; xLabel, yLabel; logX
   */
  const chart = ({ title, name, series, xLabel, x: xText = TP.number, y: yText = TP.number, goal = null, logX = false, zero = false, named = false, front = null, cap = null, alone = false }) => {
    const figure = TP.el("figure", { class: `chart line-chart${alone ? " alone" : ""}`, id: name }, TP.el("figcaption", {}, TP.el("h3", {}, title)));
    const all = series.flatMap((one) => one.points);
    if (!all.length) { figure.append(TP.el("p", { class: "hint" }, "Nothing to draw.")); return figure; }
    const ys = all.flatMap((p) => p.slice(1, 2)).filter(known);
    // What blows up goes out at the top, and leaves the others to be seen.
    const most = known(cap) ? Math.max(cap, Math.min(...ys)) : Infinity;
    ys.forEach((v, k) => { ys[k] = Math.min(v, most); });
    if (goal) ys.push(goal.level);
    const xs = all.flatMap((p) => [p[0], ...(p.wide || [])]);
    let [low, high] = range(ys.length ? ys : [0, 1], 0.06);
    const beside = all.some((p) => p.tall) ? 0.04 : 0;
    let [left, right] = logX ? [Math.min(...xs) / 1.15, Math.max(...xs) * 1.15] : zero ? [0, Math.max(...xs) * 1.06] : range(xs, beside);
    if (zero) low = 0;
    const X = scale(left, right, LEFT, WIDTH - RIGHT, { log: logX, count: 5 });
    const Y = scale(low, high, HEIGHT - BOTTOM, TOP, { count: 5 });
    const inside = (v) => Math.min(Math.max(v, TOP), HEIGHT - BOTTOM);
    const svg = TP.el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "lines",
      "aria-label": `${title}: ${series.map((one) => one.name).join(", ")}; the numbers are in the table below` });
    for (const v of Y.ticks) svg.append(
      TP.el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: Y.place(v), y2: Y.place(v) }),
      TP.el("text", { class: "tick", x: LEFT - 6, y: Y.place(v) + 4, "text-anchor": "end" }, yText(v)));
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
      const points = one.points.filter((p) => known(p[1]));
      const at = (p, k) => `${X.place(p[0]).toFixed(1)} ${inside(Y.place(p[k])).toFixed(1)}`;
      const band = points.filter((p) => known(p[2]) && known(p[3]));
      if (one.lines && band.length > 1) svg.append(TP.el("path", { fill: colour(one.index), opacity: 0.13,
        d: `M${band.map((p) => at(p, 3)).join("L")}L${[...band].reverse().map((p) => at(p, 2)).join("L")}Z` }));
      if (one.lines && points.length > 1) svg.append(TP.el("path", { class: "mean", fill: "none", stroke: colour(one.index), "stroke-linejoin": "round",
        "stroke-dasharray": dash(one.index), d: `M${points.map((p) => at(p, 1)).join("L")}` }));
      if (one.dots) for (const p of points) {
        if (p.wide) svg.append(TP.el("line", { x1: X.place(p.wide[0]), x2: X.place(p.wide[1]), y1: Y.place(p[1]), y2: Y.place(p[1]), stroke: colour(one.index), "stroke-width": 1.6 }));
        if (p.tall) {
          // Side by side, so that none hides another.
          const a = X.place(p[0]) + 5 * (tall.indexOf(one) - (tall.length - 1) / 2);
          svg.append(TP.el("line", { x1: a, x2: a, y1: inside(Y.place(p.tall[0])), y2: inside(Y.place(p.tall[1])), stroke: colour(one.index), "stroke-width": 1.6, opacity: 0.55 }));
        }
        svg.append(TP.el("circle", { cx: X.place(p[0]), cy: Y.place(p[1]), r: p.chosen ? 5 : 3.2, fill: p.hollow ? "var(--paper)" : colour(one.index), stroke: colour(one.index), "stroke-width": 1.8 },
          TP.el("title", {}, p.text || `${one.name}: ${yText(p[1])}`)));
      }
      for (const p of one.crosses || []) {
        const [a, b] = [X.place(p[0]), TOP + 7 + 9 * p[1]];
        svg.append(TP.el("path", { d: `M${a - 4} ${b - 4}L${a + 4} ${b + 4}M${a - 4} ${b + 4}L${a + 4} ${b - 4}`, stroke: colour(one.index), "stroke-width": 2 },
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
        return [`${one.name} ${yText(near[1])}`];
      });
      status.textContent = `${xText(at)}: ${texts.join(", ")}`;
    });
    svg.addEventListener("pointerleave", () => { rule.setAttribute("visibility", "hidden"); status.textContent = " "; });
    figure.append(status);
  };

  // Sections ------------------------------------------------------------------------------------

  const study = () => TP.data.study;
  const tile = (name, value, note) => TP.el("div", { class: "tile" }, TP.el("dt", {}, name),
    TP.el("dd", {}, value, note ? TP.el("span", { class: "note" }, note) : null));
  const between = (spread, text) => spread && known(spread.low) && spread.low !== spread.high ? `${text(spread.low)} to ${text(spread.high)}` : "";
  const ratio = (v) => `${v.toFixed(2)} ×`;
  const accuracy = (share) => `${(100 * share).toFixed(1)} %`;
  const textOf = (metric) => metric === "accuracy" ? accuracy : TP.number;
  const long = (seconds) => seconds >= 7200 ? `${TP.number(seconds / 3600)} h` : seconds >= 300 ? `${TP.number(seconds / 60)} min` : TP.seconds(seconds);
  const armOf = (plan) => study().arms.find((arm) => arm.name === plan.arm);
  const overhead = (arm) => arm.overhead ? (arm.name === "plain" ? "1" : arm.overhead.mean.toFixed(2)) : known(arm.at_least) ? `> ${arm.at_least.toFixed(2)}` : arm.diverged === study().question.seeds ? "diverged" : "–";
  const rate = (arm) => `${TP.number(arm.rate)}${arm.warmup ? ` after ${arm.warmup}` : ""}${arm.at_edge ? " (edge)" : ""}`;

  /** Buttons that show and hide series, above charts that `draw(shown)` makes. */
  const toggled = (host, entries, draw) => {
    const hidden = new Set(), box = TP.el("div", {});
    const show = () => box.replaceChildren(draw((name) => !hidden.has(name)));
    host.append(TP.el("div", { class: "toggles", role: "group", "aria-label": "Shown" }, entries.map(([name, index]) => {
      const button = TP.el("button", { type: "button", "aria-pressed": "true" }, swatch(index), name);
      button.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.setAttribute("aria-pressed", String(!hidden.has(name)));
        show();
      });
      return button;
    })), box);
    show();
  };

  TP.section({
    name: "answer", title: "Which system", short: "Answer", order: 0,
    build(host) {
      const { plans, recommendation, target, question } = study();
      const best = plans.find((plan) => plan.plan === recommendation.plan);
      host.append(TP.el("p", { class: "verdict" }, best ? [TP.el("strong", {}, best.name), ": "] : null, recommendation.why, "."));
      host.append(TP.el("dl", { class: "tiles" },
        tile("target", !known(target.level) ? "–" : target.metric === "accuracy" ? accuracy(target.level) : TP.number(target.level, 4), known(question.target) ? `${target.metric}, as asked` : `${target.metric}, of plain training after ${TP.number(question.steps)} mini-batches`),
        best && best.time_s ? tile("predicted time", TP.figure("time_s", best.time_s.mean, long(best.time_s.mean)), between(best.time_s, long)) : null,
        best ? tile("overhead in samples", overhead(armOf(best)), between(armOf(best).overhead, (v) => v.toFixed(2)) || "over plain training") : null,
        best ? tile("memory", TP.bytes(best.memory_bytes), "of the fullest device") : null,
        tile("seeds", String(question.seeds), `${TP.counted(question.tune, "training", "trainings")} to tune each`)));
      const table = TP.table("Plans by their predicted time to the target",
        ["system", "time", "95 %", "overhead", "95 %", "period", "memory", "differences", "S", "N", "rate", "on the front"],
        plans.map((plan) => {
          const arm = armOf(plan);
          return [TP.el("span", {}, swatch(plan.index), " ", plan.name), plan.time_s ? long(plan.time_s.mean) : known(plan.at_least_s) ? `> ${long(plan.at_least_s)}` : "–",
            between(plan.time_s, long), overhead(arm), between(arm.overhead, (v) => v.toFixed(2)), TP.seconds(plan.period_s), TP.bytes(plan.memory_bytes),
            plan.version_differences.join(" "), plan.stages, plan.micro_batches, rate(arm),
            plan.plan === recommendation.plan ? "recommended" : recommendation.equal.includes(plan.plan) ? "equal to it" : plan.on_front ? "yes" : ""];
        }));
      table.style.setProperty("margin-top", "1rem");
      host.append(table);
      const flush = plans.filter((plan) => plan.plain_training).map((plan) => plan.name);
      if (flush.length) host.append(TP.el("p", { class: "hint" }, `Pipelines that flush are plain training, trained once for all: ${flush.join(", ")}.`));
      host.append(TP.el("p", { class: "hint" }, `Times are overhead × samples of plain training × period ÷ mini-batch, predicted for ${[...new Set(plans.map((plan) => plan.cluster))].join("; ")}. Intervals: Student's t of the logarithms, paired by seed.`));
    },
  });

  const curves = (shown, entries, x, xLabel, xText) => {
    const { figures, target } = study();
    const grid = TP.el("div", { class: "chart-grid" });
    for (const [metric, title] of figures) {
      const series = entries.filter((entry) => shown(entry.name)).map((entry) => ({
        name: entry.name, index: entry.index, lines: true,
        points: entry.arm.curves[metric].map(([a, ...rest]) => [x(entry, a), ...rest]),
      })).filter((one) => one.points.length);
      if (!series.length) continue;
      grid.append(chart({ title, name: `${xLabel.split(" ")[0]}-${metric.replace(" ", "-")}`, series, xLabel, x: xText, y: textOf(metric),
        goal: metric === target.metric && known(target.level) ? target : null,
        cap: metric === "accuracy" ? null : 1.25 * series[0].points[0][1] }));
    }
    return grid;
  };

  TP.section({
    name: "samples", title: "Over samples", short: "Samples", order: 1,
    build(host) {
      const { arms, question } = study();
      host.append(TP.el("p", { class: "lead" }, "How much training each system needs, whatever it takes on the clock: the mean over seeds, with the least and the most."));
      const entries = arms.map((arm) => ({ name: arm.name, index: arm.index, arm }));
      toggled(host, entries.map((entry) => [entry.name, entry.index]), (shown) =>
        curves(shown, entries, (_, samples) => samples, "samples", (v) => v >= 1e6 ? `${TP.number(v / 1e6)} M` : v >= 1e4 ? `${TP.number(v / 1e3)} k` : TP.number(v)));
      host.append(TP.asTable("Samples to the target, as a table", () => TP.table("Samples to the target by seed",
        ["trained", ...Array.from({ length: question.seeds }, (_, seed) => `seed ${seed}`), "overhead", "95 %", "rate", "diverged"],
        arms.map((arm) => [arm.name, ...arm.samples.map((v) => known(v) ? TP.number(Math.round(v)) : "not reached"), overhead(arm), between(arm.overhead, (v) => v.toFixed(2)), rate(arm), arm.diverged ? `${arm.diverged} of ${question.seeds}` : ""]))));
    },
  });

  TP.section({
    name: "seconds", title: "Over predicted seconds", short: "Seconds", order: 2,
    build(host) {
      const { plans, question } = study();
      host.append(TP.el("p", { class: "lead" }, "The same curves on the plans' clusters: every mini-batch takes the plan's period."));
      const entries = plans.map((plan) => ({ name: plan.name, index: plan.index, plan, arm: armOf(plan) }));
      const most = Math.max(...entries.map((e) => e.plan.period_s * question.length));
      toggled(host, entries.map((entry) => [entry.name, entry.index]), (shown) =>
        curves(shown, entries, (entry, samples) => samples * entry.plan.period_s / question.mini_batch, "seconds, predicted",
          (v) => most >= 7200 ? `${TP.number(v / 3600)} h` : TP.number(v)));
    },
  });

  TP.section({
    name: "front", title: "Time to target and memory", short: "Front", order: 3,
    build(host) {
      const { plans } = study();
      const there = plans.filter((plan) => plan.time_s);
      host.append(TP.el("p", { class: "lead" }, "Filled: no other plan is as good in both. The bars are the 95 % interval of the time."));
      const series = there.map((plan) => {
        const point = [plan.time_s.mean, plan.memory_bytes / 2 ** 20];
        if (known(plan.time_s.low) && plan.time_s.low !== plan.time_s.high) point.wide = [plan.time_s.low, plan.time_s.high];
        point.hollow = !plan.on_front;
        point.chosen = plan.plan === study().recommendation.plan;
        point.text = `${plan.name}: ${long(plan.time_s.mean)}, ${TP.bytes(plan.memory_bytes)}`;
        return { name: plan.name, index: plan.index, dots: true, points: [point] };
      });
      const front = there.filter((plan) => plan.on_front).map((plan) => [plan.time_s.mean, plan.memory_bytes / 2 ** 20]).sort((a, b) => a[0] - b[0]);
      host.append(chart({ title: "Memory of the fullest device, MiB", name: "pareto", alone: true, series, xLabel: "seconds to the target, predicted", named: true, zero: true, front }));
      const gone = plans.filter((plan) => !plan.time_s).map((plan) => plan.name);
      if (gone.length) host.append(TP.el("p", { class: "hint" }, `Not drawn, since not all seeds reach the target: ${gone.join(", ")}.`));
    },
  });

  TP.section({
    name: "length", title: "Overhead by length", short: "Length", order: 4,
    when: () => study().arms.length > 1,
    build(host) {
      const arms = study().arms.filter((arm) => arm.name !== "plain");
      host.append(TP.el("p", { class: "lead" }, "Samples over plain training's, at the level that plain training has after so many mini-batches."));
      toggled(host, arms.map((arm) => [arm.name, arm.index]), (shown) => chart({
        title: "Overhead", name: "overhead", alone: true, xLabel: "mini-batches of plain training", y: (v) => v.toFixed(2),
        series: [{ name: "plain", index: 0, lines: true, points: arms[0].by_level.map((at) => [at.mini_batches, 1]) },
          ...arms.filter((arm) => shown(arm.name)).map((arm) => ({ name: arm.name, index: arm.index, lines: true, dots: true,
            points: arm.by_level.filter((at) => at.overhead).map((at) => {
              const point = [at.mini_batches, at.overhead.mean];
              if (known(at.overhead.low) && at.overhead.low !== at.overhead.high) point.tall = [at.overhead.low, at.overhead.high];
              return point;
            }) }))] }));
      host.append(TP.asTable("Overheads, as a table", () => TP.table("Overheads by length", ["trained", ...arms[0].by_level.map((at) => `after ${at.mini_batches}`)],
        arms.map((arm) => [arm.name, ...arm.by_level.map((at) => at.overhead ? `${at.overhead.mean.toFixed(2)}${between(at.overhead, (v) => v.toFixed(2)) ? ` (${between(at.overhead, (v) => v.toFixed(2))})` : ""}` : "–")]))));
    },
  });

  TP.section({
    name: "rates", title: "Which rates are stable", short: "Rates", order: 5,
    build(host) {
      const { arms, target, question } = study();
      host.append(TP.el("p", { class: "lead" }, `The ${target.metric} at the end by ${question.rate_of === "learning rate" ? "learning rate" : "rate, as a multiple of the task's own"}. Large: the one chosen, by samples to the target. A cross at the top: it diverged.`));
      toggled(host, arms.map((arm) => [arm.name, arm.index]), (shown) => chart({
        title: "At the end, seed 0", name: "stability", alone: true, xLabel: question.rate_of, logX: true, y: textOf(target.metric),
        series: arms.filter((arm) => shown(arm.name)).map((arm, k) => ({
          name: arm.name, index: arm.index, lines: true, dots: true,
          points: arm.rates.filter((one) => one.warmup === arm.warmup).map((one) => {
            const point = [one.rate, one.diverged_at ? null : one.end];
            point.chosen = one.chosen;
            point.text = `${arm.name} at ${one.rate}: ${known(one.end) ? textOf(target.metric)(one.end) : "diverged"}`;
            return point;
          }),
          crosses: arm.rates.filter((one) => one.diverged_at).map((one) => Object.assign([one.rate, k % 8], { text: `${arm.name} at ${one.rate}: diverged after ${one.diverged_at} mini-batches` })),
        })) }));
      host.append(TP.asTable("Trials, as a table", () => TP.table("Trials of rates", ["trained", "rate", "warm-up", `${target.metric} at the end`, "diverged after", ""],
        arms.flatMap((arm) => arm.rates.map((one) => [arm.name, TP.number(one.rate), one.warmup, known(one.end) ? textOf(target.metric)(one.end) : "–", known(one.diverged_at) ? TP.number(one.diverged_at) : "", one.chosen ? "chosen" : ""])))));
    },
  });
})();
