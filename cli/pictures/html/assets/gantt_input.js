// The timeline under mouse, finger and keyboard: what an operation is, and following its mini-batch.
(() => {
  const LABELS = { F: "forward", B: "backward", W: "weight part of a backward", U: "update" };

  Object.assign(TP.Gantt.prototype, {
    /** Title and rows of an operation. */
    describe(span) {
      const { recording } = this;
      const { spans, messages, tensors, lanes, tick_s } = recording;
      const kind = recording.kind(span), lane = spans.lane[span];
      const start = recording.start(span), end = recording.end(span);
      const version = spans.version[span], used = spans.forward_version[span];
      const rows = [["mini-batch", `${spans.mini[span]}${spans.micro[span] < 0 ? "" : `, micro-batch ${spans.micro[span]}`}`]];
      rows.push(["time", `${TP.seconds(start, 4)} – ${TP.seconds(end, 4)} (${TP.seconds(end - start)})`]);
      if (version >= 0) rows.push(["weights", kind === "U" ? `makes version ${version}` : `version ${version}`]);
      if (used >= 0) {
        const apart = version - used;
        rows.push(["forward's", `version ${used}: ${apart ? `${TP.counted(apart, "update", "updates")} older` : "the same"}`]);
      }
      const { received, sent } = recording.messagesOf(span);
      const told = (list, word, other) => {
        for (const m of list.slice(0, 3)) {
          const way = (messages.end[m] - messages.sent[m]) * tick_s;
          rows.push([word, `${TP.bytes(messages.nbytes[m])} ${word === "receives" ? "from" : "to"} ` +
            `${lanes.name[other[m]]}, ${TP.seconds(way)} on the way (${tensors[messages.tensor[m]]})`]);
        }
        if (list.length > 3) {
          const bytes = list.slice(3).reduce((sum, m) => sum + messages.nbytes[m], 0);
          rows.push([word, `${TP.bytes(bytes)} in ${list.length - 3} more`]);
        }
      };
      told(received, "receives", messages.source);
      told(sent, "sends", messages.target);
      const row = recording.memoryAt(lane, start);
      if (row >= 0) rows.push(["holds", TP.bytes(recording.stateTotals[recording.memory.state[row]])]);
      return [`${recording.name(span)} · ${LABELS[kind]} · ${lanes.name[lane]}`, rows];
    },

    hover(x, y, event) {
      const lane = this.laneAt(y);
      const span = lane < 0 || x < this.left || x > this.right ? -1
        : this.recording.at(lane, this.time(x), 3 / this.scale);
      this.canvas.style.cursor = span < 0 ? "grab" : "pointer";
      if (span !== this.hovered) {
        this.hovered = span;
        this.group.redraw();
      }
      this.group.setCursor(x >= this.left && x <= this.right ? this.time(x) : null);
      if (span < 0) this.group.hideTip();
      else this.group.showTip(...this.describe(span), event.clientX, event.clientY);
    },

    leave() {
      this.hovered = -1;
      this.group.hideTip();
      this.group.setCursor(null);
    },

    click(x, y, event) {
      const lane = this.laneAt(y);
      const touch = event.pointerType === "touch";
      const span = lane < 0 ? -1 : this.recording.at(lane, this.time(x), (touch ? 14 : 3) / this.scale);
      this.focused = span;
      const mini = span < 0 ? -1 : this.recording.spans.mini[span];
      this.group.follow(mini === this.group.followed ? -1 : mini);
      if (touch && span >= 0) this.group.showTip(...this.describe(span), event.clientX, event.clientY);
    },

    /** Move the keyboard's focus to an operation, bring it in sight and say what it is. */
    focusOn(span) {
      if (span < 0) return;
      const { recording, group } = this;
      const lane = recording.spans.lane[span];
      this.focused = span;
      this.hovered = -1;
      this.revealLane(lane);
      group.reveal(recording.start(span), recording.end(span));
      group.setCursor(recording.start(span));
      const [title, rows] = this.describe(span);
      group.say(`${title}. ${rows.map((row) => row.join(" ")).join(". ")}`);
      group.showTip(title, rows, ...this.point(recording.end(span), lane));
      group.redraw();
    },

    key(key, shift) {
      const { recording, group } = this;
      const { spans } = recording;
      if (!spans.count) return false;
      if (key.startsWith("Arrow") && this.focused < 0) {
        const [lane] = this.lanesShown();
        const span = recording.nearest(lane, group.t0);
        this.focusOn(span >= 0 ? span : 0);
        return true;
      }
      const lane = this.focused < 0 ? 0 : spans.lane[this.focused];
      if (key === "ArrowRight" || key === "ArrowLeft") {
        const step = key === "ArrowRight" ? 1 : -1;
        const next = shift ? this.sameMini(step) : this.focused + step;
        if (next >= 0 && next < spans.count && spans.lane[next] === lane) this.focusOn(next);
      } else if (key === "ArrowDown" || key === "ArrowUp") {
        const other = lane + (key === "ArrowDown" ? 1 : -1);
        if (other >= 0 && other < recording.laneCount) {
          const middle = (recording.start(this.focused) + recording.end(this.focused)) / 2;
          this.focusOn(recording.nearest(other, middle));
        }
      } else if (key === "Home") this.focusOn(recording.laneBegin[lane]);
      else if (key === "End") this.focusOn(recording.laneBegin[lane + 1] - 1);
      else if ((key === "Enter" || key === " ") && this.focused >= 0) {
        const mini = spans.mini[this.focused];
        group.follow(mini === group.followed ? -1 : mini);
      } else if (key === "n" || key === "p") {
        const next = group.followed < 0 ? recording.firstMini : group.followed + (key === "n" ? 1 : -1);
        if (next >= recording.firstMini && next <= recording.lastMini) group.follow(next);
      } else return false;
      return true;
    },

    /** The next operation of the focused one's mini-batch on its lane; -1 for none. */
    sameMini(step) {
      const { spans } = this.recording;
      const lane = spans.lane[this.focused], mini = spans.mini[this.focused];
      let k = this.focused + step;
      while (k >= 0 && k < spans.count && spans.lane[k] === lane) {
        if (spans.mini[k] === mini) return k;
        k += step;
      }
      return -1;
    },
  });
})();
