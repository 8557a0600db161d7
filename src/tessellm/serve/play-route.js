// Who answers, as the router decided, and examples that change its mind: shown before they are saved.

import { call } from "./play-ask.js";
import { byId, dot, element, state, visible } from "./play-view.js";

const SMALLEST = 0.005; // a share that is shown
const SHOWN = 5; // other examples whose route would change
let asked = ""; // the prompt that was routed

const percent = (share) => `${(100 * share).toFixed(share > 0.99 || share < 0.1 ? 1 : 0)} %`;
const memberOf = (name) => state.members.find((each) => each.name === name);

export function forgetRoute() {
  byId("route").hidden = true;
  forgetEffect();
}

function forgetEffect() {
  byId("keep").hidden = true;
  byId("changes").replaceChildren();
}

export function showRoute(route, prompt) {
  byId("route").hidden = !route.prior; // else the request named who answers
  if (!route.prior) return;
  asked = prompt;
  const shares = Object.entries(route.prior).filter(([, share]) => share >= SMALLEST);
  const parts = shares.flatMap(([name, share]) => [dot(memberOf(name)), `${visible(name)} ${percent(share)} `]);
  const running = route.active.length > 1 ? `; mixed: ${route.active.map(visible).join(", ")}` : "";
  byId("routed").replaceChildren("Routed to ", element("b", {}, visible(route.selected)), ": ", ...parts, running);
  const others = state.members.filter((member) => member.name !== route.selected);
  byId("should").replaceChildren(...others.map((member) => element("option", { value: member.name }, visible(member.name))));
}

async function ask(save) {
  const body = { member: byId("should").value, prompt: asked, save };
  try {
    return await (await call("v1/examples", { method: "POST", body: JSON.stringify(body) })).json();
  } catch (error) {
    byId("changes").replaceChildren(element("p", { class: "wrong" }, visible(error.message)));
    return null;
  }
}

function told(effect) {
  const { own, others, moved } = effect;
  const lines = [
    `As an example of ${own.member}: ${own.after} is selected for it (now: ${own.before}), with a share of ${percent(effect.share_after)} for ${own.member} (now: ${percent(effect.share_before)}).`,
    others ? `Of ${others} other examples ${moved.length} would be routed differently.` : "There are no other examples.",
    ...moved.slice(0, SHOWN).map((each) => `“${each.prompt.slice(0, 80)}” (${each.member}): ${each.before} → ${each.after}`),
    `The base keeps ${percent(effect.retention_after)} of the calibration prompts (now: ${percent(effect.retention_before)}).`,
  ];
  if (effect.saved) lines.push(`Saved in ${effect.saved}; the next answer goes by it.`);
  return lines.map((line) => element("p", {}, visible(line)));
}

async function show(save) {
  forgetEffect();
  for (const id of ["effect", "keep"]) byId(id).disabled = true;
  const effect = await ask(save);
  if (effect) byId("changes").replaceChildren(...told(effect));
  for (const id of ["effect", "keep"]) byId(id).disabled = false;
  byId("keep").hidden = !effect || save;
}

export function offerExamples() {
  byId("effect").addEventListener("click", () => show(false));
  byId("keep").addEventListener("click", () => show(true));
  byId("should").addEventListener("change", forgetEffect);
}
