// The frame: which page is shown, the keyboard, and what is live. A page is a function that draws itself into `main` and
// answers { refresh, close }: refresh is called when the log has grown, close when another page comes.

import { Refusal, ask, follow } from "./api.js";
import { approval } from "./approval.js";
import { el, notice, replace, trouble } from "./dom.js";
import { inbox } from "./inbox.js";
import { keys } from "./keys.js";
import { saga, sagas } from "./sagas.js";

const ROUTES = [
  [/^\/(?:inbox)?$/, "inbox", inbox],
  [/^\/approve\/([^/]+)$/, "inbox", approval],
  [/^\/keys$/, "keys", keys],
  [/^\/sagas$/, "sagas", sagas],
  [/^\/sagas\/(.+)$/, "sagas", saga],
];
const EVERY_MS = 400; // between two looks at what is shown, however fast the log grows

const main = document.getElementById("main");
let shown = { refresh: async () => {}, close: () => {} };
let visit = 0;

export async function go(path, { replacing = false } = {}) {
  history[replacing ? "replaceState" : "pushState"]({ depth: (history.state?.depth || 0) + (replacing ? 0 : 1) }, "", path);
  await show();
}

async function show() {
  const mine = ++visit;
  shown.close();
  document.body.className = "";
  const found = ROUTES.map(([path, name, page]) => ({ name, page, match: location.pathname.match(path) })).find((one) => one.match);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === found?.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!found) return replace(main, el("div", { class: "empty" }, el("strong", null, "There is no such page."), el("a", { href: "/" }, "To the inbox")));
  const stage = el("div", { class: "stage" });
  try {
    const made = await found.page(stage, found.match.slice(1).map(decodeURIComponent), { go, back });
    if (mine !== visit) return made.close();
    shown = made;
    replace(main, stage);
    window.scrollTo(0, 0);
    (document.querySelector("[data-first]") || main).focus({ preventScroll: true });
  } catch (error) {
    if (mine !== visit) return;
    shown = { refresh: show, close: () => {} };
    replace(main, lost(error));
  }
}

function lost(error) {
  if (error instanceof Refusal && error.status === 401) return out();
  return [el("a", { class: "back", href: "/" }, "← Inbox"), trouble(error)];
}

function out() {
  return notice("ask", "You are not in any more. Run ", el("code", null, "amends ui"), " again and open the link that it prints.");
}

function back() {
  if (history.state?.depth) history.back();
  else go(location.pathname.startsWith("/sagas/") ? "/sagas" : "/", { replacing: true });
}

// ---- live ----

let due = null;
let last = 0;

function grown() {
  if (due !== null) return;
  due = setTimeout(async () => {
    due = null;
    last = performance.now();
    try {
      await Promise.all([shown.refresh(), count()]);
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) replace(main, out());
      else state("trouble");
    }
  }, Math.max(0, last + EVERY_MS - performance.now()));
}

const WORDS = { live: "live", off: "not connected", out: "not in", trouble: "the log cannot be read" };

function state(word) {
  const live = document.getElementById("live");
  live.dataset.state = word;
  live.querySelector(".word").textContent = WORDS[word];
}

export async function count() {
  const badge = document.getElementById("count");
  const { waiting } = await ask("/api/inside");
  badge.textContent = waiting;
  badge.hidden = !waiting;
  document.title = waiting ? `(${waiting}) amends` : "amends";
}

const ear = new AbortController();
follow((name) => (name === "grown" ? grown() : state("trouble")), state, ear.signal);
addEventListener("pagehide", () => ear.abort());

// ---- keyboard and links ----

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/']");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || link.target) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});

addEventListener("popstate", show);

const PLACES = { i: "/", y: "/keys", s: "/sagas" };
let going = 0;

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented) {
    if (event.target.matches?.("input, textarea, select")) return event.target.blur();
    event.preventDefault();
    return shown.back?.() || back();
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, textarea, select")) return;
  if (performance.now() < going && PLACES[event.key]) {
    going = 0;
    return go(PLACES[event.key]);
  }
  if (event.key === "g") going = performance.now() + 1500;
  const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (by && move(by)) event.preventDefault();
});

function move(by) {
  const rows = [...main.querySelectorAll(".list a")];
  if (!rows.length) return false;
  const at = rows.indexOf(document.activeElement);
  const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + by, 0), rows.length - 1);
  rows[next].focus();
  return true;
}

if (!history.state) history.replaceState({ depth: 0 }, "");
show().then(count).catch(() => state("off"));
