// Fills of operations and memory for canvases, with the patterns that tell them apart in grey.
(() => {
  let cache = new Map();
  TP.onTheme(() => { cache = new Map(); });

  const kept = (name, make) => {
    if (!cache.has(name)) cache.set(name, make());
    return cache.get(name);
  };

  /** Fill of an operation: mini-batches that follow each other differ in lightness. */
  TP.opFill = (kind, mini) => {
    const { lightened } = TP.data.palette;
    const step = mini % lightened.length;
    return kept(`${kind}${step}`, () => TP.blended(TP.colour(`op-${kind}`), TP.colour("paper"), lightened[step]));
  };

  /** Ink on it. */
  TP.opInk = (kind, mini) => kept(`ink${kind}${mini % 3}`, () => {
    const fill = TP.opFill(kind, mini);
    const [r, g, b] = [1, 3, 5].map((k) => (parseInt(fill.slice(k, k + 2), 16) / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.3 ? "#0b1220" : "#ffffff";
  });

  const STROKES = {
    diagonal: (c) => { for (const k of [-6, 0, 6]) { c.moveTo(k, 6); c.lineTo(k + 6, 0); } },
    back: (c) => { for (const k of [-6, 0, 6]) { c.moveTo(k, 0); c.lineTo(k + 6, 6); } },
    cross: (c) => { c.moveTo(0, 6); c.lineTo(6, 0); c.moveTo(0, 0); c.lineTo(6, 6); },
    dots: (c) => { c.moveTo(2, 2); c.arc(2, 2, 0.6, 0, 7); c.moveTo(5, 5); c.arc(5, 5, 0.6, 0, 7); },
  };

  /** What is drawn over a fill; null for plain ones. */
  TP.pattern = (context, name, ink) => {
    if (!STROKES[name]) return null;
    return kept(`pattern ${name} ${ink}`, () => {
      const tile = TP.el("canvas", { width: 6, height: 6 });
      const c = tile.getContext("2d");
      c.strokeStyle = ink;
      c.globalAlpha = 0.5;
      c.lineWidth = 1;
      c.beginPath();
      STROKES[name](c);
      c.stroke();
      return context.createPattern(tile, "repeat");
    });
  };

  TP.operationLegend = (recording) => {
    const seen = new Set(recording.spans.kind);
    return TP.legend(Object.entries(TP.data.palette.operations)
      .filter(([kind]) => seen.has(TP.KINDS.indexOf(kind)))
      .map(([kind, [label, pattern]]) => [`${kind} ${label}`, `var(--op-${kind})`, pattern]));
  };

  TP.memoryLegend = (kinds, limit) => TP.legend([
    ...kinds.map((kind) => [TP.data.palette.memory[kind][0], `var(--mem-${kind})`, TP.data.palette.memory[kind][1]]),
    ...(limit ? [["limit", "var(--limit)", "rule"]] : []),
  ]);
})();
