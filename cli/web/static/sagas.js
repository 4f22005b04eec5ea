// What has run on this device, and one saga's steps and story.

import { ask } from "./api.js";
import { button, commands, el, replace, visible } from "./dom.js";
import { ago, moment } from "./time.js";
import { value } from "./values.js";

const STYLE = {
  committed: "good", compensated: "good", done: "good", accepted: "good", waiting: "ask", unwinding: "ask", suspended: "ask",
  unknown: "ask", intended: "ask", interrupted: "bad", escalated: "bad", orphaned: "bad", compensation_failed: "bad",
  quarantined: "bad",
};

function tag(word) {
  return el("span", { class: `tag ${STYLE[word] || ""}` }, word.replaceAll("_", " "));
}

export async function sagas(stage) {
  let limit = 50;
  const list = el("div");
  replace(stage, el("div", { class: "head" }, el("h1", null, "Sagas")), list);

  async function refresh() {
    draw(await ask(`/api/sagas?limit=${limit}`));
  }

  function draw({ sagas: rows, more, most, now }) {
    const held = document.activeElement?.dataset?.item;
    if (!rows.length) return replace(list, el("div", { class: "card empty" }, el("strong", null, "No saga has run on this device."), "An agent's first one will appear here."));
    const older = more && limit < most ? el("p", { class: "head" }, button("Show older ones", {}, () => ((limit = most), refresh()))) : null;
    const rest = more && limit >= most ? el("p", { class: "dim" }, "Older ones: ", el("code", null, "amends ps --limit 0")) : null;
    replace(list, el("ul", { class: "card list" }, rows.map((one) => row(one, Date.parse(now)))), older || rest);
    list.querySelector(`a[data-item="${CSS.escape(held || "")}"]`)?.focus();
  }
  await refresh();
  return { refresh, close: () => {} };
}

function row(one, now) {
  const steps = `${one.steps} ${one.steps === 1 ? "step" : "steps"}`;
  const standing = one.standing ? el("span", { class: "bad" }, `, ${one.standing} standing`) : null;
  return el("li", null, el("a", { href: `/sagas/${encodeURIComponent(one.saga)}`, "data-item": one.id },
    el("span", { class: "what" }, visible(one.saga)),
    el("span", { class: "more" }, one.name !== one.saga ? [visible(one.name), ", "] : null, steps, standing),
    el("span", { class: "side" }, tag(one.outcome), el("span", null, ago(one.started_at, now)))));
}

export async function saga(stage, [name]) {
  async function refresh() {
    draw(stage, await ask(`/api/sagas/${encodeURIComponent(name)}`));
  }
  await refresh();
  return { refresh, close: () => {} };
}

function draw(stage, one) {
  replace(stage,
    el("a", { class: "back", href: "/sagas" }, "← Sagas"),
    el("div", { class: "head" }, el("h1", null, visible(one.saga)), tag(one.outcome), one.clean ? el("span", { class: "dim" }, "nothing stands unaccounted for") : null),
    one.cause ? el("div", { class: "notice" }, "Undone because: ", visible(one.cause)) : null,
    one.needs.map(need),
    el("div", { class: "card" }, el("h2", null, "Steps"), one.steps.length ? one.steps.map(step) : el("div", { class: "body dim" }, "none yet")),
    el("div", { class: "card" }, el("h2", null, "Story"), el("div", { class: "body story" }, one.story.map(told))),
    el("p", { class: "dim" }, `Began ${moment(one.started_at)}`, one.ended_at ? `, ended ${moment(one.ended_at)}` : "", ". ", el("code", null, visible(one.id))));
}

function need(one) {
  const act = one.kind === "approval" ? [" ", el("a", { href: `/approve/${one.id}` }, "Decide")] : [" ", one.commands.map((line) => [el("code", null, visible(line)), " "])];
  return el("div", { class: "notice ask" }, visible(one.reason), act);
}

function told(line) {
  return [el("time", { datetime: line.at }, line.at.slice(11, 23)), el("span", null, line.place ? [el("span", { class: "dim" }, visible(line.place), ": ") ] : null, visible(line.said))];
}

function step(one) {
  const undo = one.compensation;
  return el("div", { class: "body step" },
    el("div", { class: "head" }, el("span", { class: "dim" }, String(one.step)), el("strong", null, visible(one.tool)), tag(one.state), el("span", { class: "dim" }, one.semantics)),
    el("div", { class: "parts" },
      part("Arguments", value(one.args)),
      one.result === null ? null : part("Result", value(one.result)),
      one.error ? part("Error", value(one.error)) : null,
      part("What undoes it", undo ? inverse(undo) : el("em", null, "nothing was declared")),
      part("What decided", el("ul", { class: "plain" }, one.reasons.map((line) => el("li", { class: "dim" }, visible(line)))))));
}

function part(title, ...shown) {
  return el("div", null, el("h3", null, title), el("div", null, shown));
}

function inverse(undo) {
  const who = undo.handler === "human" ? "a person" : undo.handler || "a function that only its process had";
  const said = [el("span", { class: "mono" }, visible(who)), " ", el("span", { class: "tag" }, undo.state.replaceAll("_", " "))];
  if (undo.description) said.push(" ", visible(undo.description));
  if (undo.kwargs && Object.keys(undo.kwargs).length) said.push(value(undo.kwargs));
  return said;
}
