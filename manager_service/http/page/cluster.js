// The operator's view: who used which worker when, what waits in which queue, workers, dead letters.

import {get, session, text} from "./api.js";
import {fill, h, repeat, say, table} from "./dom.js";
import {ago, bytes, clock, duration, number, share} from "./format.js";
import {colour} from "./curves.js";

const [EVERY_MS, WINDOW_S, ROW, LEFT, MOST_SPANS] = [2000, 120, 22, 150, 60_000];

export async function show(node, {signal}) {
  if (!session.isOperator) return fill(node, h("h1", {}, "Cluster"), h("p", {}, "The cluster is the operator's to see: open this page with the admin key."));
  const canvas = h("canvas", {class: "timeline", role: "img"}), legend = h("p", {class: "key"}), told = h("p", {class: "muted"});
  const workers = h("div"), queues = h("div"), dead = h("div");
  const span = h("select", {"aria-label": "Time shown"}, [[120, "2 minutes"], [600, "10 minutes"], [3600, "1 hour"]].map(([value, name]) => h("option", {value}, name)));
  fill(node, h("div", {class: "bar"}, h("h1", {}, "Cluster"), h("span", {class: "grow"}), span), h("h2", {}, "Who used which worker"), canvas, legend, told, h("h2", {}, "Workers"), workers, h("h2", {}, "Queues"), queues, h("h2", {}, "Dead letters"), dead);
  let spans = [], since = null;
  span.addEventListener("change", () => { spans = []; since = null; refresh(); });
  canvas.addEventListener("mousemove", (event) => say(told, under(canvas, event)));
  async function refresh() {
    const now = Date.now() / 1000, window_s = Number(span.value) || WINDOW_S;
    const [found, alive, figures, letters, wanted] = await Promise.all([
      get("/v1/cluster/timeline", {query: {since: since ?? now - window_s}, signal}), get("/v1/cluster/workers", {signal}), text("/metrics", {signal}), get("/v1/cluster/dead", {query: {limit: 20}, signal}), get("/v1/cluster/wanted", {signal})]).catch((error) => {
      if (!signal.aborted) say(told, error.message);
      return [];
    });
    if (!found) return;
    // Reports come once a second, and a worker's clock may lag: the newest seconds are asked for again.
    const from = since ?? 0;
    spans = [...spans.filter((one) => one.end <= from && one.end > now - window_s), ...found.data].slice(-MOST_SPANS);
    since = now - 10;
    draw(canvas, legend, spans, alive.data, now, window_s);
    fill(workers, workerTable(alive.data), ...Object.entries(wanted).map(([base, one]) => h("p", {class: "muted"}, `${base}: ${one.turns} turns want ${one.workers} rollout workers${one.bounds && ` (${one.bounds})`}, ${one.live} are there${one.retires && `; ${one.retires} retires`}`)));
    fill(queues, queueTable(figures));
    fill(dead, deadTable(letters.data));
  }
  await repeat(signal, EVERY_MS, refresh);
}

function draw(canvas, legend, spans, alive, now, window_s) {
  const names = [...new Set([...alive.map((one) => one.id), ...spans.map((one) => one.worker)])];
  const service = new Map([...spans.map((one) => [one.worker, one.service]), ...alive.map((one) => [one.id, one.service])]);
  names.sort((a, b) => `${service.get(a)} ${a}`.localeCompare(`${service.get(b)} ${b}`));
  const tenants = [...new Set(spans.map((one) => one.tenant))].sort();
  const [width, height] = [canvas.clientWidth, names.length * ROW + 22];
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.scale(devicePixelRatio, devicePixelRatio);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const x = (time) => LEFT + (time - (now - window_s)) / window_s * (width - LEFT - 8);
  names.forEach((name, i) => {
    context.fillStyle = style.getPropertyValue("--muted");
    context.fillText(`${service.get(name)} ${name.slice(-8)}`, 10, i * ROW + ROW / 2 + 2, LEFT - 16);
    context.fillStyle = style.getPropertyValue("--rule");
    context.fillRect(LEFT, i * ROW + ROW + 1, width - LEFT - 8, 1);
  });
  const row = new Map(names.map((name, i) => [name, i])), fills = tenants.map((_, i) => colour(i));
  for (const one of spans) {
    const [from, to] = [Math.max(LEFT, x(one.start)), x(one.end)];
    if (to < LEFT) continue;
    context.fillStyle = fills[tenants.indexOf(one.tenant)];
    context.fillRect(from, row.get(one.worker) * ROW + 5, Math.max(1, to - from), ROW - 7);
  }
  context.fillStyle = style.getPropertyValue("--muted");
  for (let i = 0; i <= 4; i++) context.fillText(clock(now - window_s + i * window_s / 4), Math.min(x(now - window_s + i * window_s / 4), width - 74), names.length * ROW + 13);
  fill(legend, tenants.map((tenant, i) => { const swatch = h("i"); swatch.style.background = fills[i]; return h("span", {}, swatch, tenant || "switches of base models"); }));
  canvas.setAttribute("aria-label", `${names.length} workers, ${tenants.length} tenants: ${tenants.map((tenant) => `${tenant} ${duration(spans.filter((one) => one.tenant === tenant).reduce((sum, one) => sum + one.end - one.start, 0))}`).join(", ")} of work in ${duration(window_s)}`);
  canvas.drawn = {spans, names, now, window_s, width};
}

/** What the worker under the pointer did at that time. */
function under(canvas, event) {
  if (!canvas.drawn) return "";
  const {spans, names, now, window_s, width} = canvas.drawn;
  const name = names[Math.floor(event.offsetY / ROW)], time = now - window_s + (event.offsetX - LEFT) / (width - LEFT - 8) * window_s;
  const found = spans.filter((one) => one.worker === name && one.start <= time + 0.1 && one.end >= time - 0.1);
  const texts = [...new Set(found.map((one) => one.tenant ? `${one.tenant} · ${one.job} · ${one.phase}` : one.phase))];
  return name ? `${name} at ${clock(time)}: ${texts.slice(0, 4).join("; ") || "idle"}` : "";
}

function workerTable(workers) {
  const rows = workers.map((one) => [one.service, h("span", {title: one.id}, `${one.host} ${one.pid}`), one.base_model, one.state, share(one.busy), `${one.in_use}/${one.slots}`, [...new Set(one.working_for.map((work) => work.tenant))].join(", "), number(one.resident.length), one.reason]);
  return rows.length ? table("Workers", ["Service", "Worker", "Base model", "State", ">Busy", ">In use", "Works for", ">Adapters in memory", "Waits for, or refused"], rows) : h("p", {class: "error"}, "No worker is alive.");
}

const LINE = /^(\w+)\{([^}]*)\} ([-+.\w]+)$/;

/** Queues with work in them, from Prometheus' text. */
function queueTable(figures) {
  const streams = new Map();
  for (const line of figures.split("\n")) {
    const found = LINE.exec(line);
    if (!found?.[1].startsWith("marlaas_stream_")) continue;
    const labels = Object.fromEntries([...found[2].matchAll(/(\w+)="([^"]*)"/g)].map(([, key, value]) => [key, value]));
    const key = `${labels.base_model} ${labels.stream}`;
    streams.set(key, {...labels, ...streams.get(key), [found[1].slice("marlaas_stream_".length)]: Number(found[3])});
  }
  const all = [...streams.values()], busy = all.filter((one) => one.length > 0).sort((a, b) => b.length - a.length);
  if (!busy.length) return h("p", {class: "muted"}, `All ${all.length} queues are empty.`);
  return table("Queues", ["Base model", "Queue", ">Open", ">Held by a worker", ">Not taken yet", ">Oldest"], busy.map((one) => [one.base_model, one.stream, number(one.length), number(one.pending), number(one.lag), duration(one.oldest_seconds)]));
}

function deadTable(letters) {
  if (!letters.length) return h("p", {class: "muted"}, "None.");
  return table("Dead letters, newest first", ["When", "Tenant", "Job", "Queue", "Reason", ">Deliveries", ">Size"], letters.map((one) => [ago(one.created_at), one.tenant, one.job, one.stream, one.reason, number(one.deliveries), bytes(one.num_bytes)]));
}
