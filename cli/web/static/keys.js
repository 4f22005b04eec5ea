// Whose keys count, and the ceremonies that change it. Each change is a statement that is shown whole, signed by the keys
// themselves, and judged by the ring.

import { ask, send } from "./api.js";
import { button, el, notice, replace, trouble, visible } from "./dom.js";
import { checkCode, create, eventChallenge, hex, parsed, sign, unavailable } from "./signing.js";
import { span } from "./time.js";
import { fields } from "./values.js";

const STATES = { live: "good", quarantined: "bad", dead: "" };
let given = new AbortController(); // what the browser was asked to do with keys, to be given up when the person leaves
const FIRST = 2; // a ring is founded with one key to use and one to fall back on

export async function keys(stage) {
  const state = { ring: null, close: null };

  async function refresh() {
    const ring = await ask("/api/keys");
    if (state.close) return; // what somebody is in the middle of is not drawn over
    state.ring = ring;
    draw(stage, state, refresh);
  }
  await refresh();
  return {
    refresh,
    back: () => Boolean(state.close?.()),
    close: () => given.abort(),
  };
}

function draw(stage, state, refresh) {
  const { ring } = state;
  const open = (make) => {
    given = new AbortController();
    const close = (state.close = () => {
      given.abort();
      state.close = null;
      return refresh();
    });
    replace(stage, el("div", { class: "head" }, el("h1", null, "Keys")), make(close));
    window.scrollTo(0, 0);
    stage.querySelector("input, button")?.focus();
  };
  const add = button("Enrol a key", { class: "main" }, () => open((close) => enrol(ring, close)));
  replace(stage,
    el("div", { class: "head" }, el("h1", null, "Keys"), ring.founded && !ring.frozen ? el("div", { class: "side" }, add) : null),
    warnings(ring, open),
    ring.founded ? list(ring, open) : none(ring, open),
    ring.founded ? terms(ring) : null);
}

function warnings(ring, open) {
  const found = [];
  if (unavailable()) found.push(notice("bad", unavailable()));
  if (ring.frozen) found.push(notice("bad", el("strong", null, "The keyring is frozen. "), visible(ring.frozen), " Nothing irreversible starts. ", el("code", null, "amends keys recover")));
  if (!ring.here) found.push(notice("bad", "The keyring does not list this address, ", el("code", null, ring.origin), ": no key can sign here. Run ", el("code", null, "amends ui"), " on a port that it lists."));
  if (ring.recovery?.left_ms !== null && ring.recovery?.left_ms !== undefined) {
    const stop = button("Stop it", { class: "danger small" }, () => open((close) => ceremony(ring, "veto", {}, "Stop the recovery", close)));
    found.push(notice("bad", el("strong", null, "The recovery key wants to replace all keys. "), ring.recovery.left_ms ? `It may in ${span(ring.recovery.left_ms)}. ` : "It may now. ", "Whoever holds a live key and did not start this stops it. ", stop));
  }
  for (const need of ring.needs.filter((one) => one.kind === "key_quarantined")) found.push(notice("ask", "A key is in quarantine: ", visible(need.reason)));
  return found;
}

// ---- the list ----

function list(ring, open) {
  const row = (key) => el("tr", { "data-key": key.id, class: key.state === "dead" ? "dim" : null },
    el("td", null, el("strong", null, visible(key.label || key.kind)), el("div", { class: "dim" }, el("code", null, key.fingerprint))),
    el("td", null, visible(key.person), el("div", { class: "dim" }, key.roles.join(", "))),
    el("td", { class: "wide" }, key.level, el("div", { class: "dim" }, KINDS[key.kind] || key.kind, key.alg === -7 ? ", ES256" : "")),
    el("td", null, el("span", { class: `tag ${STATES[key.state]}` }, key.state)),
    el("td", null, actions(ring, key, open)));
  return el("div", { class: "card" }, el("table", null,
    el("thead", null, el("tr", null, el("th", null, "Key"), el("th", null, "Whose"), el("th", { class: "wide" }, "Evidence"), el("th", null, "State"), el("th", null, ""))),
    el("tbody", null, ring.keys.map(row))));
}

const KINDS = { webauthn: "passkey or security key", ssh: "SSH key in a file", "ssh-sk": "SSH security key", raw: "key in a file" };

function actions(ring, key, open) {
  if (key.state === "dead" || ring.frozen) return null;
  const end = button("Revoke", { class: "small danger" }, () => open((close) => revoke(ring, key, close)));
  const free = button("Release", { class: "small" }, () => open((close) => ceremony(ring, "release", { credential: key.id }, `Let ${key.label || key.id} out of quarantine`, close)));
  return el("div", { class: "side" }, key.state === "quarantined" ? free : null, " ", end);
}

function terms(ring) {
  const { settings, recovery } = ring;
  const said = [
    ["Keyring", el("code", null, ring.code)],
    ["Recovery key", el("code", null, recovery?.fingerprint || "none"), ` after ${settings.delay_ms / 3600000} h`],
    ["To add a key", settings.quorum === 1 ? "one admin" : `${settings.quorum} admins`],
    ["Algorithms", settings.algs.map((alg) => (alg === -8 ? "Ed25519" : "ES256")).join(", ")],
    ["Addresses", settings.origins.map((origin) => el("div", null, el("code", null, origin)))],
    ["By the terminal", el("code", null, "amends keys rotate"), ", ", el("code", null, "recover"), ", ", el("code", null, "sign"), ", SSH keys and keys in files"],
  ];
  return el("section", { class: "card" }, el("h2", null, "What this ring allows"), el("div", { class: "body" }, el("dl", { class: "values" }, said.map(([name, ...shown]) => [el("dt", null, name), el("dd", null, shown)]))));
}

function none(ring, open) {
  return el("div", { class: "card empty" },
    el("strong", null, "There is no keyring on this device."),
    el("p", null, "Until there is, a name that somebody types decides. A keyring needs two keys on different devices: one to use, and one to fall back on."),
    el("p", null, button("Found a keyring", { class: "main", id: "found" }, () => open((close) => found(ring, close)))));
}

// ---- making keys ----

function field(word, input, hint) {
  return el("label", null, word, hint ? el("span", { class: "hint" }, hint) : null, input);
}

async function make(whose, besides = []) {
  const { person, es256 } = whose;
  const options = await send("/api/keys/options", { person, es256, besides });
  const answer = await create(options, given.signal);
  return send("/api/keys/made", { ...whose, answer, challenge: options.challenge });
}

function panel(title, ...shown) {
  return el("section", { class: "card" }, el("h2", null, title), el("div", { class: "body" }, ...shown));
}

function form(fieldsShown, word, act, close, wide = "") {
  const said = el("div", { "aria-live": "assertive" });
  const go = el("button", { type: "submit", class: "main" }, word);
  const made = el("form", { class: `form ${wide}`, novalidate: true }, fieldsShown, said, el("div", { class: "actions" }, go, button("Cancel", {}, close)));
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    replace(said);
    try {
      await act((...shown) => replace(said, notice("", ...shown)));
    } catch (error) {
      replace(said, trouble(error));
    } finally {
      go.disabled = false;
    }
  });
  return made;
}

function found(ring, close) {
  const place = el("div");
  const person = el("input", { name: "person", autocomplete: "name", maxlength: 100, required: true });
  const labels = ["Main key", "Backup key"].map((word) => el("input", { name: "label", maxlength: 60, value: word }));
  const es256 = el("input", { type: "checkbox", name: "es256", disabled: !ring.es256 });
  const made = [];

  async function act(tell) {
    while (made.length < FIRST) {
      const at = made.length;
      tell(`Key ${at + 1} of ${FIRST}, `, visible(labels[at].value), ": ", at ? "take out the first, put in the other, and touch it." : "put it in, and touch it when it blinks.");
      made.push(await make({ person: person.value, roles: ["approver", "admin"], label: labels[at].value, es256: es256.checked }, made.map((key) => key.id)));
      [person, es256, labels[at]].forEach((one) => (one.disabled = true));
    }
    await writeDown(place, made.map((key) => key.id), es256.checked, close);
  }

  replace(place, panel("Found a keyring", form([
    field("Whose keys these are", person, "A person's name, as approvals will show it."),
    el("div", { class: "row" }, field("Call the first", labels[0]), field("Call the second", labels[1])),
    el("label", null, es256, "Allow ES256 as well, as passkeys of phones and laptops need", ring.es256 ? null : el("span", { class: "hint" }, "This device cannot check it: install ", el("code", null, "amends[passkeys]"))),
  ], "Make the two keys", act, close)));
  return place;
}

async function writeDown(place, ids, es256, close) {
  const recovery = await send("/api/keys/recovery", {});
  const sure = el("input", { type: "checkbox", name: "written" });
  const act = async () => {
    if (!sure.checked) throw Object.assign(new Error("Write it down first."), { next: "" });
    await confirm(place, await send("/api/keys/found", { keys: ids, recovery: recovery.public, es256 }), "Found the keyring", close);
  };
  replace(place, panel("The recovery key", form([
    el("p", null, "For the day when all keys are lost. Write it down now, and keep it away from this machine: it is shown once, and stored nowhere."),
    el("p", { class: "paper" }, recovery.paper),
    el("p", { class: "dim" }, "Fingerprint ", el("code", null, recovery.fingerprint)),
    el("label", null, sure, "I have written it down"),
  ], "Go on", act, close)));
}

function enrol(ring, close) {
  const place = el("div");
  const person = el("input", { name: "person", autocomplete: "name", maxlength: 100 });
  const label = el("input", { name: "label", maxlength: 60 });
  const roles = ["approver", "admin"].map((role, at) => el("input", { type: "checkbox", name: role, checked: at === 0 }));
  async function act(tell) {
    tell("Put in the new key, and touch it when it blinks.");
    const chosen = ["approver", "admin"].filter((_, at) => roles[at].checked);
    const made = await make({ person: person.value, roles: chosen, label: label.value, es256: ring.settings.algs.includes(-7) });
    await confirm(place, await send("/api/keys/add", { key: made.id }), `Enrol ${made.label || "the key"} of ${made.person}`, close);
  }
  replace(place, panel("Enrol a key", form([
    el("div", { class: "row" }, field("Whose key it is", person), field("What to call it", label)),
    el("fieldset", null, el("legend", null, "What it may do"), el("label", null, roles[0], "approve"), el("label", null, roles[1], "change the keyring (admin)")),
  ], "Make the key", act, close)));
  return place;
}

function revoke(ring, key, close) {
  const place = el("div");
  const reason = el("input", { name: "reason", maxlength: 200 });
  const title = `Revoke ${key.label || key.kind} of ${key.person}`;
  const act = async () => confirm(place, await send("/api/keys/revoke", { credential: key.id, reason: reason.value.trim() }), title, close);
  replace(place, panel(title, form([
    el("p", null, "From then on it counts for nothing, also for what was approved with it and not sent yet. No key comes back."),
    field("Why", reason, "For those who read it later."),
  ], "Go on", act, close)));
  return place;
}

function ceremony(ring, step, body, title, close) {
  const place = el("div");
  send(`/api/keys/${step}`, body).then((told) => confirm(place, told, title, close)).catch((error) => replace(place, trouble(error), button("Close", {}, close)));
  return place;
}

// ---- signing a statement ----

async function confirm(place, told, title, close) {
  const statement = parsed(told.event);
  const code = checkCode(await hex(told.event));
  if (code !== told.code) throw new Error("The server shows another statement than the one that it asks about.");
  const ring = await ask("/api/keys");
  const { rp_id: rpId } = statement.settings || ring.settings;
  const meant = ring.keys.find((key) => key.id === statement.credential);
  const proofs = [];

  async function act(tell) {
    const have = new Set(proofs.map((proof) => proof.credential));
    for (const part of told.parts.filter((one) => one.must && !have.has(one.id))) {
      tell("Touch ", el("strong", null, visible(part.label || part.kind)), part.role === "new" ? ", the new key, when it blinks: it signs for itself." : " when it blinks.");
      proofs.push(await sign(await eventChallenge(told.event), [part.id], rpId, 60000, given.signal));
    }
    let lacking = (await send("/api/keys/missing", { event: told.event, proofs })).missing;
    if (ADMINS.includes(lacking)) {
      const others = told.parts.filter((one) => !one.must && one.here && !proofs.some((proof) => proof.credential === one.id));
      if (!others.length) throw Object.assign(new Error("No other key that may sign this does so in a browser."), { next: "At the terminal: `amends keys --help`." });
      tell("Touch a key of an admin: ", others.filter((one) => one.role === "admin").map((one, at) => [at ? ", " : "", el("strong", null, visible(one.label || one.kind)), " (", visible(one.person), ")"]));
      proofs.push(await sign(await eventChallenge(told.event), others.map((one) => one.id), rpId, 60000, given.signal));
      lacking = (await send("/api/keys/missing", { event: told.event, proofs })).missing;
      if (ADMINS.includes(lacking)) return tell("One more admin has to sign. Go on with their key.");
    }
    const receipt = await send("/api/keys/submit", { event: told.event, proofs });
    replace(place, notice("good", el("strong", null, `${title}: done. `), `Record ${receipt.seq}; the keyring is now `, el("code", null, receipt.code), ". ", statement.kind === "founded" ? "Write down the fingerprints: nothing else vouches for this moment." : "", " ", button("Close", { class: "small" }, close)));
  }

  replace(place, panel(title, form([
    el("p", { class: "dim" }, "This is what the keys sign, whole."),
    el("div", null, fields(statement)),
    meant ? el("p", null, "That credential is ", el("strong", null, visible(meant.label || meant.kind)), " of ", visible(meant.person), ", fingerprint ", el("code", null, meant.fingerprint), ".") : null,
    el("p", null, "Check code ", el("code", { id: "code" }, code)),
  ], "Sign", act, close, "wide")));
}

const ADMINS = ["not_admin", "quorum_missing", "not_live"];
