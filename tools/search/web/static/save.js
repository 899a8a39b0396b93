// The results that are shown, as files.

import { $, state } from "./state.js";

const COLUMNS = ["rank", "match", "distance", "uncertainty", "inclusion", "key", "captions", "url", "row"];

// A text for a table. Programs run cells that begin with = + - @ as formulas, also those that begin behind a semicolon
// where that separates cells; an apostrophe in front makes them text.
const harmless = (text) => text.replace(/[\t\r\n]/g, " ").replace(/(^|;)(\s*[=+\-@\uff1d\uff0b\uff0d\uff20])/g, "$1'$2");
const cell = (value) => (typeof value === "number" ? String(value) : `"${harmless(value ?? "").replaceAll('"', '""')}"`);

export function toCsv(results) {
  const rows = results.map((one) => ({ ...one, captions: one.captions.join(" | ") }));
  const lines = [COLUMNS.join(","), ...rows.map((row) => COLUMNS.map((name) => cell(row[name])).join(","))];
  return `\ufeff${lines.join("\r\n")}\r\n`; // the first character tells Excel that it is UTF-8
}

function save(name, type, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export function watchSaving() {
  $("save-csv").addEventListener("click", () => save("search.csv", "text/csv", toCsv(state.answer.results)));
  $("save-json").addEventListener("click", () => save("search.json", "application/json", `${JSON.stringify(state.answer, null, 1)}\n`));
}
