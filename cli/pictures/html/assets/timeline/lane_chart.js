// A canvas with a lane for each worker, on a group's time axis; draws only the lanes in sight.
(() => {
  const AXIS = 24;
  TP.FONT = '11px Inter, system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

  TP.LaneChart = class {
    /**
     * @param options.title heading
     * @param options.describe what it is, for screen readers
     * @param options.lane [least, most] pixels of a lane; @param options.cap most of all lanes
     * @param options.axis "top" or "bottom"
     */
    constructor(group, recording, options) {
      this.group = group;
      this.recording = recording;
      this.options = options;
      const [least, most] = options.lane;
      const lanes = recording.laneCount;
      this.laneHeight = Math.max(least, Math.min(most, Math.floor(options.cap / lanes)));
      this.total = lanes * this.laneHeight;
      this.height = Math.min(this.total, options.cap) + AXIS;
      this.canvas = TP.el("canvas", {
        tabindex: "0", role: "application", "aria-roledescription": options.role,
        "aria-label": options.describe, class: options.name,
      });
      this.scroller = TP.el("div", { class: "lanes", style: { height: `${this.height}px` } },
        TP.el("div", { style: { height: `${this.total + AXIS}px` } }, this.canvas));
      this.node = TP.el("figure", { class: "chart" },
        TP.el("figcaption", {}, TP.el("h3", {}, options.title), options.legend || null), this.scroller);
      this.scroller.addEventListener("scroll", () => group.redraw(), { passive: true });
      new ResizeObserver(() => { this.measure(); group.redraw(); }).observe(this.scroller);
    }

    measure() {
      const ratio = devicePixelRatio || 1;
      this.width = this.scroller.clientWidth;
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.width = `${this.width}px`;
      this.canvas.style.height = `${this.height}px`;
      this.ratio = ratio;
      this.left = this.width < 560 ? 44 : 108;
      this.right = this.width - (this.width < 560 ? 6 : this.group.margin);
      this.top = this.options.axis === "top" ? AXIS : 0;
      this.bottom = this.height - (this.options.axis === "bottom" ? AXIS : 0);
    }

    // Places ------------------------------------------------------------------------------------

    get scale() { return (this.right - this.left) / (this.group.t1 - this.group.t0); }
    x(time) { return this.left + (time - this.group.t0) * this.scale; }
    time(x) { return this.group.t0 + (x - this.left) / this.scale; }
    y(lane) { return this.top + lane * this.laneHeight - this.scroller.scrollTop; }

    laneAt(y) {
      const lane = Math.floor((y - this.top + this.scroller.scrollTop) / this.laneHeight);
      return y < this.top || y >= this.bottom || lane < 0 || lane >= this.recording.laneCount ? -1 : lane;
    }

    /** The lanes in sight: [first, end). */
    lanesShown() {
      const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.laneHeight));
      const end = Math.ceil((this.scroller.scrollTop + this.bottom - this.top) / this.laneHeight);
      return [first, Math.min(end, this.recording.laneCount)];
    }

    revealLane(lane) {
      const top = lane * this.laneHeight, room = this.bottom - this.top;
      if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
      else if (top + this.laneHeight > this.scroller.scrollTop + room) this.scroller.scrollTop = top + this.laneHeight - room;
    }

    /** A point of the window for the tool tip of a time on a lane. */
    point(time, lane) {
      const box = this.canvas.getBoundingClientRect();
      return [box.left + Math.min(Math.max(this.x(time), this.left), this.right), box.top + this.y(lane) + this.laneHeight / 2];
    }

    // Drawing -----------------------------------------------------------------------------------

    draw() {
      if (!this.width) { this.measure(); if (!this.width) return; }
      const context = this.canvas.getContext("2d");
      context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      context.clearRect(0, 0, this.width, this.height);
      context.font = TP.FONT;
      context.save();
      context.beginPath();
      context.rect(0, this.top, this.width, this.bottom - this.top);
      context.clip();
      this.grid(context);
      context.save();
      context.beginPath();
      context.rect(this.left, this.top, this.right - this.left, this.bottom - this.top);
      context.clip();
      this.paint(context);
      this.cursorLine(context);
      context.restore();
      this.names(context);
      context.restore();
      this.axis(context);
    }

    ticks() {
      const { t0, t1 } = this.group;
      const step = TP.niceStep(t1 - t0, (this.right - this.left) / 92);
      const found = [];
      for (let k = Math.ceil(t0 / step - 1e-9); k * step <= t1 * (1 + 1e-12); k++) found.push(k * step);
      return [found, step];
    }

    grid(context) {
      const [first, end] = this.lanesShown();
      context.fillStyle = TP.colour("band");
      for (let lane = first; lane < end; lane++) {
        if (lane % 2 === 0) context.fillRect(this.left, this.y(lane), this.right - this.left, this.laneHeight);
      }
      context.fillStyle = TP.colour("line");
      for (const tick of this.ticks()[0]) context.fillRect(Math.round(this.x(tick)), this.top, 1, this.bottom - this.top);
    }

    axis(context) {
      const [ticks, step] = this.ticks();
      const texts = TP.tickTexts(ticks, step);
      const top = this.options.axis === "top";
      const y = top ? AXIS - 8 : this.height - 7;
      context.fillStyle = TP.colour("faint");
      context.textBaseline = "alphabetic";
      context.textAlign = "center";
      let free = -Infinity;
      ticks.forEach((tick, k) => {
        const width = context.measureText(texts[k]).width;
        const x = Math.min(Math.max(this.x(tick), width / 2 + 2), this.width - width / 2 - 2);
        if (x - width / 2 < free + 8) return;
        context.fillText(texts[k], x, y);
        free = x + width / 2;
      });
      context.fillStyle = TP.colour("edge");
      context.fillRect(this.left, top ? AXIS - 1 : this.bottom, this.right - this.left, 1);
    }

    names(context) {
      const { lanes } = this.recording;
      const [first, end] = this.lanesShown();
      const every = Math.ceil(13 / this.laneHeight);
      context.fillStyle = TP.colour("ink");
      context.textAlign = "right";
      context.textBaseline = "middle";
      for (let lane = first; lane < end; lane++) {
        if (lane % every) continue;
        let text = lanes.name[lane].replace(" replica ", ".");
        // Of devices with their stages, those.
        if (lanes.stages) text = text.slice(text.indexOf(": ") + 2);
        if (context.measureText(text).width > this.left - 10) text = text.replace("stages ", "s");
        if (context.measureText(text).width > this.left - 10) text = text.replace("stage ", "s");
        context.fillText(text, this.left - 8, this.nameY(lane));
      }
    }

    nameY(lane) { return Math.max(this.y(lane) + this.laneHeight / 2, this.top + 6); }

    cursorLine(context) {
      if (this.group.cursor === null) return;
      context.fillStyle = TP.colour("accent");
      context.fillRect(Math.round(this.x(this.group.cursor)), this.top, 1, this.bottom - this.top);
    }

    // Input: the wheel, dragging and pinching move the time axis ----------------------------------

    listen() {
      const { canvas, group } = this;
      const fingers = new Map();
      let drag = null, pinch = null;
      const place = (event) => {
        const box = canvas.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      canvas.addEventListener("wheel", (event) => {
        // A wheel that only passes over the page scrolls it: zooming needs the focus, or Ctrl.
        if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          event.preventDefault();
          group.pan((event.deltaX || event.deltaY) / this.scale);
        } else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) {
          event.preventDefault();
          const notches = event.deltaMode === 1 ? event.deltaY / 3 : event.deltaY / 100;
          group.zoom(1.35 ** Math.max(-3, Math.min(3, notches)), this.time(place(event)[0]));
        }
      }, { passive: false });
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        fingers.set(event.pointerId, place(event));
        canvas.setPointerCapture(event.pointerId);
        if (fingers.size === 2) {
          drag = null;
          const [a, b] = [...fingers.values()];
          pinch = [this.time(a[0]), this.time(b[0])];
        } else {
          drag = { x: place(event)[0], t0: group.t0, t1: group.t1, scale: this.scale, moved: false };
        }
      });
      canvas.addEventListener("pointermove", (event) => {
        const [x, y] = place(event);
        if (fingers.has(event.pointerId)) fingers.set(event.pointerId, [x, y]);
        if (pinch && fingers.size === 2) {
          const [a, b] = [...fingers.values()];
          const apart = b[0] - a[0];
          if (Math.abs(apart) < 12) return;
          const scale = apart / (pinch[1] - pinch[0]);
          if (!(scale > 0)) return;
          const t0 = pinch[0] - (a[0] - this.left) / scale;
          group.set(t0, t0 + (this.right - this.left) / scale);
        } else if (drag) {
          if (Math.abs(x - drag.x) > 4) drag.moved = true;
          if (drag.moved) {
            const by = (drag.x - x) / drag.scale;
            group.set(drag.t0 + by, drag.t1 + by);
          }
        } else if (event.pointerType !== "touch") {
          this.hover(x, y, event);
        }
      });
      const done = (event) => {
        const was = drag;
        fingers.delete(event.pointerId);
        if (fingers.size < 2) pinch = null;
        if (!fingers.size) drag = null;
        if (event.type === "pointerup" && was && !was.moved) {
          canvas.focus({ preventScroll: true });
          this.click(...place(event), event);
        }
      };
      canvas.addEventListener("pointerup", done);
      canvas.addEventListener("pointercancel", done);
      canvas.addEventListener("pointerleave", () => this.leave());
      canvas.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (this.key(event.key, event.shiftKey) || this.axisKey(event.key)) event.preventDefault();
      });
      canvas.addEventListener("blur", () => { group.hideTip(); group.setCursor(null); });
    }

    axisKey(key) {
      const { group } = this;
      const quarter = (group.t1 - group.t0) / 4;
      if (key === "+" || key === "=") group.zoom(0.5);
      else if (key === "-" || key === "_") group.zoom(2);
      else if (key === "0") group.set(0, group.end_s);
      else if (key === "PageUp") group.pan(-quarter);
      else if (key === "PageDown") group.pan(quarter);
      else if (key === "Escape") {
        if (group.followed < 0 && group.tip.hidden) return false;
        group.follow(-1);
        group.hideTip();
      } else return false;
      return true;
    }

    hover() {}
    click() {}
    leave() { this.group.hideTip(); }
    key() { return false; }
  };
})();

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
    const kinds = Object.entries(TP.data.palette.operations)
      .filter(([kind]) => seen.has(TP.KINDS.indexOf(kind)))
      .map(([kind, [label, pattern]]) => [`${kind} ${label}`, `var(--op-${kind})`, pattern]);
    const most = recording.mostStages;
    if (most < 2) return TP.legend(kinds);
    const ordinal = (n) => `${n}${Math.floor(n / 10) % 10 === 1 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[n % 10] || "th"}`;
    // Each with the first of those that look the same.
    const stages = [0, 1, 2, 3].slice(0, most).map((k) => {
      const alike = [k + 1, k + 5, k + 9].filter((n) => n <= most).map(ordinal).join(", ");
      return [`${alike}${k + 13 <= most ? ", …" : ""} stage${k ? "" : " of a device"}`, "var(--band)", `rules rules-${k}`];
    });
    return TP.legend([...kinds, ...stages]);
  };

  TP.memoryLegend = (kinds, limit, free = false) => TP.legend([
    ...kinds.map((kind) => [TP.data.palette.memory[kind][0], `var(--mem-${kind})`, TP.data.palette.memory[kind][1]]),
    ...(limit ? [["limit", "var(--limit)", "rule"]] : []),
    ...(free ? [["kept free", "var(--limit)", "free"]] : []),
  ]);
})();
