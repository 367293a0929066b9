// All sequences in one list, of which only the visible rows exist: thousands cost no more than thirty.

import { count, h, requestOf, setText, shortId, tenantColour } from "./dom.js";
import { addressOf, sequencesOf } from "./rows.js";

const ROW_HEIGHT = 28;
const COLUMNS = [
  ["engine", (each) => each.engine.engine_id],
  ["request", (each) => each.request_id],
  ["tenant", (each) => each.tenant],
  ["policy", (each) => each.policy],
  ["phase", (each) => each.phase],
  ["tokens", (each) => each.num_tokens],
  ["blocks", (each) => each.blocks],
  ["budget", (each) => each.kv_budget ?? Infinity],
  ["evicted", (each) => each.evicted_tokens],
  ["shrinks", (each) => each.shrinks],
  ["moved", (each) => each.offloads + each.preemptions],
];

export class SequencesView {
  constructor(root) {
    this.sorting = { column: 6, descending: true };
    this.selected = null;
    this.filter = h("input", { type: "search", placeholder: "filter: tenant, policy, phase, id  ( / )", "aria-label": "Filter", oninput: () => this.refresh() });
    this.total = h("span", { class: "dim" });
    this.headings = COLUMNS.map(([name], index) => h("button", { onclick: () => this.sortBy(index) }, name));
    this.spacer = h("div");
    this.list = h("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Sequences", onscroll: () => this.drawRows() }, this.spacer);
    this.rows = [];
    root.replaceChildren(h("section", { class: "panel" }, h("div", { class: "row" }, h("h1", {}, "Sequences"), this.filter, this.total), h("div", { class: "list-head" }, ...this.headings), this.list));
  }

  update(state) {
    this.state = state;
    this.refresh();
  }

  refresh() {
    if (!this.state?.cluster) return;
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = sequencesOf(this.state);
    const matches = (each) => words.every((word) => `${each.tenant} ${each.policy} ${each.phase} ${each.request_id} ${each.engine.engine_id}`.toLowerCase().includes(word));
    const [, key] = COLUMNS[this.sorting.column];
    const sign = this.sorting.descending ? -1 : 1;
    this.shown = all.filter(matches).sort((a, b) => sign * compare(key(a), key(b)) || compare(a.request_id, b.request_id));
    this.most = Math.max(1, ...this.shown.map((each) => Math.max(each.blocks, each.reserved_blocks)));
    setText(this.total, this.shown.length === all.length ? `${count(all.length)}` : `${count(this.shown.length)} of ${count(all.length)}`);
    this.headings.forEach((heading, index) => {
      if (index === this.sorting.column) heading.setAttribute("aria-sort", this.sorting.descending ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
    this.spacer.style.height = `${this.shown.length * ROW_HEIGHT}px`;
    this.drawRows();
  }

  drawRows() {
    const first = Math.floor(this.list.scrollTop / ROW_HEIGHT);
    const visible = (this.shown ?? []).slice(first, first + Math.ceil(this.list.clientHeight / ROW_HEIGHT) + 1);
    while (this.rows.length < visible.length) {
      const row = makeRow();
      this.rows.push(row);
      this.list.append(row);
    }
    this.rows.forEach((row, index) => {
      const sequence = visible[index];
      row.hidden = !sequence;
      if (!sequence) return;
      row.style.top = `${(first + index) * ROW_HEIGHT}px`;
      row.setAttribute("aria-selected", sequence.request_id === this.selected);
      row.show(sequence, this.most);
    });
  }

  sortBy(column) {
    this.sorting = { column, descending: column === this.sorting.column ? !this.sorting.descending : column >= 5 };
    this.refresh();
  }

  onKey(key, event) {
    if (key === "Escape") {
      this.filter.blur();
      return true;
    }
    if (key === "/") {
      this.filter.focus();
      return true;
    }
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[key];
    const at = (this.shown ?? []).findIndex((each) => each.request_id === this.selected);
    if (step) {
      const next = Math.max(0, Math.min(this.shown.length - 1, at + step));
      this.selected = this.shown[next]?.request_id ?? null;
      const top = next * ROW_HEIGHT;
      if (top < this.list.scrollTop) this.list.scrollTop = top;
      if (top + ROW_HEIGHT > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW_HEIGHT - this.list.clientHeight;
      this.drawRows();
      return true;
    }
    if (key === "Enter" && at >= 0 && !event.target.closest("button")) {
      location.hash = addressOf(this.shown[at]);
      return true;
    }
    return false;
  }
}

const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

/** Make a row that can show any sequence, one after the other. */
function makeRow() {
  const [reserved, held] = [h("i", { class: "reserved" }), h("i", { class: "held" })];
  const track = h("div", { class: "track" }, reserved, held);
  const cells = COLUMNS.map(([name]) => (name === "blocks" ? h("span", {}, track) : h("span")));
  const row = h("div", { class: "list-row", role: "option" }, ...cells);
  let address = "";
  row.addEventListener("click", () => (location.hash = address));
  row.show = (each, most) => {
    address = addressOf(each);
    const texts = [shortId(each.engine.engine_id), requestOf(each.request_id), each.tenant, each.policy, each.phase, `${each.num_prompt} + ${each.num_tokens - each.num_prompt}`, null, each.kv_budget ?? "–", each.evicted_tokens || "–", each.shrinks || "–", each.offloads + each.preemptions || "–"];
    texts.forEach((text, index) => text !== null && setText(cells[index], text));
    cells[4].className = `phase-${each.phase}`;
    track.style.setProperty("--tenant", tenantColour(each.tenant));
    held.style.width = `${(100 * each.blocks) / most}%`;
    reserved.style.width = `${(100 * Math.max(each.blocks, each.reserved_blocks)) / most}%`;
    track.title = `${each.blocks} blocks held, ${each.reserved_blocks} reserved`;
  };
  return row;
}
