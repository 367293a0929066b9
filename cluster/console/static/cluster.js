// The cluster: how full it is, each engine's pool and ranks, the price of a block, and who gave blocks up.

import { count, css, h, paint, percent, requestOf, setText, shortId, sparkline, syncChildren, tenantColour, withTip } from "./dom.js";
import { addressOf, sequencesOf } from "./rows.js";

const STEPS = { PREFIX: "cached prefixes dropped", SHRINK_OVER_QUOTA: "shrunk, over quota", SHRINK: "shrunk", OFFLOAD: "moved to host memory", PREEMPT: "preempted" };
const stepName = (step) => STEPS[step.toUpperCase()] ?? step;

export class ClusterView {
  constructor(root) {
    this.tiles = Object.fromEntries(["Engines", "KV blocks held", "Price λ of a block", "Tokens a second", "Sequences", "Ledger drift"].map((name) => [name, tile(name)]));
    this.engines = h("div", { class: "grid cards" });
    this.legend = h("div", { class: "row dim" });
    this.totals = h("table", {}, h("tbody"));
    this.log = h("ol", { class: "log", "aria-label": "Steps of the ladder as they happen" });
    root.replaceChildren(
      h("section", { class: "grid tiles" }, ...Object.values(this.tiles).map((each) => each.element)),
      h("section", { class: "grid two" },
        h("div", {}, h("div", { class: "row" }, h("h2", {}, "Engines"), this.legend), this.engines),
        h("div", { class: "panel" }, h("h2", {}, "Reclamation ladder"), this.totals, h("h3", { class: "dim" }, "as it happens"), this.log)),
    );
  }

  update(state) {
    const { cluster, history } = state;
    const sum = (name) => cluster.engines.reduce((total, engine) => total + engine[name], 0);
    const [held, total] = [sum("held_blocks"), sum("total_blocks")];
    const up = cluster.engines.filter((engine) => engine.healthy).length;
    this.tiles.Engines.show(`${up} of ${cluster.engines.length}`, null, cluster.manager_is_up ? "" : cluster.has_manager ? "manager away" : "no manager");
    this.tiles["KV blocks held"].show(`${count(held)} / ${count(total)}`, history.map((each) => each.held), percent(held, total));
    this.tiles["Price λ of a block"].show(cluster.price ? cluster.price.toPrecision(3) : "0", history.map((each) => each.price), "", css("--warn"));
    this.tiles["Tokens a second"].show(history.at(-1).rate.toFixed(0), history.map((each) => each.rate), "", css("--good"));
    this.tiles.Sequences.show(`${count(sum("num_running"))} run`, history.map((each) => each.running), `${count(sum("num_waiting"))} wait`);
    this.tiles["Ledger drift"].show(count(cluster.drift_blocks), null, cluster.drift_blocks ? "blocks" : "exact");
    const sequences = sequencesOf(state);
    syncChildren(this.engines, cluster.engines, (engine) => engine.engine_id, (engine) => new EngineCard(engine).element, (element, engine) => element.card.update(engine, sequences.filter((each) => each.engine === engine)));
    this.showLegend(sequences);
    this.showLadder(state);
  }

  showLegend(sequences) {
    const tenants = [...new Set(sequences.map((each) => each.tenant))].sort().slice(0, 8);
    const items = [...tenants.map((tenant) => [tenant, tenantColour(tenant)]), ["cached", "var(--cached)"], ["free", "var(--free)"]];
    syncChildren(this.legend, items, ([name]) => name, ([name, colour]) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = colour;
      return h("span", {}, swatch, name);
    }, (element, [, colour]) => (element.firstChild.style.background = colour));
  }

  showLadder({ cluster, ladder }) {
    const totals = new Map();
    for (const engine of cluster.engines) for (const [step, blocks] of Object.entries(engine.reclaimed ?? {})) totals.set(step, (totals.get(step) ?? 0) + blocks);
    syncChildren(this.totals.tBodies[0], [...totals], ([step]) => step, ([step]) => h("tr", {}, h("td", {}, stepName(step)), h("td", { class: "num" })), (row, [, blocks]) => setText(row.cells[1], `${count(blocks)} blocks`));
    syncChildren(this.log, ladder.slice(0, 40), (event) => event, (event) => h("li", {}, h("time", {}, event.at), `${shortId(event.engine)} +${event.blocks} ${stepName(event.step)}`), () => {});
  }
}

function tile(name) {
  const [value, note, canvas] = [h("div", { class: "value" }), h("span", { class: "dim" }), h("canvas", { "aria-hidden": "true" })];
  return {
    element: h("div", { class: "panel tile" }, h("div", { class: "row" }, h("span", { class: "label" }, name), h("span", { class: "spring" }), note), value, canvas),
    show(text, values, remark, colour) {
      setText(value, text);
      setText(note, remark);
      canvas.hidden = !values;
      if (values) sparkline(canvas, values, colour);
    },
  };
}

/** One engine: its pool as a map in which each sequence is a run of blocks, and its ranks with their heads. */
class EngineCard {
  constructor(engine) {
    this.badge = h("span", { class: "badge" });
    this.counts = h("span", { class: "dim num", "data-testid": "pool" });
    this.map = withTip(h("canvas", { class: "map", role: "img", "aria-label": "Blocks of the pool" }), (event) => this.describe(event));
    this.map.addEventListener("click", (event) => {
      const run = this.runAt(event);
      if (run?.sequence) location.hash = addressOf(run.sequence);
    });
    this.ranks = h("div", { class: "row dim" }, ...engine.ranks.map((rank, index) => h("span", { class: "badge" }, `rank ${index}: KV ${range(rank.kv_heads)} · Q ${range(rank.q_heads)}`)));
    this.runs = [];
    this.element = h("article", { class: "panel" }, h("div", { class: "row" }, h("h3", { title: engine.engine_id }, `engine ${shortId(engine.engine_id)}`), this.badge, h("span", { class: "spring" }), this.counts), this.map, this.ranks);
    this.element.card = this;
  }

  update(engine, sequences) {
    this.badge.className = `badge ${engine.healthy ? "good" : "bad"}`;
    setText(this.badge, engine.healthy ? "up" : "lost");
    const reserved = engine.reserved_blocks === undefined ? "" : ` · ${count(engine.reserved_blocks)} reserved`;
    setText(this.counts, `${count(engine.held_blocks)} held${reserved} · ${count(engine.cached_blocks)} cached · ${count(engine.free_blocks)} free`);
    this.runs = runsOf(engine, sequences);
    this.total = engine.total_blocks;
    this.reserved = engine.reserved_blocks;
    this.draw();
  }

  draw() {
    const { context, width, height } = paint(this.map);
    const { size, columns, each } = (this.cells = cellsFor(this.total, width, height));
    let index = 0;
    for (const run of this.runs) {
      context.fillStyle = run.colour;
      for (const end = Math.round((run.first + run.blocks) / each); index < end; index++) {
        context.fillRect((index % columns) * size, Math.floor(index / columns) * size, size - gapOf(size), size - gapOf(size));
      }
    }
    if (this.reserved > 0) {
      const place = Math.min(this.reserved / each, this.total / each);
      context.fillStyle = css("--bad");
      context.fillRect((place % columns) * size - 1, Math.floor(place / columns) * size - 1, 2, size + 1);
    }
  }

  runAt(event) {
    const { size, columns, each } = this.cells;
    const block = (Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size)) * each;
    return this.runs.find((run) => block >= run.first && block < run.first + run.blocks);
  }

  describe(event) {
    const run = this.runAt(event);
    return run && `${run.label}\n${count(run.blocks)} blocks`;
  }
}

const range = ([first, end]) => (end - first === 1 ? `${first}` : `${first}–${end - 1}`);
const gapOf = (size) => (size >= 6 ? 1 : size >= 4 ? 0.5 : 0);

/** Return the largest cells with which a pool fits; each stands for one block, or for several in a large pool. */
function cellsFor(total, width, height) {
  const size = Math.max(3, Math.min(26, Math.floor(Math.sqrt((width * height) / total))));
  const [columns, rows] = [Math.max(1, Math.floor(width / size)), Math.max(1, Math.floor(height / size))];
  return { size, columns, each: Math.max(1, total / (columns * rows)) };
}

/** Lay a pool out as runs of blocks. Blocks that several sequences share are drawn with the first of them. */
function runsOf(engine, sequences) {
  const runs = [];
  let first = 0;
  const add = (label, colour, blocks, sequence) => {
    blocks = Math.min(blocks, engine.total_blocks - first);
    if (blocks > 0) runs.push({ label, colour, first, blocks, sequence });
    first += Math.max(0, blocks);
  };
  sequences.sort((a, b) => a.tenant.localeCompare(b.tenant) || a.request_id.localeCompare(b.request_id));
  sequences.forEach((sequence, index) => {
    const blocks = Math.min(sequence.blocks, engine.held_blocks - first);
    add(`${sequence.tenant} ${requestOf(sequence.request_id).slice(0, 8)}\n${sequence.policy}, ${sequence.phase}`, tenantColour(sequence.tenant, index % 2), blocks, sequence);
  });
  add("held", css("--dim"), engine.held_blocks - first);
  add("cached prefixes, free for the taking", css("--cached"), engine.cached_blocks);
  add("free", css("--free"), engine.total_blocks - first);
  return runs;
}
