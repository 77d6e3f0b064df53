// One question to two models, side by side. Each column is a conversation of its own.

import {chat, get, session} from "./api.js";
import {announce, fill, h, say} from "./dom.js";

export async function show(node, {params, signal}) {
  if (session.isOperator) return fill(node, h("h1", {}, "Chat"), h("p", {}, "Chat needs a tenant's key: the operator's only reads."));
  const models = (await get("/v1/models", {signal})).data;
  const names = h("datalist", {id: "models"}, models.flatMap((model) => [h("option", {value: model.id}), model.version && h("option", {value: `${model.id}@${model.version}`})]));
  const tuned = models.find((model) => model.version) ?? models[0];
  const sides = [params.get("a") ?? tuned.id, params.get("b") ?? tuned.root].map((model, i) => side(model, i, signal));
  const question = h("textarea", {rows: 2, "aria-label": "Message", placeholder: "Ask both", value: params.get("say") ?? ""});
  const temperature = h("input", {type: "number", min: 0, max: 2, step: 0.1, value: "0"});
  const most = h("input", {type: "number", min: 1, value: "128"});
  const send = async () => {
    const text = question.value;
    if (!text.trim()) return;
    question.value = "";
    const options = {temperature: Number(temperature.value), max_tokens: Number(most.value)};
    await Promise.all(sides.map((one) => one.ask(text, options)));
    announce("Both have answered");
  };
  question.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); } });
  fill(node, h("div", {class: "bar"}, h("h1", {}, "Chat"), h("span", {class: "muted"}, "model, or model@version"), h("span", {class: "grow"}),
    h("label", {}, "Temperature ", temperature), h("label", {}, "Tokens at most ", most), h("button", {type: "button", onclick: () => sides.forEach((one) => one.clear())}, "Begin anew")),
  names, h("div", {class: "halves"}, sides.map((one) => one.node)), h("div", {class: "ask"}, question, h("button", {type: "button", class: "primary", onclick: send}, "Ask")));
  question.focus();
}

function side(model, i, signal) {
  const field = h("input", {list: "models", value: model, "aria-label": `Model ${"AB"[i]}`, spellcheck: "false"});
  field.style.width = "100%";
  const talk = h("div", {class: "talk", role: "log", "aria-label": `Conversation ${"AB"[i]}`, tabindex: "0"});
  let messages = [];
  async function ask(text, options) {
    messages.push({role: "user", content: text});
    const about = h("small"), said = h("span"), answer = h("p", {class: "said"}, said, about);
    talk.append(h("p", {class: "said user"}, text), answer);
    let whole = "";
    const began = performance.now();
    try {
      for await (const piece of chat({model: field.value.trim(), messages, ...options}, signal)) {
        whole += piece.text;
        say(said, whole);
        say(about, `${piece.version === "base" ? "base model" : piece.version}${piece.reason ? ` · ${piece.reason} · ${((performance.now() - began) / 1000).toFixed(1)} s` : " …"}`);
        talk.scrollTop = talk.scrollHeight;
      }
      messages.push({role: "assistant", content: whole});
    } catch (error) {
      if (signal.aborted) return;
      messages.pop();
      answer.classList.add("error");
      say(about, error.message);
    }
  }
  return {node: h("section", {"aria-label": `Model ${"AB"[i]}`}, field, talk), ask, clear: () => { messages = []; fill(talk); }};
}
