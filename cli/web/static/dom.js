// Elements and text. Every text that came from an agent or from a log goes through `visible`: what a person could not
// see, or what would turn the order of the letters, stands there as an escape. Nothing is ever parsed as HTML.

export function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Control, format (bidirectional ones among them), surrogate, private and unassigned characters, separators, every space
// that is not the plain one, and letters and marks that show as nothing: the ones of runtime/plain.py.
const HARMFUL = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000\u034f\u115f-\u1160\u17b4-\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\u{16fe4}\u{1d159}\u{e0100}-\u{e01ef}]/u;
const SHORT = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

export function escaped(letter) {
  const code = letter.codePointAt(0);
  if (SHORT[letter]) return SHORT[letter];
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
}

// A text for the eye, as nodes; a line break is shown as an escape and breaks the line as well.
export function visible(text) {
  const nodes = [];
  let plain = "";
  for (const letter of String(text)) {
    if (!HARMFUL.test(letter)) {
      plain += letter;
      continue;
    }
    if (plain) nodes.push(plain);
    plain = letter === "\n" ? "\n" : "";
    nodes.push(el("span", { class: "escape", title: "a character that cannot be seen" }, escaped(letter)));
  }
  if (plain) nodes.push(plain);
  return nodes;
}

// Letters of two alphabets in one word are the trick of look-alike names.
const ALPHABETS = [/\p{Script=Latin}/u, /\p{Script=Cyrillic}/u, /\p{Script=Greek}/u, /\p{Script=Armenian}/u, /\p{Script=Cherokee}/u];

export function mixed(text) {
  return String(text).split(/[^\p{L}\p{M}]+/u).some((word) => ALPHABETS.filter((one) => one.test(word)).length > 1);
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

export function button(text, attributes, act) {
  return el("button", { type: "button", ...attributes, onclick: act }, text);
}

export function notice(kind, ...children) {
  return el("div", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" }, ...children);
}

export function trouble(error) {
  return notice("bad", el("strong", null, visible(error.message)), error.next ? [" ", ...commands(error.next)] : null);
}

// A sentence in which what stands between backticks is a command.
export function commands(text) {
  return String(text).split("`").map((part, place) => (place % 2 ? el("code", null, visible(part)) : visible(part)));
}
