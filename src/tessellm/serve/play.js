// The playground: from the form to the texts that are written, and how it begins.

import { EXAMPLES, call, fromLink, pieces, request, restore, settings, shownWeight, textOf, toLink } from "./play-ask.js";
import { forgetRoute, offerExamples, showRoute } from "./play-route.js";
import { addToken, byId, dot, drawBars, element, ending, move, say, show, startText, state, tokenOf, visible } from "./play-view.js";

function tell(error) {
  say(error.message, true);
  if (error.locked) {
    byId("locked").hidden = false;
    byId("key").focus();
  }
}

// ---- texts

async function generate() {
  stop();
  const running = new AbortController();
  const wanted = settings();
  Object.assign(state, { running, ran: true, answer: null });
  toLink();
  follow();
  byId("stop").disabled = false;
  say("writing…");
  const began = performance.now();
  try {
    byId("beside").replaceChildren();
    await Promise.all([compose(wanted, running.signal), ...beside(wanted, running.signal)]);
    const owned = {};
    for (const token of state.trace) owned[token.owner] = (owned[token.owner] || 0) + 1;
    const shares = Object.entries(owned).map(([name, count]) => `${name} ${count}`).join(", ");
    say(`${state.trace.length} tokens in ${((performance.now() - began) / 1000).toFixed(1)} s; owners: ${shares || "nobody"}`);
  } catch (error) {
    if (running.signal.aborted && state.running !== running) return; // another run took over
    if (running.signal.aborted) say("stopped");
    else tell(error);
    running.abort();
  }
  if (state.running === running) byId("stop").disabled = true;
  follow();
}

function stop() {
  if (state.running) state.running.abort();
}

async function compose(wanted, signal) {
  startText(wanted.mode === "chat" ? "" : visible(wanted.prompt));
  forgetRoute();
  const asked = request(wanted, state.model, { rule: wanted.rule, weights: wanted.weights, trace: true });
  let text = "";
  for await (const choice of pieces(asked, signal)) {
    if (signal.aborted) return;
    if (choice.tessellm.route) showRoute(choice.tessellm.route, wanted.prompt);
    choice.tessellm.trace.forEach(addToken);
    text += textOf(choice);
    byId("ending").textContent = ending(choice.finish_reason, state.trace.length);
    drawBars();
  }
  state.answer = { prompt: wanted.prompt, text };
}

function beside(wanted, signal) {
  const rules = wanted.rules ? state.rules.map((rule) => byRule(wanted, rule, signal)) : [];
  const members = wanted.compare ? state.members.map((member) => alone(wanted, member, signal)) : [];
  return [...rules, ...members];
}

function card(name, title, line) {
  const box = element("div", { class: "tokens" });
  const about = line ? [element("p", { class: "note" }, line)] : [];
  byId("beside").append(element("article", { class: "text", "data-name": name }, element("h2", {}, ...title), ...about, box));
  return box;
}

async function write(box, asked, signal, add) { // what goes wrong with one card is told in that card
  let count = 0;
  try {
    for await (const choice of pieces(asked, signal)) {
      count += add(choice);
      if (choice.finish_reason) box.append(element("span", { class: "end" }, ending(choice.finish_reason, count)));
    }
  } catch (error) {
    if (signal.aborted || error.locked) throw error;
    box.append(element("span", { class: "end wrong" }, visible(error.message)));
  }
}

function byRule(wanted, rule, signal) {
  const box = card(`rule ${rule}`, [visible(rule)], visible(state.summaries[rule]));
  return write(box, request(wanted, state.model, { rule, weights: wanted.weights, trace: true }), signal, (choice) => {
    box.append(...choice.tessellm.trace.map((token) => tokenOf(token)));
    return choice.tessellm.trace.length;
  });
}

function alone(wanted, member, signal) {
  const box = card(member.name, [dot(member), visible(member.name)]);
  const written = element("span", { class: "t", "data-owner": member.number, "data-line": member.line, colour: member.colour });
  box.append(written);
  let text = "";
  return write(box, request(wanted, member.model), signal, (choice) => {
    text += textOf(choice);
    written.textContent = visible(text);
    return text.length;
  });
}

// ---- a conversation

function follow() { // what depends on what was chosen, and on what was said
  const chat = byId("mode").value === "chat";
  byId("system-row").hidden = !chat;
  byId("reply").hidden = !chat || !state.answer;
  byId("forget").hidden = byId("turns").hidden = !chat || !state.turns.length;
  byId("rule-line").textContent = visible(state.summaries[byId("rule").value] || "");
  byId("turns").replaceChildren(...state.turns.map((turn) =>
    element("li", { class: turn.role }, element("b", {}, turn.role === "user" ? "you" : "composed"), ` ${visible(turn.content)}`)));
}

function listExamples() {
  const examples = EXAMPLES[byId("mode").value] || [];
  byId("example").replaceChildren(element("option", { value: "" }, "Example prompts…"), ...examples.map((text) => element("option", { value: text }, text)));
}

function converse(turns) {
  Object.assign(state, { turns, answer: null });
  byId("prompt").value = "";
  byId("beside").replaceChildren();
  startText("");
  forgetRoute();
  follow();
  toLink();
  byId("prompt").focus();
}

function reply() {
  const { prompt, text } = state.answer;
  converse([...state.turns, { role: "user", content: prompt }, { role: "assistant", content: text }]);
  say("your turn");
}

// ---- how it begins

function expertRow(member) {
  const id = `weight-${member.number}`;
  const row = element("div", { class: "expert", "data-name": member.name, colour: member.colour },
    element("input", { type: "checkbox", "aria-label": `${visible(member.name)} takes part`, checked: "" }),
    element("label", { for: id }, dot(member), visible(member.name)),
    element("input", { type: "range", id, min: -1, max: 3, step: 0.05, value: member.weight }),
    element("output", { for: id }));
  row.querySelector("[type=range]").addEventListener("input", () => shownWeight(row));
  shownWeight(row);
  return row;
}

function legend() {
  const entry = (kinds, attributes, text) => element("li", {}, element("span", { class: kinds, ...attributes }, ` ${text} `));
  return [...state.members.map((member) => entry("t", { "data-owner": member.number, "data-line": member.line, colour: member.colour }, visible(member.name))),
    entry("t x", { "data-owner": 0 }, "interference"), entry("t v", { "data-owner": 0 }, "nobody’s favourite")];
}

async function begin() {
  const listed = (await (await call("v1/models")).json()).data;
  const model = listed.find((each) => each.tessellm.kind === "composition");
  const { members, rules, rule, summaries, chat } = model.tessellm;
  Object.assign(state, { model: model.id, members: members.map((member, number) => ({ ...member, number })), rules, summaries });
  byId("name").textContent = visible(model.id);
  byId("legend").replaceChildren(...legend());
  byId("experts").replaceChildren(byId("experts").firstElementChild, ...state.members.slice(1).map(expertRow));
  byId("rule").replaceChildren(...rules.map((each) => element("option", {}, each)));
  byId("rule").value = rule;
  byId("mode").options[0].disabled = !chat;
  byId("mode").value = chat ? "chat" : "text";
  startText("");
  const saved = fromLink();
  if (saved) restore(saved);
  listExamples();
  follow();
  say(saved ? "as in the link; Generate writes it" : "ready");
}

function tryToBegin() {
  const attempt = (state.attempt += 1);
  begin().catch((error) => { if (attempt === state.attempt) tell(error); }); // another key may have been tried meanwhile
}

byId("controls").addEventListener("submit", (event) => { event.preventDefault(); state.model ? generate() : tryToBegin(); });
byId("controls").addEventListener("change", (event) => {
  if (event.target.id === "mode") listExamples();
  follow();
  if (state.ran && !["prompt", "system", "example", "key"].includes(event.target.id)) generate();
});
byId("example").addEventListener("change", () => {
  if (byId("example").value) byId("prompt").value = byId("example").value;
  byId("example").value = "";
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); byId("controls").requestSubmit(); }
});
byId("stop").addEventListener("click", stop);
offerExamples();
byId("reply").addEventListener("click", reply);
byId("forget").addEventListener("click", () => { stop(); converse([]); say("a new chat"); });
byId("share").addEventListener("click", async () => {
  toLink();
  try {
    await navigator.clipboard.writeText(location.href);
    say("the link is copied");
  } catch {
    say("the link is in the address bar");
  }
});
const showTarget = (event) => { if (event.target.dataset.number) show(Number(event.target.dataset.number)); };
for (const place of ["output", "strip", "band"]) for (const kind of ["mouseover", "click"]) byId(place).addEventListener(kind, showTarget);
byId("output").addEventListener("focusin", showTarget); // on the chart it would make a stop of Tab
byId("output").addEventListener("keydown", move);
tryToBegin();
