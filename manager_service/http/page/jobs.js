// All jobs: status, progress, reward as a curve, what each waits for. Rows that cannot be seen ask for nothing.

import {get, job as readJob, jobs, ofJob, session} from "./api.js";
import {announce, fill, h, repeat, say, select} from "./dom.js";
import {ago, duration, evaluated, failedShare, FINAL, isSupervised, loss, name, reward, share, standing} from "./format.js";
import {spark} from "./spark.js";

const POINTS = 40;
const EVERY_MS = 3000;
const COLUMNS = {"": "tick", Tenant: "short", Status: "short", Progress: "middle", Reward: "middle", Loss: "middle", Evaluation: "short", "Newest event": "long", Made: "short"};
const STATUSES = ["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"];

export const address = (job, more = {}) => `#/job/${encodeURIComponent(job.id)}?${new URLSearchParams({...of(job.organization_id), ...more})}`;
const of = (tenant) => session.isOperator ? {tenant} : {};

export async function show(node, {params, signal}) {
  const rows = new Map();
  const body = h("tbody");
  const count = h("span", {class: "muted", "aria-live": "polite"});
  const word = h("input", {type: "search", placeholder: "name, id or model", "aria-label": "Find jobs", value: params.get("find") ?? ""});
  const status = select([["", "any status"], ...STATUSES], params.get("status") ?? "", {"aria-label": "Status"});
  const compare = h("button", {type: "button", disabled: true, onclick: () => { location.hash = comparing(rows); }}, "Compare");
  const heads = ["", "Job", ...(session.isOperator ? ["Tenant"] : []), "Status", "Progress", "Reward", "Loss", "Evaluation", "Newest event", "Made"];
  fill(node,
    h("div", {class: "bar"}, h("h1", {}, "Jobs"), count, h("span", {class: "grow"}), word, status, compare),
    h("div", {class: "scroll"}, h("table", {class: "jobs"}, h("caption", {class: "sr"}, "Jobs, newest first"),
      h("colgroup", {}, heads.map((head) => h("col", {class: COLUMNS[head] ?? null}))),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", {scope: "col"}, head || h("span", {class: "sr"}, "Compare"))))), body)));

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const row = rows.get(entry.target.dataset.key);
      if (!row) continue;
      row.isSeen = entry.isIntersecting;
      if (row.isSeen && !row.isDrawn) refresh(row, signal);
    }
  }, {rootMargin: "100px"});
  let numShown = 0;
  const sift = (some) => {
    const wanted = word.value.trim().toLowerCase();
    for (const row of some) {
      const text = `${row.job.id} ${row.job.user_provided_suffix ?? ""} ${row.job.model} ${row.job.organization_id}`.toLowerCase();
      row.node.hidden = !text.includes(wanted) || (status.value !== "" && row.job.status !== status.value);
      numShown += row.node.hidden ? 0 : 1;
    }
    say(count, `${numShown} of ${rows.size}`);
  };
  const filter = () => { numShown = 0; sift(rows.values()); };
  word.addEventListener("input", filter);
  status.addEventListener("change", filter);
  const mark = () => { compare.disabled = !chosen(rows).length; };
  let isWhole = false; // before that the list has the connections for itself: a row asks for its curve behind it
  const take = (found, isNew) => {
    const fresh = [];
    for (const job of found) {
      const row = rows.get(job.id);
      if (row) update(row, job);
      else {
        const made = makeRow(job, mark);
        rows.set(job.id, made);
        if (isWhole) seen.observe(made.node);
        fresh.push(made);
      }
    }
    sift(fresh);
    if (isNew) body.prepend(...fresh.map((row) => row.node));
    else body.append(...fresh.map((row) => row.node));
  };

  const tenants = tenantsOf(params);
  if (tenants.length === 1) {
    const rest = []; // is shown at once behind the first page: each time that rows come, the browser lays out all of them
    for await (const page of jobs(tenants[0], signal)) rows.size ? rest.push(...page) : take(page, false);
    take(rest, false);
  } else {
    const found = await Promise.all(tenants.map(async (tenant) => {
      const all = [];
      for await (const page of jobs(tenant, signal)) all.push(...page);
      return all;
    }));
    take(found.flat().sort((a, b) => b.created_at - a.created_at), false);
  }
  isWhole = true;
  for (const row of rows.values()) seen.observe(row.node);
  if (!rows.size) fill(body, h("tr", {}, h("td", {colspan: heads.length, class: "muted"}, session.isOperator ? "No tenant has a job." : ["No job yet. ", h("a", {href: "#/submit"}, "Submit one"), "."])));
  announce(`${rows.size} jobs`);

  repeat(signal, EVERY_MS, async () => {
    if (signal.aborted) return;
    for (const tenant of tenants) {
      const page = await get("/v1/fine_tuning/jobs", {query: {limit: 20}, tenant, signal}).catch(() => null);
      if (page && page.data.length) {
        if (!rows.size) body.replaceChildren();
        take(page.data, true);
      }
    }
    const open = [...rows.values()].filter((row) => row.isSeen && (!FINAL.has(row.job.status) || row.job.status !== row.drawnStatus));
    await Promise.all(open.map((row) => refresh(row, signal)));
  });
  signal.addEventListener("abort", () => seen.disconnect());
}

function tenantsOf(params) {
  if (!session.isOperator) return [""];
  return params.get("tenant") ? [params.get("tenant")] : session.tenants.map((tenant) => tenant.id);
}

function makeRow(job, onmark) {
  const box = h("input", {type: "checkbox", "aria-label": `Compare ${name(job)}`, onchange: onmark});
  const row = {
    job, box, isSeen: false, isDrawn: false,
    status: h("span"), steps: h("span", {class: "number"}), bar: h("progress", {max: 1, value: 0, "aria-label": "Steps"}),
    failed: h("span", {class: "badge failed", hidden: true}), reward: h("span", {class: "number"}), loss: h("span", {class: "number loss"}), curve: h("span", {class: "spark"}), evals: h("td", {class: "number"}), waits: h("span", {class: "cut"}), since: h("span", {class: "muted"}), made: h("td", {class: "muted"}),
  };
  row.node = h("tr", {"data-key": job.id},
    h("td", {}, box),
    h("td", {}, h("a", {href: address(job), class: "cut name"}, name(job)), h("span", {class: "muted cut"}, `${job.model} · ${job.id.slice(-8)}`)),
    session.isOperator && h("td", {}, job.organization_id),
    h("td", {}, row.status, " ", row.failed), h("td", {}, h("span", {class: "pair"}, row.bar, row.steps)),
    [[!isSupervised(job), row.reward], [isSupervised(job), row.loss]].map(([isMain, last]) => h("td", {}, h("span", {class: "pair"}, isMain && row.curve, last))), row.evals,
    h("td", {class: "waits"}, row.waits, " ", row.since), row.made);
  update(row, job);
  return row;
}

function update(row, job) {
  row.job = job;
  row.status.className = `badge ${job.status}`;
  say(row.status, job.status.replace("_", " "));
  row.bar.value = Math.max(0, job.version) / Math.max(1, job.num_steps);
  say(row.steps, `${Math.max(0, job.version)}/${job.num_steps}`);
  say(row.reward, isSupervised(job) ? "" : reward(job.last_reward));
  say(row.loss, loss(job.last_loss));
  say(row.evals, evaluated(job));
  say(row.made, ago(job.created_at));
  if (FINAL.has(job.status)) {
    say(row.waits, job.error?.message ?? "");
    row.waits.title = row.waits.textContent;
    say(row.since, job.error ? "" : `took ${duration((job.finished_at ?? job.created_at) - (job.started_at ?? job.created_at))}`);
  }
}

/** Asks for what a row shows next to its job: the curve, and the newest event of one that has not ended. */
async function refresh(row, signal) {
  const {id, organization_id: tenant} = row.job;
  row.isDrawn = true;
  try {
    if (!FINAL.has(row.job.status)) update(row, await readJob(id, {tenant, signal}));
    row.drawnStatus = row.job.status;
    const curves = row.job.version > 0 ? await ofJob(id, "metrics", {query: {points: POINTS}, tenant, signal}) : null;
    if (curves && isSupervised(row.job)) spark(row.curve, curves.metrics.loss ?? [], row.job.last_loss, "loss");
    else if (curves) spark(row.curve, curves.metrics.reward_mean ?? [], row.job.last_reward);
    const failed = failedShare(curves);
    row.failed.hidden = failed === 0;
    say(row.failed, `${share(failed)} failed`);
    if (FINAL.has(row.job.status)) return;
    const events = (await ofJob(id, "events", {query: {limit: 5}, tenant, signal})).data;
    const told = standing(events);
    say(row.waits, told ? told.message : "its owner");
    row.waits.title = row.waits.textContent;
    say(row.since, told ? ago(told.created_at) : "");
  } catch (error) {
    if (!signal.aborted) row.isDrawn = false;
  }
}

const chosen = (rows) => [...rows.values()].filter((row) => row.box.checked).map((row) => row.job);

function comparing(rows) {
  const picked = chosen(rows).map((job) => session.isOperator ? `${job.organization_id}/${job.id}` : job.id);
  return `#/compare?${new URLSearchParams({jobs: picked.join(",")})}`;
}
