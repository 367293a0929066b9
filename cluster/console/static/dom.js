// Small helpers over the DOM: elements, numbers, colours, canvases, tooltips.

/** Make an element: h("p", {class: "dim", onclick: f}, "text", child, …). */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Change an element's text only when it differs, so that nothing is laid out in vain. */
export function setText(element, text) {
  text = String(text);
  if (element.textContent !== text) element.textContent = text;
}

/** Keep a container's children in step with keyed items: make, update in place, remove. */
export function syncChildren(container, items, keyOf, make, update) {
  const known = container._byKey ?? (container._byKey = new Map());
  const wanted = new Set();
  let previous = null;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let child = known.get(key);
    if (!child) known.set(key, (child = make(item)));
    const place = previous ? previous.nextSibling : container.firstChild;
    if (place !== child) container.insertBefore(child, place);
    update(child, item);
    previous = child;
  }
  for (const [key, child] of known) {
    if (!wanted.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
}

const whole = new Intl.NumberFormat("en");
export const count = (n) => whole.format(n);
export const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(0)} %` : "–");
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) [n, unit] = [n / 1024, unit + 1];
  return `${n >= 100 || unit === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[unit]}`;
}
export const shortId = (id) => id.replace(/^engine-/, "").slice(0, 8);
/** A request's id without its tenant, which stands beside it. */
export const requestOf = (id) => id.slice(id.indexOf("/") + 1);

const hues = [205, 35, 155, 285, 0, 60, 180, 325, 110, 250];
const tenantHues = new Map();
/** A tenant's colour: the same in every view, however many there are. */
export function tenantColour(tenant, shade = 0) {
  if (!tenantHues.has(tenant)) tenantHues.set(tenant, hues[tenantHues.size % hues.length]);
  const lightness = (isLight() ? 45 : 62) + shade * 7;
  return `hsl(${tenantHues.get(tenant)} 70% ${lightness}%)`;
}
export const isLight = () => document.documentElement.dataset.theme === "light";
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Return a canvas's context at the screen's own resolution, cleared, with its size in CSS pixels. */
export function paint(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Draw a line of the latest values, filled below. */
export function sparkline(canvas, values, colour = css("--accent")) {
  const { context, width, height } = paint(canvas);
  const top = Math.max(...values, 1e-9);
  const x = (index) => (width * index) / Math.max(1, values.length - 1);
  const y = (value) => height - 2 - ((height - 4) * value) / top;
  context.beginPath();
  values.forEach((value, index) => context.lineTo(x(index), y(value)));
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(0, height);
  context.globalAlpha = 0.15;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}

const tip = document.getElementById("tip");
/** Show what `describe(event)` says beside the pointer while it is over an element; null hides it. */
export function withTip(element, describe) {
  element.addEventListener("pointermove", (event) => {
    const text = describe(event);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  element.addEventListener("pointerleave", () => (tip.hidden = true));
  return element;
}
export const hideTip = () => (tip.hidden = true);
