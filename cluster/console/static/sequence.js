// One sequence: its pages, and in one KV head of one layer what is kept, what was dropped and what goes next.

import { count, css, h, paint, requestOf, setText, shortId, syncChildren, withTip } from "./dom.js";

// Longer texts show their end.
const MAX_TOKENS = 4000;
const EVENTS = { started: "got its first blocks", cut: "cut to its budget", shrunk: "shrunk for others", offloaded: "moved to host memory", preempted: "preempted, to be computed anew", resumed: "goes on" };

export class SequenceView {
  constructor(root, address, focusOn) {
    this.address = address;
    this.focusOn = focusOn;
    this.layer = 0;
    this.kvHead = 0;
    this.title = h("h1", {}, `Sequence ${requestOf(address.sequence).slice(0, 12)}`);
    this.facts = h("p", { class: "row dim" });
    this.layerText = h("output", { class: "num" });
    this.layerInput = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Layer", oninput: () => this.choose(Number(this.layerInput.value), this.kvHead) });
    this.ranks = h("div", { class: "grid" });
    this.blocks = h("div", { class: "blocks" });
    this.blocksTitle = h("h2", {}, "Pages");
    this.text = withTip(h("div", { class: "text", "data-testid": "tokens" }), (event) => this.describe(event.target));
    this.chart = withTip(h("canvas", { class: "chart", role: "img", "aria-label": "Score by position" }), (event) => this.describeBar(event));
    this.chartTitle = h("h2", {}, "Scores");
    this.log = h("ol", { class: "log" });
    this.gone = h("p", { class: "notice", hidden: true }, "This sequence is over, or on another engine. ", h("a", { href: "#sequences" }, "All sequences"));
    this.body = h("div", { class: "grid two" },
      h("div", { class: "grid" },
        h("div", { class: "panel" }, h("div", { class: "row" }, h("h2", {}, "Tokens"), legend()), this.text),
        h("div", { class: "panel" }, this.chartTitle, this.chart),
        h("div", { class: "panel" }, this.blocksTitle, this.blocks)),
      h("div", { class: "grid" },
        h("div", { class: "panel" }, h("h2", {}, "Heads"), h("label", { class: "row" }, "layer", this.layerInput, this.layerText), h("p", { class: "dim" }, "A KV head serves the query heads behind it, on its rank. Choose one:"), this.ranks),
        h("div", { class: "panel" }, h("h2", {}, "What happened"), this.log)));
    root.replaceChildren(h("a", { href: "#sequences", class: "dim" }, "← all sequences"), this.title, this.facts, this.gone, this.body);
    this.spans = [];
    this.seen = null;
    this.focus();
  }

  focus() {
    this.spans = [];
    this.text.replaceChildren();
    this.focusOn({ ...this.address, layer: this.layer, kv_head: this.kvHead });
  }

  choose(layer, kvHead) {
    if (!this.model) return;
    layer = Math.max(0, Math.min(this.model.num_layers - 1, layer));
    kvHead = Math.max(0, Math.min(this.model.num_kv_heads - 1, kvHead));
    if (layer === this.layer && kvHead === this.kvHead) return;
    [this.layer, this.kvHead] = [layer, kvHead];
    this.focus();
  }

  onKey(key) {
    if (key === "Escape") location.hash = "#sequences";
    else if (key === "[") this.choose(this.layer - 1, this.kvHead);
    else if (key === "]") this.choose(this.layer + 1, this.kvHead);
    else if (key === ",") this.choose(this.layer, this.kvHead - 1);
    else if (key === ".") this.choose(this.layer, this.kvHead + 1);
    else return false;
    return true;
  }

  update(state) {
    this.model = state.model;
    const engine = state.cluster.engines.find((each) => each.engine_id === this.address.engine);
    this.layerInput.max = state.model.num_layers - 1;
    this.layerInput.value = this.layer;
    setText(this.layerText, this.layer);
    if (engine) this.showRanks(engine);
    const sequence = state.sequence;
    if (sequence === undefined) return;
    this.gone.hidden = sequence !== null;
    if (sequence === null) return; // what was seen last stays
    this.seen = readSlots(sequence);
    this.showFacts(sequence, engine);
    this.showText(sequence, state.texts);
    this.showBlocks(sequence, engine?.block_size ?? 16);
    this.drawChart();
    syncChildren(this.log, [...sequence.events].reverse(), (event) => `${event.at_s} ${event.kind}`, (event) => h("li", {}, h("time", {}, `${event.at_s.toFixed(2)} s`), `${EVENTS[event.kind] ?? event.kind}${event.tokens ? `, ${count(event.tokens)} tokens` : ""}`), () => {});
  }

  showFacts({ row, num_cached, num_written }, engine) {
    const budget = row.kv_budget === null ? "no budget" : `budget ${count(row.kv_budget)}`;
    const facts = [row.tenant, row.policy, budget, row.phase, `${count(num_written)} tokens written`, `${count(row.evicted_tokens)} evicted per head`, `${count(num_cached)} from the prefix cache`, `${row.blocks} blocks, ${row.reserved_blocks} reserved`, `${row.shrinks} shrinks`, engine ? `engine ${shortId(engine.engine_id)}` : ""];
    syncChildren(this.facts, facts.filter(Boolean).map((text, index) => [index, text]), ([index]) => index, () => h("span", { class: "badge" }), (badge, [, text]) => setText(badge, text));
  }

  showRanks(engine) {
    const group = this.model.num_heads / this.model.num_kv_heads;
    syncChildren(this.ranks, engine.ranks.map((rank, index) => ({ ...rank, index })), (rank) => rank.index, (rank) => {
      const chips = [];
      for (let kv = rank.kv_heads[0]; kv < rank.kv_heads[1]; kv++) {
        const [first, end] = [Math.max(rank.q_heads[0], kv * group), Math.min(rank.q_heads[1], (kv + 1) * group)];
        const dots = Array.from({ length: end - first }, (_, index) => h("span", { class: "q", title: `query head ${first + index}` }));
        chips.push(h("button", { class: "kv", "data-kv": kv, title: `KV head ${kv} serves query heads ${first} to ${end - 1}`, onclick: () => this.choose(this.layer, kv) }, `KV ${kv}`, ...dots));
      }
      return h("div", { class: "rank" }, h("div", { class: "dim" }, `rank ${rank.index}`), h("div", { class: "row" }, ...chips));
    }, (element) => {
      for (const chip of element.querySelectorAll("button")) chip.setAttribute("aria-pressed", Number(chip.dataset.kv) === this.kvHead);
    });
  }

  showText({ row, num_written }, texts) {
    const first = Math.max(0, row.num_tokens - MAX_TOKENS);
    if (this.first !== first && this.spans.length) {
      this.spans.splice(0, first - this.first).forEach((span) => span.remove());
    }
    this.first = first;
    while (first + this.spans.length < row.num_tokens) {
      const span = h("span", { class: "tok", "data-position": first + this.spans.length });
      this.spans.push(span);
      this.text.append(span);
    }
    const { slotOf, values, top, at, isInPool } = this.seen;
    this.spans.forEach((span, index) => {
      const position = first + index;
      setText(span, texts[position] ?? "·");
      const slot = slotOf.get(position);
      const classes = ["tok"];
      if (position >= row.num_prompt) classes.push("answer");
      if (position >= num_written || !isInPool) classes.push("unwritten");
      else if (slot === undefined) classes.push("gone");
      else if (!at.alive[slot]) classes.push("victim");
      else if (values.length && values[slot] === null) classes.push("protected");
      const name = classes.join(" ");
      if (span.className !== name) span.className = name;
      const heat = slot === undefined || !at.scores.length ? 0 : Math.round(70 * Math.sqrt(at.scores[slot] / top));
      if (span._heat !== heat) span.style.setProperty("--heat", (span._heat = heat));
    });
  }

  describe(target) {
    if (!target.dataset?.position || !this.seen) return null;
    const position = Number(target.dataset.position);
    const { slotOf, values, at, blockIds, blockSize } = this.seen;
    const slot = slotOf.get(position);
    if (slot === undefined) return `position ${position}\nevicted in this head, or not written yet`;
    const lines = [`position ${position}`, `slot ${slot}, block ${blockIds[Math.floor(slot / blockSize)] ?? "–"}`];
    if (at.scores.length) lines.push(`score ${at.scores[slot].toFixed(4)}`, values[slot] === null ? "protected" : `goes by ${values[slot].toFixed(5)}`);
    if (!at.alive[slot]) lines.push("the next token takes its place");
    return lines.join("\n");
  }

  showBlocks({ block_ids, num_shared }, blockSize) {
    this.seen.blockIds = block_ids;
    this.seen.blockSize = blockSize;
    setText(this.blocksTitle, `Pages: ${block_ids.length} blocks of ${blockSize} slots`);
    syncChildren(this.blocks, block_ids.map((id, index) => ({ id, index })), (block) => block.id, () => {
      const element = h("div", { class: "block" }, h("canvas"), h("small"));
      return withTip(element, () => element._tip);
    }, (element, { id, index }) => {
      element.classList.toggle("shared", index < num_shared);
      setText(element.lastChild, id);
      element._tip = `block ${id}, slots ${index * blockSize} to ${(index + 1) * blockSize - 1}${index < num_shared ? "\nshared with the prefix cache" : ""}`;
      this.drawBlock(element.firstChild, index * blockSize, blockSize);
    });
  }

  drawBlock(canvas, firstSlot, blockSize) {
    const { at, values, top } = this.seen;
    const signature = at.positions.slice(firstSlot, firstSlot + blockSize).join() + at.alive.slice(firstSlot, firstSlot + blockSize).join();
    if (canvas._signature === signature && !at.scores.length) return;
    canvas._signature = signature;
    const { context, width, height } = paint(canvas);
    const perRow = Math.ceil(blockSize / 2);
    const size = width / perRow;
    for (let offset = 0; offset < blockSize; offset++) {
      const slot = firstSlot + offset;
      const isUsed = slot < at.positions.length;
      context.globalAlpha = isUsed && at.scores.length && at.alive[slot] ? 0.3 + 0.7 * Math.sqrt(at.scores[slot] / top) : 1;
      context.fillStyle = !isUsed ? css("--free") : !at.alive[slot] ? css("--victim") : values.length && values[slot] === null ? css("--protected") : css("--kept");
      context.fillRect((offset % perRow) * size, Math.floor(offset / perRow) * (height / 2), size - 1, height / 2 - 1);
    }
    context.globalAlpha = 1;
  }

  /** Draw a bar for each kept position, a tick below for each that is gone, and a line at what goes next. */
  drawChart() {
    const { context, width, height } = paint(this.chart);
    const { slotOf, values, at, written, top } = this.seen;
    if (!at.scores.length) {
      setText(this.chartTitle, "Scores: this policy keeps everything and records none");
      return;
    }
    const finite = values.filter((value, slot) => value !== null && at.alive[slot]);
    const threshold = finite.length ? Math.min(...finite) : null;
    setText(this.chartTitle, `Scores: attention mass by position${threshold === null ? "" : `; who goes next is below ${threshold.toPrecision(3)}`}`);
    const bar = width / Math.max(1, written);
    const y = (value) => (height - 12) * (1 - Math.sqrt(value / top));
    for (let position = 0; position < written; position++) {
      const slot = slotOf.get(position);
      if (slot === undefined) {
        context.fillStyle = css("--victim");
        context.fillRect(position * bar, height - 7, Math.max(1, bar - 0.5), 5);
        continue;
      }
      context.fillStyle = !at.alive[slot] ? css("--victim") : values[slot] === null ? css("--protected") : css("--kept");
      const high = y(at.scores[slot]);
      context.fillRect(position * bar, high, Math.max(1, bar - 0.5), height - 10 - high);
    }
    // Where eviction goes by something else than the score, a line at a score would mislead.
    const goesByScore = threshold !== null && at.alive.every((alive, slot) => values[slot] === null || Math.abs(values[slot] - at.scores[slot]) < 1e-4);
    if (goesByScore) {
      context.fillStyle = css("--warn");
      context.fillRect(0, y(threshold), width, 1);
    }
  }

  describeBar(event) {
    if (!this.seen) return null;
    return this.describe({ dataset: { position: String(Math.floor((event.offsetX / this.chart.clientWidth) * this.seen.written)) } });
  }
}

/** Bring slots into a form that is quick to ask. */
function readSlots(sequence) {
  const at = sequence.slots ?? { positions: [], scores: [], values: [], alive: [] };
  const slotOf = new Map(at.positions.map((position, slot) => [position, slot]));
  return { isInPool: sequence.slots !== null, at, slotOf, values: at.values, written: sequence.num_written, top: Math.max(1e-9, ...at.scores), blockIds: [], blockSize: 16 };
}

function legend() {
  const sample = (name, text) => h("span", { class: `tok ${name}` }, text);
  return h("span", { class: "row dim" }, sample("", "kept, darker with its score"), sample("gone", "evicted"), sample("victim", "goes next"), sample("protected", "protected"), sample("answer", "answer"));
}
