// Makes DOM nodes. Text becomes text nodes and never markup, so nothing that a tenant wrote can run; nor can it turn other text around.

const OWN_ADDRESS = /^(#|\/(?!\/)|blob:)/;
const UNSEEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

/** The text with each unseen character, such as those that turn text around, as the escape of JSON: \u202e. */
export function visible(text) {
  return text.replace(UNSEEN, (found) => found.split("").map((unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`).join(""));
}

/** A node: h("a", {href: "#/jobs", onclick: f, class: "x"}, "text", child). null and false are left out. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) set(node, name, value);
  node.append(...shown(children));
  return node;
}

const shown = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
  .map((child) => child instanceof Node ? child : visible(String(child)));

function set(node, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
  else if (name === "value" || name === "checked") node[name] = value;
  else if (name === "href" && !OWN_ADDRESS.test(value)) throw new Error("links lead only to this service");
  else if (name === "title" || name === "aria-label") node.setAttribute(name, visible(String(value)));
  else node.setAttribute(name, value === true ? "" : value);
}

export function fill(node, ...children) {
  node.replaceChildren(...shown(children));
  return node;
}

/** Sets a node's text, if it changed: what did not change keeps a reader's selection. */
export function say(node, text) {
  const seen = visible(text);
  if (node.textContent !== seen) node.textContent = seen;
}

/** Says something to screen readers, without a change to see. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

export function table(caption, heads, rows, kind = "") {
  return h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    h("table", {class: kind},
      h("caption", {class: "sr"}, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", {scope: "col", class: head.startsWith(">") ? "number" : null}, head.replace(/^>/, ""))))),
      h("tbody", {}, rows.map((row) => row instanceof Node ? row
        : h("tr", {}, row.map((cell, i) => h("td", {class: heads[i].startsWith(">") ? "number" : null}, cell)))))));
}

export function select(options, chosen, attributes = {}) {
  return h("select", attributes, options.map((one) => {
    const [value, text] = Array.isArray(one) ? one : [one, one];
    return h("option", {value, selected: value === chosen}, text);
  }));
}

/** Calls `work` now and again `every_ms` after each end, until the view is left. A hidden tab waits. */
export async function repeat(signal, every_ms, work) {
  while (!signal.aborted) {
    if (!document.hidden) await work();
    await sleep(every_ms, signal);
  }
}

export function sleep(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, {once: true});
  });
}
