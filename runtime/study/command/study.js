// The page of a study.
(() => {
  const { known, tile } = TP;
  const study = () => TP.data.study;
  const between = (spread, text) => spread && known(spread.low) && spread.low !== spread.high ? `${text(spread.low)} to ${text(spread.high)}` : "";
  const ratio = (v) => `${v.toFixed(2)} ×`;
  const accuracy = (share) => `${(100 * share).toFixed(1)} %`;
  const textOf = (metric) => metric === "accuracy" ? accuracy : TP.number;
  const long = (seconds) => seconds >= 7200 ? `${TP.number(seconds / 3600)} h` : seconds >= 300 ? `${TP.number(seconds / 60)} min` : TP.seconds(seconds);
  const armOf = (plan) => study().arms.find((arm) => arm.name === plan.arm);
  const overhead = (arm) => arm.overhead ? (arm.name === "plain" ? "1" : arm.overhead.mean.toFixed(2)) : known(arm.at_least) ? `> ${arm.at_least.toFixed(2)}` : arm.diverged === arm.samples.length ? "diverged" : "–";
  const rate = (arm) => `${TP.number(arm.rate)}${arm.warmup ? ` after ${arm.warmup}` : ""}${arm.at_edge ? " (edge)" : ""}`;

  /** Buttons that show and hide series, above charts that `draw(shown)` makes. */
  const toggled = (host, entries, draw) => {
    const hidden = new Set(), box = TP.el("div", {});
    const show = () => box.replaceChildren(draw((name) => !hidden.has(name)));
    host.append(TP.el("div", { class: "toggles", role: "group", "aria-label": "Shown" }, entries.map(([name, index]) => {
      const button = TP.el("button", { type: "button", "aria-pressed": "true" }, TP.seriesSwatch(index), name);
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
        ["system", "time", "95 %", "overhead", "95 %", "period", "memory", "delays", "S", "N", "rate", "on the front"],
        plans.map((plan) => {
          const arm = armOf(plan);
          return [TP.el("span", {}, TP.seriesSwatch(plan.index), " ", plan.name), plan.time_s ? long(plan.time_s.mean) : known(plan.at_least_s) ? `> ${long(plan.at_least_s)}` : "–",
            between(plan.time_s, long), overhead(arm), between(arm.overhead, (v) => v.toFixed(2)), TP.seconds(plan.period_s), TP.bytes(plan.memory_bytes),
            (plan.delays || plan.version_differences).join(" "), plan.stages, plan.micro_batches, rate(arm),
            plan.plan === recommendation.plan ? "recommended" : recommendation.equal.includes(plan.plan) ? "equal to it" : plan.on_front ? "yes" : ""];
        }));
      table.style.setProperty("margin-top", "1rem");
      host.append(table);
      const { dropped } = study();
      if (dropped.length) host.append(TP.asTable("Dropped, as a table", () => TP.table("What is expected of a whole training of plans that were dropped, by shorter ones",
        ["system", "time", "95 %", "overhead", "95 %", "period", "rate", "mini-batches", "why"],
        dropped.map((one) => [one.plan, one.time_s ? long(one.time_s.mean) : "–", between(one.time_s, long), one.overhead ? one.overhead.mean.toFixed(2) : "–",
          between(one.overhead, (v) => v.toFixed(2)), TP.seconds(one.period_s), TP.number(one.rate), one.after,
          !one.overhead ? "diverged" : one.overlap ? "the budget was over" : "slower"]))));
      const flush = plans.filter((plan) => plan.plain_training).map((plan) => plan.name);
      if (flush.length) host.append(TP.el("p", { class: "hint" }, `Pipelines that flush or have no delay are plain training, trained once for all: ${flush.join(", ")}.`));
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
      grid.append(TP.chart({ title, name: `${xLabel.split(" ")[0]}-${metric.replace(" ", "-")}`, series, xLabel, x: xText, y: textOf(metric),
        goal: metric === target.metric && known(target.level) ? target : null,
        cap: metric === "accuracy" ? null : 1.25 * series[0].points[0][1] }));
    }
    return grid;
  };

  TP.section({
    name: "samples", title: "Over samples", short: "Samples", order: 1,
    build(host) {
      const { arms } = study(), seeds = Math.max(...arms.map((arm) => arm.samples.length));
      host.append(TP.el("p", { class: "lead" }, "How much training each system needs, whatever it takes on the clock: the mean over seeds, with the least and the most."));
      const entries = arms.map((arm) => ({ name: arm.name, index: arm.index, arm }));
      toggled(host, entries.map((entry) => [entry.name, entry.index]), (shown) =>
        curves(shown, entries, (_, samples) => samples, "samples", (v) => v >= 1e6 ? `${TP.number(v / 1e6)} M` : v >= 1e4 ? `${TP.number(v / 1e3)} k` : TP.number(v)));
      host.append(TP.asTable("Samples to the target, as a table", () => TP.table("Samples to the target by seed",
        ["trained", ...Array.from({ length: seeds }, (_, seed) => `seed ${seed}`), "overhead", "95 %", "rate", "diverged"],
        arms.map((arm) => [arm.name, ...Array.from({ length: seeds }, (_, k) => k >= arm.samples.length ? "" : known(arm.samples[k]) ? TP.number(Math.round(arm.samples[k])) : "not reached"), overhead(arm), between(arm.overhead, (v) => v.toFixed(2)), rate(arm), arm.diverged ? `${arm.diverged} of ${arm.samples.length}` : ""]))));
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
      host.append(TP.chart({ title: "Memory of the fullest device, MiB", name: "pareto", alone: true, series, xLabel: "seconds to the target, predicted", named: true, x0: true, y0: true, front }));
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
      toggled(host, arms.map((arm) => [arm.name, arm.index]), (shown) => TP.chart({
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
      toggled(host, arms.map((arm) => [arm.name, arm.index]), (shown) => TP.chart({
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
