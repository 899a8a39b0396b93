// The parts of a query: texts, the visitor's own pictures (chosen, dropped or pasted), and results.

import { $, button, make, say, state } from "./state.js";
import { awaitWeights, nextAwaited, showWeights, weighing } from "./weights.js";

const changed = () => {
  $("not-kept").hidden = !state.files.length;
  showWeights();
  document.dispatchEvent(new Event("parts"));
};

export const texts = () => [...$("texts").querySelectorAll("input[name=text]")].map((input) => input.value).filter((text) => text.trim());
export const kindsNow = () => [...texts().map(() => "text"), ...state.files.map(() => "image"), ...state.likes.map(() => "image")];
export const focusQuery = () => $("texts").querySelector("input").focus();

export function addText(value = "", weight = 1) {
  const first = !$("texts").children.length;
  const row = make("div", "part");
  const input = make("input");
  input.type = "text";
  input.name = "text";
  input.maxLength = state.about.max_text;
  input.placeholder = first ? "What are you looking for?" : "… and also";
  input.setAttribute("aria-label", first ? "Query" : "Further text");
  input.value = value;
  input.addEventListener("input", changed);
  row.append(input, weighing("text", weight, changed));
  if (!first) row.append(remover("text", () => row.remove()));
  $("texts").append(row);
  showWeights();
  return input;
}

function remover(what, remove) {
  return button("remove", "×", `Remove this ${what}`, () => {
    remove();
    focusQuery();
    changed();
  });
}

export const isTooLarge = (several) => several.reduce((sum, file) => sum + file.size, 0) > state.about.max_upload - 65536;
export const tooLarge = () =>
  `The upload is too large: the limit is ${Math.floor(state.about.max_upload / 1048576)} MiB. Choose a smaller image, or fewer parts.`;

function addPicture(kind, source, description, weight, remove) {
  const figure = make("figure", `given ${kind}`);
  const image = make("img");
  image.alt = description;
  image.src = source;
  figure.append(image, remover("image", () => {
    remove();
    if (source.startsWith("blob:")) URL.revokeObjectURL(source);
    figure.remove();
  }), weighing("image", weight, changed));
  $("images").append(figure);
}

export function addFiles(chosen) {
  for (const file of chosen) {
    if (isTooLarge([...state.files, file])) {
      say(tooLarge(), "problem");
      break;
    }
    state.files = [...state.files, file];
    addPicture("file", URL.createObjectURL(file), file.name, nextAwaited(), () => {
      state.files = state.files.filter((one) => one !== file);
    });
  }
  changed();
}

function addLike(like, weight) {
  state.likes = [...state.likes, like];
  addPicture("like", `/picture/${like}`, "A result", weight, () => {
    state.likes = state.likes.filter((one) => one !== like);
  });
}

// Replace the whole query. The weights are of the texts, of so many own pictures, which may have to be added again, and of
// the results, in this order.
export function setParts({ texts: written = [], files = [], likes = [], pictures = files.length, weights = [] }) {
  for (const image of $("images").querySelectorAll("img")) if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src);
  $("texts").replaceChildren();
  $("images").replaceChildren();
  state.files = state.likes = [];
  for (const [i, text] of (written.length ? written : [""]).entries()) addText(text, weights[i]);
  const before = written.length + pictures;
  for (const [i, like] of likes.entries()) if (/^\w{1,40}\/\d{1,15}$/.test(like)) addLike(like, weights[before + i]);
  awaitWeights(weights.slice(written.length, before));
  addFiles(files);
}

// Pictures that are dropped anywhere on the page, or pasted into it.
export function takePictures() {
  const given = (files) => [...files].filter((file) => file.type.startsWith("image/"));
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "copy";
    $("drop").hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) $("drop").hidden = true;
  });
  document.addEventListener("drop", (event) => {
    $("drop").hidden = true;
    if (!hasFiles(event)) return;
    event.preventDefault(); // a browser would open the file in place of the page
    const pictures = given(event.dataTransfer.files);
    if (pictures.length) addFiles(pictures);
    else say("What was dropped is not an image. Drop a JPEG, PNG or WebP file.", "problem");
  });
  document.addEventListener("paste", (event) => {
    const pictures = given(event.clipboardData.files);
    const text = event.target.matches?.("input") && event.clipboardData.types.includes("text/plain");
    if (!pictures.length || text) return; // some programs copy their texts as pictures too
    event.preventDefault();
    addFiles(pictures);
  });
  $("add-image").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => {
    addFiles($("file").files);
    $("file").value = ""; // the same file can be chosen again
  });
}
