// The search page. Captions, keys, addresses and file names are untrusted: they reach the page only as textContent and
// attributes.

const PAGE = 24; // results requested at first, and with every "More results"
const AT_ONCE = 4; // pictures, of a browser's six connections to a server; the rest stay free for searches
const PATIENCE = 30000; // ms of retries while the server answers 503
const LIMITS = ["max_uncertainty", "max_item_uncertainty", "coverage"];
const $ = (id) => document.getElementById(id);
const shorten = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4 ? x.toPrecision(4) : x.toExponential(1));
const count = (n) => n.toLocaleString("en");

let about = null; // facts about the server: limits of a query, and its indexes
let index = null; // the one that is searched
let running = null; // the search that is not answered yet
let shown = new AbortController(); // the results whose pictures are being fetched

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function say(text, kind = "") {
  $("status").textContent = text;
  $("status").className = kind;
}

// ------------------------------------------------------------------------------------------------ the query

const parts = (kind) => [...$("parts").querySelectorAll(`.${kind}`)];
const inputOf = (part) => part.querySelector("[name=text]");
const written = () => parts("text").filter((part) => inputOf(part).value.trim());
const focusQuery = () => inputOf(parts("text")[0]).focus();

// A part of the query; `field` gives its entry in the form.
function addPart(kind, node, field, weight = 1) {
  const size = make("input", { className: "weight", type: "number", step: "0.1", max: about.max_weight, min: -about.max_weight, value: weight || 1 });
  const remove = make("button", { type: "button", className: "quiet remove", textContent: "×", ariaLabel: "Remove this part" });
  const part = make("div", { className: `part ${kind}`, field }, node, make("label", { className: "fine" }, "weight ", size));
  remove.addEventListener("click", () => {
    part.remove();
    changed();
    focusQuery();
  });
  if (kind !== "text" || parts("text").length) part.append(remove);
  $("parts").append(part);
  changed();
  return part;
}

function addText(value = "", weight = 1) {
  const first = !parts("text").length;
  const input = make("input", { type: "text", name: "text", maxLength: about.max_text, value, placeholder: first ? "What are you looking for?" : "… and also" });
  input.ariaLabel = first ? "Query" : "Further text";
  return addPart("text", input, () => ["text", input.value], weight);
}

function addLike(like, weight) {
  if (!/^\w{1,40}\/\d{1,15}$/.test(like)) return;
  addPart("like", make("img", { src: `/picture/${like}`, alt: "A result" }), () => ["like", like], weight);
}

function addFiles(files) {
  for (const file of files) {
    const sizes = [...parts("file").map((part) => part.field()[1].size), file.size];
    if (sizes.reduce((sum, size) => sum + size) > about.max_upload - 65536) return say(tooLarge(), "problem");
    const image = make("img", { src: URL.createObjectURL(file), alt: file.name });
    image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
    addPart("file", image, () => ["image", file]);
  }
}

const tooLarge = () => `The upload is too large: the limit is ${Math.floor(about.max_upload / 1048576)} MiB. Choose a smaller image, or fewer parts.`;
const changed = () => $("form").classList.toggle("several", index.weighs && $("parts").children.length > 1);

// The query as a form; null if it is empty.
function formOf(wanted) {
  const form = new FormData();
  const chosen = [...written(), ...parts("file"), ...parts("like")];
  if (!chosen.length) return null;
  form.append("index", index.name);
  for (const part of chosen) form.append(...part.field());
  const weights = chosen.map((part) => part.querySelector(".weight").value);
  if (chosen.length > 1 && weights.some((weight) => Number(weight) !== 1)) for (const weight of weights) form.append("weight", weight);
  form.append("top", String(wanted));
  for (const name of LIMITS) if ($(name).value) form.append(name, $(name).value);
  return form;
}

// The query in the page's address, behind the #, so that a reload and a shared link give the same results and no log of a
// server has it. Of uploaded pictures it holds the number only.
function addressOf(form) {
  const address = new URLSearchParams();
  for (const [name, value] of form) if (typeof value === "string") address.append(name, value);
  if (parts("file").length) address.append("pictures", parts("file").length);
  return `#${address}`;
}

function setQuery({ texts = [], likes = [], weights = [] }) {
  $("parts").replaceChildren();
  for (const [i, text] of (texts.length ? texts : [""]).entries()) addText(text, weights[i]);
  for (const [i, like] of likes.entries()) addLike(like, weights[texts.length + i]);
}

// Fill the page in from its address, and search if that says all of the query.
function restore() {
  const get = new URLSearchParams(location.hash.slice(1));
  const pictures = Number(get.get("pictures"));
  const found = about.indexes.find((one) => one.name === (get.get("index") ?? about.indexes[0].name));
  running?.abort();
  showIndex(found ?? index ?? about.indexes[0]);
  for (const name of LIMITS) $(name).value = get.get(name) ?? "";
  setQuery({ texts: get.getAll("text"), likes: get.getAll("like"), weights: pictures ? [] : get.getAll("weight").map(Number) });
  clear();
  if (!found) return say("That index is not here. Choose another one, and search again.", "problem");
  if (pictures) return say("This query includes uploaded pictures, which an address cannot hold. Add them again, and search.", "refused");
  say("");
  if (formOf(PAGE)) ask(Number(get.get("top")) || PAGE, false);
}

function showIndex(chosen) {
  index = chosen;
  $("index").value = index.name;
  $("facts").textContent = `${count(index.count)} ${index.kind === "text" ? "captions" : "images"} embedded by ${index.model}`;
  const [queries, items] = [index.queries, index.items].map((ends) => ends.map(shorten).join(" to "));
  $("usual").textContent = `Uncertainty is how ambiguous something is among what the model was trained on. Usual here: queries ${queries}, results ${items}.`;
  const { calibrated } = index;
  $("coverage").parentElement.hidden = !calibrated;
  $("calibrated").textContent = calibrated?.max_uncertainty
    ? `Calibrated: of queries of one ${calibrated.kind} up to ${shorten(calibrated.max_uncertainty)}, at least ${Math.floor(100 * calibrated.precision)} % ` +
      `find the right one ${calibrated.within === 1 ? "as the first" : `among the first ${calibrated.within}`} of ${count(calibrated.gallery)} (${Math.floor(100 * calibrated.coverage)} % are answered).`
    : "";
}

// ------------------------------------------------------------------------------------------------ the search

// A request that is repeated while the server is too busy.
async function patiently(source, options) {
  for (const end = Date.now() + PATIENCE; ; ) {
    const response = await fetch(source, options);
    if (response.status !== 503 || Date.now() > end) return response;
    await new Promise((wake) => setTimeout(wake, 1000 * (Number(response.headers.get("Retry-After")) || 1)));
    options.signal.throwIfAborted();
  }
}

async function ask(wanted = PAGE, remember = true) {
  wanted = Math.max(1, Math.min(wanted, about.max_results, index.count));
  const form = formOf(wanted);
  running?.abort();
  if (!form) return fail("The query is empty. Write a text or give an image.");
  const mine = (running = new AbortController());
  if (remember && addressOf(form) !== location.hash) history.pushState(null, "", addressOf(form));
  $("go").disabled = true;
  $("results").className = "old";
  say("Searching …");
  try {
    const response = await patiently("/search", { method: "POST", body: form, signal: mine.signal });
    const answer = await response.json().catch(() => ({ error: `The server answered ${response.status}.`, remedy: response.status === 413 ? tooLarge() : "" }));
    if (mine.signal.aborted) return;
    if (response.ok) show(answer, wanted);
    else fail(`${answer.error} ${answer.remedy}`);
  } catch {
    if (!mine.signal.aborted) fail("The server does not answer, or does not take so large an upload. Check whether it is still running, and search again.");
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

function clear() {
  shown.abort();
  $("results").replaceChildren();
  $("legend").textContent = "";
  $("more").hidden = true;
}

function fail(text) {
  clear();
  say(text, "problem");
}

function show(answer, wanted) {
  clear();
  shown = new AbortController();
  $("results").append(...answer.results.map((result) => card(result, answer)));
  loadPictures([...$("results").querySelectorAll("img")], shown.signal);
  $("more").hidden = answer.coverage !== null || answer.results.length < wanted || wanted === Math.min(about.max_results, index.count);
  $("more").onclick = () => ask(wanted + PAGE);
  const unknown = answer.query.unknown_words.join(", ");
  const match = answer.results.some((result) => result.match !== null)
    ? `Match is the probability of a result if exactly one of the ${count(answer.gallery)} items matches the query, and how many times the average item's that is.`
    : index.matches ? "This query has no match probability: the model knows one between pictures and texts." : "The model has not learned a match probability.";
  const times = answer.weight === 1 ? "" : `, that of the result times ${shorten(answer.weight)}`;
  $("legend").textContent = `${unknown && `The model does not know: ${unknown}. `}${match} A smaller distance is closer; both uncertainties are in it${times}.`;
  const u = shorten(answer.query.uncertainty);
  if (answer.refused) return say(`Not answered: the query's uncertainty of ${u} is above ${shorten(answer.limit)}. Say more, or raise the limit.`, "refused");
  const n = answer.results.length;
  const promise = answer.coverage === null ? "" : ` Among so many is the right one for ${answer.coverage} % of queries as uncertain as this.`;
  say(`Uncertainty of the query: ${u}. ${n || "No"} result${n === 1 ? "" : "s"} in ${answer.seconds.toFixed(2)} s.${n ? promise : " None is as certain as that."}`);
}

function card(result, answer) {
  const [caption, ...others] = result.captions;
  const text = (className, textContent, tag = "div") => make(tag, { className, textContent });
  const match = result.match === null ? "" : ` match ${result.match < 0.001 ? "< 0.1" : (100 * result.match).toFixed(1)} %, ${shorten(result.match * answer.gallery)}\u00a0×`;
  const item = make("li", { className: "card" });
  if (result.picture) {
    const image = make("img", { alt: caption ?? result.key });
    image.dataset.source = result.picture;
    item.append(make("a", { className: "frame", href: `${result.picture}/large`, target: "_blank", rel: "noopener" }, image));
  }
  item.append(text("place", `${result.rank}.${match}`));
  item.append(text("numbers", `distance ${shorten(result.distance)}, uncertainty ${shorten(result.uncertainty)}`), text("captions", caption ?? "", "p"));
  if (others.length) item.append(make("details", {}, text("", `${others.length} more`, "summary"), ...others.map((one) => text("captions", one, "p"))));
  const like = index.kind === "text" && caption ? { texts: [caption] } : { likes: [`${index.identity}/${result.row}`] };
  const more = make("button", { type: "button", className: "quiet like", textContent: "More like this" });
  more.addEventListener("click", () => {
    setQuery(like);
    window.scrollTo({ top: 0 });
    ask();
  });
  const source = result.url // which the server has checked
    ? make("a", { className: "source", href: result.url, target: "_blank", rel: "noopener noreferrer", textContent: new URL(result.url).hostname })
    : "";
  item.append(text("key", result.key, "p"), make("div", { className: "last" }, result.picture || like.texts ? more : "", source));
  return item;
}

// Fetch pictures in their order, a few at a time.
function loadPictures(images, signal) {
  const next = async () => {
    for (let image; (image = images.shift()) && !signal.aborted; ) {
      try {
        const response = await patiently(image.dataset.source, { signal });
        if (!response.ok) throw new Error(response.status);
        image.src = URL.createObjectURL(await response.blob());
        await image.decode().finally(() => URL.revokeObjectURL(image.src));
      } catch {
        if (!signal.aborted) image.replaceWith("The picture is missing.");
      }
    }
  };
  for (let i = 0; i < AT_ONCE; i++) next();
}

// ------------------------------------------------------------------------------------------------ the page

const imagesOf = (transfer) => [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));

about = await (await fetch("/about")).json();
$("choice").hidden = about.indexes.length < 2;
for (const { name } of about.indexes) $("index").append(new Option(name, name));
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("add-text").addEventListener("click", () => inputOf(addText()).focus());
$("add-image").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  addFiles([...$("file").files]);
  $("file").value = ""; // the same file can be chosen again
});
$("index").addEventListener("change", () => {
  showIndex(about.indexes.find((one) => one.name === $("index").value));
  for (const name of LIMITS) $(name).value = ""; // they are of the other index
  changed();
  if (formOf(PAGE)) ask();
});
document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault(); // a browser would open the file in place of the page
  const images = imagesOf(event.dataTransfer);
  if (images.length) addFiles(images);
  else say("What was dropped is not an image. Drop a JPEG, PNG or WebP file.", "problem");
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData.types.includes("text/plain")) return; // some programs copy their texts as pictures too
  addFiles(imagesOf(event.clipboardData));
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) {
    stop();
    say("The search was stopped.");
  } else if (event.key === "Escape" || (event.key === "/" && !event.target.matches("input"))) {
    event.preventDefault();
    focusQuery();
  }
});
window.addEventListener("popstate", restore);
restore();
focusQuery();
document.body.dataset.ready = "yes";
