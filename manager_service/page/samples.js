// What a job's trajectories said: whole conversations, token by token, of one step or of two side by side.

import {get, ofJob} from "./api.js";
import {announce, fill, h, select} from "./dom.js";
import {isSupervised, number, reward} from "./format.js";

const RARE = [0.7, 2, 4, 6]; // −log p in nats at which a token's shade begins: p = 0.5, 0.14, 0.02, 0.002
const SHORT = 90;
const KEPT = "Of a step its first groups are kept, of the others the best and the worst, and some that failed. The shade of a token says how unlikely it was when it was sampled.";
const EXAMPLES_KEPT = "Of a step its first examples are kept, and some that failed. They have no reward.";

export async function showSamples(panel, view) {
  const {params} = view;
  const first = number_of(params.get("step"));
  const second = number_of(params.get("beside"));
  const place = (changes) => {
    const all = {...Object.fromEntries(params), tab: "samples", ...changes};
    location.hash = `#/job/${encodeURIComponent(view.id)}?${new URLSearchParams(Object.entries(all).filter(([, value]) => value !== null && value !== undefined && value !== ""))}`;
  };
  const isPair = params.has("beside");
  const panes = h("div", {class: isPair ? "halves" : "samples"});
  const beside = h("button", {type: "button", onclick: () => place({beside: isPair ? null : 1})}, isPair ? "One step" : "Two steps side by side");
  fill(panel, h("div", {class: "bar"}, h("p", {class: "muted"}, isSupervised(view.job) ? EXAMPLES_KEPT : KEPT), h("span", {class: "grow"}), beside), panes);
  const shown = [pane(view, first, (step) => place({step, group: null, sample: null}), true)];
  if (isPair) shown.push(pane(view, second, (step) => place({beside: step}), false));
  fill(panes, shown.map((one) => one.node));
  await Promise.all(shown.map((one) => one.open()));
}

const number_of = (text) => text !== null && /^\d+$/.test(text) ? Number(text) : null;

/** One step: its samples, filtered, and the one that is read. `go` shows another step; `isFirst`: the address names its sample. */
function pane(view, step, go, isFirst) {
  const {id, tenant, signal, params} = view;
  const state = {samples: [], step};
  const stepField = h("input", {type: "number", min: 1, "aria-label": "Step", onchange: () => go(stepField.value)});
  const byReward = isSupervised(view.job) ? [] : [["low", "reward below the mean"], ["high", "reward from the mean up"]];
  const kind = select([["", "all"], ["failed", "failed"], ...byReward], "", {"aria-label": "Which samples", onchange: list});
  const names = h("div", {class: "list"}), reads = h("div", {class: "reads"});
  const node = h("section", {class: "samples", "aria-label": "Samples of a step"},
    h("div", {class: "bar"}, h("label", {}, "Step ", stepField), h("button", {type: "button", "aria-label": "Step before", onclick: () => go(state.step - 1)}, "←"), h("button", {type: "button", "aria-label": "Next step", onclick: () => go(state.step + 1)}, "→"), kind),
    h("div", {class: params.has("beside") ? "" : "browse"}, names, reads));

  async function open() {
    const found = (await ofJob(id, "samples", {query: {version: step}, tenant, signal})).data;
    state.samples = found;
    state.step = step ?? found[0]?.step ?? Math.max(1, view.job.version);
    stepField.value = state.step;
    stepField.max = Math.max(state.step, view.job.version + 1);
    list();
    const wanted = isFirst && found.find((one) => String(one.group) === params.get("group") && String(one.sample) === params.get("sample"));
    const opened = wanted || visible()[0];
    if (opened) await read(opened);
  }

  function visible() {
    const rewards = state.samples.map((one) => one.reward).filter((value) => value !== null);
    const mean = rewards.reduce((sum, value) => sum + value, 0) / Math.max(1, rewards.length);
    const tests = {"": () => true, failed: (one) => one.failure, low: (one) => one.reward !== null && one.reward < mean, high: (one) => one.reward !== null && one.reward >= mean};
    return state.samples.filter(tests[kind.value]);
  }

  function list() {
    const shown = visible(), groups = Map.groupBy ? Map.groupBy(shown, (one) => one.group) : grouped(shown);
    fill(names, shown.length ? [...groups].map(([group, samples]) => [
      h("h3", {}, `Group ${group} · ${cut(samples[0].prompt) || "no prompt"}`),
      samples.map((one) => h("button", {type: "button", "aria-pressed": "false", "data-at": `${one.group}/${one.sample}`, onclick: () => read(one)},
        h("b", {}, one.failure ? "×" : one.reward === null ? "" : reward(one.reward)), h("span", {class: "cut"}, cut(one.text) || one.failure?.reason || "nothing"), h("span", {class: "muted"}, one.failure ? "failed" : one.stop_reason === "stop" ? "" : one.stop_reason))),
    ]) : h("p", {class: "muted"}, state.samples.length ? "None of them." : "No samples are kept of this step."));
  }

  async function read(one) {
    for (const button of names.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.at === `${one.group}/${one.sample}`));
    const found = await get(`/v1/fine_tuning/jobs/${encodeURIComponent(id)}/samples/${state.step}/${one.group}/${one.sample}`, {tenant, signal});
    fill(reads, conversation(view, found));
    announce(`Sample ${one.sample} of group ${one.group}`);
  }
  return {node, open};
}

function grouped(samples) {
  const groups = new Map();
  for (const one of samples) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  return groups;
}

const cut = (text) => text.length > SHORT ? `${text.slice(0, SHORT)}…` : text;

function conversation(view, {sample, turns, num_dropped: dropped}) {
  const facts = [
    ["reward", sample.reward === null ? "none" : number(sample.reward)],
    sample.advantage != null && ["advantage", number(sample.advantage)],
    ...Object.entries(sample.reward_parts).map(([part, value]) => [part, number(value)]),
    ["written by", `version ${sample.version}`], ["ended by", sample.stop_reason], sample.kept !== "first" && ["kept as", `one of the step's ${sample.kept}`],
  ].filter(Boolean);
  const tuned = view.job.fine_tuned_model;
  const again = tuned && sample.prompt && h("a", {class: "tenant-only", href: `#/chat?${new URLSearchParams({a: `${tuned}@${Math.max(1, view.job.version)}`, b: view.job.version > 1 ? `${tuned}@1` : view.job.model, say: sample.prompt})}`}, "Ask two versions the same");
  return [
    h("dl", {class: "facts"}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    sample.failure && h("p", {class: "error"}, `${sample.failure.kind}: ${sample.failure.reason}`),
    turns.length ? turns.map((one) => turn(one, sample.advantage)) : plain(sample),
    dropped > 0 && h("p", {class: "muted"}, `${dropped} more tokens are not kept.`),
    again && h("p", {}, again),
  ];
}

/** A sample whose tokens are not kept: its last turn, as text. */
function plain(sample) {
  return [["prompt", sample.prompt], ["model", sample.text]].filter(([, text]) => text).map(([by, text]) =>
    h("div", {class: `turn ${by}`}, h("h4", {}, TITLES[by]), h("div", {class: "tokens", tabindex: "0"}, text)));
}

const TITLES = {prompt: "Prompt", model: "Model", environment: "Environment or tool"};

function turn({by, tokens, logprobs}, advantage) {
  const total = logprobs?.reduce((sum, value) => sum + value, 0);
  const title = `${TITLES[by]} · ${tokens.length} tokens${logprobs ? ` · log-prob ${number(total)}` : ""}`;
  return h("div", {class: `turn ${by}`}, h("h4", {}, title), h("div", {class: "tokens", tabindex: "0"}, tokens.map((text, i) => token(text, logprobs?.[i], advantage))));
}

function token(text, logprob, advantage) {
  const kinds = [/^<\|.*\|>$/.test(text) && "special"];
  if (logprob === undefined) return kinds[0] ? h("span", {class: "special"}, text) : text;
  const shade = RARE.filter((from) => -logprob >= from).length;
  kinds.push(shade && `p${shade}`);
  const learned = advantage == null ? "" : `, advantage ${number(advantage)}`;
  return h("span", {class: kinds.filter(Boolean).join(" ") || null, title: `log-prob ${logprob.toFixed(3)}, p ${Math.exp(logprob).toPrecision(2)}${learned}`}, text || "·");
}
