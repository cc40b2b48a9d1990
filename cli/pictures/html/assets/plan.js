// Sections of a plan: at a glance, timeline and memory, the solver's word, where it comes from.
(() => {
  const proof = (solver) => solver.optimal ? "proven optimal"
    : `${solver.bound_s > 0 ? `gap of ${TP.percent(solver.gap)} to the lower bound` : "no lower bound"}${solver.stopped ? `; ended by ${solver.stopped}` : ""}`;

  const { tile } = TP;

  /** Bytes that a plan leaves free of a device's memory. */
  const freeOf = (device) => (device.reserved_bytes || 0) + Math.ceil((device.reserved_share || 0) * device.memory_bytes);

  /** The device of each stage that has least for it; null where there is no limit. */
  const tightest = (plan) => plan.stages.map((stage) => {
    const limited = stage.devices.map((d) => plan.cluster.devices[d]).filter((device) => device.memory_bytes !== null && device.memory_bytes !== undefined);
    return limited.length ? limited.reduce((a, b) => b.memory_bytes - freeOf(b) < a.memory_bytes - freeOf(a) ? b : a) : null;
  });

  /** Bytes of that device's memory; null where there is no limit. */
  TP.limitsOf = (plan) => tightest(plan).map((device) => device && device.memory_bytes);

  /** Devices with their stages, as far as stages share them; else stages. Paths as of `TP.figure`. */
  TP.onDevices = (plan) => {
    const { stages, devices } = plan.predicted;
    const limits = TP.limitsOf(plan), free = tightest(plan).map((device) => device ? freeOf(device) : 0);
    if (!devices || !devices.length) {
      return stages.map((held, s) => ({ name: `stage ${s}`, stages: [s], held, path: `predicted.stages.${s}`, limit: limits[s], free: free[s] }));
    }
    return devices.map((held, k) => {
      const own = held.stages, words = own.length > 1 ? `stages ${own.join(", ")}` : `stage ${own[0]}`;
      return { name: `${TP.devicesText(plan, plan.stages[own[0]])} (${words})`, stages: own, held, path: `predicted.devices.${k}`, limit: limits[own[0]], free: free[own[0]] };
    });
  };

  TP.section({
    name: "summary",
    title: "At a glance",
    short: "Glance",
    order: 10,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { plan } = view.plan;
      const { predicted, solver } = plan;
      const most = (key) => predicted.stages.reduce((best, stage, s) => stage[key] > predicted.stages[best][key] ? s : best, 0);
      const stalest = most("version_difference");
      const { name, held, path, limit, free } = TP.onDevices(plan).reduce((best, one) => one.held.memory_bytes > best.held.memory_bytes ? one : best);
      const devices = new Set(plan.stages.flatMap((each) => each.devices)).size;
      const placed = view.plan.placement ? ` (placement: ${view.plan.placement})` : "";
      const stage = (s, key, text) => TP.figure(`predicted.stages.${s}.${key}`, predicted.stages[s][key], text(predicted.stages[s][key]));
      if (view.plan.edited) {
        host.append(TP.el("p", { class: "lead warning" },
          "The plan was edited since it was made, and what it predicts isn't what it says now: tp-plan check PLAN --profile PROFILE -o PLAN predicts anew."));
      }
      host.append(
        TP.el("p", { class: "lead" }, TP.el("strong", {}, plan.variant), ` on ${plan.profile.target}: `,
          `${TP.counted(plan.stages.length, "stage", "stages")} on ${TP.counted(devices, "device", "devices")}${placed}, `,
          `mini-batches of ${TP.counted(plan.mini_batch, "sample", "samples")} in ${TP.counted(plan.micro_batches, "micro-batch", "micro-batches")}.`),
        TP.el("dl", { class: "tiles" },
          tile("period", TP.figure("predicted.period_s", predicted.period_s, TP.seconds(predicted.period_s)), "per mini-batch"),
          tile("throughput", TP.figure("predicted.samples_per_s", predicted.samples_per_s, TP.number(predicted.samples_per_s)), "samples/s"),
          tile("speed-up", TP.figure("predicted.speedup", predicted.speedup, `${TP.number(predicted.speedup)} ×`), "over one device"),
          tile("most memory", TP.figure(`${path}.memory_bytes`, held.memory_bytes, TP.bytes(held.memory_bytes)),
            `${name}${limit ? `, ${TP.percent(held.memory_bytes / limit)} of ${TP.bytes(limit)}` : ""}${free ? `, ${TP.bytes(free)} kept free` : ""}`),
          tile("staleness", stage(stalest, "version_difference", (d) => TP.counted(d, "update", "updates")),
            `stage ${stalest}, at most${predicted.sequence_distance ? `; v = ${predicted.sequence_distance}` : ""}`),
          solver.optimal ? tile("solver", "optimal", plan.engine ? "with tp-run" : "proven")
            : solver.bound_s > 0 ? tile("solver", TP.figure("solver.gap", solver.gap, `gap ${TP.percent(solver.gap)}`), "to the lower bound")
              : tile("solver", solver.method, "no lower bound")));
    },
  });

  TP.section({
    name: "timelines",
    title: "Timelines of all plans",
    short: "All timelines",
    order: 5,
    when: (view) => view.plans.length > 1 && !view.runs.length,
    build(host, view) {
      const recordings = view.plans.map((one) => new TP.Recording(one.recording));
      host.append(TP.el("p", { class: "lead" }, "What each plan predicts, one above the other on one axis, from the first operation on. ",
        "Click an operation to follow its mini-batch in all of them. Below, the page shows one plan; choose which one at the top."));
      const group = new TP.TimeGroup(host, Math.max(...recordings.map((one) => one.end_s)));
      TP.timelines = { group, recordings };
      TP.timelines.charts = recordings.map((one, k) => new TP.Gantt(group, one, { title: view.plans[k].name }));
      const windows = recordings.map((one) => one.window).filter(Boolean);
      if (windows.length) group.set(Math.min(...windows.map(([begin]) => begin)), Math.max(...windows.map(([, end]) => end)));
      host.append(TP.asTable("Periods, as a table", () => TP.table("Period and idle time of each plan", ["plan", "period", "samples/s", "least idle"],
        view.plans.map(({ name, plan }, k) => [name,
          TP.figure(`plans.${k}.plan.predicted.period_s`, plan.predicted.period_s, TP.seconds(plan.predicted.period_s)),
          TP.figure(`plans.${k}.plan.predicted.samples_per_s`, plan.predicted.samples_per_s, TP.number(plan.predicted.samples_per_s)),
          TP.share(Math.min(...recordings[k].idleShares))]), 1)));
    },
  });

  TP.section({
    name: "timeline",
    title: "Timeline and memory",
    short: "Timeline",
    order: 30,
    when: (view) => view.plan !== null && view.plan.recording,
    build(host, view) {
      const { plan, recording: columns, mini_batches_shown: shown } = view.plan;
      const recording = new TP.Recording(columns);
      const limits = TP.limitsOf(plan);
      host.append(TP.el("p", { class: "lead" },
        `The first ${TP.counted(shown, "mini-batch", "mini-batches")} as the plan predicts them, `,
        `${TP.counted(recording.spans.count, "operation", "operations")}. `,
        "Shown are the filling and two mini-batches more (Whole: all of them), with one period between the dashed lines and each lane's idle share of it. ",
        "Point at an operation for its times, bytes and weights; click it to follow its mini-batch through all stages."));
      const group = new TP.TimeGroup(host, recording.end_s);
      const one = view.plan.placement ? "device" : "stage";
      TP.timeline = { group, recording, gantt: new TP.Gantt(group, recording, { title: `What each ${one} does` }) };
      if (recording.memory.count) {
        // Of replicas with several stages, the plan has no more than a bound.
        const full = TP.onDevices(plan).every(({ stages, held }) => (stages.length > 1 && plan.stages[stages[0]].devices.length > 1) ||
          recording.lanes.stage.every((stage, lane) => stage !== stages[0] || recording.lanePeak(lane) >= held.memory_bytes));
        if (!full) {
          host.insertBefore(TP.el("p", { class: "lead warning" },
            `The pipeline is still filling in this time: not every ${one} reaches the memory that the plan needs once it is full (see below).`), group.box.previousSibling.previousSibling);
        }
        TP.timeline.memory = new TP.Memory(group, recording, {
          title: `What each ${one} holds`,
          limits: recording.lanes.stage.map((stage) => limits[stage]),
        });
      }
      if (recording.window) group.set(...recording.window);
      host.append(TP.el("p", { class: "hint" },
        "Zoom: Ctrl + wheel, or the wheel alone after a click; two fingers; + and −. Move: drag, Shift + wheel, Page Up and Page Down. " +
        "Keys: arrows go from operation to operation, Shift + arrows within a mini-batch, Enter follows, N and P follow the next and previous mini-batch, Escape ends it."));
      host.append(TP.asTable("Operations of the first mini-batch, as a table", () => {
        const rows = recording.follow(recording.firstMini).spans.slice(0, 2000);
        recording.followed = null;
        return TP.table("Operations of the first mini-batch", ["operation", "worker", "start", "end", "weight version"],
          rows.map((span) => [recording.name(span), recording.lanes.name[recording.spans.lane[span]],
            TP.seconds(recording.start(span), 4), TP.seconds(recording.end(span), 4),
            recording.spans.version[span] < 0 ? "–" : recording.spans.version[span]]), 2);
      }));
    },
  });

  const facts = (pairs) => TP.el("dl", { class: "facts" }, pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== undefined)
    .map(([name, value]) => TP.el("div", {}, TP.el("dt", {}, name), TP.el("dd", {}, value))));

  TP.section({
    name: "solver",
    title: "How it was found",
    short: "Solver",
    order: 60,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { plan } = view.plan, { solver } = plan;
      const number = (key, text) => TP.figure(`solver.${key}`, solver[key], text(solver[key]));
      host.append(facts([
        ["method", solver.method],
        ["verdict", `${plan.engine ? "with tp-run " : ""}${proof(solver)}`],
        ["objective", number("objective_s", TP.seconds)],
        ...(solver.fastest ? [["given away", `${TP.percent(plan.predicted.period_s / solver.objective_s - 1)} of the period for ${{
          staleness: `a version difference of ${Math.max(...plan.predicted.stages.map((stage) => stage.version_difference))} instead of ${solver.fastest.version_difference}`,
          memory: `less memory than ${TP.bytes(solver.fastest.memory_bytes)}`, evenness: "stages that are more even", stages: "fewer stages" }[solver.fastest.given_for]}`]] : []),
        ["lower bound", number("bound_s", TP.seconds)],
        ["gap", number("gap", TP.percent)],
        ["plans tried", number("plans_tried", TP.number)],
        ["time spent", number("seconds", TP.seconds)],
      ]));
    },
  });

  const networkText = (network) => `${TP.bytes(network.bandwidth_bytes_per_s)}/s, ${TP.seconds(network.latency_s)} latency` +
    `${network.half_duplex ? ", half duplex" : ""}${network.overlap === false ? ", transfers keep devices busy" : ""}`;

  /** Equal devices in one line. */
  const devices = (cluster) => {
    const kinds = new Map();
    for (const device of cluster.devices) {
      const key = `${device.memory_bytes ? TP.bytes(device.memory_bytes) : "no memory limit"}` +
        `${device.memory_bytes && freeOf(device) ? ` (${TP.bytes(freeOf(device))} kept free)` : ""}` +
        `${device.speed && device.speed !== 1 ? `, speed ${TP.number(device.speed)}` : ""}`;
      kinds.set(key, [...(kinds.get(key) || []), device.name]);
    }
    return TP.el("span", {}, [...kinds].map(([key, names], k) =>
      `${k ? "; " : ""}${names.length > 2 ? `${names.length} devices (${names[0]} … ${names[names.length - 1]})` : names.join(", ")}: ${key}`));
  };

  TP.section({
    name: "provenance",
    title: "Where it comes from",
    short: "Origin",
    order: 70,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { plan, name } = view.plan;
      const { profile, cluster } = plan;
      const version = view.data.made_by && view.data.made_by.timeprest;
      host.append(facts([
        ["plan", name],
        ["profile of", profile.target],
        ["fingerprint", TP.el("code", {}, profile.fingerprint)],
        ["profiled on", `${profile.device}, ${TP.counted(profile.threads, "thread", "threads")}, ${profile.dtype}${profile.autocast ? ` with autocast to ${profile.autocast}` : ""}`],
        ["graph from", `${profile.front_end}, by ${profile.granularity}`],
        ["devices", devices(cluster)],
        ["network", networkText(cluster.network)],
        cluster.between_machines ? ["between machines", networkText(cluster.between_machines)] : null,
        ["optimizer state", `${TP.number(plan.optimizer_state_factor)} × the parameters' bytes`],
        plan.engine ? ["as run by", plan.engine] : null,
        plan.update_every > 1 ? ["updates", `every ${plan.update_every} mini-batches`] : null,
        plan.tied === "split" ? ["shared parameters", "may be on several stages"] : null,
        ["format", plan.format],
        version ? ["page made by", `TiMePReSt ${version}`] : null,
      ]));
    },
  });
})();

// Sections of a plan with figures for each stage: bytes, staleness, and the table of everything.
(() => {
  const figure = (s, path, value, text) => TP.figure(`predicted.stages.${s}.${path}`, value, text(value));

  TP.section({
    name: "bytes",
    title: "Where each byte goes",
    short: "Memory",
    order: 40,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { plan } = view.plan;
      const found = TP.onDevices(plan), one = view.plan.placement ? "device" : "stage";
      const stages = found.map(({ held }) => held), limits = found.map(({ limit }) => limit), free = found.map((each) => each.free);
      const of = (stage, kind) => stage.memory[`${kind}_bytes`] ?? 0;
      // Only another engine's runs have any of its own.
      const KINDS = Object.keys(TP.data.palette.memory).filter((kind) => stages.some((stage) => `${kind}_bytes` in stage.memory));
      const peak = Math.max(...stages.map((stage) => stage.memory_bytes), 1);
      const least = Math.min(...limits.filter((limit) => limit !== null));
      const shown = Number.isFinite(least) && least < 2.5 * peak;
      const most = Math.max(peak, ...(shown ? limits.filter((limit) => limit !== null && limit < 2.5 * peak) : [])) * 1.02;
      const bar = (s) => TP.memoryBar(KINDS, KINDS.map((kind) => of(stages[s], kind)), most,
        shown && limits[s] !== null && limits[s] <= most ? [
          free[s] ? TP.el("i", { class: "free", title: `kept free: ${TP.bytes(free[s])}`, style: { left: `${100 * (limits[s] - free[s]) / most}%`, width: `${100 * free[s] / most}%` } }) : null,
          TP.el("i", { class: "limit", title: `limit: ${TP.bytes(limits[s])}`, style: { left: `${100 * limits[s] / most}%` } })] : null);
      host.append(
        TP.el("p", { class: "lead" }, `At each ${one}'s fullest moment, on the replica that holds most.`,
          view.plan.placement ? " It isn't the sum of its stages' peaks: those come at other moments." : "",
          Number.isFinite(least) && !shown ? limits.every((limit) => limit === least)
            ? ` The limit, ${TP.bytes(least)}, lies far to the right of these bars.`
            : ` The limits, ${TP.bytes(least)} and more, lie far to the right of these bars.` : ""),
        TP.memoryLegend(KINDS.filter((kind) => stages.some((stage) => of(stage, kind))), shown, shown && free.some((bytes) => bytes > 0)),
        TP.el("div", { class: "bars", tabindex: stages.length > 24 ? "0" : null, role: "group", "aria-label": `Bytes of each ${one}` },
          stages.map((stage, s) => TP.el("div", { class: "bar-row" },
            TP.el("span", { class: "name" }, found[s].name), bar(s),
            TP.el("span", { class: "value" }, TP.bytes(stage.memory_bytes),
              limits[s] ? TP.el("small", {}, ` ${TP.percent(stage.memory_bytes / limits[s])}`) : null)))),
        TP.asTable(`Bytes of each ${one}, as a table`, () => TP.table(`Bytes of each ${one}`,
          [one, ...KINDS.map((kind) => TP.data.palette.memory[kind][0]), "total", "limit", "kept free"],
          stages.map((stage, s) => [found[s].name,
            ...KINDS.map((kind) => TP.figure(`${found[s].path}.memory.${kind}_bytes`, of(stage, kind), TP.bytes(of(stage, kind)))),
            TP.figure(`${found[s].path}.memory_bytes`, stage.memory_bytes, TP.bytes(stage.memory_bytes)), limits[s] === null ? "–" : TP.bytes(limits[s]), TP.bytes(free[s])]))));
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
          ? `: when a mini-batch's backward begins on the last stage, those of the ${v - 1} before it are still on their way, so that mini-batches make ${v} sequences of updates.${view.plan.placement ? "" : " TiMePReSt's paper advises N ≥ S − 1."}`
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
        TP.el("p", { class: "lead" }, "Times are for one micro-batch; idle: the share of the period in which the stage's busiest replica has nothing to do.",
          view.plan.placement ? " Stages of one device are idle together." : ""),
        TP.table("All figures of each stage",
          ["stage", "layers", "device", ...columns.map(([head]) => head), "in flight", "micro-batches kept", "idle"],
          stages.map((stage, s) => [String(s), TP.counted(plan.stages[s].nodes.length, "layer", "layers"), TP.devicesText(plan, plan.stages[s]),
            ...columns.map(([, key, text]) => figure(s, key, stage[key], text)),
            String(plan.stages[s].in_flight), figure(s, "micro_batches_kept", stage.micro_batches_kept, TP.number), idle(s)]), 3));
    },
  });
})();
