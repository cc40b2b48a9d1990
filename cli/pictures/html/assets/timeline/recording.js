// A recording: columns of numbers, decoded to typed arrays, and what charts ask of them.
(() => {
  const ARRAYS = { u1: Uint8Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };

  const unpacked = (text) => {
    const raw = atob(text.slice(3));
    const bytes = new Uint8Array(raw.length);
    for (let k = 0; k < raw.length; k++) bytes[k] = raw.charCodeAt(k);
    return new ARRAYS[text.slice(0, 2)](bytes.buffer);
  };

  const table = (columns) => {
    const found = {};
    for (const [name, column] of Object.entries(columns)) {
      found[name] = typeof column === "string" ? unpacked(column) : column;
    }
    return found;
  };

  const ends = (lanes, count, of) => {
    // Rows sorted by lane: where each lane's begin, and after the last, where they end.
    const begin = new Uint32Array(lanes + 1);
    for (let k = 0; k < count; k++) begin[of[k] + 1]++;
    for (let lane = 0; lane < lanes; lane++) begin[lane + 1] += begin[lane];
    return begin;
  };

  /** First row in [low, high) whose number in `column` is more than `limit`. */
  const after = (column, low, high, limit) => {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (column[middle] > limit) high = middle;
      else low = middle + 1;
    }
    return low;
  };

  TP.KINDS = ["F", "B", "W", "U"];
  /** Where a lane has more stages than this and one, their marks begin anew. */
  TP.MOST_RULES = 3;

  TP.Recording = class {
    /** The last period of what is shown at first: [begin, end] in seconds; null where it isn't in it. */
    get lastPeriod() {
      const [begin, end] = this.window || [0, this.end_s];
      return this.period_s > 0 && end - this.period_s >= begin - 1e-9 * end ? [end - this.period_s, end] : null;
    }

    constructor(columns) {
      this.source = columns.source;
      this.variant = columns.variant;
      this.period_s = columns.period_s;
      this.end_s = columns.end_s;
      this.idleShares = columns.idle_shares || [];
      /** What is shown at first: [begin, end] in seconds; null: all. */
      this.window = columns.window || null;
      this.tick_s = columns.tick_s;
      this.lanes = columns.lanes;
      this.spans = table(columns.spans);
      this.messages = table(columns.messages);
      this.tensors = columns.tensors;
      this.memory = table(columns.memory);
      this.memoryKinds = columns.memory_kinds;
      this.states = unpacked(columns.states);
      const lanes = this.laneCount;
      this.laneBegin = ends(lanes, this.spans.count, this.spans.lane);
      this.memoryBegin = ends(lanes, this.memory.count, this.memory.lane);
      this.stateTotals = new Float64Array(this.states.length / this.memoryKinds.length);
      this.states.forEach((bytes, k) => { this.stateTotals[Math.floor(k / this.memoryKinds.length)] += bytes; });
      let first = Infinity, last = -1;
      for (const mini of this.spans.mini) { if (mini < first) first = mini; if (mini > last) last = mini; }
      this.firstMini = this.spans.count ? first : 0;
      this.lastMini = last;
    }

    get laneCount() { return this.lanes.name.length; }
    /** The stages of a lane, ascending. */
    stagesOf(lane) { return this.lanes.stages ? this.lanes.stages[lane] : [this.lanes.stage[lane]]; }
    /** Whether a lane has several stages. */
    several(lane) { return this.stagesOf(lane).length > 1; }
    get mostStages() { return this.lanes.name.reduce((most, _, lane) => Math.max(most, this.stagesOf(lane).length), 1); }
    stage(span) { return this.spans.stage ? this.spans.stage[span] : this.lanes.stage[this.spans.lane[span]]; }
    /** How many rules mark an operation's stage among those of its lane. */
    rules(span) { return this.stagesOf(this.spans.lane[span]).indexOf(this.stage(span)) % (TP.MOST_RULES + 1); }
    start(span) { return this.spans.start[span] * this.tick_s; }
    end(span) { return this.spans.end[span] * this.tick_s; }

    /** Spans of a lane that touch the time from t0 to t1: [first, end). */
    visible(lane, t0, t1) {
      const low = this.laneBegin[lane], high = this.laneBegin[lane + 1];
      return [after(this.spans.end, low, high, t0 / this.tick_s - 1),
        after(this.spans.start, low, high, t1 / this.tick_s)];
    }

    /** The span of a lane at a time, or the nearest within `slack` seconds; -1 for none. */
    at(lane, time, slack = 0) {
      const [first, end] = this.visible(lane, time - slack, time + slack);
      let best = -1, distance = Infinity;
      for (let k = first; k < end; k++) {
        const away = Math.max(this.start(k) - time, time - this.end(k), 0);
        if (away < distance) { distance = away; best = k; }
      }
      return best;
    }

    /** The span of a lane whose middle is nearest to a time; -1 for none. */
    nearest(lane, time) {
      const low = this.laneBegin[lane], high = this.laneBegin[lane + 1];
      const k = after(this.spans.start, low, high, time / this.tick_s);
      let best = -1, distance = Infinity;
      for (const span of [k - 1, k]) {
        if (span < low || span >= high) continue;
        const away = Math.abs((this.start(span) + this.end(span)) / 2 - time);
        if (away < distance) { distance = away; best = span; }
      }
      return best;
    }

    kind(span) { return TP.KINDS[this.spans.kind[span]]; }

    /** "F3.1": forward of mini-batch 3's micro-batch 1; "2F3.1" of stage 2 on a lane with several. */
    name(span) {
      const micro = this.spans.micro[span];
      const stage = this.several(this.spans.lane[span]) ? this.stage(span) : "";
      return `${stage}${this.kind(span)}${this.spans.mini[span]}${micro < 0 ? "" : `.${micro}`}`;
    }

    /** What a mini-batch does: spans, messages, counts; all a page says of one that is followed. */
    follow(mini) {
      if (this.followed && this.followed.mini === mini) return this.followed;
      const { kind, mini: minis } = this.spans;
      const found = { mini, spans: [], messages: [], forwards: 0, backwards: 0, t0: Infinity, t1: -Infinity };
      const forward = new Set(), backward = new Set();
      for (let k = 0; k < this.spans.count; k++) {
        if (minis[k] !== mini) continue;
        found.spans.push(k);
        found.t0 = Math.min(found.t0, this.start(k));
        found.t1 = Math.max(found.t1, this.end(k));
        const stage = this.stage(k);
        if (kind[k] === 0) { found.forwards++; forward.add(stage); }
        if (kind[k] === 1) { found.backwards++; backward.add(stage); }
      }
      for (let k = 0; k < this.messages.count; k++) {
        if (this.messages.mini[k] === mini) found.messages.push(k);
      }
      found.forwardGroups = forward.size;
      found.backwardGroups = backward.size;
      this.followed = found;
      return found;
    }

    /** Messages that a span waits for and those it makes. */
    messagesOf(span) {
      const { micro, source, target, source_stage: from, target_stage: to, backward } = this.messages;
      const { spans } = this;
      const stage = this.stage(span);
      const back = this.kind(span) === "B" ? 1 : 0;
      const received = [], sent = [];
      if (this.kind(span) !== "F" && this.kind(span) !== "B") return { received, sent };
      const all = this.messagesByMini().get(spans.mini[span]) || [];
      for (const k of all) {
        if (backward[k] !== back) continue;
        const same = micro[k] === spans.micro[span] || micro[k] < 0 || spans.micro[span] < 0;
        if (!same) continue;
        if (target[k] === spans.lane[span] && (!to || to[k] === stage)) received.push(k);
        if (source[k] === spans.lane[span] && (!from || from[k] === stage)) sent.push(k);
      }
      return { received, sent };
    }

    /** Mini-batch → its messages; made once, when first asked for. */
    messagesByMini() {
      if (!this.byMini) {
        this.byMini = new Map();
        this.messages.mini.forEach((mini, k) => {
          if (!this.byMini.has(mini)) this.byMini.set(mini, []);
          this.byMini.get(mini).push(k);
        });
      }
      return this.byMini;
    }

    /** The row of `memory` that says what a lane holds at a time; -1 before the first. */
    memoryAt(lane, time) {
      const low = this.memoryBegin[lane];
      const row = after(this.memory.at, low, this.memoryBegin[lane + 1], time / this.tick_s + 0.5) - 1;
      return row < low ? -1 : row;
    }

    /** Bytes of each kind in a row of `memory`. */
    bytesOf(row) {
      const kinds = this.memoryKinds.length, state = this.memory.state[row];
      return this.states.subarray(state * kinds, (state + 1) * kinds);
    }

    /** Kinds of memory of which some lane holds some at some time. */
    kindsHeld() {
      const count = this.memoryKinds.length;
      return this.memoryKinds.filter((_, kind) => this.states.some((bytes, k) => k % count === kind && bytes > 0));
    }

    /** The most that any lane holds at once. */
    get peak() { return this.stateTotals.reduce((a, b) => Math.max(a, b), 0); }

    /** Largest state of a lane over its whole recording. */
    lanePeak(lane) {
      let most = 0;
      for (let k = this.memoryBegin[lane]; k < this.memoryBegin[lane + 1]; k++) {
        most = Math.max(most, this.stateTotals[this.memory.state[k]]);
      }
      return most;
    }
  };

  TP.firstAfter = after;
})();
