// What is asked for, as it stands in the form, in a link and in a request; and the pieces that come back.

import { byId, state } from "./play-view.js";

export const EXAMPLES = {
  chat: [
    "What is the capital of Norway?",
    "A baker makes 12 rolls an hour for 5 hours and sells 47 of them. How many are left?",
    "Write a Python function that returns the second largest number of a list.",
    "Write a bash command for this: Find all files larger than 10 MB below the current folder",
    "Turn this request into JSON with its intent and slots: Play some jazz from 1959",
    "Give me three tips for sleeping better.",
  ],
  text: ["The capital of Norway is", "Question: What is 17 + 25?\nAnswer:", "def fibonacci(n):\n", "Once upon a time, in a town by the sea,"],
};
const FIELDS = ["prompt", "system", "rule", "mode", "tokens", "temperature", "top_p", "seed"];
const MOST_TURNS = 200; // of a link

export function settings() {
  const rows = [...document.querySelectorAll(".expert")];
  const takesPart = (row) => row.querySelector("[type=checkbox]").checked;
  const weights = Object.fromEntries(rows.map((row) => [row.dataset.name, takesPart(row) ? Number(row.querySelector("[type=range]").value) : 0]));
  const number = (id) => Number(byId(id).value);
  return { prompt: byId("prompt").value, system: byId("system").value, turns: state.turns, weights,
    off: rows.filter((row) => !takesPart(row)).map((row) => row.dataset.name), rule: byId("rule").value, mode: byId("mode").value,
    tokens: number("tokens"), temperature: number("temperature"), top_p: number("top_p"), seed: number("seed"),
    compare: byId("compare").checked, rules: byId("rules").checked };
}

export function restore(saved) {
  for (const id of FIELDS) if (["string", "number"].includes(typeof saved[id])) put(byId(id), saved[id]);
  for (const id of ["compare", "rules"]) byId(id).checked = saved[id] === true;
  const said = (turn) => turn && ["user", "assistant"].includes(turn.role) && typeof turn.content === "string";
  state.turns = Array.isArray(saved.turns) ? saved.turns.filter(said).slice(-MOST_TURNS) : [];
  for (const row of document.querySelectorAll(".expert")) {
    const off = Array.isArray(saved.off) && saved.off.includes(row.dataset.name);
    const weight = saved.weights && saved.weights[row.dataset.name];
    row.querySelector("[type=checkbox]").checked = !off;
    if (typeof weight === "number" && !off) row.querySelector("[type=range]").value = weight;
    shownWeight(row);
  }
}

function put(field, value) { // a choice that there is not leaves the one that was
  if (field.tagName !== "SELECT" || [...field.options].some((option) => option.value === value && !option.disabled)) field.value = value;
}

export function shownWeight(row) {
  row.querySelector("output").textContent = Number(row.querySelector("[type=range]").value).toFixed(2);
}

export function fromLink() {
  try {
    return JSON.parse(decodeURIComponent(location.hash.slice(1)));
  } catch {
    return null;
  }
}

export function toLink() {
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(settings()))}`);
}

export function request(wanted, model, extension) {
  const asked = { model, max_tokens: wanted.tokens, temperature: wanted.temperature, top_p: wanted.top_p, seed: wanted.seed, stream: true };
  if (extension) asked.tessellm = extension;
  if (wanted.mode !== "chat") return ["v1/completions", { ...asked, prompt: wanted.prompt }];
  const system = wanted.system ? [{ role: "system", content: wanted.system }] : [];
  return ["v1/chat/completions", { ...asked, messages: [...system, ...wanted.turns, { role: "user", content: wanted.prompt }] }];
}

// ---- what comes back

export async function call(path, options = {}) {
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

export async function* pieces([path, asked], signal) {
  const answer = await call(path, { method: "POST", body: JSON.stringify(asked), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server stopped in the middle of the answer");
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

export function textOf(choice) {
  return (choice.delta ? choice.delta.content : choice.text) || "";
}
