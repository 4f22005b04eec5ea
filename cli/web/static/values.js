// Values as the log has them, for the eye: every one whole, nothing cut, what JSON lacks by its own word.

import { el, mixed, visible } from "./dom.js";

const LONG = 64; // characters; longer ones are read as prose

const WORDS = ["decimal", "int", "float", "datetime", "date", "uuid"];
const LONG_TOO = [...WORDS, "tuple", "set"]; // what is too large to be shown stands inside their tag

function text(value) {
  const long = value.length > LONG || value.includes("\n");
  const shown = [el("span", { class: long ? "text long" : "text" }, value === "" ? el("em", null, "empty text") : visible(value))];
  if (mixed(value)) shown.push(el("span", { class: "tag ask" }, "letters of two alphabets"));
  return shown;
}

function tagged(one) {
  const { $: tag, v } = one;
  if (LONG_TOO.includes(tag) && v && v.$ === "large") return large(v);
  if (WORDS.includes(tag)) return [el("span", { class: "number" }, visible(v))];
  if (tag === "bytes") return [el("span", { class: "dim" }, "bytes, base64 "), el("span", { class: "text" }, visible(v))];
  if (tag === "secret") return [el("span", { class: "dim" }, "a secret, not kept (fingerprint "), visible(v), ")"];
  if (tag === "manifest" || tag === "large") return large(one);
  if (tag === "escaped") return [el("span", { class: "text" }, visible(v)), el("span", { class: "tag ask" }, "spelled out: it looks like another text")];
  if (tag === "pairs") return [el("dl", { class: "values" }, v.map(([name, held]) => [el("dt", null, value(name)), el("dd", null, value(held))]))];
  if (tag === "dict") return fields(v);
  if (tag === "record") return [el("span", { class: "dim" }, visible(one.t)), fields(v)];
  if (tag === "tuple" || tag === "set") return list(v);
  return fields(one);
}

function large(one) {
  return [
    el("span", { class: "dim" }, `${one.size} bytes, SHA-256 `),
    el("span", { class: "text" }, visible(one.sha256)),
  ];
}

function list(values) {
  if (!values.length) return [el("em", null, "empty list")];
  return [el("ol", { class: "values" }, values.map((one) => el("li", null, value(one))))];
}

export function fields(values) {
  const names = Object.keys(values || {});
  if (!names.length) return [el("em", null, "nothing")];
  return [
    el("dl", { class: "values" }, names.map((name) => [el("dt", null, visible(name)), el("dd", null, value(values[name]))])),
  ];
}

export function value(one) {
  if (one === null || one === undefined) return [el("em", null, "nothing")];
  if (typeof one === "string") return text(one);
  if (typeof one === "number") return [el("span", { class: "number" }, String(one))];
  if (typeof one === "boolean") return [el("span", { class: "number" }, one ? "yes" : "no")];
  if (Array.isArray(one)) return list(one);
  return typeof one.$ === "string" ? tagged(one) : fields(one);
}

// A value in one line of plain text, for lists.
export function brief(one, width = 60) {
  const said = flat(one);
  return said.length > width ? `${said.slice(0, width - 1)}…` : said;
}

function flat(one) {
  if (one === null || one === undefined) return "nothing";
  if (typeof one === "string") return JSON.stringify(one);
  if (Array.isArray(one)) return `[${one.map(flat).join(", ")}]`;
  if (typeof one !== "object") return String(one);
  if (one.$ === "secret") return "a secret";
  if (one.$ === "manifest" || one.$ === "large") return `${one.size} bytes`;
  if (typeof one.$ === "string") return typeof one.v === "object" ? flat(one.v) : String(one.v);
  return `{${Object.keys(one).map((name) => `${name}: ${flat(one[name])}`).join(", ")}}`;
}

export function called(tool, args) {
  const shown = args && args.$ === "dict" ? args.v : args || {};
  return `${tool}(${Object.keys(shown).map((name) => `${name}=${brief(shown[name], 40)}`).join(", ")})`;
}
