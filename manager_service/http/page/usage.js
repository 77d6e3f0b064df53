// What a tenant has used: by day, in all, by job. The operator sees every tenant.

import {get, session} from "./api.js";
import {fill, h, table} from "./dom.js";
import {bytes, duration, name, number} from "./format.js";

const HEADS = ["", ">Prompt", ">Sampled", ">Trained", ">Wasted", ">Rollout", ">Environment", ">Training"];
const cells = (one) => [number(one.prompt_tokens), number(one.sampled_tokens), number(one.trained_tokens), number(one.wasted_tokens), duration(one.rollout_s), duration(one.env_s), duration(one.train_s)];

export async function show(node, {params, signal}) {
  const chosen = params.get("tenant");
  const tenants = session.isOperator ? chosen ? [chosen] : session.tenants.map((one) => one.id) : [""];
  const reports = await Promise.all(tenants.map((tenant) => get("/v1/usage", {tenant, signal})));
  const newest = tenants.length === 1 ? (await get("/v1/fine_tuning/jobs", {query: {limit: 100}, tenant: tenants[0], signal})).data : [];
  const names = new Map(newest.map((job) => [job.id, name(job)]));
  fill(node, h("h1", {}, "Usage"),
    reports.length > 1 && [h("h2", {}, "By tenant"), table("Use by tenant", ["Tenant", ...HEADS.slice(1), ">Today", ">Stored"], reports.map((report) => [h("a", {href: `#/usage?tenant=${encodeURIComponent(report.tenant)}`}, report.tenant), ...cells(report.total), limit(report), stored(report)]))],
    days(reports),
    reports.length === 1 && [h("h2", {}, "By job"), table("Use by job", ["Job", ...HEADS.slice(1)], [["in all", ...cells(reports[0].total)], ...reports[0].data.toSorted((a, b) => whole(b) - whole(a)).map((one) => [one.job.startsWith("ftjob") ? h("a", {href: `#/job/${one.job}${session.isOperator ? `?tenant=${encodeURIComponent(reports[0].tenant)}` : ""}`, title: one.job}, names.get(one.job) ?? one.job) : one.job, ...cells(one)])]), h("p", {class: "muted"}, `Today ${limit(reports[0])} tokens. Days are UTC's. Stored: ${stored(reports[0])}.`)]);
}

const whole = (one) => one.prompt_tokens + one.sampled_tokens + one.trained_tokens;

const limit = (report) => `${number(report.tokens_today)}${report.max_tokens_per_day === null ? "" : ` of ${number(report.max_tokens_per_day)}`}`;

const stored = (report) => `${bytes(report.stored_bytes)} of ${bytes(report.max_stored_bytes)}`;

function days(reports) {
  const names = [...new Set(reports.flatMap((report) => Object.keys(report.days)))].sort();
  if (!names.length) return h("p", {class: "muted"}, "Nothing used yet.");
  const total = (day) => reports.reduce((sum, report) => sum + (report.days[day] ?? 0), 0);
  const most = Math.max(...names.map(total));
  const bars = names.slice(-60).map((day) => {
    const bar = h("span", {title: `${day}: ${number(total(day))} tokens`});
    bar.style.height = `${100 * total(day) / most}%`;
    return bar;
  });
  const rows = names.toReversed().map((day) => [day, ...reports.map((report) => number(report.days[day] ?? 0))]);
  return [h("h2", {}, "Tokens by day"), h("div", {class: "days", "aria-hidden": "true"}, bars), table("Tokens by day", ["Day", ...reports.map((report) => `>${report.tenant}`)], rows, "narrow")];
}
