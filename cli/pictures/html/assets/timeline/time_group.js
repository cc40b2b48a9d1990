// Charts that share a time axis: its range, toolbar, tool tip, cursor, and the mini-batch followed.
(() => {
  const LEAST_TICKS = 200;

  /** Texts of ticks, all in one unit and with as many digits as tell them apart. */
  TP.tickTexts = (ticks, step) => {
    const most = Math.max(...ticks.map(Math.abs), step);
    const [factor, unit] = most < 1e-3 ? [1e6, "µs"] : most < 1 ? [1e3, "ms"] : [1, "s"];
    const digits = Math.min(9, Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9)));
    return ticks.map((tick) => `${(tick * factor).toFixed(digits)} ${unit}`);
  };

  TP.TimeGroup = class {
    /**
     * @param host element in which the toolbar and the charts go
     * @param end_s where time ends; charts whose recordings are longer move it
     */
    constructor(host, end_s) {
      this.host = host;
      this.end_s = end_s || 1e-9;
      this.t0 = 0;
      this.t1 = this.end_s;
      this.charts = [];
      /** Right of the lanes, on wide windows; in pixels. */
      this.margin = 16;
      this.followed = -1;
      this.cursor = null;
      this.frame = 0;
      this.live = TP.el("p", { class: "hidden", "aria-live": "polite" });
      this.status = TP.el("p", { class: "status", role: "status" });
      this.range = TP.el("span", { class: "range" });
      this.tip = TP.el("div", { class: "tip", role: "tooltip", hidden: true });
      this.box = TP.el("div", { class: "time-group" });
      host.append(this.toolbar(), this.status, this.box, this.live);
      document.body.append(this.tip);
      TP.onTheme(() => this.redraw());
      this.show();
    }

    toolbar() {
      const button = (text, label, act) => TP.el("button", { type: "button", title: label, "aria-label": label, onclick: act }, text);
      const step = () => (this.t1 - this.t0) / 4;
      this.stop = TP.el("button", { type: "button", class: "stop", hidden: true, onclick: () => this.follow(-1) }, "Stop following");
      return TP.el("div", { class: "toolbar", role: "toolbar", "aria-label": "Time axis" },
        button("+", "Zoom in", () => this.zoom(0.5)),
        button("−", "Zoom out", () => this.zoom(2)),
        button("◀", "Earlier", () => this.pan(-step())),
        button("▶", "Later", () => this.pan(step())),
        button("Whole", "Show the whole time", () => this.set(0, this.end_s)),
        this.range, this.stop);
    }

    add(chart) {
      this.charts.push(chart);
      this.box.append(chart.node);
      if (chart.recording.end_s > this.end_s) {
        const whole = this.t0 === 0 && this.t1 === this.end_s;
        this.end_s = chart.recording.end_s;
        if (whole) this.t1 = this.end_s;
      }
      this.show();
    }

    // Range -------------------------------------------------------------------------------------

    set(t0, t1) {
      const least = Math.min(this.end_s, Math.max(this.end_s * 1e-7, LEAST_TICKS * 1e-9 * 1e-3));
      const span = Math.min(Math.max(t1 - t0, least), this.end_s);
      const middle = (t0 + t1) / 2;
      this.t0 = Math.min(Math.max(t1 - t0 === span ? t0 : middle - span / 2, 0), this.end_s - span);
      this.t1 = this.t0 + span;
      this.hideTip();
      this.show();
    }

    /** factor < 1 zooms in; `at` stays where it is. */
    zoom(factor, at = null) {
      const fixed = at === null ? this.cursor !== null && this.cursor >= this.t0 && this.cursor <= this.t1
        ? this.cursor : (this.t0 + this.t1) / 2 : at;
      const span = Math.min((this.t1 - this.t0) * factor, this.end_s);
      const share = (fixed - this.t0) / (this.t1 - this.t0);
      this.set(fixed - share * span, fixed - share * span + span);
    }

    pan(seconds) { this.set(this.t0 + seconds, this.t1 + seconds); }

    /** Move the range so that t0 to t1 is in it, if it isn't. */
    reveal(t0, t1) {
      const span = this.t1 - this.t0;
      if (t0 >= this.t0 && t1 <= this.t1) return;
      if (t1 - t0 > span) { this.set(t0 - span * 0.05, t0 + span * 0.95); return; }
      if (t0 < this.t0) this.set(t0 - span * 0.1, t0 + span * 0.9);
      else this.set(t1 - span * 0.9, t1 + span * 0.1);
    }

    show() {
      this.range.textContent = `${TP.seconds(this.t0)} – ${TP.seconds(this.t1)} of ${TP.seconds(this.end_s)}`;
      this.range.dataset.t0 = this.t0;
      this.range.dataset.t1 = this.t1;
      this.redraw();
    }

    redraw() {
      if (this.frame) return;
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        for (const chart of this.charts) chart.draw();
      });
    }

    // Following ---------------------------------------------------------------------------------

    /** Highlight a mini-batch in every chart; -1: none. */
    follow(mini) {
      this.followed = mini;
      this.stop.hidden = mini < 0;
      const parts = [];
      const { dataset } = this.status;
      delete dataset.forwardGroups;
      delete dataset.backwards;
      for (const chart of this.charts) {
        if (mini < 0 || !chart.tellsFollowed) continue;
        const found = chart.recording.follow(mini);
        if (!found.spans.length) continue;
        dataset.forwardGroups = found.forwardGroups;
        dataset.backwards = found.backwards;
        const each = found.forwards / found.forwardGroups;
        parts.push(`${this.charts.filter((c) => c.tellsFollowed).length > 1 ? `${chart.options.title}: ` : ""}${found.forwards} forwards in ` +
          `${TP.counted(found.forwardGroups, "stage", "stages")}${each > 1 ? ` (${TP.number(each)} each)` : ""}, ` +
          `${TP.counted(found.backwards, "backward", "backwards")} in ${TP.counted(found.backwardGroups, "stage", "stages")}, ` +
          `${TP.seconds(found.t0)} to ${TP.seconds(found.t1)}: ${TP.seconds(found.t1 - found.t0)} from end to end`);
      }
      this.status.textContent = mini < 0 ? "" : `Following mini-batch ${mini}: ${parts.join("; ")}.`;
      this.redraw();
    }

    // Tip and cursor ----------------------------------------------------------------------------

    /** A tool tip of a title and rows [name, text] near a point of the window. */
    showTip(title, rows, x, y) {
      this.tip.replaceChildren(TP.el("strong", {}, title),
        TP.el("dl", {}, rows.map(([name, text]) => [TP.el("dt", {}, name), TP.el("dd", {}, text)])));
      this.tip.hidden = false;
      const box = this.tip.getBoundingClientRect();
      const width = document.documentElement.clientWidth;
      const left = x + 16 + box.width > width ? Math.max(8, Math.min(x - box.width - 16, width - box.width - 8)) : x + 16;
      const top = y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 14) : y + 18;
      this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    }

    hideTip() { this.tip.hidden = true; }

    say(text) { this.live.textContent = text; }

    setCursor(time) {
      if (this.cursor === time) return;
      this.cursor = time;
      this.redraw();
    }
  };
})();
