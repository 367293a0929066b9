// Learn: what a KV cache saves and costs, on a real model that answers when a lesson is opened.

import { bytes, count, h, setText, syncChildren } from "./dom.js";
import { get } from "./stream.js";

// [name, layers, query heads, KV heads, head_dim]; from the models' published configurations.
const MODELS = [
  ["Llama 2 7B", 32, 32, 32, 128],
  ["Llama 2 70B", 80, 64, 8, 128],
  ["Llama 3.1 8B", 32, 32, 8, 128],
  ["Llama 3.1 70B", 80, 64, 8, 128],
  ["Mistral 7B", 32, 32, 8, 128],
  ["Qwen2.5 7B", 28, 28, 4, 128],
  ["Gemma 2 9B", 42, 16, 8, 256],
  ["StarCoder 15B", 40, 48, 1, 128],
  ["Falcon 7B", 32, 71, 1, 64],
  ["SmolLM2 135M", 30, 9, 3, 64],
];
const CONTEXTS = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072];
const COLOURS = { A: "var(--kept)", B: "var(--warn)", C: "var(--protected)" };

export class LearnView {
  constructor(root) {
    this.needsNoCluster = true;
    this.abort = new AbortController();
    this.parts = [new Caching(this), new Heads(), new Pages(this), new Evictions(this)];
    root.replaceChildren(h("h1", {}, "Learn"), h("p", { class: "dim" }, "Everything here is computed on SmolLM2-135M while you look, not drawn from a book. The first lesson loads the model, which takes some seconds."), ...this.parts.map((part) => part.element));
    this.keyChanged();
  }

  /** Ask for a lesson; what it says, or why it cannot, goes to the part. */
  async ask(part, path) {
    part.say("working it out on the model …");
    try {
      const lesson = await (await get(`learn/${path}`, this.abort.signal)).json();
      part.say("");
      part.show(lesson);
    } catch (error) {
      if (!this.abort.signal.aborted) part.say(error.message);
    }
  }

  async keyChanged() {
    for (const part of this.parts) await part.begin?.();
  }

  update() {}

  leave() {
    this.abort.abort();
  }
}

class Part {
  constructor(title, ...children) {
    this.status = h("span", { class: "dim", role: "status" });
    this.element = h("section", { class: "panel" }, h("div", { class: "row" }, h("h2", {}, title), this.status), ...children);
  }

  say(text) {
    setText(this.status, text);
  }
}

/** With the cache a token costs one K/V projection a layer; without, as many as there are tokens. */
class Caching extends Part {
  constructor(view) {
    const step = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step" });
    const [cached, fresh, counters] = [h("div", { class: "steps", "data-testid": "with-cache" }), h("div", { class: "steps", "data-testid": "without-cache" }), h("p", { class: "num" })];
    const play = h("button", { onclick: () => this.play() }, "next token");
    super("1. A token with the cache, and without", h("p", { class: "dim" }, "Orange: keys and values that this step computes. Blue: read from the cache. Step through the answer."), h("div", { class: "row" }, play, step), h("h3", {}, "with the cache"), cached, h("h3", {}, "without"), fresh, counters);
    Object.assign(this, { view, step, cached, fresh, counters });
    step.addEventListener("input", () => this.draw());
  }

  begin() {
    return this.view.ask(this, "caching");
  }

  show(lesson) {
    this.lesson = lesson;
    this.step.max = lesson.costs.length - 1;
    this.step.value = 0;
    this.draw();
  }

  play() {
    if (!this.lesson) return;
    this.step.value = (Number(this.step.value) + 1) % this.lesson.costs.length;
    this.draw();
  }

  draw() {
    const { prompt, answer, costs, num_layers } = this.lesson;
    const now = Number(this.step.value);
    const context = [...prompt, ...answer.slice(0, now)];
    const { projections_with_cache, projections_without } = costs[now];
    const cells = (container, computed) => {
      const known = context.length - computed;
      container.replaceChildren(...context.map((text, index) => h("span", { class: `cell ${index < known ? "kept" : "now"}` }, text)), h("span", {}, "→"), h("span", { class: "cell" }, answer[now]));
    };
    cells(this.cached, projections_with_cache);
    cells(this.fresh, projections_without);
    const sum = (name) => costs.slice(0, now + 1).reduce((total, cost) => total + cost[name], 0);
    const ms = (seconds) => `${(1000 * seconds).toFixed(0)} ms`;
    setText(this.counters, `token ${now + 1}: K/V projections in each of ${num_layers} layers ${projections_with_cache} with the cache, ${projections_without} without; so far ${sum("projections_with_cache")} and ${sum("projections_without")}. Took ${ms(costs[now].with_cache_s)} and ${ms(costs[now].without_s)}.`);
  }
}

/** What heads that share keys and values save: bytes of KV by model. */
class Heads extends Part {
  constructor() {
    const context = h("input", { type: "range", min: 0, max: CONTEXTS.length - 1, value: 3, "aria-label": "Context" });
    const [label, bars] = [h("output", { class: "num" }), h("div", { class: "bars" })];
    super("2. MHA, GQA, MQA: what sharing heads saves", h("p", { class: "dim" }, "KV cache of one sequence in bfloat16: 2 · layers · KV heads · head_dim · 2 bytes a token. Pale: had every query head keys and values of its own (MHA)."), h("label", { class: "row" }, "context", context, label), bars);
    const draw = () => {
      const tokens = CONTEXTS[context.value];
      setText(label, `${count(tokens)} tokens`);
      const rows = MODELS.map(([name, layers, heads, kvHeads, dim]) => ({ name, kind: kvHeads === heads ? "MHA" : kvHeads === 1 ? "MQA" : `GQA ${heads}:${kvHeads}`, size: 4 * layers * kvHeads * dim * tokens, whole: 4 * layers * heads * dim * tokens }));
      const most = Math.max(...rows.map((row) => row.whole));
      bars.replaceChildren(...rows.flatMap((row) => {
        const [whole, held] = [h("i", { class: "reserved" }), h("i", { class: "held" })];
        whole.style.width = `${(100 * row.whole) / most}%`;
        held.style.width = `${(100 * row.size) / most}%`;
        return [h("span", {}, row.name), h("span", { class: "badge" }, row.kind), h("div", { class: "track" }, whole, held), h("span", { class: "num" }, row.size === row.whole ? bytes(row.size) : `${bytes(row.size)} of ${bytes(row.whole)}`)];
      }));
    };
    context.addEventListener("input", draw);
    draw();
  }
}

/** A pool of blocks, step by step: requests fill and free it, a prefix stays, H2O gives blocks back. */
class Pages extends Part {
  constructor(view) {
    const step = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step" });
    const [cells, label, who] = [h("div", { class: "cells", "data-testid": "pages" }), h("output", { class: "num" }), h("p", { class: "dim" })];
    const play = h("button", { onclick: () => this.toggle() }, "play");
    super("3. Pages: a pool that fills and frees", who, h("div", { class: "row" }, play, step, label), cells);
    Object.assign(this, { view, step, cells, label, who, playButton: play });
    step.addEventListener("input", () => this.draw());
  }

  begin() {
    return this.view.ask(this, "pages");
  }

  show(lesson) {
    this.lesson = lesson;
    this.step.max = lesson.steps.length - 1;
    setText(this.who, lesson.requests.map(({ name, prompt_tokens, max_tokens, budget }) => `${name}: ${prompt_tokens} + ${max_tokens} tokens${budget ? `, h2o at ${budget}` : ""}`).join(" · ") + ` · ${lesson.block_size} tokens a block · C has the same prompt as A`);
    this.draw();
  }

  toggle() {
    clearInterval(this.timer);
    this.timer = this.timer ? null : setInterval(() => this.advance(), 350);
    setText(this.playButton, this.timer ? "pause" : "play");
    this.view.abort.signal.addEventListener("abort", () => clearInterval(this.timer));
  }

  advance() {
    if (!this.lesson) return;
    this.step.value = (Number(this.step.value) + 1) % this.lesson.steps.length;
    this.draw();
  }

  draw() {
    const { holders, cached } = this.lesson.steps[this.step.value];
    const isCached = new Set(cached);
    setText(this.label, `step ${Number(this.step.value) + 1} of ${this.lesson.steps.length}`);
    syncChildren(this.cells, holders.map((names, id) => ({ names, id })), (block) => block.id, () => h("div"), (cell, { names, id }) => {
      setText(cell, names.length ? names.join("") : isCached.has(id) ? "▒" : "");
      cell.style.background = names.length > 1 ? `linear-gradient(135deg, ${COLOURS[names[0]]} 50%, ${COLOURS[names[1]]} 50%)` : names.length ? COLOURS[names[0]] : isCached.has(id) ? "var(--cached)" : "var(--free)";
      cell.style.color = names.length ? "#08121c" : "var(--dim)";
      cell.title = names.length ? `block ${id}: ${names.join(" and ")}` : isCached.has(id) ? `block ${id}: a prefix, kept for later` : `block ${id}: free`;
    });
  }
}

/** H2O at a budget that you drag: what one KV head keeps of a tale. */
class Evictions extends Part {
  constructor(view) {
    const slider = (name, min, max, value) => h("input", { type: "range", min, max, value, "aria-label": name });
    const inputs = { budget: slider("Budget", 16, 80, 32), layer: slider("Layer", 0, 29, 0), kv_head: slider("KV head", 0, 2, 0) };
    const outputs = Object.fromEntries(Object.keys(inputs).map((name) => [name, h("output", { class: "num" })]));
    const [text, summary, list] = [h("div", { class: "text", "data-testid": "tale" }), h("p", { class: "num" }), h("ol", { class: "log" })];
    super("4. H2O: the tokens that attention comes back to", h("p", { class: "dim" }, "Drag the budget. Struck out: evicted in this KV head. Each new token takes the place of the one with the least attention so far; the latest tokens are protected."), h("div", { class: "row" }, ...Object.entries(inputs).map(([name, input]) => h("label", { class: "row" }, name.replace("_", " "), input, outputs[name]))), text, summary, list);
    Object.assign(this, { view, inputs, outputs, text, summary, list });
    for (const input of Object.values(inputs)) {
      input.addEventListener("input", () => this.label());
      input.addEventListener("change", () => this.begin());
    }
    this.label();
  }

  label() {
    for (const [name, input] of Object.entries(this.inputs)) setText(this.outputs[name], input.value);
  }

  begin() {
    const query = new URLSearchParams(Object.entries(this.inputs).map(([name, input]) => [name, input.value]));
    this.asked = query.toString();
    return this.view.ask(this, `evictions?${query}`);
  }

  show({ texts, num_prompt, cut, evictions, kept, num_layers, num_kv_heads }) {
    this.inputs.layer.max = num_layers - 1;
    this.inputs.kv_head.max = num_kv_heads - 1;
    const stays = new Set(kept);
    this.text.replaceChildren(...texts.map((token, position) => h("span", { class: `tok ${position >= num_prompt ? "answer" : ""} ${stays.has(position) || position === texts.length - 1 ? "" : "gone"}`, "data-position": position }, token)));
    setText(this.summary, `${kept.length} of ${texts.length - 1} tokens are kept; ${cut.length} went when the prompt was done, then one for each new token:`);
    this.list.replaceChildren(...evictions.map((each) => h("li", {}, `${JSON.stringify(texts[each.new_position])} came, ${JSON.stringify(texts[each.victim_position])} goes next: score ${each.victim_score.toFixed(3)}, the next lowest ${each.lowest_kept_score.toFixed(3)}`)));
  }
}
