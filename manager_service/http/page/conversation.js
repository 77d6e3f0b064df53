// A conversation as it was written: turn by turn, token by token.

import {h} from "./dom.js";
import {number} from "./format.js";

const RARE = [0.7, 2, 4, 6]; // −log p in nats at which a token's shade begins: p = 0.5, 0.14, 0.02, 0.002
export const SHADE = " The shade of a token says how unlikely it was when it was sampled.";
export const isSpecial = (token) => /^<\|.*\|>$/.test(token);
const TITLES = {prompt: "Prompt", model: "Model", environment: "Environment or tool"};

/** What was measured of a sample: its reward and the parts of it, and how it ended. No version wrote an example. */
export function facts(sample, isExample = false) {
  const found = [
    ["reward", sample.reward === null ? "none" : number(sample.reward)],
    sample.advantage != null && ["advantage", number(sample.advantage)],
    ...Object.entries(sample.reward_parts).map(([part, value]) => [part, number(value)]),
    !isExample && ["written by", `version ${sample.version}`], ["ended by", sample.stop_reason],
    !["first", "evaluation"].includes(sample.kept) && ["kept as", `one of the step's ${sample.kept}`],
  ].filter(Boolean);
  return [
    h("dl", {class: "facts"}, found.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    sample.failure && h("p", {class: "error"}, `${sample.failure.kind}: ${sample.failure.reason}`),
  ];
}

/** Its turns as the API has them; of one whose tokens are not kept its last two, as text. */
export function turnsOf({sample, turns}) {
  return turns.length ? turns : [["prompt", sample.prompt], ["model", sample.text]].filter(([, text]) => text).map(([by, text]) => ({by, tokens: [text]}));
}

export function turn({by, tokens, logprobs}, {advantage, length = true, of = ""} = {}) {
  const total = logprobs?.reduce((sum, value) => sum + value, 0);
  const title = [of, TITLES[by], length && `${tokens.length} tokens`, logprobs && `log-prob ${number(total)}`].filter(Boolean).join(" · ");
  return h("div", {class: `turn ${by}`}, h("h4", {}, title), h("div", {class: "tokens", tabindex: "0", role: "region", "aria-label": title}, tokens.map((text, i) => token(text, logprobs?.[i], advantage))));
}

export const cutOff = (dropped) => dropped > 0 && h("p", {class: "muted"}, `${dropped} more tokens are not kept.`);

function token(text, logprob, advantage) {
  const kinds = [isSpecial(text) && "special"];
  if (logprob === undefined) return kinds[0] ? h("span", {class: "special"}, text) : text;
  const shade = RARE.filter((from) => -logprob >= from).length;
  kinds.push(shade && `p${shade}`);
  const learned = advantage == null ? "" : `, advantage ${number(advantage)}`;
  return h("span", {class: kinds.filter(Boolean).join(" ") || null, title: `log-prob ${logprob.toFixed(3)}, p ${Math.exp(logprob).toPrecision(2)}${learned}`}, text || "·");
}
