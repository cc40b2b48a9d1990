// The timeline: what every worker does when. Draws what is in sight, and merges what is too small.
(() => {
  const NARROW = 1.2, DIM = 0.13, MOST_ARROWS = 400, STRENGTHS = 5;
  const styled = (kind, step, lit, strength) => ((step * 4 + kind) * 2 + (lit ? 1 : 0)) * STRENGTHS + strength;

  TP.Gantt = class extends TP.LaneChart {
    constructor(group, recording, { title }) {
      super(group, recording, {
        title,
        name: "gantt",
        role: "timeline",
        axis: "top",
        lane: [9, 34],
        cap: 620,
        legend: TP.el("div", { class: "beside" }, TP.operationLegend(recording), recording.lastPeriod
          ? TP.el("span", { class: "period" }, `┆ period ${TP.seconds(recording.period_s)}`) : null),
        describe: `${title}: timeline of ${TP.counted(recording.laneCount, "worker", "workers")}. Arrow keys move between ` +
          "operations, Enter follows an operation's mini-batch, Escape ends it, plus and minus zoom, Page Up and Page Down move in time.",
      });
      this.tellsFollowed = true;
      this.focused = -1;
      this.hovered = -1;
      if (recording.idleShares.some((share) => share !== null)) group.margin = 66;
      this.listen();
      group.add(this);
    }

    /** Names of lanes on the left; on the right, how much of a period each is idle. */
    names(context) {
      super.names(context);
      if (this.group.margin < 60 || this.width < 560 || this.laneHeight < 11) return;
      const [first, end] = this.lanesShown();
      context.fillStyle = TP.colour("faint");
      context.textAlign = "left";
      for (let lane = first; lane < end; lane++) {
        const share = this.recording.idleShares[lane];
        if (share !== null && share !== undefined) context.fillText(`${TP.share(share)} idle`, this.right + 6, this.nameY(lane));
      }
    }

    /** Lines at both ends of the last period that is shown at first. */
    periodLines(context) {
      if (!this.recording.lastPeriod) return;
      context.strokeStyle = TP.colour("ink");
      context.lineWidth = 1.2;
      context.setLineDash([4, 3]);
      context.beginPath();
      for (const time of this.recording.lastPeriod) {
        const x = Math.min(Math.round(this.x(time)), this.right - 1) + 0.5;
        context.moveTo(x, this.top);
        context.lineTo(x, this.bottom);
      }
      context.stroke();
      context.setLineDash([]);
    }

    paint(context) {
      const [first, end] = this.lanesShown();
      this.drawn = { operations: 0, merged: 0, highlighted: 0, arrows: 0 };
      this.fills = [];
      this.wide = [];
      this.ruled = [];
      for (let lane = first; lane < end; lane++) this.place(lane);
      const followed = this.group.followed;
      this.fills.forEach((boxes, style) => {
        const strength = style % STRENGTHS, lit = Math.floor(style / STRENGTHS) % 2;
        const shade = Math.floor(style / STRENGTHS / 2);
        context.fillStyle = TP.opFill(TP.KINDS[shade % 4], Math.floor(shade / 4));
        context.globalAlpha = (lit ? 1 : DIM) * (strength / (STRENGTHS - 1));
        for (let k = 0; k < boxes.length; k += 4) context.fillRect(boxes[k], boxes[k + 1], boxes[k + 2], boxes[k + 3]);
      });
      this.details(context, followed);
      context.globalAlpha = 1;
      this.periodLines(context);
      if (followed >= 0) this.arrows(context, this.recording.follow(followed).messages);
      else if (this.hovered >= 0 || this.focused >= 0) {
        const { received, sent } = this.recording.messagesOf(this.hovered >= 0 ? this.hovered : this.focused);
        this.arrows(context, [...received, ...sent]);
      }
      this.ring(context, this.hovered, 1.5);
      this.ring(context, this.focused, 2.5);
    }

    /** style: shade of mini-batches, kind, lit or dimmed, and strength, as one number. */
    add(style, x, y, width, height) {
      let boxes = this.fills[style];
      if (!boxes) this.fills[style] = boxes = [];
      boxes.push(x, y, width, height);
    }

    /** Lay out a lane: boxes of operations, and columns of one pixel where they are narrower. */
    place(lane) {
      const { recording, group, scale, left } = this;
      const { tick_s } = recording;
      const { start, end: ends, mini: minis, kind: kinds } = recording.spans;
      const { followed, t0 } = group;
      const [first, end] = recording.visible(lane, group.t0, group.t1);
      const inset = this.laneHeight > 14 ? 3 : this.laneHeight > 6 ? 1 : 0;
      const y = this.y(lane) + inset, height = this.laneHeight - 2 * inset;
      const shades = TP.data.palette.lightened.length;
      let column = -1, run = null;
      const cover = [0, 0, 0, 0];
      let lit = false, step = 0;
      // Columns next to each other that look the same become one box.
      const put = () => {
        if (run) this.add(run.style, run.x, y, run.width, height);
        run = null;
      };
      const flush = () => {
        if (column < 0) return;
        let kind = 0;
        for (let k = 1; k < 4; k++) if (cover[k] > cover[kind]) kind = k;
        const strength = Math.min(4, Math.max(1, Math.ceil(4 * (cover[0] + cover[1] + cover[2] + cover[3]))));
        const style = styled(kind, step, lit || followed < 0, lit ? 4 : strength);
        if (run && run.style === style && run.x + run.width === column) run.width += 1;
        else { put(); run = { style, x: column, width: 1 }; }
        column = -1;
        cover.fill(0);
        lit = false;
      };
      for (let k = first; k < end; k++) {
        const x = left + (start[k] * tick_s - t0) * scale;
        const width = (ends[k] - start[k]) * tick_s * scale;
        const shown = followed < 0 || minis[k] === followed;
        this.drawn.operations++;
        if (shown && followed >= 0) this.drawn.highlighted++;
        if (width >= NARROW) {
          flush();
          put();
          const gap = width > 5 ? 1 : 0;
          this.add(styled(kinds[k], minis[k] % shades, shown, 4), x, y, width - gap, height);
          if (recording.several(lane) && recording.rules(k)) this.ruled.push(k, x, y, width - gap, height, shown ? 1 : DIM);
          if (width > 9 && (shown || followed < 0)) this.wide.push(k, x, y, width - gap, height);
        } else {
          this.drawn.merged++;
          const at = Math.floor(x);
          if (at !== column) { flush(); column = at; step = minis[k] % shades; }
          // What is followed, and marks of no length, stay to be seen.
          if (shown && followed >= 0 && !lit) { lit = true; step = minis[k] % shades; cover.fill(0); }
          if (!lit || shown) cover[kinds[k]] += Math.max(width, 0.02);
        }
      }
      flush();
      put();
    }

    /** Rules along the upper edge tell the stages of a lane apart: none of its first, one of its second. */
    rules(context) {
      const { spans } = this.recording;
      for (let k = 0; k < this.ruled.length; k += 6) {
        const [span, x, y, width, height, alpha] = this.ruled.slice(k, k + 6);
        context.fillStyle = TP.opInk(TP.KINDS[spans.kind[span]], spans.mini[span]);
        context.globalAlpha = alpha;
        for (let rule = 0; rule < this.recording.rules(span); rule++) {
          context.fillRect(x, y + height * (0.05 + 0.17 * rule), width, Math.max(1, height * 0.1));
        }
      }
      context.globalAlpha = 1;
    }

    /** Patterns and labels of operations that have room for them. */
    details(context) {
      const { spans } = this.recording;
      context.globalAlpha = 1;
      context.textAlign = "center";
      context.textBaseline = "middle";
      this.rules(context);
      const tall = this.wide.length && this.wide[4] >= 11;
      for (let k = 0; k < this.wide.length; k += 5) {
        const span = this.wide[k], x = this.wide[k + 1], y = this.wide[k + 2];
        const width = this.wide[k + 3], height = this.wide[k + 4];
        const kind = TP.KINDS[spans.kind[span]];
        const ink = TP.opInk(kind, spans.mini[span]);
        const pattern = TP.pattern(context, TP.data.palette.operations[kind][1], ink);
        if (pattern) { context.fillStyle = pattern; context.fillRect(x, y, width, height); }
        if (!tall) continue;
        // The label stays in sight while part of its operation is.
        const from = Math.max(x, this.left), to = Math.min(x + width, this.right);
        const micro = spans.micro[span];
        const numbers = `${spans.mini[span]}${micro < 0 ? "" : `.${micro}`}`;
        const stage = this.recording.several(spans.lane[span]) ? this.recording.stage(span) : null;
        const staged = stage === null ? [] : [`${stage}${kind}${numbers}`, `${stage}:${numbers}`, `${stage}:${spans.mini[span]}`];
        const text = [...staged, `${kind}${numbers}`, numbers, `${spans.mini[span]}`].find((t) => t.length * 6.3 + 5 <= to - from);
        if (!text) continue;
        if (pattern) {
          context.fillStyle = TP.opFill(kind, spans.mini[span]);
          const room = text.length * 6.3 + 4;
          context.fillRect((from + to - room) / 2, y + 1, room, height - 2);
        }
        context.fillStyle = ink;
        context.fillText(text, (from + to) / 2, y + height / 2 + 0.5);
      }
    }

    /** Messages, from the end of what makes them to when they are there. */
    arrows(context, messages) {
      const { recording, group } = this;
      const { source, target, sent, end, backward } = recording.messages;
      const tick = recording.tick_s;
      const seen = messages.filter((m) => end[m] * tick >= group.t0 && sent[m] * tick <= group.t1);
      // Of very many, those of some micro-batches stand for all.
      const every = Math.ceil(seen.length / MOST_ARROWS);
      const shown = every > 1 ? seen.filter((m) => recording.messages.micro[m] % every <= 0) : seen;
      const many = shown.length > MOST_ARROWS / 2;
      context.lineWidth = many ? 0.6 : 1.3;
      for (const back of [0, 1]) {
        context.strokeStyle = context.fillStyle = TP.colour(back ? "arrow-back" : "arrow");
        context.globalAlpha = many ? 0.3 : 0.9;
        context.setLineDash(back && !many ? [4, 3] : []);
        const heads = [];
        context.beginPath();
        for (const m of shown) {
          if (backward[m] !== back) continue;
          const down = target[m] > source[m];
          const x0 = this.x(sent[m] * tick), x1 = this.x(end[m] * tick);
          const y0 = this.y(source[m]) + this.laneHeight / 2 + (down ? 1 : -1) * (this.laneHeight / 2 - 3);
          const y1 = this.y(target[m]) + this.laneHeight / 2 - (down ? 1 : -1) * (this.laneHeight / 2 - 2);
          const dx = x1 - x0, dy = y1 - y0;
          context.moveTo(x0, y0);
          // Steep ones are straight, with heads in their direction; others leave and come level.
          const steep = many || dx < Math.abs(dy);
          if (steep) context.lineTo(x1, y1);
          else context.bezierCurveTo(x0 + dx / 2, y0, x1 - dx / 2, y1, x1, y1);
          heads.push([x1, y1, steep ? Math.atan2(dy, dx) : 0]);
          this.drawn.arrows++;
        }
        context.stroke();
        context.setLineDash([]);
        if (many) continue;
        context.beginPath();
        for (const [x, y, angle] of heads) {
          context.moveTo(x, y);
          for (const side of [-0.45, 0.45]) {
            context.lineTo(x - 7 * Math.cos(angle + side), y - 7 * Math.sin(angle + side));
          }
        }
        context.fill();
      }
      context.globalAlpha = 1;
    }

    ring(context, span, thickness) {
      if (span < 0) return;
      const lane = this.recording.spans.lane[span];
      const x = this.x(this.recording.start(span));
      const width = Math.max(this.x(this.recording.end(span)) - x, 3);
      context.strokeStyle = TP.colour("ink");
      context.lineWidth = thickness;
      context.strokeRect(x - 0.5, this.y(lane) + 1.5, width, this.laneHeight - 3);
    }
  };
})();

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
      const other = (lane, stages, m) => stages && recording.several(lane) ? `stage ${stages[m]} (${lanes.name[lane]})` : lanes.name[lane];
      const told = (list, word, ends, stages) => {
        for (const m of list.slice(0, 3)) {
          const way = (messages.end[m] - messages.sent[m]) * tick_s;
          rows.push([word, `${TP.bytes(messages.nbytes[m])} ${word === "receives" ? "from" : "to"} ` +
            `${other(ends[m], stages, m)}, ${TP.seconds(way)} on the way (${tensors[messages.tensor[m]]})`]);
        }
        if (list.length > 3) {
          const bytes = list.slice(3).reduce((sum, m) => sum + messages.nbytes[m], 0);
          rows.push([word, `${TP.bytes(bytes)} in ${list.length - 3} more`]);
        }
      };
      told(received, "receives", messages.source, messages.source_stage);
      told(sent, "sends", messages.target, messages.target_stage);
      const row = recording.memoryAt(lane, start);
      if (row >= 0) rows.push(["holds", TP.bytes(recording.stateTotals[recording.memory.state[row]])]);
      const stage = recording.several(lane) ? `stage ${recording.stage(span)} · ` : "";
      return [`${recording.name(span)} · ${LABELS[kind]} · ${stage}${lanes.name[lane]}`, rows];
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
