// The model cut into stages: a card for each stage with its layers, arrows for what crosses.
(() => {
  const ALL = 10, ENDS = 4, GAP = 100, CARD = 170, LIFT = 26;

  /** "h.0.ln_1" stands with its neighbours under "h.0". */
  const parent = (name) => name.includes(".") ? name.slice(0, name.lastIndexOf(".")) : "";

  /** Neighbours with the same parent as one group, where that makes the list shorter. */
  const grouped = (names) => {
    const groups = [];
    for (const name of names) {
      const last = groups[groups.length - 1];
      if (last && parent(name) && last.parent === parent(name)) last.names.push(name);
      else groups.push({ parent: parent(name), names: [name] });
    }
    return groups;
  };

  const item = ({ parent: title, names }) => names.length === 1
    ? TP.el("li", { title: names[0] }, names[0])
    : TP.el("li", {}, TP.el("details", {},
      TP.el("summary", {}, title, TP.el("span", { class: "count" }, ` ${names.length}`)),
      TP.el("ul", {}, names.map((name) => TP.el("li", {}, name.slice(title.length + 1))))));

  /** A list of layers that folds what is long. */
  TP.layerList = (names) => {
    const list = TP.el("ul", { class: "layers" });
    const groups = names.length > ALL ? grouped(names) : names.map((name) => ({ parent: "", names: [name] }));
    const fill = (all) => {
      list.replaceChildren();
      if (all || groups.length <= ALL) { list.append(...groups.map(item)); return; }
      const hidden = groups.slice(ENDS, -2).reduce((sum, group) => sum + group.names.length, 0);
      list.append(...groups.slice(0, ENDS).map(item),
        TP.el("li", { class: "more" }, TP.el("button", { type: "button", onclick: () => fill(true) }, `⋯ ${TP.number(hidden)} more layers`)),
        ...groups.slice(-2).map(item));
    };
    fill(false);
    return list;
  };

  /** Edges with the same ends as one arrow. */
  const arrowsOf = (edges) => {
    const found = new Map();
    for (const edge of edges) {
      const key = `${edge.source} ${edge.target}`;
      if (!found.has(key)) found.set(key, { source: edge.source, target: edge.target, bytes: 0, tensors: [], back: false });
      const arrow = found.get(key);
      arrow.bytes += edge.bytes_per_micro_batch;
      arrow.tensors.push(edge.tensor);
      arrow.back = arrow.back || edge.needs_grad;
    }
    return [...found.values()];
  };

  const devicesText = (plan, stage) => {
    const names = stage.devices.map((d) => plan.cluster.devices[d].name);
    return names.length < 3 ? names.join(", ") : `${names[0]} … ${names[names.length - 1]} (${names.length})`;
  };
  TP.devicesText = devicesText;

  const card = (plan, s) => {
    const stage = plan.stages[s], predicted = plan.predicted.stages[s];
    return TP.el("article", { class: "card", "aria-label": `stage ${s}` },
      TP.el("header", {}, TP.el("h3", {}, `stage ${s}`), TP.el("span", { class: "faint" }, devicesText(plan, stage))),
      TP.el("p", { class: "faint small" },
        TP.counted(stage.nodes.length, "layer", "layers"),
        stage.devices.length > 1 ? `, ${stage.devices.length} replicas` : "",
        stage.recompute === true ? ", recomputes" : "",
        Array.isArray(stage.recompute) ? `, recomputes ${stage.recompute.length} of them` : "",
        TP.el("br"), `${TP.bytes(predicted.parameter_bytes)} of parameters`),
      TP.layerList(stage.nodes));
  };

  /** Depths at which arrows that pass over stages run, so that none crosses another's level. */
  const levels = (arrows) => {
    const taken = [];
    for (const arrow of arrows.slice().sort((a, b) => (a.target - a.source) - (b.target - b.source))) {
      let level = 0;
      const clash = ([a, b]) => a < arrow.target && arrow.source < b;
      while ((taken[level] || []).some(clash)) level++;
      (taken[level] = taken[level] || []).push([arrow.source, arrow.target]);
      arrow.level = level;
    }
    return taken.length;
  };

  const draw = (svg, cards, near, far, depth) => {
    const base = depth * LIFT + 14;
    svg.replaceChildren();
    const host = svg.parentElement;
    svg.setAttribute("width", host.scrollWidth > host.clientWidth ? cards[cards.length - 1].offsetLeft + cards[cards.length - 1].offsetWidth : host.clientWidth);
    svg.setAttribute("height", base + 60);
    const tip = (arrow) => TP.el("title", {}, `${arrow.tensors.join(", ")}: ${TP.bytes(arrow.bytes)} per micro-batch${arrow.back ? ", and a gradient back" : ""}`);
    const label = (x, y, text, anchor = "middle") => TP.el("text", { x, y, "text-anchor": anchor, class: "edge-label" }, text);
    const head = (x, y, turn) => TP.el("path", { d: "M0 0L-7 -4V4Z", transform: `translate(${x} ${y}) rotate(${turn})`, class: "edge-head" });
    for (const arrow of near) {
      const from = cards[arrow.source].offsetLeft + cards[arrow.source].offsetWidth;
      const to = cards[arrow.target].offsetLeft;
      const y = base + 34, middle = (from + to) / 2;
      svg.append(TP.el("g", {}, tip(arrow),
        TP.el("path", { d: `M${from + 3} ${y}H${to - 8}`, class: "edge" }), head(to - 3, y, 0),
        label(middle, y - 9, TP.bytes(arrow.bytes)),
        label(middle, y + 18, arrow.tensors.length > 1 ? `${arrow.tensors.length} tensors` : TP.shortened(arrow.tensors[0], 15)),
        arrow.back ? null : label(middle, y + 32, "no gradient")));
    }
    for (const arrow of far) {
      const from = cards[arrow.source].offsetLeft + cards[arrow.source].offsetWidth - 26;
      const to = cards[arrow.target].offsetLeft + 26;
      const y = base - 8 - arrow.level * LIFT;
      svg.append(TP.el("g", {}, tip(arrow),
        TP.el("path", { d: `M${from} ${base}V${y + 8}Q${from} ${y} ${from + 8} ${y}H${to - 8}Q${to} ${y} ${to} ${y + 8}V${base - 6}`, class: "edge far" }),
        head(to, base, 90),
        label(from + 14, y - 5, `${TP.bytes(arrow.bytes)} · ${arrow.tensors.length > 1 ? `${arrow.tensors.length} tensors` : TP.shortened(arrow.tensors[0], 22)} → stage ${arrow.target}`, "start")));
    }
  };

  TP.shortened = (text, most) => text.length <= most ? text : `${text.slice(0, most / 2 - 1)}…${text.slice(-most / 2)}`;

  TP.section({
    name: "graph",
    title: "The model, cut into stages",
    short: "Stages",
    order: 20,
    when: (view) => view.plan !== null,
    build(host, view) {
      const { plan } = view.plan;
      const arrows = arrowsOf(plan.edges);
      const near = arrows.filter((a) => a.target === a.source + 1);
      const far = arrows.filter((a) => a.target > a.source + 1);
      const depth = levels(far);
      const svg = TP.el("svg", { class: "edges", role: "img", "aria-label": "What crosses from stage to stage; the table below has it in words" });
      const cards = plan.stages.map((_, s) => card(plan, s));
      const row = TP.el("div", { class: "cards", style: {
        "--gap": `${GAP}px`, "--lift": `${depth * LIFT + 14}px`, "min-width": `${cards.length * (CARD + GAP) - GAP}px`,
      } }, svg, cards);
      host.append(
        TP.el("p", { class: "lead" }, `${TP.counted(plan.stages.reduce((n, stage) => n + stage.nodes.length, 0), "layer", "layers")} in ` +
          `${TP.counted(plan.stages.length, "stage", "stages")}. Arrows: what crosses for each micro-batch of ${TP.counted(Math.ceil(plan.mini_batch / plan.micro_batches), "sample", "samples")}.` +
          (view.plan.placement ? " What goes from stage to stage of one device is handed over without a message." : "")),
        TP.el("div", { class: "scroll wide", tabindex: "0", role: "region", "aria-label": "Stages" }, row));
      new ResizeObserver(() => draw(svg, cards, near, far, depth)).observe(row);
      if (plan.edges.length) {
        host.append(TP.asTable("What crosses, as a table", () => TP.table("What crosses from stage to stage",
          ["tensor", "from", "to", "gradient back", "per micro-batch"],
          plan.edges.map((edge, k) => [edge.tensor, `stage ${edge.source}`, `stage ${edge.target}`, edge.needs_grad ? "yes" : "no",
            TP.figure(`edges.${k}.bytes_per_micro_batch`, edge.bytes_per_micro_batch, TP.bytes(edge.bytes_per_micro_batch))]), 4)));
      }
    },
  });
})();
