// One job: its figures live, its samples, checkpoints, events and settings, each under an address of its own.

import {command, download, follow, job as readJob, ofJob, session} from "./api.js";
import {announce, fill, h, repeat, say, table} from "./dom.js";
import {ago, clock, duration, evaluated, FINAL, isSupervised, loss, moment, name, number, reward, standing} from "./format.js";
import {figures} from "./figures.js";
import {showSamples} from "./samples.js";

const TABS = {figures: "Figures", samples: "Samples", checkpoints: "Checkpoints", events: "Events", settings: "Settings"};
const ACTIONS = {pause: ["validating_files", "queued", "running"], resume: ["paused"], cancel: ["validating_files", "queued", "running", "paused"]};
const EVERY_MS = 2000;

export async function show(node, {rest: [id], params, signal}) {
  const tenant = params.get("tenant") ?? "";
  if (session.isOperator && !tenant) return fill(node, h("h1", {}, id), h("p", {}, "Whose job is it?"), h("ul", {}, session.tenants.map((one) =>
    h("li", {}, h("a", {href: `#/job/${encodeURIComponent(id)}?${new URLSearchParams({...Object.fromEntries(params), tenant: one.id})}`}, one.id)))));
  const tab = Object.hasOwn(TABS, params.get("tab")) ? params.get("tab") : "figures";
  const view = {id, tenant, params, signal, job: await readJob(id, {tenant, signal})};
  const head = h("div", {class: "head"});
  const panel = h("section", {id: "panel", "aria-label": TABS[tab]});
  const link = (to) => `#/job/${encodeURIComponent(id)}?${new URLSearchParams({...(tenant && {tenant}), tab: to})}`;
  fill(node, head,
    h("nav", {class: "tabs", "aria-label": "Parts of the job"}, Object.entries(TABS).map(([key, title]) =>
      h("a", {href: link(key), "aria-current": key === tab ? "page" : null}, title))),
    panel);
  const parts = makeHead(head, view);
  await {figures, samples: showSamples, checkpoints, events, settings}[tab](panel, view);
  repeat(signal, EVERY_MS, async () => {
    if (FINAL.has(view.job.status) && parts.wasFinal) return;
    view.job = await readJob(id, {tenant, signal}).catch(() => view.job);
    const newest = (await ofJob(id, "events", {query: {limit: 5}, tenant, signal}).catch(() => ({data: []}))).data;
    parts.update(newest);
  });
}

function makeHead(head, view) {
  const status = h("span"), steps = h("span", {class: "number"}), bar = h("progress", {max: 1, value: 0, "aria-label": "Steps"});
  const waits = h("p", {class: "waits"}), facts = h("p", {class: "muted"}), refused = h("p", {class: "error", role: "alert"});
  const act = (action) => async () => {
    try {
      view.job = await command(view.id, action);
      say(refused, "");
      parts.update([]);
    } catch (error) { say(refused, error.message); }
  };
  const buttons = Object.keys(ACTIONS).map((action) => h("button", {type: "button", class: "tenant-only", onclick: act(action)}, action[0].toUpperCase() + action.slice(1)));
  const chat = h("a", {class: "button tenant-only", href: "#/chat"}, "Chat");
  const model = h("code"), copy = h("button", {type: "button", class: "quiet", onclick: async () => { await navigator.clipboard.writeText(view.job.fine_tuned_model); announce("Copied"); }}, "Copy");
  const tuned = h("p", {class: "bar"}, "Model ", model, copy);
  const compare = h("a", {class: "button", href: `#/compare?${new URLSearchParams({jobs: session.isOperator ? `${view.tenant}/${view.id}` : view.id})}`}, "Compare");
  head.append(h("div", {class: "bar"}, h("h1", {}, name(view.job)), status, bar, steps, h("span", {class: "grow"}), chat, compare, buttons), tuned, facts, waits, refused);
  const parts = {
    wasFinal: false,
    update(newest) {
      const {job} = view;
      if (status.textContent && status.className !== `badge ${job.status}`) announce(`The job is ${job.status}`);
      status.className = `badge ${job.status}`;
      say(status, job.status.replace("_", " "));
      bar.value = Math.max(0, job.version) / Math.max(1, job.num_steps);
      say(steps, `${Math.max(0, job.version)}/${job.num_steps}`);
      const left = job.estimated_finish ? `, about ${duration(job.estimated_finish - Date.now() / 1000)} left` : "";
      const evals = evaluated(job) && ` · evaluation ${isSupervised(job) ? "loss " : ""}${evaluated(job)}${job.best_version === null ? "" : `, best version ${job.best_version}`}`;
      say(facts, `${job.id} · ${job.organization_id} · on ${job.model} · made ${ago(job.created_at)}${job.finished_at ? `, ended ${ago(job.finished_at)}` : left} · ${number(job.trained_tokens)} tokens trained${evals}`);
      const told = FINAL.has(job.status) ? newest[0] : standing(newest);
      say(waits, job.error ? job.error.message : !told || FINAL.has(job.status) && told.level === "info" ? "" : `${told.message} (${ago(told.created_at)})`);
      waits.classList.toggle("error", Boolean(job.error));
      buttons.forEach((button, i) => { button.hidden = !ACTIONS[Object.keys(ACTIONS)[i]].includes(job.status); });
      chat.hidden = tuned.hidden = job.fine_tuned_model === null;
      say(model, job.fine_tuned_model ?? "");
      if (job.fine_tuned_model) chat.href = `#/chat?${new URLSearchParams({a: `${job.fine_tuned_model}@${job.version}`, b: job.version > 1 ? `${job.fine_tuned_model}@0` : job.model})}`;
      parts.wasFinal = FINAL.has(job.status) && newest.length > 0;
    },
  };
  parts.update([]);
  return parts;
}

async function checkpoints(panel, {id, tenant, job, signal}) {
  const found = (await ofJob(id, "checkpoints", {query: {limit: 100}, tenant, signal})).data;
  const evals = new Map((await ofJob(id, "metrics", {query: {points: 10000}, tenant, signal})).evaluations.map((data) => [data.version, data]));
  const rows = found.map((one) => {
    const evaluation = evals.get(one.step_number);
    return [
      h("b", {}, `version ${one.step_number}`), moment(one.created_at), isSupervised(job) ? loss(one.metrics.loss) : reward(one.metrics.reward_mean),
      evaluation && isSupervised(job) ? loss(evaluation.eval_loss) : evaluation ? `${reward(evaluation.eval_reward_mean)} ± ${number(1.96 * (evaluation.eval_reward_stderr ?? 0), 2)}` : "",
      h("span", {class: "pair"},
        h("button", {type: "button", class: "quiet", onclick: () => download(`/v1/fine_tuning/jobs/${id}/checkpoints/${one.step_number}/content`, `${id}-${one.step_number}.zip`, {tenant})}, "Download"),
        h("a", {class: "button quiet tenant-only", href: `#/chat?${new URLSearchParams({a: one.fine_tuned_model_checkpoint, b: job.model})}`}, "Chat")),
    ];
  });
  fill(panel, rows.length ? table("Checkpoints, newest first", ["Version", "Made", isSupervised(job) ? ">Loss" : ">Reward", ">Evaluation", ""], rows) : h("p", {class: "muted"}, "No version yet."));
}

async function events(panel, {id, tenant, signal}) {
  const list = h("ol", {class: "events"});
  const line = (event) => h("li", {class: event.level}, h("time", {}, clock(event.created_at)), h("span", {}, event.message));
  const page = await ofJob(id, "events", {query: {limit: 100}, tenant, signal});
  list.append(...page.data.map(line));
  fill(panel, list, page.has_more && h("button", {type: "button", onclick: more}, "Older"));
  let {last_id: last} = page;
  async function more(click) {
    const next = await ofJob(id, "events", {query: {limit: 100, after: last}, tenant, signal});
    list.append(...next.data.map(line));
    last = next.last_id;
    click.target.hidden = !next.has_more;
  }
  (async () => {
    for await (const event of follow(id, page.first_id, {tenant, signal})) list.prepend(line(event));
  })();
}

async function settings(panel, {job}) {
  const {hyperparameters, ...method} = job.method[job.method.type];
  fill(panel,
    table("Hyperparameters", ["Hyperparameter", "Value"], Object.entries(hyperparameters).sort().map(([key, value]) => [key, JSON.stringify(value)]), "narrow"),
    !isSupervised(job) && [h("h2", {}, "Grader or environment"), h("pre", {tabindex: "0"}, JSON.stringify(method, null, 2))],
    h("p", {class: "muted"}, `seed ${job.seed} · training file ${job.training_file ?? "none"} · validation file ${job.validation_file ?? "none"} · ${job.num_items} items`));
}
