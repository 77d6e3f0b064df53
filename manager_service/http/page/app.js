// Asks for the key once, and shows the view that the address names: #/job/ftjob-1?tab=samples

import {enter, forget, keep, key, session, ApiError} from "./api.js";
import {fill, h, select} from "./dom.js";

const VIEWS = ["jobs", "job", "compare", "chat", "submit", "cluster", "usage"];
const main = document.getElementById("main");
let leaving = new AbortController();

/** What stands for a part of an address; a part that is no such text stands for itself. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** The view's name, what follows it, and its parameters. */
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/").map(decoded);
  return {view: VIEWS.includes(view) ? view : "jobs", rest, params: new URLSearchParams(query)};
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const {signal} = leaving;
  const {view, rest, params} = place();
  for (const link of document.querySelectorAll("#nav a")) {
    const isHere = link.getAttribute("href") === `#/${view === "job" ? "jobs" : view}`;
    isHere ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} – MARLaaS`;
  const node = h("div", {class: `view ${view}`});
  fill(main, node);
  try {
    const module = await import(`./${view}.js`);
    await module.show(node, {rest, params, signal});
  } catch (error) {
    if (signal.aborted) return;
    if (error instanceof ApiError && error.status === 401) return askForKey(error.message);
    node.append(h("p", {class: "error", role: "alert"}, error.message));
    if (!(error instanceof ApiError)) console.error(error);
  }
}

function askForKey(reason = "") {
  const dialog = document.getElementById("ask");
  document.getElementById("refused").textContent = reason;
  if (!dialog.open) dialog.showModal();
}

async function open() {
  if (!key()) return askForKey();
  try {
    await enter();
  } catch (error) {
    if (error.status === 401) forget();
    return askForKey(error.message);
  }
  document.body.classList.toggle("is-operator", session.isOperator);
  document.getElementById("who").textContent = session.isOperator ? "operator" : session.tenant;
  document.getElementById("leave").hidden = false;
  offerTenants();
  await show();
}

function offerTenants() {
  const chosen = place().params.get("tenant") ?? "";
  const options = [["", "all"], ...session.tenants.map((tenant) => [tenant.id, tenant.id])];
  const chooser = select(options, chosen, {id: "tenant"});
  chooser.addEventListener("change", () => {
    const {view} = place();
    location.hash = `#/${view === "job" ? "jobs" : view}${chooser.value ? `?tenant=${encodeURIComponent(chooser.value)}` : ""}`;
  });
  document.getElementById("tenant").replaceWith(chooser);
}

document.querySelector("#ask form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = document.getElementById("key");
  keep(field.value.trim());
  field.value = "";
  document.getElementById("ask").close();
  open();
});
document.getElementById("ask").addEventListener("cancel", (event) => event.preventDefault());
document.getElementById("leave").addEventListener("click", () => { forget(); location.reload(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("hashchange", () => { if (key()) show(); });
open();
