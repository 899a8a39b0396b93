// The query in the page's address, behind the #, so that a reload and a shared link give the same results, whatever its
// length, and no log of a server has it. An address holds no uploaded pictures, only their number; while the page is open,
// its history keeps them.

import { fitsNow, limits, moreNow } from "./limits.js";
import { texts } from "./query.js";
import { state } from "./state.js";
import { weights } from "./weights.js";

const kept = new Map(); // number of an entry of the history -> the visitor's own pictures of its query

export const settings = () => new URLSearchParams(location.hash.slice(1));
export const keptFiles = () => kept.get(history.state?.entry) ?? [];

function describe(wanted, page) {
  const found = new URLSearchParams();
  if (state.about.indexes.length > 1) found.append("index", state.index.name);
  for (const text of texts()) found.append("text", text.trim());
  for (const like of state.likes) found.append("like", like);
  if (state.files.length) found.append("pictures", String(state.files.length));
  for (const weight of weights()) found.append("weight", String(weight));
  if (state.index.fits && fitsNow() !== state.index.fits.own) found.append("fits", fitsNow() ? "yes" : "no");
  if (moreNow()) found.append("more", moreNow());
  if (wanted !== page) found.append("top", String(wanted));
  for (const [name, limit] of Object.entries(limits())) found.append(name, String(limit));
  return `#${found}`;
}

// Write the query into the address; as a new entry of the history unless it is only longer, or the same.
export function keep(wanted, page, longer) {
  const address = describe(wanted, page);
  const same = address === location.hash && keptFiles().every((file, i) => file === state.files[i]);
  const entry = longer || same ? history.state?.entry ?? 0 : Date.now();
  kept.set(entry, state.files);
  history[longer || same ? "replaceState" : "pushState"]({ entry }, "", address);
}
