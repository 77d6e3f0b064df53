// One held-out item at two versions: what each said when it was evaluated, turn next to turn.

import {note, numberIn} from "./address.js";
import {ofJob} from "./api.js";
import {cutOff, facts, SHADE, turn, turnsOf} from "./conversation.js";
import {announce, fill, h, select} from "./dom.js";
import {POINTS} from "./figures.js";
import {isSupervised, loss, reward} from "./format.js";

const SHORT = 60;
const KEPT = "Of every evaluation the answers to the first held-out items are kept, the first sampled one to each.";

export async function showVersions(panel, view) {
  const {id, tenant, signal} = view;
  const evaluations = (await ofJob(id, "metrics", {query: {points: POINTS}, tenant, signal})).evaluations.sort((one, other) => one.version - other.version);
  if (!evaluations.length) return fill(panel, h("p", {class: "muted"}, "No version was evaluated yet."));
  const figure = (one) => isSupervised(view.job) ? `loss ${loss(one.eval_loss)}` : `reward ${reward(one.eval_reward_mean)}`;
  const versions = evaluations.map((one) => [one.version, `${one.version} · ${figure(one)}`]);
  const sides = [["a", "Left", versions[0][0]], ["b", "Right", versions.at(-1)[0]]].map(([name, title, usual]) => {
    const side = {name, version: numberIn(view.params, name) ?? usual, answers: []};
    const offered = versions.some(([version]) => version === side.version) ? versions : [...versions, side.version];
    side.field = select(offered, side.version, {"aria-label": `${title} version`, onchange: () => turnTo(side).catch(tell)});
    return side;
  });
  let item = numberIn(view.params, "item") ?? 0;
  const items = h("select", {"aria-label": "Held-out item", onchange: () => show(Number(items.value)).catch(tell)});
  const body = h("div", {class: "versions"});
  const tell = (error) => fill(body, h("p", {class: "error", role: "alert"}, error.message));
  fill(panel,
    h("div", {class: "bar"}, h("label", {}, "Held-out item ", items), h("button", {type: "button", "aria-label": "Item before", onclick: () => step(-1)}, "←"), h("button", {type: "button", "aria-label": "Next item", onclick: () => step(1)}, "→")),
    h("div", {class: "halves"}, sides.map((side) => h("label", {}, "Version ", side.field))), body, h("p", {class: "muted"}, KEPT, !isSupervised(view.job) && SHADE));
  await Promise.all(sides.map(load));
  await show(item);

  async function load(side) {
    side.answers = (await ofJob(id, "samples", {query: {evaluation: true, version: side.version}, tenant, signal})).data;
  }

  async function turnTo(side) {
    side.version = Number(side.field.value);
    await load(side);
    await show(item);
  }

  /** The items of which either version has an answer, with what was asked. */
  function kept() {
    return [...new Map(sides.flatMap((side) => side.answers.map((one) => [one.item, one.prompt])))].sort(([one], [other]) => one - other);
  }

  function step(by) {
    const numbers = kept().map(([number]) => number);
    const next = numbers[numbers.indexOf(item) + by];
    if (next !== undefined) show(next).catch(tell);
  }

  async function show(number) {
    item = number;
    const asked = sides.map((side) => side.version);
    note(view, {item, a: asked[0], b: asked[1]});
    fill(items, kept().map(([value, prompt]) => h("option", {value, selected: value === item}, `${value} · ${prompt.length > SHORT ? `${prompt.slice(0, SHORT)}…` : prompt}`)));
    const found = await Promise.all(sides.map((side) => side.answers.some((one) => one.item === item)
      ? ofJob(id, `samples/${side.version}/${item}/0`, {query: {evaluation: true}, tenant, signal}) : null));
    if (number !== item || sides.some((side, i) => side.version !== asked[i])) return; // another was chosen meanwhile
    fill(body, besideEachOther(found, asked));
    announce(`Item ${item} at versions ${asked.join(" and ")}`);
  }
}

/** Two conversations in rows of a turn each. What both were told is there once, across. */
function besideEachOther(found, versions) {
  const row = (...cells) => h("div", {class: "halves"}, cells);
  const turns = found.map((one) => one ? turnsOf(one) : []);
  const rows = [row(...found.map((one, i) => h("div", {}, one ? facts(one.sample) : h("p", {class: "muted"}, `No answer of version ${versions[i]} is kept.`))))];
  for (let i = 0; i < Math.max(...turns.map((one) => one.length)); i++) {
    const [left, right] = turns.map((one) => one[i]);
    const isSame = left && right && left.by !== "model" && left.by === right.by && left.tokens.join("") === right.tokens.join("");
    rows.push(isSame ? turn(left) : row(...[left, right].map((one, side) => one ? turn(one, {of: `Version ${versions[side]}`}) : h("div"))));
  }
  rows.push(row(...found.map((one) => h("div", {}, one && cutOff(one.num_dropped)))));
  return rows;
}
