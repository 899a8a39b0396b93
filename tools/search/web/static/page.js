"use strict";
// Captions, keys and file names are untrusted: they reach the page only as textContent and attributes.

const $ = (id) => document.getElementById(id);
const STEPS = 100; // of a slider; the last one stands for "any"
let about = null;
let files = [];
let outer = null; // lowest and highest uncertainty of the queries so far, times their parts
const PAGE = 24; // results requested at first, and with every "More"
let wanted = PAGE;
let asked = 0; // queries sent, so that a late answer cannot replace a newer one

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

const shorten = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4 ? x.toPrecision(4) : x.toExponential(1));
const percent = (share) => `${Math.floor(100 * share)} %`;

function addText(value = "") {
  const first = !$("texts").children.length;
  const row = make("div", "part");
  const input = make("input");
  input.type = "text";
  input.name = "text";
  input.maxLength = about.max_text;
  input.placeholder = first ? "What are you looking for?" : "… and also";
  input.setAttribute("aria-label", first ? "Query" : "Further text");
  input.value = value;
  row.append(input);
  if (!first) {
    const remove = make("button", "remove", "×");
    remove.type = "button";
    remove.setAttribute("aria-label", "Remove this text");
    remove.addEventListener("click", () => {
      row.remove();
      showLimits();
    });
    row.append(remove);
  }
  input.addEventListener("input", showLimits);
  $("texts").append(row);
  return input;
}

const isTooLarge = (several) => several.reduce((sum, file) => sum + file.size, 0) > about.max_upload - 65536;
const tooLarge = () =>
  `The upload is too large: the limit is ${Math.floor(about.max_upload / 1048576)} MiB. Choose a smaller image, or fewer parts.`;

function addFiles(chosen) {
  for (const file of chosen) {
    if (isTooLarge([...files, file])) {
      say(tooLarge(), "problem");
      break;
    }
    files.push(file);
    const figure = make("figure", "given");
    const image = make("img");
    image.alt = file.name;
    image.src = URL.createObjectURL(file);
    const remove = make("button", "remove", "×");
    remove.type = "button";
    remove.setAttribute("aria-label", "Remove this image");
    remove.addEventListener("click", () => {
      files = files.filter((one) => one !== file);
      URL.revokeObjectURL(image.src);
      figure.remove();
      showLimits();
    });
    figure.append(image, remove);
    $("images").append(figure);
  }
  showLimits();
}

function say(text, kind = "") {
  $("status").textContent = text;
  $("status").className = kind;
}

// ------------------------------------------------------------------------------------------------ the two sliders

// A slider selects a share of the expected range. A product of k normals has about a k-th of the uncertainty of one, so
// the range of a query depends on the number of its parts.

const texts = () => [...$("texts").querySelectorAll("input")].map((input) => input.value).filter((text) => text.trim());
const kindsNow = () => [...texts().map(() => "text"), ...files.map(() => "image")];

const fitsNow = () => document.querySelector("#fits input:checked").value === "yes";

function curveOf(kinds) {
  if (about.fits && fitsNow() !== about.fits.own) return undefined; // calibrated is the index' own ranking
  const parts = kinds.length ? kinds : [about.calibrated?.kind];
  return parts.every((kind) => kind === about.calibrated?.kind) ? about.curves[String(parts.length)] : undefined;
}

// What the slider limits: the calibrated score where such queries are calibrated, else the uncertainty u.
const scoreOf = (kinds) => (curveOf(kinds) ? about.calibrated.score : "u");

function queryRange(kinds) {
  const parts = Math.max(1, kinds.length);
  const curve = curveOf(kinds);
  let [low, high] = curve ? [curve.limits[0], curve.limits.at(-1)] : about.queries.map((u) => u / parts);
  if (scoreOf(kinds) !== "u") {
    const margin = 0.05 * (high - low) + 1e-6 * Math.abs(high);
    return [low - margin, high + margin];
  }
  if (outer) [low, high] = [Math.min(low, outer[0] / parts), Math.max(high, outer[1] / parts)];
  const margin = 0.05 * (high - low) + 1e-6 * high; // the lowest setting lies below the expected range
  return [Math.max(0, low - margin), high + margin];
}

function limitOf(id, [low, high]) {
  const step = Number($(id).value);
  return step >= STEPS ? null : low + (step / STEPS) * (high - low);
}

function first() {
  const { kind, gallery, within } = about.calibrated;
  const of = `of ${gallery.toLocaleString("en")} ${kind === "text" ? "images" : "captions"}`;
  return within === 1 ? `as the first ${of}` : `among the first ${within} ${of}`;
}

function showLimits() {
  const kinds = kindsNow();
  const limits = { "query-limit": limitOf("query-limit", queryRange(kinds)), "item-limit": limitOf("item-limit", about.items) };
  for (const [id, limit] of Object.entries(limits)) $(`${id}-value`).textContent = limit === null ? "any" : `up to ${shorten(limit)}`;
  const curve = curveOf(kinds);
  const named = scoreOf(kinds) !== "u";
  $("query-limit-name").textContent = named ? `Tolerated ${about.calibrated.title}` : "Tolerated uncertainty of the query";
  const ofKind = kinds.every((kind) => kind === about.calibrated?.kind);
  const doubt = ofKind ? about.calibrated?.doubts[String(Math.max(1, kinds.length))] : undefined;
  let note = `A query above it is not answered.${doubt ? ` ${doubt}` : ""}`;
  if (curve) {
    const limit = limits["query-limit"] ?? Infinity;
    const at = curve.limits.findLastIndex((one) => one <= limit);
    note = at < 0
      ? "Too few queries of the validation set are this certain to promise anything."
      : `This answers ${percent(curve.coverage[at])} of the validation set's queries; at least ` +
        `${percent(curve.precision[at])} of those find the right one ${first()}.`;
    if (named) note += ` It is ${about.calibrated.meaning}.`;
  }
  $("query-limit-note").textContent = note;
}

// ------------------------------------------------------------------------------------------------ asking and showing

async function ask(results = PAGE) {
  const form = new FormData();
  for (const text of texts()) form.append("text", text);
  for (const file of files) form.append("image", file, file.name);
  if (!form.has("text") && !form.has("image")) return say("The query is empty. Write a text or give an image.", "problem");
  wanted = Math.min(results, about.max_results, about.count);
  form.append("top", String(wanted));
  if (about.fits) form.append("fits", fitsNow() ? "yes" : "no");
  const limited = scoreOf(kindsNow()) === "u" ? "max_uncertainty" : "max_score";
  const limits = { [limited]: limitOf("query-limit", queryRange(kindsNow())), max_item_uncertainty: limitOf("item-limit", about.items) };
  for (const [name, limit] of Object.entries(limits)) if (limit !== null) form.append(name, String(limit));
  const number = ++asked;
  $("go").disabled = true;
  $("results").className = "old";
  say("Searching …");
  try {
    let response = await fetch("/search", { method: "POST", body: form });
    const end = Date.now() + PATIENCE;
    while (response.status === 503 && Date.now() < end && number === asked) {
      await new Promise((wake) => setTimeout(wake, 1000 * (Number(response.headers.get("Retry-After")) || 1)));
      response = await fetch("/search", { method: "POST", body: form });
    }
    const answer = await response.json().catch(() => null); // a far too large upload is answered in plain text
    const problem = answer ? `${answer.error} ${answer.remedy}` : response.status === 413 ? await whyBroken(true)
      : `The server answered ${response.status}. Search again, or reload this page.`;
    if (number !== asked) return;
    if (response.ok && answer) show(answer);
    else fail(problem);
  } catch {
    const problem = await whyBroken(false);
    if (number === asked) fail(problem);
  } finally {
    if (number === asked) $("go").disabled = false;
  }
}

// Why an upload was refused or interrupted: the server closes the connection during an upload that is too large, and may
// have been restarted with another limit since this page was opened.
async function whyBroken(refused) {
  try {
    about.max_upload = (await (await fetch("/about")).json()).max_upload;
  } catch {
    return "The server does not answer. Check whether it is still running, and search again.";
  }
  return refused || isTooLarge(files) ? tooLarge() : "The connection to the server was interrupted. Search again.";
}

function fail(text) {
  $("results").replaceChildren();
  $("results").className = "";
  $("query").hidden = $("more").hidden = true;
  say(text, "problem");
}

function show(answer) {
  const u = answer.query.uncertainty;
  const kinds = answer.query.parts.map((part) => part.kind);
  $("results").className = "";
  pictures.stop();
  pictures = new Pictures();
  $("results").replaceChildren(...answer.results.map((result) => card(result)));
  $("more").hidden = answer.results.length < wanted || wanted === Math.min(about.max_results, about.count);
  const several = answer.query.parts.length > 1 ? ` (its parts: ${answer.query.parts.map((part) => shorten(part.uncertainty)).join(", ")})` : "";
  const named = scoreOf(kinds) !== "u" && answer.score.value !== null;
  const score = named ? answer.score : { value: u, limit: answer.limit };
  const told = named ? ` ${answer.score.title[0].toUpperCase()}${answer.score.title.slice(1)}: ${shorten(score.value)}.` : "";
  if (answer.refused) {
    const what = named ? `its ${answer.score.title} of ${shorten(score.value)}` : `the query's uncertainty of ${shorten(u)}${several}`;
    say(`Not answered: ${what} is above the tolerated ${shorten(score.limit)}. Say more, or move the slider.`, "refused");
  } else {
    const count = answer.results.length;
    const among = answer.looked_at < answer.gallery ? ` among the ${answer.looked_at.toLocaleString("en")} closest` : "";
    const short = count ? "" : ` No result is as certain as that${among}.`;
    say(`Uncertainty of the query: ${shorten(u)}${several}.${told} ${count} result${count === 1 ? "" : "s"} in ${answer.seconds.toFixed(2)} s.${short}`);
  }
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
}

// ------------------------------------------------------------------------------------------------ the pictures

const AT_ONCE = 4; // of a browser's six connections to a server; the rest stay free for searches
const PATIENCE = 30000; // ms of retries while the server answers 503

// The pictures of one answer, fetched in their order.
class Pictures {
  ended = new AbortController();
  waiting = [];
  loading = 0;

  load(...picture) {
    this.waiting.push(picture);
    this.next();
  }

  stop() {
    this.waiting = [];
    this.ended.abort();
  }

  next() {
    if (this.loading >= AT_ONCE || !this.waiting.length) return;
    this.loading++;
    this.put(...this.waiting.shift()).finally(() => {
      this.loading--;
      this.next();
    });
  }

  async put(image, source, description) {
    try {
      const response = await this.ask(source);
      if (response.ok) {
        image.src = URL.createObjectURL(await response.blob());
        image.alt = description;
        await image.decode().finally(() => URL.revokeObjectURL(image.src));
      } else image.replaceWith(response.status === 503 ? "The server is too busy for this picture." : "The picture is missing.");
    } catch {
      if (!this.ended.signal.aborted) image.replaceWith("The picture is missing.");
    }
  }

  async ask(source) {
    const end = Date.now() + PATIENCE;
    for (;;) {
      const response = await fetch(source, { signal: this.ended.signal });
      if (response.status !== 503 || Date.now() > end) return response;
      await new Promise((wake) => setTimeout(wake, 1000 * (Number(response.headers.get("Retry-After")) || 1)));
    }
  }
}

let pictures = new Pictures();

function card(result) {
  const item = make("li", "card");
  const caption = result.captions[0] ?? "";
  if (result.picture) {
    const link = make("a", "frame");
    link.href = `${result.picture}/large`;
    link.target = "_blank";
    link.rel = "noopener";
    const image = make("img");
    link.append(image);
    pictures.load(image, result.picture, caption || result.key);
    item.append(link);
  }
  const told = make("div", "told");
  const numbers = make("div", "numbers");
  numbers.append(make("b", "", `${result.rank}.`), make("span", "distance", `distance ${shorten(result.distance)}`), make("span", "uncertainty", `uncertainty ${shorten(result.uncertainty)}`));
  const bar = make("div", "bar");
  const filled = make("div");
  const [low, high] = about.items;
  filled.style.width = `${Math.max(2, Math.min(100, (100 * (result.uncertainty - low)) / (high - low || 1)))}%`;
  bar.append(filled);
  told.append(numbers, bar, make("p", "captions", caption));
  if (result.captions.length > 1) {
    const more = make("details");
    more.append(make("summary", "", `${result.captions.length - 1} more`));
    for (const other of result.captions.slice(1)) more.append(make("p", "captions", other));
    told.append(more);
  }
  told.append(make("p", "key", result.key));
  item.append(told);
  return item;
}

async function start() {
  about = await (await fetch("/about")).json();
  addText().focus();
  showLimits();
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  $("more").querySelector("button").addEventListener("click", () => ask(wanted + PAGE));
  $("add-text").addEventListener("click", () => addText().focus());
  $("file").addEventListener("change", () => {
    addFiles($("file").files);
    $("file").value = ""; // the same file can be chosen again
  });
  $("add-image").addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") $("file").click();
  });
  for (const id of ["query-limit", "item-limit"]) {
    $(id).addEventListener("input", showLimits);
    $(id).addEventListener("change", () => {
      if (asked) ask();
    });
  }
  $("fits")?.addEventListener("change", () => {
    showLimits();
    if (asked) ask();
  });
  document.body.dataset.ready = "yes";
}

start();
