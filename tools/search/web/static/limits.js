// The two sliders, and the choice between the closest one and all that fits.
//
// A slider selects a share of the expected range. A product of k normals has about a k-th of the uncertainty of one, so
// the range of a query depends on the number of its parts.

import { kindsNow } from "./query.js";
import { $, percent, shorten, state } from "./state.js";
import { weights } from "./weights.js";

const STEPS = 100; // of a slider; the last one stands for "any"
const NAMES = { "query-limit": ["max_uncertainty", "max_score"], "item-limit": ["max_item_uncertainty"] };
let outer = null; // lowest and highest uncertainty of the queries so far, times their parts
let exact = {}; // limits of an address, until their slider moves

export const moreNow = () => $("more-than").querySelector("input:checked")?.value ?? "";
export const fitsNow = () => $("fits").querySelector("input:checked")?.value === "yes";

function curveOf(kinds) {
  const { fits, calibrated, curves } = state.index;
  if (fits && fitsNow() !== fits.own) return undefined; // calibrated is the index' own ranking
  if (weights().length) return undefined; // and queries without weights
  const parts = kinds.length ? kinds : [calibrated?.kind];
  return parts.every((kind) => kind === calibrated?.kind) ? curves[String(parts.length)] : undefined;
}

// What the slider limits: the calibrated score where such queries are calibrated, else the uncertainty u.
const scoreOf = (kinds) => (curveOf(kinds) ? state.index.calibrated.score : "u");

function queryRange(kinds) {
  const parts = Math.max(1, kinds.length);
  const curve = curveOf(kinds);
  let [low, high] = curve ? [curve.limits[0], curve.limits.at(-1)] : state.index.queries.map((u) => u / parts);
  if (scoreOf(kinds) !== "u") {
    const margin = 0.05 * (high - low) + 1e-6 * Math.abs(high);
    return [low - margin, high + margin];
  }
  if (outer) [low, high] = [Math.min(low, outer[0] / parts), Math.max(high, outer[1] / parts)];
  const margin = 0.05 * (high - low) + 1e-6 * high; // the lowest setting lies below the expected range
  return [Math.max(0, low - margin), high + margin];
}

const rangeOf = (id) => (id === "query-limit" ? queryRange(kindsNow()) : state.index.items);

function limitOf(id) {
  if (id in exact) return exact[id];
  const [low, high] = rangeOf(id);
  const step = Number($(id).value);
  return step >= STEPS ? null : low + (step / STEPS) * (high - low);
}

// The limits by the names of the server's form, without those that allow anything.
export function limits() {
  const name = scoreOf(kindsNow()) === "u" ? "max_uncertainty" : "max_score";
  const found = { [name]: limitOf("query-limit"), max_item_uncertainty: limitOf("item-limit") };
  return Object.fromEntries(Object.entries(found).filter(([, limit]) => limit !== null));
}

// Set the choice and the sliders, as an address tells them; `get` gives a setting by its name, or null.
export function setLimits(get) {
  const { fits } = state.index;
  exact = {};
  outer = null;
  $("fits").hidden = !fits;
  for (const one of $("fits").querySelectorAll("input")) one.checked = one.value === (get("fits") ?? (fits?.own ? "yes" : "no"));
  $("more-than").hidden = !state.index.general;
  setMore(get("more"));
  $("weight").textContent = fits ? String(Number(fits.weight.toPrecision(6))) : "";
  for (const [id, names] of Object.entries(NAMES)) {
    const limit = Number(names.map(get).find((one) => one) ?? NaN);
    const [low, high] = rangeOf(id);
    $(id).value = String(STEPS);
    if (!Number.isFinite(limit)) continue;
    exact[id] = limit;
    $(id).value = String(Math.min(STEPS - 1, (STEPS * (limit - low)) / (high - low || 1)));
  }
  showLimits();
}

// "general", "specific", or anything else for what is alike; that has no choice of the weight.
export function setMore(wanted) {
  const inputs = [...$("more-than").querySelectorAll("input")];
  const chosen = (state.index.general && inputs.find((one) => one.value === wanted)) || inputs[0];
  chosen.checked = true;
  $("more-note").hidden = !chosen.value;
  for (const one of $("fits").querySelectorAll("input")) one.disabled = chosen.value !== "";
}

function first() {
  const { kind, gallery, within } = state.index.calibrated;
  const of = `of ${gallery.toLocaleString("en")} ${kind === "text" ? "images" : "captions"}`;
  return within === 1 ? `as the first ${of}` : `among the first ${within} ${of}`;
}

export function showLimits() {
  const { calibrated } = state.index;
  const kinds = kindsNow();
  const found = { "query-limit": limitOf("query-limit"), "item-limit": limitOf("item-limit") };
  for (const [id, limit] of Object.entries(found)) $(`${id}-value`).textContent = limit === null ? "any" : `up to ${shorten(limit)}`;
  const curve = curveOf(kinds);
  const named = scoreOf(kinds) !== "u";
  $("query-limit-name").textContent = named ? `Tolerated ${calibrated.title}` : "Tolerated uncertainty of the query";
  const ofKind = kinds.every((kind) => kind === calibrated?.kind);
  const doubt = ofKind ? calibrated?.doubts[String(Math.max(1, kinds.length))] : undefined;
  let note = `A query above it is not answered.${doubt ? ` ${doubt}` : ""}`;
  if (curve) {
    const limit = found["query-limit"] ?? Infinity;
    const at = curve.limits.findLastIndex((one) => one <= limit);
    note = at < 0
      ? "Too few queries of the validation set are this certain to promise anything."
      : `This answers ${percent(curve.coverage[at])} of the validation set's queries; at least ` +
        `${percent(curve.precision[at])} of those find the right one ${first()}.`;
    if (named) note += ` It is ${calibrated.meaning}.`;
  }
  $("query-limit-note").textContent = note;
}

// Tell what a query's score was, and mark it on the scale.
export function showScore(answer) {
  const u = answer.query.uncertainty;
  const kinds = answer.query.parts.map((part) => part.kind);
  const named = scoreOf(kinds) !== "u" && answer.score.value !== null;
  const score = named ? answer.score : { value: u, limit: answer.limit };
  if (!named && $("query-limit").value === String(STEPS)) { // a slider that was set must not move
    outer = [Math.min(outer?.[0] ?? Infinity, u * kinds.length), Math.max(outer?.[1] ?? 0, u * kinds.length)];
  }
  let [low, high] = queryRange(kinds);
  if (named) [low, high] = [Math.min(low, score.value), Math.max(high, score.value)];
  const place = (x) => `${Math.max(0, Math.min(1, (x - low) / (high - low || 1))) * 100}%`;
  $("query").hidden = false;
  $("mark").style.left = place(score.value);
  $("mark").title = `this query: ${shorten(score.value)}`;
  $("limit-mark").hidden = score.limit === null;
  if (score.limit !== null) $("limit-mark").style.left = place(score.limit);
  $("low").textContent = shorten(low);
  $("high").textContent = shorten(high);
  return { named, score };
}

export function watchLimits(ask) {
  document.addEventListener("parts", showLimits);
  for (const id of Object.keys(NAMES)) {
    $(id).addEventListener("input", () => {
      delete exact[id];
      showLimits();
    });
    $(id).addEventListener("change", ask);
  }
  $("more-than").addEventListener("change", () => {
    setMore(moreNow());
    ask();
  });
  $("fits").addEventListener("change", () => {
    showLimits();
    ask();
  });
}
