// What a screen reader would meet without a name: fields, buttons, links, pictures and tables that are shown.
(() => {
  const nameOf = (e) => e.ariaLabel || [...(e.labels ?? [])].map((label) => label.textContent).join("") || (["INPUT", "SELECT", "TEXTAREA"].includes(e.tagName) ? "" : e.textContent) || "";
  const isShown = (e) => e.checkVisibility({visibilityProperty: true});
  const nameless = [...document.querySelectorAll("input, select, textarea, button, a, canvas[role], svg[role], [role=img], [role=region], progress, section")].filter((e) => isShown(e) && !nameOf(e).trim());
  const tables = [...document.querySelectorAll("table")].filter((e) => !e.closest(".uplot") && !e.caption?.textContent.trim());
  const headless = [...document.querySelectorAll("table th:not([scope])")].filter((e) => !e.closest(".uplot"));
  const silent = [...document.querySelectorAll("canvas, svg")].filter((e) => isShown(e) && !e.closest("[role=img][aria-label], [aria-hidden=true]"));
  return [...nameless, ...tables, ...headless, ...silent].map((e) => e.outerHTML.slice(0, 120));
})()
