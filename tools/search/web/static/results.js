// The answer as cards, and the keys that lead through them.

import { showScore } from "./limits.js";
import { Pictures } from "./pictures.js";
import { focusQuery } from "./query.js";
import { $, button, make, say, shorten, state } from "./state.js";

const cards = () => [...$("results").children];
let pictures = new Pictures(() => {});

export function showProgress(done, all) {
  $("progress").className = all && done >= all ? "idle" : "";
  if (all) [$("progress").max, $("progress").value] = [all, done];
  else $("progress").removeAttribute("value"); // it is not known how long a search takes
}

export function clear() {
  pictures.stop();
  state.answer = null;
  $("results").replaceChildren();
  $("results").className = "";
  $("query").hidden = $("more").hidden = $("above").hidden = true;
  showProgress(1, 1);
}

export function show(answer, wanted) {
  clear();
  state.answer = answer;
  pictures = new Pictures(showProgress);
  $("results").replaceChildren(...answer.results.map((result) => card(result, pictures, answer)));
  if (pictures.all) showProgress(0, pictures.all);
  if (cards().length) choose(cards()[0]);
  $("more").hidden = answer.results.length < wanted || wanted === Math.min(state.about.max_results, state.index.count);
  $("above").hidden = !answer.results.length;
  const known = answer.results.some((result) => result.match !== null);
  const match = known ? `Match is the probability of a result if exactly one of the ${answer.gallery.toLocaleString("en")} items matches the query, and how many times the average item's that is.`
    : state.index.matches ? "This query has no match probability: the model knows one between pictures and texts."
    : "The model has not learned a match probability.";
  const times = answer.weight === 1 ? "" : `, that of the result times ${shorten(answer.weight)}`;
  const inclusion = !answer.more ? ""
    : ` Inclusion is ${answer.more === "general" ? "above 0 where the result includes the query" : "below 0 where the result lies in the query"}.`;
  $("legend").textContent = `${match}${inclusion} A smaller distance is closer; both uncertainties are in it${times}.`;
  const unknown = answer.query.unknown_words.join(", ");
  const lacks = unknown && `The model does not know: ${unknown}. The uncertainty says nothing about that.`;
  $("feasible").textContent = [answer.feasibility?.says, lacks].filter(Boolean).join(" ");
  $("feasible").hidden = !$("feasible").textContent;
  tell(answer, showScore(answer));
}

function tell(answer, { named, score }) {
  const u = answer.query.uncertainty;
  const several = answer.query.parts.length > 1 ? ` (its parts: ${answer.query.parts.map((part) => shorten(part.uncertainty)).join(", ")})` : "";
  const told = named ? ` ${answer.score.title[0].toUpperCase()}${answer.score.title.slice(1)}: ${shorten(score.value)}.` : "";
  if (answer.refused) {
    const what = named ? `its ${answer.score.title} of ${shorten(score.value)}` : `the query's uncertainty of ${shorten(u)}${several}`;
    return say(`Not answered: ${what} is above the tolerated ${shorten(score.limit)}. Say more, or move the slider.`, "refused");
  }
  const count = answer.results.length;
  const among = answer.looked_at < answer.gallery ? ` among the ${answer.looked_at.toLocaleString("en")} closest` : "";
  const short = count ? "" : answer.more ? ` Nothing is more ${answer.more} than the query${among}.` : ` No result is as certain as that${among}.`;
  say(`Uncertainty of the query: ${shorten(u)}${several}.${told} ${count} result${count === 1 ? "" : "s"} in ${answer.seconds.toFixed(2)} s.${short}`);
}

function chance(p) {
  if (p < 0.001) return "< 0.1 %";
  return p > 0.99 ? "> 99 %" : `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`;
}

// An address as a link, if it is one of the web; the server has checked it too.
export function sourceLink(address) {
  const url = address && URL.canParse(address) ? new URL(address) : null;
  if (!url || !["http:", "https:"].includes(url.protocol) || url.username || url.password) return null;
  const link = make("a", "source", url.hostname);
  link.href = url.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  link.title = "Where the picture came from";
  return link;
}

function card(result, loading, answer) {
  const item = make("li", "card");
  const caption = result.captions[0] ?? "";
  item.setAttribute("aria-label", `${result.rank}. ${caption || result.key}`);
  if (result.picture) {
    const link = make("a", "frame");
    link.href = `${result.picture}/large`;
    link.target = "_blank";
    link.rel = "noopener";
    const image = make("img");
    link.append(image);
    loading.load(image, result.picture, caption || result.key);
    item.append(link);
  }
  const told = make("div", "told");
  const place = make("div", "place", `${result.rank}.`);
  if (result.match !== null) place.append(make("span", "match", `match ${chance(result.match)}, ${shorten(result.match * answer.gallery)} ×`));
  const numbers = make("div", "numbers");
  if (answer.more) numbers.append(make("span", "inclusion", `inclusion ${shorten(result.inclusion)}`));
  numbers.append(make("span", "distance", `distance ${shorten(result.distance)}`), make("span", "uncertainty", `uncertainty ${shorten(result.uncertainty)}`));
  const bar = make("div", "bar");
  const filled = make("div");
  const [low, high] = state.index.items;
  filled.style.width = `${Math.max(2, Math.min(100, (100 * (result.uncertainty - low)) / (high - low || 1)))}%`;
  bar.append(filled);
  bar.title = "uncertainty";
  told.append(place, numbers, bar, make("p", "captions", caption));
  if (result.captions.length > 1) {
    const more = make("details");
    more.append(make("summary", "", `${result.captions.length - 1} more`));
    for (const other of result.captions.slice(1)) more.append(make("p", "captions", other));
    told.append(more);
  }
  const last = make("div", "last");
  const like = state.index.kind === "text" && caption ? { texts: [caption] } : { likes: [`${state.index.identity}/${result.row}`] };
  const ask = (more) => () => document.dispatchEvent(new CustomEvent("like", { detail: { ...like, more } }));
  if (result.picture || like.texts) {
    last.append(button("quiet", "More like this", "", ask("")));
    if (state.index.general) last.append(button("quiet", "More general", "", ask("general")), button("quiet", "More specific", "", ask("specific")));
  }
  const source = sourceLink(result.url);
  if (source) last.append(source);
  told.append(make("p", "key", result.key), last);
  item.append(told);
  return item;
}

// ------------------------------------------------------------------------------------------------ the keys

// One card is a stop of the Tab key, with the links and buttons in it; the arrow keys go from card to card.
function choose(chosen) {
  for (const one of cards()) {
    one.tabIndex = one === chosen ? 0 : -1;
    for (const inner of one.querySelectorAll("a, button, summary")) inner.tabIndex = one.tabIndex;
  }
}

export function focusCard(place) {
  const one = cards()[Math.min(place, cards().length - 1)];
  if (one) one.focus();
  else focusQuery();
}

function move(event) {
  const all = cards();
  const from = all.indexOf(event.target.closest(".card"));
  if (from < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
  const columns = all.filter((one) => one.offsetTop === all[0].offsetTop).length;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -from, End: all.length - 1 - from };
  if (event.key === "Enter" && event.target === all[from]) all[from].querySelector("a.frame")?.click();
  if (!(event.key in steps)) return;
  event.preventDefault();
  const to = from + steps[event.key];
  if (to < 0 && event.key === "ArrowUp") focusQuery();
  else if (to >= 0 && to < all.length) all[to].focus();
}

export function watchKeys() {
  $("results").addEventListener("keydown", move);
  $("results").addEventListener("focusin", (event) => choose(event.target.closest(".card")));
  $("texts").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" || event.target.name !== "text" || !cards().length) return; // it sets a weight, too
    event.preventDefault();
    focusCard(0);
  });
}
