// Tenants: what each holds and reserves against its floor and ceiling, and what it was refused.

import { count, h, percent, setText, syncChildren, tenantColour, withTip } from "./dom.js";

const HEADINGS = ["tenant", "blocks", "held", "reserved", "cached", "floor", "ceiling", "running", "waiting", "admitted", "refused", "service"];

export class TenantsView {
  constructor(root) {
    this.body = h("tbody");
    this.notice = h("p", { class: "notice", hidden: true });
    root.replaceChildren(
      h("section", { class: "panel" },
        h("div", { class: "row" }, h("h1", {}, "Tenants"), h("span", { class: "dim" }, "full: held · pale: reserved · green: floor · red: ceiling")),
        h("table", {}, h("thead", {}, h("tr", {}, ...HEADINGS.map((name, index) => h("th", { class: index > 1 ? "num" : "", scope: "col" }, name)))), this.body),
        this.notice),
    );
  }

  update({ cluster }) {
    this.notice.hidden = cluster.manager_is_up;
    setText(this.notice, cluster.has_manager ? "The cache manager cannot be reached; it is being started anew." : "This cluster runs without the cache manager, which alone knows tenants.");
    const total = cluster.engines.reduce((sum, engine) => sum + engine.total_blocks, 0);
    syncChildren(this.body, cluster.tenants, (tenant) => tenant.tenant, makeRow, (row, tenant) => row.show(tenant, total));
  }
}

function makeRow({ tenant }) {
  const [reserved, held, floor, ceiling] = [h("i", { class: "reserved" }), h("i", { class: "held" }), h("b"), h("b", { class: "ceiling" })];
  const track = h("div", { class: "track" }, reserved, held, floor, ceiling);
  const swatch = h("span", { class: "swatch" });
  const cells = HEADINGS.slice(2).map(() => h("td", { class: "num" }));
  const row = h("tr", {}, h("th", { scope: "row" }, swatch, tenant), h("td", {}, track), ...cells);
  let refusals = {};
  withTip(cells[8], () => Object.entries(refusals).map(([reason, n]) => `${reason}: ${n}`).join("\n"));
  row.show = (now, total) => {
    swatch.style.background = tenantColour(tenant);
    track.style.setProperty("--tenant", tenantColour(tenant));
    const share = (blocks) => `${Math.min(100, (100 * blocks) / total)}%`;
    held.style.width = share(now.held_blocks);
    reserved.style.width = share(Math.max(now.reserved_blocks, now.held_blocks));
    floor.style.left = share(now.floor_blocks);
    floor.hidden = !now.floor_blocks;
    ceiling.hidden = now.ceiling_blocks === null;
    if (!ceiling.hidden) ceiling.style.left = `calc(${share(now.ceiling_blocks)} - 2px)`;
    refusals = now.refused_total;
    const refused = Object.values(refusals).reduce((sum, n) => sum + n, 0);
    const values = [now.held_blocks, now.reserved_blocks, now.cached_blocks, now.floor_blocks, now.ceiling_blocks ?? "–", now.num_running, now.num_waiting, now.admitted_total, refused];
    values.forEach((value, index) => setText(cells[index], typeof value === "number" ? count(value) : value));
    setText(cells[9], percent(now.share_of_service, 1));
  };
  return row;
}
