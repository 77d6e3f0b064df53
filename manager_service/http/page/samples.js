// What a job's trajectories said: whole conversations of one step, of two side by side, or of one held-out item at two versions.

import {addressOf, note, numberIn} from "./address.js";
import {ofJob} from "./api.js";
import {cutOff, facts, isSpecial, SHADE, turn, turnsOf} from "./conversation.js";
import {announce, fill, h, say, select} from "./dom.js";
import {isSupervised, reward} from "./format.js";
import {showVersions} from "./versions.js";

const SHORT = 90;
const KEPT = "Of a step its first groups are kept, of the others the best and the worst, and some that failed.";
const EXAMPLES_KEPT = "Of a step its first examples are kept, and some that failed. They have no reward.";

export async function showSamples(panel, view) {
  const {params} = view;
  const address = (changes) => addressOf(view, {step: null, beside: null, group: null, sample: null, item: null, a: null, b: null, ...changes});
  const links = [
    ["One step", {}, !params.has("beside") && !params.has("item")],
    ["Two steps side by side", {step: params.get("step"), beside: 1}, params.has("beside")],
    view.job.validation_file && ["Two versions of one item", {item: 0}, params.has("item")],
  ].filter(Boolean);
  const panes = h("div");
  fill(panel, h("nav", {class: "bar", "aria-label": "Which conversations"}, links.map(([title, changes, isHere]) => h("a", {class: "button", href: address(changes), "aria-current": isHere ? "true" : null}, title))), panes);
  if (params.has("item")) return showVersions(panes, view);
  panes.className = params.has("beside") ? "halves" : "samples";
  const shown = [pane(view, "step", true)];
  if (params.has("beside")) shown.push(pane(view, "beside", false));
  panel.append(h("p", {class: "muted"}, isSupervised(view.job) ? EXAMPLES_KEPT : [KEPT, SHADE]));
  fill(panes, shown.map((one) => one.node));
  await Promise.all(shown.map((one) => one.open(numberIn(params, one.name))));
}

/** One step: its samples, filtered, and the one that is read. `name`: of the step in the address; `isFirst`: that names the sample too. */
function pane(view, name, isFirst) {
  const {id, tenant, signal} = view;
  const state = {samples: [], step: 1};
  const go = (step) => { note(view, {[name]: step, ...(isFirst && {group: null, sample: null})}); open(Math.max(1, Number(step) || 1)).catch((error) => fill(names, h("p", {class: "error", role: "alert"}, error.message))); };
  const stepField = h("input", {type: "number", min: 1, "aria-label": "Step", onchange: () => go(stepField.value)});
  const byReward = isSupervised(view.job) ? [] : [["low", "reward below the mean"], ["high", "reward from the mean up"]];
  const kind = select([["", "all"], ["failed", "failed"], ...byReward], "", {"aria-label": "Which samples", onchange: sift});
  const names = h("div", {class: "list"}), reads = h("div", {class: "reads"});
  const node = h("section", {class: "samples", "aria-label": "Samples of a step"},
    h("div", {class: "bar"}, h("label", {}, "Step ", stepField), h("button", {type: "button", "aria-label": "Step before", onclick: () => go(state.step - 1)}, "←"), h("button", {type: "button", "aria-label": "Next step", onclick: () => go(state.step + 1)}, "→"), kind),
    h("div", {class: view.params.has("beside") ? "" : "browse"}, names, reads));

  /** null: the newest step. */
  async function open(step) {
    const found = (await ofJob(id, "samples", {query: {version: step}, tenant, signal})).data;
    state.samples = found;
    state.step = step ?? found[0]?.step ?? Math.max(1, view.job.version);
    stepField.value = state.step;
    stepField.max = Math.max(state.step, view.job.version + 1);
    list();
    const wanted = isFirst && found.find((one) => String(one.group) === view.params.get("group") && String(one.sample) === view.params.get("sample"));
    const opened = wanted || visible()[0];
    opened ? await read(opened) : fill(reads);
  }

  function visible() {
    const rewards = state.samples.map((one) => one.reward).filter((value) => value !== null);
    const mean = rewards.reduce((sum, value) => sum + value, 0) / Math.max(1, rewards.length);
    const tests = {"": () => true, failed: (one) => one.failure, low: (one) => one.reward !== null && one.reward < mean, high: (one) => one.reward !== null && one.reward >= mean};
    return state.samples.filter(tests[kind.value]);
  }

  /** Lists what is left, and reads the first of it where the one that is read has gone. */
  function sift() {
    list();
    const left = visible();
    const next = left.includes(state.read) ? state.read : left[0];
    next ? read(next).catch((error) => fill(reads, h("p", {class: "error", role: "alert"}, error.message))) : fill(reads);
  }

  function list() {
    const shown = visible(), groups = Map.groupBy ? Map.groupBy(shown, (one) => one.group) : grouped(shown);
    fill(names, shown.length ? [...groups].map(([group, samples]) => [
      h("h3", {"data-group": group}, `Group ${group} · ${asked(samples)}`),
      samples.map((one) => h("button", {type: "button", "aria-pressed": "false", "data-at": `${one.group}/${one.sample}`, onclick: () => read(one)},
        h("b", {}, one.failure ? "×" : one.reward === null ? "" : reward(one.reward)), h("span", {class: "cut"}, cut(one.text) || one.failure?.reason || "nothing"), h("span", {class: "muted"}, one.failure ? "failed" : one.stop_reason === "stop" ? "" : one.stop_reason))),
    ]) : h("p", {class: "muted"}, state.samples.length ? "None of them." : "No samples are kept of this step."));
  }

  async function read(one) {
    state.read = one;
    for (const button of names.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.at === `${one.group}/${one.sample}`));
    const found = await ofJob(id, `samples/${state.step}/${one.group}/${one.sample}`, {tenant, signal});
    if (!one.prompt) {
      one.prompt = promptOf(found);
      const head = names.querySelector(`[data-group="${one.group}"]`); // none if the list was sifted meanwhile
      if (head) say(head, `Group ${one.group} · ${asked([one])}`);
    }
    fill(reads, conversation(view, found));
    announce(`Sample ${one.sample} of group ${one.group}`);
  }
  return {name, node, open};
}

function grouped(samples) {
  const groups = new Map();
  for (const one of samples) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  return groups;
}

const asked = (samples) => cut(samples.find((one) => one.prompt)?.prompt ?? "") || "no prompt";

/** What was asked, by the tokens of its first turn: an item that an environment made has no text of its own. */
function promptOf({turns: [first]}) {
  return first?.by === "prompt" ? first.tokens.map((token) => isSpecial(token) ? " " : token).join("").trim() : "";
}

const cut = (text) => text.length > SHORT ? `${text.slice(0, SHORT)}…` : text;

function conversation(view, found) {
  const {sample} = found;
  const tuned = view.job.fine_tuned_model;
  const again = tuned && sample.prompt && h("a", {class: "tenant-only", href: `#/chat?${new URLSearchParams({a: `${tuned}@${Math.max(1, view.job.version)}`, b: view.job.version > 1 ? `${tuned}@0` : view.job.model, say: sample.prompt})}`}, "Ask two versions the same");
  return [
    facts(sample, isSupervised(view.job)),
    turnsOf(found).map((one) => turn(one, {advantage: sample.advantage, length: found.turns.length > 0})),
    cutOff(found.num_dropped),
    (sample.verdicts ?? []).map((one) => ["prompt", "reply"].map((what) => turn({by: "grader", tokens: [one[what]]}, {length: false, of: `Grader ${one.grader}: ${what}`}))),
    again && h("p", {}, again),
  ];
}
