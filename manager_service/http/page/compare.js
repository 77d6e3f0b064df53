// Jobs laid over each other: one chart a figure, one line a job.

import {follow, job as readJob, jobs, ofJob, session} from "./api.js";
import {Chart, colour, load} from "./curves.js";
import {fill, h, table} from "./dom.js";
import {evaluated, FINAL, isSupervised, loss, name, number, reward} from "./format.js";
import {CHARTS, Curves} from "./figures.js";
import {address} from "./jobs.js";

const POINTS = 1000;
const MOST = 8;

export async function show(node, {params, signal}) {
  const wanted = (params.get("jobs") ?? "").split(",").filter(Boolean).slice(0, MOST).map(split);
  const found = (await Promise.all(wanted.map((one) => readJob(one.id, {tenant: one.tenant, signal}).catch(() => null)))).filter(Boolean);
  const grid = h("div", {class: "charts"});
  fill(node, h("div", {class: "bar"}, h("h1", {}, "Compare"), h("span", {class: "muted"}, `up to ${MOST} jobs`), h("span", {class: "grow"}), await chooser(wanted, signal)),
    found.length ? summary(found, wanted) : h("p", {class: "muted"}, "Choose jobs here, or mark them in the list of jobs."), grid);
  if (!found.length) return;
  const [uPlot, ...answers] = await Promise.all([load(), ...found.map((job) => ofJob(job.id, "metrics", {query: {points: POINTS}, tenant: job.organization_id, signal}))]);
  const all = answers.map((answer) => new Curves(answer));
  const charts = new Map();
  let isDue = false;
  const draw = () => { isDue = false; if (!signal.aborted) drawAll(uPlot, grid, charts, found, all); };
  const soon = () => { if (!isDue) { isDue = true; requestAnimationFrame(draw); } };
  draw();
  signal.addEventListener("abort", () => { for (const chart of charts.values()) chart.end(); });
  // A browser has six connections to a server: four jobs are followed live.
  found.filter((job) => !FINAL.has(job.status)).slice(0, 4).forEach(async (job) => {
    const curves = all[found.indexOf(job)];
    for await (const event of follow(job.id, curves.last, {tenant: job.organization_id, signal})) if (curves.add(event)) soon();
  });
}

const split = (text) => text.includes("/") ? {tenant: text.split("/")[0], id: text.split("/")[1], text} : {tenant: "", id: text, text};
const go = (texts) => { location.hash = `#/compare?${new URLSearchParams({jobs: texts.join(",")})}`; };

async function chooser(wanted, signal) {
  const field = h("input", {list: "known", placeholder: "job to add", "aria-label": "Job to add", onchange: () => go([...wanted.map((one) => one.text), field.value.trim()])});
  const options = h("datalist", {id: "known"});
  for (const tenant of session.isOperator ? session.tenants.map((one) => one.id) : [""]) {
    for await (const page of jobs(tenant, signal)) {
      options.append(...page.map((job) => h("option", {value: session.isOperator ? `${tenant}/${job.id}` : job.id}, name(job))));
      break;
    }
  }
  return h("span", {}, field, options);
}

function summary(found, wanted) {
  const rows = found.map((job, i) => {
    const swatch = h("i", {class: "swatch"});
    swatch.style.background = colour(i);
    return [h("span", {class: "pair"}, swatch, h("a", {href: address(job), class: "cut", title: name(job)}, name(job))), job.status, `${Math.max(0, job.version)}/${job.num_steps}`, isSupervised(job) ? "–" : reward(job.last_reward), loss(job.last_loss),
      evaluated(job), number(job.trained_tokens), differing(job, found),
      h("button", {type: "button", class: "quiet", onclick: () => go(wanted.map((one) => one.text).filter((text) => !text.endsWith(job.id)))}, "Leave out")];
  });
  return table("Jobs compared", ["Job", "Status", ">Steps", ">Reward", ">Loss", ">Evaluation", ">Tokens trained", "What differs", ""], rows, "compared");
}

/** The hyperparameters that all of them have, and not all the same. */
function differing(job, found) {
  const hyper = (one) => one.hyperparameters;
  const keys = Object.keys(hyper(job)).filter((key) => found.every((one) => key in hyper(one)) && new Set(found.map((one) => JSON.stringify(hyper(one)[key]))).size > 1);
  return keys.map((key) => `${key} ${JSON.stringify(hyper(job)[key])}`).join(", ");
}

function drawAll(uPlot, grid, charts, found, all) {
  for (const [title, [figure], note] of CHARTS) {
    if (!all.some((curves) => curves.columns[figure]?.some((value) => value !== null && value !== undefined))) continue;
    const evaluations = all.map((curves) => curves.evaluations.filter((data) => typeof data[`eval_${figure}`] === "number"));
    const xs = [...new Set([...all.flatMap((curves) => curves.steps), ...evaluations.flat().map((data) => data.version)])].sort((a, b) => a - b);
    const place = new Map(xs.map((x, i) => [x, i]));
    const placed = (points) => {
      const values = new Array(xs.length).fill(null);
      for (const [x, value] of points) values[place.get(x)] = value ?? null;
      return values;
    };
    const series = all.flatMap((curves, i) => [
      {label: name(found[i]), values: placed(curves.steps.map((step, k) => [step, curves.columns[figure]?.[k]])), colour: colour(i)},
      ...(evaluations[i].length ? [{label: `${name(found[i])}, evaluation`, values: placed(evaluations[i].map((data) => [data.version, data[`eval_${figure}`]])), dots: true, colour: colour(i)}] : []),
    ]);
    if (!charts.has(title)) {
      charts.set(title, new Chart(uPlot, title, {note}));
      grid.append(charts.get(title).node);
    }
    charts.get(title).draw(xs, series);
  }
}
