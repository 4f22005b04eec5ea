// One request, drawn from the text that is signed and from nothing else, and a yes or a no to it. No has the focus, Enter
// never says yes, and at zero whatever was begun is given up.

import { Refusal, ask, send } from "./api.js";
import { button, el, mixed, notice, replace, trouble, visible } from "./dom.js";
import { canonical, checkCode, decisionChallenge, hex, parsed, sign, unavailable } from "./signing.js";
import { Countdown, span } from "./time.js";
import { fields, value } from "./values.js";

const NAME = "amends.name";
const SETTLED_MS = 500; // a key that is still held down from the page before decides nothing here

// What stands in the headline again, so that whoever reads only that has read no line that is not there once more.
const AMOUNTS = ["amount", "amount_minor", "total", "sum", "price", "quantity", "value", "currency"];
const PARTIES = ["to", "payee", "recipient", "recipients", "iban", "account", "customer", "email", "address", "path", "url"];

const ASKED = [
  ["requester", "Asked by"], ["on_behalf_of", "On behalf of"], ["account", "Account"], ["saga_name", "Saga"], ["step", "Step"],
  ["attempt", "Attempt"], ["effect", "Effect"], ["reasons", "Why you are asked"],
];
const TERMS = [
  ["quorum", "People needed"], ["level", "Evidence needed"], ["roles", "Role"], ["break_glass", "Glass may be broken"],
  ["created", "Asked at"], ["expires", "Open until"],
];
const MACHINE = [
  ["executor", "Device that acts"], ["ledger_id", "Its log"], ["saga", "Saga, as the log has it"],
  ["idempotency_key", "Idempotency key"], ["policy", "Policy"], ["keyring_head", "Keyring"], ["supersedes", "In place of"],
  ["nonce", "Nonce"], ["kind", "Kind"], ["v", "Version"],
];
const PLAIN = ["requester", "on_behalf_of", "saga_name", "level"];
const PLACED = new Set([...ASKED, ...TERMS, ...MACHINE].map(([name]) => name).concat("args", "tool"));
const EFFECTS = { irreversible: "irreversible: nothing takes it back", compensable: "compensable: an inverse offsets it" };

export async function approval(stage, [item]) {
  const bar = el("div", { id: "bar" });
  const state = { seen: null, busy: null, over: false, began: performance.now(), countdown: null };

  async function refresh() {
    const seen = await ask(`/api/review/${encodeURIComponent(item)}`);
    const request = parsed(seen.request);
    const digest = await hex(seen.request);
    if (digest !== seen.digest) throw new Error("The server shows another request than the one that it asks about.");
    if (state.busy || state.over) return; // what somebody is in the middle of is not drawn over
    if (same(state.seen, seen)) return state.countdown.set(seen.left_ms);
    state.seen = seen;
    replace(stage, view(request, seen));
    drawBar(bar, state, request, checkCode(digest));
  }

  await refresh();
  document.body.className = "deciding";
  document.body.append(bar);
  return {
    refresh,
    close: () => {
      state.over = true;
      state.busy?.abort();
      state.countdown?.stop();
      bar.remove();
      document.body.className = "";
    },
  };
}

function same(one, other) {
  return one && ["digest", "standing", "have"].every((name) => one[name] === other[name]) && one.voted.length === other.voted.length;
}

// ---- what is signed ----

function view(request, seen) {
  return [
    el("a", { class: "back", href: "/" }, "← Inbox"),
    el("div", { class: "headline" },
      el("h1", null, headline(request)),
      el("p", null, request.effect === "irreversible" ? "It cannot be undone. " : "", asks(request))),
    seen.remarks.length ? notice("ask", el("ul", { class: "warnings" }, seen.remarks.map((line) => el("li", null, visible(line))))) : null,
    voted(seen),
    el("div", { class: "columns" },
      el("div", null, given(request)),
      el("div", null, card("Who asks, and for what", table(request, ASKED)), card("What it takes", table(request, TERMS)))),
    card("Signed with it", [table(request, MACHINE), rest(request)]),
  ];
}

function headline(request) {
  const args = request.args?.$ === "dict" ? request.args.v : request.args || {};
  const named = [...AMOUNTS, ...PARTIES].filter((name) => name in args && plain(args[name]));
  const said = named.map((name, place) => [place ? ", " : ": ", visible(name), " ", el("span", { class: "text" }, visible(scalar(args[name])))]);
  return [el("span", { class: "tool" }, visible(request.tool)), said];
}

function plain(one) {
  return one !== null && (typeof one !== "object" || ["decimal", "int", "float"].includes(one.$));
}

function scalar(one) {
  return typeof one === "object" ? one.v : String(one);
}

function asks(request) {
  const who = request.requester ? [visible(request.requester), " asks"] : "An agent asks";
  return [who, request.on_behalf_of ? [", on behalf of ", visible(request.on_behalf_of)] : null, "."];
}

function voted(seen) {
  if (!seen.voted.length) return null;
  const said = { approve: "said yes", deny: "said no", break_glass: "broke the glass" };
  return notice(seen.voted.some((one) => one.out === "deny") ? "bad" : "good", seen.voted.map((one, place) => [place ? ", " : "", visible(one.by), ` ${said[one.out]} (${one.level})`]));
}

function given(request) {
  const shown = request.args?.$ ? value(request.args) : fields(request.args);
  return el("section", { class: "card prose", "aria-label": "Written by the agent" },
    el("h2", null, "What it is given. Written by the agent; nobody has checked it."),
    el("div", { class: "body" }, shown));
}

function card(title, shown) {
  return el("section", { class: "card" }, el("h2", null, title), el("div", { class: "body" }, shown));
}

function table(request, names) {
  const there = names.filter(([name]) => name in request && request[name] !== "" && !(Array.isArray(request[name]) && !request[name].length));
  return el("dl", { class: "values" }, there.map(([name, word]) => [el("dt", null, word), el("dd", null, shownAs(name, request[name]))]));
}

function shownAs(name, one) {
  if (name === "created" || name === "expires") return el("span", { class: "number" }, `${new Date(one).toISOString().slice(0, 19).replace("T", " ")} UTC`);
  if (name === "effect") return EFFECTS[one] || visible(one);
  if (name === "reasons" || name === "roles") return one.map((text) => el("div", null, visible(text)));
  if (PLAIN.includes(name) && !mixed(one)) return visible(one);
  return value(one);
}

// What a later version signs as well is shown too, under the name that it has there.
function rest(request) {
  const names = Object.keys(request).filter((name) => !PLACED.has(name));
  return names.length ? fields(Object.fromEntries(names.map((name) => [name, request[name]]))) : null;
}

// ---- the bar ----

function drawBar(bar, state, request, code) {
  const { seen } = state;
  const typed = bar.querySelector("input[name=name]")?.value;
  const focused = bar.contains(document.activeElement);
  const said = el("div", { class: "said", "aria-live": "assertive", hidden: true });
  const left = el("span", { id: "left" });
  const facts = [
    el("div", null, el("span", { class: "label" }, "Check code"), el("span", { id: "code", title: "The same on every screen that shows this request" }, code)),
    el("div", { class: "time" }, el("span", { class: "label" }, "Time left"), left),
  ];
  const tell = (...shown) => (replace(said, ...shown), (said.hidden = !said.firstChild));
  state.countdown?.stop();
  const open = seen.standing === "pending" || seen.takes_no;
  const controls = open ? decide(state, request, code, tell, typed) : { shown: [], end: () => {} };
  replace(bar, el("div", { class: "inner" }, facts, controls.shown, said));
  if (focused) bar.querySelector("[data-first]")?.focus({ preventScroll: true });
  if (!open) tell(notice("", ENDED[seen.standing] || seen.standing, " ", el("a", { href: "/" }, "To the inbox")));
  state.countdown = new Countdown(open ? seen.left_ms : 0, (ms) => {
    left.textContent = ms > 0 ? span(ms) : open || seen.standing === "expired" ? "expired" : "—";
    left.classList.toggle("soon", ms < 60000);
  }, () => {
    if (!open || state.over) return;
    state.busy?.abort();
    controls.end();
    tell(notice("bad", "Expired. Nothing was sent."));
  });
}

const ENDED = {
  approved: "It was approved.", denied: "It was denied.", expired: "It expired. Nothing was sent.", spent: "It was approved, and it was sent.",
  withdrawn: "It is not asked any more: its saga was given up.", superseded: "It was asked anew in another form; this one is not asked any more.",
};

function decide(state, request, code, tell, typed) {
  const { seen } = state;
  const top = ["quorum", "second-device"].includes(request.level);
  const name = el("input", { name: "name", autocomplete: "name", maxlength: 100, value: typed ?? localStorage.getItem(NAME) ?? "", placeholder: "Ada Lovelace" });
  const group = el("input", { name: "group", autocomplete: "off", maxlength: 4, placeholder: "0000" });
  const who = el("div", { class: "who" },
    top ? el("label", null, el("span", { class: "label" }, "First four of the code"), group) : null,
    el("label", null, el("span", { class: "label" }, seen.named ? "Your name" : top ? "Your name, to deny" : "Your name, to deny without key"), name));
  const no = button("Deny", { class: "danger", id: "deny", "data-first": true }, () => act("deny"));
  const yes = button(seen.named ? "Approve" : "Approve with key", { class: "main", id: "approve" }, () => act("approve"));
  yes.addEventListener("keydown", (event) => event.key === "Enter" && event.preventDefault());
  const why = seen.standing !== "pending" ? "It has its yes already." : !seen.named && !seen.credentials.length ? "no key" : "";
  yes.disabled = Boolean(why);
  if (why === "no key") queueMicrotask(() => tell(notice("ask", `It needs ${seen.evidence}, and none of the keys that can give it signs in a browser. `, seen.ways.map((way) => [el("code", null, visible(way)), " "]))));

  function missing(verdict, byKey) {
    if (verdict === "approve" && top && group.value.trim().toUpperCase() !== code.slice(0, 4)) return [group, "Type the first four characters of the check code, as another screen shows it."];
    if (!byKey && !name.value.trim()) return [name, "Say who you are."];
    return null;
  }

  async function act(verdict) {
    if (performance.now() - state.began < SETTLED_MS || state.busy || state.over) return;
    const byKey = verdict === "approve" ? !seen.named : seen.credentials.length > 0 && !name.value.trim();
    const lacking = missing(verdict, byKey);
    if (lacking) {
      tell(notice("ask", lacking[1]));
      return lacking[0].focus();
    }
    const busy = (state.busy = new AbortController());
    [no, yes, name, group].forEach((one) => (one.disabled = true));
    try {
      tell(byKey ? notice("", "Touch your key when it blinks.") : null);
      done(await decided(verdict, byKey, busy.signal));
    } catch (error) {
      const expired = state.countdown.left <= 0;
      tell(expired ? notice("bad", "Expired. Nothing was sent.") : trouble(error));
      if (expired || (error instanceof Refusal && OVER.includes(error.code))) return end();
      [no, yes, name, group].forEach((one) => (one.disabled = false));
      yes.disabled = Boolean(why);
    } finally {
      state.busy = null;
    }
  }

  async function decided(verdict, byKey, signal) {
    const body = { item: seen.item, digest: await hex(seen.request), verdict };
    if (byKey) {
      if (unavailable()) throw new Error(unavailable());
      const ids = seen.credentials.map((one) => one.id);
      body.proof = await sign(await decisionChallenge(canonical(request), verdict), ids, seen.rp_id, state.countdown.left, signal);
      if (signal.aborted) throw new Error("It was given up. Nothing was sent.");
    } else {
      body.by = name.value.trim();
      localStorage.setItem(NAME, body.by);
    }
    return send("/api/vote", body);
  }

  function done(receipt) {
    const verb = receipt.verdict === "deny" ? "denied" : "approved";
    const stuck = receipt.in_the_way || [];
    const now = { approved: stuck.length ? `That is recorded, and it does not go on now: ${visible(stuck.join(" "))}` : "It goes on.", denied: "It does not happen.", pending: `${receipt.have} of ${receipt.need} have said yes; it waits for the others.` };
    end();
    state.countdown.stop();
    document.getElementById("left").textContent = verb;
    tell(notice(receipt.verdict === "deny" ? "" : "good", el("strong", null, visible(receipt.by), ` ${verb} it.`), ` ${now[receipt.standing] || ""} Record ${receipt.seq}. `, el("a", { href: "/" }, "To the inbox")));
    document.querySelector("#bar a")?.focus();
  }

  function end() {
    state.over = true;
    who.remove();
    deciding.remove();
  }

  const deciding = el("div", { class: "decide" }, no, yes);
  return { shown: [who, deciding], end };
}

const OVER = ["decided", "expired", "withdrawn", "superseded", "already_voted"];
