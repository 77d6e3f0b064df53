// A new job: files, a grader that is tried first, hyperparameters with their defaults and limits.

import {get, post, session, upload} from "./api.js";
import {fill, h, say, select} from "./dom.js";
import {bytes, duration, number} from "./format.js";

const TEXTS = {input: "{{sample.output_text}}", reference: "{{item.answer}}"};
const ASKED = (question) => [{role: "user", content: `${question}\n\n{{sample.output_text}}`}];
const GRADERS = {
  string_check: {type: "string_check", name: "right", operation: "eq", ...TEXTS},
  text_similarity: {type: "text_similarity", name: "alike", evaluation_metric: "fuzzy_match", ...TEXTS},
  math: {type: "math", name: "right", ...TEXTS},
  python: {type: "python", name: "mine", source: "def grade(sample, item):\n    return float(sample[\"output_text\"].strip() == item[\"answer\"])\n"},
  multi: {type: "multi", name: "both", graders: {right: {type: "string_check", name: "right", operation: "eq", ...TEXTS}}, calculate_output: "right"},
  endpoint: {type: "endpoint", name: "mine", url: "https://"},
  score_model: {type: "score_model", name: "score", model: "", range: [0, 1], input: ASKED("Is this right? Answer with a number from 0 to 1.")},
  label_model: {type: "label_model", name: "label", model: "", labels: ["right", "wrong"], passing_labels: ["right"], input: ASKED("Is this right or wrong? Answer with one word.")},
};
const EMPTY = {array: [], object: {}, string: "", number: 0, integer: 0, boolean: false};
const METHODS = {reinforcement: "reinforcement: rewards", supervised: "supervised: examples"};
const NEUTRAL = ["compute_multiplier", "reasoning_effort"]; // OpenAI's, of which the service takes only one value
const FIRST_BYTES = 262_144;
const USUAL = {reinforcement: ["max_steps", "batch_size", "group_size", "max_tokens", "learning_rate"], supervised: ["n_epochs", "max_steps", "batch_size", "learning_rate"]};

export async function show(node, {signal}) {
  if (session.isOperator) return fill(node, h("h1", {}, "Submit"), h("p", {}, "Jobs are a tenant's: open this page with a tenant's key."));
  const hyperOf = (method) => get("/v1/fine_tuning/hyperparameters", {query: {method}, signal});
  const [models, files, environments, ...hyper] = await Promise.all([get("/v1/models", {signal}), get("/v1/files", {signal}), get("/v1/environments", {signal}), ...Object.keys(METHODS).map(hyperOf)]);
  const model = select(models.data.map((one) => one.id).reverse(), null, {id: "model"}), suffix = h("input", {maxlength: 64}), seed = h("input", {type: "number", min: 0});
  const training = filePicker("Training file", files.data), validation = filePicker("Validation file", files.data);
  const judge = judging(training, environments.data, () => models.data.find((one) => one.id === model.value)?.root ?? model.value);
  const method = select(Object.entries(METHODS), "reinforcement", {id: "method", onchange: choose});
  const settings = Object.fromEntries(Object.keys(METHODS).map((name, i) => [name, hyperFields(hyper[i].data)]));
  const fields = h("div", {class: "fields"}), more = h("div", {class: "fields"});
  const refused = h("p", {class: "error", role: "alert"});
  const estimate = h("p", {role: "status"});
  const asking = h("button", {type: "button", onclick: () => ask("/v1/fine_tuning/jobs/estimate", (found) => say(estimate, inWords(found)))}, "Estimate");
  const send = h("button", {type: "button", class: "primary", onclick: () => ask("/v1/fine_tuning/jobs", (job) => { location.hash = `#/job/${job.id}`; })}, "Submit the job");
  fill(node, h("h1", {}, "Submit"), h("p"),
    h("fieldset", {}, h("legend", {}, "Model and items"), h("div", {class: "fields"}, h("label", {}, "Model", model), h("label", {}, "Method", method), training.node, validation.node, h("label", {}, "Name", suffix))),
    judge.node, h("fieldset", {}, h("legend", {}, "Hyperparameters"), fields, h("details", {}, h("summary", {}, "More"), more)), refused, estimate, h("p", {class: "bar"}, send, asking));
  choose();

  function choose() {
    judge.node.hidden = method.value === "supervised";
    const {nodes} = settings[method.value];
    const isUsual = ({id}) => USUAL[method.value].includes(id);
    fill(fields, nodes.filter(isUsual).map((one) => one.node));
    fill(more, nodes.filter((one) => !isUsual(one)).map((one) => one.node), h("label", {}, "seed", seed));
  }

  /** Sends the job that the form describes. */
  async function ask(path, answered) {
    say(refused, "");
    say(estimate, "");
    send.disabled = asking.disabled = true;
    try {
      const body = {model: model.value, training_file: await training.id(), validation_file: await validation.id(), method: {type: method.value, [method.value]: {...(judge.node.hidden ? {} : judge.read()), hyperparameters: settings[method.value].read()}}};
      if (suffix.value) body.suffix = suffix.value;
      if (seed.value) body.seed = Number(seed.value);
      answered(await post(path, body));
    } catch (error) {
      say(refused, error.message);
      refused.scrollIntoView({block: "nearest"});
    }
    send.disabled = asking.disabled = false;
  }
}

function inWords({num_steps, num_trajectories, tokens, max_tokens, seconds, steps_within_limit: within}) {
  const parts = [`${number(num_steps)} steps`, `${number(num_trajectories)} trajectories`, `about ${number(tokens)} tokens, at most ${number(max_tokens)}`];
  if (seconds !== null) parts.push(`at least ${duration(seconds)}, if nothing else runs`);
  if (within !== null && within < num_steps) parts.push(`max_tokens_total ends it after about ${number(within)} steps`);
  return `Estimate: ${parts.join("; ")}.`;
}

/** A choice of the tenant's files, or a new one; `id` uploads it once. */
function filePicker(title, files) {
  const known = select([["", "none"], ...files.map((file) => [file.id, `${file.filename} · ${file.num_items} items`])], "");
  const fresh = h("input", {type: "file", accept: ".jsonl,.json,.txt", "aria-label": `New ${title.toLowerCase()}`});
  const note = h("small");
  const done = new Map();
  fresh.addEventListener("change", () => say(note, fresh.files[0] ? `is uploaded with the job, ${bytes(fresh.files[0].size)}` : ""));
  return {
    node: h("label", {}, title, known, fresh, note),
    async id() {
      const file = fresh.files[0];
      if (!file) return known.value || null;
      if (!done.has(file)) done.set(file, (await upload(file)).id);
      return done.get(file);
    },
    /** Its first item, if it is at hand. */
    async first() {
      const text = fresh.files[0] ? await fresh.files[0].slice(0, FIRST_BYTES).text() : known.value ? await firstPart(known.value) : "";
      return text.split("\n").find((line) => line.trim()) ?? "";
    },
  };
}

async function firstPart(file) {
  const {key} = await import("./api.js");
  const answer = await fetch(`/v1/files/${encodeURIComponent(file)}/content`, {headers: {Authorization: `Bearer ${key()}`}});
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const {value = ""} = await reader.read();
  reader.cancel();
  return value;
}

/** An environment with the arguments that it may be given: their defaults, or empty ones that must be filled in. */
function environmentOf({id, args}) {
  const needed = ([name, schema]) => name === "grader" ? GRADERS.string_check : EMPTY[flat(schema).type] ?? null;
  const properties = Object.entries(args?.properties ?? {}).map(([name, schema]) => [name, args.required?.includes(name) ? needed([name, schema]) : schema.default]);
  return {name: id, args: Object.fromEntries(properties.filter(([, value]) => value !== null && value !== undefined))};
}

/** What is to be known of an environment before it is chosen. */
function about({package: from, makes_items, live, error}) {
  return [error ?? "", from ? `from ${from}` : "built in", makes_items && "makes its own items, so a training file is not needed", live && "holds a session for each trajectory"].filter(Boolean).join(" · ");
}

/** The grader or environment, and a place to try it on a sample. `base`: the name of the base model that is chosen. */
function judging(training, environments, base) {
  const options = [...Object.keys(GRADERS).map((name) => [`grader ${name}`, `grader: ${name}`]), ...environments.map((one) => [`environment ${one.id}`, `environment: ${one.id}${one.error ? " (cannot be used)" : ""}`])];
  const kind = select(options, "grader string_check", {"aria-label": "Kind"});
  const source = h("textarea", {rows: 9, spellcheck: "false", "aria-label": "Grader or environment as JSON"});
  const item = h("textarea", {rows: 4, spellcheck: "false", "aria-label": "Item"}), sample = h("textarea", {rows: 3, "aria-label": "Answer of the model"});
  const result = h("p", {role: "status"});
  const note = h("p", {class: "muted", role: "status"});
  const reset = () => {
    const environment = environments.find((one) => kind.value === `environment ${one.id}`);
    const chosen = environment ? environmentOf(environment) : GRADERS[kind.value.slice("grader ".length)];
    source.value = JSON.stringify("model" in chosen ? {...chosen, model: base()} : chosen, null, 2);
    note.className = environment?.error ? "error" : "muted";
    say(note, environment ? about(environment) : "");
    attempt.hidden = Boolean(environment);
  };
  const tell = (text, isError) => { result.className = isError ? "error" : ""; say(result, text); };
  const take = async () => {
    tell("", false);
    try { item.value = await training.first(); } catch (error) { tell(error.message, true); }
  };
  const run = async () => {
    tell("…", false);
    try {
      const found = await post("/v1/fine_tuning/alpha/graders/run", {grader: parsed(source.value, "the grader"), item: item.value.trim() ? parsed(item.value, "the item") : {}, model_sample: sample.value});
      const parts = Object.entries(found.sub_rewards).map(([name, value]) => `${name} ${number(value)}`).join(", ");
      tell(found.failure ? `failed: ${found.failure.reason}` : `reward ${number(found.reward)}${parts && ` (${parts})`} in ${number(found.metadata.execution_time)} s`, Boolean(found.failure));
    } catch (error) { tell(error.message, true); }
  };
  const attempt = h("div", {}, h("h2", {}, "Try it"), h("div", {class: "halves"},
    h("div", {}, h("label", {}, "Item"), item, h("button", {type: "button", class: "quiet", onclick: take}, "Take the file's first")),
    h("div", {}, h("label", {}, "Answer of the model"), sample, h("button", {type: "button", onclick: run}, "Run the grader"), result)));
  kind.addEventListener("change", reset);
  reset();
  return {
    node: h("fieldset", {}, h("legend", {}, "Reward"), h("p", {}, kind), note, source, attempt),
    read: () => ({[kind.value.split(" ")[0]]: parsed(source.value, "the grader or environment")}),
  };
}

function parsed(text, what) {
  try { return JSON.parse(text); } catch (error) { throw new Error(`${what} is not JSON: ${error.message}`); }
}

/** A field for each hyperparameter that has a choice; an empty one means the default. */
function hyperFields(all) {
  const fields = all.filter(({id}) => !NEUTRAL.includes(id)).map(({id, default_text: usual, schema}) => ({id, kind: flat(schema), usual})).map((one) => ({...one, input: inputOf(one)}));
  const nodes = fields.map(({id, kind, usual, input}) => ({id, node: h("label", {}, id, input, h("small", {}, [`default: ${usual}`, limits(kind)].filter(Boolean).join(" · ")))}));
  const read = () => Object.fromEntries(fields.filter(({input}) => input.value !== "").map(({id, kind, input}) => [id, valueOf(kind, input.value)]));
  return {nodes, read};
}

/** The schema of a value that is not null. */
const flat = (schema) => schema.anyOf?.find((one) => one.type !== "null") ?? schema;

function inputOf({id, kind}) {
  if (kind.enum) return select([["", "default"], ...kind.enum], "", {name: id});
  if (kind.type === "boolean") return select([["", "default"], "true", "false"], "", {name: id});
  if (kind.type === "array" || kind.type === "string") return h("input", {name: id, placeholder: kind.type === "array" ? "q_proj, v_proj" : ""});
  return h("input", {name: id, type: "number", step: kind.type === "integer" ? 1 : "any", min: kind.minimum, max: kind.maximum});
}

function valueOf(kind, text) {
  if (kind.type === "boolean") return text === "true";
  if (kind.type === "array") return text.split(",").map((one) => one.trim()).filter(Boolean);
  return kind.type === "integer" || kind.type === "number" ? Number(text) : text;
}

function limits(kind) {
  const [low, high] = [kind.minimum !== undefined ? `from ${kind.minimum}` : kind.exclusiveMinimum !== undefined ? `above ${kind.exclusiveMinimum}` : "", kind.maximum !== undefined ? `to ${kind.maximum}` : ""];
  return [low, high].filter(Boolean).join(" ");
}
