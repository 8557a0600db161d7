"use strict";
// The playground. What models write reaches the page as text nodes alone, with unprintable characters made visible.

const CLASH = 0.1; // interference that is marked
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const state = { model: null, members: [], running: null, ran: false, attempt: 0, trace: [] };

function visible(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => {
    const code = c.codePointAt(0);
    if (c === "\n" || c === "\t" || code === 0x200c || code === 0x200d) return c;
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "colour") made.style.setProperty("--c", value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function say(text, wrong = false) {
  byId("status").textContent = visible(text);
  byId("status").classList.toggle("wrong", wrong);
}

// ---- what is asked for

function settings() {
  const weights = {};
  for (const row of document.querySelectorAll(".expert"))
    weights[row.dataset.name] = row.querySelector("[type=checkbox]").checked ? Number(row.querySelector("[type=range]").value) : 0;
  const off = [...document.querySelectorAll(".expert")].filter((r) => !r.querySelector("[type=checkbox]").checked).map((r) => r.dataset.name);
  const number = (id) => Number(byId(id).value);
  return { prompt: byId("prompt").value, weights, off, rule: byId("rule").value, mode: byId("mode").value, tokens: number("tokens"),
    temperature: number("temperature"), seed: number("seed"), compare: byId("compare").checked };
}

function restore(saved) {
  for (const id of ["prompt", "rule", "mode", "tokens", "temperature", "seed"])
    if (["string", "number"].includes(typeof saved[id])) byId(id).value = saved[id];
  byId("compare").checked = saved.compare === true;
  for (const row of document.querySelectorAll(".expert")) {
    const off = Array.isArray(saved.off) && saved.off.includes(row.dataset.name);
    const weight = saved.weights && saved.weights[row.dataset.name];
    row.querySelector("[type=checkbox]").checked = !off;
    if (typeof weight === "number" && !off) row.querySelector("[type=range]").value = weight;
    shownWeight(row);
  }
}

function fromLink() {
  try {
    return JSON.parse(decodeURIComponent(location.hash.slice(1)));
  } catch {
    return null;
  }
}

function body(wanted, model, extension) {
  const asked = { model, max_tokens: wanted.tokens, temperature: wanted.temperature, seed: wanted.seed, stream: true };
  if (extension) asked.tessellm = extension;
  if (wanted.mode === "chat") return ["v1/chat/completions", { ...asked, messages: [{ role: "user", content: wanted.prompt }] }];
  return ["v1/completions", { ...asked, prompt: wanted.prompt }];
}

// ---- what comes back

async function call(path, options = {}) {
  const key = byId("key").value;
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  });
  if (answer.status === 401) throw locked(key);
  byId("locked").hidden = true;
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}

function locked(key) {
  const told = key ? "this is not the server’s key" : "this server asks for a key; enter it to begin";
  return Object.assign(new Error(told), { locked: true });
}

function tell(error) {
  say(error.message, true);
  if (error.locked) {
    byId("locked").hidden = false;
    byId("key").focus();
  }
}

async function* pieces(path, asked, signal) {
  const answer = await call(path, { method: "POST", body: JSON.stringify(asked), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      if (piece.choices.length) yield piece.choices[0];
    }
  }
}

async function generate() {
  stop();
  const running = new AbortController();
  state.running = running;
  state.ran = true;
  const wanted = settings();
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(wanted))}`);
  byId("stop").disabled = false;
  say("writing…");
  const began = performance.now();
  try {
    const all = [compose(wanted, running.signal)];
    byId("beside").replaceChildren();
    if (wanted.compare) all.push(...state.members.map((member) => alone(wanted, member, running.signal)));
    await Promise.all(all);
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
}

function stop() {
  if (state.running) state.running.abort();
}

function shownPrompt(wanted) {
  return wanted.mode === "chat" ? "" : visible(wanted.prompt);
}

async function compose(wanted, signal) {
  const box = byId("output");
  byId("before").textContent = shownPrompt(wanted);
  box.replaceChildren();
  state.trace = [];
  drawStrip();
  const [path, asked] = body(wanted, state.model, { rule: wanted.rule, weights: wanted.weights, trace: true });
  for await (const choice of pieces(path, asked, signal)) {
    if (signal.aborted) return;
    for (const token of choice.tessellm.trace) addToken(box, token);
    drawStrip();
  }
}

async function alone(wanted, member, signal) {
  const box = element("div", { class: "tokens" }, element("span", { class: "p" }, shownPrompt(wanted)));
  byId("beside").append(element("article", { class: "text", "data-name": member.name }, element("h2", {}, dot(member), visible(member.name)), box));
  const written = element("span", { class: "t", "data-owner": member.number, "data-line": member.line, colour: member.colour });
  box.append(written);
  const [path, asked] = body(wanted, member.model);
  let text = "";
  for await (const choice of pieces(path, asked, signal)) {
    text += (choice.delta ? choice.delta.content : choice.text) || "";
    written.textContent = visible(text);
  }
}

// ---- what is seen

function dot(member) {
  return element("span", { class: "dot", colour: member.number ? member.colour : "transparent" });
}

function addToken(box, token) {
  const member = state.members.find((each) => each.name === token.owner);
  const number = state.trace.push(token) - 1;
  const kinds = `t${token.clash > CLASH ? " x" : ""}${token.novel ? " v" : ""}`;
  box.append(element("span", { class: kinds, "data-number": number, "data-owner": member.number, "data-line": member.line,
    colour: member.colour, role: "option", "aria-selected": "false", tabindex: number ? -1 : 0,
    "aria-label": `${visible(token.text)}, ${visible(token.owner)}${token.clash > CLASH ? ", interference" : ""}` }, visible(token.text)));
}

function drawStrip() {
  const strip = byId("strip");
  const count = Math.max(state.trace.length, 32);
  strip.setAttribute("viewBox", `0 0 ${count} 1`);
  const bars = state.trace.map((token, number) => {
    const bar = document.createElementNS(SVG, "rect");
    const height = Math.min(1, token.clash);
    for (const [name, value] of Object.entries({ x: number + 0.1, width: 0.8, y: 1 - height, height })) bar.setAttribute(name, value);
    bar.dataset.number = number;
    if (token.clash > CLASH) bar.classList.add("x");
    return bar;
  });
  strip.replaceChildren(...bars);
  const marked = state.trace.filter((token) => token.clash > CLASH).length;
  strip.setAttribute("aria-label", `Interference, token by token: above ${CLASH} at ${marked} of ${state.trace.length} tokens`);
}

function show(number) {
  const token = state.trace[number];
  if (!token) return;
  for (const each of byId("output").children) each.setAttribute("aria-selected", String(Number(each.dataset.number) === number));
  const voices = [...state.members, { name: "composed", number: 0 }];
  const rows = voices.map((voice) => {
    const choices = token.top[voice.name].map(([text, logprob]) => {
      const chance = element("small", {}, `${(100 * Math.exp(logprob)).toFixed(1)} %`);
      return [element("code", { class: text === token.text ? "w" : "" }, visible(text).replace(/\n/g, "↵")), chance];
    });
    const own = `${(100 * Math.exp(token.logprob[voice.name])).toFixed(1)} %`;
    const weighed = token.evidence ? [element("td", {}, evidenceOf(token, voice.name))] : [];
    return element("tr", {}, element("th", { scope: "row" }, dot(voice), visible(voice.name)), element("td", {}, own), ...weighed, element("td", {}, ...choices.flat()));
  });
  const columns = ["who", "this token", ...(token.evidence ? ["evidence"] : []), "favourites"];
  const head = element("tr", {}, ...columns.map((text) => element("th", { scope: "col" }, text)));
  const title = element("h3", {}, element("b", {}, visible(token.text).replace(/\n/g, "↵") || "∅"), `owner: ${visible(token.owner)}`,
    element("span", {}, `log Z ${token.log_z.toFixed(2)}`), element("span", {}, `interference ${token.clash.toFixed(2)}`), token.novel ? "nobody’s favourite" : "");
  byId("panel").replaceChildren(title, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function evidenceOf(token, name) {
  if (!(name in token.evidence)) return token.blended ? "Eq. 2 speaks" : "the owner speaks";
  const trusted = token.trusted[name] && name !== state.members[0].name;
  return `${token.evidence[name].toFixed(1)}${trusted ? " ✓" : ""}`;
}

function move(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const tokens = [...byId("output").querySelectorAll(".t")];
  const from = tokens.indexOf(document.activeElement);
  if (from < 0 || !(step || event.key === "Home" || event.key === "End")) return;
  const to = event.key === "Home" ? 0 : event.key === "End" ? tokens.length - 1 : Math.min(Math.max(from + step, 0), tokens.length - 1);
  event.preventDefault();
  tokens[from].tabIndex = -1;
  tokens[to].tabIndex = 0;
  tokens[to].focus();
}

// ---- how it begins

function shownWeight(row) {
  row.querySelector("output").textContent = Number(row.querySelector("[type=range]").value).toFixed(2);
}

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

async function begin() {
  const listed = (await (await call("v1/models")).json()).data;
  const model = listed.find((each) => each.tessellm.kind === "composition");
  state.model = model.id;
  state.members = model.tessellm.members.map((member, number) => ({ ...member, number }));
  byId("name").textContent = visible(model.id);
  byId("legend").replaceChildren(...state.members.map((member) =>
    element("li", {}, element("span", { class: "t", "data-owner": member.number, "data-line": member.line, colour: member.colour }, ` ${visible(member.name)} `))),
    element("li", {}, element("span", { class: "t x", "data-owner": 0 }, " interference ")), element("li", {}, element("span", { class: "t v", "data-owner": 0 }, " nobody’s favourite ")));
  byId("experts").replaceChildren(byId("experts").firstElementChild, ...state.members.slice(1).map(expertRow));
  byId("rule").replaceChildren(...model.tessellm.rules.map((rule) => element("option", {}, rule)));
  byId("rule").value = model.tessellm.rule;
  const saved = fromLink();
  if (saved) restore(saved);
  say(saved ? "as in the link; Generate writes it" : "ready");
}

function tryToBegin() {
  const attempt = (state.attempt += 1);
  begin().catch((error) => { if (attempt === state.attempt) tell(error); }); // another key may have been tried meanwhile
}

byId("controls").addEventListener("submit", (event) => { event.preventDefault(); state.model ? generate() : tryToBegin(); });
byId("controls").addEventListener("change", (event) => {
  if (state.ran && !["prompt", "key"].includes(event.target.id)) generate();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); byId("controls").requestSubmit(); }
});
byId("stop").addEventListener("click", stop);
byId("share").addEventListener("click", async () => {
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(settings()))}`);
  try {
    await navigator.clipboard.writeText(location.href);
    say("the link is copied");
  } catch {
    say("the link is in the address bar");
  }
});
const showTarget = (event) => { if (event.target.dataset.number) show(Number(event.target.dataset.number)); };
for (const place of ["output", "strip"]) for (const kind of ["mouseover", "click"]) byId(place).addEventListener(kind, showTarget);
byId("output").addEventListener("focusin", showTarget); // on the chart it would make a stop of Tab
byId("output").addEventListener("keydown", move);
tryToBegin();
