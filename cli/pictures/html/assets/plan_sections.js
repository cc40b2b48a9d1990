// Sections of a plan: at a glance, timeline and memory, the solver's word, where it comes from.
(() => {
  const proof = (solver) => solver.optimal ? "proven optimal"
    : `${solver.bound_s > 0 ? `gap of ${TP.percent(solver.gap)} to the lower bound` : "no lower bound"}${solver.stopped ? `; ended by ${solver.stopped}` : ""}`;

  const tile = (name, value, note) => TP.el("div", { class: "tile" },
    TP.el("dt", {}, name), TP.el("dd", {}, value, note ? TP.el("span", { class: "note" }, note) : null));

  /** Bytes of memory of the smallest device of each stage; null where there is no limit. */
  TP.limitsOf = (plan) => plan.stages.map((stage) => {
    const sizes = stage.devices.map((d) => plan.cluster.devices[d].memory_bytes).filter((size) => size !== null && size !== undefined);
    return sizes.length ? Math.min(...sizes) : null;
  });

  TP.section({
    name: "summary",
    title: "At a glance",
    short: "Glance",
    order: 10,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { plan, cores } = view.plan;
      const { predicted, solver } = plan;
      const most = (key) => predicted.stages.reduce((best, stage, s) => stage[key] > predicted.stages[best][key] ? s : best, 0);
      const fullest = most("memory_bytes"), stalest = most("version_difference");
      const limit = TP.limitsOf(plan)[fullest];
      const stage = (s, key, text) => TP.figure(`predicted.stages.${s}.${key}`, predicted.stages[s][key], text(predicted.stages[s][key]));
      host.append(
        TP.el("p", { class: "lead" }, TP.el("strong", {}, plan.variant), ` on ${plan.profile.target}: `,
          `${TP.counted(plan.stages.length, "stage", "stages")} on ${TP.counted(plan.stages.reduce((n, s) => n + s.devices.length, 0), "device", "devices")}, `,
          `mini-batches of ${TP.counted(plan.mini_batch, "sample", "samples")} in ${TP.counted(plan.micro_batches, "micro-batch", "micro-batches")}.`),
        TP.el("dl", { class: "tiles" },
          tile("period", TP.figure("predicted.period_s", predicted.period_s, TP.seconds(predicted.period_s)), "per mini-batch"),
          tile("throughput", TP.figure("predicted.samples_per_s", predicted.samples_per_s, TP.number(predicted.samples_per_s)), "samples/s"),
          tile("speed-up", TP.figure("predicted.speedup", predicted.speedup, `${TP.number(predicted.speedup)} ×`), "over one device"),
          cores ? tile("idle cores", TP.el("data", { value: String(cores.idle_share) }, TP.share(cores.idle_share)),
            `${TP.counted(cores.devices, "device takes", "devices take")} turns on ${TP.counted(cores.cores, "core", "cores")}`) : null,
          tile("most memory", stage(fullest, "memory_bytes", TP.bytes),
            `stage ${fullest}${limit ? `, ${TP.percent(predicted.stages[fullest].memory_bytes / limit)} of ${TP.bytes(limit)}` : ""}`),
          tile("staleness", stage(stalest, "version_difference", (d) => TP.counted(d, "update", "updates")),
            `stage ${stalest}, at most${predicted.sequence_distance ? `; v = ${predicted.sequence_distance}` : ""}`),
          solver.optimal ? tile("solver", "optimal", "proven")
            : solver.bound_s > 0 ? tile("solver", TP.figure("solver.gap", solver.gap, `gap ${TP.percent(solver.gap)}`), "to the lower bound")
              : tile("solver", solver.method, "no lower bound")));
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
        "Point at an operation for its times, bytes and weights; click it to follow its mini-batch through all stages."));
      const group = new TP.TimeGroup(host, recording.end_s);
      TP.timeline = { group, recording, gantt: new TP.Gantt(group, recording, { title: "What each stage does" }) };
      if (recording.memory.count) {
        const full = recording.lanes.stage.every((stage, lane) => recording.lanePeak(lane) >= plan.predicted.stages[stage].memory_bytes);
        if (!full) {
          host.insertBefore(TP.el("p", { class: "lead warning" },
            "The pipeline is still filling in this time: not every stage reaches the memory that the plan needs once it is full (see below)."), group.box.previousSibling.previousSibling);
        }
        TP.timeline.memory = new TP.Memory(group, recording, {
          title: "What each stage holds",
          limits: recording.lanes.stage.map((stage) => limits[stage]),
        });
      }
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
      const { solver } = view.plan.plan;
      const number = (key, text) => TP.figure(`solver.${key}`, solver[key], text(solver[key]));
      host.append(facts([
        ["method", solver.method],
        ["verdict", proof(solver)],
        ["objective", number("objective_s", TP.seconds)],
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
        cluster.cores ? ["cores", `${TP.number(cluster.cores)} of each machine compute at once`] : null,
        cluster.between_machines ? ["between machines", networkText(cluster.between_machines)] : null,
        ["optimizer state", `${TP.number(plan.optimizer_state_factor)} × the parameters' bytes`],
        plan.update_every > 1 ? ["updates", `every ${plan.update_every} mini-batches`] : null,
        plan.tied === "split" ? ["shared parameters", "may be on several stages"] : null,
        ["format", plan.format],
        version ? ["page made by", `TiMePReSt ${version}`] : null,
      ]));
    },
  });
})();
