// The search page: ask the server, and show what it answers.

import { keep, keptFiles, settings } from "./address.js";
import { fitsNow, limits, moreNow, setLimits, setMore, watchLimits } from "./limits.js";
import { patiently } from "./pictures.js";
import { addText, focusQuery, isTooLarge, setParts, takePictures, texts, tooLarge } from "./query.js";
import { clear, focusCard, show, showProgress, watchKeys } from "./results.js";
import { watchSaving } from "./save.js";
import { $, make, say, state } from "./state.js";
import { showWeights, weights } from "./weights.js";

const PAGE = 24; // results requested at first, and with every "More"
let wanted = PAGE;
let asked = false;
let running = null; // of the search that is not answered yet

const most = () => Math.min(state.about.max_results, state.index.count);

function formOf() {
  const form = new FormData();
  form.append("index", state.index.name);
  for (const text of texts()) form.append("text", text);
  for (const file of state.files) form.append("image", file, file.name);
  for (const like of state.likes) form.append("like", like);
  if (!["text", "image", "like"].some((name) => form.has(name))) return null;
  for (const weight of weights()) form.append("weight", String(weight));
  form.append("top", String(wanted));
  if (moreNow()) form.append("more", moreNow());
  else if (state.index.fits) form.append("fits", fitsNow() ? "yes" : "no");
  for (const [name, limit] of Object.entries(limits())) form.append(name, String(limit));
  return form;
}

async function ask(results = PAGE, remember = true) {
  const longer = results > PAGE;
  wanted = Math.max(1, Math.min(results, most()));
  const form = formOf();
  running?.abort();
  if (!form) return fail("The query is empty. Write a text or give an image.");
  const mine = running = new AbortController();
  asked = true;
  if (remember) keep(wanted, Math.min(PAGE, most()), longer);
  $("go").disabled = true;
  $("results").className = "old";
  showProgress();
  say("Searching …");
  try {
    const response = await patiently("/search", { method: "POST", body: form, signal: mine.signal });
    const answer = await response.json().catch(() => null); // a far too large upload is answered in plain text
    const problem = answer ? `${answer.error} ${answer.remedy}` : response.status === 413 ? await whyBroken(true)
      : `The server answered ${response.status}. Search again, or reload this page.`;
    if (mine.signal.aborted) return;
    if (response.ok && answer) show(answer, wanted);
    else fail(problem);
  } catch {
    const problem = mine.signal.aborted ? "" : await whyBroken(false);
    if (!mine.signal.aborted) fail(problem);
  } finally {
    if (running === mine) stop();
  }
}

function stop() {
  running?.abort();
  running = null;
  $("go").disabled = false;
  $("results").className = "";
}

// Why an upload was refused or interrupted: the server closes the connection during an upload that is too large, and may
// have been restarted with another limit since this page was opened.
async function whyBroken(refused) {
  try {
    state.about.max_upload = (await (await fetch("/about")).json()).max_upload;
  } catch {
    return "The server does not answer. Check whether it is still running, and search again.";
  }
  return refused || isTooLarge(state.files) ? tooLarge() : "The connection to the server was interrupted. Search again.";
}

function fail(text) {
  clear();
  say(text, "problem");
}

function showIndex(index) {
  state.index = index;
  $("index").value = index.name;
  const kind = index.kind === "text" ? "captions" : "images";
  $("facts").replaceChildren(`${index.count.toLocaleString("en")} ${kind} embedded by `, make("b", "", index.model));
}

// Fill the page in from its address, and search if that says all of the query.
function restore() {
  stop();
  const get = settings();
  const name = get.get("index");
  const index = name === null ? state.about.indexes[0] : state.about.indexes.find((one) => one.name === name);
  showIndex(index ?? state.index ?? state.about.indexes[0]);
  const pictures = Number(get.get("pictures") ?? 0);
  const files = keptFiles();
  setParts({ texts: get.getAll("text"), likes: get.getAll("like"), files, pictures, weights: get.getAll("weight").map(Number) });
  setLimits((one) => get.get(one));
  if (!index) return fail(`There is no index '${name}' here. Choose another one, and search again.`);
  if (files.length < pictures) {
    const [them, it] = pictures === 1 ? ["an uploaded picture", "it"] : [`${pictures} uploaded pictures`, "them"];
    clear();
    return say(`This query includes ${them}, which an address cannot hold. Add ${it} again, and search.`, "refused");
  }
  if (formOf()) return ask(Number(get.get("top")) || PAGE, false);
  asked = false;
  clear();
  return say("");
}

async function like({ more = "", ...parts }) {
  setParts(parts);
  setMore(more);
  window.scrollTo({ top: 0 });
  await ask();
  focusCard(0);
}

async function more() {
  const place = wanted;
  await ask(wanted + PAGE);
  focusCard(place);
}

function changeIndex() {
  showIndex(state.about.indexes.find((one) => one.name === $("index").value));
  showWeights();
  setLimits(() => null); // they are of the other index
  if (asked) ask();
}

function keys(event) {
  if (event.key === "Escape" && running) {
    stop();
    showProgress(1, 1);
    say("The search was stopped.");
  } else if (event.key === "Escape" || (event.key === "/" && !event.target.matches("input"))) {
    event.preventDefault();
    focusQuery();
  }
}

async function start() {
  state.about = await (await fetch("/about")).json();
  $("choice").hidden = state.about.indexes.length < 2;
  for (const { name } of state.about.indexes) $("index").append(new Option(name, name));
  watchLimits(() => asked && ask());
  watchKeys();
  watchSaving();
  takePictures();
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  $("more").querySelector("button").addEventListener("click", more);
  $("add-text").addEventListener("click", () => addText().focus());
  $("index").addEventListener("change", changeIndex);
  document.addEventListener("like", (event) => like(event.detail));
  document.addEventListener("keydown", keys);
  window.addEventListener("popstate", restore);
  restore();
  focusQuery();
  document.body.dataset.ready = "yes";
}

start();
