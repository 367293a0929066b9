// The console: which view is shown, the stream that feeds it, keys and themes.

import { hideTip, setText } from "./dom.js";
import { Stream, apiKey } from "./stream.js";
import { ClusterView } from "./cluster.js";
import { TenantsView } from "./tenants.js";
import { SequencesView } from "./sequences.js";
import { SequenceView } from "./sequence.js";
import { LearnView } from "./learn.js";

const byId = (id) => document.getElementById(id);
const TABS = [["cluster", "Cluster", ClusterView], ["tenants", "Tenants", TenantsView], ["sequences", "Sequences", SequencesView], ["learn", "Learn", LearnView]];
const HISTORY = 240;

/** What is known: of the model, of the cluster now and lately, of the sequence in focus. */
const state = { model: null, cluster: null, sequence: undefined, texts: [], history: [], ladder: [] };
let view = null;
let drawing = false;

const stream = new Stream(take, showLink);

function take(event) {
  if (event.model) state.model = event.model;
  if (event.cluster) {
    noteHistory(event.cluster);
    state.cluster = event.cluster;
  }
  if ("sequence" in event) {
    state.sequence = event.sequence;
    const news = event.sequence?.tokens;
    if (news) state.texts.splice(news.from, Infinity, ...news.texts);
  }
  draw();
}

function noteHistory(cluster) {
  const now = performance.now() / 1000;
  const sum = (name) => cluster.engines.reduce((total, engine) => total + engine[name], 0);
  const generated = sum("generation_tokens_total");
  const last = state.history.at(-1);
  const rate = last && generated >= last.generated ? (generated - last.generated) / (now - last.now) : 0;
  state.history.push({ now, held: sum("held_blocks"), price: cluster.price, generated, rate, running: sum("num_running") });
  if (state.history.length > HISTORY) state.history.shift();
  const before = new Map((state.cluster?.engines ?? []).map((engine) => [engine.engine_id, engine.reclaimed ?? {}]));
  for (const engine of cluster.engines) {
    const old = before.get(engine.engine_id);
    if (!old) continue;
    for (const [step, total] of Object.entries(engine.reclaimed ?? {})) {
      const more = total - (old[step] ?? 0);
      if (more > 0) state.ladder.unshift({ at: new Date().toLocaleTimeString(), engine: engine.engine_id, step, blocks: more });
    }
  }
  state.ladder.length = Math.min(state.ladder.length, 60);
}

/** Draw once a frame, however fast events come. */
function draw() {
  if (drawing || document.hidden) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (state.model) setText(byId("model"), `${state.model.name} · ${state.model.num_layers} layers · ${state.model.num_heads} query / ${state.model.num_kv_heads} KV heads`);
    if (state.cluster || view.needsNoCluster) view.update(state);
  });
}

function showLink(kind, message, status) {
  const link = byId("link");
  link.dataset.state = kind;
  setText(link, kind === "live" ? "live" : message);
  if (kind === "refused" && (status === 401 || status === 403)) askForKey();
}

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const isSequence = name === "sequence" && rest.length === 2;
  const tab = TABS.find(([id]) => id === name) ?? (isSequence ? TABS[2] : TABS[0]);
  view?.leave?.();
  hideTip();
  state.sequence = undefined;
  state.texts = [];
  view = isSequence ? new SequenceView(byId("view"), { engine: rest[0], sequence: rest[1] }, focusOn) : new tab[2](byId("view"));
  for (const link of byId("tabs").children) {
    if (link.dataset.tab === tab[0]) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!isSequence) stream.open("");
  draw();
}

/** Have the stream tell of one sequence, in one KV head of one layer. */
function focusOn(query) {
  state.texts = [];
  stream.open(new URLSearchParams(query).toString());
}

function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key-text").value = apiKey.get();
  dialog.returnValue = "cancel";
  dialog.showModal();
}

byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "use") return;
  apiKey.set(byId("key-text").value.trim());
  view.keyChanged?.();
  stream.open();
});
byId("key-text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  byId("key-dialog").close("use");
});
byId("key").addEventListener("click", askForKey);
byId("help").addEventListener("click", () => byId("help-dialog").showModal());

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("kvorum-theme", theme);
  draw();
}
const toggleTheme = () => setTheme(document.documentElement.dataset.theme === "light" ? "dark" : "light");
byId("theme").addEventListener("click", toggleTheme);

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const isTyping = event.target.matches("input:not([type=range]), select");
  if (isTyping && event.key !== "Escape") return;
  if (view.onKey?.(event.key, event)) event.preventDefault();
  else if (TABS[event.key - 1]) location.hash = TABS[event.key - 1][0];
  else if (event.key === "t") toggleTheme();
  else if (event.key === "k") askForKey();
  else if (event.key === "?") byId("help-dialog").showModal();
});
addEventListener("hashchange", route);
addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => (document.hidden ? stream.close() : stream.open()));

byId("tabs").append(
  ...TABS.map(([id, title], index) => {
    const link = document.createElement("a");
    link.href = `#${id}`;
    link.dataset.tab = id;
    const key = document.createElement("kbd");
    key.textContent = index + 1;
    link.append(key, title);
    return link;
  }),
);
setTheme(localStorage.getItem("kvorum-theme") ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark"));
route();
