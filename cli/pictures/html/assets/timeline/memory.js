// Memory over time: a strip for each worker, stacked by kind, against its limit.
(() => {
  TP.Memory = class extends TP.LaneChart {
    /** @param options.limits bytes for each lane, null where there is none */
    constructor(group, recording, { title, limits = [] }) {
      const peak = recording.peak;
      const least = Math.min(...limits.filter((limit) => limit !== null && limit !== undefined));
      const near = least < 2.5 * peak;
      super(group, recording, {
        title,
        name: "memory",
        role: "memory chart",
        axis: "bottom",
        lane: [34, 88],
        cap: 460,
        legend: TP.memoryLegend(recording.kindsHeld(), near),
        describe: `${title}: memory over time of ${TP.counted(recording.laneCount, "worker", "workers")}. Left and right arrow ` +
          "keys move in time, up and down between workers; plus and minus zoom.",
      });
      this.limits = limits;
      // A limit far above the peak would press everything flat: then the peak is the scale.
      this.most = (near ? Math.max(least, peak) : peak) * 1.08 || 1;
      this.peaks = recording.lanes.name.map((_, lane) => recording.lanePeak(lane));
      this.lane = 0;
      this.row = -1;
      this.listen();
      group.add(this);
    }

    paint(context) {
      const [first, end] = this.lanesShown();
      for (let lane = first; lane < end; lane++) this.strip(context, lane);
    }

    strip(context, lane) {
      const { recording, group } = this;
      const { memory, stateTotals, memoryKinds, tick_s } = recording;
      const low = recording.memoryBegin[lane], high = recording.memoryBegin[lane + 1];
      if (low === high) return;
      const floor = this.y(lane) + this.laneHeight - 1, tall = this.laneHeight - 6;
      const perByte = tall / this.most;
      // One state for each pixel column, the largest in it, so that no peak is lost; what holds at
      // the column's end goes on from there.
      const from = Math.max(low, TP.firstAfter(memory.at, low, high, group.t0 / tick_s) - 1);
      const runs = [];
      let column = 0, best = -1, last = -1;
      const add = (x, state, until) => {
        const run = runs[runs.length - 1];
        if (run && run[1] === state && run[2] === x) run[2] = until;
        else if (until > x) runs.push([x, state, until]);
      };
      const close = (until) => {
        if (best < 0) return;
        const end = best === last ? until : Math.min(column + 1 / this.ratio, until);
        add(column, best, end);
        add(end, last, until);
      };
      for (let k = from; k < high; k++) {
        const x = Math.floor(Math.max(this.x(memory.at[k] * tick_s), this.left) * this.ratio) / this.ratio;
        if (x > this.right) break;
        last = best < 0 ? memory.state[k] : last;
        if (x !== column) { close(x); column = x; best = memory.state[k]; }
        else if (best < 0 || stateTotals[memory.state[k]] > stateTotals[best]) best = memory.state[k];
        last = memory.state[k];
      }
      close(this.ends());
      const kinds = memoryKinds.length;
      const heights = new Float64Array(runs.length);
      memoryKinds.forEach((kind, position) => {
        const pattern = TP.pattern(context, TP.data.palette.memory[kind][1], TP.colour(`mem-${kind}-ink`));
        for (const fill of pattern && this.laneHeight > 40 ? [TP.colour(`mem-${kind}`), pattern] : [TP.colour(`mem-${kind}`)]) {
          context.fillStyle = fill;
          runs.forEach(([x, state, until], k) => {
            const bytes = recording.states[state * kinds + position];
            if (bytes) context.fillRect(x, floor - (heights[k] + bytes) * perByte, until - x, bytes * perByte);
          });
        }
        runs.forEach(([, state], k) => { heights[k] += recording.states[state * kinds + position]; });
      });
      this.limit(context, lane, floor, perByte);
    }

    /** Where the recording ends. */
    ends() { return Math.min(this.right, this.x(this.recording.end_s)); }

    limit(context, lane, floor, perByte) {
      const limit = this.limits[lane];
      if (limit === null || limit === undefined || limit > this.most) return;
      context.strokeStyle = TP.colour("limit");
      context.lineWidth = 1.5;
      context.setLineDash([6, 3]);
      context.beginPath();
      context.moveTo(this.left, floor - limit * perByte);
      context.lineTo(this.right, floor - limit * perByte);
      context.stroke();
      context.setLineDash([]);
    }

    nameY(lane) { return this.y(lane) + (this.laneHeight > 44 ? 20 : this.laneHeight / 2 - 6); }

    names(context) {
      super.names(context);
      const [first, end] = this.lanesShown();
      context.fillStyle = TP.colour("faint");
      for (let lane = first; lane < end; lane++) {
        const text = TP.bytes(this.peaks[lane]);
        const short = context.measureText(text).width > this.left - 10 ? text.replace("iB", "").replace(/\.\d/, "") : text;
        context.fillText(short, this.left - 8, this.nameY(lane) + 14);
      }
      context.fillStyle = TP.colour("edge");
      for (let lane = first; lane < end; lane++) context.fillRect(this.left, this.y(lane) + this.laneHeight - 1, this.right - this.left, 1);
    }

    /** Title and rows of what a lane holds. */
    describe(lane, row) {
      const { recording } = this;
      const total = recording.stateTotals[recording.memory.state[row]];
      const rows = [["total", TP.bytes(total)]];
      recording.bytesOf(row).forEach((bytes, k) => {
        if (bytes) rows.push([TP.data.palette.memory[recording.memoryKinds[k]][0], TP.bytes(bytes)]);
      });
      const limit = this.limits[lane];
      if (limit) rows.push(["limit", `${TP.bytes(limit)} (${TP.percent(total / limit)} used)`]);
      return [`${recording.lanes.name[lane]} at ${TP.seconds(recording.memory.at[row] * recording.tick_s, 4)}`, rows];
    }

    hover(x, y, event) {
      const lane = this.laneAt(y);
      const inside = lane >= 0 && x >= this.left && x <= this.right;
      this.group.setCursor(inside ? this.time(x) : null);
      const row = inside ? this.recording.memoryAt(lane, this.time(x)) : -1;
      if (row < 0) this.group.hideTip();
      else this.group.showTip(...this.describe(lane, row), event.clientX, event.clientY);
    }

    click(x, y, event) {
      this.lane = Math.max(0, this.laneAt(y));
      this.row = this.recording.memoryAt(this.lane, this.time(x));
      this.hover(x, y, event);
    }

    leave() {
      this.group.hideTip();
      this.group.setCursor(null);
    }

    key(key) {
      const { recording, group } = this;
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
      if (!moves || !recording.memory.count) return false;
      const [lanes, rows] = moves;
      const at = this.row < 0 ? group.t0 : recording.memory.at[this.row] * recording.tick_s;
      const lane = Math.min(Math.max(this.lane + lanes, 0), recording.laneCount - 1);
      const low = recording.memoryBegin[lane], high = recording.memoryBegin[lane + 1];
      if (low === high) return true;
      const row = this.row < 0 || lanes ? Math.max(recording.memoryAt(lane, at), low) : this.row + rows;
      this.lane = lane;
      this.row = Math.min(Math.max(row, low), high - 1);
      const time = recording.memory.at[this.row] * recording.tick_s;
      this.revealLane(lane);
      group.reveal(time, time);
      group.setCursor(time);
      const [title, said] = this.describe(lane, this.row);
      group.say(`${title}: ${said.map((pair) => pair.join(" ")).join(", ")}`);
      group.showTip(title, said, ...this.point(time, lane));
      return true;
    }
  };
})();
