// Sections of a plan with figures for each stage: bytes, staleness, and the table of everything.
(() => {
  const KINDS = ["weights", "versions", "gradients", "optimizer", "activations", "boundary", "workspace"];
  const figure = (s, path, value, text) => TP.figure(`predicted.stages.${s}.${path}`, value, text(value));

  TP.section({
    name: "bytes",
    title: "Where each byte goes",
    short: "Memory",
    order: 40,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { plan } = view.plan;
      const { stages } = plan.predicted;
      const limits = TP.limitsOf(plan);
      const peak = Math.max(...stages.map((stage) => stage.memory_bytes), 1);
      const least = Math.min(...limits.filter((limit) => limit !== null));
      const shown = Number.isFinite(least) && least < 2.5 * peak;
      const most = Math.max(peak, ...(shown ? limits.filter((limit) => limit !== null && limit < 2.5 * peak) : [])) * 1.02;
      const bar = (s) => TP.el("div", { class: "bar", "aria-hidden": "true" },
        KINDS.map((kind) => {
          const bytes = stages[s].memory[`${kind}_bytes`];
          const [label, pattern] = TP.data.palette.memory[kind];
          return bytes ? TP.el("span", {
            class: `part ${pattern}`, title: `${label}: ${TP.bytes(bytes)}`,
            style: { width: `${100 * bytes / most}%`, "--fill": `var(--mem-${kind})`, "--on": `var(--mem-${kind}-ink)` },
          }, bytes / most > 0.11 ? TP.el("b", {}, TP.bytes(bytes)) : null) : null;
        }),
        shown && limits[s] !== null && limits[s] <= most ? TP.el("i", { class: "limit", title: `limit: ${TP.bytes(limits[s])}`, style: { left: `${100 * limits[s] / most}%` } }) : null);
      host.append(
        TP.el("p", { class: "lead" }, "At each stage's fullest moment, on the replica that holds most.",
          Number.isFinite(least) && !shown ? ` The limit, ${TP.bytes(least)}, lies far to the right of these bars.` : ""),
        TP.memoryLegend(KINDS.filter((kind) => stages.some((stage) => stage.memory[`${kind}_bytes`])), shown),
        TP.el("div", { class: "bars", tabindex: stages.length > 24 ? "0" : null, role: "group", "aria-label": "Bytes of each stage" },
          stages.map((stage, s) => TP.el("div", { class: "bar-row" },
            TP.el("span", { class: "name" }, `stage ${s}`), bar(s),
            TP.el("span", { class: "value" }, TP.bytes(stage.memory_bytes),
              limits[s] ? TP.el("small", {}, ` ${TP.percent(stage.memory_bytes / limits[s])}`) : null)))),
        TP.asTable("Bytes of each stage, as a table", () => TP.table("Bytes of each stage",
          ["stage", ...KINDS.map((kind) => TP.data.palette.memory[kind][0]), "total", "limit"],
          stages.map((stage, s) => [`stage ${s}`,
            ...KINDS.map((kind) => figure(s, `memory.${kind}_bytes`, stage.memory[`${kind}_bytes`], TP.bytes)),
            figure(s, "memory_bytes", stage.memory_bytes, TP.bytes), limits[s] === null ? "–" : TP.bytes(limits[s])]))));
    },
  });

  TP.section({
    name: "staleness",
    title: "Staleness",
    order: 50,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { stages, sequence_distance: v } = view.plan.plan.predicted;
      const most = Math.max(...stages.map((stage) => Math.max(stage.version_difference, stage.versions_held)), 1);
      const marks = (count, kind) => most <= 12
        ? TP.el("span", { class: "marks", "aria-hidden": "true" }, Array.from({ length: count }, () => TP.el("i", { class: kind })))
        : TP.el("span", { class: "marks", "aria-hidden": "true" }, TP.el("i", { class: kind, style: { width: `${100 * count / most}%` } }));
      const stale = stages.some((stage) => stage.version_difference > 0);
      host.append(
        TP.el("p", { class: "lead" }, stale
          ? "Version difference: how many updates lie between the weights of a mini-batch's forward and those of its backward, at most, once the pipeline is full. Versions held: copies of the weights that the stage keeps."
          : `None: every backward uses the very weights that its forward used${most > 1 ? "; older versions are kept for that" : ""}.`),
        v ? TP.el("p", { class: "lead" }, "v = ", TP.figure("predicted.sequence_distance", v, String(v)), v > 1
          ? `: when a mini-batch's backward begins on the last stage, those of the ${v - 1} before it are still on their way, so that mini-batches make ${v} sequences of updates. TiMePReSt's paper advises N ≥ S − 1.`
          : ": all mini-batches make one sequence of updates.") : null,
        TP.el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Staleness of each stage" }, TP.el("table", { class: "stale" },
          TP.el("caption", { class: "hidden" }, "Version difference and versions held of each stage"),
          TP.el("thead", {}, TP.el("tr", {}, ["stage", "version difference", "versions held"].map((head) => TP.el("th", { scope: "col", class: "word" }, head)))),
          TP.el("tbody", {}, stages.map((stage, s) => TP.el("tr", {},
            TP.el("th", { scope: "row", class: "word" }, `stage ${s}`),
            TP.el("td", {}, TP.el("div", { class: "marked" }, figure(s, "version_difference", stage.version_difference, String), marks(stage.version_difference, "apart"))),
            TP.el("td", {}, TP.el("div", { class: "marked" }, figure(s, "versions_held", stage.versions_held, String), marks(stage.versions_held, "held")))))))));
    },
  });

  TP.section({
    name: "stages",
    title: "Stage by stage",
    short: "Figures",
    order: 55,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { plan } = view.plan;
      const { stages } = plan.predicted;
      const columns = [
        ["forward", "forward_s", TP.seconds], ["backward", "backward_s", TP.seconds],
        stages.some((stage) => stage.weight_s) ? ["weight part", "weight_s", TP.seconds] : null,
        ["transfer", "transfer_s", TP.seconds], ["update", "update_s", TP.seconds],
        stages.some((stage) => stage.all_reduce_s) ? ["all-reduce", "all_reduce_s", TP.seconds] : null,
        ["parameters", "parameter_bytes", TP.bytes], ["memory", "memory_bytes", TP.bytes],
      ].filter((column) => column);
      const idle = (s) => TP.el("span", { class: "idle" },
        TP.el("span", { class: "meter", "aria-hidden": "true" }, TP.el("i", { style: { width: `${100 * stages[s].idle_share}%` } })),
        figure(s, "idle_share", stages[s].idle_share, TP.share));
      host.append(
        TP.el("p", { class: "lead" }, "Times are for one micro-batch; idle: the share of the period in which the stage's busiest replica has nothing to do."),
        TP.table("All figures of each stage",
          ["stage", "layers", "device", ...columns.map(([head]) => head), "in flight", "micro-batches kept", "idle"],
          stages.map((stage, s) => [String(s), TP.counted(plan.stages[s].nodes.length, "layer", "layers"), TP.devicesText(plan, plan.stages[s]),
            ...columns.map(([, key, text]) => figure(s, key, stage[key], text)),
            String(plan.stages[s].in_flight), figure(s, "micro_batches_kept", stage.micro_batches_kept, TP.number), idle(s)]), 3));
    },
  });
})();
