// How much each part of a query counts, and which parts the results should be without. In the query's order: texts, the
// visitor's own pictures, results.

import { $, make, state } from "./state.js";

let awaited = []; // weights of an address for pictures that it cannot hold, in the order in which they are added

export const awaitWeights = (weights) => { awaited = weights; };
export const nextAwaited = () => awaited.shift();

// The controls of one part.
export function weighing(what, weight = 1, changed) {
  const known = Number.isFinite(weight) && weight !== 0 ? weight : 1;
  const controls = make("span", "weighing");
  const times = make("label", "", "weight ");
  const size = make("input", "size");
  Object.assign(size, { type: "number", min: "0.1", max: String(state.about.max_weight), step: "0.1", value: String(Math.abs(known)) });
  size.setAttribute("aria-label", `Weight of this ${what}`);
  times.append(size);
  const without = make("label");
  const box = make("input", "without");
  Object.assign(box, { type: "checkbox", checked: known < 0 });
  box.setAttribute("aria-label", `without this ${what}`);
  without.append(box, " without");
  size.addEventListener("input", changed);
  box.addEventListener("change", () => {
    const [from, to] = box.checked ? [1, state.about.without] : [state.about.without, 1]; // unless it was changed
    if (Number(size.value) === from) size.value = String(to);
    changed();
  });
  controls.append(times, without);
  return controls;
}

const isShown = () => $("form").classList.contains("several");
const weightOf = (part) => Number(part.querySelector(".size").value) * (part.querySelector(".without").checked ? -1 : 1);

// A weight for every part that is searched with; an empty list if all are 1.
export function weights() {
  if (!isShown()) return [];
  const texts = [...$("texts").children].filter((row) => row.querySelector("[name=text]").value.trim());
  const pictures = ["file", "like"].flatMap((kind) => [...$("images").querySelectorAll(`.${kind}`)]);
  const found = [...texts, ...pictures].map(weightOf);
  return found.every((weight) => weight === 1) ? [] : found;
}

// The controls are there where there is something to weigh.
export function showWeights() {
  const parts = [...$("texts").children, ...$("images").children];
  $("form").classList.toggle("several", state.index.weighs && parts.length > 1);
  for (const part of parts) part.classList.toggle("left-out", isShown() && part.querySelector(".without").checked);
}
