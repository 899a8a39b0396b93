// What the modules of the page share, and small tools for its elements.
// Captions, keys, addresses and file names are untrusted: they reach the page only as textContent and attributes.

export const state = {
  about: null, // of the server: limits of a query, and its indexes
  index: null, // the one of them that is searched
  files: [], // the visitor's own pictures in the query
  likes: [], // results in the query, INDEX/ROW
  answer: null, // what is shown
};

export const $ = (id) => document.getElementById(id);

export function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

export function button(className, text, label, pressed) {
  const made = make("button", className, text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", pressed);
  return made;
}

export function say(text, kind = "") {
  $("status").textContent = text;
  $("status").className = kind;
}

export const shorten = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4 ? x.toPrecision(4) : x.toExponential(1));
export const percent = (share) => `${Math.floor(100 * share)} %`;
