// Everything that needs a person, oldest first; live. An approval opens its view, anything else its saga.

import { ask } from "./api.js";
import { el, replace, visible } from "./dom.js";
import { ago, span } from "./time.js";
import { called } from "./values.js";

const KINDS = { approval: "approval", resume: "to be run again" };

export async function inbox(stage) {
  const list = el("div");
  let timer;
  replace(stage, el("div", { class: "head" }, el("h1", null, "Inbox")), list);

  async function refresh() {
    draw(list, await ask("/api/inbox"));
    clearInterval(timer);
    timer = setInterval(() => tick(list), 1000);
  }
  await refresh();
  return { refresh, close: () => clearInterval(timer) };
}

function draw(list, { items, now }) {
  const held = document.activeElement?.dataset?.item;
  if (!items.length) {
    return replace(list, el("div", { class: "card empty" }, el("strong", null, "Nothing needs you."), "What does will appear here by itself."));
  }
  const read = performance.now();
  replace(list, el("ul", { class: "card list" }, items.map((item) => row(item, read, Date.parse(now)))));
  tick(list);
  list.querySelector(`a[data-item="${CSS.escape(held || "")}"]`)?.focus();
}

function row(item, read, now) {
  const asked = item.approval;
  const href = asked ? `/approve/${item.id}` : item.saga ? `/sagas/${encodeURIComponent(item.saga)}` : "/keys";
  const what = item.tool ? called(item.tool, item.args) : item.saga || "Keyring";
  const more = asked
    ? [asked.requester ? [visible(asked.requester), " asks", asked.on_behalf_of ? [" for ", visible(asked.on_behalf_of)] : null, ", "] : null, "saga ", visible(item.saga)]
    : [visible(item.reason), item.saga ? [" Saga ", visible(item.saga)] : null];
  const side = asked
    ? [
        el("span", { class: "left", "data-until": read + asked.left_ms }, ""),
        el("span", null, asked.need > 1 ? `${asked.have} of ${asked.need} have said yes` : "waits for a yes or no"),
      ]
    : [el("span", { class: "tag bad" }, visible(KINDS[item.kind] || item.kind.replaceAll("_", " "))), el("span", null, ago(item.since, now))];
  return el("li", null, el("a", { href, "data-item": item.id }, el("span", { class: "what" }, visible(what)), el("span", { class: "more" }, more), el("span", { class: "side" }, side)));
}

function tick(list) {
  for (const left of list.querySelectorAll("[data-until]")) {
    const ms = left.dataset.until - performance.now();
    left.textContent = ms > 0 ? `${span(ms)} left` : "expired";
    left.classList.toggle("soon", ms < 60000);
  }
}
