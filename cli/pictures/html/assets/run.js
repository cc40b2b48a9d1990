// Sections of runs: what was measured beside what the plan predicted.
(() => {
  const some = (view) => view.runs.length > 0;
  const { known, tile } = TP;
  const seconds = (value) => known(value) ? TP.seconds(value) : "–";
  const figure = (path, value, text) => known(value) ? TP.figure(path, value, text(value)) : "–";
  /** Shares of right answers, told apart to the hundredth of a percent. */
  const accuracy = (share) => `${(100 * share).toFixed(2)} %`;
  /** What an epoch has under a name, its training loss or a figure of the test data. */
  const score = (path, has, name) => has[name] === undefined ? "–" : has[name] === null ? "not finite"
    : TP.figure(`${path}.${name}`, has[name], (name === "accuracy" ? accuracy : TP.number)(has[name]));
  /** A line through numbers, with a dot for each where they are few. */
  const lineOf = (name, index, xs, ys) => ({ name, index, points: xs.map((x, k) => [x, ys[k]]), lines: true, dots: xs.length <= 40 });
  const last = (list) => list.length ? list[list.length - 1] : null;
  const times = (measured, predicted) => measured && predicted ? `${TP.number(measured / predicted)} × predicted` : null;
  const colourOf = (run, k, view) => view.runs.length > 1 ? TP.el("span", { class: "swatch plain", style: { "--fill": TP.seriesColour(k), display: "inline-block", "margin-right": ".4rem" } }) : null;

  TP.section({
    name: "runs",
    title: "What was measured",
    short: "Measured",
    order: 1,
    when: some,
    build(host, view) {
      for (const [k, run] of view.runs.entries()) {
        for (const line of run.missing) {
          host.append(TP.el("p", { class: "lead warning" }, view.runs.length > 1 ? `${run.name}: ${line}` : line));
        }
        if (view.runs.length > 1) continue;
        const done = last(run.epochs);
        host.append(
          TP.el("p", { class: "lead" }, TP.el("strong", {}, run.variant), ` on ${run.target}: `,
            `${TP.counted(run.mini_batches, "mini-batch", "mini-batches")} in ${TP.counted(run.epochs.length, "epoch", "epochs")}`,
            run.mode === "inline" ? ", all stages in one process: they took turns, so times say nothing about a pipeline." : "."),
          TP.el("dl", { class: "tiles" },
            tile("period", figure(`runs.${k}.period.measured_s`, run.period.measured_s, TP.seconds), times(run.period.measured_s, run.period.predicted_s) || `predicted ${seconds(run.period.predicted_s)}`),
            tile("throughput", figure(`runs.${k}.samples_per_s.measured`, run.samples_per_s.measured, TP.number), `samples/s; predicted ${TP.number(run.samples_per_s.predicted)}`),
            done ? tile("train loss", score(`runs.${k}.epochs.${run.epochs.length - 1}`, done, "train_loss"), `epoch ${done.epoch + 1}`) : null,
            done ? Object.keys(done.test).map((name) => tile(`test ${name}`, score(`runs.${k}.epochs.${run.epochs.length - 1}.test`, done.test, name), `epoch ${done.epoch + 1}`)) : null,
            tile("most stale", TP.counted(Math.max(0, ...run.workers.flatMap((worker) => worker.epochs.flatMap((epoch) => Object.keys(epoch.version_differences).map(Number)))), "update", "updates"), `difference of versions${run.sequence_distance_predicted ? `; v = ${run.sequence_distance_predicted} predicted` : ""}`)));
      }
      if (view.runs.length < 2) return;
      host.append(TP.table("Runs side by side",
        ["run", "system", "mini-batches", "period", "predicted", "samples/s", "train loss", "test loss", "test accuracy"],
        view.runs.map((run, k) => {
          const done = last(run.epochs), path = `runs.${k}.epochs.${run.epochs.length - 1}`;
          return [TP.el("span", {}, colourOf(run, k, view), run.name), run.variant, TP.number(run.mini_batches),
            figure(`runs.${k}.period.measured_s`, run.period.measured_s, TP.seconds), seconds(run.period.predicted_s),
            figure(`runs.${k}.samples_per_s.measured`, run.samples_per_s.measured, TP.number),
            ...done ? [score(path, done, "train_loss"), score(`${path}.test`, done.test, "loss"), score(`${path}.test`, done.test, "accuracy")] : ["–", "–", "–"]];
        }), 2));
    },
  });

  const evaluated = (run, name) => (run.evaluations || run.epochs).filter((each) => each.test[name] !== undefined);
  /** Of what is named so, less is better. */
  const falls = (name) => /loss|error|perplexity/.test(name);

  /** When each run first reached a level, which can be chosen. */
  const timeTo = (view, names) => {
    const box = TP.el("div", {}), first = names.includes("accuracy") ? "accuracy" : names[0];
    const select = TP.el("select", { "aria-label": "What is to be reached" }, names.map((name) => TP.el("option", { value: name }, `test ${name}`)));
    const level = TP.el("input", { type: "number", step: "any", "aria-label": "The level to be reached" });
    const sign = () => falls(select.value) ? 1 : -1;
    // At first, a level that all runs reach.
    const common = () => {
      const bests = view.runs.map((run) => evaluated(run, select.value).map((each) => each.test[select.value]).filter((v) => v !== null))
        .filter((own) => own.length).map((own) => Math.min(...own.map((v) => sign() * v)));
      level.value = bests.length ? Number((sign() * Math.max(...bests)).toPrecision(4)) : "";
      // Rounding mustn't put it out of reach.
      if (bests.length && sign() * level.value < Math.max(...bests)) level.value = sign() * Math.max(...bests);
    };
    const show = () => {
      const rows = view.runs.map((run, k) => {
        const there = level.value === "" ? undefined : evaluated(run, select.value)
          .find((each) => each.test[select.value] !== null && sign() * each.test[select.value] <= sign() * Number(level.value));
        return [TP.el("span", {}, colourOf(run, k, view), run.name), run.variant,
          ...there ? [TP.number(there.mini_batches), TP.number(there.epoch + 1), TP.seconds(there.seconds)] : ["not reached", "–", "–"]];
      });
      box.replaceChildren(TP.table("When it was first reached", ["run", "system", "mini-batches", "in epoch", "training"], rows, 2));
    };
    select.value = first;
    select.addEventListener("change", () => { common(); show(); });
    level.addEventListener("input", show);
    common();
    show();
    return TP.el("div", { id: "time-to" }, TP.el("h3", {}, "Time to accuracy"),
      TP.el("p", { class: "choose" }, select, " ", level), box);
  };

  TP.section({
    name: "loss",
    title: "Loss and accuracy",
    short: "Loss",
    order: 2,
    when: (view) => view.runs.some((run) => run.losses.length),
    build(host, view) {
      const { runs } = view;
      const line = (xs, ys) => runs.map((run, index) => lineOf(run.name, index, xs(run), ys(run)));
      const count = (run) => run.losses.map((_, k) => k + 1);
      const names = [...new Set(runs.flatMap((run) => run.epochs.flatMap((epoch) => Object.keys(epoch.test))))];
      if (runs.length > 1) host.append(TP.seriesLegend(runs.map((run) => run.name)));
      const grid = TP.el("div", { class: "chart-grid" },
        TP.chart({ name: "loss-by-mini-batch", title: "Training loss", series: line(count, (run) => run.losses), xLabel: "mini-batches", x0: true, noisy: true, logY: true }),
        TP.chart({ name: "loss-by-second", title: "Training loss over time", series: line((run) => run.loss_seconds, (run) => run.losses), xLabel: "seconds of training, evaluation left out", x0: true, noisy: true, logY: true }));
      for (const name of names) {
        const text = name === "accuracy" ? TP.percent : TP.number;
        const of = (value) => (run) => evaluated(run, name).map(value);
        const test = of((epoch) => epoch.test[name]);
        const common = { y: text, x0: true, logY: falls(name) };
        grid.append(
          TP.chart({ name: `test-${name}`, title: `Test ${name}`, series: line(of((epoch) => epoch.mini_batches), test), xLabel: "mini-batches", ...common }),
          TP.chart({ name: `test-${name}-by-second`, title: `Test ${name} over time`, series: line(of((epoch) => epoch.seconds), test), xLabel: "seconds of training", ...common }));
      }
      host.append(grid);
      if (names.length) host.append(timeTo(view, names));
      host.append(TP.asTable("Epochs, as a table", () => TP.table("Epochs",
        ["run", "epoch", "mini-batches", "seconds", "train loss", ...names.map((name) => `test ${name}`)],
        runs.flatMap((run, k) => run.epochs.map((epoch, e) => [run.name, epoch.epoch + 1, TP.number(epoch.mini_batches), TP.number(epoch.seconds, 4),
          score(`runs.${k}.epochs.${e}`, epoch, "train_loss"),
          ...names.map((name) => score(`runs.${k}.epochs.${e}.test`, epoch.test, name))])))));
    },
  });

  /** Which run a section shows, where it can show only one. `draw(box, run, k)`; `drawAll(box, runs)`
   *  where it can show all of them, too, which it does at first. */
  const chosen = (host, view, label, able, draw, drawAll = null) => {
    const runs = view.runs.map((run, k) => [run, k]).filter(([run]) => able(run));
    const box = TP.el("div", {}), together = drawAll && runs.length > 1;
    const show = (position) => {
      box.replaceChildren();
      if (position < 0) drawAll(box, runs.map(([run]) => run));
      else draw(box, ...runs[position]);
    };
    if (runs.length > 1) {
      const select = TP.el("select", { "aria-label": label }, together ? TP.el("option", { value: -1 }, "all, measured") : null,
        runs.map(([run], position) => TP.el("option", { value: position }, run.name)));
      select.addEventListener("change", () => show(Number(select.value)));
      host.append(TP.el("p", { class: "choose" }, select));
    }
    host.append(box);
    show(together ? -1 : 0);
  };

  const PARTS = [["compute_s", "computing", "op-F"], ["communication_s", "communication", "op-W"], ["loading_s", "loading", "op-U"], ["idle_s", "idle", "line"]];
  const timeBar = (one, most) => TP.stackedBar(PARTS.map(([key, label, colour]) =>
    [one[key], label, colour, key === "communication_s" ? "diagonal" : "plain", key === "idle_s" ? "var(--ink)" : undefined]), most, TP.seconds);
  const wall = (one) => one.compute_s + one.communication_s + one.loading_s + one.idle_s;

  TP.section({
    name: "run-times",
    title: "Where each worker's time goes",
    short: "Time",
    order: 3,
    when: (view) => view.runs.some((run) => run.workers.some((worker) => worker.per_mini_batch.measured)),
    build(host, view) {
      chosen(host, view, "Run whose times are shown", () => true, (box, run, k) => {
        const rows = run.workers.flatMap((worker, w) => [
          ["measured", worker.idle_share, `runs.${k}.workers.${w}.idle_share`],
          ["predicted", worker.idle_share_predicted, `runs.${k}.workers.${w}.idle_share_predicted`],
        ].map(([source, idle, path]) => ({ worker, w, source, idle, path, one: worker.per_mini_batch[source] })).filter(({ one }) => one));
        const most = Math.max(1e-12, ...rows.map(({ one }) => wall(one)));
        const idleShare = ({ path, idle }) => figure(path, idle, TP.share);
        const { recorded } = run;
        box.append(TP.el("p", { class: "lead" }, "Of a mini-batch, measured in ", run.epochs.length || !recorded ? "all training"
          : `mini-batches ${recorded.first_mini_batch} to ${recorded.first_mini_batch + recorded.mini_batches - 1}, which were recorded`,
        " (start-up and evaluation left out), predicted in the steady state. Idle: neither computing nor communicating nor loading.",
        run.mode === "inline" ? " All stages took turns in one process: being idle says nothing here." : ""),
        TP.legend(PARTS.map(([key, label, colour]) => [label, `var(--${colour})`, key === "communication_s" ? "diagonal" : "plain"])),
        TP.el("div", { class: "bars paired", tabindex: rows.length > 32 ? "0" : null, role: "group", "aria-label": "Time of each worker" },
          rows.map((row) => TP.el("div", { class: "bar-row" },
            TP.el("span", { class: "name" }, row.source === "measured" ? row.worker.name : null, TP.el("small", {}, row.source)), timeBar(row.one, most),
            TP.el("span", { class: "value" }, TP.seconds(wall(row.one)), row.idle === null ? null : TP.el("small", {}, " ", idleShare(row), " idle"))))),
        TP.asTable("Times, as a table", () => TP.table("Times of each worker", ["worker", "", "computing", "communication", "loading", "idle", "share idle"],
          rows.map((row) => [row.worker.name, row.source,
            ...PARTS.map(([key]) => TP.figure(`runs.${k}.workers.${row.w}.per_mini_batch.${row.source}.${key}`, row.one[key], TP.seconds(row.one[key]))), idleShare(row)]), 2)));
      });
    },
  });

  TP.section({
    name: "run-timeline",
    title: "Timelines: measured and predicted",
    short: "Timelines",
    order: 4,
    when: (view) => view.runs.some((run) => run.recordings.measured),
    build(host, view) {
      chosen(host, view, "Run whose timelines are shown", (run) => run.recordings.measured, (box, run) => {
        const measured = new TP.Recording(run.recordings.measured);
        const predicted = run.recordings.predicted ? new TP.Recording(run.recordings.predicted) : null;
        const { recorded } = run;
        box.append(TP.el("p", { class: "lead" },
          `Mini-batches ${recorded.first_mini_batch} to ${recorded.first_mini_batch + recorded.mini_batches - 1}, on one axis. `,
          run.mode === "inline" ? "All stages took turns in one process. "
            : `A mini-batch took ${TP.seconds(recorded.period_s)}; predicted are ${TP.seconds(run.period.predicted_s)}. `,
          "Point at an operation for its times and weights; click it to follow its mini-batch in both."));
        const group = new TP.TimeGroup(box, measured.end_s);
        const limits = measured.lanes.stage.map((stage) => run.limits[stage]);
        TP.runTimeline = { group, measured, predicted };
        TP.runTimeline.charts = [new TP.Gantt(group, measured, { title: "Measured" })];
        if (predicted) TP.runTimeline.charts.push(new TP.Gantt(group, predicted, { title: "Predicted" }));
        if (measured.memory.count) new TP.Memory(group, measured, { title: "Memory, measured (scratch memory isn't seen)", limits });
        if (predicted && predicted.memory.count) new TP.Memory(group, predicted, { title: "Memory, predicted", limits });
      }, (box, runs) => {
        box.append(TP.el("p", { class: "lead" }, "What was recorded of each run, on one axis; each begins with its first operation that was recorded. ",
          "The choice above shows one of them beside what was predicted. Click an operation to follow its mini-batch in all of them."));
        const recordings = runs.map((run) => new TP.Recording(run.recordings.measured));
        const group = new TP.TimeGroup(box, Math.max(...recordings.map((one) => one.end_s)));
        const apart = new Set(runs.map((run) => run.variant)).size === runs.length;
        TP.runTimeline = { group, recordings };
        TP.runTimeline.charts = recordings.map((one, k) => new TP.Gantt(group, one, { title: apart ? runs[k].variant : `${runs[k].name} (${runs[k].variant})` }));
      });
    },
  });

  TP.section({
    name: "run-memory",
    title: "Peak memory: measured and predicted",
    short: "Peaks",
    order: 5,
    when: (view) => view.runs.some((run) => run.workers.some((worker) => worker.memory.measured)),
    build(host, view) {
      chosen(host, view, "Run whose memory is shown", (run) => run.workers.some((worker) => worker.memory.measured), (box, run, k) => {
        const kinds = run.memory_kinds;
        const sum = (list) => list.reduce((a, b) => a + b, 0);
        const bars = run.workers.flatMap((worker, w) => [["measured", worker.memory.measured], ["predicted", worker.memory.predicted]]
          .filter(([, bytes]) => bytes).map(([source, bytes], n) => ({ worker, w, source, bytes, first: n === 0 })));
        const most = Math.max(1, ...bars.map(({ bytes }) => sum(bytes))) * 1.02;
        const used = kinds.filter((_, kind) => bars.some(({ bytes }) => bytes[kind]));
        box.append(TP.el("p", { class: "lead" }, "At the fullest moment of each worker",
          run.ended ? ". " : ", of what was recorded so far. ", "Scratch memory inside operations (the working set) can be predicted, but isn't seen while a run goes on."),
        TP.memoryLegend(used, false),
        TP.el("div", { class: "bars paired", tabindex: bars.length > 32 ? "0" : null, role: "group", "aria-label": "Peak memory of each worker" },
          bars.map(({ worker, source, bytes, first }) => TP.el("div", { class: "bar-row" },
            TP.el("span", { class: "name" }, first ? [worker.name, TP.el("small", {}, source)] : TP.el("small", {}, source)),
            TP.memoryBar(kinds, bytes, most),
            TP.el("span", { class: "value" }, TP.bytes(sum(bytes)))))),
        TP.asTable("Peaks, as a table", () => TP.table("Peak memory of each worker", ["worker", "", ...kinds.map((kind) => TP.data.palette.memory[kind][0]), "total"],
          bars.map(({ worker, w, source, bytes }) => [worker.name, source,
            ...bytes.map((count, n) => TP.figure(`runs.${k}.workers.${w}.memory.${source}.${n}`, count, TP.bytes(count))), TP.bytes(sum(bytes))]), 2)));
      });
    },
  });

  TP.section({
    name: "run-staleness",
    title: "Staleness, epoch by epoch",
    short: "Epochs",
    order: 6,
    when: (view) => view.runs.some((run) => run.workers.some((worker) => worker.epochs.length)),
    build(host, view) {
      const mean = (epoch) => {
        const pairs = Object.entries(epoch.version_differences);
        const count = pairs.reduce((total, [, times]) => total + times, 0);
        return count ? pairs.reduce((total, [d, times]) => total + Number(d) * times, 0) / count : 0;
      };
      host.append(TP.el("p", { class: "lead" },
        "How many updates lay between a mini-batch's forward and its backward, and how far apart the weights of both were: ‖W_B − W_F‖ / ‖W_F‖."));
      chosen(host, view, "Run whose staleness is shown", (run) => run.workers.some((worker) => worker.epochs.length), (box, run, k) => {
        const line = (of) => run.workers.map((worker, index) => lineOf(worker.name, index, worker.epochs.map((epoch) => epoch.epoch + 1), worker.epochs.map(of)));
        box.append(TP.seriesLegend(run.workers.map((worker) => worker.name)),
          TP.el("div", { class: "chart-grid" },
            TP.chart({ name: "difference", title: "Mean version difference", series: line(mean), xLabel: "epoch", x0: true, y0: true }),
            TP.chart({ name: "distance", title: "Mean distance of weights", series: line((epoch) => epoch.weight_distance), xLabel: "epoch", x0: true, y0: true, y: TP.percent })),
          TP.asTable("Staleness, as a table", () => TP.table("Staleness of each worker and epoch", ["worker", "epoch", "backwards by difference", "predicted at most", "mean distance", "largest"],
            run.workers.flatMap((worker, w) => worker.epochs.map((epoch, e) => [worker.name, epoch.epoch + 1,
              Object.entries(epoch.version_differences).map(([d, times]) => `${d}: ${times}`).join(", "), worker.version_difference_predicted,
              figure(`runs.${k}.workers.${w}.epochs.${e}.weight_distance`, epoch.weight_distance, TP.percent), figure(`runs.${k}.workers.${w}.epochs.${e}.largest_weight_distance`, epoch.largest_weight_distance, TP.percent)])), 1)));
      });
    },
  });

  TP.section({
    name: "run-plan",
    title: "The plan by itself",
    short: "Plan",
    order: 9,
    when: (view) => some(view) && view.plan !== null,
    build(host, view) {
      host.append(TP.el("p", { class: "lead" }, `From here on, the page shows what the plan predicts${view.plans.length > 1 ? "; choose which one at the top" : ""}.`));
    },
  });
})();
