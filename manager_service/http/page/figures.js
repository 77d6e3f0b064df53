// The figures of a job's steps as curves, live; the fate of its trajectories; why some failed.

import {follow, ofJob} from "./api.js";
import {Chart, colour, load} from "./curves.js";
import {fill, h, repeat, table} from "./dom.js";
import {FINAL, isSupervised, number, share} from "./format.js";

export const POINTS = 2000;
const Z = 1.96;
const LEDGER = ["trained", "in_flight", "filtered", "stale", "failed", "cancelled"];
/** Charts: the figures in each, with what they mean. One is shown as soon as a step has one of its figures. */
export const CHARTS = [
  ["Reward", ["reward_mean"], "mean reward of a step's trajectories; dots: evaluations with their 95 % intervals"],
  ["KL to the base", ["kl"], "of the trained policy to the base model, a token"],
  ["KL to the sampler", ["sampling_kl"], "KL(sampling ‖ trained), a token"],
  ["Entropy", ["entropy"], "mean of −log p of the sampled tokens, in nats"],
  ["Length", ["length"], "tokens that the model wrote, a trajectory"],
  ["Truncated", ["truncated_share"], "share of the trajectories that ended for want of tokens"],
  ["Clipped", ["clip_fraction"], "share of the trained tokens whose ratio the clip binds"],
  ["Staleness", ["staleness"], "versions that the trajectories lag behind"],
  ["Loss", ["loss"], "of a step; dots: a supervised job's evaluations"],
  ["Gradient norm", ["grad_norm"], ""],
  ["Tokens/s", ["tokens_per_s"], "trained tokens of a step, by the seconds since the step before"],
  ["Failed", ["failed_share"], "share of the trajectories that failed and were left out"],
  ["Engine and trainer", ["sampling_gap", "lagged_gap"], "mean |log r| over samples of the trained version, and of older ones under theirs: how far their log-probs differ"],
  ["Effective samples", ["ess_share"], "of the importance weights, as a share of the trained tokens"],
];

/** A job's curves as one object that steps are added to. */
export class Curves {
  constructor(answer) {
    this.steps = [...answer.step];
    this.columns = structuredClone(answer.metrics);
    this.evaluations = [...answer.evaluations];
    this.last = answer.last_event;
    this.derive(0);
  }

  /** Takes a new event in. True if it has figures. */
  add(event) {
    this.last = event.id;
    if ("eval_n" in event.data) this.evaluations.push(event.data);
    else if ("reward_mean" in event.data) {
      this.steps.push(event.data.step);
      const before = this.steps.length - 1;
      const figures = Object.entries(event.data).filter(([, value]) => typeof value === "number");
      for (const [key] of figures) this.columns[key] ??= new Array(before).fill(null);
      for (const [key, column] of Object.entries(this.columns)) column[before] = typeof event.data[key] === "number" ? event.data[key] : null;
      this.derive(this.steps.length - 1);
    } else return false;
    return true;
  }

  derive(first) {
    const ratio = (name, over, under) => {
      const [tokens = [], by = [], column] = [this.columns[over], this.columns[under], (this.columns[name] ??= [])];
      for (let i = first; i < this.steps.length; i++) column[i] = tokens[i] && by[i] ? tokens[i] / by[i] : null;
    };
    ratio("tokens_per_s", "step_tokens", "step_s");
    ratio("length", "written_tokens", "num_rows");
  }

  /** Versions that have a step or an evaluation, and figures of both over them: rewards, or losses. */
  both(figure = "reward_mean", measured = "eval_reward_mean") {
    const xs = [...new Set([...this.steps, ...this.evaluations.map((data) => data.version)])].sort((a, b) => a - b);
    const place = new Map(xs.map((x, i) => [x, i]));
    const empty = () => new Array(xs.length).fill(null);
    const [train, mean, errors] = [empty(), empty(), empty()];
    this.steps.forEach((step, i) => { train[place.get(step)] = this.columns[figure]?.[i] ?? null; });
    for (const data of this.evaluations) {
      mean[place.get(data.version)] = data[measured] ?? null;
      errors[place.get(data.version)] = Z * (data.eval_reward_stderr ?? 0);
    }
    return {xs, train, mean, errors};
  }
}

export async function figures(panel, view) {
  const {id, tenant, signal} = view;
  const [uPlot, answer] = await Promise.all([load(), ofJob(id, "metrics", {query: {points: POINTS}, tenant, signal})]);
  const curves = new Curves(answer);
  const grid = h("div", {class: "charts"}), ledger = h("div", {class: "ledger"}), reasons = h("div");
  fill(panel, h("h2", {class: "sr"}, "Figures of its steps"), grid, h("h2", {}, "Trajectories"), ledger, reasons,
    answer.steps_a_point > 1 && h("p", {class: "muted"}, `Each point stands for ${answer.steps_a_point} events of the job.`));
  const charts = new Map();
  let isDue = false;
  const draw = () => { isDue = false; if (!signal.aborted) drawAll(uPlot, grid, charts, curves, isSupervised(view.job)); };
  const soon = () => { if (!isDue) { isDue = true; requestAnimationFrame(draw); } };
  draw();
  await failures(reasons, view);
  repeat(signal, 2000, async () => {
    if (ledger.firstChild && FINAL.has(view.job.status) && view.wasCounted) return;
    view.wasCounted = FINAL.has(view.job.status);
    showLedger(ledger, await ofJob(id, "ledger", {tenant, signal}).catch(() => null));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts.values()) chart.shape = ""; soon(); }, {signal});
  signal.addEventListener("abort", () => { for (const chart of charts.values()) chart.end(); });
  (async () => {
    for await (const event of follow(id, curves.last, {tenant, signal})) {
      if (curves.add(event)) soon();
      if (event.data.failed_reason) failures(reasons, view);
    }
  })();
}

/** `supervised`: the job's main figure is its loss; it has no rewards. */
function drawAll(uPlot, grid, charts, curves, supervised) {
  const main = supervised ? "Loss" : "Reward";
  for (const [title, names, note] of CHARTS.toSorted((a, b) => (b[0] === main) - (a[0] === main))) {
    const known = names.filter((key) => curves.columns[key]?.some((value) => value !== null && value !== undefined));
    if (!known.length && title !== main) continue;
    if (!charts.has(title)) {
      charts.set(title, new Chart(uPlot, title, {note}));
      grid.append(charts.get(title).node);
    }
    const chart = charts.get(title);
    if (title !== main) chart.draw(curves.steps, known.map((key, i) => ({label: key, values: curves.columns[key], colour: colour(i)})));
    else {
      const {xs, train, mean, errors} = supervised ? curves.both("loss", "eval_loss") : curves.both();
      const evaluation = {label: "evaluation", values: mean, errors, dots: true, colour: colour(1)};
      chart.draw(xs, [{label: "training", values: train, colour: colour(0)}, ...(curves.evaluations.length ? [evaluation] : [])]);
    }
  }
}

function showLedger(node, ledger) {
  if (!ledger) return;
  const parts = LEDGER.filter((fate) => ledger[fate] > 0);
  const bar = h("div", {class: "stack", role: "img", "aria-label": `${ledger.issued} issued: ${parts.map((fate) => `${ledger[fate]} ${fate.replace("_", " ")}`).join(", ")}`},
    parts.map((fate) => {
      const part = h("span", {class: fate, title: `${fate}: ${ledger[fate]}`});
      part.style.flexGrow = ledger[fate];
      return part;
    }));
  fill(node, bar, h("p", {class: "key"}, h("span", {}, `${ledger.issued} issued =`), LEDGER.map((fate) => h("span", {class: ledger[fate] ? fate : "muted"}, h("i"), `${ledger[fate]} ${fate.replace("_", " ")}`))));
}

/** Why trajectories failed, by the newest hundred events. */
async function failures(node, {id, tenant, signal}) {
  const found = (await ofJob(id, "events", {query: {limit: 100}, tenant, signal}).catch(() => ({data: []}))).data;
  const by = new Map();
  for (const {data} of found) {
    if (!data.failed_reason) continue;
    const row = by.get(data.failed_reason) ?? {steps: 0, most: 0};
    by.set(data.failed_reason, {steps: row.steps + 1, most: Math.max(row.most, data.failed_share)});
  }
  if (!by.size) return fill(node);
  const rows = [...by].map(([reason, row]) => [reason, number(row.steps), share(row.most)]);
  fill(node, h("h2", {}, "Commonest failures of the newest steps"), table("Failures", ["Reason", ">Steps", ">Most of a step"], rows));
}
