// What is seen of a text: its tokens, the bars below them, and what every member would have said at one of them.
// What models write reaches the page as text nodes alone, with unprintable characters made visible. Asks for nothing.

export const EQUATION = "Eq. 2"; // the law that no member is
const CLASH = 0.1; // interference that is marked
const SVG = "http://www.w3.org/2000/svg";
const HINT = "Point at a token, or reach it with Tab and the arrow keys, to see what every member would have said.";
export const byId = (id) => document.getElementById(id);
export const state = { model: null, members: [], rules: [], summaries: {}, running: null, ran: false, attempt: 0, trace: [], turns: [], answer: null };

export function visible(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => {
    const code = c.codePointAt(0);
    if (c === "\n" || c === "\t" || code === 0x200c || code === 0x200d) return c;
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function shownToken(text) { // by itself, where a space at an end could not be seen
  const marked = visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
  return marked || "∅";
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "colour") made.style.setProperty("--c", value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function say(text, wrong = false) {
  byId("status").textContent = visible(text);
  byId("status").classList.toggle("wrong", wrong);
}

export function dot(member) {
  return element("span", { class: "dot", colour: member.number ? member.colour : "transparent" });
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

// ---- a text

export function ending(reason, count) {
  if (reason === "length") return "… cut off here";
  if (reason !== "stop") return "";
  return count ? "end" : "ends at once, without a word";
}

export function tokenOf(token, attributes = {}) {
  const member = state.members.find((each) => each.name === token.owner);
  const kinds = `t${token.clash > CLASH ? " x" : ""}${token.novel ? " v" : ""}`;
  return element("span", { class: kinds, "data-owner": member.number, "data-line": member.line, colour: member.colour, ...attributes }, visible(token.text));
}

export function addToken(token) {
  const number = state.trace.push(token) - 1;
  const said = `${visible(token.text)}, ${visible(token.owner)}${token.clash > CLASH ? ", interference" : ""}`;
  const label = token.belief ? `${said}, ${visible(speaking(token))} speaks` : said;
  const attributes = { "data-number": number, role: "option", "aria-selected": "false", tabindex: number ? -1 : 0, "aria-label": label };
  byId("output").append(tokenOf(token, attributes));
}

export function startText(prompt) {
  byId("before").textContent = prompt;
  byId("ending").textContent = "";
  byId("output").replaceChildren();
  byId("panel").replaceChildren(element("p", { class: "note" }, HINT));
  state.trace = [];
  drawBars();
}

// ---- bars, one per token

function bar(number, y, height, attributes) {
  const made = document.createElementNS(SVG, "rect");
  for (const [name, value] of Object.entries({ x: number + 0.1, width: 0.8, y, height })) made.setAttribute(name, value);
  Object.assign(made.dataset, { number, ...attributes });
  return made;
}

function drawOn(id, bars, told) {
  byId(id).setAttribute("viewBox", `0 0 ${Math.max(state.trace.length, 32)} 1`);
  byId(id).replaceChildren(...bars);
  byId(id).setAttribute("aria-label", told);
}

export function drawBars() {
  const bars = state.trace.map((token, number) => {
    const height = Math.min(1, token.clash);
    const made = bar(number, 1 - height, height, {});
    if (token.clash > CLASH) made.classList.add("x");
    return made;
  });
  const marked = state.trace.filter((token) => token.clash > CLASH).length;
  drawOn("strip", bars, `Interference, token by token: above ${CLASH} at ${marked} of ${state.trace.length} tokens`);
  drawBelief();
}

function speaking(token) { // the law that is believed most
  return Object.entries(token.belief).reduce((most, each) => (each[1] > most[1] ? each : most))[0];
}

function drawBelief() {
  const first = state.trace[0];
  byId("belief").hidden = !(first && first.belief);
  if (byId("belief").hidden) return;
  const spoke = {};
  const bars = state.trace.flatMap((token, number) => {
    let below = 0;
    spoke[speaking(token)] = (spoke[speaking(token)] || 0) + 1;
    return Object.entries(token.belief).map(([law, share]) => {
      below += share;
      const made = bar(number, 1 - below, share, { law });
      const member = state.members.find((each) => each.name === law);
      made.style.setProperty("fill", member ? (member.number ? member.colour : "var(--line)") : "var(--soft)");
      return made;
    });
  });
  const counts = Object.entries(spoke).map(([law, count]) => `${visible(law)} speaks at ${count}`).join(", ");
  drawOn("band", bars, `Belief, token by token: ${counts} of ${state.trace.length} tokens`);
  const most = Object.entries(first.belief).sort((a, b) => b[1] - a[1]).slice(0, 3);
  const believed = most.map(([law, share]) => `${visible(law)} ${percent(share)}`).join(", ");
  byId("believed").textContent = `Belief at each token, in the members’ colours (light grey: the base; dark grey: Eq. 2 over all experts). Where the answer begins: ${believed}. Tokens: ${counts}.`;
}

// ---- one token

export function show(number) {
  const token = state.trace[number];
  if (!token) return;
  for (const each of byId("output").children) each.setAttribute("aria-selected", String(Number(each.dataset.number) === number));
  const voices = [...state.members, { name: "composed", number: 0 }];
  const rows = voices.map((voice) => row(token, voice));
  if (token.belief) rows.push(element("tr", {}, element("th", { scope: "row" }, EQUATION), element("td"), element("td", {}, percent(token.belief[EQUATION])), element("td"), element("td")));
  const columns = ["who", "this token", ...(token.belief ? ["belief", "share"] : []), "favourites"];
  const head = element("tr", {}, ...columns.map((text) => element("th", { scope: "col" }, text)));
  const title = element("h3", {}, element("b", {}, shownToken(token.text)), `owner: ${visible(token.owner)}`,
    element("span", {}, token.belief ? `speaks: ${visible(speaking(token))}` : ""),
    element("span", {}, `log Z ${token.log_z.toFixed(2)}`), element("span", {}, `interference ${token.clash.toFixed(2)}`), token.novel ? "nobody’s favourite" : "");
  byId("panel").replaceChildren(title, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function row(token, voice) {
  const choices = token.top[voice.name].map(([text, logprob]) => [
    element("code", { class: text === token.text ? "w" : "" }, shownToken(text)), element("small", {}, percent(Math.exp(logprob)))]);
  const weighed = (token.belief ? [token.belief, token.share || {}] : []).map((of) => element("td", {}, voice.name in of ? percent(of[voice.name]) : ""));
  return element("tr", {}, element("th", { scope: "row" }, dot(voice), visible(voice.name)),
    element("td", {}, percent(Math.exp(token.logprob[voice.name]))), ...weighed, element("td", {}, ...choices.flat()));
}

export function move(event) {
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
