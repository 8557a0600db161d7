"use strict";
// What every member would have said, for the token under the mouse or the focus. Arrow keys go from token to token.
const data = JSON.parse(document.getElementById("data").textContent);
const panel = document.querySelector("#panel > div");
const tokens = [...document.querySelectorAll(".t[data-i]")];
const make = (tag, content, kind) => {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (content !== undefined) node.textContent = content;
  return node;
};
const number = (value, digits = 3) => value === null || value === undefined ? "∞" : Math.abs(value) >= 1000 ? value.toExponential(1) : value.toFixed(digits);
const chance = log => log === null ? "0" : (p => p >= 0.0995 ? (100 * p).toFixed(0) + " %" : p >= 0.001 ? (100 * p).toFixed(1) + " %" : p.toExponential(0))(Math.exp(log));

function show(node) {
  const row = data.rows[node.dataset.i];
  const head = make("h3");
  head.append(make("b", data.strings[row.token]), make("span", `owner: ${data.voices[row.owner]}`), make("span", `log Z ${number(row.log_z)}`),
    make("span", `clash ${number(row.clash)}`), make("span", `gap ${number(row.gap)}`));
  if (row.novel) head.append(make("b", "nobody's favourite"));
  const table = make("table"), top = make("tr");
  const columns = ["member", "this token", "KL", "stops", "would say"];
  columns.forEach((name, at) => top.append(make("th", name, at && at < columns.length - 1 ? "n" : "")));
  table.append(top);
  data.voices.forEach((voice, m) => {
    const line = make("tr"), name = make("td"), expert = m > 0 && m < data.voices.length - 1;
    const dot = make("span", "", "dot");
    dot.style.setProperty("--c", data.colours[m]);
    name.append(dot, voice);
    line.append(name, make("td", chance(row.logprob[m]), "n"));
    line.append(make("td", expert ? number(row.kl[m - 1]) : "", "n"));
    line.append(make("td", chance(Math.log(row.hazard[m])), "n"));
    const said = make("td");
    row.top[m].forEach(([string, log]) => said.append(make("code", data.strings[string], string === row.token ? "w" : ""), make("small", chance(log))));
    line.append(said);
    table.append(line);
  });
  panel.replaceChildren(head, table);
}

tokens.forEach((node, at) => {
  node.addEventListener("mouseenter", () => show(node));
  node.addEventListener("focus", () => show(node));
  node.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step && tokens[at + step]) { event.preventDefault(); tokens[at + step].focus(); }
  });
});
